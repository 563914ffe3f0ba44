"""The outcomes of a run's ranks, as their workers report them, and the rank that failed first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpu_ops import texts
from tpu_ops.protocol.record import ON
from tpu_ops.protocol.watch import STALLED
from tpu_ops.ssh.replies import Reply

#: States of a rank about which nothing is known: its worker does not answer, or answers with an error.
UNKNOWN = ("unknown", "unreachable")
#: Message for a rank whose log could not be read to its end although its worker answers.
CUT = "the rank's log could not be read to its end: the worker stopped sending the log"
#: Maximum age in seconds of a traceback that is reported with the first failure: JAX waits for up to 300 s at a rank's
#: exit.
TRACEBACK_SPAN = 600.0
#: Minimum age in seconds of a traceback that is reported with the first failure: the workers' clocks can differ by this
#: much.
CLOCKS_AGREE = 1.0
#: Minimum age in seconds of a traceback of the failed rank itself. The last lines of the rank show a younger one
#: anyway.
STOOD_STILL = 5.0
#: Reason of a rank whose worker has no record of the run.
KNOWS_NOTHING = "the worker knows nothing of this run"
#: Prefix of the reason in the record of a run that was given up by the command that started it.
GIVEN_UP = "not started: "
#: Reason of a refused rank whose worker has no record of the run.
NOT_STARTED = "the rank was not started on this worker"
#: Reason of a rank whose worker has not been asked yet, while other ranks wait at the barrier.
NOT_ASKED = "the worker has not begun to start the rank"
#: Beginning of a worker's message on a failed start, which names the rank at fault. It is removed, since the node of
#: this rank can have another name in this fleet.
_BLAME = re.compile(r"\Arank \d+ \([^)]*\): ")


@dataclass(frozen=True)
class Outcome:
    """The state or end of one rank, as far as it is known.

    Attributes:
        rank: The rank.
        host: The worker of the rank.
        state: ``succeeded``, ``failed``, ``stopped``, ``lost``, ``refused``; ``starting``; ``running`` if nobody waited
            for its end; ``unreachable`` if contact was lost; ``unknown`` if the worker cannot tell; ``gone`` if nothing
            of the run is left: the worker has no record or a later attempt, or its node was taken away.
        exit: ``{"code": n}``, ``{"signal": n}`` or None.
        reason: The reason, as text for users.
        intent: Why the worker ended the rank: ``stop``, ``failed``, ``shutdown``; empty if it ended by itself.
        tail: The last lines of the rank's log.
        record: The worker's record of the rank, or None.
        stop_requested_by: The user who requested a stop of the run, even if the rank ended for another reason.
        bare: Whether the worker has no launcher, and therefore no records.
        remembered: This machine's record of the run if the worker has none: ``attempt``, ``person``, ``started_by``,
            ``argv``, ``since``, ``ended``, as in `cli.runs_output.summary`. The state is then that of the whole run, as
            seen from here, unless it is ``gone``.
        cut: Whether the log could not be read to its end although the worker answers.
        watch: What the supervisor of an active rank has noted last (`protocol.watch`), or None.
    """

    rank: int
    host: str
    state: str
    exit: Mapping[str, int] | None = None
    reason: str = ""
    intent: str = ""
    tail: str = ""
    record: Mapping[str, Any] | None = None
    stop_requested_by: str = ""
    bare: bool = False
    remembered: Mapping[str, Any] | None = None
    cut: bool = False
    watch: Mapping[str, Any] | None = None

    @property
    def is_cause(self) -> bool:
        """Whether the rank itself failed, so that its end is not the consequence of another event."""
        # This machine's record does not say which rank failed.
        if self.remembered:
            return False
        return self.state in {"failed", "lost", "refused"} or (
            self.state == "stopped" and self.intent not in {"stop", "failed"}
        )

    @property
    def traceback(self) -> Mapping[str, Any] | None:
        """The last traceback of the rank: ``at`` (seconds since 1970), ``error`` (one line), ``text``."""
        found: Mapping[str, Any] | None = (self.record or {}).get("traceback")
        return found

    @property
    def left_behind(self) -> Sequence[Mapping[str, Any]]:
        """The processes (``pid``, ``command``) that the command left behind and that were then ended."""
        found: Sequence[Mapping[str, Any]] = (self.record or {}).get("left_behind") or ()
        return found

    @property
    def is_requested(self) -> bool:
        """Whether a user requested this end of the rank, and not the command that starts or recovers the run."""
        return bool(((self.record or {}).get("intent") or {}).get("requested"))

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as --json prints it."""
        keys = ("rank", "host", "state", "exit", "reason", "intent", "traceback")
        facts = {key: getattr(self, key) for key in keys}
        return {**facts, "left_behind": list(self.left_behind), "watch": self.watch}


