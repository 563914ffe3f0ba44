"""The last traceback that a rank printed: it explains why the rank hangs at its exit, long before the others give up.

With JAX, a rank that raises waits at its exit for the others, which wait for it in their next collective. Minutes later
all abort at once, and their last output is a C++ stack without the reason.
"""

from __future__ import annotations

import time

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Dict

#: The first line of a traceback; other text may come before it in the line.
HEADER = b"Traceback (most recent call last):"
#: Seconds without output after a traceback, after which a rank that has not ended counts as hanging.
STILL = 10.0
#: Maximum number of bytes that are kept of a traceback.
_KEPT = 8192
#: Seconds after which further output no longer belongs to the traceback.
_COMES_WITHIN = 2.0
#: Bytes of output after a traceback from which the rank counts as running on.
_GOES_ON = 64 * 1024
#: Maximum number of lines that are kept of the message after the exception's line, up to an empty one.
_MESSAGE_LINES = 5


class Watch:
    """Find tracebacks in the output that one thread reads; other threads ask for them."""

    def __init__(self) -> None:
        self._end = b""
        #: The time of the latest traceback, in seconds since 1970, and its kept bytes.
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
            # Include the text before it in its line, which may be a prefix of each line.
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
        """Return whether there was no output for long after a traceback."""
        return self.facts() is not None and time.monotonic() - self._heard >= STILL

    def facts(self) -> Dict[str, Any] | None:
        """Return the latest traceback, if any: ``at`` (seconds since 1970), ``error`` (a line) and ``text``.

        A traceback after which the rank has continued does not count: the program has handled the exception.
        """
        goes_on = self._went_on and self._heard - self._began > STILL
        if self._found is None or goes_on or self._behind > _GOES_ON:
            return None
        began, data = self._found
        error, text = parts(data.decode("utf-8", "replace"))
        return {"at": began, "error": error, "text": text}


def parts(text: str) -> tuple[str, str]:
    """Split output that begins with a traceback: the line that names the exception, and all to its message's end."""
    lines = text.splitlines()
    before = lines[0].partition(HEADER.decode())[0] if lines else ""
    lines = [line[len(before) :] if line.startswith(before) else line for line in lines]
    for number, line in enumerate(lines):
        if number and line.strip() and not line[0].isspace():
            message = lines[number + 1 : number + 1 + _MESSAGE_LINES]
            if "" in message:
                message = message[: message.index("")]
            return line.rstrip(), "\n".join([*lines[: number + 1], *message])
    # In a traceback of an exception group, all lines are indented.
    return (lines[-1].strip() if len(lines) > 1 else ""), "\n".join(lines)
