"""The supervisor repeats the checks of the probe when it has locked the host."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.specs import good, good_net, myself
from tpu_ops.host import (
    actions,
    child,
    ending,
    environment,
    fitness,
    mounts,
    private,
    probe,
    proc,
    rank_record,
    spec_files,
    supervise,
    unit,
)
from tpu_ops.host.command import NotReady
from tpu_ops.host.store import Store
from tpu_ops.protocol import spec
from tpu_ops.protocol.wire import Refused

JOURNAL = "`sudo journalctl -u tpu-run.service` on this worker shows more"
CHIPS = [f"/dev/accel{number}" for number in range(4)]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what a supervisor does until the command is held, which none is here."""
    monkeypatch.setattr(proc, "chips", lambda: CHIPS)
    monkeypatch.setattr(proc, "holders", lambda **_: [])
    monkeypatch.setattr(fitness, "space", lambda: {"/": {"free": 10**10, "total": 10**11}})
    monkeypatch.setattr(child.Child, "fork", lambda *_, **__: pytest.fail("it is forked"))
    monkeypatch.setattr(environment, "from_files", lambda _: pytest.fail("it is fit"))

    def prepare(config: Any = None, **changes: Any) -> None:
        data = spec.check(good(run_id="r1", **changes))
        supervisor = supervise.Supervisor(Store(str(tmp_path)), "r1")
        supervisor.record = rank_record.new_record(data, myself(), os.getuid(), "")
        supervisor._prepare(data, config or {"venv": "", "environment_files": []})

    return prepare


def test_a_start_is_refused_for_what_a_probe_would_tell(
    prepared: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotReady, match=r"^no environment at /absent \(name an existing environment with --venv, .*\)$"):
        prepared(venv="/absent")
    with pytest.raises(NotReady, match=r"device files of 4 chips, 8 expected \(reboot it, or recreate the node\)$"):
        prepared(chips=8)
    held = [{"pid": 7, "user": "bob", "command": "x"}]
    monkeypatch.setattr(proc, "holders", lambda **_: held)
    with pytest.raises(NotReady) as raised:
        prepared(venv="/absent")
    told = str(raised.value).partition("; ")[2]
    assert told.startswith("its chips are held by pid 7 of bob: x (ask bob to end it")
    # To whom the asking person is an administrator that one's command is told, with this worker's name.
    assert "WORKER" not in told


def test_a_full_disk_refuses_a_start_unless_it_is_forced(
    prepared: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {"/tmp": {"free": 1, "total": 2}, "/run": {"free": 10 * 2**20, "total": 20 * 2**20}}
    monkeypatch.setattr(fitness, "space", lambda: full)
    with pytest.raises(NotReady) as raised:
        prepared()
    fix = "remove files that are not needed there: `sudo du -xh -d 2 /tmp` shows what uses the space"
    assert str(raised.value) == f"/tmp has 0 of 0 MiB free, and a start needs 256 ({fix})"
    with pytest.raises(pytest.fail.Exception, match="it is fit"):
        prepared(force=True)


def test_an_environment_that_this_worker_should_have_is_configured_again(prepared: Callable[..., None]) -> None:
    with pytest.raises(NotReady, match=r"^no environment at /absent \(`tpu_ops configure pod-w1`\)$"):
        prepared(config={"venv": "/absent", "environment_files": []})


@pytest.mark.usefixtures("waits")
def test_a_disk_that_takes_no_more_files_is_no_place_to_start(
    prepared: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitness, "space", lambda: {"/": {"free": 10**10, "total": 10**11, "files": 0}})
    with pytest.raises(NotReady, match=r"^/ cannot hold more files: .* inodes left \(.* `sudo du -xh --inodes -d 2"):
        prepared()
    # Some count none, as btrfs does.
    monkeypatch.setattr(fitness, "space", lambda: {"/": {"free": 10**10, "total": 10**11, "files": -1}})
    with pytest.raises(pytest.fail.Exception, match="it is fit"):
        prepared()


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (Refused("failed", "/etc/x: No such file", "run site.yml again"), "/etc/x: No such file; run site.yml again"),
        (NotReady("it is so; do that"), "it is so; do that"),
        (
            OSError(errno.EAGAIN, "Resource temporarily unavailable"),
            "the supervisor cannot prepare the command: Resource temporarily unavailable; " + JOURNAL,
        ),
    ],
)
@pytest.mark.usefixtures("waits")
def test_why_a_rank_cannot_start_is_recorded_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, said: str
) -> None:
    store = Store(str(tmp_path))
    data = spec.check(good(run_id="r1", rank=0, net=good_net(port=0)))
    private.directory(store.run_dir, "specs")
    spec_files.put(store.run_dir, data, os.getuid(), os.getuid(), "0123456789")
    supervisor = supervise.Supervisor(store, "r1")

    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(supervisor, "_prepare", fail)
    monkeypatch.setattr(environment, "load_config", dict)
    assert supervisor.run() == 1
    record = store.read("r1")
    assert record
    assert (record["state"], record["reason"]) == ("refused", said)


