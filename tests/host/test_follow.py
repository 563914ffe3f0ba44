"""The messages to a follower at the end of a log."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpu_ops.host import follow, logs
from tpu_ops.host.caller import Caller
from tpu_ops.host.store import Store
from tpu_ops.protocol import wire


def test_missing_bytes_at_the_end_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full until the end of a run, no byte follows the gap."""
    monkeypatch.setattr(follow, "require_root", lambda: None)
    store = Store(str(tmp_path))
    store.prepare("r1", os.getuid(), os.getgid())
    facts = {"bytes": 3, "dropped": 40, "rotated": 0, "fault": "No space left on device"}
    store.write({"run_id": "r1", "attempt": 1, "state": "succeeded", "cgroup": "", "notes": [], "log": facts})
    Path(store.logs("r1"), f"{0:020d}.log").write_bytes(b"abc")
    source, sink = os.pipe()
    other, said = os.pipe()
    request = {"marker": "0123456789", "protocol": wire.PROTOCOL, "run_id": "r1"}
    follow.follow(request, store, Caller(source, attended=True), said)
    os.close(said)
    with os.fdopen(other, "rb") as file:
        answer, found = file.read(), []
    rest = answer.split(b"\n", 3)[3]
    while rest:
        kind, offset, size = wire.FRAME.unpack_from(rest)
        found.append((kind, offset, rest[wire.FRAME.size :][:size] if kind == wire.DATA else b""))
        rest = rest[wire.FRAME.size + size :]
    os.close(source)
    os.close(sink)
    assert found == [(wire.DATA, 0, b"abc"), (wire.GAP, 43, b""), (wire.END, 43, b"")]


@pytest.mark.parametrize(
    ("since", "frames"),
    [
        (50.0, wire.frame(wire.GAP, 9) + wire.frame(wire.DATA, 9, b"abc")),
        (100.0, wire.frame(wire.DATA, 9) + wire.frame(wire.DATA, 9, b"abc")),
        (150.0, wire.frame(wire.DATA, 11) + wire.frame(wire.DATA, 11, b"c")),
    ],
)
def test_lines_before_the_oldest_kept_one_are_reported_as_missing(tmp_path: Path, since: float, frames: bytes) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    Path(folder, f"{9:020d}.log").write_bytes(b"abc")
    Path(folder, f"{9:020d}.index").write_text("100.000 9\n200.000 11\n")
    rank: Any = SimpleNamespace(observe=lambda: {"state": "failed"}, aside=True)
    with (tmp_path / "said").open("wb") as said:
        caller = Caller(said.fileno(), attended=False)
        follow._send({"since": since, "live": False}, rank, str(folder), caller, said.fileno())
    sent = (tmp_path / "said").read_bytes()
    assert sent[: len(frames)] == frames
    assert wire.FRAME.unpack_from(sent, len(frames))[:2] == (wire.END, 12)


def test_missing_lines_after_the_requested_time_are_counted_from_there(tmp_path: Path) -> None:
    """The first frame says where the lines begin, also where a hole comes before the first byte."""
    Path(tmp_path, f"{9:020d}.log").write_bytes(b"abc")
    Path(tmp_path, f"{9:020d}.index").write_text("100.000 9\n200.000 12\n")
    Path(tmp_path, f"{20:020d}.log").write_bytes(b"de")
    rank: Any = SimpleNamespace(observe=lambda: {"state": "failed"}, aside=True)
    with (tmp_path / "said").open("wb") as said:
        caller = Caller(said.fileno(), attended=False)
        follow._send({"since": 150.0, "live": False}, rank, str(tmp_path), caller, said.fileno())
    frames = wire.frame(wire.DATA, 12) + wire.frame(wire.GAP, 20) + wire.frame(wire.DATA, 20, b"de")
    assert (tmp_path / "said").read_bytes().startswith(frames)


