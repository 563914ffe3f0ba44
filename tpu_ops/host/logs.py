"""The log of one rank: raw bytes in segments, each file named by the absolute offset of its first byte.

A follower names an absolute offset and nothing else, so it can go on after any break, and old segments can be
taken away without moving what the others mean.
"""

from __future__ import annotations

import os
import threading
from typing import Any

#: A segment is closed once it holds this many bytes.
SEGMENT = 8 * 1024 * 1024
_CHUNK = 256 * 1024


def segments(directory: str) -> list[tuple[int, str]]:
    """Return (offset of the first byte, path) of every segment, in order."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(
        (int(name[:-4]), os.path.join(directory, name))
        for name in names
        if name.endswith(".log") and name[:-4].isdigit()
    )


def end(directory: str) -> int:
    """Return the absolute offset behind the last byte of the log."""
    found = segments(directory)
    if not found:
        return 0
    offset, path = found[-1]
    return offset + os.stat(path).st_size


def read(directory: str, offset: int, limit: int = _CHUNK) -> tuple[int, bytes]:
    """Return bytes of the log and the offset at which they really start.

    That is the asked offset, or the first byte that is still there. No bytes means that the log ends there for now.
    """
    found = segments(directory)
    if not found:
        return offset, b""
    offset = max(offset, found[0][0])
    for index, (start, path) in enumerate(found):
        following = found[index + 1][0] if index + 1 < len(found) else None
        if following is not None and offset >= following:
            continue
        with open(path, "rb") as file:
            file.seek(offset - start)
            return offset, file.read(limit)
    return offset, b""


def tail(directory: str, limit: int) -> bytes:
    """Return at most the last bytes of the log."""
    offset = max(0, end(directory) - limit)
    found = b""
    while True:
        offset, data = read(directory, offset)
        if not data:
            return found
        found += data
        offset += len(data)


class Logger(threading.Thread):
    """Moves what a pipe delivers into segments, in a thread of its own; a full disk drops bytes, never blocks a rank.

    Args:
        source: Descriptor of the pipe's reading end; closed when the pipe ends.
        directory: Where the segments are.
        segment: Size at which a segment is closed, in bytes.
    """

    def __init__(self, source: int, directory: str, segment: int = SEGMENT) -> None:
        super().__init__(name="log", daemon=True)
        self._source = source
        self._directory = directory
        self._segment = segment
        self._file = -1
        self._start = 0
        self.written = 0
        self.dropped = 0
        self.fault = ""

    def run(self) -> None:
        """Copy until the last writer has closed the pipe."""
        while True:
            data = os.read(self._source, 65536)
            if not data:
                break
            self._append(data)
        os.close(self._source)
        if self._file >= 0:
            os.close(self._file)

    def facts(self) -> dict[str, Any]:
        """Return how many bytes were kept and how many were not, and why."""
        return {"bytes": self.written, "dropped": self.dropped, "fault": self.fault}

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                if self._file < 0 or self.written - self._start >= self._segment:
                    self._open()
                count = os.write(self._file, view[: self._start + self._segment - self.written])
                self.written += count
                view = view[count:]
        except OSError as exc:
            self.dropped += len(view)
            self.fault = exc.strerror or str(exc)

    def _open(self) -> None:
        path = os.path.join(self._directory, "{:020d}.log".format(self.written))
        fresh = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._start = fresh, self.written
