"""Decides when a run begins, when it ends, and which rank failed first. This module uses no sockets and no clock.

Times are in seconds of the hub's monotonic clock. The caller converts times of other ranks to the hub's clock.
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple

from tpu_ops.protocol.spec import grace_of
from tpu_ops.protocol.watch import STALLED

from .stalls import DEFAULT, DUMP_LIMIT, Rules, Stalls, sample

#: Seconds for which failures are collected before the first failure is determined.
SETTLE = 1.0
#: Failures within this many seconds count as simultaneous, since a busy host notices its own failure a little later.
SAME = 0.5
_SIGABRT = 6
#: Seconds after a rank has ended with exit code 0 until a note reports that other ranks still run: usually all end at
#: about the same time. If this part of the skew is shorter, it is used instead.
QUIET, QUIET_PART = 5.0, 0.1

#: Maximum number of ranks that a message names, and of notices of hosts that are noted.
_SHOWN = 8

BARRIER, RUNNING, DECIDED = "barrier", "running", "decided"


class Failure(NamedTuple):
    """The failure of one rank.

    Attributes:
        rank: The rank.
        at: The time of the failure by the hub's clock.
        weight: 0 for a lost host, 1 for a kill or a fatal signal, 2 for a failure that probably has another rank's
            failure as its cause.
        cause: The cause, as text for users.
        unheard: Whether the failure is that contact with the rank was lost: the rank did not report it itself.
    """

    rank: int
    at: float
    weight: int
    cause: str
    unheard: bool = False


def weight_of(ending: Dict[str, Any], oom: bool) -> int:
    """Return the weight (see `Failure`) of a command's failure: how probably another rank's failure caused it.

    JAX ends a process with SIGABRT if another process of the same job has failed: SIGABRT counts like an exit code.
    """
    return 1 if oom or ending.get("signal", _SIGABRT) != _SIGABRT else 2


def first_of(failures: list[Failure]) -> Failure:
    """Return the failure that probably caused the others: the earliest; of simultaneous ones, that of least weight."""
    earliest = min(failure.at for failure in failures)
    together = [failure for failure in failures if failure.at <= earliest + SAME]
    return min(together, key=lambda failure: (failure.weight, failure.at, failure.rank))


class Referee:
    """The state of one attempt of a run.

    Args:
        workers: Names of the workers, by rank.
        barrier: Seconds in which all ranks have to become ready.
        skew: Seconds that ranks may continue after another rank has ended with exit code 0.
        now: The start time.
        stall: When the run counts as standing still.
    """

    def __init__(self, workers: list[str], barrier: float, skew: float, now: float, stall: Rules = DEFAULT) -> None:
        self._workers = workers
        self._skew = skew
        self._barrier = barrier
        self._deadline = now + barrier
        self._ready: set[int] = set()
        self._finished: Dict[int, float] = {}
        #: Time at which all ranks will be ended because one rank has ended with exit code 0.
        self._skewed = float("inf")
        self._failures: list[Failure] = []
        self._stalls, self._ends_stalled = Stalls(len(workers), stall), stall.ends
        #: The stall for which the run is about to be ended: its rank and cause, the time limit for the stacks of the
        #: ranks, and the ranks that have written theirs.
        self._stalled: tuple[int, str] | None = None
        self._dump_by = float("inf")
        self._dumped: set[int] = set()
        self._announced: set[str] = set()
        self._orders: list[Dict[str, Any]] = []
        self.phase = BARRIER

    @property
    def deadline(self) -> float:
        """The time by which `tick` has to be called; infinity if there is no timeout."""
        return float("inf") if self.phase == DECIDED else min(self._deadline, self._dump_by)

    def name(self, rank: int) -> str:
        """Return the name of a rank for messages."""
        return "rank {} ({})".format(rank, self._workers[rank])

    def _names(self, ranks: list[int]) -> str:
        """Return the names of ranks for messages; at most the first _SHOWN names."""
        return ", ".join(map(self.name, ranks[:_SHOWN])) + (" and more" if len(ranks) > _SHOWN else "")

    def take(self) -> list[Dict[str, Any]]:
        """Return the orders for every rank since the last call: go, abort, note or end."""
        orders, self._orders = self._orders, []
        return orders

    # --- events ---------------------------------------------------------------------------------------

    def ready(self, rank: int) -> None:
        """Record that a rank is ready: its checks have passed, and its command waits for ``go``."""
        self._ready.add(rank)
        if self.phase == BARRIER and len(self._ready) == len(self._workers):
            self.phase, self._deadline = RUNNING, float("inf")
            self._orders.append({"do": "go"})

    def refused(self, rank: int, reason: str) -> None:
        """Record that a rank cannot start."""
        if self.phase == BARRIER:
            self._abort("{}: {}".format(self.name(rank), reason), [rank])

    def ended(self, rank: int, at: float, now: float, ending: Dict[str, Any], *, oom: bool, cause: str) -> None:
        """Record that a rank's command has ended by itself."""
        if self.phase != RUNNING:
            return
        self._stalled, self._dump_by = None, float("inf")
        if ending == {"code": 0}:
            if not self._finished and not self._failures:
                self._skewed = now + self._skew
                self._deadline = now + min(QUIET, self._skew * QUIET_PART)
            self._finished[rank] = at
        else:
            self._fail(Failure(rank, at, weight_of(ending, oom), cause), now)
        self._decide_if_all_are_known()

    def lost(self, rank: int, at: float, now: float, cause: str) -> None:
        """Record that contact with a rank's host is lost."""
        if self.phase == BARRIER:
            self._abort("{}: {} before the run began".format(self.name(rank), cause), [rank])
        elif self.phase == RUNNING:
            self._fail(Failure(rank, at, 0, cause, unheard=True), now)
            self._decide_if_all_are_known()

    def stopped(self, rank: int, at: float, now: float, intent: Dict[str, Any]) -> None:
        """Record that a rank is being ended, because a user stops the run or because its host shuts down."""
        reason = str(intent.get("reason", ""))
        if self.phase == BARRIER:
            self._abort(reason, [])
        elif self.phase == RUNNING and intent.get("kind") != "stop":
            self._fail(Failure(rank, at, 0, reason), now)
            self._decide_if_all_are_known()
        elif self.phase == RUNNING:
            if any(failure.at < at - SAME for failure in self._failures):
                self._decide_failure()
            else:
                self._end(kind="stop", reason=reason, grace=grace_of(intent.get("grace")), by=intent.get("by"))

    def quiet(self, rank: int, found: Any, now: float) -> None:
        """Record the sample of a rank that writes nothing, or None from a rank that writes again."""
        self._stalls.heard(rank, sample(found), now)
        if self.phase != RUNNING or self._finished or self._failures:
            return
        if self._stalls.resumed(now):
            self._stalled, self._dump_by = None, float("inf")
            self._orders.append({"do": "stall", "sign": ""})
        stall = self._stalls.found(now)
        if stall is not None and self._stalled is None:
            self._orders.append({"do": "stall", "sign": stall.sign})
            if self._ends_stalled:
                self._stalled, self._dumped = (stall.rank, STALLED + stall.sign), set()
                self._dump_by = now + DUMP_LIMIT

    def announced(self, rank: int, what: str) -> None:
        """Record a notice of a rank's host; workers with the same notice are noted once."""
        if self.phase == RUNNING and what not in self._announced and len(self._announced) < _SHOWN:
            self._announced.add(what)
            self._note("{}: {}".format(self.name(rank), what))

    def dumped(self, rank: int) -> None:
        """Record that a rank has written its stacks, as a stall has ordered."""
        self._dumped.add(rank)
        if self._stalled is not None and len(self._dumped) == len(self._workers):
            self._end_stalled()

    def tick(self, now: float, silent: Dict[int, float] | None = None) -> None:
        """Take the decisions that are due because a time limit has passed.

        Args:
            now: The current time.
            silent: Ranks that have missed heartbeats -> seconds since data was last received from the rank.
        """
        if now < self.deadline:
            return
        if self.phase == BARRIER:
            missing = [rank for rank in range(len(self._workers)) if rank not in self._ready]
            text = (
                "not ready within {:g} s: {}; `tpu_ops doctor` shows what is wrong on these workers, --barrier "
                "gives more time"
            )
            self._abort(text.format(self._barrier, self._names(missing)), missing)
        elif self._failures:
            self._decide_failure(silent)
        elif self._stalled is not None and now >= self._dump_by:
            self._end_stalled()
        elif now < self._skewed:
            self._deadline = self._skewed
            text = "{} has exited with code 0; {} still running, to be ended {:.0f} s after it"
            left = len(self._workers) - len(self._finished)
            self._note(text.format(self.name(self._earliest()), left, self._skew))
        else:
            early = self._earliest()
            cause = "exited with code 0 while others kept running for {:.0f} s".format(self._skew)
            self._end(kind="skew", reason="{} {}".format(self.name(early), cause), first=self._first(early, cause))

    # --- decisions ---------------------------------------------------------------------------------------

    def _fail(self, failure: Failure, now: float) -> None:
        if not self._failures:
            self._deadline = now + SETTLE
        if all(known.rank != failure.rank for known in self._failures):
            self._failures.append(failure)

    def _decide_if_all_are_known(self) -> None:
        known = set(self._finished) | {failure.rank for failure in self._failures}
        if self.phase == RUNNING and len(known) == len(self._workers):
            if self._failures:
                self._decide_failure()
            else:
                self._end(kind="over", reason="")

    def _decide_failure(self, silent: Dict[int, float] | None = None) -> None:
        first = first_of(self._failures)
        unheard = {failure.rank for failure in self._failures if failure.unheard}
        if len(self._workers) > 2 and unheard == set(range(1, len(self._workers))):
            # If contact with all other ranks is lost at once, this host has lost its network.
            first = Failure(0, first.at, 0, "lost contact with all other workers")
        self._note("{} failed: {}; ending all ranks".format(self.name(first.rank), first.cause))
        known = set(self._finished) | {failure.rank for failure in self._failures}
        unknown = {rank: seconds for rank, seconds in sorted((silent or {}).items()) if rank not in known}
        if unknown:
            # Within the lease, silence can have another reason than a lost host, so the note does not claim that the
            # host is lost. All silent ranks are in one note, since each note is written to the disk before any rank is
            # ended.
            if len(unknown) == 1:
                text = (
                    "{} has not been heard from for {:.0f} s: if the rank's host is gone, it was lost before the "
                    "failure"
                )
            else:
                text = (
                    "not heard from for at least {1:.0f} s: {0}; if the host of such a rank is gone, it was lost "
                    "before the failure"
                )
            self._note(text.format(self._names(list(unknown)), min(unknown.values())))
        reason = "{} failed: {}".format(self.name(first.rank), first.cause)
        self._end(kind="failed", reason=reason, first=self._first(first.rank, first.cause))

    def _end_stalled(self) -> None:
        if self.phase == RUNNING and self._stalled is not None and not self._failures:
            rank, cause = self._stalled
            self._end(kind="failed", reason=cause, first=self._first(rank, cause))
        self._stalled, self._dump_by = None, float("inf")

    def _earliest(self) -> int:
        """Return the rank that ended with exit code 0 first. At least one rank must have done so."""
        return min(self._finished, key=lambda rank: self._finished[rank])

    def _first(self, rank: int, cause: str) -> Dict[str, Any]:
        return {"rank": rank, "worker": self._workers[rank], "cause": cause}

    def _note(self, text: str) -> None:
        self._orders.append({"do": "note", "text": text})

    def _abort(self, reason: str, ranks: list[int]) -> None:
        self.phase = DECIDED
        self._orders.append({"do": "abort", "reason": reason, "ranks": ranks})

    def _end(
        self, *, kind: str, reason: str, first: Dict[str, Any] | None = None, grace: Any = None, by: Any = None
    ) -> None:
        self.phase = DECIDED
        order = {"do": "end", "kind": kind, "reason": reason, "first": first, "grace": grace, "by": by}
        self._orders.append(order)