@pytest.mark.parametrize(("venv", "checks"), [("", ["changing"]), ("/absent", ["changing", "environment"])])
@pytest.mark.usefixtures("prepared", "waits")
def test_a_start_that_is_refused_tells_which_checks_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, venv: str, checks: list[str]
) -> None:
    change = {"who": "bob", "pid": 7, "since": 0, "changing": ["/opt/venvs/jax"]}
    monkeypatch.setattr(fitness, "changes", lambda _: [change])
    monkeypatch.setattr(environment, "load_config", lambda: {"venv": "", "environment_files": []})
    store = Store(str(tmp_path))
    private.directory(store.run_dir, "specs")
    data = spec.check(good(run_id="r1", rank=0, net=good_net(port=0), venv=venv))
    spec_files.put(store.run_dir, data, os.getuid(), os.getuid(), "0123456789")
    assert supervise.Supervisor(store, "r1").run() == 1
    found = store.read("r1")
    assert found
    told = actions._not_begun(store, found)
    assert (told.facts, "bob has been changing" in told.message) == ({"blamed": [0], "failed_checks": checks}, True)
    # Whose fault it was not says nothing of what was in the way of who is at fault.
    assert actions._not_begun(store, found | {"blamed": [2]}).facts == {"blamed": [2]}


@pytest.mark.parametrize(("chips", "stays"), [(4, False), (0, True)], ids=["with chips", "without"])
def test_an_unlocked_lockfile_is_removed_before_a_start_with_chips(
    prepared: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chips: int, stays: bool
) -> None:
    stale = tmp_path / "libtpu_lockfile"
    stale.touch()
    monkeypatch.setattr(ending, "LOCKFILES", (str(stale),))
    with pytest.raises(pytest.fail.Exception, match="it is fit"):
        prepared(chips=chips)
    assert stale.exists() is stays


