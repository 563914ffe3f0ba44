"""Copies, on this machine, of the logs of a recovered run. The logs on the workers are lost together with the nodes."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tpu_ops import files
from tpu_ops.errors import OpsError
from tpu_ops.runs.fold import WINDOW, Fold
from tpu_ops.runs.lines import Lines, Part

#: Bytes of this machine's disk that copies of logs leave free, and bytes written between two checks of the free space.
#: If a check finds less free space, each write checks it again.
FLOOR, LOOK_EVERY = 2**30, 64 * 2**20
#: Size of the pieces in which a copy is read.
_PIECE = 64 * 1024


class Logs:
    """Copies of the logs of one attempt, one file for each rank. New data is appended to existing copies.

    Data that cannot be written, or that would fill the disk, is left out: the run and its recovery continue.

    Args:
        directory: Created if it does not exist.
        count: Number of ranks.
        warn: Called once, when the first data is left out.
    """

    def __init__(self, directory: Path, count: int, warn: Callable[[str], object]) -> None:
        self.directory, self._warn, self._warned = directory, warn, False
        self._files: list[FileIO | None] = [None] * count
        #: Offset in each rank's log after the last data received, whether or not the data could be written.
        self._ends = [0] * count
        for rank in range(count):
            with self._left_out(rank):
                self._open(rank)
        #: Bytes received since the last check of the free space, and whether that check found too little space.
        self._came, self._is_low = 0, self._lacks_space()

    def _lacks_space(self) -> bool:
        with contextlib.suppress(OSError):
            found = os.statvfs(self.directory)
            return found.f_bavail * found.f_frsize < FLOOR
        return False

    @property
    def offsets(self) -> tuple[int, ...]:
        """The size of each rank's copy. In a copy, zero bytes take the place of missing data."""
        return tuple(file.tell() if file else end for file, end in zip(self._files, self._ends, strict=True))

    def write(self, rank: int, offset: int, data: bytes) -> None:
        """Write data at an offset of a rank's log."""
        self._ends[rank] = offset + len(data)
        if self._is_low or self._came >= LOOK_EVERY:
            self._came, self._is_low = 0, self._lacks_space()
        self._came += len(data)
        with self._left_out(rank):
            if self._is_low:
                raise OSError(errno.ENOSPC, f"less than {FLOOR / 2**30:g} GiB is free")
            file = self._files[rank] or self._open(rank)
            if offset > file.tell():
                file.truncate(offset)
                file.seek(offset)
            # A file that could not be opened at first might already contain the beginning of this data.
            data = data[file.tell() - offset :]
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the files."""
        for file in filter(None, self._files):
            file.close()

    def _path(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.log"

    def _open(self, rank: int) -> FileIO:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Unbuffered, since a buffer would keep the data of a failed write.
        file = self._files[rank] = self._path(rank).open("ab", buffering=0)
        return file

    @contextlib.contextmanager
    def _left_out(self, rank: int) -> Iterator[None]:
        """Suppress write errors in the block; warn about the first error."""
        try:
            yield
        except OSError as exc:
            if not self._warned:
                self._warned = True
                what = "data that cannot be written is missing from the copies; the run continues"
                self._warn(f"{self._path(rank)}: {exc.strerror or exc}{files.room(exc, self.directory)}; {what}")


class Kept(NamedTuple):
    """The existing copies of the logs of one attempt.

    Attributes:
        attempt: The attempt.
        paths: The copy of each rank; ranks without data are left out.
        written_at: Time of the last write, in seconds since 1970.
    """

    attempt: int
    paths: Mapping[int, Path]
    written_at: float


def kept(directory: Path, ranks: Collection[int], attempt: int = 0) -> Kept | None:
    """Return the copies of the logs of some ranks in the newest attempt that has any.

    Args:
        directory: The directory of the run's logs, from `recovery.folder`.
        ranks: The ranks.
        attempt: Only this attempt; 0 means any attempt.
    """
    found = (path.name.removeprefix("attempt-") for path in directory.glob("attempt-*"))
    for number in sorted((int(name) for name in found if name.isdecimal()), reverse=True):
        if attempt in (0, number):
            paths, newest = {}, 0.0
            for rank in sorted(ranks):
                path = directory / f"attempt-{number}" / f"rank-{rank}.log"
                with contextlib.suppress(OSError):
                    known = path.stat()
                    if known.st_size:
                        paths[rank], newest = path, max(newest, known.st_mtime)
            if paths:
                return Kept(number, paths, newest)
    return None


def show(paths: Mapping[int, Path], line: Callable[[Sequence[int], str], None]) -> dict[int, int]:
    """Print the lines of copies, folding equal lines of several ranks; return the number of missing bytes by rank.

    Zero bytes, which stand for missing data, are not printed.

    Args:
        paths: The copy of each rank.
        line: Prints a line; see `follow.Follower`.
    """
    lacking = dict.fromkeys(paths, 0)
    # The whole files are read, so there are no parts of unfinished lines (`Part`).
    fold: Fold[str | Part] = Fold([*paths], lambda ranks, text: line(ranks, text) if isinstance(text, str) else None)
    lines, now = {rank: Lines() for rank in paths}, 0.0
    with contextlib.ExitStack() as stack:
        left = {rank: stack.enter_context(_opened(path)) for rank, path in paths.items()}
        while left:
            for rank, file in [*left.items()]:
                if data := _read(file, paths[rank]):
                    lacking[rank] += data.count(0)
                    fold.add(rank, lines[rank].feed(data.replace(b"\0", b"")), now)
                else:
                    fold.add(rank, lines[rank].finish(), now)
                    del left[rank]
            # Lines that were read in an earlier round are printed without waiting for other ranks, to limit memory.
            now += WINDOW
            fold.tick(now)
    fold.finish()
    return {rank: count for rank, count in lacking.items() if count}


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as exc:
        raise _unreadable(path, exc) from exc


def _read(file: BinaryIO, path: Path) -> bytes:
    try:
        return file.read(_PIECE)
    except OSError as exc:
        raise _unreadable(path, exc) from exc


def _unreadable(path: Path, exc: OSError) -> OpsError:
    what = f"the copy of a log cannot be read: {exc.strerror or exc}"
    return OpsError(what, where=str(path), fix="check that you may read it (ls -l)")
