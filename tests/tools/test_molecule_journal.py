"""A failing test of a scenario also prints the journal of its worker."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

Outcome = Literal["passed", "failed", "skipped"]
When = Literal["setup", "call", "teardown"]

CONFTEST = Path(__file__).resolve().parents[2] / "molecule" / "conftest.py"


class Worker:
    """Stands for a worker with failed units, which root alone may read the journal of."""

    def __init__(self, *units: str) -> None:
        self.units = units
        self.backend = SimpleNamespace(host="pod-w1")
        self.root = False

    @contextlib.contextmanager
    def sudo(self) -> Iterator[None]:
        self.root = True
        yield
        self.root = False

    def run(self, command: str) -> SimpleNamespace:
        assert self.root
        if command.startswith("systemctl list-units --failed"):
            return SimpleNamespace(stdout="".join(f"{unit}\n" for unit in self.units))
        return SimpleNamespace(stdout=f"lines of {command}")


def reported(worker: Worker | None, outcome: Outcome = "failed", when: When = "call", reason: str = "") -> Any:
    """Return the report of a test once the hook has seen it."""
    spec = importlib.util.spec_from_file_location("molecule_conftest", CONFTEST)
    assert spec is not None
    assert spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    report = pytest.TestReport("t.py::t", ("t.py", 0, "t"), {}, outcome, ("t.py", 1, reason), when)
    item = SimpleNamespace(funcargs={"host": worker} if worker else {})
    steps = conftest.pytest_runtest_makereport(item, SimpleNamespace(when=when))
    next(steps)
    with pytest.raises(StopIteration) as ended:
        steps.send(report)
    assert ended.value.value is report
    return report


def test_a_failed_test_shows_the_journal_of_the_units_that_failed() -> None:
    ((title, text),) = reported(Worker("ssh.service", r"srv-a\x2db.mount")).sections
    assert title == r"journal of pod-w1: ssh.service, srv-a\x2db.mount"
    assert text == r"lines of journalctl --no-pager --lines 60 --unit ssh.service --unit 'srv-a\x2db.mount'"


def test_without_a_failed_unit_the_newest_lines_are_shown() -> None:
    ((title, text),) = reported(Worker()).sections
    assert title == "journal of pod-w1: no unit failed, its newest lines"
    assert text.strip() == "lines of journalctl --no-pager --lines 60"


def test_others_show_none() -> None:
    assert reported(Worker("ssh.service"), "passed").sections == []
    assert reported(Worker("ssh.service"), when="teardown").sections == []
    assert reported(None).sections == []


def test_a_skip_that_is_not_written_down_is_a_failure_here_as_well() -> None:
    report = reported(Worker(), "skipped", reason="Skipped: for no reason")
    assert report.failed
    assert len(report.sections) == 1