def test_a_start_is_refused_where_a_lockfile_has_to_stay(
    prepared: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "libtpu_lockfile"
    monkeypatch.setattr(ending, "LOCKFILES", (str(kept),))
    opener = {"pid": 7, "user": "bob", "command": "sleep"}
    monkeypatch.setattr(proc, "holders", lambda paths=(), **_: [opener] if paths else [])
    with kept.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(NotReady) as raised:
            prepared(chips=4)
        with pytest.raises(pytest.fail.Exception, match="it is fit"):
            prepared()
    fault = (
        "it is locked, and open in pid 7 of bob (sleep); "
        "end the process that has the lockfile open, or remove the lockfile as root"
    )
    assert str(raised.value) == f"{kept} would make libtpu fail: {fault}"
    assert kept.exists()


def test_an_odd_file_in_place_of_the_lockfile_blocks_chips_and_is_probed(
    prepared: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "libtpu_lockfile"
    os.mkfifo(fifo)
    monkeypatch.setattr(ending, "LOCKFILES", (str(fifo),))
    problem = f"{fifo} would make libtpu fail: it is a FIFO, not a lockfile"
    fix = f"`ls -la {fifo}` on this worker shows its owner, `sudo rm {fifo}` removes it"
    with pytest.raises(NotReady) as raised:
        prepared(chips=4)
    assert str(raised.value) == f"{problem} ({fix})"
    with pytest.raises(pytest.fail.Exception, match="it is fit"):
        prepared()
    store = Store(str(tmp_path / "root"))
    found = probe.describe(store, myself(), myself(), "", 4)
    assert {"check": "lockfile", "problem": problem, "fix": fix} in found["faults"]
    assert found["lockfiles"] == [str(fifo)]


def test_a_start_that_looks_long_who_holds_the_chips_is_given_more_time(
    prepared: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog would begin with the first beat, and there is none yet while the command is forked."""
    told: list[str] = []
    monkeypatch.setattr(unit, "notify", told.append)
    monkeypatch.setattr(proc, "holders", lambda beat: beat() or [])
    with pytest.raises(pytest.fail.Exception, match="it is fit"):
        prepared(chips=4)
    assert told == ["EXTEND_TIMEOUT_USEC=30000000"] * 2


def test_a_probe_tells_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "chips", lambda: CHIPS[:1])
    store = Store(str(tmp_path))
    found = probe.describe(store, myself(), myself(), "/absent", 4)["faults"]
    assert [fault["problem"] for fault in found if fault["check"] in {"environment", "chips"}] == [
        "no environment at /absent",
        "device files of 1 chip, 4 expected",
    ]
    assert "--venv" in found[0]["fix"]


def test_a_mount_without_answer_is_reported_and_nothing_on_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {"path": "/mnt/gone", "problem": "/mnt/gone does not answer", "fix": "see to it"}
    monkeypatch.setattr(mounts, "unfit", lambda _, needed: [broken] if needed else [])
    store = Store(str(tmp_path))
    found = probe.describe(store, myself(), myself(), "/absent", 0)["faults"]
    assert {"check": "mounts", "problem": "/mnt/gone does not answer", "fix": "see to it"} in found
    monkeypatch.setattr(fitness, "look", lambda *_: pytest.fail("it waits for the server"))
    with pytest.raises(Refused, match="/mnt/gone does not answer") as refused:
        probe.describe(store, myself(), myself(), "/mnt/gone/venv", 0)
    assert refused.value.fix == "see to it"


STOP = {"kind": "stop", "by": "ada", "at": 1000.0, "reason": "stopped by ada"}


@pytest.mark.parametrize(
    ("intent", "said"),
    [
        (STOP, "stopped by ada; SIGKILL follows at 00:17:10 UTC at the latest"),
        ({**STOP, "grace": 600}, "stopped by ada; SIGKILL follows at 00:26:40 UTC at the latest"),
        ({**STOP, "kind": "failed", "reason": "rank 0 failed"}, "rank 0 failed; SIGKILL follows at 00:16:50 UTC at"),
        (None, "the run's command has ended; SIGKILL follows at 00:16:50 UTC at the latest"),
    ],
)
def test_a_start_is_told_when_the_run_that_is_ending_has_ended(tmp_path: Path, intent: Any, said: str) -> None:
    store = Store(str(tmp_path))
    ending_ = rank_record.new_record(spec.check(good(run_id="r1")), myself(), os.getuid(), "")
    ending_.update(state="ending", intent=intent, exited=1000.0)
    store.prepare("r1", os.getuid(), os.getgid())
    store.write(ending_)
    looked = {"venv": {"path": ""}, "environment_files": {}, "chips": [], "holders": [], "space": {}}
    with store.lock(rank_record.holder_of(ending_)) or pytest.fail("another run has the host"):
        holder = rank_record.occupant(store)
        (fault,) = fitness.faults({**looked, "holder": holder}, 0, asker=myself())
        with pytest.raises(Refused) as refused:
            raise actions.held(holder or {}, myself())
    name = ending_["person"]["name"]
    assert fault["problem"].startswith(f"run r1 of {name} is ending: {said}")
    assert (refused.value.message, refused.value.fix) == (fault["problem"], fault["fix"])
    assert fault["fix"] == "start again once the run has ended: `tpu_ops status r1` shows its end"