def outcome_of(rank: int, host: str, record: Mapping[str, Any] | None, tail: str = "") -> Outcome:
    """Return a rank's outcome, given its worker's record; without a record, the rank is gone."""
    if record is None:
        return Outcome(rank, host, "gone", reason=KNOWS_NOTHING)
    intent = (record.get("intent") or {}).get("kind", "")
    reason = record.get("reason") or ""
    asked = record.get("stop_requested_by", "")
    return Outcome(rank, host, record["state"], record.get("exit"), reason, intent, tail, record, asked)


def watched(outcome: Outcome, answer: Mapping[str, Any]) -> Outcome:
    """Return the outcome of an active rank with what its supervisor has noted, given its worker's answer."""
    found = answer.get("watch")
    if outcome.state not in ON or not isinstance(found, Mapping):
        return outcome
    return replace(outcome, watch=found)


def without_record(rank: int, reply: Reply) -> Outcome:
    """Return a rank's outcome, given a worker's answer that is an error."""
    if reply.kind == "missing":
        return Outcome(rank, reply.host, "gone", reason=KNOWS_NOTHING)
    if reply.kind == "damaged":
        return Outcome(rank, reply.host, "unknown", reason=f"{reply.problem}; {reply.fix}")
    state = "unreachable" if reply.kind in {"unreachable", "timeout"} else "unknown"
    return Outcome(rank, reply.host, state, reason=short(reply.problem), bare=reply.kind == "no-launcher")


def short(problem: str) -> str:
    """Shorten the reason why a worker was not reached: if it contains the state of the node, return only this."""
    *_, last = problem.split("; ")
    return last if last.startswith("its node ") else problem


@dataclass(frozen=True)
class FirstFailure:
    """The rank that failed first, and the cause."""

    rank: int
    host: str
    cause: str

    @property
    def text(self) -> str:
        """What failed, in words; a run that stands still does so on all ranks."""
        stalled = self.cause.startswith(STALLED)
        return f"the run {self.cause}" if stalled else f"rank {self.rank} ({self.host}): {self.cause}"


def first_failure(outcomes: Sequence[Outcome]) -> FirstFailure | None:
    """Return the rank that failed first; None if no rank failed by itself.

    Each worker's record names a rank, and the majority counts: a rank that was cut off only knows that it lost rank 0.
    """
    told = [(outcome.record or {}).get("first") for outcome in outcomes]
    votes = Counter(first["rank"] for first in told if first)
    if votes:
        rank, _ = votes.most_common(1)[0]
        first = next(first for first in told if first and first["rank"] == rank)
        return FirstFailure(rank, first["worker"], first["cause"])
    # A stop at the barrier makes all ranks "refused". The record of the rank that received the stop names the request.
    stopped = any(outcome.state == "refused" and outcome.is_requested for outcome in outcomes)
    hosts = {outcome.rank: outcome.host for outcome in outcomes}
    at_fault = (_at_fault(outcome, hosts) for outcome in outcomes)
    # The refusal of rank 0 is examined first: its supervisor decided which rank is at fault.
    if not stopped and (found := next(filter(None, at_fault), None)):
        return found
    causes = [outcome for outcome in outcomes if outcome.is_cause and not (stopped and outcome.state == "refused")]
    cause = causes[0] if causes else None
    return FirstFailure(cause.rank, cause.host, cause.reason or cause.state) if cause else None


@dataclass(frozen=True)
class Raised:
    """A traceback that a rank printed before the first failure.

    Attributes:
        rank: The rank.
        host: The worker of the rank.
        before: Seconds between the traceback and the first failure.
        error: The line that names the exception.
        text: The traceback.
    """

    rank: int
    host: str
    before: float
    error: str
    text: str


def raised_before(outcomes: Sequence[Outcome], first: FirstFailure) -> Raised | None:
    """Return the earliest traceback of the ranks, if it was printed some seconds before the first failure.

    This traceback might be the cause of the failure: with JAX, a rank that raises an exception waits at its exit until
    all ranks abort.
    """
    failed = next((out for out in outcomes if out.rank == first.rank and out.record), None)
    exited = ((failed and failed.record) or {}).get("exited")
    if failed is None or exited is None:
        return None
    found = [(exited - out.traceback["at"], out) for out in outcomes if out.traceback]
    if not (recent := [one for one in found if one[0] <= TRACEBACK_SPAN]):
        return None
    before, raised = max(recent, key=lambda one: one[0])
    own = next((ago for ago, out in recent if out is failed), 0.0)
    clearly = before >= STOOD_STILL if raised is failed else before - own >= CLOCKS_AGREE
    told = raised.traceback or {}
    return Raised(raised.rank, raised.host, before, told["error"], told["text"]) if clearly else None


