"""The meaning of an attempt's end for the recovery of its run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tpu_ops.runs.outcomes import GIVEN_UP, UNKNOWN, Outcome, first_failure

#: The meanings of an attempt's end.
SUCCEEDED, STOPPED, FAILED, TAKEN = "succeeded", "stopped", "failed", "taken"

#: States of a rank without information, or whose host or starter failed.
_GONE = (*UNKNOWN, "gone", "lost", "refused")
#: Beginnings of the workers' reason for a rank whose host failed rather than its command. Its supervisor was killed,
#: hung or failed, the other ranks lost contact, or its host went down after its command had ended with 0.
_OF_HOST = ("the supervisor ended", "the supervisor's network thread failed", "the host was restarted")
_HOST_FAILED = ("lost contact", "host shuts down", *_OF_HOST)


def of_attempt(outcomes: Sequence[Outcome], attempt: int) -> list[Outcome]:
    """Return the outcomes of one attempt: a worker with the record of another attempt has none of this one."""
    return [
        outcome
        if outcome.record is None or outcome.record["attempt"] == attempt
        else replace(
            outcome, state="gone", reason=f"it has no record of attempt {attempt}", exit=None, intent="", record=None
        )
        for outcome in outcomes
    ]


def was_started(outcomes: Sequence[Outcome]) -> bool:
    """Return whether an attempt began on any worker, and was neither refused nor given up before that."""
    return any(
        outcome.record and outcome.state != "refused" and not outcome.reason.startswith(GIVEN_UP)
        for outcome in outcomes
    )


def stop_requested_by(outcomes: Sequence[Outcome]) -> str:
    """Return the user who requested a stop of the run, whatever ended its ranks; empty if nobody did."""
    return next((outcome.stop_requested_by for outcome in outcomes if outcome.stop_requested_by), "")


def is_over(outcomes: Iterable[Outcome]) -> bool:
    """Return whether a worker reports that all ranks of an attempt ended with 0."""
    return any(map(_tells_that_all_succeeded, outcomes))


def as_told(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return all ranks as succeeded if one worker reports that all are; else the given outcomes."""
    teller = next(filter(_tells_that_all_succeeded, outcomes), None)
    return [outcome if teller is None else _succeeded(outcome, teller.host) for outcome in outcomes]


def _tells_that_all_succeeded(outcome: Outcome) -> bool:
    # Every other end of a run names a first failure, and a stopped rank is not "succeeded".
    return outcome.state == "succeeded" and outcome.record is not None and not outcome.record.get("first")


def _succeeded(outcome: Outcome, teller: str) -> Outcome:
    """Return a rank's outcome as succeeded because another worker reports it, whatever its own worker said."""
    if outcome.state == "succeeded":
        return outcome
    reason = f"{outcome.reason or outcome.state}; {teller} reports that the run succeeded"
    record = outcome.record and {**outcome.record, "first": None}
    return replace(outcome, state="succeeded", reason=reason, intent="", record=record)


def host_failed(outcomes: Sequence[Outcome]) -> bool:
    """Return whether a host, as in a maintenance event, and not the command made a run fail."""
    first = first_failure(outcomes)
    is_refused = any(outcome.state == "refused" for outcome in outcomes)
    return first is not None and not is_refused and first.cause.startswith(_HOST_FAILED)


def of_host(outcome: Outcome) -> bool:
    """Return whether a rank's own worker reports that its host failed; other workers know fewer details."""
    return outcome.record is not None and outcome.reason.startswith(_OF_HOST)


def ending(outcomes: Sequence[Outcome], lost: Mapping[str, str]) -> tuple[str, str]:
    """Return the meaning of an attempt's end, and the reason in words.

    A node that was taken away first shows as any other failure, such as a broken connection in other ranks. So the
    state of the nodes, and workers that no longer answer, count before the first failure.

    Args:
        outcomes: The outcomes of its ranks.
        lost: Description of each node that was taken away or recreated.
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
