"""Between two attempts of a run that is recovered: its nodes are brought back, and made ready for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from tpu_ops.cli import configure, faults, options, output, projects, requested, who
from tpu_ops.cli.attempt import lost_of
from tpu_ops.cli.bookkeeping import Bookkeeping
from tpu_ops.config import Settings
from tpu_ops.errors import UsageError
from tpu_ops.fleet import contact, newcomers, origin, remaking, update, view
from tpu_ops.fleet.model import Worker
from tpu_ops.fleet.state import UnwritableError
from tpu_ops.recovery import events
from tpu_ops.recovery.events import Back, Configured, Looked, Preparing
from tpu_ops.remote.fanout import Fanout
from tpu_ops.runs import control, endings, preflight, spec
from tpu_ops.runs.outcomes import ON, Outcome
from tpu_ops.runs.recovery import Recovery


class Superseded(Exception):
    """A recovery on another machine has started a later attempt."""


class Bringing(Bookkeeping):
    """One run whose nodes are brought back for as often as that is wanted.

    Args:
        settings: Of the fleet.
        kept: What is kept of the run.
        run: What its last attempt was started with.
        begun: Whether the run has been on before.
        said: Warnings of the fleet that this command has said before.
    """

    def __init__(
        self, settings: Settings, kept: Recovery, run: spec.RunSpec, *, begun: bool, said: Iterable[str] = ()
    ) -> None:
        super().__init__(settings, kept, run, begun=begun)
        self._said = set(said)

    def tell_requested(self) -> None:
        """Say what was requested from the API and no attempt is on: it is or will be billed without this command."""
        requested.tell(self._settings, self.kept.run_id, self._requests.all)

    def _fleet(self) -> view.Fleet:
        """Return the fleet as it is known now; a warning of it is said once, however often it is looked at."""
        fleet = view.current(self._settings, self._said)
        self._said.update(fleet.warnings)
        return fleet

    def _bring_back(self) -> list[Worker]:
        """Return the workers by rank once all nodes are READY, known and configured."""
        plan = self.kept.plan
        if self._take(Preparing()):
            self._take(Looked(lost_of(self._settings, plan)))
        with origin.api(self._settings) as tpu:
            request = f"{self.kept.run_id}/{self.kept.attempt + 1}"
            seen = remaking.bring_back(tpu, plan, request, output.info, self._requests, used=self._used)
        names = [made.name for made in plan.nodes]
        self._take(Back(seen))
        fresh = bool(remaking.fresh(plan, seen))
        fleet, found = self._found(names, fresh=fresh)
        for text in (text for text in fleet.warnings if text not in self._said):
            output.warning(text)
        self._said.update(fleet.warnings)
        workers = control.by_rank(found, self.kept.run_id)
        listed = {worker.node.full_name for worker in workers}
        if missing := [name for name in names if name not in listed]:
            what = "the fleet does not list its nodes"
            raise UsageError(
                what, where=", ".join(missing), fix="see filters and zones in inventory/tpu_vm.yml, and `tpu_ops list`"
            )
        if later := asyncio.run(control.newest_attempt(contact.fanout(fleet), self._run_on(workers))):
            self._leave_to(later, plan.now(seen, [worker.node.full_name for worker in workers]), workers)
        if new := [worker for worker in workers if worker.node.full_name in remaking.fresh(plan, seen)]:
            output.info(f"run {self.kept.run_id}: configuring {', '.join(worker.host for worker in new)} (site.yml)")
            configure.converge(self._settings, fleet, new, then="continue")
            if len(new) < len(workers) and asyncio.run(self._differ(contact.fanout(fleet), workers)):
                what = "its environments differ, so all its workers are configured together"
                output.info(f"run {self.kept.run_id}: {what} (site.yml)")
                configure.converge(self._settings, fleet, workers, then="continue")
        self._take(Configured(plan.now(seen, [worker.node.full_name for worker in workers])))
        # Of a run that somebody stopped meanwhile nothing is moved: `_again` sees that as well, and ends.
        if self.kept.git and not asyncio.run(self._check(contact.fanout(fleet), workers)):
            projects.bring(self._settings, fleet, workers, self.kept.git)
        return workers

    def _used(self, names: Collection[str]) -> str:
        """Return which run but this one is active on nodes, in words; empty for none."""
        runs, _ = who.active(update.look(self._settings)[0], names)
        return who.named({run_id: person for run_id, person in runs.items() if run_id != self.kept.run_id})

    async def _differ(self, fanout: Fanout, workers: Sequence[Worker]) -> bool:
        """Return whether it is to be mended that workers hold other packages: new ones get what is the newest now.

        Not where something else is in the way: somebody's run may be on a worker that was there before.
        """
        if self._spec.venv or self.kept.force:
            return False
        found, _ = await preflight.examine(fanout, workers, user=self._spec.user)
        return all(fault.forcible for fault in found) and any(fault.check == "same" for fault in found)

    def _found(self, names: Sequence[str], *, fresh: bool) -> tuple[view.Fleet, list[Worker]]:
        """Return the fleet and the workers of nodes once they are known.

        Args:
            names: Resource names of the nodes.
            fresh: Whether some are new. The others are known, also to a machine whose disk is full now.
        """
        try:
            return newcomers.known(self._settings, names, options.Waiting(f"run {self.kept.run_id}"))
        except UnwritableError as exc:
            if fresh:
                raise
            output.warning(self._on_fleet(f"{exc}; the workers are used as last seen"))
        fleet = self._fleet()
        return fleet, [worker for worker in fleet.workers if worker.node.full_name in names]

    def _leave_to(self, attempt: int, plan: remaking.Plan, workers: Sequence[Worker]) -> None:
        """Take an attempt that workers tell of as the one that is followed, where it is later than those known here.

        Raises:
            Superseded: It is.
        """
        if attempt > self.kept.attempt:
            self._remember(workers, attempt)
        if self._take(events.Superseded(attempt, plan)):
            raise Superseded

    async def _check(self, fanout: Fanout, workers: Sequence[Worker]) -> list[Outcome]:
        """Look at the workers as before any run; what an attempt that is over has left on them is ended first.

        Returns:
            How that attempt has ended, where all its ranks did with 0 or somebody wants no other one; else nothing.
        """
        run = self._run_on(workers)
        outcomes = endings.of_attempt(await control.outcomes(fanout, run), self.kept.attempt)
        if endings.is_over(outcomes) or endings.stop_requested_by(outcomes):
            return endings.as_told(outcomes)
        if left := tuple(outcome.host for outcome in outcomes if outcome.state in ON):
            reason = f"attempt {self.kept.attempt} is over"
            await control.stop(fanout, replace(run, hosts=left), grace=spec.GRACE_FAILURE, reason=reason)
        forced = faults.overriding() if self.kept.force else None
        await preflight.check(fanout, workers, self._spec.venv, self._spec.user, forced=forced)
        return []
