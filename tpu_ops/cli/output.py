"""The only module that prints: results go to standard output, messages to standard error.

Messages contain foreign text: names, answers of a server, output of ssh. So this module prints each message and table
cell as one line without control characters. Other functions (`as_it_is`, `raw`, `piece`) print text for another
program, and the output of programs, unchanged. The output of programs is bytes, and is decoded only for a terminal.

On a terminal, texts with a meaning have colours, table cells are wrapped, and the last line can show the command's
progress until the next output. Pipes and files get plain text.

Callers write commands in messages in backticks and without the option `--fleet`. This module adds the option if the
command needs it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from tpu_ops import texts
from tpu_ops.cli import terminal
from tpu_ops.cli.commands import COMMANDS, WITHOUT_FLEET
from tpu_ops.cli.terminal import Meaning
from tpu_ops.errors import OpsError, printable

#: Has an entry once this command has printed a part of its result.
_written: list[bool] = []
#: The last printed line, if it is unfinished: whether it is on standard error, and the text that it begins with.
_unfinished: list[tuple[bool, str]] = []
#: A function that returns the option --fleet for commands in messages; the list is empty until the fleet is known.
_fleet: list[Callable[[], str]] = []
#: Has an entry while the last line of the terminal shows the progress of the command.
_progress: list[bool] = []
#: Moves the cursor to the beginning of its line, and erases the line.
_ERASE = "\r\x1b[K"
#: Held while a thread writes, since another thread draws the progress.
_turn = threading.RLock()


def begin() -> None:
    """Begin the output of a command; from now on, characters that an output cannot encode are escaped."""
    _written.clear()
    _unfinished.clear()
    _fleet.clear()
    _progress.clear()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def end() -> None:
    """End the output of a command: commands in later messages name no fleet until `name_fleet` is called again."""
    progress("")
    _fleet.clear()


def name_fleet(option: Callable[[], str]) -> None:
    """Set the function that returns the option --fleet for commands in messages; it is called at most once."""
    _fleet[:] = [functools.cache(option)]


def on_fleet(text: str) -> str:
    """Return a text with the option --fleet added to commands in backticks and to a command at the beginning.

    `info`, `warning` and `error` call this function themselves; texts in results need a call.
    """
    first, *rest = text.split(maxsplit=2) or [""]
    bare = first == "tpu_ops" and bool(rest) and rest[0] in COMMANDS
    return texts.on_fleet(text, _fleet[0], bare=bare, without=WITHOUT_FLEET) if _fleet else text


def give_up() -> None:
    """Redirect standard output to /dev/null after a write error, so that the interpreter's exit does not fail again."""
    if sys.stdout is not None:
        _to_nowhere(sys.stdout)


class _Said(logging.Handler):
    """Prints the log records of this package as messages."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log record as a warning or as information, according to its level."""
        say = warning if record.levelno >= logging.WARNING else info
        say(record.getMessage())


def listen() -> None:
    """Let the log records of this package be printed; further calls change nothing."""
    log = logging.getLogger("tpu_ops")
    if not any(isinstance(handler, _Said) for handler in log.handlers):
        log.addHandler(_Said())
        log.setLevel(logging.INFO)
        log.propagate = False


@contextlib.contextmanager
def read_or_not() -> Iterator[None]:
    """Ignore a closed pipe while a result is printed: the exit code and the messages are still useful."""
    try:
        yield
    except BrokenPipeError:
        give_up()


def _to_nowhere(stream: TextIO) -> None:
    handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, stream.fileno())
    os.close(handle)


def has_result() -> bool:
    """Return whether this command has printed a part of its result."""
    return bool(_written)


def _put(stream: TextIO, data: str | bytes) -> None:
    if _progress and sys.stderr is not None and stream.isatty():
        _progress.clear()
        sys.stderr.write(_ERASE)
        sys.stderr.flush()
    if isinstance(data, bytes) and not stream.isatty():
        stream.buffer.write(data)
    else:
        stream.write(data if isinstance(data, str) else data.decode(errors="replace"))
    # Flush at once, so that the output of several threads keeps its order.
    stream.flush()


def _finish_line(stream: TextIO) -> None:
    """End the unfinished line, if any, before other output goes to a stream.

    A line in a pipe or a file is not interrupted by output of the other stream, and so is not ended.
    """
    if _unfinished:
        interrupted = sys.stderr if _unfinished[0][0] else sys.stdout
        if interrupted is not None and (interrupted is stream or interrupted.isatty()):
            _unfinished.clear()
            _put(interrupted, "\n")


def _result(data: str | bytes, *, goes_on: bool = False) -> None:
    _written[:] = [True]
    if sys.stdout is None:
        raise OpsError(
            "the result cannot be written: the output is closed", where="standard output", fix="open it: no `>&-`"
        )
    try:
        with _turn:
            if not goes_on:
                _finish_line(sys.stdout)
            _put(sys.stdout, data)
    except BrokenPipeError:
        raise
    except OSError as exc:
        give_up()
        raise OpsError(
            f"the result cannot be written: {exc.strerror}",
            where="standard output",
            fix="check that the disk of the output file has space (df)",
        ) from exc


