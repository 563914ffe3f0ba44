"""Decides what the end of an attempt means for the recovery of its run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tpu_ops.protocol import watch
from tpu_ops.runs.outcomes import GIVEN_UP, UNKNOWN, Outcome, first_failure

#: What the end of an attempt means for the recovery of the run; TAKEN: its nodes or hosts failed.
SUCCEEDED, STOPPED, FAILED, TAKEN = "succeeded", "stopped", "failed", "taken"

#: States of a rank about which nothing is known, or whose host, or the command that started it, failed.
_GONE = (*UNKNOWN, "gone", "lost", "refused")
#: Beginnings of the reason that workers report for a rank if its host failed and not its command. For example, its
#: supervisor was killed or hung, the other ranks lost contact to it, or its host was shut down after its command had
#: ended with 0.
_OF_HOST = ("the supervisor ended", "the supervisor's network thread failed", "the host was restarted")
_HOST_FAILED = ("lost contact", "host shuts down", *_OF_HOST)


def of_attempt(outcomes: Sequence[Outcome], attempt: int) -> list[Outcome]:
    """Return the outcomes for one attempt. A rank whose worker has the record of another attempt counts as gone."""
    return [
        outcome
        if outcome.record is None or outcome.record["attempt"] == attempt
        else replace(
            outcome,
            state="gone",
            reason=f"the worker has no record of attempt {attempt}",
            exit=None,
            intent="",
            record=None,
        )
        for outcome in outcomes
    ]


def was_started(outcomes: Sequence[Outcome]) -> bool:
    """Return whether an attempt began on any worker, so that its start was neither refused nor given up."""
    return any(
        outcome.record and outcome.state != "refused" and not outcome.reason.startswith(GIVEN_UP)
        for outcome in outcomes
    )


def stop_requested_by(outcomes: Sequence[Outcome]) -> str:
    """Return the user who requested a stop of the run, even if its ranks ended for another reason; else empty."""
    return next((outcome.stop_requested_by for outcome in outcomes if outcome.stop_requested_by), "")


def is_over(outcomes: Iterable[Outcome]) -> bool:
    """Return whether a worker reports that all ranks of an attempt ended with 0."""
    return any(map(_tells_that_all_succeeded, outcomes))


def as_told(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """If one worker reports that all ranks succeeded, return all outcomes as succeeded; else the given outcomes."""
    teller = next(filter(_tells_that_all_succeeded, outcomes), None)
    return [outcome if teller is None else _succeeded(outcome, teller.host) for outcome in outcomes]


def _tells_that_all_succeeded(outcome: Outcome) -> bool:
    # The record of every run that did not succeed names a first failure, and the state of a stopped rank is not
    # "succeeded".
    return outcome.state == "succeeded" and outcome.record is not None and not outcome.record.get("first")


def _succeeded(outcome: Outcome, teller: str) -> Outcome:
    """Return a rank's outcome with state "succeeded", because another worker reports that the run succeeded."""
    if outcome.state == "succeeded":
        return outcome
    reason = f"{outcome.reason or outcome.state}; {teller} reports that the run succeeded"
    record = outcome.record and {**outcome.record, "first": None}
    return replace(outcome, state="succeeded", reason=reason, intent="", record=record)


def host_failed(outcomes: Sequence[Outcome]) -> bool:
    """Return whether a run failed because of a host, as in a maintenance event, and not because of its command."""
    first = first_failure(outcomes)
    is_refused = any(outcome.state == "refused" for outcome in outcomes)
    return first is not None and not is_refused and first.cause.startswith(_HOST_FAILED)


def of_host(outcome: Outcome) -> bool:
    """Return whether a rank's own worker reports that its host failed. Other workers report fewer details."""
    return outcome.record is not None and outcome.reason.startswith(_OF_HOST)


def announced(outcomes: Sequence[Outcome]) -> str:
    """Return the kind of notice, see `watch.PREEMPTED`, with which a host of an attempt shut down; empty if none."""
    intents = [(outcome.record or {}).get("intent") or {} for outcome in outcomes]
    kinds = {str(intent["notice"]) for intent in intents if intent.get("notice")}
    return watch.PREEMPTED if watch.PREEMPTED in kinds else min(kinds, default="")


def stalled_for_good(outcomes: Sequence[Outcome]) -> bool:
    """Return whether a run was ended because it stood still, and its user wants no other attempt after that."""
    first = first_failure(outcomes)
    records = [outcome.record for outcome in outcomes if outcome.record]
    wants_stop = any((record.get("stall") or {}).get("on") == watch.STOP for record in records)
    return first is not None and first.cause.startswith(watch.STALLED) and wants_stop


def ending(outcomes: Sequence[Outcome], lost: Mapping[str, str]) -> tuple[str, str]:
    """Return what the end of an attempt means for the recovery, and the reason in words.

    If a node is taken away, other ranks may report a failure first, for example a broken connection. So lost nodes, and
    workers that no longer answer, take precedence over the reported first failure.

    Args:
        outcomes: The outcomes of the attempt's ranks.
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
    return kind, first.text
