"""The advice about a run follows from what was seen of it."""

from __future__ import annotations

from typing import Any

import pytest

from tpu_ops.runs import advice
from tpu_ops.runs.advice import Recoverer, Step
from tpu_ops.runs.known_ends import NODE_GONE
from tpu_ops.runs.outcomes import KNOWS_NOTHING, Outcome, of_starting, outcome_of

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
        (False, "`tpu_ops attach r1` follows the active run, `tpu_ops stop r1` ends it; or choose another --name"),
        (
            True,
            "`tpu_ops attach r1 --recover` resumes the active run, `tpu_ops stop r1` ends it; or choose another --name",
        ),
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
    assert (
        advice.starting(seen)
        == f"since {AT}, {ready}; the start is given up at 2027-01-15 08:01:00 UTC unless all are ready"
    )


@pytest.mark.parametrize("first", [rank(0, "running"), rank(0, "refused"), rank(0, attempt=1), unknown(0)])
def test_a_rank_without_a_record_is_starting_only_with_a_rank_of_its_attempt(first: Outcome) -> None:
    others = [rank(1, "running"), unknown(2)]
    assert of_starting([first, *others]) == [first, *others]


CLOSED, KILLED = "lost contact: the connection was closed", "the supervisor ended (signal; killed KILL)"
REBOOTED = f"the host was restarted at {AT} while the run was active"
AGAIN = Step("again", "tpu_ops train pod --name OTHER -- COMMAND")
BRINGS = Step("", "with --recover a run brings lost nodes back and continues by itself")
GOES_ON = Step("", "with --recover a run continues by itself after a host has failed")
LISTS = "`tpu_ops list` shows their state now"


def failed(reason: str, state: str = "failed") -> list[Outcome]:
    """Return how two ranks are of which the second has failed with its host."""
    first = {"rank": 1, "worker": "pod-w1", "cause": CLOSED}
    return [rank(0, "stopped", first=first, reason=f"rank 1 failed: {CLOSED}"), rank(1, state, reason=reason)]


def silent(state: str, reason: str) -> list[Outcome]:
    """Return the states of two ranks; the second does not answer."""
    return [failed("")[0], Outcome(1, "pod-w1", state, reason=reason)]


def gone(reason: str) -> list[Outcome]:
    """Return how two ranks are of which nothing is left."""
    return [Outcome(number, f"pod-w{number}", "gone", reason=reason) for number in range(2)]


def once(what: str) -> Step:
    """Return what to do once something is there."""
    return AGAIN._replace(how=f"{AGAIN.how}, once {what}")


@pytest.mark.parametrize(
    ("outcomes", "node", "steps"),
    [
        (failed(KILLED), "READY", [Step("nodes", f"pod is there; pod-w1: {KILLED}"), AGAIN, GOES_ON]),
        (failed(REBOOTED, "lost"), "STARTING", [Step("nodes", f"pod is there; pod-w1: {REBOOTED}"), AGAIN, GOES_ON]),
        (
            [rank(0, "lost", reason=REBOOTED)],
            "READY",
            [Step("nodes", f"pod is there; pod-w0: {REBOOTED}"), AGAIN, GOES_ON],
        ),
        (
            failed("host shuts down"),
            "PREEMPTED",
            [Step("nodes", f"pod is PREEMPTED; {LISTS}"), once("pod is READY"), BRINGS],
        ),
        (
            silent("unreachable", "no route to host"),
            "READY",
            [Step("nodes", f"pod is there, but pod-w1 did not answer; {LISTS}"), once("pod-w1 answers"), GOES_ON],
        ),
        (
            silent("gone", "its node is PREEMPTED now"),
            "PREEMPTED",
            [Step("nodes", f"pod is PREEMPTED; {LISTS}"), once("pod is READY"), BRINGS],
        ),
        (
            gone("its node no longer exists"),
            "",
            [Step("nodes", f"pod is not listed; {LISTS}"), once("pod is READY"), BRINGS],
        ),
        (gone(NODE_GONE), "READY", [Step("nodes", "pod is there"), AGAIN, BRINGS]),
        (gone(KNOWS_NOTHING), "READY", [Step("nodes", "pod is there"), AGAIN]),
        ([*gone(KNOWS_NOTHING), rank(2)], "READY", []),
        ([rank(0, "failed", reason="exit code 1")], "READY", []),
        ([rank(0, "succeeded")], "READY", []),
    ],
)
def test_the_steps_to_restart_a_run_follow_the_states_of_its_nodes(
    outcomes: list[Outcome], node: str, steps: list[Step]
) -> None:
    states = {outcome.host: node for outcome in outcomes if node}
    assert advice.again(outcomes, lambda: states) == steps


PREPARING = "run r1: a process on this machine is preparing attempt 2"


@pytest.mark.parametrize(
    ("found", "states", "said"),
    [
        (None, ("gone", "gone"), ""),
        (
            Recoverer("r1", 1),
            ("gone", "gone"),
            "run r1: no process is recovering it; `tpu_ops attach r1 --recover` resumes the recovery",
        ),
        (
            Recoverer("r1", 1, held=True, pending=True, who="ada@desk", pid=7, since=NOON, logs="/l"),
            ("gone", "recovering"),
            f"{PREPARING} (ada@desk, pid 7, since {AT}); logs of attempt 1 are in /l",
        ),
        (
            Recoverer("r1", 1, held=True, pending=True),
            ("failed", "recovering"),
            PREPARING,
        ),
        (
            Recoverer("r1", 2, held=True, who="ada@desk", pid=7),
            ("running", "running"),
            "run r1: a process on this machine recovers it (ada@desk, pid 7)",
        ),
        (
            Recoverer("r1", 2, held=True, pid=7),
            ("gone", "recovering"),
            "run r1: a process on this machine recovers it (pid 7)",
        ),
    ],
)
def test_a_run_is_recovering_while_a_process_here_starts_it_again(
    found: Recoverer | None, states: tuple[str, str], said: str
) -> None:
    told, shown = states
    assert (advice.state(told, found), advice.recovery(found)) == (shown, said)


def started(state: str, attempt: int = 1, machine: str = "ada@desk", cause: str = "") -> list[Outcome]:
    """Return the outcomes of a run of two ranks, whose second rank has no record."""
    first = {"rank": 1, "worker": "pod-w1", "cause": cause} if cause else None
    record = {"attempt": attempt, "state": state, "started_from": machine, "first": first, "intent": {"kind": "failed"}}
    return [outcome_of(0, "pod-w0", record), unknown(1)]


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        (started("stopped"), "run r1 was started on ada@desk: "),
        (started("stopped", 3), "run r1 was started on ada@desk with --recover (attempt 3 was the last one seen): "),
        (started("stopped", cause="lost contact: nothing heard for 15 s"), "run r1 was started on ada@desk: "),
        (started("stopped", machine="bob@here"), ""),
        (started("stopped", cause="exit code 3"), ""),
        ([rank(0, "succeeded")], ""),
    ],
)
def test_another_machine_that_may_recover_a_run_is_named(outcomes: list[Outcome], said: str) -> None:
    told = advice.other_machine("r1", outcomes, "bob@here")
    assert told == (said and f"{said}`tpu_ops status r1` there shows whether it is being recovered")
