"""The log of one rank: raw bytes in segments, each file named by the absolute offset of its first byte.

A follower names an absolute offset and nothing else, so it can go on after any break, and old segments can be
taken away without moving what the others mean. Beside each segment stands an index: when which offset was written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time

from . import TYPE_CHECKING, tracebacks

if TYPE_CHECKING:
    from typing import Any

#: A segment is closed once it holds this many bytes.
SEGMENT = 8 * 1024 * 1024
#: The segments of one rank together hold at most about this many bytes; the oldest go first.
TOTAL = 1024 * 1024 * 1024
#: Seconds between two entries of the index.
_INDEX_EVERY = 1.0
_CHUNK = 256 * 1024
#: What waits for the disk at most, and how much of it is written at once, in bytes.
BUFFER = 4 * 1024 * 1024
_PIECE = 64 * 1024
#: How long a rank is slowed, with the buffer full, until a quarter of it is free, in seconds: a burst that a sound disk
#: takes a moment later is not lost. A disk that takes less than that, 10 MB/s, slows nobody.
_PATIENCE = 0.1
#: Of what a disk says no to: what room helps against.
_FULL = (errno.ENOSPC, errno.EDQUOT)


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
    try:
        return offset + os.stat(path).st_size
    except FileNotFoundError:
        return offset  # removed since it was listed


def read(directory: str, offset: int, limit: int = _CHUNK) -> tuple[int, bytes]:
    """Return bytes of the log and the offset at which they really start.

    That is the asked offset, or the next byte that is there: older ones may have been rotated away, and others were
    never written where the disk was full. No bytes means that the log ends there for now.
    """
    found = segments(directory)
    for index, (start, path) in enumerate(found):
        if index + 1 < len(found) and offset >= found[index + 1][0]:
            continue
        at = max(offset, start)
        try:
            with open(path, "rb") as file:
                file.seek(at - start)
                data = file.read(limit)
        except FileNotFoundError:
            continue  # rotated away since it was listed
        if data:
            return at, data
    return offset, b""


def since(directory: str, moment: float) -> int:
    """Return the offset of the first byte that may have been written at or after a time (seconds since 1970).

    Of a time before all that is kept it is 0, so that a reader hears of what is no longer there.
    """
    offset, latest = 0, float("-inf")
    for start, path in segments(directory):
        index = _index(path)
        if not index and _written_since(path, moment):
            # The disk took no index: when its bytes came is not known, and none may be left out.
            return start if latest > float("-inf") else 0
        for when, at in index or [(latest, start)]:
            # What stands between two entries was written within the time of one after the first.
            if when > moment and latest == float("-inf"):
                return 0
            if when >= moment:
                return at if moment > latest + _INDEX_EVERY else offset
            offset, latest = at, when
    return end(directory) if moment > latest + _INDEX_EVERY else offset


def _written_since(segment: str, moment: float) -> bool:
    """Return whether anything was written to a segment at or after a time."""
    with contextlib.suppress(OSError):
        found = os.stat(segment)
        return bool(found.st_size) and found.st_mtime >= moment
    return False


def _index(segment: str) -> list[tuple[float, int]]:
    """Return (time, offset) of a segment's index, oldest first; a line that a full disk cut off is left out."""
    try:
        with open(segment[:-4] + ".index", encoding="ascii") as file:
            rows = [line.split() for line in file if line.endswith("\n")]
        return [(float(when), int(at)) for when, at in rows]
    except (OSError, ValueError):
        return []


def tail(directory: str, limit: int) -> bytes:
    """Return at most the last bytes of the log."""
    offset = max(0, end(directory) - limit)
    found = b""
    while True:
        offset, data = read(directory, offset)
        if not data:
            return found[-limit:]
        found += data
        offset += len(data)


def _remove(path: str) -> None:
    """Remove a segment and its index, as far as the disk lets go of them."""
    for ending in (".log", ".index"):
        with contextlib.suppress(OSError):
            os.unlink(path + ending)


