"""The only writer: results go to standard output, everything said on the way to standard error.

Text of others gets into what is said (names, what a server answered, what ssh printed). So each of its lines is made
one line without orders for a terminal here, and nowhere else needs to; what a program printed, and text that another
program reads, passes as it is by functions of its own. The output of programs is bytes, and becomes text on a terminal
only.

Messages name commands as they are typed without a fleet, in backticks. Here they get the option `--fleet` if the fleet
has to be named.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from tpu_ops import texts
from tpu_ops.cli.commands import COMMANDS, WITHOUT_FLEET
from tpu_ops.errors import OpsError, printable

#: Whether this command has written of its result.
_written: list[bool] = []
#: Of the line that was written last and is not finished: whether it is on standard error, and its lead.
_unfinished: list[tuple[bool, str]] = []
#: Returns the option that names the fleet; empty until the fleet is known.
_fleet: list[Callable[[], str]] = []


def begin() -> None:
    """Begin the output of a command: both outputs take any text, and what their encoding lacks is escaped."""
    _written.clear()
    _unfinished.clear()
    _fleet.clear()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def end() -> None:
    """End the output of a command: commands in later messages name no fleet until `name_fleet` is called again."""
    _fleet.clear()


def name_fleet(option: Callable[[], str]) -> None:
    """Set what returns the option that names the fleet in commands; it is called at most once, when it is needed."""
    _fleet[:] = [functools.cache(option)]


def on_fleet(text: str) -> str:
    """Return a text in which commands name the fleet: those in backticks, and one that the text begins with.

    Messages need no call: `info`, `warning` and `error` print them so. A result does.
    """
    bare = text.startswith("tpu_ops ") and text.split()[1:2] != [] and text.split()[1] in COMMANDS
    return texts.on_fleet(text, _fleet[0], bare=bare, without=WITHOUT_FLEET) if _fleet else text


def give_up() -> None:
    """Let go of standard output, so that the interpreter does not complain of it again when it ends."""
    if sys.stdout is not None:
        _to_nowhere(sys.stdout)


class _Said(logging.Handler):
    """Prints what the packages below the command line log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print it as a warning, or as information."""
        say = warning if record.levelno >= logging.WARNING else info
        say(record.getMessage())


def listen() -> None:
    """Print what is logged below the name of this package, once."""
    log = logging.getLogger("tpu_ops")
    if not any(isinstance(handler, _Said) for handler in log.handlers):
        log.addHandler(_Said())
        log.setLevel(logging.INFO)
        log.propagate = False


@contextlib.contextmanager
def read_or_not() -> Iterator[None]:
    """Print a result that may have no reader any more, where the exit code and what is said besides tell as much."""
    try:
        yield
    except BrokenPipeError:
        give_up()


def _to_nowhere(stream: TextIO) -> None:
    handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, stream.fileno())
    os.close(handle)


def has_result() -> bool:
    """Return whether this command has written of its result."""
    return bool(_written)


def _put(stream: TextIO, data: str | bytes) -> None:
    if isinstance(data, bytes) and not stream.isatty():
        stream.buffer.write(data)
    else:
        stream.write(data if isinstance(data, str) else data.decode(errors="replace"))
    # At once, as threads print as well.
    stream.flush()


def _finish_line(stream: TextIO) -> None:
    """Finish the unfinished line before other output goes to a stream.

    Where the line is in a pipe or a file, output of the other stream does not interrupt it.
    """
    if _unfinished:
        interrupted = sys.stderr if _unfinished[0][0] else sys.stdout
        if interrupted is not None and (interrupted is stream or interrupted.isatty()):
            _unfinished.clear()
            _put(interrupted, "\n")


def _result(data: str | bytes, *, goes_on: bool = False) -> None:
    _written[:] = [True]
    if sys.stdout is None:
        raise OpsError("the result cannot be written: it is closed", where="standard output", fix="open it: no `>&-`")
    try:
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
            fix="check that the disk it goes to has space (df)",
        ) from exc


def _say(data: str | bytes, *, goes_on: bool = False) -> None:
    # What is said on the way is no reason to end what it is said of.
    if sys.stderr is None:
        return
    try:
        if not goes_on:
            _finish_line(sys.stderr)
        _put(sys.stderr, data)
    except BrokenPipeError:
        # The reader has gone for good, and what is left in the buffer must not fail once more at the end.
        _to_nowhere(sys.stderr)
    except OSError:
        pass


def line(text: str = "") -> None:
    """Print one line of a result."""
    _result(printable(text) + "\n")


def as_it_is(text: str) -> None:
    """Print text that another program reads, as a result."""
    _result(text + "\n")


def raw(data: bytes, *, aside: bool = False) -> None:
    """Print the output of a program byte by byte.

    On a terminal, bytes that are not UTF-8 are replaced, and a missing end of the last line is added.

    Args:
        data: The bytes.
        aside: Whether they go to standard error, as where standard output has other results.
    """
    stream = sys.stderr if aside else sys.stdout
    if stream is not None and stream.isatty() and not data.endswith(b"\n"):
        data += b"\n"
    (_say if aside else _result)(data)


def piece(lead: str, data: bytes, *, ended: bool, aside: bool = False) -> None:
    """Print a piece of a line of a program, on the line of the piece before it unless other output came in between.

    Args:
        lead: What a line begins with; pieces of one line have the same.
        data: The bytes. The end of a line that other output has ended already needs none.
        ended: Whether the line ends with them.
        aside: As of `raw`.
    """
    goes_on = _unfinished == [(aside, lead)]
    if goes_on or data:
        whole = (b"" if goes_on else lead.encode()) + data + b"\n" * ended
        (_say if aside else _result)(whole, goes_on=goes_on)
        _unfinished[:] = [] if ended else [(aside, lead)]


def clear() -> None:
    """Let the next result stand in the place of those before it, on a terminal."""
    if sys.stdout is not None and sys.stdout.isatty():
        _result("\x1b[H\x1b[2J")


def info(text: str) -> None:
    """Say what is going on, in one line."""
    _say(printable(on_fleet(text)) + "\n")


def warning(text: str) -> None:
    """Say what the user should know although the command goes on."""
    info(f"warning: {text}")


def error(failure: OpsError) -> None:
    """Print the three parts of an error: what failed, where, what to do."""
    info(f"error: {failure.what}")
    if failure.where:
        info(f"  at:  {failure.where}")
    if failure.fix:
        info(f"  fix: {on_fleet(failure.fix)}")


def at(moment: float) -> str:
    """Return a time (seconds since 1970) for people."""
    return texts.at(moment)


def as_json(value: Any) -> None:
    """Print a result as JSON."""
    _result(json.dumps(value, indent=2, sort_keys=True) + "\n")


def error_as_json(failure: OpsError) -> None:
    """Print an error as the result of a command that was to print JSON."""
    told = failure.to_json()
    as_json(told | {"error": told["error"] | {"problem": on_fleet(failure.what), "fix": on_fleet(failure.fix)}})


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """Print rows as aligned columns under upper-case headings; a cell is one line without control characters."""
    cells = [[column.upper().replace("_", " ") for column in columns]]
    cells += [[printable(str(row.get(column, ""))) for column in columns] for row in rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
