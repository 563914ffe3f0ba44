"""What ties a supervisor to the others of its run: it says what happens here, and takes orders for the whole run.

A supervisor's main thread writes records and waits for processes; the network has a thread of its own (`hub`, `peer`)
that never touches a disk, so that a full or slow one costs no heartbeat. A run of one worker has neither.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import os
import select
import threading
import time
import traceback
from typing import Any, Callable, Deque, Dict, NamedTuple

from .referee import Referee

#: Seconds between two heartbeats.
BEAT = 2.0


class Team(NamedTuple):
    """What a supervisor knows of its run and of the others in it.

    Attributes:
        run_id: The run.
        attempt: Its attempt.
        rank: This supervisor's rank.
        workers: Names of all workers, by rank.
        digest: Digest of what all ranks have in common.
        key: The secret of the run's attempt; empty for a run of one worker.
        address: This worker's internal address.
        hub: Internal address of rank 0.
        port: Port of rank 0's supervisor; 0 where it is still to be chosen.
        lease: Seconds after which a side that was not heard is lost.
        barrier: Seconds that all ranks have to become ready.
        skew: Seconds that ranks may go on when another has ended with 0.
    """

    run_id: str
    attempt: int
    rank: int
    workers: list[str]
    digest: str
    key: bytes
    address: str
    hub: str
    port: int
    lease: float
    barrier: float
    skew: float


def team(spec: Dict[str, Any], digest: str) -> Team:
    """Given the spec of one rank, return its team."""
    net = spec["net"] or {"key": "", "address": "", "hub": "", "port": 0}
    return Team(
        run_id=spec["run_id"],
        attempt=spec["attempt"],
        rank=spec["rank"],
        workers=spec["workers"],
        digest=digest,
        key=bytes.fromhex(net["key"]),
        address=net["address"],
        hub=net["hub"],
        port=net["port"],
        lease=spec["lease"],
        barrier=spec["barrier"],
        skew=spec["exit_skew"],
    )


class Link(abc.ABC):
    """The main thread's side of it.

    Orders: ``go``; ``abort`` (``reason``, ``ranks``: whose fault it is); ``note`` (``text``); ``end`` (``kind``:
    ``over``, ``failed``, ``stop``, ``skew`` or ``lost``; ``reason``, ``first``, ``grace``, ``by``); ``closed``: this
    link has nothing more to do.

    Args:
        wake: Called from any thread when there is an order.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake_main = wake
        self._orders: Deque[Dict[str, Any]] = collections.deque()

    def take(self) -> Dict[str, Any] | None:
        """Return the next order, None where there is none."""
        return self._orders.popleft() if self._orders else None

    def _order(self, **order: Any) -> None:
        self._orders.append(order)
        self._wake_main()

    @abc.abstractmethod
    def start(self) -> None:
        """Begin; the command is held and ready."""

    @abc.abstractmethod
    def say(self, **event: Any) -> None:
        """Tell what happens here.

        Events: ``refused`` (``reason``) before all go, ``ended`` (``ending``, ``oom``, ``cause``, ``at``), ``stop``
        (``intent``, ``at``), ``done``: nothing of the run is left here. Times are monotonic seconds of this host.
        """


def judge(referee: Referee, rank: int, event: Dict[str, Any], at: float, now: float) -> None:
    """Bring one rank's event before the referee, its time corrected already."""
    what = event.get("say")
    if what == "ready":
        referee.ready(rank)
    elif what == "refused":
        referee.refused(rank, str(event.get("reason", "")))
    elif what == "ended":
        ending = {key: value for key, value in dict(event["ending"]).items() if key in ("code", "signal")}
        referee.ended(rank, at, now, ending, oom=event.get("oom") is True, cause=str(event.get("cause", "")))
    elif what == "stop":
        referee.stopped(rank, at, now, dict(event["intent"]))


class Alone(Link):
    """The link of a run of one worker: no thread, no socket."""

    def __init__(self, team: Team, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._referee = Referee(team.workers, team.barrier, team.skew, time.monotonic())

    def start(self) -> None:
        """Begin: nobody is to be waited for."""
        self._judge({"say": "ready"})

    def say(self, **event: Any) -> None:
        """Tell what happens here."""
        if event["say"] == "done":
            self._order(do="closed")
        else:
            self._judge(event)

    def _judge(self, event: Dict[str, Any]) -> None:
        now = time.monotonic()
        judge(self._referee, 0, event, event.get("at", now), now)
        for order in self._referee.take():
            self._order(**order)


class Networked(Link):
    """A link with a thread of its own; `say` only leaves a message for it."""

    def __init__(self, team: Team, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self.team = team
        self._said: Deque[Dict[str, Any]] = collections.deque()
        self._bell, self._rope = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._rope, False)
        self._thread = threading.Thread(target=self._guarded, name="link", daemon=True)

    def start(self) -> None:
        """Begin in a thread; no process may be forked from now on."""
        self._thread.start()

    def say(self, **event: Any) -> None:
        """Leave a message for the thread and wake it."""
        self._said.append(event)
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes it as well
            os.write(self._rope, b"!")

    def _heard_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, 4096)

    def _wait_for_bell(self, seconds: float) -> None:
        select.select([self._bell], [], [], max(0.0, seconds))
        self._heard_bell()

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception:
            # Whatever happens here, the rank must not go on unwatched.
            reason = "the supervisor's network thread failed: " + traceback.format_exc()
            self._order(do="abort", reason=reason, ranks=[self.team.rank])
            first = {
                "rank": self.team.rank,
                "worker": self.team.workers[self.team.rank],
                "cause": "the supervisor's network thread failed",
            }
            self._order(do="end", kind="lost", reason=reason, first=first, grace=None, by=None)
        self._order(do="closed")

    @abc.abstractmethod
    def _run(self) -> None:
        """Be the thread."""
