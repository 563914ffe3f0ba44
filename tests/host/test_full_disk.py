"""A disk that takes no record: an active run ends normally and can be read, and no new run starts."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.alone import ALONE, live
from tests.support.specs import good, myself
from tpu_ops.host import after as behind
from tpu_ops.host import child, ending, keeper, link, logs, private, rank_record, spec_files, supervise, unit
from tpu_ops.host.after import after
from tpu_ops.host.command import NotReady
from tpu_ops.host.store import Store
from tpu_ops.protocol import spec

FULL = "No space left on device"


class Disk:
    """Plays the disk below /var/lib: it takes nothing while it is full. Memory is below /run."""

    def __init__(self) -> None:
        self.full = True
        self._fsync = os.fsync

    def fsync(self, handle: int) -> None:
        if self.full and "/var/lib/" in str(Path(f"/proc/self/fd/{handle}").readlink()):
            raise OSError(errno.ENOSPC, FULL)
        self._fsync(handle)


class Stall:
    """Plays a disk that is behind with what others have written: it takes what it is given once it is let go."""

    def __init__(self) -> None:
        self.stalls, self.let_go = False, threading.Event()
        self._fsync = os.fsync

    def fsync(self, handle: int) -> None:
        if self.stalls and "/var/lib/" in str(Path(f"/proc/self/fd/{handle}").readlink()):
            assert self.let_go.wait(30)
        self._fsync(handle)


def test_a_stalled_disk_delays_nothing_and_gets_the_newest_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall, beats = Stall(), list[str]()
    monkeypatch.setattr("tpu_ops.host.store.os.fsync", stall.fsync)
    monkeypatch.setattr(keeper, "PATIENCE", 0.05)
    monkeypatch.setattr(keeper, "_BEAT", 0.05)

    def notify(text: str) -> None:
        beats.append(text)
        if not stall.let_go.is_set():
            assert known(tmp_path)["state"] == "ending", "nobody takes the worker for free meanwhile"
        if len(beats) == 3:
            stall.let_go.set()

    supervisor = supervise.Supervisor(Store(str(tmp_path)), "r1")
    supervisor.record = rank_record.new_record(spec.check(good(**ALONE)), myself(), os.getuid(), "")
    supervisor._keep()
    stall.stalls = True
    supervisor._save(state="running")
    supervisor._save(state="ending")
    assert known(tmp_path)["state"] == "ending"
    assert written(tmp_path)["state"] == "starting"
    monkeypatch.setattr("tpu_ops.host.supervise.unit.notify", notify)
    supervisor._finish(state="stopped")
    assert set(beats) == {"WATCHDOG=1"}, "systemd does not take it for one that hangs"
    assert (written(tmp_path)["state"], written(tmp_path)["notes"]) == ("stopped", [])
    assert not list((tmp_path / "run/tpu_ops/records").iterdir())


def test_a_disk_that_stalls_for_ever_leaves_the_last_record_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall = Stall()
    monkeypatch.setattr("tpu_ops.host.store.os.fsync", stall.fsync)
    monkeypatch.setattr(keeper, "LAST_PATIENCE", 0.05)
    supervisor = supervise.Supervisor(Store(str(tmp_path)), "r1")
    supervisor.record = rank_record.new_record(spec.check(good(**ALONE)), myself(), os.getuid(), "")
    supervisor._keep()
    stall.stalls = True
    supervisor._finish(state="stopped")
    assert (known(tmp_path)["state"], written(tmp_path)["state"]) == ("stopped", "starting")
    stall.let_go.set()


@pytest.mark.parametrize("late", [False, True], ids=["while it ends", "at its very end"])
@pytest.mark.parametrize(("wanted", "noted"), [(True, "ada"), (False, "")])
def test_a_stop_request_is_recorded_if_the_run_ends_for_another_reason(
    tmp_path: Path, wanted: bool, noted: str, late: bool
) -> None:
    supervisor = supervise.Supervisor(Store(str(tmp_path)), "r1")
    supervisor.record = rank_record.new_record(spec.check(good(**ALONE)), myself(), os.getuid(), "")
    supervisor._keep()
    supervisor.intent = {"kind": "failed", "by": "the run itself"}
    supervisor.store.put_intent("r1", {"kind": "stop", "by": "ada", "requested": wanted})
    if not late:
        supervisor._asked_to_end()
    supervisor._finish(state="stopped", intent=supervisor.intent)
    assert (written(tmp_path)["stop_requested_by"], written(tmp_path)["intent"]["kind"]) == (noted, "failed")


def test_an_attempt_just_after_a_stop_is_refused_and_the_stop_is_kept(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    ended = rank_record.new_record(spec.check(good(**ALONE)), myself(), os.getuid(), "") | {"state": "failed"}
    store.prepare("r1", os.getuid(), os.getgid())
    store.write(ended)
    rank_record.note_stop_request(store, {**ended, "attempt": 2}, "bob")
    assert written(tmp_path)["stop_requested_by"] == "", "another attempt was meant"
    rank_record.note_stop_request(store, ended, "ada")
    supervisor = supervise.Supervisor(store, "r1")
    supervisor.record = rank_record.new_record(spec.check(good(**ALONE, attempt=2)), myself(), os.getuid(), "")
    with pytest.raises(NotReady, match="run r1 was stopped by ada"):
        supervisor._keep()
    assert (written(tmp_path)["attempt"], written(tmp_path)["stop_requested_by"]) == (2, "ada")


def test_a_stop_of_a_rank_that_is_ending_anyway_is_written_at_once(tmp_path: Path) -> None:
    supervisor = supervise.Supervisor(Store(str(tmp_path)), "r1")
    supervisor.record = rank_record.new_record(spec.check(good(**ALONE)), myself(), os.getuid(), "")
    supervisor._keep()
    supervisor.intent = {"kind": "failed", "by": "the run itself"}
    supervisor.store.put_intent("r1", {"kind": "stop", "by": "ada", "requested": True})
    supervisor._asked_to_end()
    assert written(tmp_path)["stop_requested_by"] == "ada"


def test_a_stop_before_a_dead_supervisors_record_is_closed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    running = rank_record.new_record(spec.check(good(**ALONE)), myself(), os.getuid(), "") | {"state": "running"}
    store.prepare("r1", os.getuid(), os.getgid())
    store.write(running)

    def chips() -> dict[str, Any]:
        rank_record.note_stop_request(store, running, "ada")
        return {"holders": []}

    monkeypatch.setattr("tpu_ops.host.after.chips_after", chips)
    after(store, "r1")
    assert (written(tmp_path)["state"], written(tmp_path)["stop_requested_by"]) == ("failed", "ada")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk()
    monkeypatch.setattr("tpu_ops.host.store.os.fsync", found.fsync)
    for place in ("supervise", "after"):
        monkeypatch.setattr(f"tpu_ops.host.{place}.chips_after", lambda *_: {"holders": []})
    return found


def begun(folder: Path, disk: Disk, **changes: Any) -> supervise.Supervisor:
    """Return the supervisor of a run whose record was written before the disk was full."""
    found = supervise.Supervisor(Store(str(folder)), "r1")
    found.record = rank_record.new_record(spec.check(good(**ALONE | changes)), myself(), os.getuid(), "")
    disk.full = False
    found._keep()
    disk.full = True
    return found


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "var/lib/tpu_ops/runs/r1/record.json").read_text())
    return found


def known(folder: Path) -> dict[str, Any]:
    """Return the record as another process reads it."""
    found = Store(str(folder)).observe("r1")
    assert found is not None
    assert [each["run_id"] for each in Store(str(folder)).recent(5)] == ["r1"]
    return found


@pytest.mark.usefixtures("waits")
def test_a_run_on_a_full_disk_ends_in_order_and_its_end_is_known(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def end_tree(*args: Any) -> list[dict[str, Any]]:
        done.append("end")
        return ending.end_tree(*args)

    data = spec.check(good(**ALONE))
    supervisor = begun(tmp_path, disk)
    source, sink = os.pipe()
    supervisor.child = child.Child.fork(["sleep", "60"], {b"PATH": b"/usr/bin:/bin"}, "/", myself(), sink)
    os.close(sink)
    # A directory plays the control group: this process and the command.
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n{supervisor.child.pid}\n")
    supervisor.record["cgroup"] = str(tmp_path)
    supervisor.link = link.Alone(link.team(data, "digest"), lambda: None)
    supervisor.link.start()
    assert supervisor._may_go()
    supervisor.child.go()
    supervisor._save(state="running")
    monkeypatch.setattr(supervise, "end_tree", end_tree)
    say = supervisor.link.say

    def said(**event: Any) -> None:
        done.append(event["say"])
        say(**event)

    monkeypatch.setattr(supervisor.link, "say", said)
    signal.raise_signal(signal.SIGTERM)
    supervisor.store.put_intent("r1", {"kind": "stop", "by": "ada", "reason": "stopped by ada", "grace": 5})
    supervisor._live(data, logs.Logger(source, str(tmp_path)), "")
    os.close(source)
    assert done == ["stop", "end", "done"], "the others are told before anything is ended here"
    found = known(tmp_path)
    assert (found["state"], found["exit"], found["reason"]) == ("stopped", {"signal": signal.SIGTERM}, "stopped by ada")
    assert [note for note in found["notes"] if "rank 0 (w0)" in note and FULL in note] == found["notes"]
    assert len(found["notes"]) == 1
    assert written(tmp_path)["state"] == "starting"
    assert sorted(path.name for path in (tmp_path / "var/lib/tpu_ops/runs/r1").iterdir()) == [
        "files",
        "log",
        "record.json",
    ]


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("comes_back", [True, False])
def test_the_last_output_on_a_stalled_disk_is_awaited_or_counted_as_lost(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    let_go, write, beats = threading.Event(), os.write, list[str]()

    def stalls(handle: int, data: bytes) -> int:
        if str(Path(f"/proc/self/fd/{handle}").readlink()).endswith(".log"):
            assert let_go.wait(30)
        return write(handle, data)

    def notify(text: str) -> None:
        beats.append(text)
        if comes_back and len(beats) == 12:
            let_go.set()

    monkeypatch.setattr("tpu_ops.host.logs.os.write", stalls)
    monkeypatch.setattr("tpu_ops.host.supervise.unit.notify", notify)
    monkeypatch.setattr(supervise, "_TICK", 0.05)
    monkeypatch.setattr(supervise, "_DRAIN", 10 if comes_back else 0.6)
    disk.full = False
    # No more than a pipe holds: some of it is in the hand of the logger, the rest stays in the pipe.
    _, logger = live(tmp_path, "head -c 30000 /dev/zero; sleep 0.1; head -c 30000 /dev/zero; exit 3")
    found = written(tmp_path)
    if comes_back:
        assert found["log"] == {"bytes": 60_000, "dropped": 0, "rotated": 0, "fault": ""}
    else:
        fault = "the run ended before the output was written"
        assert found["log"] == {"bytes": 0, "dropped": 60_000, "rotated": 0, "fault": fault}
    assert set(beats) == {"WATCHDOG=1"}
    let_go.set()
    logger.join(10)


def test_records_are_written_once_the_disk_takes_them(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = begun(tmp_path, disk)
    supervisor.link = link.Alone(link.team(good(**ALONE), "digest"), lambda: None)
    supervisor._save(state="running")
    supervisor._listen()
    monkeypatch.setattr(supervise, "_TICK", 0.0)
    supervisor._listen()
    assert (known(tmp_path)["state"], written(tmp_path)["state"]) == ("running", "starting")
    memory = tmp_path / "run/tpu_ops/records"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (memory, memory / "r1.json")] == [0o700, 0o600]
    disk.full = False
    supervisor._listen()
    assert (known(tmp_path)["state"], written(tmp_path)["state"]) == ("running", "running")
    assert list(memory.iterdir()) == []
    assert len(known(tmp_path)["notes"]) == 1


def test_the_record_of_a_dead_supervisor_is_closed_on_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    begun(tmp_path, disk)._save(state="running")
    store = Store(str(tmp_path))
    assert after(store, "r1") == 0
    assert (known(tmp_path)["state"], written(tmp_path)["state"]) == ("failed", "starting")
    disk.full = False
    assert after(store, "r1") == 0
    assert written(tmp_path)["state"] == "failed"


def test_processes_left_by_a_dead_supervisor_are_recorded_as_stuck(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where it waits inside the kernel.
    monkeypatch.setattr(ending, "send", lambda *_: None)
    monkeypatch.setattr(ending, "KILL_LIMIT", 0.2)
    store, group, supervisor = Store(str(tmp_path)), tmp_path / "group", begun(tmp_path, disk)
    disk.full = False
    supervisor._save(state="running", cgroup=str(group))
    group.mkdir()
    with subprocess.Popen(["sleep", "20"]) as left:
        (group / "cgroup.procs").write_text(f"{os.getpid()}\n{left.pid}\n")
        after(store, "r1")
        left.kill()
    [stuck] = written(tmp_path)["stuck"]
    assert (stuck["pid"], stuck["command"]) == (left.pid, "sleep")


class Clock:
    """Plays the time: only who waits has it go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock for what comes behind a supervisor, which kills nothing: the test says what is there, and when."""
    clock = Clock()
    for module in (ending, private, behind):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(ending, "send", lambda *_: None)
    return clock


@pytest.mark.parametrize(("gone", "stuck"), [(0.3, False), (9.0, False), (60.0, True)])
def test_killed_processes_get_as_long_to_end_without_a_supervisor(
    slow: Clock, monkeypatch: pytest.MonkeyPatch, gone: float, stuck: bool
) -> None:
    monkeypatch.setattr(ending, "others", lambda _: [os.getpid()] if slow.now < gone else [])
    assert [entry["pid"] for entry in ending.end_left("")] == ([os.getpid()] if stuck else [])


def test_slow_processes_and_a_held_lock_leave_time_to_close_the_record(
    tmp_path: Path, disk: Disk, slow: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a grace period, systemd still gives a minimum of time."""
    monkeypatch.setattr(ending, "others", lambda _: [os.getpid()] if slow.now < 9 else [])
    store = begun(tmp_path, disk).store
    disk.full = False
    with private.opened(str(Path(private.directory(store.run_dir, "changes"), "r1"))) as file:
        assert private.take(file)
        assert after(store, "r1") == 0
    assert (written(tmp_path)["state"], written(tmp_path)["stuck"]) == ("failed", [])
    assert 10 < slow.now < unit.STOP_MARGIN - 1


