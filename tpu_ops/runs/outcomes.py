"""How the ranks of a run are, or have ended, as their workers tell; and which of them failed first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpu_ops.ssh.replies import Reply

#: States of a rank of which nothing is known: its worker does not answer, or cannot tell.
UNKNOWN = ("unknown", "unreachable")
#: What is said of a rank whose log could not be read to its end, though its worker tells of the run.
CUT = "its log could not be read to its end: its worker sends no more of it"
#: How long before the first failure a traceback may be that is told with it, in seconds: JAX waits for up to 300 s at a
#: rank's exit.
TRACEBACK_SPAN = 600.0
#: How much earlier it has to be than the first failure, in seconds: clocks of workers agree no better.
CLOCKS_AGREE = 1.0
#: How long a rank has lived on behind its own traceback that is told, in seconds: its last lines may be others then.
STOOD_STILL = 5.0
#: Why a rank is gone whose worker has no record of it.
KNOWS_NOTHING = "the worker knows nothing of this run"
#: How the reason begins that stands in the record of a run whose starter has given it up.
GIVEN_UP = "not started: "
#: Why a rank is refused whose worker has no record of a run that began nowhere.
NOT_STARTED = "it was not started here"
#: Why nothing stands on the worker of a rank whose run waits for it at the barrier.
NOT_ASKED = "its worker has not begun to start it"
#: How the word of the workers begins on a start that one of them is at fault for: it names that one, and its node may
#: have another name here.
_BLAME = re.compile(r"\Arank \d+ \([^)]*\): ")


@dataclass(frozen=True)
class Outcome:
    """How one rank ended, as far as it is known.

    Attributes:
        rank: The rank.
        host: Its worker.
        state: ``succeeded``, ``failed``, ``stopped``, ``lost``, ``refused``; ``running`` where it was not waited for,
            ``unreachable`` where contact was lost, ``unknown`` where the worker cannot tell, ``gone`` where nothing of
            the run is left: its worker knows nothing of it, or has a later attempt, or its node was taken away.
        exit: ``{"code": n}``, ``{"signal": n}`` or None.
        reason: Why, for people.
        intent: Why it was ended, as the worker recorded it: ``stop``, ``failed``, ``shutdown``; empty where it was not.
        tail: The last lines of its log.
        record: The worker's record.
        stop_requested_by: Who wanted the run stopped, as the worker knows it, whatever ended the rank.
        bare: Whether the worker has no launcher, and so tells of no run.
        remembered: What this machine remembers of the run where the worker tells nothing of it: ``attempt``,
            ``person``, ``started_by``, ``argv``, ``since``, ``ended``, as `cli.runs_output.summary` has them. The state
            is then how the whole run was seen to end from here, unless it is ``gone``.
        cut: Whether its log could not be read to its end, though its worker tells of the run.
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

    @property
    def is_cause(self) -> bool:
        """Whether this end is a failure of its own, and not what somebody did to the rank."""
        # Of a run that was seen to fail it is not remembered which rank did.
        if self.remembered:
            return False
        return self.state in {"failed", "lost", "refused"} or (
            self.state == "stopped" and self.intent not in {"stop", "failed"}
        )

    @property
    def traceback(self) -> Mapping[str, Any] | None:
        """The last that the rank printed: ``at`` (seconds since 1970), ``error`` (one line), ``text``."""
        found: Mapping[str, Any] | None = (self.record or {}).get("traceback")
        return found

    @property
    def left_behind(self) -> Sequence[Mapping[str, Any]]:
        """The processes that its command left when it ended by itself, and which were ended: ``pid``, ``command``."""
        found: Sequence[Mapping[str, Any]] = (self.record or {}).get("left_behind") or ()
        return found

    @property
    def is_requested(self) -> bool:
        """Whether somebody wanted this end, and not what starts the run, or starts it again."""
        return bool(((self.record or {}).get("intent") or {}).get("requested"))

    def to_json(self) -> dict[str, Any]:
        """Return the outcome for --json."""
        keys = ("rank", "host", "state", "exit", "reason", "intent", "traceback")
        return {**{key: getattr(self, key) for key in keys}, "left_behind": list(self.left_behind)}


