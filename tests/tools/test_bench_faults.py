"""The benchmark's part that repeats tests: what it keeps of each round, and its part of the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs import ROUNDS
from tools.bench import faults
from tools.bench.faults import FaultSample, FaultSeries
from tools.bench.samples import read_part


def sample(number: int, wall: float = 4.0, result: str = "passed") -> FaultSample:
    return FaultSample("one wins", number, wall, result)


def test_rounds_are_kept_with_their_outcome():
    said: list[str] = []
    recorder = faults.Recorder(said.append)
    for node, when, outcome, seconds in (
        ("tests/runs/test_a.py::test_one_wins[1]", "setup", "passed", 90.0),
        ("tests/runs/test_a.py::test_one_wins[1]", "call", "passed", 4.0),
        ("tests/runs/test_a.py::test_one_wins[2]", "call", "passed", 5.0),
        ("tests/runs/test_a.py::test_one_wins[2]", "teardown", "failed", 6.0),
        ("tests/runs/test_a.py::test_of_no_rounds", "call", "failed", 1.0),
    ):
        report = pytest.TestReport(node, ("", 0, ""), {}, outcome, None, when, duration=seconds)  # type: ignore[arg-type]
        recorder.pytest_runtest_logreport(report)
    assert list(recorder.samples.values()) == [sample(1), sample(2, 6.0, "failed")]
    assert said[-1] == "round 2: one wins: failed, 6.0 s"
    assert faults.ROUNDS == ROUNDS


def test_a_round_that_failed_is_seen_on_the_page(tmp_path: Path):
    series = FaultSeries("abc1234", "2026-11-22", {"cores": "2"}, (sample(1), sample(2, 6.0, "failed"), sample(3, 5.0)))
    (tmp_path / "faults.json").write_text(series.text())
    assert json.loads((tmp_path / "faults.json").read_text())["samples"][1]["result"] == "failed"
    kept = read_part(tmp_path / "faults.json", FaultSample)
    assert "| one wins | 3 | **2** | 5.00 (4.00..6.00) |" in faults.section(kept)
