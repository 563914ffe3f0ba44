"""The link between a supervisor and the other supervisors of its run: reports local events and receives orders.

The supervisor's main thread writes records and waits for processes. The network has its own thread (`hub`, `peer`),
which never accesses a disk, so that a full or slow disk delays no heartbeat. A run of one worker has no network thread.
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

from tpu_ops.protocol.spec import stall_of

from .notices import plain
from .referee import Referee
from .stalls import DEFAULT, Rules

#: Seconds between two heartbeats of the hub to all ranks.
BEAT = 2.0


class Team(NamedTuple):
    """The facts that a supervisor knows about its run and the other ranks.

    Attributes:
        run_id: The run.
        attempt: The attempt of the run.
        rank: This supervisor's rank.
        workers: Names of all workers, by rank.
        digest: Digest of the part of the spec that all ranks share.
        key: The secret of the run's attempt; empty for a run of one worker.
        address: This worker's internal address.
        hub: Internal address of the worker of rank 0.
        port: Port of rank 0's supervisor; 0 if the port is not chosen yet.
        lease: Seconds without received data after which a connection counts as lost.
        barrier: Seconds in which all ranks have to become ready.
        skew: Seconds that ranks may continue after another rank has ended with exit code 0.
        stall: When the run counts as standing still.
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
    stall: Rules = DEFAULT


def team(spec: Dict[str, Any], digest: str) -> Team:
    """Return the team from the spec of one rank."""
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
        stall=Rules(**stall_of(spec)),
    )


class Link(abc.ABC):
    """The main thread's interface to the other ranks.

    Orders: ``go``; ``abort`` (``reason``, ``ranks``: the ranks at fault); ``note`` (``text``); ``stall`` (``sign``: the
    run stands still, write the stacks; empty: it no longer does); ``end`` (``kind``: ``over``, ``failed``, ``stop``,
    ``skew`` or ``lost``; ``reason``, ``first``, ``grace``, ``by``); ``closed``: this link has ended.

    Args:
        wake: Called from any thread when there is an order for the main thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake_main = wake
        self._orders: Deque[Dict[str, Any]] = collections.deque()

    def take(self) -> Dict[str, Any] | None:
        """Return the next order; None if there is none."""
        return self._orders.popleft() if self._orders else None

    def _order(self, **order: Any) -> None:
        self._orders.append(order)
        self._wake_main()

    @abc.abstractmethod
    def start(self) -> None:
        """Start the link. Called when the rank's command is ready and waits for ``go``."""

    @abc.abstractmethod
    def say(self, **event: Any) -> None:
        """Report a local event.

        Events: ``refused`` (``reason``), before the run begins; ``ended`` (``ending``, ``oom``, ``cause``, ``at``);
        ``stop`` (``intent``, ``at``); ``quiet`` (``sample``: see `stalls.Sample`, or None); ``dumped``: the stacks that
        the order ``stall`` asked for are written; ``notice`` (``what``): this host announces an event; ``done``: no
        process of the run is left on this host. Times are in seconds of this host's monotonic clock.
        """


def judge(referee: Referee, rank: int, event: Dict[str, Any], at: float, now: float) -> None:
    """Pass a rank's event to the referee; ``at`` is the time of the event by the hub's clock."""
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
    elif what == "quiet":
        referee.quiet(rank, event.get("sample"), now)
    elif what == "dumped":
        referee.dumped(rank)
    elif what == "notice":
        referee.announced(rank, plain(str(event.get("what", ""))))


class Alone(Link):
    """The link of a run of one worker: no thread, no socket."""

    def __init__(self, team: Team, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._referee = Referee(team.workers, team.barrier, team.skew, time.monotonic(), team.stall)

    def start(self) -> None:
        """Start the link: there is no other rank to wait for."""
        self._judge({"say": "ready"})

    def say(self, **event: Any) -> None:
        """Report a local event."""
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
    """A link with its own thread: `say` puts the event into a queue that the thread reads."""

    def __init__(self, team: Team, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self.team = team
        self._said: Deque[Dict[str, Any]] = collections.deque()
        self._bell, self._rope = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._rope, False)
        self._thread = threading.Thread(target=self._guarded, name="link", daemon=True)

    def start(self) -> None:
        """Start the thread. No process may be forked after this call."""
        self._thread.start()

    def say(self, **event: Any) -> None:
        """Put an event into the thread's queue and wake the thread."""
        self._said.append(event)
        with contextlib.suppress(BlockingIOError):  # if the pipe is full, the thread is woken anyway
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
            # End the rank at any error: it must not continue without a connection to the other ranks.
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
        """Do the work of the thread until the link has ended."""
