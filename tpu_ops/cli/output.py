"""The only writer: results go to standard output, everything said on the way to standard error."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_ops.errors import OpsError


def any_text() -> None:
    """Let both outputs take any text: what their encoding lacks is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def give_up() -> None:
    """Let go of standard output, so that the interpreter does not complain of it again when it ends."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _result(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as exc:
        give_up()
        raise OpsError(
            f"the result cannot be written: {exc.strerror}",
            where="standard output",
            fix="see that the disk it goes to has space (df)",
        ) from exc


def _say(text: str) -> None:
    # What is said on the way is no reason to end what it is said of.
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        pass


def line(text: str = "") -> None:
    """Print one line of a result."""
    _result(text)


def info(text: str) -> None:
    """Say what is going on."""
    _say(text)


def warning(text: str) -> None:
    """Say what the user should know although the command goes on."""
    _say(f"warning: {text}")


def error(failure: OpsError) -> None:
    """Print the three parts of an error: what failed, where, what to do."""
    _say(f"error: {failure.what}")
    if failure.where:
        _say(f"  at:  {failure.where}")
    if failure.fix:
        _say(f"  fix: {failure.fix}")


def as_json(value: Any) -> None:
    """Print a result as JSON."""
    _result(json.dumps(value, indent=2, sort_keys=True))


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """Print rows as aligned columns under upper-case headings."""
    cells = [[column.upper().replace("_", " ") for column in columns]]
    cells += [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
