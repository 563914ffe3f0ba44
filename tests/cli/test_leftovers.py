"""Warnings about an ended run: output that a worker's disk did not take."""

from __future__ import annotations

from typing import Any

import pytest

from tpu_ops.cli import leftovers
from tpu_ops.runs.outcomes import Outcome, outcome_of


def ended(rank: int, **log: Any) -> Outcome:
    return outcome_of(rank, f"pod-w{rank}", {"state": "succeeded", "log": log})


def test_output_that_no_log_has_is_named_with_its_ranks_size_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    late, full = "the disk could not store the output in time", "No space left on device"
    leftovers.warn_of_lost_output(
        [
            ended(0, dropped=0, fault=""),
            ended(1, dropped=2_000_000, fault=late),
            ended(2, dropped=900_000, fault=late),
            ended(3, dropped=50, fault=full),
            Outcome(4, "pod-w4", "unreachable"),
        ]
    )
    assert capsys.readouterr().err.splitlines() == [
        f"warning: ranks 1-2: 2.9 MB of the output are lost: {late}",
        f"warning: rank 3: 50 B of the output are lost: {full}",
    ]
