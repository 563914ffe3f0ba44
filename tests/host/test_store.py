"""What stands of runs on a worker is root's alone, is there at any moment, and outlives whoever is killed over it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.alone import ALONE
from tests.support.specs import good, myself
from tpu_ops.host import actions, ending, logs, private, proc, rank_record, spec_files, supervise
from tpu_ops.host.after import after
from tpu_ops.host.caller import Caller
from tpu_ops.host.store import Store
from tpu_ops.protocol import spec, wire

#: Locks the file that it is called with until its input ends.
LOCKER = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, 2); print('locked', flush=True); input()"


class Killed(BaseException):
    """This process gets no further."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def begun(store: Store, attempt: int = 1, **changes: Any) -> dict[str, Any]:
    """Have an attempt of a run begin, and return its record."""
    found = rank_record.new_record(spec.check(good(**ALONE, attempt=attempt)), myself(), os.getuid(), "") | changes
    store.prepare(found["run_id"], os.getuid(), os.getgid())
    store.write(found)
    return found


def ended(store: Store, attempt: int = 1, **changes: Any) -> dict[str, Any]:
    """Leave an attempt whose log is its number."""
    found = begun(store, attempt, state="failed", **changes)
    Path(store.logs(found["run_id"]), f"{0:020d}.log").write_text(str(attempt))
    return found


def shown(store: Store) -> tuple[int, bytes]:
    """Return the attempt and the log of the run as whoever asks for them gets them."""
    return (store.observe("r1") or {})["attempt"], logs.tail(store.logs("r1"), 10)


# --- root's alone ---------------------------------------------------------------------------------------------


def _put(store: Store) -> None:
    spec_files.put(store.run_dir, spec.check(good()), os.getuid(), os.getuid(), "")


def _change(store: Store) -> None:
    with store.changing("r1"):
        pass


def _lock(store: Store) -> None:
    lock = store.lock({})
    assert lock is not None
    lock.close()


def _remember(store: Store) -> None:
    store.remember({"run_id": "r1"})


def _intend(store: Store) -> None:
    store.put_intent("r1", {})


def _prepare(store: Store) -> None:
    store.prepare("r1", os.getuid(), os.getgid())


@pytest.mark.parametrize("earlier", [False, True], ids=["after a boot", "as earlier versions left it"])
@pytest.mark.parametrize("first", [_put, _change, _lock, _remember, _intend, _prepare])
def test_nobody_else_can_lock_what_runs_wait_for(store: Store, first: Callable[[Store], None], earlier: bool) -> None:
    """A process can lock every file that it can read."""
    umask = os.umask(0)
    try:
        if earlier:
            for name in ("specs", "records", "intents", "changes"):
                Path(store.run_dir, name).mkdir(parents=True)
            for name in ("lock", "changes/r1"):
                Path(store.run_dir, name).touch(0o644)
        first(store)
        assert stat.S_IMODE(Path(store.run_dir).stat().st_mode) == 0o700
        for each in (_put, _change, _lock, _remember, _intend):
            if each is not first:
                each(store)
    finally:
        os.umask(umask)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in Path(store.run_dir).iterdir()}
    assert found == {**dict.fromkeys(("specs", "records", "intents", "changes"), 0o700), "lock": 0o600}
    assert stat.S_IMODE(Path(store.run_dir, "changes", "r1").stat().st_mode) == 0o600


