"""The log of one rank: raw bytes in files (segments), each named after the absolute offset of its first byte.

A reader only needs an absolute offset to continue after a lost connection, and removing old segments does not change
offsets. Each segment has an index file with the times at which offsets were written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time

from tpu_ops.protocol import known_failures

from . import TYPE_CHECKING, tracebacks

if TYPE_CHECKING:
    from typing import Any

#: Size in bytes at which a segment is closed and a new one begins.
SEGMENT = 8 * 1024 * 1024
#: Approximate maximum size of all segments of a rank in bytes; the oldest segments are removed first.
TOTAL = 1024 * 1024 * 1024
#: Seconds between two entries of the index.
_INDEX_EVERY = 1.0
_CHUNK = 256 * 1024
#: Size of the buffer before the disk, and maximum size of one write, in bytes.
BUFFER = 4 * 1024 * 1024
_PIECE = 64 * 1024
#: If the buffer is full, the rank has to wait up to this many seconds until a quarter of the buffer is free. Short
#: bursts of output are thus not lost. A disk that writes at least 10 MB/s slows no rank down.
_PATIENCE = 0.1
#: Errors of a disk for which removing files is a remedy.
_FULL = (errno.ENOSPC, errno.EDQUOT)


def segments(directory: str) -> list[tuple[int, str]]:
    """Return (offset of the first byte, path) of every segment, ordered by offset."""
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
    """Return the absolute offset after the last byte of the log."""
    found = segments(directory)
    if not found:
        return 0
    offset, path = found[-1]
    try:
        return offset + os.stat(path).st_size
    except FileNotFoundError:
        return offset  # the segment was removed after it was listed


def read(directory: str, offset: int, limit: int = _CHUNK) -> tuple[int, bytes]:
    """Return bytes of the log, and the offset at which they start.

    If the byte at the given offset is missing, the result starts at the next existing byte: rotation removes old bytes,
    and a full disk leaves gaps. Empty bytes mean the current end of the log.
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
            continue  # rotation removed the segment after it was listed
        if data:
            return at, data
    return offset, b""


def since(directory: str, moment: float) -> int:
    """Return the offset of the first byte that was perhaps written at or after a time (seconds since 1970).

    If all existing bytes were written later, the result is 0, so that a reader learns about removed bytes.
    """
    offset, latest = 0, float("-inf")
    for start, path in segments(directory):
        index = _index(path)
        if not index and _written_since(path, moment):
            # The segment has no index because the disk was full: the times of its bytes are unknown, so include all of
            # them.
            return start if latest > float("-inf") else 0
        for when, at in index or [(latest, start)]:
            # Bytes between two index entries were written up to _INDEX_EVERY seconds after the time of the first entry.
            if when > moment and latest == float("-inf"):
                return 0
            if when >= moment:
                return at if moment > latest + _INDEX_EVERY else offset
            offset, latest = at, when
    return end(directory) if moment > latest + _INDEX_EVERY else offset


def _written_since(segment: str, moment: float) -> bool:
    """Return whether any bytes were written to a segment at or after a time."""
    with contextlib.suppress(OSError):
        found = os.stat(segment)
        return bool(found.st_size) and found.st_mtime >= moment
    return False


def _index(segment: str) -> list[tuple[float, int]]:
    """Return the (time, offset) pairs of a segment's index, oldest first; skip a line that a full disk cut off."""
    try:
        with open(segment[:-4] + ".index", encoding="ascii") as file:
            rows = [line.split() for line in file if line.endswith("\n")]
        return [(float(when), int(at)) for when, at in rows]
    except (OSError, ValueError):
        return []


def tail(directory: str, limit: int) -> bytes:
    """Return the last bytes of the log, at most ``limit``."""
    offset = max(0, end(directory) - limit)
    found = b""
    while True:
        offset, data = read(directory, offset)
        if not data:
            return found[-limit:]
        found += data
        offset += len(data)


def _remove(path: str) -> None:
    """Remove a segment and its index; ignore errors."""
    for ending in (".log", ".index"):
        with contextlib.suppress(OSError):
            os.unlink(path + ending)