def _say(data: str | bytes, *, goes_on: bool = False) -> None:
    # A message that cannot be written must not end the command.
    if sys.stderr is None:
        return
    try:
        with _turn:
            if not goes_on:
                _finish_line(sys.stderr)
            _put(sys.stderr, data)
    except BrokenPipeError:
        # The reader has ended. The rest of the buffer must not cause another error when the interpreter exits.
        _to_nowhere(sys.stderr)
    except OSError:
        pass


def line(text: str = "", meaning: Meaning = Meaning.NONE) -> None:
    """Print one line of a result, in the colour of its meaning."""
    _result(terminal.coloured(printable(text), meaning, sys.stdout) + "\n")


def as_it_is(text: str) -> None:
    """Print text for another program as a result, unchanged."""
    _result(text + "\n")


def raw(data: bytes, *, aside: bool = False) -> None:
    """Print the output of a program byte by byte.

    On a terminal, bytes that are not UTF-8 are replaced, and a missing end of the last line is added.

    Args:
        data: The output.
        aside: Whether to print to standard error, because standard output is for other results.
    """
    stream = sys.stderr if aside else sys.stdout
    if stream is not None and stream.isatty() and not data.endswith(b"\n"):
        data += b"\n"
    (_say if aside else _result)(data)


def piece(lead: str, data: bytes, *, ended: bool, aside: bool = False) -> None:
    """Print a piece of a program's line after the line's previous piece, unless other output came between the two.

    Args:
        lead: The text that the line begins with; all pieces of a line have the same.
        data: The piece; an empty piece is ignored if other output has already ended the line.
        ended: Whether this is the last piece of the line.
        aside: Whether to print to standard error, because standard output is for other results.
    """
    goes_on = _unfinished == [(aside, lead)]
    if goes_on or data:
        whole = (b"" if goes_on else lead.encode()) + data + b"\n" * ended
        (_say if aside else _result)(whole, goes_on=goes_on)
        _unfinished[:] = [] if ended else [(aside, lead)]


def clear() -> None:
    """Clear the terminal, so that the next result replaces the previous one; do nothing if there is no terminal."""
    if sys.stdout is not None and sys.stdout.isatty():
        _result("\x1b[H\x1b[2J")


def info(text: str, meaning: Meaning = Meaning.NONE) -> None:
    """Print a message on the command's progress as one line, in the colour of its meaning."""
    _say(terminal.coloured(printable(on_fleet(text)), meaning, sys.stderr) + "\n")


def warning(text: str) -> None:
    """Print a warning: something that the user should know although the command continues."""
    _say(f"{terminal.coloured('warning:', Meaning.CHANGED, sys.stderr)} {printable(on_fleet(text))}\n")


def error(failure: OpsError) -> None:
    """Print the three parts of an error: what failed, where, what to do."""
    _say(f"{terminal.coloured('error:', Meaning.FAILED, sys.stderr)} {printable(on_fleet(failure.what))}\n")
    if failure.where:
        info(f"  at:  {failure.where}")
    for text in failure.details:
        info(f"    {text}")
    if failure.fix:
        info(f"  fix: {on_fleet(failure.fix)}")


def shows_progress() -> bool:
    """Return whether messages go to a terminal, so that `progress` has an effect."""
    return terminal.is_terminal(sys.stderr)


def progress(text: str) -> None:
    """Show a text in the last line of the terminal until the next output; do nothing if there is no terminal.

    Args:
        text: The text; it is cut at the width of the terminal. An empty text only removes the previous one.
    """
    if not shows_progress():
        return
    with _turn, contextlib.suppress(OSError):
        if _unfinished or not (text or _progress):
            return
        # A text as wide as the terminal would move the cursor to the next line.
        sys.stderr.write(_ERASE + printable(text)[: terminal.width(sys.stderr) - 1])
        sys.stderr.flush()
        _progress[:] = [True] if text else []


def at(moment: float) -> str:
    """Return a time (seconds since 1970) as text for users."""
    return texts.at(moment)


def as_json(value: Any) -> None:
    """Print a result as JSON."""
    _result(json.dumps(value, indent=2, sort_keys=True) + "\n")


def error_as_json(failure: OpsError) -> None:
    """Print an error as the JSON result of a command."""
    told = failure.to_json()
    as_json(told | {"error": told["error"] | {"problem": on_fleet(failure.what), "fix": on_fleet(failure.fix)}})


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """Print rows as aligned columns under upper-case headings, without control characters in cells.

    On a terminal, cells are wrapped so that a row fits into its width.
    """
    cells = [{column: printable(str(row.get(column, ""))) for column in columns} for row in rows]
    headings = {column: column.upper().replace("_", " ") for column in columns}
    for text in terminal.table(headings, cells, sys.stdout):
        _result(text + "\n")