@contextlib.contextmanager
def kept(store: Store, run_id: str = "r1") -> Iterator[int]:
    """Have another process lock what changes of a run's record are made under; its id is given."""
    path = Path(store.run_dir, "changes", run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    command = [sys.executable, "-c", LOCKER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        try:
            yield other.pid
        finally:
            other.kill()


def test_the_process_that_keeps_records_locked_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "LOCK_LIMIT", 0.2)
    with kept(store) as pid, pytest.raises(wire.Refused) as raised, store.changing("r1"):
        pytest.fail("somebody else has it")
    assert raised.value.message.startswith(f"{store.run_dir}/changes/r1 has been locked by another process for 0 s; ")
    assert f"pid {pid} of {myself().name} (" in raised.value.message
    assert "sudo fuser" in raised.value.fix
    with store.changing("r1"):
        pass


def test_records_that_are_let_go_of_in_time_are_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    file = private.opened(str(Path(private.directory(store.run_dir, "changes"), "r1")))
    assert private.take(file)
    monkeypatch.setattr("tpu_ops.host.private.time.sleep", lambda _: fcntl.flock(file, fcntl.LOCK_UN))
    with store.changing("r1"), pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.close()


@pytest.mark.parametrize("state", ["running", "failed"])
def test_the_record_of_a_dead_supervisor_is_closed_whoever_keeps_it_locked(
    store: Store, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(private, "LOCK_LIMIT", 0.2)
    monkeypatch.setattr("tpu_ops.host.after.chips_after", lambda: {"holders": []})
    begun(store, state=state)
    store.put_intent("r1", {"kind": "stop", "by": "ada", "requested": True})
    with kept(store):
        assert after(store, "r1") == 0
    found = store.read("r1") or {}
    assert (found["state"], found["stop_requested_by"]) == ("stopped" if state == "running" else "failed", "ada")


def test_a_suspended_stop_blocks_no_other_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-Z does, and a control group that is frozen: what sudo starts is in those of whoever called it."""
    monkeypatch.setattr(private, "LOCK_LIMIT", 0.2)
    ended_run = begun(store, run_id="r2", state="failed")
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(store, "save", lambda _: os.kill(os.getpid(), signal.SIGSTOP))
        try:
            rank_record.note_stop_request(store, ended_run, "bob")
        finally:
            os._exit(0)
    try:
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        supervisor = supervise.Supervisor(store, "r1")
        supervisor.record = rank_record.new_record(spec.check(good(**ALONE)), myself(), os.getuid(), "")
        supervisor._keep()
        assert (store.read("r1") or {})["state"] == "starting"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("own", [True, False], ids=["whose it is", "who may not stop it anyway"])
def test_a_stop_that_cannot_be_noted_is_said(store: Store, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    monkeypatch.setattr(private, "LOCK_LIMIT", 0.2)
    monkeypatch.setattr(actions, "require_root", lambda: None)
    monkeypatch.setattr(actions, "asking", myself)
    ended(store, supervisor={"pid": os.getpid(), "start": -1})
    request, caller = {"protocol": wire.PROTOCOL, "run_id": "r1"}, Caller(0, attended=False)
    if not own:

        def refuse(*_: object) -> None:
            raise wire.Refused("denied", "the run belongs to ada")

        monkeypatch.setattr(actions, "_require_control", refuse)
    with kept(store):
        if own:
            with pytest.raises(wire.Refused, match="has been locked by another process"):
                actions.stop(request, store, caller)
        else:
            assert actions.stop(request, store, caller)["already"] is True


def test_a_stop_that_comes_while_another_is_being_read_is_not_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = {"kind": "stop", "by": "recovery"}, {"kind": "stop", "by": "ada", "requested": True}
    store.put_intent("r1", first)
    load = json.loads

    def slow(text: str) -> Any:
        monkeypatch.undo()
        store.put_intent("r1", later)
        return load(text)

    monkeypatch.setattr("tpu_ops.host.private.json.loads", slow)
    assert [store.take_intent("r1") for _ in range(3)] == [first, later, None]
    assert list(Path(store.run_dir, "intents").iterdir()) == []


@pytest.mark.usefixtures("waits")
def test_a_start_that_is_refused_for_a_lock_is_on_record_and_loses_no_stop(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "LOCK_LIMIT", 0.2)
    ended(store, stop_requested_by="ada")
    with kept(store) as pid, kept(store, "r2") as other:
        for run_id, attempt in (("r1", 2), ("r2", 1)):
            data = spec.check(good(**ALONE | {"run_id": run_id, "attempt": attempt}))
            spec_files.put(store.run_dir, data, os.getuid(), os.getuid(), "")
            assert supervise.Supervisor(store, run_id).run() == 1
    store.restore()
    again, new = (store.read(run_id) or {} for run_id in ("r1", "r2"))
    assert [(each["attempt"], each["state"], each["stop_requested_by"]) for each in (again, new)] == [
        (2, "refused", "ada"),
        (1, "refused", ""),
    ]
    assert f"pid {pid} of " in again["reason"]
    assert f"pid {other} of " in new["reason"]
    assert Path(store.directory("r2"), "record.json").exists()


def test_a_probe_tells_whether_a_run_of_a_name_has_been_here(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpu_ops.host.probe.describe", lambda *_: {})
    ended(store)
    asked = {"protocol": wire.PROTOCOL, "user": myself().name}
    found = [actions.probe({**asked, **more}, store)["known"] for more in ({"run_id": "r1"}, {"run_id": "r2"}, {})]
    assert found == [True, False, False]
    with pytest.raises(wire.Refused, match="is not a run id"):
        actions.probe({**asked, "run_id": "../r1"}, store)


# --- from one attempt to the next -----------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["fsync", "link", "rename", "replace"])
def test_there_is_a_record_with_its_log_at_any_moment_between_two_attempts(
    store: Store, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """This holds after a power failure too, and the start of another run removes none of it."""
    ended(store)

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(f"tpu_ops.host.store.os.{step}", killed)
        with pytest.raises(Killed):
            begun(store, 2)
    assert shown(store) == (1, b"1")
    begun(store, run_id="r2")
    assert shown(store) == (1, b"1")
    ended(store, 3)
    assert shown(store) == (3, b"3")
    aside = Path(store.directory("r1"), "attempts")
    assert [path.name for path in aside.iterdir()] == ["1"]
    assert json.loads((aside / "1" / "record.json").read_text())["attempt"] == 1
    assert logs.tail(str(aside / "1" / "log"), 10) == b"1"


def test_the_log_of_the_last_attempt_is_found_until_the_next_record(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(store)
    seen, replace = [], os.replace

    def replaced(*paths: Any) -> None:
        seen.append(shown(store))
        replace(*paths)

    monkeypatch.setattr("tpu_ops.host.private.os.replace", replaced)
    begun(store, 2)
    assert [*seen, shown(store)] == [(1, b"1"), (2, b"")]


def test_the_last_record_of_an_attempt_is_archived_with_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that was killed halfway had already archived the earlier state."""
    last = ended(store)

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("tpu_ops.host.store.os.rename", killed)
        with pytest.raises(Killed):
            begun(store, 2)
    store.write(last | {"reason": "seen later"})
    begun(store, 2)
    aside = json.loads(Path(store.directory("r1"), "attempts", "1", "record.json").read_text())
    assert aside["reason"] == "seen later"


def test_an_attempt_that_was_started_twice_has_two_logs(store: Store) -> None:
    ended(store)
    ended(store, supervisor={"pid": 1, "start": -1})
    assert shown(store) == (1, b"1")
    assert logs.tail(str(Path(store.directory("r1"), "attempts", "1", "log")), 10) == b"1"
    assert logs.end(store.logs("r1")) == 1


def test_an_attempt_that_is_not_on_disk_has_no_log_of_the_earlier_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(store)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tpu_ops.host.private.os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            begun(store, 2)
    store.remember(rank_record.new_record(spec.check(good(**ALONE, attempt=2)), myself(), os.getuid(), ""))
    assert shown(store) == (2, b"")
    begun(store, run_id="r2")
    assert shown(store) == (2, b"")
    assert logs.tail(str(Path(store.directory("r1"), "attempts", "1", "log")), 10) == b"1"


def test_a_killed_start_keeps_the_record_of_an_attempt_before_a_reboot(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpu_ops.host.after.chips_after", lambda: {"holders": []})
    begun(store, state="running", boot_id="another")
    store.put_intent("r1", {"kind": "stop", "by": "ada", "requested": True})
    after(store, "r1")
    found = store.observe("r1") or {}
    assert (found["state"], found["stop_requested_by"]) == ("lost", "ada")
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(proc.started_at(1)))
    assert found["reason"] == f"the host was restarted at {at} while the run was active"


# --- what is left of runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [True, False], ids=["another run is on", "its own unit is going"])
def test_an_ended_run_is_closed_if_another_run_has_its_control_group(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    monkeypatch.setattr(actions, "require_root", lambda: None)
    monkeypatch.setattr(actions, "asking", myself)
    monkeypatch.setattr("tpu_ops.host.store.SETTLE_LIMIT", 0.5)
    slept: list[float] = []
    monkeypatch.setattr("tpu_ops.host.store.time.sleep", slept.append)
    own = {"pid": os.getpid(), "start": proc.start_time(os.getpid())}
    gone = {"pid": os.getpid(), "start": -1}
    found = ended(store, cgroup=str(tmp_path), supervisor=gone if other else own)
    lock = store.lock({"run_id": "r2" if other else "r1", "supervisor": own})
    assert lock is not None
    with lock:
        assert store.settled(found) == other
        actions.stop({"protocol": wire.PROTOCOL, "run_id": "r1"}, store, Caller(0, attended=False))
    assert (slept == []) == other


@pytest.mark.parametrize("alive", [True, False])
def test_a_stop_of_what_has_ended_waits_for_its_unit_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    monkeypatch.setattr(actions, "require_root", lambda: None)
    monkeypatch.setattr(actions, "asking", myself)
    waited: list[str] = []
    monkeypatch.setattr(Store, "settle", lambda _, found, **__: waited.append(found["run_id"]))
    supervisor = {"pid": os.getpid(), "start": proc.start_time(os.getpid()) if alive else -1}
    ended(store, supervisor=supervisor)
    actions.stop({"protocol": wire.PROTOCOL, "run_id": "r1"}, store, Caller(0, attended=False))
    assert waited == ["r1"]


def test_a_stop_after_a_killed_supervisor_waits_for_its_processes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "require_root", lambda: None)
    monkeypatch.setattr(actions, "asking", myself)
    found = begun(store, state="running", supervisor={"pid": os.getpid(), "start": -1})
    waited: list[float] = []

    def settle(_: Store, record: dict[str, Any], limit: float = 0.0) -> None:
        waited.append(limit)
        assert record["state"] == "lost"
        store.write({**found, "state": "failed", "stuck": [{"pid": 7}]})

    monkeypatch.setattr(Store, "settle", settle)
    request = {"protocol": wire.PROTOCOL, "run_id": "r1"}
    said = actions.stop(request, store, Caller(0, attended=False))
    assert (said["record"]["state"], said["record"]["stuck"]) == ("failed", [{"pid": 7}])
    assert waited[0] > ending.KILL_LIMIT, "as long as what is left is given to go"


def test_a_half_written_record_is_deleted_with_its_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for run_id in ("killed", "without", "strange"):
        ended(store, run_id=run_id, since=1.0)
        Path(store.directory(run_id), "record.json.4242").touch()
    Path(store.directory("without"), "record.json").unlink()
    Path(store.directory("strange"), "notes.txt").touch()
    monkeypatch.setattr("tpu_ops.host.store.KEPT_RUNS", 0)
    begun(store, run_id="next")
    assert sorted(path.name for path in Path(store.runs_dir).iterdir()) == ["next", "strange"]
    found = sorted(path.name for path in Path(store.directory("strange")).iterdir())
    assert found == ["notes.txt", "record.json"], "what cannot go is found again by its record"