def _at_fault(outcome: Outcome, hosts: Mapping[int, str]) -> FirstFailure | None:
    """Return the rank that is at fault for the refused start of a rank; None if the worker names no rank.

    Args:
        outcome: The outcome of the refused rank.
        hosts: The workers by rank.
    """
    if outcome.state != "refused" or not outcome.record:
        return None
    given_up = outcome.reason.startswith(GIVEN_UP)
    reason = _BLAME.sub("", outcome.reason.removeprefix(GIVEN_UP))
    for rank in outcome.record.get("blamed") or ():
        if rank in hosts:
            return FirstFailure(rank, hosts[rank], reason)
    for rank, host in hosts.items():
        if given_up and reason.startswith(f"{host}: "):
            return FirstFailure(rank, host, reason.removeprefix(f"{host}: "))
    return None


def of_starting(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes; if an attempt waits at the barrier, ranks without its record get the state "starting".

    Rank 0 waits at the barrier before the other workers are asked. These workers have no record yet, or the record of
    an earlier attempt.
    """
    known = [outcome.record for outcome in outcomes if outcome.record]
    attempt = max((int(record["attempt"]) for record in known if record["state"] == "starting"), default=0)
    if not attempt or any(record["state"] != "starting" and int(record["attempt"]) >= attempt for record in known):
        return list(outcomes)

    def starting(outcome: Outcome) -> Outcome:
        behind = outcome.record is not None and int(outcome.record["attempt"]) < attempt
        if not behind and (outcome.state != "gone" or outcome.reason != KNOWS_NOTHING):
            return outcome
        return Outcome(outcome.rank, outcome.host, "starting", reason=NOT_ASKED)

    return [starting(outcome) for outcome in outcomes]


def of_refused(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes; if the run began on no worker, ranks without a record get the state "refused".

    The worker of such a rank was not asked to start the rank, or it refused.
    """
    known = [outcome for outcome in outcomes if outcome.record]
    if not known or any(outcome.state != "refused" for outcome in known):
        return list(outcomes)
    first = first_failure(outcomes)

    def refused(outcome: Outcome) -> Outcome:
        if outcome.state != "gone" or outcome.reason != KNOWS_NOTHING:
            return outcome
        reason = first.cause if first and first.rank == outcome.rank else NOT_STARTED
        return replace(outcome, state="refused", reason=reason)

    return [refused(outcome) for outcome in outcomes]


def newest_records(outcomes: Sequence[Outcome]) -> list[Mapping[str, Any]]:
    """Return the workers' records of a run's newest attempt; empty if no worker has a record."""
    known = [outcome.record for outcome in outcomes if outcome.record]
    newest = max((int(record["attempt"]) for record in known), default=1)
    return [record for record in known if record["attempt"] == newest]


def run_state(outcomes: Sequence[Outcome]) -> str:
    """Return the state of a whole run, which is the worst state of its ranks."""
    states = {outcome.state for outcome in outcomes}
    if first_failure(outcomes) or "failed" in states:
        # If the start of a rank was refused, no rank has begun, not even on a worker that does not answer.
        return "refused" if "refused" in states <= {"refused", "unreachable", "unknown"} else "failed"
    for state in ("unreachable", "unknown", "gone", "stopped", "starting", "running", "ending", "exited"):
        if state in states:
            return state
    if any(outcome.state == "refused" and outcome.remembered for outcome in outcomes):
        return "refused"
    # Refused because of a stop: for any other reason, `first_failure` would not be empty.
    return "stopped" if "refused" in states else "succeeded"


def ending(found: Mapping[str, int] | None) -> str:
    """Return the exit code or signal of a rank, as in `Outcome.exit`, as words; empty if there is none."""
    if not found:
        return ""
    if "code" in found:
        return f"exit code {found['code']}"
    return texts.signal_name(found["signal"]) or f"signal {found['signal']}"


def person(name: str, asker: str) -> str:
    """Return the user of a run, and the person who started the run if it is another one; empty if unknown."""
    return name if asker in ("", name) else f"{name} (started by {asker})"
