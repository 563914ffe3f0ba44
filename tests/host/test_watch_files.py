"""The files of the watch beside a rank's record, the answer `status`, and the file with the reason of a run's end."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.host.test_store import begun, ended
from tpu_ops.host import actions, proc, rank_record
from tpu_ops.host.store import BESIDE_LOG, Store
from tpu_ops.protocol import wire

NOTED = {"at": 1.0, "last_output": None, "chips": "none", "idle_since": None, "stall": None, "maintenance": None}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def note(store: Store, content: str) -> None:
    Path(store.directory("r1"), "watch.json").write_text(content)


def test_a_status_answer_has_what_the_supervisor_noted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def status(**request: Any) -> Any:
        answer = actions.status({"protocol": wire.PROTOCOL, **request}, store)
        found: Any = answer["watch"]
        return found

    begun(store, run_id="r1")
    assert status(run_id="r1") is None
    note(store, json.dumps(NOTED))
    assert (status(run_id="r1"), status(run_id="r2"), status()) == (NOTED, None, None)
    lock = store.lock({"run_id": "r1", "supervisor": {"pid": os.getpid(), "start": proc.start_time(os.getpid())}})
    assert lock is not None
    with lock:
        assert status() == NOTED
    note(store, "{")
    assert status(run_id="r1") is None


def test_an_attempts_files_are_set_aside_with_its_log_and_removed_with_the_run(store: Store) -> None:
    ended(store)
    for name in (*BESIDE_LOG, "watch.json.77"):
        Path(store.directory("r1"), name).write_text("1")
    ended(store, 2)
    aside = Path(store.log_aside("r1", 1)).parent
    assert {path.name for path in aside.iterdir()} == {"log", "record.json", *BESIDE_LOG}
    assert store.watch("r1") is None
    note(store, json.dumps(NOTED))
    store._drop("r1")
    assert not Path(store.directory("r1")).exists()


INTENT = {"by": "ada", "at": 5.0, "reason": "stopped by ada"}


@pytest.mark.parametrize(
    ("intent", "kind"),
    [
        ({**INTENT, "kind": "stop"}, "stop"),
        ({**INTENT, "kind": "failed", "reason": "rank 1 (w1) failed: exit code 3"}, "failure"),
        ({**INTENT, "kind": "skew"}, "failure"),
        ({**INTENT, "kind": "lost"}, "failure"),
        ({**INTENT, "kind": "failed", "reason": "stalled: no output for 16 min"}, "stall"),
        (rank_record.shutdown(None), "shutdown"),
        (rank_record.shutdown({"at": 1.0, "kind": "preempted", "what": "this worker is being preempted"}), "preempted"),
        (None, "ended"),
    ],
)
def test_the_command_can_read_why_it_gets_sigterm_and_others_cannot(
    store: Store, intent: dict[str, Any] | None, kind: str
) -> None:
    Path(store.secrets_dir).mkdir(parents=True)
    store.put_reason(rank_record.reason_of(intent), os.getgid())
    path = Path(store.reason_file)
    found = json.loads(path.read_text())
    assert (found["kind"], set(found)) == (kind, {"kind", "reason", "by", "at"})
    assert intent is None or found["reason"] == intent["reason"]
    assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o640, os.getgid())
    store.drop_secrets()
    assert not path.exists()


def test_the_reason_of_a_shutdown_says_what_was_announced() -> None:
    notice = {"at": 1.0, "kind": "preempted", "what": "this worker is being preempted"}
    assert rank_record.shutdown(notice)["reason"] == "host shuts down: this worker is being preempted"
    assert rank_record.shutdown(None)["reason"] == "host shuts down"
