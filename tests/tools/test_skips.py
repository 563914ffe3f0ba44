from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.skips import judge

UNPROVED = "| reason | what |\n|---|---|\n| gcloud is missing | much |\n"


@pytest.mark.parametrize(
    ("report", "outcome"),
    [
        ({"skipped": True, "longrepr": ("t.py", 3, "Skipped: gcloud is missing")}, "skipped"),
        ({"skipped": True, "longrepr": ("t.py", 3, "Skipped: gcloud")}, "failed"),
        ({"skipped": True, "longrepr": ("t.py", 3, "Skipped: no reason")}, "failed"),
        ({"skipped": True, "longrepr": None}, "failed"),
        ({"skipped": True, "longrepr": None, "wasxfail": "later"}, "skipped"),
        ({"skipped": False, "longrepr": None, "outcome": "passed"}, "passed"),
    ],
)
def test_a_skip_that_is_not_written_down_is_a_failure(report: dict[str, Any], outcome: str) -> None:
    judged: Any = SimpleNamespace(**{"outcome": "skipped"} | report)
    judge(judged, UNPROVED)
    assert judged.outcome == outcome