def test_processes_of_a_dead_supervisor_are_ended(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as left:
        (tmp_path / "cgroup.procs").write_text(f"{left.pid}\n")
        assert ending.end_left(str(tmp_path)) == []
        assert left.wait(10) == -signal.SIGKILL


@pytest.mark.usefixtures("waits")
def test_no_run_begins_on_a_full_disk(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    spec_files.put(store.run_dir, spec.check(good(**ALONE)), os.getuid(), os.getuid(), "")
    supervisor = supervise.Supervisor(store, "r1")
    monkeypatch.setattr(supervisor, "_prepare", lambda *_: pytest.fail("nothing is to be prepared"))
    assert supervisor.run() == 1
    found = known(tmp_path)
    assert (found["state"], found["blamed"]) == ("refused", [0])
    assert (
        f"no record or log can be kept in {store.runs_dir}: {FULL} ({store.runs_dir.partition('/var')[0]}"
        in found["reason"]
    )
    assert " MiB free); make room on this file system: `df " in found["reason"]


def test_a_lockfile_on_a_read_only_disk_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lockfile = tmp_path / "libtpu_lockfile"
    lockfile.touch()

    def refused(_: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(ending, "LOCKFILES", (str(lockfile),))
    monkeypatch.setattr("tpu_ops.host.ending.proc.holders", lambda **_: [])
    with monkeypatch.context() as patch:
        patch.setattr("tpu_ops.host.ending.os.unlink", refused)
        assert ending.chips_after()["lockfiles_kept"] == [str(lockfile)]
    assert ending.chips_after()["lockfiles_removed"] == [str(lockfile)]


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_record_of_another_run_goes_to_the_disk_or_is_forgotten(tmp_path: Path, disk: Disk, on_disk: bool) -> None:
    """The next run writes the record to the disk, unless the disk has nothing of that run."""
    store = Store(str(tmp_path))
    disk.full = False
    if on_disk:
        store.prepare("r1", os.getuid(), os.getgid())
    disk.full = True
    assert store.save({"run_id": "r1", "state": "failed", "since": 1.0}) != ""
    disk.full = False
    store.prepare("r2", os.getuid(), os.getgid())
    assert list((tmp_path / "run/tpu_ops/records").iterdir()) == []
    assert (store.read("r1") is not None) == on_disk
