"""Kill every command that changes the cloud at each of its requests, and keep what the same command then did."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.bench.faults import ROUNDS
from tools.bench.report import origin
from tools.bench.samples import PartSeries
from tpu_ops.errors import OpsError


@dataclass(frozen=True)
class KillSample:
    """A command that was killed at one of its requests, and whether its repetition was complete.

    Attributes:
        command: The command.
        number: Number of the request, from 1; after an answer, of the requests that change something.
        request: Its name.
        when: ``before`` the request or ``after`` its answer.
        complete: Whether the second command completed the first and nothing was lost.
    """

    command: str
    number: int
    request: str
    when: str
    complete: bool


#: All samples of one measurement.
KillSeries = PartSeries[KillSample]


class Recorder:
    """A pytest plugin that keeps what a test has recorded of each end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.samples: list[KillSample] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the samples of a command.

        Raises:
            OpsError: The test ended before all ends of its command.
        """
        if report.when != "call":
            return
        found = [KillSample(*values) for name, values in report.user_properties if name == "kill"]  # type: ignore[misc]
        if report.failed and all(sample.complete for sample in found):
            raise OpsError(f"the test was not completed\n{report.longreprtext[-1000:]}", where=report.nodeid)
        self.samples += found
        self._say(f"{found[0].command}: {sum(one.complete for one in found)} of {len(found)} complete")


def run(root: Path, say: Callable[[str], None]) -> list[KillSample]:
    """Run the tests of the clone; return the samples of all commands.

    Raises:
        OpsError: A test was not completed, or none was run.
    """
    recorder = Recorder(say)
    os.environ[ROUNDS] = "full"
    pytest.main(["-q", "-n", str(os.cpu_count()), str(root / "tests" / "cli" / "test_kills.py")], plugins=[recorder])
    if not recorder.samples:
        raise OpsError("no command was killed", where="tests/cli/test_kills.py")
    return sorted(recorder.samples, key=lambda one: (one.command, one.number, one.when == "after"))


def section(series: KillSeries) -> list[str]:
    """Return the lines of this section of the page."""
    method = (
        "Each command that changes the cloud is ended with SIGKILL before each of its requests to an API, and after "
        "the answer to each request that changes something; each time in a new project. Then the same command runs "
        "again. It is complete if the project then has what the command makes of it without SIGKILL: the same nodes, "
        "queued resources, disks, firewall rules, buckets and entries of metadata, and those of others unchanged. "
        "The numbers are how often SIGKILL came at each request."
    )
    lines = ["## Commands that are killed", "", *origin(series.commit, series.date, series.machine), ""]
    lines += [*textwrap.wrap(method, 118), ""]
    lines += ["| command | killed before | killed after the answer | times | complete |", "|---|---|---|---|---|"]
    for command in dict.fromkeys(sample.command for sample in series.samples):
        taken = [sample for sample in series.samples if sample.command == command]
        good = sum(sample.complete for sample in taken)
        count = str(good) if good == len(taken) else f"**{good}**"
        cells = (f"`{command}`", _steps(taken, "before"), _steps(taken, "after"), str(len(taken)), count)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _steps(taken: Sequence[KillSample], when: str) -> str:
    """Return the requests at which a command was killed, in the order of the first, with their number."""
    counts = Counter(sample.request for sample in taken if sample.when == when)
    return ", ".join(f"{request} {count}" for request, count in counts.items())
