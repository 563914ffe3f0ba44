"""Repeat the tests of runs that depend on a race, often enough to trust them, and keep the outcome of each round."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.bench.report import digits, origin, spread
from tools.bench.samples import PartSeries
from tpu_ops.errors import OpsError

#: With the value ``full``, tests/support/runs.py repeats these tests this often.
ROUNDS = "TPU_OPS_ROUNDS"
_ROUND = re.compile(r"::test_(?P<test>\w+)\[(?P<round>\d+)\]")


@dataclass(frozen=True)
class FaultSample:
    """One round of one test.

    Attributes:
        test: Its name as words.
        round: Counted from 1.
        wall: Duration in seconds.
        result: ``passed``, ``failed`` or ``skipped``.
    """

    test: str
    round: int
    wall: float
    result: str


#: All samples of one measurement.
FaultSeries = PartSeries[FaultSample]


class Recorder:
    """A pytest plugin that records each round. A failed set-up or clean-up of the workers counts as failed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.samples: dict[tuple[str, int], FaultSample] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a round."""
        match = _ROUND.search(report.nodeid)
        if match is None or (report.when != "call" and report.passed):
            return
        test, number = match["test"].replace("_", " "), int(match["round"])
        self.samples[test, number] = FaultSample(test, number, report.duration, report.outcome)
        self._say(f"round {number}: {test}: {report.outcome}, {report.duration:.1f} s")


def run(root: Path, say: Callable[[str], None]) -> list[FaultSample]:
    """Run the tests of the clone; return the outcomes of all rounds.

    Raises:
        OpsError: No round was run.
    """
    recorder = Recorder(say)
    os.environ[ROUNDS] = "full"
    pytest.main(["-q", "-m", "rounds", str(root / "tests" / "runs")], plugins=[recorder])
    if not recorder.samples:
        raise OpsError("no round of any test was run", where="tests/runs", fix="pytest -m rounds tests/runs")
    return list(recorder.samples.values())


def section(series: FaultSeries) -> list[str]:
    """Return the lines of this section of the page."""
    method = (
        "Tests that depend on a race, which `make test` repeats a few times, are repeated many times here. A round is "
        "one run of the test of that name in tests/runs on real workers; it passes when what its name says holds and "
        "nothing of the run is left on any worker. Seconds are medians, with the smallest and largest in brackets, of "
        "the whole test: starts, the fault, and the wait for the end."
    )
    lines = ["## Faults", "", *origin(series.commit, series.date, series.machine), "", *textwrap.wrap(method, 118), ""]
    lines += ["| what holds | rounds | passed | s |", "|---|---|---|---|"]
    for test in dict.fromkeys(sample.test for sample in series.samples):
        taken = [sample for sample in series.samples if sample.test == test]
        passed = [sample for sample in taken if sample.result == "passed"]
        count = str(len(passed)) if len(passed) == len(taken) else f"**{len(passed)}**"
        lines.append(f"| {test} | {len(taken)} | {count} | {spread(one.wall for one in taken).text(digits)} |")
    return lines
