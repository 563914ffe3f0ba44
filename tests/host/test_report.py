"""A worker's answer about a run for its report is bounded, and files in any state cause no error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.host.test_store import begun
from tpu_ops.host import report
from tpu_ops.host.store import KEPT_RUNS, Store
from tpu_ops.protocol import wire


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(report, "require_root", lambda: None)
    return Store(str(tmp_path))


def asked(store: Store, **request: Any) -> dict[str, Any]:
    """Return the answer as it arrives."""
    values = {"protocol": wire.PROTOCOL, **request}
    wire.check_request(values)
    found: dict[str, Any] = json.loads(json.dumps(report.report(values, store)))
    return found


def sample(t: float, out: float = 0, duty: float | None = 50.0) -> dict[str, Any]:
    return {"t": t, "out": out, "cores": [[0, 10, 100, duty, None, 0.0]], "state": "ok"}


def put(store: Store, name: str, text: str, run_id: str = "r1") -> None:
    Path(store.directory(run_id), name).write_text(text)


def test_a_run_with_all_files(store: Store) -> None:
    begun(store, state="failed", ended=5.0)
    Path(store.logs("r1"), f"{0:020d}.log").write_text("".join(f"line {number}\n" for number in range(90)))
    put(store, "history.jsonl", "".join(json.dumps(sample(float(t))) + "\n" for t in range(10)))
    put(store, "watch.json", '{"at": 1, "chips": "idle"}')
    Path(store.logs("r1"), "stacks.json").write_text('{"processes": [], "omitted": 0}')
    answer = asked(store, run_id="r1", points=5)
    assert (answer["record"]["state"], answer["watch"]["chips"]) == ("failed", "idle")
    assert [one["t"] for one in answer["history"]] == [1, 3, 5, 7, 9]
    assert answer["stacks"] == {"processes": [], "omitted": 0}
    assert answer["tail"].splitlines() == [f"line {number}" for number in range(40, 90)]


@pytest.mark.parametrize("damage", ["missing", "damaged", "a pipe", "too large"])
def test_a_run_whose_files_are_not_as_they_should_be(store: Store, damage: str) -> None:
    begun(store)
    for name in ("history.jsonl", "watch.json", "log/stacks.json"):
        path = Path(store.directory("r1"), name)
        if damage == "damaged":
            path.write_bytes(b'\xff[\n{"t": NaN}\n{"t": "1"}\n7\n' + b"[" * 100_000)
        elif damage == "a pipe":
            os.mkfifo(path)
        elif damage == "too large" and name == "history.jsonl":
            path.write_text(json.dumps({"t": 1, "more": "x" * 3 * 2**20}))
    answer = asked(store, run_id="r1")
    assert [answer[key] for key in ("history", "watch", "stacks", "tail", "environment")] == [[], None, None, "", None]


def test_only_the_end_of_a_history_is_read_from_a_whole_line_on(store: Store) -> None:
    begun(store)
    put(store, "history.jsonl", "".join(json.dumps(sample(float(t))) + "\n" for t in range(60_000)))
    times = [one["t"] for one in asked(store, run_id="r1", points=5000)["history"]]
    assert 30_000 < times[0] < times[-1] == 59_999


def test_values_of_other_types_are_unknown() -> None:
    line = {"t": 1, "out": "many", "cores": [[0, True, 1e400, "50", None, 0], [1, 2], "row"], "state": ["x"]}
    (found,) = report.samples(json.dumps(line).encode())
    assert found == {"t": 1, "out": None, "cores": [[0, None, None, None, None, 0]], "state": "['x']"}


def test_neighbours_become_one_sample_with_their_means() -> None:
    found = report.thinned([sample(1, 10, 20.0), sample(2, 30, None), sample(3, 60, 40.0)], 1)
    assert found == [{"t": 3, "out": 60, "cores": [[0, 10, 100, 30.0, None, 0.0]], "state": "ok"}]


def test_earlier_attempts_come_with_their_history(store: Store) -> None:
    begun(store, 1, state="lost", since=10.0, ended=None, supervisor={"pid": 1, "start": 1})
    aside = Path(store._aside("r1", 1))
    begun(store, 2, state="running", since=50.0)
    (aside / "history.jsonl").write_text(json.dumps(sample(20)) + "\n")
    put(store, "history.jsonl", json.dumps(sample(60)) + "\n")
    (aside / "watch.json").write_text('{"stall": {"at": 15}}')
    put(store, "watch.json", '{"stall": null}')
    answer = asked(store, run_id="r1")
    assert [one["watch"] for one in (*answer["attempts"], answer)] == [{"stall": {"at": 15}}, {"stall": None}]
    assert [(one["attempt"], one["state"], one["since"]) for one in answer["attempts"]] == [(1, "lost", 10.0)]
    assert [one["t"] for one in answer["history"]] == [20, 60]
    (aside / "record.json").write_text("damaged")
    assert asked(store, run_id="r1")["attempts"] == []


def test_an_unknown_run_is_refused(store: Store) -> None:
    with pytest.raises(wire.Refused, match="does not know run r1"):
        asked(store, run_id="r1")
    with pytest.raises(wire.Refused, match="run"):
        asked(store, run_id="../etc")


def test_the_uses_of_a_host(store: Store) -> None:
    begun(store, 1, state="failed", since=10.0, ended=40.0)
    begun(store, 2, state="running", since=50.0, began=55.0)
    begun(store, run_id="old", state="succeeded", since=1.0, exited=4.0, ended=5.0)
    answer = asked(store, since=6.0)
    seen = [(use["run_id"], use["attempt"], use["since"], use["until"]) for use in answer["uses"]]
    assert seen == [("r1", 1, 10.0, 40.0), ("r1", 2, 50.0, None)]
    assert answer["whole"] is True


def test_a_host_that_forgot_runs_of_that_time_says_so(store: Store) -> None:
    for number in range(KEPT_RUNS):
        begun(store, run_id=f"r{number}", state="failed", since=100.0 + number, ended=150.0 + number)
    assert [asked(store, since=since)["whole"] for since in (99.0, 101.0)] == [False, True]
