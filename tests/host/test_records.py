"""The records of runs on a worker: how and why a run ended, and who holds the worker now."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.specs import good, myself
from tpu_ops.host import actions, logs, proc, rank_record
from tpu_ops.host.caller import Caller
from tpu_ops.host.store import Store
from tpu_ops.protocol import wire
from tpu_ops.protocol.wire import Refused


@pytest.mark.parametrize(
    ("status", "intent", "state", "ending"),
    [
        (0, None, "succeeded", {"code": 0}),
        (3 << 8, None, "failed", {"code": 3}),
        (9, None, "failed", {"signal": 9}),
        (64, None, "failed", {"signal": 64}),
        (34, None, "failed", {"signal": 34}),
        (0, {"reason": "stopped by ada"}, "stopped", {"code": 0}),
        (15, {"reason": "x"}, "stopped", {"signal": 15}),
        (None, {"reason": "x"}, "stopped", None),
        (None, None, "failed", None),
    ],
)
def test_only_an_own_exit_with_0_succeeds(status: int | None, intent: Any, state: str, ending: Any) -> None:
    found = rank_record.verdict(status, intent)
    assert (found["state"], found["exit"]) == (state, ending)


@pytest.mark.parametrize(
    ("kind", "intent", "blamed"),
    [("lost", "stop", False), ("lost", "lost", True), ("lost", None, True), ("failed", "stop", True)],
)
def test_a_stop_blames_nobody_who_is_not_heard_any_more(kind: str, intent: str | None, blamed: bool) -> None:
    first = {"rank": 0, "worker": "w0", "cause": "lost contact"}
    why = intent and {"kind": intent}
    assert rank_record.first_in({"kind": kind, "first": first}, why) == (first if blamed else None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ending", "oom", "text"),
    [
        ({"code": 3}, False, "exit code 3"),
        ({"signal": 9}, False, "killed by SIGKILL"),
        ({"signal": 9}, True, "killed by SIGKILL: out of memory"),
        ({"signal": 40}, False, "killed by signal 40"),
        ({"code": 137}, True, "exit code 137: out of memory"),
    ],
)
def test_a_cause_is_said_in_words(ending: dict[str, int], oom: bool, text: str) -> None:
    assert rank_record.cause_of(ending, oom) == text


@pytest.mark.parametrize(
    ("name", "text", "cgroup"),
    [
        (
            "sys/fs/cgroup/system.slice/tpu-run.service/memory.events",
            "low 0\noom 3\noom_kill 2\n",
            "0::/system.slice/tpu-run.service",
        ),
        (
            "sys/fs/cgroup/memory/u/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            "5:cpu:/u\n4:memory:/u\n0::/u",
        ),
    ],
)
def test_kills_for_want_of_memory_are_counted(tmp_path: Path, name: str, text: str, cgroup: str) -> None:
    assert proc.oom_kills(str(tmp_path), cgroup) == 0
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert proc.oom_kills(str(tmp_path), cgroup) == 2


def recorded(store: Store, **changes: Any) -> dict[str, Any]:
    boot, init_start = store.boot()
    record = {
        "run_id": "r1",
        "state": "running",
        "since": time.time(),
        "boot_id": boot,
        "init_start": init_start,
        "supervisor": {"pid": os.getpid(), "start": proc.start_time(os.getpid())},
        **changes,
    }
    store.prepare(record["run_id"], os.getuid(), os.getgid())
    store.write(record)
    return record


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "running"),
        ({"boot_id": "another"}, "lost"),
        ({"init_start": -1}, "lost"),
        ({"supervisor": {"pid": 1, "start": -1}}, "lost"),
        ({"boot_id": "another", "state": "succeeded"}, "succeeded"),
    ],
)
def test_a_run_whose_boot_or_supervisor_is_gone_is_lost(tmp_path: Path, changes: dict[str, Any], state: str) -> None:
    store = Store(str(tmp_path))
    recorded(store, **changes)
    record = store.observe("r1")
    assert record is not None
    assert record["state"] == state


def test_a_later_attempt_sets_aside_what_the_last_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    monkeypatch.setattr("tpu_ops.host.store.KEPT_ATTEMPTS", 2)
    for attempt in (1, 2, 3, 5):
        recorded(store, attempt=attempt, state="failed")
        Path(store.logs("r1"), f"{attempt:020d}.log").write_text(str(attempt))
        # What the person keeps is the person's.
        assert Path(store.files("r1"), "checkpoint").exists() == (attempt != 1)
        Path(store.files("r1"), "checkpoint").touch()
    newest = store.read("r1")
    assert newest is not None
    assert newest["attempt"] == 5
    assert logs.read(store.logs("r1"), 0)[1] == b"5"
    aside = Path(store.directory("r1"), "attempts")
    assert sorted(path.name for path in aside.iterdir()) == ["2", "3"]
    assert json.loads((aside / "3" / "record.json").read_text())["attempt"] == 3
    assert [path.read_text() for path in (aside / "3" / "log").iterdir()] == ["3"]
    assert [record["attempt"] for record in store.recent(10)] == [5]


def ended(store: Store, run_id: str, since: float, **changes: Any) -> Path:
    """Leave a run of 100 bytes of log, and return its directory."""
    recorded(store, **{"run_id": run_id, "since": since, "state": "succeeded", **changes})
    Path(store.logs(run_id), f"{0:020d}.log").write_bytes(b"x" * 100)
    return Path(store.directory(run_id))


@pytest.mark.parametrize(("count", "size"), [(2, 10**6), (100, 299)])
def test_the_next_run_removes_old_runs_but_no_active_one_and_no_user_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, size: int
) -> None:
    store = Store(str(tmp_path))
    folders = [ended(store, f"old-{age}", time.time() - age) for age in range(1, 6)]
    (folders[3] / "files" / "checkpoint").touch()
    (folders[4] / "attempts" / "1" / "log").mkdir(parents=True)
    on = ended(store, "on", 1.0, state="running")
    monkeypatch.setattr("tpu_ops.host.store.KEPT_RUNS", count)
    monkeypatch.setattr("tpu_ops.host.store.KEPT_BYTES", size)
    store.prepare("next", os.getuid(), os.getgid())
    assert {path for path in [on, *folders] if path.exists()} == {on, *folders[:2], folders[3]}
    assert [sorted(path.name for path in folder.iterdir()) for folder in (on, folders[1], folders[3])] == [
        ["files", "log", "record.json"],
        ["files", "log", "record.json"],
        ["files", "record.json"],
    ]
    assert (folders[3] / "files" / "checkpoint").exists()


@pytest.mark.parametrize(
    ("attempt", "uid", "refused"),
    [
        (3, 0, ""),
        (2, 0, "this worker already has a record of attempt 2 of run r1"),
        (1, 0, "this worker already has a record of run r1"),
        (3, 1, "this worker already has a record of run r1"),
    ],
)
def test_a_run_comes_back_with_a_later_attempt_of_its_person_only(attempt: int, uid: int, refused: str) -> None:
    earlier = {"run_id": "r1", "attempt": 2, "person": {"uid": os.getuid() + uid}}
    asked = good(run_id="r1", attempt=attempt)
    if not refused:
        actions._check_earlier(earlier, asked, myself())
        return
    with pytest.raises(Refused, match=refused):
        actions._check_earlier(earlier, asked, myself())


@pytest.mark.parametrize(
    ("changes", "uid", "free"),
    [
        ({}, 0, True),
        ({"state": "failed"}, 0, False),
        ({"attempt": 2}, 0, False),
        ({"stop_requested_by": "bob"}, 0, False),
        ({}, 1, False),
    ],
)
def test_a_start_that_was_refused_leaves_its_name_to_its_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], uid: int, free: bool
) -> None:
    """Nothing was executed. What an attempt has left before, and whoever wants the run stopped, count all the same."""
    monkeypatch.setattr("tpu_ops.host.probe.describe", lambda *_: {})
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    store, person = Store(str(tmp_path)), {"uid": os.getuid() + uid, "name": "ada"}
    earlier = recorded(store, **{"state": "refused", "attempt": 1, "person": person, **changes})
    answer = actions.probe({"protocol": wire.PROTOCOL, "user": myself().name, "run_id": "r1"}, store)
    assert answer["known"] is not free
    if free:
        actions._check_earlier(earlier, good(run_id="r1"), myself())
        return
    with pytest.raises(Refused, match="this worker already has a record of run r1"):
        actions._check_earlier(earlier, good(run_id="r1"), myself())


def test_a_run_of_unknown_name_has_no_record(tmp_path: Path) -> None:
    assert Store(str(tmp_path)).observe("never") is None
    assert Store(str(tmp_path)).recent(5) == []


def test_a_list_of_runs_names_all_workers_of_the_run_that_is_on_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    store, names = Store(str(tmp_path)), ["pod-w0", "pod-w1"]
    for run_id, state in (("r1", "succeeded"), ("r2", "running")):
        recorded(store, run_id=run_id, state=state, workers=names)
    lock = store.lock({"run_id": "r2", "supervisor": {"pid": os.getpid(), "start": proc.start_time(os.getpid())}})
    assert lock is not None
    with lock:
        records = actions.status({"protocol": wire.PROTOCOL}, store)["records"]
    assert {one["run_id"]: one.get("workers") for one in records} == {"r1": None, "r2": names}
    assert actions.status({"protocol": wire.PROTOCOL, "run_id": "r1"}, store)["record"]["workers"] == names


def test_a_lock_names_its_holder_while_its_supervisor_is_alive(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    own = {"pid": os.getpid(), "start": proc.start_time(os.getpid())}
    lock = store.lock({"run_id": "r1", "person": "ada", "uid": 1, "since": 2.0, "supervisor": own})
    assert lock is not None
    assert store.lock({}) is None
    holder = store.holder()
    assert holder is not None
    assert (holder["run_id"], holder["person"]) == ("r1", "ada")
    lock.close()
    gone = store.lock({"run_id": "r2", "supervisor": {"pid": 1, "start": -1}})
    assert gone is not None
    assert store.holder() is None


def test_record_and_lock_name_who_started_a_run_as_somebody_else() -> None:
    found = rank_record.new_record(good(), myself(), 0)
    assert (found["person"]["uid"], found["asked_by"], found["asker"]) == (os.getuid(), 0, "root")
    assert rank_record.holder_of(found)["asker"] == "root"
    assert rank_record.new_record(good(), myself(), 4242)["asker"] == "4242", "nobody of that id is known there"


def test_the_first_intent_stays(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put_intent("r1", {"kind": "failed"})
    store.put_intent("r1", {"kind": "stop"})
    assert store.take_intent("r1") == {"kind": "failed"}
    assert store.take_intent("r1") is None


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _garbage(path: Path) -> None:
    path.write_bytes(b"\0\xff{")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def _of_another(path: Path) -> None:
    path.write_text('{"run_id": "other", "state": "failed"}')


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


NOT_JSON, NOT_REGULAR = "the file does not hold JSON", "it is not a regular file"
DAMAGES = pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_empty, "it is empty"),
        (_garbage, NOT_JSON),
        (_cut, NOT_JSON),
        (_of_another, "the file does not contain the expected data"),
        (_fifo, NOT_REGULAR),
        (_directory, NOT_REGULAR),
    ],
)


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.mark.usefixtures("as_root")
@DAMAGES
def test_a_damaged_record_is_named_and_no_other_run_is_affected(
    tmp_path: Path, damage: Callable[[Path], None], what: str
) -> None:
    store = Store(str(tmp_path))
    recorded(store)
    recorded(store, run_id="damaged")
    path = Path(store.directory("damaged"), "record.json")
    damage(path)
    with pytest.raises(Refused) as raised:
        actions.status({"protocol": wire.PROTOCOL, "run_id": "damaged"}, store)
    message = f"{path} is damaged: {what}"
    assert (raised.value.kind, raised.value.message) == ("damaged", message)
    assert f"`sudo mv {path.parent} /var/tmp/`" in raised.value.fix
    answer = actions.status({"protocol": wire.PROTOCOL}, store)
    assert [record["run_id"] for record in answer["records"]] == ["r1"]
    assert answer["damaged"] == [{"message": message, "fix": raised.value.fix}]
    with pytest.raises(Refused, match=what):
        actions.stop({"protocol": wire.PROTOCOL, "run_id": "damaged"}, store, Caller(0, attended=False))
    recorded(store, run_id="next")
    assert Path(store.directory("damaged"), "log").is_dir(), "an administrator may repair its record"


@pytest.mark.usefixtures("as_root")
def test_of_an_active_run_with_a_damaged_record_it_is_said_how_to_end_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    found = recorded(store)
    lock = store.lock({"run_id": "r1", "supervisor": found["supervisor"]})
    assert lock is not None
    with lock:
        _empty(Path(store.directory("r1"), "record.json"))
        with pytest.raises(Refused) as raised:
            actions.stop({"protocol": wire.PROTOCOL, "run_id": "r1"}, store, Caller(0, attended=False))
        store.write(found)
    assert raised.value.fix.startswith("the run is active: `sudo systemctl stop tpu-run.service` on this worker")
    assert store.read("r1") == found, "the supervisor's next record replaces it"


def test_a_file_that_is_no_run_is_in_the_way_of_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    recorded(store)
    stray = Path(store.runs_dir, "notes.txt")
    stray.touch()
    assert store.observe("notes.txt") is None
    assert ([record["run_id"] for record in store.recent(10)], store.survey()[1]) == (["r1"], [])
    recorded(store, run_id="next")
    assert stray.exists()


@pytest.mark.parametrize("damage", [_empty, _garbage, _fifo])
def test_a_damaged_stop_request_still_stops_the_run(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = Store(str(tmp_path))
    store.put_intent("r1", {"kind": "stop", "by": "ada"})
    damage(Path(store.run_dir, "intents", "r1.json"))
    told = store.take_intent("r1") or {}
    assert (told["kind"], told["requested"]) == ("stop", True)
    assert "r1.json" in told["reason"]
    assert "is damaged" in told["reason"]


def test_a_log_without_a_record_is_in_nobodys_way_and_goes(tmp_path: Path) -> None:
    """The record did not fit on the full disk, and then the host was restarted."""
    store = Store(str(tmp_path))
    folders = [ended(store, run_id, 1.0) for run_id in ("again", "never-again", "with-files")]
    Path(store.files("with-files"), "checkpoint").touch()
    for folder in folders:
        (folder / "record.json").unlink()
    recorded(store, run_id="again", attempt=2)
    assert list(Path(store.logs("again")).iterdir()) == []
    assert [path.name for path in (folders[0] / "attempts" / "0").iterdir()] == ["log"]
    assert not folders[1].exists()
    assert [path.name for path in folders[2].iterdir()] == ["files"]
