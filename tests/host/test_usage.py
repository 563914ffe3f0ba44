"""The action `usage`: chips, who holds them, their metrics, and the run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import specs
from tpu_ops.host import proc, rank_record, usage
from tpu_ops.host.store import WATCH, Store
from tpu_ops.protocol import wire


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The runs of a host with one chip, which this process holds on demand, and whose root runs the tests."""
    (tmp_path / "accel0").touch()
    monkeypatch.setattr(proc, "_CHIP_OR_CONTAINER", re.compile(re.escape(str(tmp_path / "accel0"))))
    monkeypatch.setattr(usage, "require_root", lambda: None)
    return Store(str(tmp_path))


def ask(store: Store) -> dict[str, Any]:
    answer = usage.usage({"protocol": wire.PROTOCOL}, store)
    return dict(json.loads(json.dumps(answer)))


def test_an_unused_host(store: Store) -> None:
    answer = ask(store)
    del answer["clock"], answer["chips"]
    assert answer == {"ok": True, "holder": None, "argv": [], "holders": [], "services": [], "run": None}


def test_a_process_of_a_run_holds_the_chip(store: Store, tmp_path: Path) -> None:
    record = rank_record.new_record(specs.good(), specs.myself(), os.getuid())
    store.prepare(record["run_id"], os.getuid(), os.getgid())
    store.write(dict(record, state="running", began=100.0))
    log = Path(store.logs(record["run_id"]))
    (log / "0.log").write_bytes(b"x")
    os.utime(log / "0.log", (200.0, 200.0))
    (log / "1.log").touch()
    watch = {"at": 300.0, "last_output": 200.0, "chips": "none", "idle_since": None, "stall": None, "maintenance": None}
    Path(store.directory(record["run_id"]), WATCH).write_text(json.dumps(watch))
    lock = store.lock(rank_record.holder_of(record))
    assert lock
    with lock, (tmp_path / "accel0").open():
        answer = ask(store)
    assert answer["holder"]["run_id"] == "digits-1"
    assert answer["argv"] == ["python", ""]
    assert [entry["pid"] for entry in answer["holders"]] == [os.getpid()]
    (service,) = answer["services"]
    assert (service["pid"], service["state"], service["cores"]) == (os.getpid(), "none", [])
    assert service["core_states"] is None
    run = {"run_id": "digits-1", "attempt": 1, "rank": 1, "state": "running", "began": 100.0}
    assert answer["run"] == {**run, "last_output": 200.0, "watch": watch}
    Path(store.directory(record["run_id"]), WATCH).write_text("{")
    lock = store.lock(rank_record.holder_of(record))
    assert lock
    with lock:
        assert ask(store)["run"]["watch"] is None


def test_a_run_without_output_has_no_last_output(tmp_path: Path) -> None:
    assert usage.last_output(str(tmp_path / "missing")) is None
    (tmp_path / "0.log").touch()
    assert usage.last_output(str(tmp_path)) is None