def outcome_of(rank: int, host: str, record: Mapping[str, Any] | None, tail: str = "") -> Outcome:
    """Given a worker's record of a run, return the outcome of its rank."""
    if record is None:
        return Outcome(rank, host, "gone", reason=KNOWS_NOTHING)
    intent = (record.get("intent") or {}).get("kind", "")
    reason = record.get("reason") or ""
    asked = record.get("stop_requested_by", "")
    return Outcome(rank, host, record["state"], record.get("exit"), reason, intent, tail, record, asked)


def without_record(rank: int, reply: Reply) -> Outcome:
    """Given why a worker does not tell of a run, return the outcome of its rank."""
    if reply.kind == "missing":
        return Outcome(rank, reply.host, "gone", reason=KNOWS_NOTHING)
    if reply.kind == "damaged":
        return Outcome(rank, reply.host, "unknown", reason=f"{reply.problem}; {reply.fix}")
    state = "unreachable" if reply.kind in {"unreachable", "timeout"} else "unknown"
    return Outcome(rank, reply.host, state, reason=short(reply.problem), bare=reply.kind == "no-launcher")


def short(problem: str) -> str:
    """Given why a worker is not reached, return what became of its node where that is known, and not what ssh said."""
    *_, last = problem.split("; ")
    return last if last.startswith("its node ") else problem


@dataclass(frozen=True)
class FirstFailure:
    """Who failed first, and why."""

    rank: int
    host: str
    cause: str


def first_failure(outcomes: Sequence[Outcome]) -> FirstFailure | None:
    """Return the rank that failed first, None where none failed of itself.

    The workers decide it together. One that was cut off knows no better than that it heard nothing of rank 0: what
    most of them say counts.
    """
    told = [(outcome.record or {}).get("first") for outcome in outcomes]
    votes = Counter(first["rank"] for first in told if first)
    if votes:
        rank, _ = votes.most_common(1)[0]
        first = next(first for first in told if first and first["rank"] == rank)
        return FirstFailure(rank, first["worker"], first["cause"])
    # A stop at the barrier refuses all ranks, and stands as such in the record of the one that was told.
    stopped = any(outcome.state == "refused" and outcome.is_requested for outcome in outcomes)
    hosts = {outcome.rank: outcome.host for outcome in outcomes}
    at_fault = (_at_fault(outcome, hosts) for outcome in outcomes)
    # Rank 0 comes first, whose supervisor has decided it.
    if not stopped and (found := next(filter(None, at_fault), None)):
        return found
    causes = [outcome for outcome in outcomes if outcome.is_cause and not (stopped and outcome.state == "refused")]
    cause = causes[0] if causes else None
    return FirstFailure(cause.rank, cause.host, cause.reason or cause.state) if cause else None


@dataclass(frozen=True)
class Raised:
    """A rank that printed a traceback before one failed first.

    Attributes:
        rank: The rank.
        host: Its worker.
        before: How long before, in seconds.
        error: The line that names the exception.
        text: The traceback.
    """

    rank: int
    host: str
    before: float
    error: str
    text: str


def raised_before(outcomes: Sequence[Outcome], first: FirstFailure) -> Raised | None:
    """Return the rank whose traceback came before those of all others and well before one failed first.

    It may be the cause: with JAX a rank that raises waits at its exit until all abort.
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
    """Return whose fault it is that a rank was refused, None where its worker does not say.

    Args:
        outcome: Of the rank.
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
    """Return outcomes in which every rank of an attempt that waits at the barrier is starting.

    Rank 0 waits before the workers of the others are asked: these know nothing of it, or tell of an earlier attempt.
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
    """Return outcomes in which no rank of a run that began nowhere is gone: a worker without a record has not begun it.

    It was not asked, or is the one that refused.
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
