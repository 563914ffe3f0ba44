"""A rank's output as files: reads from any offset or time, and behaviour on a full disk."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tpu_ops.host import logs


def written(folder: Path, *pieces: bytes, segment: int = 10, total: int = logs.TOTAL) -> logs.Logger:
    source, sink = os.pipe()
    logger = logs.Logger(source, str(folder), segment, total)
    logger.start()
    for piece in pieces:
        os.write(sink, piece)
    os.close(sink)
    logger.join(10)
    assert not logger.is_alive()
    return logger


def everything(folder: Path, offset: int = 0) -> bytes:
    found = b""
    while True:
        start, data = logs.read(str(folder), offset, limit=7)
        if not data:
            return found
        assert start == offset
        found += data
        offset += len(data)


def test_a_log_is_read_from_any_offset_over_all_segments(tmp_path: Path) -> None:
    data = bytes(range(256)) * 2
    logger = written(tmp_path, data[:100], data[100:300], data[300:])
    assert logger.facts() == {"bytes": 512, "dropped": 0, "rotated": 0, "fault": ""}
    assert len(logs.segments(str(tmp_path))) > 1
    assert all(path == str(tmp_path / f"{offset:020d}.log") for offset, path in logs.segments(str(tmp_path)))
    for offset in (0, 1, 99, 100, 101, 300, 511, 512, 600):
        assert everything(tmp_path, offset) == data[offset:]
    assert logs.tail(str(tmp_path), 20) == data[-20:]


def test_a_reader_whose_segment_is_gone_starts_at_the_first_one_left(tmp_path: Path) -> None:
    written(tmp_path, b"a" * 10, segment=10)
    (tmp_path / f"{0:020d}.log").rename(tmp_path / f"{30:020d}.log")
    assert logs.read(str(tmp_path), 5) == (30, b"a" * 10)


def test_a_full_disk_drops_bytes_and_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{0:020d}.log").symlink_to("/dev/full")
    logger = written(tmp_path, b"x" * 1000)
    assert logger.facts() == {"bytes": 0, "dropped": 1000, "rotated": 0, "fault": "No space left on device"}
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_segments_go_once_the_log_has_its_size(tmp_path: Path) -> None:
    logger = written(tmp_path, b"a" * 25, b"b" * 30, segment=10, total=30)
    assert logger.facts() == {"bytes": 55, "dropped": 0, "rotated": 30, "fault": ""}
    assert logs.read(str(tmp_path), 0) == (30, b"b" * 10)
    assert everything(tmp_path, 30) == b"b" * 25
    assert len(list(tmp_path.glob("*.index"))) == len(logs.segments(str(tmp_path)))


class Disk:
    """Plays a disk that has room for so many bytes of logs; what is removed makes room again."""

    def __init__(self, folder: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.room, self.write = folder, room, os.write
        monkeypatch.setattr("tpu_ops.host.logs.os.write", self)

    def __call__(self, handle: int, data: bytes) -> int:
        if Path(f"/proc/self/fd/{handle}").readlink().suffix != ".log":
            return self.write(handle, data)
        free = self.room - sum(path.stat().st_size for path in self.folder.glob("*.log"))
        if free <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.write(handle, data[:free])


def test_on_a_full_disk_the_oldest_segment_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(tmp_path, 25, monkeypatch)
    logger = written(tmp_path, bytes(range(100)))
    assert (logger.dropped, logger.fault) == (0, "No space left on device")
    left = everything(tmp_path, logs.segments(str(tmp_path))[0][0])
    assert bytes(range(100)).endswith(left)
    assert len(left) >= 15


def test_bytes_that_had_no_room_are_missed_at_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, 4, monkeypatch)
    source, sink = os.pipe()
    logger = logs.Logger(source, str(tmp_path), 10)
    logger._append(b"abcdefgh")
    disk.room = 100
    logger._append(b"ijkl")
    os.close(sink)
    logger.run()
    assert (logger.dropped, logger.offset) == (4, 12)
    assert logs.read(str(tmp_path), 0) == (0, b"abcd")
    assert logs.read(str(tmp_path), 4) == (8, b"ijkl")
    assert logs.end(str(tmp_path)) == 12
    assert logs.tail(str(tmp_path), 6) == b"ijkl"


@pytest.mark.parametrize("error", [errno.EROFS, errno.EIO])
def test_a_broken_disk_blocks_nobody_and_costs_no_older_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """The disk becomes read-only, or fails, when the log has several segments."""
    logger = logs.Logger(os.pipe()[0], str(tmp_path), 10)
    logger._append(b"a" * 25)

    def broken(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        for name in ("open", "write", "unlink"):
            patch.setattr(f"tpu_ops.host.logs.os.{name}", broken)
        logger._append(b"b" * 7)
        logger._append(b"c" * 5)
    logger._append(b"d" * 3)
    assert logger.facts() == {"bytes": 28, "dropped": 12, "rotated": 0, "fault": os.strerror(error)}
    assert [logs.read(str(tmp_path), offset) for offset in (0, 10, 20, 25)] == [
        (0, b"a" * 10),
        (10, b"a" * 10),
        (20, b"a" * 5),
        (37, b"ddd"),
    ]


def test_a_segment_that_cannot_be_removed_on_a_full_disk_stops_no_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(tmp_path, 25, monkeypatch)

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tpu_ops.host.logs.os.unlink", refused)
    logger = written(tmp_path, bytes(range(100)))
    assert logger.dropped == 75
    assert everything(tmp_path) == bytes(range(25))


class Stall:
    """Plays a disk on which one kind of call on segments does not return until it is let go."""

    def __init__(self, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.call, self.let_go = getattr(os, call), threading.Event()
        monkeypatch.setattr(f"tpu_ops.host.logs.os.{call}", self)

    def __call__(self, what: int | str, *values: Any, **named: Any) -> Any:
        path = Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else Path(what)
        if path.suffix == ".log":
            assert self.let_go.wait(60)
        return self.call(what, *values, **named)


@pytest.mark.parametrize("call", ["open", "write", "close", "unlink"])
def test_a_stalled_disk_slows_no_rank_and_gaps_are_reported_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder, size = str(tmp_path), 3 * logs.BUFFER
    data = b"".join(number.to_bytes(8, "big") for number in range(size // 8))
    stall = Stall(call, monkeypatch)
    source, sink = os.pipe()
    # Large enough for all that is kept, but where removing is to stall.
    logger = logs.Logger(source, folder, 2**20, 3 * 2**20 if call == "unlink" else 2**30)
    rank = threading.Thread(target=lambda: (os.write(sink, data), os.write(sink, b"!")), daemon=True)
    logger.start()
    try:
        rank.start()
        rank.join(20)
        assert not rank.is_alive()
        # What waits in the pipe yet would have room again once the disk goes on.
        await_(lambda: logger.came == size + 1)
        assert logger.offset + logger.unread() == size + 1
        facts = logger.facts(last=True)
        assert facts["bytes"] + facts["dropped"] == size + 1
        assert facts["dropped"] >= size - 3 * 2**20, "what waits counts as lost where the run ends now"
    finally:
        stall.let_go.set()
    await_(lambda: logger.offset == size + 1)
    os.write(sink, b"later")
    await_(lambda: logs.tail(folder, 5) == b"later")
    os.close(sink)
    logger.join(10)
    holes, at = [], logs.segments(folder)[0][0]
    assert bool(at) == (call == "unlink")
    while (found := logs.read(folder, at))[1]:
        start, read = found
        if start > at:
            holes.append((at, start))
        assert (data + b"!later")[start:][: len(read)] == read
        at = start + len(read)
    [(begin, end)] = holes
    assert (begin >= logs.BUFFER, end, at) == (True, size + 1, size + 6)
    facts = logger.facts(last=True)
    assert bool(facts.pop("rotated")) == (call == "unlink")
    assert facts == {"bytes": begin + 5, "dropped": end - begin, "fault": "the disk could not store the output in time"}


def await_(holds: Any) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_of_a_burst_nothing_is_lost_where_the_disk_takes_it_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that writes faster than a sound disk is slowed to its pace."""
    write, data = os.write, bytes(range(256)) * (2 * logs.BUFFER // 256)

    def slow(handle: int, piece: bytes) -> int:
        if Path(f"/proc/self/fd/{handle}").readlink().suffix == ".log":
            time.sleep(0.001)
        return write(handle, piece)

    monkeypatch.setattr("tpu_ops.host.logs.os.write", slow)
    # On a machine that is busy a sound disk is slower than that.
    monkeypatch.setattr(logs, "_PATIENCE", 10)
    logger = written(tmp_path, data, segment=2**20)
    assert logger.facts() == {"bytes": len(data), "dropped": 0, "rotated": 0, "fault": ""}
    assert logs.tail(str(tmp_path), len(data)) == data


def test_a_time_means_the_first_byte_that_may_be_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 100.0}
    monkeypatch.setattr("tpu_ops.host.logs.time.time", lambda: clock["now"])
    monkeypatch.setattr("tpu_ops.host.logs.time.monotonic", lambda: clock["now"])
    source, sink = os.pipe()
    logger = logs.Logger(source, str(tmp_path), 10)
    for moment, data in ((100.0, b"abcd"), (110.0, b"efgh"), (110.5, b"ijkl"), (200.0, b"mnop")):
        clock["now"] = moment
        logger._append(data)
    os.close(sink)
    logger.run()
    found = [logs.since(str(tmp_path), moment) for moment in (0, 100, 105, 110, 111, 200, 300)]
    assert found == [0, 0, 4, 4, 10, 12, 16]
    assert logs.since(str(tmp_path / "none"), 5.0) == 0
    # What was written before 110.5 is rotated away.
    Path(tmp_path, f"{0:020d}.log").unlink()
    assert [logs.since(str(tmp_path), moment) for moment in (100, 110.5, 200, 300)] == [0, 10, 12, 16]


def test_a_log_segment_without_an_index_is_shown_whole(tmp_path: Path) -> None:
    """The disk was full when the segment was created, so that it has no index."""
    for start, written, index in ((0, 110.0, "100.000 0\n105.000 4\n"), (9, 200.0, ""), (20, 300.0, None)):
        segment = tmp_path / f"{start:020d}.log"
        segment.write_bytes(b"abc")
        os.utime(segment, (written, written))
        if index is not None:
            segment.with_suffix(".index").write_text(index)
    assert [logs.since(str(tmp_path), moment) for moment in (100, 105, 150, 250, 301)] == [0, 4, 9, 20, 23]
    (tmp_path / f"{0:020d}.log").unlink()
    # Whatever there was before may have been written then as well.
    assert [logs.since(str(tmp_path), moment) for moment in (150, 250, 301)] == [0, 0, 23]


def test_a_segment_that_goes_while_its_end_is_looked_for_is_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "segments", lambda _: [(7, str(tmp_path / "gone.log"))])
    assert logs.end(str(tmp_path)) == 7
