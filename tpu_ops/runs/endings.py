"""What the end of an attempt means for the recovery of its run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tpu_ops.runs.outcomes import GIVEN_UP, UNKNOWN, Outcome, first_failure

#: What a run's end means for its recovery.
SUCCEEDED, STOPPED, FAILED, TAKEN = "succeeded", "stopped", "failed", "taken"

#: States of a rank of which nothing is known, whose host went down under it, or whose starter died.
_GONE = (*UNKNOWN, "gone", "lost", "refused")
#: How the workers' word begins for a rank whose host has failed, and not its command: the others no longer heard it,
#: its supervisor was killed, hung or failed, or its host went down once its command had ended with 0.
_OF_HOST = ("the supervisor ended", "the supervisor's network thread failed", "the host was restarted")
_HOST_FAILED = ("lost contact", "host shuts down", *_OF_HOST)


def of_attempt(outcomes: Sequence[Outcome], attempt: int) -> list[Outcome]:
    """Return outcomes as those of one attempt: a worker whose record is of another one knows nothing of it."""
    return [
        outcome
        if outcome.record is None or outcome.record["attempt"] == attempt
        else replace(outcome, state="gone", reason=f"attempt {attempt} is not there", exit=None, intent="", record=None)
        for outcome in outcomes
    ]


def was_started(outcomes: Sequence[Outcome]) -> bool:
    """Return whether an attempt was on any worker, and not refused or given up before it began."""
    return any(
        outcome.record and outcome.state != "refused" and not outcome.reason.startswith(GIVEN_UP)
        for outcome in outcomes
    )


def stop_requested_by(outcomes: Sequence[Outcome]) -> str:
    """Return who wanted the run stopped, whatever ended its ranks; empty where nobody did."""
    return next((outcome.stop_requested_by for outcome in outcomes if outcome.stop_requested_by), "")


def is_over(outcomes: Iterable[Outcome]) -> bool:
    """Return whether a worker says that all ranks of an attempt have ended with 0, its own and those of the others."""
    return any(map(_tells_that_all_succeeded, outcomes))


def as_told(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return outcomes in which every rank has succeeded, where one worker says that all have; else those given."""
    teller = next(filter(_tells_that_all_succeeded, outcomes), None)
    return [outcome if teller is None else _succeeded(outcome, teller.host) for outcome in outcomes]


def _tells_that_all_succeeded(outcome: Outcome) -> bool:
    # Whatever else ends a run blames somebody for that, and a rank that was stopped has not succeeded.
    return outcome.state == "succeeded" and outcome.record is not None and not outcome.record.get("first")


def _succeeded(outcome: Outcome, teller: str) -> Outcome:
    """Return the outcome of a rank that has succeeded, as another worker tells, whatever is known of its own."""
    if outcome.state == "succeeded":
        return outcome
    reason = f"{outcome.reason or outcome.state}; as {teller} tells, the run succeeded"
    record = outcome.record and {**outcome.record, "first": None}
    return replace(outcome, state="succeeded", reason=reason, intent="", record=record)


def host_failed(outcomes: Sequence[Outcome]) -> bool:
    """Return whether a run has failed with a host, as in a maintenance event, and not by what its command did."""
    first = first_failure(outcomes)
    is_refused = any(outcome.state == "refused" for outcome in outcomes)
    return first is not None and not is_refused and first.cause.startswith(_HOST_FAILED)


def of_host(outcome: Outcome) -> bool:
    """Return whether a rank's own worker tells that its host has failed, and knows better how than the others."""
    return outcome.record is not None and outcome.reason.startswith(_OF_HOST)


def ending(outcomes: Sequence[Outcome], lost: Mapping[str, str]) -> tuple[str, str]:
    """Return what the end of an attempt means, and why in words.

    A node that was taken away shows as anything at first, as a broken connection in other ranks for example. So what
    became of the nodes, and of workers that no longer answer, comes before what failed.

    Args:
        outcomes: How its ranks are.
        lost: What became of nodes that are not what they were, in words.
    """
    first = first_failure(outcomes)
    if is_over(outcomes) or all(outcome.state == "succeeded" for outcome in outcomes):
        return SUCCEEDED, "all ranks ended with 0"
    who, told = stop_requested_by(outcomes), [outcome.reason for outcome in outcomes if outcome.intent == "stop"]
    if who or (told and first is None):
        return STOPPED, f"stopped by {who}" if who else told[0]
    if lost:
        return TAKEN, "; ".join(lost.values())
    for outcome in outcomes:
        if outcome.state in _GONE or outcome.intent == "shutdown":
            return TAKEN, f"{outcome.host}: {outcome.reason or outcome.state}"
    if first is None:
        return FAILED, "its ranks ended differently"
    kind = TAKEN if first.cause.startswith(_HOST_FAILED) else FAILED
    return kind, f"rank {first.rank} ({first.host}): {first.cause}"
