"""Finds the last traceback that a rank printed, which tells why a rank hangs at its exit before other ranks time out.

With JAX, a rank that raises an exception waits at its exit for the other ranks, and these wait for it in their next
collective. Minutes later all ranks abort at once, and their last output is a C++ stack without the reason.
"""

from __future__ import annotations

import time

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Dict

#: The first line of a traceback. Other text can precede it on the same line.
HEADER = b"Traceback (most recent call last):"
#: A rank that has not ended counts as hanging after this many seconds without output after a traceback.
STILL = 10.0
#: Maximum number of bytes that are kept of a traceback.
_KEPT = 8192
#: Output that comes more than this many seconds after a traceback's first line does not belong to it.
_COMES_WITHIN = 2.0
#: A rank that prints more than this many bytes after a traceback has gone on: it does not count as hanging.
_GOES_ON = 64 * 1024
#: Maximum number of lines of an exception's message that are kept after its first line; an empty line ends the message.
_MESSAGE_LINES = 5


class Watch:
    """Finds tracebacks in the output of a rank. One thread passes the output, other threads ask for the traceback."""

    def __init__(self) -> None:
        self._end = b""
        #: The latest traceback: its time in seconds since 1970, and the bytes that are kept of it.
        self._found: tuple[float, bytes] | None = None
        self._behind = 0
        self._went_on = False
        self._heard = self._began = time.monotonic()

    def see(self, data: bytes) -> None:
        """Process the next bytes of the output."""
        self._heard = time.monotonic()
        whole = self._end + data
        self._end = whole[1 - len(HEADER) :]
        at = whole.rfind(HEADER)
        if at >= 0:
            # Include the text that precedes the header on its line: it can be a prefix of every line.
            at = whole.rfind(b"\n", 0, at) + 1
            self._found, self._behind = (time.time(), whole[at : at + _KEPT]), len(whole) - at
            self._began, self._went_on = self._heard, False
        elif self._found:
            began, kept = self._found
            self._behind += len(data)
            later = self._heard - self._began
            self._went_on |= _COMES_WITHIN < later < STILL
            if len(kept) < _KEPT and later <= _COMES_WITHIN:
                self._found = began, (kept + data)[:_KEPT]

    def stands_still(self) -> bool:
        """Return whether no output has come for STILL seconds after a traceback."""
        return self.facts() is not None and time.monotonic() - self._heard >= STILL

    def facts(self) -> Dict[str, Any] | None:
        """Return the latest traceback or None: ``at`` (seconds since 1970), ``error`` (one line) and ``text``.

        If the rank has continued after the traceback, the result is None: the program has handled the exception.
        """
        goes_on = self._went_on and self._heard - self._began > STILL
        if self._found is None or goes_on or self._behind > _GOES_ON:
            return None
        began, data = self._found
        error, text = parts(data.decode("utf-8", "replace"))
        return {"at": began, "error": error, "text": text}


def parts(text: str) -> tuple[str, str]:
    """Return, for output that begins with a traceback, the exception's line and all text up to the message's end."""
    lines = text.splitlines()
    before = lines[0].partition(HEADER.decode())[0] if lines else ""
    lines = [line[len(before) :] if line.startswith(before) else line for line in lines]
    for number, line in enumerate(lines):
        if number and line.strip() and not line[0].isspace():
            message = lines[number + 1 : number + 1 + _MESSAGE_LINES]
            if "" in message:
                message = message[: message.index("")]
            return line.rstrip(), "\n".join([*lines[: number + 1], *message])
    # All lines of a traceback are indented if it is that of an exception group.
    return (lines[-1].strip() if len(lines) > 1 else ""), "\n".join(lines)
