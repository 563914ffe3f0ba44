"""What is said to do about a run, by what was seen of it."""

from __future__ import annotations

from typing import Any

import pytest

from tpu_ops.runs import advice
from tpu_ops.runs.outcomes import Outcome, of_starting, outcome_of

#: A time, and the same in words.
NOON, AT = 1_800_000_000.0, "2027-01-15 08:00:00 UTC"


def rank(number: int, state: str = "starting", **record: Any) -> Outcome:
    """Return how a rank is whose worker has a record of it."""
    return outcome_of(number, f"pod-w{number}", {"state": state, "attempt": 2, "since": NOON, "barrier": 60, **record})


def unknown(number: int) -> Outcome:
    """Return how a rank is whose worker knows nothing of the run."""
    return outcome_of(number, f"pod-w{number}", None)


@pytest.mark.parametrize(
    ("resumes", "said"),
    [
        (False, "`tpu_ops attach r1` follows it, `tpu_ops stop r1` ends it; or choose another --name"),
        (True, "`tpu_ops attach r1 --recover` resumes it, `tpu_ops stop r1` ends it; or choose another --name"),
    ],
    ids=["the run is on", "no process recovers it"],
)
def test_a_name_that_is_taken_names_what_gets_at_its_run(resumes: bool, said: str) -> None:
    assert advice.name_taken("r1", resumes=resumes) == said


@pytest.mark.parametrize(
    ("outcomes", "ready"),
    [
        ([rank(0), unknown(1)], "1 of 2 ranks ready"),
        ([rank(0), rank(1, "failed", attempt=1)], "1 of 2 ranks ready"),
        ([rank(0), rank(1, since=NOON + 3)], "2 of 2 ranks ready"),
        ([rank(0), rank(1, reason="no chips"), unknown(2)], "1 of 3 ranks ready"),
    ],
    ids=["not asked", "of an earlier attempt", "all wait", "one cannot start"],
)
def test_a_run_that_waits_for_its_ranks_is_starting(outcomes: list[Outcome], ready: str) -> None:
    seen = of_starting(outcomes)
    assert {outcome.state for outcome in seen} == {"starting"}
    assert advice.starting(seen) == f"since {AT}, {ready}; given up at 2027-01-15 08:01:00 UTC unless all are"


@pytest.mark.parametrize("first", [rank(0, "running"), rank(0, "refused"), rank(0, attempt=1), unknown(0)])
def test_a_rank_without_a_record_is_starting_only_with_a_rank_of_its_attempt(first: Outcome) -> None:
    others = [rank(1, "running"), unknown(2)]
    assert of_starting([first, *others]) == [first, *others]
