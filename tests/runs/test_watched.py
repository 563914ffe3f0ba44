"""The texts about an active run's silence, chips and notices, and the options for runs that stand still."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest

from tests.runs.test_parts import pod
from tpu_ops.cli import recover_options, runs_output, stall_options
from tpu_ops.errors import UsageError
from tpu_ops.protocol.watch import in_minutes
from tpu_ops.runs import spec, watched
from tpu_ops.runs.outcomes import FirstFailure, Outcome, outcome_of
from tpu_ops.runs.outcomes import watched as with_watch

NOW = 100_000.0


def rank(number: int, *, silent: float | None = None, idle: float | None = None, **more: Any) -> Outcome:
    """Return an active rank whose worker's clock differs from that of the other workers."""
    clock = NOW + 1000 * number
    watch = {
        "at": clock,
        "last_output": None if silent is None else clock - silent,
        "chips": "busy" if idle is None else "idle",
        "idle_since": None if idle is None else clock - idle,
        "stall": None,
        "maintenance": None,
        **more,
    }
    found = outcome_of(number, f"pod-w{number}", {"state": "running"})
    return watched_by(found, watch)


def watched_by(outcome: Outcome, watch: Any) -> Outcome:
    return with_watch(outcome, {"watch": watch})


STALL = {"at": 1.0, "sign": "x"}


@pytest.mark.parametrize(
    ("outcomes", "text"),
    [
        ((), ""),
        ((rank(0, silent=200, idle=400),), ""),
        ((rank(0, silent=840, idle=660),), "no output for 14 min, chips idle for 11 min"),
        ((rank(0, silent=840, idle=200),), "no output for 14 min"),
        ((rank(0, silent=840), rank(1, silent=900, idle=900)), "no output for 14 min"),
        ((rank(0, silent=10), rank(1, silent=9000, idle=9000)), ""),
        ((rank(0, silent=840), rank(1)), "no output for 14 min"),
        ((rank(0, silent=9000, at=NOW - 8700),), "no output for 5 min"),
        ((rank(0, silent=9000, at=NOW - 8990),), ""),
        ((rank(0), rank(1)), ""),
        (
            (rank(0, silent=840, idle=660, chips="unreadable"),),
            "no output for 14 min, chips idle or unreadable for 11 min",
        ),
        ((rank(0, silent=60, idle=60, stall=STALL),), "stands still: no output for 60 s, chips idle for 60 s"),
        ((rank(0, silent=60, stall=STALL),), "stands still: no output for 60 s"),
    ],
)
def test_what_is_told_of_a_run(outcomes: tuple[Outcome, ...], text: str) -> None:
    assert watched.told(outcomes) == text


def test_equal_notices_of_workers_are_told_once() -> None:
    one, other = ({"at": 1.0, "what": what, "kind": "maintenance"} for what in ("maintenance soon", "preempted"))
    ranks = (rank(0, maintenance=one), rank(1, maintenance=one), rank(2, maintenance=other), rank(3))
    assert watched.notices(ranks) == ["pod-w[0-1]: maintenance soon", "pod-w2: preempted"]


def test_status_tells_a_notice_once_and_keeps_other_notes(capsys: pytest.CaptureFixture[str]) -> None:
    notice = {"at": 1.0, "what": "preempted: soon", "kind": "preempted"}
    ranks = [rank(number, maintenance=notice) for number in (0, 1)]
    noted = {one.rank: ["moved", f"rank {one.rank} ({one.host}): preempted: soon"] for one in ranks}
    runs_output.notes([replace(one, record={**(one.record or {}), "notes": noted[one.rank]}) for one in ranks])
    assert capsys.readouterr().err.splitlines() == ["  moved", "  pod-w[0-1]: preempted: soon"]


def test_only_active_ranks_have_what_their_supervisor_noted() -> None:
    ended = outcome_of(0, "pod-w0", {"state": "failed"})
    assert watched_by(ended, {"at": 1.0}).watch is None
    assert watched_by(rank(0), None).to_json()["watch"]["chips"] == "busy"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (9000, "2 h 30 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert in_minutes(seconds) == text


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    stall_options.add_arguments(parser)
    recover_options.add_arguments(parser)
    recover_options.add_budgets(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "stall"),
    [
        ((), None),
        (("--stall-after", "20m"), {"after": 1200, "grace": 1800, "on": "tell"}),
        (("--stall-after", "off"), {"after": 0, "grace": 1800, "on": "tell"}),
        (("--stall-after", "20s", "--stall-grace", "0s"), {"after": 20, "grace": 0, "on": "tell"}),
        (("--on-stall", "stop"), {"after": 900, "grace": 1800, "on": "stop"}),
        (
            ("--on-stall", "restart", "--recover", "--max-failures", "1", "--stall-grace", "5"),
            {"after": 900, "grace": 5, "on": "restart"},
        ),
    ],
)
def test_the_options_for_stalls(words: tuple[str, ...], stall: Any) -> None:
    chosen = stall_options.chosen(options(*words))
    assert chosen == stall
    sent = spec.RunSpec("r1", ("true",), stall=chosen).for_rank(pod(), 0)
    assert sent.get("stall") == stall
    assert ("stall" in sent) == (stall is not None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on-stall", "restart"), "only --recover starts a run again"),
        (("--on-stall", "restart", "--recover"), "--max-failures allows none"),
        (("--stall-after", "0", "--on-stall", "stop"), "never ended for it"),
    ],
)
def test_options_for_stalls_that_cannot_be_combined(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        stall_options.chosen(options(*words))


def test_times_that_no_worker_accepts() -> None:
    with pytest.raises(UsageError, match="are too many"):
        spec.RunSpec("r1", ("true",), stall=stall_options.chosen(options("--stall-after", "300d")))


def test_a_stalled_run_names_no_rank_as_the_first_to_fail(capsys: pytest.CaptureFixture[str]) -> None:
    first = {"rank": 1, "worker": "pod-w1", "cause": "stalled: no output for 16 min"}
    record = {"state": "stopped", "first": first, "attempt": 1, "intent": {"kind": "failed"}}
    runs_output.failed_first([outcome_of(0, "pod-w0", record), outcome_of(1, "pod-w1", record)], (0, 1))
    assert capsys.readouterr().err == "the run stalled: no output for 16 min\n"
    assert FirstFailure(1, "pod-w1", "stalled: no output for 16 min").text == "the run stalled: no output for 16 min"
