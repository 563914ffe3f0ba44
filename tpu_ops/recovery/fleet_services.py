"""The fleet's API and workers, as the driver of a recovery uses them."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tpu_ops.ansible import convergence
from tpu_ops.ansible.convergence import NewDisplay
from tpu_ops.cloud import remaking
from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.node import Worker
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.pending import Requests
from tpu_ops.cloud.remaking import Plan, Seen
from tpu_ops.config import Settings
from tpu_ops.fleet import contact, grant, holdings, origin, view
from tpu_ops.runs import holders, projects
from tpu_ops.runs.spec import RunSpec
from tpu_ops.ssh.fanout import Fanout

_log = logging.getLogger(__name__)


class FleetServices:
    """The API and the workers of a fleet, for the recovery of one run.

    Args:
        settings: The settings of the fleet.
        run_id: The id of the run.
        said: Warnings about the fleet that this command has printed already.
        outside_grant: Whether nodes are also created again if the fleet's grant does not cover them.
        waiting: Returns the function that shows the progress of a wait, given what waits.
        display: Returns the display of a playbook.
    """

    def __init__(
        self,
        settings: Settings,
        run_id: str,
        said: Iterable[str] = (),
        *,
        outside_grant: bool = False,
        waiting: Callable[[str], Progress],
        display: NewDisplay,
    ) -> None:
        self._settings, self._run_id, self._said = settings, run_id, set(said)
        self._outside_grant = outside_grant
        self._waiting, self._display = waiting, display

    def remember(self, names: Iterable[str], lacks: Callable[[str], object]) -> Plan:
        """Return the plan for recreating nodes, made from their present state in the API."""
        with origin.api(self._settings) as tpu:
            return remaking.remember(tpu, names, lacks)

    def look(self, plan: Plan) -> Mapping[str, Seen]:
        """Return the present state of each node of a plan, from the API."""
        with origin.api(self._settings) as tpu:
            return remaking.look(tpu, plan)

    def bring_back(self, plan: Plan, request: str, requests: Requests) -> Mapping[str, Seen]:
        """Bring the nodes of a plan back; return their states once all nodes are READY."""
        with origin.api(self._settings) as tpu:
            return remaking.bring_back(
                tpu, plan, request, _log.info, requests, used=self._used, allow=lambda: self._allow(tpu, plan)
            )

    def _allow(self, tpu: Tpu, plan: Plan) -> None:
        """Refuse to create nodes that the fleet's grant does not cover, or not any more.

        Raises:
            UsageError: The grant has no room for them, or has ended.
        """
        granted = None if self._outside_grant else grant.read(self._settings.path / grant.FILE)
        if granted:
            held = holdings.look(tpu, self._settings)
            holdings.refuse_uncovered(granted, held, plan, dt.datetime.now(dt.UTC))

    def _used(self, names: Collection[str]) -> str:
        """Return the other runs that are active on nodes, as words; empty if there are none."""
        runs, _ = holders.active(view.look(self._settings)[0], names)
        return holders.named({run_id: person for run_id, person in runs.items() if run_id != self._run_id})

    def fleet(self) -> view.Fleet:
        """Return the last known view of the fleet; log each of its warnings once."""
        fleet = view.current(self._settings, self._said)
        self._said.update(fleet.warnings)
        return fleet

    def hosts(self) -> Collection[str] | None:
        """Return the names of all known workers; None if nothing is known of the fleet."""
        fleet = view.known(self._settings)
        return {worker.host for worker in fleet.workers} if fleet else None

    def workers_of(self, names: Sequence[str]) -> tuple[view.Fleet, list[Worker]]:
        """Wait until the host keys of the nodes' workers are known; return the fleet and these workers."""
        fleet, workers = view.with_host_keys(self._settings, names, self._waiting(f"run {self._run_id}"))
        for text in (text for text in fleet.warnings if text not in self._said):
            _log.warning(text)
        self._said.update(fleet.warnings)
        return fleet, workers

    def fanout(self, fleet: view.Fleet) -> Fanout:
        """Return the connections to the workers of a fleet."""
        return contact.fanout(fleet)

    def configure(self, fleet: view.Fleet, workers: Sequence[Worker], kept: Mapping[str, Mapping[str, str]]) -> None:
        """Run site.yml on workers; lists without a lock get these versions: environment -> package -> version."""
        variables = {"python_kept_versions": kept} if kept else None
        convergence.converge(fleet, workers, self._display, variables=variables, then="continue")

    def check_out(self, fleet: view.Fleet, workers: Sequence[Worker], project: str) -> None:
        """Check out a project of the fleet on workers."""
        projects.check_out(fleet, workers, project, self._display)

    async def check_commit(self, fanout: Fanout, hosts: Sequence[str], run: RunSpec) -> None:
        """Check that the run's project is still at the run's commit on all workers."""
        await projects.look(fanout, hosts, run)

    def now(self) -> float:
        """Return the time in seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait for some seconds before the next try."""
        time.sleep(seconds)