class Logger(threading.Thread):
    """Moves what a pipe delivers into segments, in threads of its own, and never lets a rank wait for the disk.

    One thread empties the pipe into a buffer, and this one the buffer into segments. Where the disk is full, the oldest
    segment of this log goes. With none left, or where the disk has another fault, the bytes are dropped and counted,
    and their offsets stay empty, so that a reader sees how many are missing. So are those that come while a disk that
    stalls leaves the buffer full, until it has taken all that came before them.

    Args:
        source: Descriptor of the pipe's reading end; closed when the pipe ends.
        directory: Where the segments are.
        segment: Size at which a segment is closed, in bytes.
        total: Size that all of them together may have, in bytes.
    """

    def __init__(self, source: int, directory: str, segment: int = SEGMENT, total: int = TOTAL) -> None:
        super().__init__(name="log", daemon=True)
        self._source = source
        self._directory = directory
        self._segment = segment
        self._total = total
        self._file = -1
        self._index = -1
        self._start = 0
        self._indexed = float("-inf")
        self._kept: list[tuple[str, int]] = []
        # With this lock held nothing is done that may stall.
        self._changed = threading.Condition()
        self._buffer = memoryview(bytearray(BUFFER))
        #: Where in the buffer the oldest byte is, and how many wait there; behind its end they go on at its beginning.
        self._first = self._waiting = 0
        #: How many bytes had no room behind those that wait.
        self._missed = 0
        self._came = 0
        #: Offset behind the last byte that was dealt with, dropped ones included.
        self.offset = 0
        self.dropped = 0
        self.rotated = 0
        self.fault = ""
        self.tracebacks = tracebacks.Watch()

    def run(self) -> None:
        """Copy until the last writer has closed the pipe."""
        threading.Thread(target=self._receive, name="log pipe", daemon=True).start()
        while True:
            with self._changed:
                while not self._waiting and not self._missed and self._source >= 0:
                    self._changed.wait()
                piece = self._buffer[self._first :][: min(self._waiting, _PIECE)]
            if piece:
                self.tracebacks.see(bytes(piece))
                self._append(piece)
                with self._changed:
                    self._first = (self._first + len(piece)) % len(self._buffer)
                    self._waiting -= len(piece)
                    self._changed.notify_all()
            elif self._missed:
                self.fault = self.fault or "the disk could not store it in time"
                self._close()
                with self._changed:
                    self._drop(self._missed)
                    self._missed = 0
            else:
                break
        self._close()

    def _receive(self) -> None:
        """Empty the pipe until its last writer has closed it, whatever the disk does."""
        import select  # a follower does without it

        poll, beside = select.poll(), memoryview(bytearray(_PIECE))
        poll.register(self._source, select.POLLIN)
        while True:
            # Whether there is room is asked once there is something to put there.
            poll.poll()
            room = self._room()
            count = os.readv(self._source, [room or beside])
            with self._changed:
                self._came += count
                if room:
                    self._waiting += count
                else:
                    self._missed += count
                if not count:
                    os.close(self._source)
                    self._source = -1
                self._changed.notify_all()
            if not count:
                return

    def _room(self) -> memoryview:
        """Return where in the buffer the next bytes go; nothing where they are dropped."""
        size = len(self._buffer)
        with self._changed:
            # Behind a hole all is dropped until the disk has got as far: one hole at a time, and no shreds between two.
            if not self._missed and (
                self._waiting < size
                or self._changed.wait_for(lambda: size - self._waiting >= size // 4, timeout=_PATIENCE)
            ):
                if not self._waiting:
                    self._first = 0
                end = (self._first + self._waiting) % size
                return self._buffer[end : end + size - self._waiting]
            return self._buffer[:0]

    def unread(self) -> int:
        """Return how many bytes wait to be written: for a moment, or for as long as the disk stalls."""
        import fcntl  # a follower does without these
        import termios

        if not self.is_alive():
            return 0
        count = bytearray(4)
        with self._changed:
            if self._source >= 0:
                fcntl.ioctl(self._source, termios.FIONREAD, count)
            return self._came - self.offset + int.from_bytes(count, sys.byteorder)

    def facts(self, *, last: bool = False) -> dict[str, Any]:
        """Return how many bytes were written, how many of them rotation took, how many were dropped, and why.

        Args:
            last: Whether this process ends now, so that what still waits to be written is dropped.
        """
        with self._changed:
            lost = self.unread() if last else 0
            return {
                "bytes": self.offset - self.dropped,
                "dropped": self.dropped + lost,
                "rotated": self.rotated,
                "fault": self.fault or ("the run ended before it was written" if lost else ""),
            }

    def _append(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            try:
                if self._file < 0 or self.offset - self._start >= self._segment:
                    self._open()
                self._note_time()
                count = os.write(self._file, view[: self._start + self._segment - self.offset])
            except OSError as exc:
                self.fault = exc.strerror or str(exc)
                if exc.errno in _FULL and self._give_way():
                    continue
                # What comes next starts a segment of its own, behind the bytes that are missing.
                self._close()
                self._drop(len(view))
                return
            with self._changed:
                self.offset += count
            view = view[count:]

    def _drop(self, count: int) -> None:
        with self._changed:
            self.dropped += count
            self.offset += count

    def _open(self) -> None:
        self._close()
        while self._kept and sum(size for _, size in self._kept) + self._segment > self._total:
            self._give_way()
        path = os.path.join(self._directory, "{:020d}".format(self.offset))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(path + ".log", flags, 0o600)
        self._start, self._indexed = self.offset, float("-inf")
        with contextlib.suppress(OSError):
            self._index = os.open(path + ".index", flags, 0o600)

    def _close(self) -> None:
        """Close the segment that is written to, if there is one; one without a byte goes."""
        for descriptor in (self._index, self._file):
            # Some file systems say only now that they have lost what was written.
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if self._file >= 0:
            path = os.path.join(self._directory, "{:020d}".format(self._start))
            self._kept.append((path, self.offset - self._start))
            if self.offset == self._start:
                _remove(self._kept.pop()[0])
        self._file = self._index = -1

    def _note_time(self) -> None:
        """Say in the index when the next byte was written, now and then."""
        now = time.monotonic()
        if now - self._indexed >= _INDEX_EVERY:
            self._indexed = now
            # Without an entry a time means a little more of the log than it could.
            with contextlib.suppress(OSError):
                os.write(self._index, "{:.3f} {}\n".format(time.time(), self.offset).encode("ascii"))

    def _give_way(self) -> bool:
        """Remove the oldest closed segment; return whether there was one."""
        if not self._kept:
            return False
        path, size = self._kept.pop(0)
        _remove(path)
        self.rotated += size
        return True
