"""Turns the bytes of a log into lines, with bounded memory. Only the controller uses this module."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import NamedTuple

#: Maximum length of a line in bytes; a longer line is cut into pieces.
LONGEST = 16 * 1024


class Part(NamedTuple):
    """A part of a line that stayed unfinished for a while.

    Attributes:
        text: The text.
        ends: Whether the line ends with this part.
    """

    text: str
    ends: bool = False


class Lines:
    """Splits the bytes of one rank's log, received in pieces, into lines.

    A carriage return ends a line too, so that progress bars are shown while they change. A byte that is not UTF-8
    becomes a lone surrogate, as with `surrogateescape`.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._rest = b""
        self._returned = False
        #: Whether `unfinished` has already returned the beginning of the unfinished line.
        self._begun = False

    @property
    def has_rest(self) -> bool:
        """Whether there are bytes after the last line end that were not returned yet."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str | Part]:
        """Add bytes; return the lines that are now complete. The rest of a line begun by `unfinished` is a `Part`."""
        if not data:
            return []
        if self._returned and data.startswith(b"\n"):
            data = data[1:]  # the second half of "\r\n", whose first half ended the last piece
        self._returned = data.endswith(b"\r")
        lines = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        *cut, self._rest = self._cut(lines.pop())
        return [self._ended(part) for part in [*(part for line in lines for part in self._cut(line)), *cut]]

    def unfinished(self) -> list[str | Part]:
        """Return the received part of the unfinished line. Later results begin after this part.

        Bytes of an incomplete character are not returned until the character is complete.
        """
        text, used = codecs.utf_8_decode(self._rest, "surrogateescape", False)
        if not text:
            return []
        self._rest, self._begun = self._rest[used:], True
        return [Part(text)]

    def finish(self) -> list[str | Part]:
        """Return what was received after the last line end and was not returned yet."""
        rest, self._rest = self._rest, b""
        return [self._ended(rest)] if rest or self._begun else []

    def _ended(self, data: bytes) -> str | Part:
        text = data.decode("utf-8", "surrogateescape")
        begun, self._begun = self._begun, False
        return Part(text, ends=True) if begun else text

    def _cut(self, line: bytes) -> Iterator[bytes]:
        """Cut a line into pieces of at most `longest` bytes, without cutting a character."""
        while len(line) > self._longest:
            used = codecs.utf_8_decode(line[: self._longest], "surrogateescape", False)[1] or self._longest
            yield line[:used]
            line = line[used:]
        yield line