def test_frames_end_without_an_end_where_another_attempt_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt has another log, in which the old offset has no meaning."""
    monkeypatch.setattr(follow, "require_root", lambda: None)
    store = Store(str(tmp_path))
    known: dict[str, Any] = {"run_id": "r1", "state": "failed", "cgroup": "", "notes": [], "log": None}
    attempts = iter([1, 1, 2, 2, 2])
    monkeypatch.setattr(store, "observe", lambda run_id: {**known, "attempt": next(attempts)})
    Path(store.logs("r1")).mkdir(parents=True)
    Path(store.logs("r1"), f"{0:020d}.log").write_bytes(b"abc")
    with (tmp_path / "said").open("wb") as said, Path(os.devnull).open("rb") as source:
        request = {"marker": "0123456789", "protocol": wire.PROTOCOL, "run_id": "r1"}
        follow.follow(request, store, Caller(source.fileno(), attended=False), said.fileno())
    frames = (tmp_path / "said").read_bytes().split(b"\n", 3)[3]
    assert frames == wire.frame(wire.DATA, 0, b"abc")


@pytest.mark.parametrize("rebooted", [True, False])
def test_a_lost_run_is_waited_for_only_if_systemd_may_close_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rebooted: bool
) -> None:
    monkeypatch.setattr(follow, "require_root", lambda: None)
    store, now = Store(str(tmp_path)), [0.0]
    boot, init = ("another", 1) if rebooted else store.boot()
    known = {"run_id": "r1", "state": "lost", "attempt": 1, "cgroup": "", "notes": [], "log": None}
    known |= {"boot_id": boot, "init_start": init}
    monkeypatch.setattr(store, "observe", lambda _: known)
    Path(store.logs("r1")).mkdir(parents=True)

    def pause(_self: Caller, _seconds: float) -> None:
        now[0] += 1

    monkeypatch.setattr("tpu_ops.host.follow.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Caller, "pause", pause)
    with (tmp_path / "said").open("wb") as said, Path(os.devnull).open("rb") as source:
        request = {"marker": "0123456789", "protocol": wire.PROTOCOL, "run_id": "r1"}
        follow.follow(request, store, Caller(source.fileno(), attended=False), said.fileno())
    assert (now[0] >= follow._CLOSING_LIMIT) is not rebooted


class Lagging:
    """Two attempts of a run, the second of which begins while the first one's log is being sent."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **record: Any) -> None:
        self.store = Store(str(folder))
        self.record = {"run_id": "r1", "state": "failed", "since": 1, "cgroup": "", "notes": ["a note"]}
        self.record.update(record)
        self._begin(1, b"1" * 30)
        self._sink = os.open(folder / "said", os.O_CREAT | os.O_RDWR)
        self.written, self._write = 0, wire.write_all
        monkeypatch.setattr(follow, "require_root", lambda: None)
        monkeypatch.setattr(logs.read, "__defaults__", (7,))

    def _begin(self, attempt: int, data: bytes) -> None:
        self.store.prepare("r1", os.getuid(), os.getgid())
        log = {"bytes": 30, "dropped": 4, "rotated": 0, "fault": ""}
        self.store.write({**self.record, "attempt": attempt, "log": log})
        for offset in range(0, len(data), 10):
            Path(self.store.logs("r1"), f"{offset:020d}.log").write_bytes(data[offset : offset + 10])

    def frames(self, monkeypatch: pytest.MonkeyPatch, after: int, *, pruned: bool = False, live: bool = True) -> Any:
        """Follow; the next attempt begins once so many pieces were sent, of which the first is the answer."""

        def write_all(sink: int, data: bytes) -> None:
            self._write(sink, data)
            self.written += 1
            if self.written == after:
                self._begin(2, b"2" * 60)
                if pruned:
                    shutil.rmtree(Path(self.store.directory("r1"), "attempts", "1"))

        monkeypatch.setattr(wire, "write_all", write_all)
        request = {"marker": "0123456789", "protocol": wire.PROTOCOL, "run_id": "r1", "live": live}
        with Path(os.devnull).open("rb") as source:
            follow.follow(request, self.store, Caller(source.fileno(), attended=False), self._sink)
        rest = os.pread(self._sink, 2**20, 0).split(b"\n", 3)[3]
        os.close(self._sink)
        found = []
        while rest:
            kind, offset, size = wire.FRAME.unpack_from(rest)
            found.append((kind, offset, rest[wire.FRAME.size :][:size]))
            rest = rest[wire.FRAME.size + size :]
        return found


