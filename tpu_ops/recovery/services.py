"""Interfaces through which a recovery uses the API, the workers, the clock and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from tpu_ops.cloud.node import Worker
from tpu_ops.cloud.pending import Requests
from tpu_ops.cloud.remaking import Plan, Seen
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import control, copies
from tpu_ops.runs.follow import Follower
from tpu_ops.runs.preflight import Fault
from tpu_ops.runs.spec import RunSpec
from tpu_ops.ssh.fanout import Fanout


class Services(Protocol):
    """The API, the workers and the clock."""

    def remember(self, names: Iterable[str], lacks: Callable[[str], object]) -> Plan:
        """Return the plan from which nodes can be recreated; see `remaking.remember`."""

    def look(self, plan: Plan) -> Mapping[str, Seen]:
        """Return the current state of each node of a plan.

        Raises:
            CloudError: The API refused or did not answer.
        """

    def bring_back(self, plan: Plan, request: str, requests: Requests) -> Mapping[str, Seen]:
        """Bring the nodes of a plan back; return their states once all are READY. See `remaking.bring_back`."""

    def fleet(self) -> Fleet:
        """Return the fleet as this machine knows it."""

    def hosts(self) -> Collection[str] | None:
        """Return the names of the fleet's workers as this machine knows them; None if it does not know the fleet."""

    def workers_of(self, names: Sequence[str]) -> tuple[Fleet, list[Worker]]:
        """Wait until the host keys of some nodes are known; return the fleet and the workers of the nodes."""

    def fanout(self, fleet: Fleet) -> Fanout:
        """Return the fanout for the workers of a fleet."""

    def configure(self, fleet: Fleet, workers: Sequence[Worker], kept: Mapping[str, Mapping[str, str]]) -> None:
        """Configure workers with the playbook site.yml; keep these versions: environment -> package -> version."""

    def check_out(self, fleet: Fleet, workers: Sequence[Worker], project: str) -> None:
        """Check out a project of the fleet, as in ``vision@<commit>``, on workers."""

    async def check_commit(self, fanout: Fanout, hosts: Sequence[str], run: RunSpec) -> None:
        """Check right before a start that the project on the workers is still at the run's commit."""

    def now(self) -> float:
        """Return the time in seconds since 1970."""

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds before the next try."""


class Printer(Protocol):
    """The terminal."""

    def info(self, text: str) -> None:
        """Print a message."""

    def warning(self, text: str) -> None:
        """Print a warning."""

    def overriding(self) -> Callable[[Fault], None]:
        """Return a function that warns of a fault that --force overrides."""

    def ranks(self, count: int) -> list[int]:
        """Return the ranks whose output is printed, given the number of ranks.

        Raises:
            UsageError: The user has named a rank that does not exist.
        """

    def follower(self, fanout: Fanout, run: control.RunRef, logs: copies.Logs) -> Follower:
        """Return a follower that prints an attempt's output and writes its logs."""
