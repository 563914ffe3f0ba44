"""Turns the bytes of a log into lines; on the controller only, and never with more memory than one line may have."""

from __future__ import annotations

#: A longer line is cut into pieces of this many bytes.
LONGEST = 16 * 1024


class Lines:
    """Splits one rank's bytes into lines, whatever pieces they come in.

    A carriage return ends a line too, so that progress bars are seen while they move.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._rest = b""
        self._returned = False

    def feed(self, data: bytes) -> list[str]:
        """Given more bytes, return the lines that are complete now."""
        if not data:
            return []
        if self._returned and data.startswith(b"\n"):
            data = data[1:]  # the second half of a line end that came in two pieces
        self._returned = data.endswith(b"\r")
        pieces = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = pieces.pop()
        found = [part for piece in pieces for part in self._cut(piece)]
        while len(self._rest) > self._longest:
            found.append(self._rest[: self._longest])
            self._rest = self._rest[self._longest :]
        return [_text(piece) for piece in found]

    def finish(self) -> list[str]:
        """Return what stands after the last line end."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []

    def _cut(self, piece: bytes) -> list[bytes]:
        return [piece[at : at + self._longest] for at in range(0, len(piece), self._longest)] or [b""]


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