@pytest.mark.parametrize("later", [1, 2], ids=["the same attempt again", "the next attempt"])
def test_each_start_of_a_run_has_its_own_log_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    store = Store(str(tmp_path))
    known: dict[str, Any] = {"run_id": "r1", "state": "failed", "cgroup": "", "notes": []}
    first = {**known, "attempt": 1, "supervisor": {"pid": 1, "start": 1}}
    second = {**known, "attempt": later, "supervisor": {"pid": 1, "start": 2}}
    store.prepare("r1", os.getuid(), os.getgid())
    store.write(first)
    Path(store.logs("r1"), f"{0:020d}.log").write_bytes(b"first")
    looks = 0

    def log(record: dict[str, Any]) -> bytes | None:
        descriptor = follow._opened(store, record)
        if descriptor is None:
            return None
        try:
            return logs.tail(f"/proc/self/fd/{descriptor}", 10)
        finally:
            os.close(descriptor)

    def between(step: Any) -> Any:
        def stepped(*paths: Any, **options: Any) -> None:
            nonlocal looks
            for each in (lambda: None, lambda: step(*paths, **options)):
                each()
                begun = store.read("r1") == second
                assert (log(first), begun and log(second)) in [(b"first", False), (b"first", None), (b"first", b"")]
                looks += 1

        return stepped

    with monkeypatch.context() as patch:
        for name in ("link", "rename", "replace", "mkdir"):
            patch.setattr(f"tpu_ops.host.store.os.{name}", between(getattr(os, name)))
        store.write(second)
    assert looks >= 8
    Path(store.logs("r1"), f"{0:020d}.log").write_bytes(b"second")
    assert (log(first), log(second)) == (b"first", b"second")


def test_a_log_that_is_begun_just_behind_its_record_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    found: dict[str, Any] = {"run_id": "r1", "attempt": 1, "state": "starting", "cgroup": "", "notes": []}
    store.make("r1")
    store.write(found)

    class Peer:
        @staticmethod
        def pause(_: float) -> None:
            Path(store.logs("r1")).mkdir()
            Path(store.logs("r1"), f"{0:020d}.log").write_bytes(b"abc")

    caller: Any = Peer()
    with follow._log_of(store, found, caller) as directory:
        assert logs.tail(directory, 10) == b"abc"
    Path(store.logs("r1"), f"{0:020d}.log").unlink()
    Path(store.logs("r1")).rmdir()
    monkeypatch.setattr(Peer, "pause", lambda _: pytest.fail("one that has ended begins no log any more"))
    with follow._log_of(store, {**found, "state": "refused"}, caller) as directory:
        assert logs.tail(directory, 10) == b""


#: What the first attempt's log is in reads of 7 bytes from segments of 10.
FIRST = [(wire.DATA, 10 * number + at, b"1" * size) for number in range(3) for at, size in ((0, 7), (7, 3))]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("after", [1, 2, 4, 7, 8])
def test_the_rest_of_an_attempt_is_read_from_its_archived_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, live: bool
) -> None:
    lagging = Lagging(tmp_path, monkeypatch)
    monkeypatch.setattr(lagging.store, "settle", lambda _: pytest.fail("the next one is on"))
    *found, (kind, at, value) = lagging.frames(monkeypatch, after, live=live)
    assert (kind, at) == (wire.END, 34)
    assert found == [*FIRST, (wire.NOTE, 30, b"a note"), (wire.GAP, 34, b"")]
    assert json.loads(value)["record"]["attempt"] == 1
    assert json.loads(value)["tail"] == "1" * 30


@pytest.mark.parametrize("after", [1, 2, 4, 7])
def test_of_an_attempt_that_is_removed_while_it_is_sent_nothing_more_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    found = Lagging(tmp_path, monkeypatch).frames(monkeypatch, after, pruned=True)
    assert [frame for frame in found if frame[0] != wire.NOTE] == FIRST[: after - 1]


def test_an_attempt_that_was_set_aside_without_its_end_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {"boot_id": "another", "init_start": 1}
    *_, (kind, _, value) = Lagging(tmp_path, monkeypatch, state="running", **ids).frames(monkeypatch, 2)
    found = json.loads(value)["record"]
    assert (kind, found["state"], found["attempt"]) == (wire.END, "lost", 1)
