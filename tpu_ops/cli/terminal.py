"""Texts for a terminal: colours, its width, and table cells of several lines."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import TextIO


class Meaning(IntEnum):
    """The meaning of a text; the value is the ANSI code of its colour."""

    NONE = 0
    FAILED = 31
    OK = 32
    CHANGED = 33


#: The whole text of a table cell, or the name of a column of numbers -> meaning.
_MEANINGS = {
    **dict.fromkeys(("ok", "succeeded", "ready", "active", "as declared"), Meaning.OK),
    **dict.fromkeys(("changed", "recovering", "stopped", "suspended", "suspending"), Meaning.CHANGED),
    **dict.fromkeys(("failed", "unreachable", "refused", "lost", "gone", "preempted", "terminated"), Meaning.FAILED),
}
#: A column is not made narrower than this.
_NARROWEST = 12
#: Width of a terminal whose width is unknown.
_USUAL = 80


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def width(stream: TextIO) -> int:
    """Return the number of columns of a terminal."""
    if (given := os.environ.get("COLUMNS", "")).isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _USUAL
    except OSError:
        return _USUAL


def coloured(text: str, meaning: Meaning, stream: TextIO | None) -> str:
    """Return a text in the colour of its meaning, on a terminal and without NO_COLOR; else the text unchanged."""
    if not meaning or not text or os.environ.get("NO_COLOR") or not is_terminal(stream):
        return text
    return f"\x1b[{meaning}m{text}\x1b[0m"


def meaning(column: str, cell: str) -> Meaning:
    """Return the meaning of a table cell: that of its word, or, if it is a number above 0, that of its column."""
    word = column if cell.isdecimal() and cell != "0" else cell
    return _MEANINGS.get(word.lower(), Meaning.NONE)


def table(headings: Mapping[str, str], rows: Sequence[Mapping[str, str]], stream: TextIO | None) -> Iterator[str]:
    """Yield the lines of a table; on a terminal with colours, and with cells of several lines where a row is too wide.

    Args:
        headings: Column -> heading.
        rows: The rows, each with all columns.
        stream: Where the lines go.
    """
    limit = width(stream) if stream is not None and is_terminal(stream) else None
    columns = _widths([headings, *rows], limit)
    for row in (headings, *rows):
        cells = {column: _wrapped(row[column], size if limit else len(row[column])) for column, size in columns.items()}
        for number in range(max(map(len, cells.values()))):
            parts = {column: lines[number] if number < len(lines) else "" for column, lines in cells.items()}
            # The last text of a line is not padded.
            last = max((at for at, part in enumerate(parts.values()) if part), default=-1)
            shown = []
            for at, (column, part) in enumerate(list(parts.items())[: last + 1]):
                colour = Meaning.NONE if row is headings else meaning(column, row[column])
                shown.append(coloured(part, colour, stream) + " " * (columns[column] - len(part)) * (at < last))
            yield "  ".join(shown)


def _widths(rows: Sequence[Mapping[str, str]], limit: int | None) -> dict[str, int]:
    """Return column -> number of characters; the widest columns are narrowed until a row fits into the limit."""
    found = {column: max(len(row[column]) for row in rows) for column in rows[0]}
    while limit and sum(found.values()) + 2 * (len(found) - 1) > limit:
        widest = max(found, key=lambda column: found[column])
        if found[widest] <= _NARROWEST:
            break
        found[widest] -= 1
    return found


def _wrapped(cell: str, columns: int) -> list[str]:
    """Return a cell as lines of at most this many characters."""
    return textwrap.wrap(cell, columns, break_on_hyphens=False) if len(cell) > columns else [cell]
