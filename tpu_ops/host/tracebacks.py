"""The last traceback that a rank printed: it tells why of one that hangs at its exit, long before all others give up.

With JAX a rank that raises waits at its exit for the others, and these wait for it in their next collective. Minutes
later all abort at once, and what each says by then is a stack of C++ that names no reason.
"""

from __future__ import annotations

import time

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Dict

#: How Python begins one, whatever comes before it in the line.
HEADER = b"Traceback (most recent call last):"
#: Seconds without any output behind one, after which a rank that has not ended is said to stand still.
STILL = 10.0
#: How much of it is kept, in bytes.
_KEPT = 8192
#: What comes so much later no longer belongs to it, in seconds.
_COMES_WITHIN = 2.0
#: A rank that has written so much behind it goes on, in bytes.
_GOES_ON = 64 * 1024
#: Lines kept of the message behind the line that names the exception, up to an empty one.
_MESSAGE_LINES = 5


class Watch:
    """Looks for tracebacks in what one thread reads; others ask what was found."""

    def __init__(self) -> None:
        self._end = b""
        #: When the latest began, in seconds since 1970, and its bytes as far as they are kept.
        self._found: tuple[float, bytes] | None = None
        self._behind = 0
        self._went_on = False
        self._heard = self._began = time.monotonic()

    def see(self, data: bytes) -> None:
        """Take the next bytes of the output."""
        self._heard = time.monotonic()
        whole = self._end + data
        self._end = whole[1 - len(HEADER) :]
        at = whole.rfind(HEADER)
        if at >= 0:
            # With what stands before it in its line, which may stand before each.
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
        """Return whether nothing came behind a traceback for long."""
        return self.facts() is not None and time.monotonic() - self._heard >= STILL

    def facts(self) -> Dict[str, Any] | None:
        """Return the latest as a record has it, or None: ``at`` (seconds since 1970), ``error`` (a line), ``text``.

        One after which the rank has gone on is none: the program has dealt with it.
        """
        goes_on = self._went_on and self._heard - self._began > STILL
        if self._found is None or goes_on or self._behind > _GOES_ON:
            return None
        began, data = self._found
        error, text = parts(data.decode("utf-8", "replace"))
        return {"at": began, "error": error, "text": text}


def parts(text: str) -> tuple[str, str]:
    """Given output from a traceback on, return the line that names the exception, and all up to its message's end."""
    lines = text.splitlines()
    before = lines[0].partition(HEADER.decode())[0] if lines else ""
    lines = [line[len(before) :] if line.startswith(before) else line for line in lines]
    for number, line in enumerate(lines):
        if number and line.strip() and not line[0].isspace():
            message = lines[number + 1 : number + 1 + _MESSAGE_LINES]
            if "" in message:
                message = message[: message.index("")]
            return line.rstrip(), "\n".join([*lines[: number + 1], *message])
    # One of a group of exceptions is indented as a whole.
    return (lines[-1].strip() if len(lines) > 1 else ""), "\n".join(lines)
