"""The fleet's API, the workers and the terminal, as the driver of a recovery uses them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tpu_ops.ansible import convergence
from tpu_ops.cli import faults, options, output, runs_output
from tpu_ops.cli.configure import Progress
from tpu_ops.cloud import remaking
from tpu_ops.cloud.node import Worker
from tpu_ops.cloud.pending import Requests
from tpu_ops.cloud.remaking import Plan, Seen
from tpu_ops.config import Settings
from tpu_ops.fleet import contact, origin, view
from tpu_ops.runs import control, copies, holders, projects, ranks
from tpu_ops.runs.follow import Follower
from tpu_ops.runs.preflight import Fault
from tpu_ops.runs.spec import RunSpec
from tpu_ops.ssh.fanout import Fanout


class Services:
    """The API and the workers of a fleet, for the recovery of one run.

    Args:
        settings: The settings of the fleet.
        run_id: The id of the run.
        said: Warnings about the fleet that this command has printed already.
    """

    def __init__(self, settings: Settings, run_id: str, said: Iterable[str] = ()) -> None:
        self._settings, self._run_id, self._said = settings, run_id, set(said)

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
            return remaking.bring_back(tpu, plan, request, output.info, requests, used=self._used)

    def _used(self, names: Collection[str]) -> str:
        """Return the other runs that are active on nodes, as words; empty if there are none."""
        runs, _ = holders.active(view.look(self._settings)[0], names)
        return holders.named({run_id: person for run_id, person in runs.items() if run_id != self._run_id})

    def fleet(self) -> view.Fleet:
        """Return the last known view of the fleet; print each of its warnings once."""
        fleet = view.current(self._settings, self._said)
        self._said.update(fleet.warnings)
        return fleet

    def hosts(self) -> Collection[str] | None:
        """Return the names of all known workers; None if nothing is known of the fleet."""
        fleet = view.known(self._settings)
        return {worker.host for worker in fleet.workers} if fleet else None

    def workers_of(self, names: Sequence[str]) -> tuple[view.Fleet, list[Worker]]:
        """Wait until the host keys of the nodes' workers are known; return the fleet and these workers."""
        fleet, workers = view.with_host_keys(self._settings, names, options.Waiting(f"run {self._run_id}"))
        for text in (text for text in fleet.warnings if text not in self._said):
            output.warning(text)
        self._said.update(fleet.warnings)
        return fleet, workers

    def fanout(self, fleet: view.Fleet) -> Fanout:
        """Return the connections to the workers of a fleet."""
        return contact.fanout(fleet)

    def configure(self, fleet: view.Fleet, workers: Sequence[Worker]) -> None:
        """Run site.yml on workers."""
        convergence.converge(fleet, workers, Progress, then="continue")

    def check_out(self, fleet: view.Fleet, workers: Sequence[Worker], project: str) -> None:
        """Check out a project of the fleet on workers."""
        projects.check_out(fleet, workers, project, Progress)

    async def check_commit(self, fanout: Fanout, hosts: Sequence[str], run: RunSpec) -> None:
        """Check that the run's project is still at the run's commit on all workers."""
        await projects.look(fanout, hosts, run)

    def now(self) -> float:
        """Return the time in seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait for some seconds before the next try."""
        time.sleep(seconds)


class Printer:
    """The terminal of a command that recovers a run.

    Args:
        args: ``rank`` and ``json`` of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def info(self, text: str) -> None:
        """Print a message."""
        output.info(text)

    def warning(self, text: str) -> None:
        """Print a warning."""
        output.warning(text)

    def overriding(self) -> Callable[[Fault], None]:
        """Return a function that warns of a fault that --force overrides."""
        return faults.overriding()

    def ranks(self, count: int) -> list[int]:
        """Return the ranks whose output is printed."""
        return ranks.parse(self._args.rank, count)

    def follower(self, fanout: Fanout, run: control.RunRef, logs: copies.Logs) -> Follower:
        """Return the follower of an attempt, which prints the output and writes copies of the logs."""
        return Follower(
            fanout,
            run.run_id,
            run.hosts,
            shown=self.ranks(len(run.hosts)),
            line=runs_output.line_aside if self._args.json else runs_output.line,
            part=runs_output.part_aside if self._args.json else runs_output.part,
            say=output.info,
            data=logs.write,
            offsets=logs.offsets,
        )
