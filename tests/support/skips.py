"""Skips are written down: a test that is skipped for a reason that docs/unproved.md does not have fails."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

UNPROVED = Path(__file__).resolve().parents[2] / "docs" / "unproved.md"


def judge(report: pytest.TestReport, unproved: str) -> None:
    """Given a test's report and the text of docs/unproved.md, turn a skip that is not written down into a failure."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
    if f"| {reason} |" not in unproved:
        report.outcome = "failed"
        report.longrepr = f"skipped because: {reason}\ndocs/unproved.md has no row with this reason"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge every report."""
    report = yield
    judge(report, UNPROVED.read_text() if report.skipped else "")
    return report
