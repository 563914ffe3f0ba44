"""A hub and its peers on this machine's own network."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from tpu_ops.host.hub import Hub
from tpu_ops.host.link import Link, Team
from tpu_ops.host.peer import Peer

KEY = bytes(32)
HERE = "127.0.0.1"
LEASE = 2.0


def free_ports(count: int) -> range:
    """Return a range of ports below those that the kernel gives away, free a moment ago."""
    # Each process has a stretch of its own: a hub gives its ports back while its test still knocks there.
    for first in range(20000 + os.getpid() % 500 * 20, 32000, count):
        try:
            for port in range(first, first + count):
                socket.create_server((HERE, port)).close()
        except OSError:
            continue
        return range(first, first + count)
    raise AssertionError("no free ports")


def team(rank: int, size: int, *, port: int = 0, **changes: Any) -> Team:
    """Return what a rank knows of its run, with changes."""
    workers = [f"w{number}" for number in range(size)]
    made = Team("r1", 1, rank, workers, "digest", KEY, HERE, HERE, port, LEASE, barrier=4.0, skew=60.0)
    return made._replace(**changes)


class Star:
    """A hub and its peers, the orders that each has taken, and who has been closed."""

    def __init__(self, size: int, **changes: Any) -> None:
        ports = free_ports(4)
        self.ports, self.coordinator, self.size, self.changes = range(ports[0], ports[3]), ports[3], size, changes
        self.hub = Hub(
            team(0, size, **changes), self.wake, ports=self.ports, coordinator=self.coordinator, ending_limit=1
        )
        self.links: list[Link] = [self.hub]
        self.orders: dict[Link, list[dict[str, Any]]] = {self.hub: []}

    def wake(self) -> None:
        """Nobody sleeps here: the tests look by themselves."""

    def add(self, rank: int, problem: str = "", **changes: Any) -> Peer:
        added = Peer(team(rank, self.size, port=self.hub.port, **{**self.changes, **changes}), self.wake, problem)
        self.links.append(added)
        self.orders[added] = []
        added.start()
        return added

    def running(self) -> Star:
        self.hub.start()
        for rank in range(1, self.size):
            self.add(rank)
        for each in self.links:
            self.await_(each, "go")
        return self

    def look(self, each: Link, what: str) -> dict[str, Any] | None:
        while (order := each.take()) is not None:
            self.orders[each].append(order)
        return next((order for order in self.orders[each] if order["do"] == what), None)

    def await_(self, each: Link, what: str, seconds: float = 10) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while (order := self.look(each, what)) is None:
            assert time.monotonic() < deadline, f"no {what} within {seconds} s: {self.orders[each]}"
            time.sleep(0.01)  # polls until the deadline
        return order

    def await_ready(self, ranks: set[int]) -> None:
        deadline = time.monotonic() + 10
        while self.hub._referee._ready != ranks:
            assert time.monotonic() < deadline, f"ready: {self.hub._referee._ready}"
            time.sleep(0.01)  # polls until the deadline

    def finish(self) -> None:
        for each in self.links:
            each.say(say="done")
        for each in self.links:
            self.await_(each, "closed")


def ended(each: Link, ending: dict[str, int], cause: str = "") -> None:
    """Have a rank say that its command has ended."""
    each.say(say="ended", ending=ending, oom=False, cause=cause, at=time.monotonic())