class Logger(threading.Thread):
    """Copies the bytes of a pipe to segments, in separate threads, so that a rank never waits long for the disk.

    One thread copies the pipe to a buffer, this thread copies the buffer to segments. If the disk is full, the oldest
    segment of this log is removed. If there is no closed segment, or the disk has another error, bytes are dropped and
    counted. The offsets of dropped bytes are not used again, so that a reader sees the size of the gap. If the disk
    stalls and the buffer is full, bytes are dropped until the disk has stored the whole buffer.

    Args:
        source: Descriptor of the pipe's reading end; the logger closes it when the pipe ends.
        directory: The directory of the segments.
        segment: Size at which a segment is closed, in bytes.
        total: Total size of all segments, in bytes.
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
        # A thread that holds this lock must not access the disk, which can stall.
        self._changed = threading.Condition()
        self._buffer = memoryview(bytearray(BUFFER))
        #: Position of the oldest byte in the ring buffer, and the number of bytes in it.
        self._first = self._waiting = 0
        #: Number of dropped bytes after the last byte in the buffer.
        self._missed = 0
        #: Number of bytes that have come, and when the last ones came: monotonic seconds, and seconds since 1970. Other
        #: threads read both without a lock.
        self.came = 0
        self.heard: tuple[float, float] | None = None
        #: Offset after the last byte that was written or dropped.
        self.offset = 0
        self.dropped = 0
        self.rotated = 0
        self.fault = ""
        self.tracebacks = tracebacks.Watch()
        #: The last bytes of the output, which may name a known failure.
        self._last = b""

    def run(self) -> None:
        """Copy the buffer to segments until the last writer has closed the pipe."""
        threading.Thread(target=self._receive, name="log pipe", daemon=True).start()
        while True:
            with self._changed:
                while not self._waiting and not self._missed and self._source >= 0:
                    self._changed.wait()
                piece = self._buffer[self._first :][: min(self._waiting, _PIECE)]
            if piece:
                data = bytes(piece)
                self.tracebacks.see(data)
                self._last = (self._last + data)[-known_failures.SEARCHED :]
                self._append(piece)
                with self._changed:
                    self._first = (self._first + len(piece)) % len(self._buffer)
                    self._waiting -= len(piece)
                    self._changed.notify_all()
            elif self._missed:
                self.fault = self.fault or "the disk could not store the output in time"
                self._close()
                with self._changed:
                    self._drop(self._missed)
                    self._missed = 0
            else:
                break
        self._close()

    def _receive(self) -> None:
        """Read the pipe until its last writer has closed it, even while the disk stalls."""
        import select  # imported late, since `follow` does not need it

        poll, beside = select.poll(), memoryview(bytearray(_PIECE))
        poll.register(self._source, select.POLLIN)
        while True:
            # Wait for data first; only then wait for room in the buffer.
            poll.poll()
            room = self._room()
            count = os.readv(self._source, [room or beside])
            with self._changed:
                self.came += count
                self.heard = (time.monotonic(), time.time()) if count else self.heard
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
        """Return the free part of the buffer for the next bytes; empty if the next bytes are to be dropped."""
        size = len(self._buffer)
        with self._changed:
            # After a gap, drop everything until the disk has caught up. This makes one large gap instead of many small
            # ones.
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
        """Return the number of bytes in the pipe and the buffer that wait to be written."""
        import fcntl  # imported late, since `follow` does not need these modules
        import termios

        if not self.is_alive():
            return 0
        count = bytearray(4)
        with self._changed:
            if self._source >= 0:
                fcntl.ioctl(self._source, termios.FIONREAD, count)
            return self.came - self.offset + int.from_bytes(count, sys.byteorder)

    def facts(self, *, last: bool = False) -> dict[str, Any]:
        """Return how many bytes were written, removed by rotation and dropped, and the last error of the disk.

        ``known`` is the failure that the last lines name (see `known_failures.find`), and is left out if there is none.

        Args:
            last: Whether this process ends now: waiting bytes then count as dropped.
        """
        known = known_failures.find(self._last.decode("utf-8", "replace"))
        with self._changed:
            lost = self.unread() if last else 0
            return {
                **({"known": known} if known else {}),
                "bytes": self.offset - self.dropped,
                "dropped": self.dropped + lost,
                "rotated": self.rotated,
                "fault": self.fault or ("the run ended before the output was written" if lost else ""),
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
                # Close the segment: the bytes after the gap start a new segment.
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
        """Close the current segment, if there is one; remove the segment if it is empty."""
        for descriptor in (self._index, self._file):
            # Some file systems report lost writes only when a file is closed.
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if self._file >= 0:
            path = os.path.join(self._directory, "{:020d}".format(self._start))
            self._kept.append((path, self.offset - self._start))
            if self.offset == self._start:
                _remove(self._kept.pop()[0])
        self._file = self._index = -1

    def _note_time(self) -> None:
        """Add the current time and offset to the index, at most every _INDEX_EVERY seconds."""
        now = time.monotonic()
        if now - self._indexed >= _INDEX_EVERY:
            self._indexed = now
            # Ignore errors: if this index entry is missing, `since` only returns a little more of the log.
            with contextlib.suppress(OSError):
                os.write(self._index, "{:.3f} {}\n".format(time.time(), self.offset).encode("ascii"))

    def _give_way(self) -> bool:
        """Remove the oldest closed segment; return whether there was a closed segment."""
        if not self._kept:
            return False
        path, size = self._kept.pop(0)
        _remove(path)
        self.rotated += size
        return True
