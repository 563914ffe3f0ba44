"""Performs the actions that `decide` returns: stores the state, brings nodes back, starts and follows attempts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpu_ops import texts
from tpu_ops.cloud import remaking
from tpu_ops.cloud.node import Worker
from tpu_ops.cloud.pending import Requests
from tpu_ops.errors import ExitCode, OpsError, UnreachableError, UsageError
from tpu_ops.files import UnwritableError
from tpu_ops.fleet.view import Fleet
from tpu_ops.protocol.record import ON
from tpu_ops.recovery import decide, events
from tpu_ops.recovery.attempt import Attempt, Renamed, lost_of, names_of
from tpu_ops.recovery.events import (
    Action,
    AwaitLoss,
    Back,
    Configured,
    Ended,
    EndingRanks,
    Event,
    Fail,
    Following,
    ForgetRequests,
    GiveUp,
    Interrupted,
    LookAtNodes,
    Looked,
    Next,
    Planned,
    Preparing,
    Say,
    StartFailed,
    Starting,
    Tell,
    TryFailed,
    Wait,
)
from tpu_ops.recovery.services import Printer, Services
from tpu_ops.runs import advice, control, endings, installs, launch, preflight, records, recovery, spec, sync, turns
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.runs.recovery import Recovery
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.renewal import in_thread


class Superseded(Exception):
    """A recovery on another machine has started a later attempt."""


class Driver:
    """Performs the recovery of one run in this process.

    Args:
        state_dir: The fleet's state directory.
        kept: The recovery state of the run.
        run: The spec of the run's last attempt.
        services: The API, the workers and the clock.
        printer: The terminal.
        follow: Runs the coroutine that starts or follows an attempt; returns the exit code.
        begun: Whether the run has already begun.

    Attributes:
        spec: The spec of the last attempt.
        state: The state of the recovery.
        on: The fanout and run of the followed attempt; None if none is followed.
        outcomes: The outcomes of the last attempt; None while the attempt is followed, or if this process stopped
            following the attempt.
        lost: The lost nodes of the last attempt, each with a description of its loss.
        announced: Kind of the event that a worker of the last attempt announced, see `protocol.watch.announced`.
        first: The workers of the first attempt, if this process starts it.
        requests: Requests to the API for nodes that no attempt uses yet.
    """

    def __init__(
        self,
        state_dir: Path,
        kept: Recovery,
        run: spec.RunSpec,
        services: Services,
        printer: Printer,
        *,
        follow: Callable[[Coroutine[Any, Any, int]], int],
        begun: bool,
    ) -> None:
        self.spec, self._state_dir, self._follow_to_its_end = run, state_dir, follow
        self._services, self._printer = services, printer
        self.state = decide.State(kept, begun=begun)
        #: The stored part of the state as this process last wrote it; None if it has not been written yet.
        self._written: Recovery | None = None
        self._events: list[dict[str, Any]] = []
        self.on: tuple[Fanout, control.RunRef] | None = None
        self.outcomes: list[Outcome] | None = None
        self.lost: Mapping[str, str] = {}
        self.announced = ""
        self.first: Sequence[Worker] = ()
        path = recovery.requests_file(state_dir, kept.run_id)
        self.requests = Requests(path, printer.warning)

    @property
    def kept(self) -> Recovery:
        """The part of the state that is stored on the disk."""
        return self.state.kept

    @property
    def is_kept(self) -> bool:
        """Whether the recovery state on the disk belongs to this run, and not to an earlier run of the same name."""
        return self.state.begun or bool(self.first)

    def take(self, event: Event) -> Action | None:
        """Decide on an event, store the new state and print messages; return the action that the caller has to perform.

        Raises:
            UnreachableError: The allowed number of preemptions is used up.
            OpsError: The state cannot be written, and the run has not begun.
        """
        was_pending, left = self.kept.pending, None
        self.state, actions = decide.decide(self.state, event)
        if self.kept.pending and not was_pending:
            self.state = replace(self.state, kept=replace(self.kept, since=self._services.now()))
        if self.kept != self._written:
            with self._as_far_as_it_goes():
                recovery.write(self._state_dir, self.kept)
                self._written = self.kept
        for action in actions:
            match action:
                case Tell(what, then):
                    self._tell(what, then)
                case Say(text):
                    self._printer.info(text)
                case ForgetRequests():
                    self.requests.drop(*(request.name for request in self.requests.all))
                case GiveUp(what):
                    recovery.forget(self._state_dir, self.kept.run_id)
                    raise UnreachableError(what, where=f"run {self.kept.run_id}", fix=decide.MORE)
                case _:
                    left = action
        return left

    @contextlib.contextmanager
    def _as_far_as_it_goes(self) -> Iterator[None]:
        """Turn a write error into a warning if the run has begun: this process knows the state without the file."""
        try:
            yield
        except OpsError as exc:
            if not self.state.begun:
                raise
            self._printer.warning(
                f"{exc}; recovery continues, but `tpu_ops attach --recover` would resume from an older state"
            )

    def _run_on(self, workers: Sequence[Worker]) -> control.RunRef:
        return control.RunRef(self.kept.run_id, tuple(worker.host for worker in workers))

    def _remember(self, workers: Sequence[Worker], attempt: int) -> None:
        """Write this machine's record of the run: the workers of an attempt, by rank."""
        record = records.started_on(self.kept.run_id, workers, self.spec.argv, attempt)
        with self._as_far_as_it_goes():
            records.write(self._state_dir, record)

    def _tell(self, what: str, then: str) -> None:
        self._events.append({"attempt": self.kept.attempt, "what": what, "then": then})
        attempt = f"attempt {self.kept.attempt}" if self.kept.attempt else "not begun"
        self._printer.info(f"run {self.kept.run_id}, {attempt}: {what}; {then}")

    def facts(self) -> dict[str, Any]:
        """Return the facts about the recovery of a run that --json prints in addition to the run's ranks."""
        return {key: getattr(self.kept, key) for key in ("attempt", "preemptions", "failures")} | {
            "events": self._events
        }

    # --- the start ------------------------------------------------------------------------------------------

    async def begin(
        self, workers: Sequence[Worker], tree: sync.Tree | None, environment: Mapping[str, Any] | None = None
    ) -> sync.Tree | None:
        """Store the recovery state before the first start; return the copy of the code to be synced.

        Args:
            workers: The workers.
            tree: The code.
            environment: The environment from a worker's probe, which later attempts have to have too.

        Raises:
            UsageError: A run of this name was recovered on this machine before, or the nodes cannot be recreated.
            CloudError: The API refused.
        """
        state_dir, run_id = self._state_dir, self.kept.run_id
        place = recovery.folder(state_dir, run_id)
        recovery.require_none(state_dir, run_id, alone=True)
        if any(place.glob("attempt-*")):
            what = f"logs of a run with this name are in {place}"
            raise UsageError(what, where=f"run {run_id}", fix=advice.OTHER_NAME)
        # If this call is interrupted, it continues in its thread. It only reads: an abandoned start must not write
        # afterwards.
        lacking: list[str] = []
        names = dict.fromkeys(worker.node.full_name for worker in workers)
        plan = await in_thread(lambda: self._services.remember(names, lacking.append))
        if lacking:
            what = "some fields are unknown to this version of tpu_ops and may be missing after a recreation"
            self._printer.warning(f"{', '.join(lacking)}: {what}")
        self.first = workers
        # A process that died while it stored the state of a run of this name has left a part of the state.
        recovery.forget(state_dir, run_id)
        copy = recovery.keep_code(state_dir, run_id, tree) if tree else None
        self.take(Planned(plan, environment or {}))
        return copy

    def starts(self) -> None:
        """Store that the first attempt is being started. From now on, the attempt might be active."""
        self.take(Starting())

    def may_be_on(self) -> None:
        """Store that the run might be active although its start failed or was interrupted."""
        self.take(Interrupted(may_be_on=True))

    # --- all attempts ---------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, int] | None) -> tuple[int, Action | None]:
        """Follow the run until it has ended or is no longer followed; return the exit code and the final action.

        Args:
            work: Starts or follows the first attempt; None if the nodes have to be brought back first.
        """
        code, step = self._begun_with(work) if work else self._next(), None
        while self.outcomes and isinstance(step := self.after(self.outcomes), Next):
            code = self._next()
        return code, step

    def _begun_with(self, work: Coroutine[Any, Any, int]) -> int:
        """Start or follow the command's first attempt; if this fails, continue with the next attempt."""
        try:
            return self._followed(work)
        except Superseded:
            pass
        except Renamed as exc:
            self.take(events.Renamed(str(exc)))
        except OpsError as exc:
            if not isinstance(self._failed(StartFailed(exc)), Next):
                raise
            # With this record, `status`, `stop` and other commands find the run.
            self._remember(self.first, self.kept.attempt)
        finally:
            # Remove the state only if this process stored it. Otherwise it might belong to another active run of the
            # same name.
            if self.is_kept and not self.state.begun:
                recovery.forget(self._state_dir, self.kept.run_id)
        return self._next()

    def after(self, outcomes: Sequence[Outcome]) -> Action | None:
        """Decide on the end of an attempt; return the next action."""
        wanted = self.stop_wanted()
        return self.take(Ended(outcomes, self.lost, stop_wanted=wanted, announced=self.announced))

    def _failed(self, event: StartFailed | TryFailed) -> Action | None:
        """After an error, check for lost nodes and decide; return the next action."""
        if plan := decide.suspected(self.state, event):
            with contextlib.suppress(OpsError):
                event = replace(event, lost=lost_of(self._services, plan))
        return self.take(event)

    def stop_wanted(self) -> bool:
        """Return whether a user on this machine has asked to stop the run."""
        return recovery.asked_to_stop(self._state_dir, self.kept.run_id)

    def _followed(self, work: Coroutine[Any, Any, int]) -> int:
        """Follow one attempt; `outcomes` stays None if this process stops following it before its end."""
        self.outcomes = None
        return self._follow_to_its_end(work)

    def _next(self) -> int:
        """Bring the nodes back, start the next attempt and follow it; repeat after temporary errors."""
        while True:
            self.on = None
            try:
                # If the start of an attempt was interrupted, the attempt might be active: look for it before the next
                # start.
                return self._followed(self._again(self._bring_back()) if self.kept.pending else self.attached())
            except Superseded:
                continue
            except BrokenPipeError:
                raise
            except (OpsError, OSError) as failure:
                step = self._failed(TryFailed(failure))
                if isinstance(step, Fail):
                    raise
            if isinstance(step, Wait):
                self._services.sleep(step.seconds)

    # --- one attempt ----------------------------------------------------------------------------------------

    async def attached(self) -> int:
        """Follow the attempt that is recorded on this machine, if a worker knows this attempt."""
        known = records.read(self._state_dir, self.kept.run_id)
        if known is None:
            where, fix = f"run {self.kept.run_id}", "`tpu_ops runs` lists the runs that this machine knows"
            raise UsageError("this machine has no record of this run", where=where, fix=fix)
        fleet = self._services.fleet()
        one = self.attempt(self._services.fanout(fleet), names_of(known, self.kept.plan, fleet.workers))
        self.on = (one.fanout, one.run)
        outcomes = await one.heard(range(len(known.hosts)))
        if one.newest > self.kept.attempt:
            self.on = None
            self.take(events.Superseded(one.newest))
            raise Superseded
        if one.lost or any(outcome.record for outcome in outcomes):
            return await self._follow(one, started=endings.was_started(outcomes))
        self.on, self.outcomes, self.lost, self.announced = None, outcomes, one.lost, ""
        return ExitCode.OK

    async def started(self, fanout: Fanout, workers: Sequence[Worker]) -> int:
        """Follow the attempt that was just started on these workers."""
        names = {worker.host: worker.node.full_name for worker in workers}
        return await self._follow(self.attempt(fanout, names), started=True)

    async def _follow(self, one: Attempt, *, started: bool) -> int:
        self.take(Following(started))
        self.on = (one.fanout, one.run)
        outcomes = await one.to_its_end()
        self.on, self.outcomes, self.lost, self.announced = None, outcomes, one.lost, one.announced
        return ExitCode.OK

    def attempt(self, fanout: Fanout, names: Mapping[str, str]) -> Attempt:
        """Return the object that follows the current attempt.

        Args:
            fanout: Reaches the workers.
            names: Each worker, in the order of the ranks -> the resource name of its node.
        """
        run = control.RunRef(self.kept.run_id, tuple(names))
        self._printer.ranks(len(names))
        return Attempt(
            recovery.folder(self._state_dir, self.kept.run_id),
            self.kept,
            fanout,
            run,
            names=names,
            services=self._services,
            printer=self._printer,
            losing=lambda: self.take(EndingRanks()),
        )

    async def _again(self, workers: Sequence[Worker]) -> int:
        """Start the next attempt on these workers and follow it."""
        attempt, state_dir = self.kept.attempt + 1, self._state_dir
        self._printer.ranks(len(workers))
        self.spec = recovery.next_attempt(self.spec, attempt)
        fanout = self._services.fanout(self._services.fleet())
        hosts = tuple(worker.host for worker in workers)
        tree, venv = recovery.kept_code(state_dir, self.kept), ""
        async with contextlib.AsyncExitStack() as stack:
            # Check the workers before the code is copied: another run might now use them and the same directory.
            if stopped := await self._check(fanout, workers):
                self.outcomes = stopped
                return ExitCode.OK
            if tree:
                turn = await stack.enter_async_context(turns.alone(fanout, hosts, tree.name))
                await sync.push(fanout, hosts, tree, turn)
                self._printer.info(f"synced {tree.name}, digest {tree.digest}, to {texts.count(len(hosts), 'worker')}")
                venv = await self._install(fanout, workers, tree)
            if self.kept.git:
                await self._services.check_commit(fanout, hosts, self.spec)
            self._remember(workers, attempt)
            # From now on, the attempt might be active, even if its start fails.
            self.take(Starting())
            try:
                await launch.start(fanout, replace(self.spec, venv=venv or self.spec.venv), workers)
            except launch.Interrupted as exc:
                self.take(Interrupted(exc.may_be_on))
                raise
        self._printer.info(f"run {self.kept.run_id}, attempt {attempt}: started on {texts.count(len(hosts), 'worker')}")
        return await self.started(fanout, workers)

    async def _install(self, fanout: Fanout, workers: Sequence[Worker], tree: sync.Tree) -> str:
        """Install the packages of the first attempt; return the path of their environment, empty if it had none.

        Raises:
            UsageError: The fleet's environment, over which they are installed, is not that of the first attempt.
        """
        kept = recovery.kept_packages(self._state_dir, self.kept.run_id)
        listed = installs.listing(tree)
        if not kept or not listed:
            return ""
        hosts, base = [worker.host for worker in workers], kept["base"]
        made = (await installs.look(fanout, hosts, tree, listed, base)).installed
        if not made or made.path != kept["path"]:
            made = await installs.install(fanout, workers, tree, listed, base=base, pins=kept["pins"])
        if made.path != kept["path"]:
            what = f"the environment {base} has other packages than at the first attempt of run {self.kept.run_id}"
            raise UsageError(what, where=texts.folded(hosts), fix="start a new run")
        self._printer.info(
            f"{listed.name}: {texts.count(made.packages, 'package')}, digest {made.digest}, in {made.path}"
        )
        return made.path

    # --- between two attempts -------------------------------------------------------------------------------

    def _bring_back(self) -> list[Worker]:
        """Bring all nodes back and configure new ones; return the workers in the order of their ranks."""
        plan = self.kept.plan
        match self.take(Preparing()):
            case LookAtNodes():
                self.take(Looked(lost_of(self._services, plan)))
            case AwaitLoss(seconds):
                self.take(Looked(self._awaited(plan, seconds)))
        seen = self._services.bring_back(plan, f"{self.kept.run_id}/{self.kept.attempt + 1}", self.requests)
        names = [made.name for made in plan.nodes]
        self.take(Back(seen))
        fresh = bool(remaking.fresh(plan, seen))
        fleet, found = self._found(names, fresh=fresh)
        workers = control.by_rank(found, self.kept.run_id)
        listed = {worker.node.full_name for worker in workers}
        if missing := [name for name in names if name not in listed]:
            what = "the fleet does not list these nodes of the run"
            raise UsageError(
                what,
                where=", ".join(missing),
                fix="check filters and zones in inventory/tpu_vm.yml, and `tpu_ops list`",
            )
        if later := asyncio.run(control.newest_attempt(self._services.fanout(fleet), self._run_on(workers))):
            self._leave_to(later, plan.now(seen, [worker.node.full_name for worker in workers]), workers)
        if new := [worker for worker in workers if worker.node.full_name in remaking.fresh(plan, seen)]:
            hosts = ", ".join(worker.host for worker in new)
            self._printer.info(f"run {self.kept.run_id}: configuring {hosts} (site.yml)")
            self._services.configure(fleet, new, self._kept_versions())
            if len(new) < len(workers) and asyncio.run(self.differ(self._services.fanout(fleet), workers)):
                what = "the environments of its workers differ, so all its workers are configured together"
                self._printer.info(f"run {self.kept.run_id}: {what} (site.yml)")
                self._services.configure(fleet, workers, self._kept_versions())
        self.take(Configured(plan.now(seen, [worker.node.full_name for worker in workers])))
        # If a user has stopped the run, do not change its code: `_again` repeats this check and ends the run.
        if self.kept.git and not asyncio.run(self._check(self._services.fanout(fleet), workers, final=False)):
            self._services.check_out(fleet, workers, self.kept.git)
        return workers

    def _awaited(self, plan: remaking.Plan, seconds: float) -> dict[str, str]:
        """Wait until the API reports the loss of nodes, at most for so many seconds; return the lost nodes."""
        for _ in range(round(seconds / decide.SOON)):
            if lost := lost_of(self._services, plan):
                return lost
            self._services.sleep(decide.SOON)
        return {}

    def _kept_versions(self) -> dict[str, Mapping[str, str]]:
        """Return the versions that the environment of the next attempt has to have, for the playbook."""
        before = self.kept.environment
        return {before["path"]: before["installed"]} if before.get("installed") and not self.kept.force else {}

    async def differ(self, fanout: Fanout, workers: Sequence[Worker]) -> bool:
        """Return whether to configure all workers again, because the packages of new workers differ from the others'.

        If a worker has a fault of another kind, the answer is no: another run might be active on the worker.
        """
        if self.spec.venv or self.kept.force:
            return False
        found, _ = await preflight.examine(fanout, workers, user=self.spec.user)
        return all(fault.forcible for fault in found) and any(fault.check == "same" for fault in found)

    def _found(self, names: Sequence[str], *, fresh: bool) -> tuple[Fleet, list[Worker]]:
        """Wait until the fleet lists some nodes; return the fleet and the workers of the nodes.

        Args:
            names: Resource names of the nodes.
            fresh: Whether some of the nodes are new. If the fleet cannot be stored, for example on a full disk, it
                lacks new nodes.
        """
        try:
            return self._services.workers_of(names)
        except UnwritableError as exc:
            if fresh:
                raise
            self._printer.warning(f"{exc}; continuing with the workers as this machine saw them last")
        fleet = self._services.fleet()
        return fleet, [worker for worker in fleet.workers if worker.node.full_name in names]

    def _leave_to(self, attempt: int, plan: remaking.Plan, workers: Sequence[Worker]) -> None:
        """If workers report a later attempt than the stored one, switch to that attempt.

        Raises:
            Superseded: The reported attempt is later; the caller follows it.
        """
        if attempt > self.kept.attempt:
            self._remember(workers, attempt)
        if self.take(events.Superseded(attempt, plan)):
            raise Superseded

    async def _check(self, fanout: Fanout, workers: Sequence[Worker], *, final: bool = True) -> list[Outcome]:
        """End the ranks of the last attempt that are still active, and check the workers as before any run.

        Args:
            fanout: Reaches the workers.
            workers: The workers.
            final: Whether the environment must be that of the first attempt now. A checkout may still change it.

        Returns:
            The outcomes of the last attempt if all its ranks ended with 0 or a user wants the run stopped; else empty.
        """
        run = self._run_on(workers)
        outcomes = endings.of_attempt(await control.outcomes(fanout, run), self.kept.attempt)
        if endings.is_over(outcomes) or endings.stop_requested_by(outcomes):
            return endings.as_told(outcomes)
        if left := tuple(outcome.host for outcome in outcomes if outcome.state in ON):
            reason = f"attempt {self.kept.attempt} is over"
            await control.stop(fanout, replace(run, hosts=left), grace=spec.GRACE_FAILURE, reason=reason)
        forced = self._printer.overriding() if self.kept.force else None
        probes = await preflight.check(fanout, workers, self.spec.venv, self.spec.user, forced=forced)
        if final and not self.kept.force:
            preflight.require_environment(self.kept.environment, probes, self.kept.run_id)
        return []
