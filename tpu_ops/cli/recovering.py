"""`--recover` of `tpu_ops train` and `attach`: follows a run, and starts it again when its nodes are taken away."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpu_ops import texts
from tpu_ops.cli import leaving, output, projects, runs_output
from tpu_ops.cli.asked import Asked, ended_by
from tpu_ops.cli.attempt import Attempt, Renamed, lost_of, names_of
from tpu_ops.cli.bringing import Bringing, Superseded
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode, OpsError, UsageError
from tpu_ops.fleet import contact, origin, remaking
from tpu_ops.fleet.model import Worker
from tpu_ops.recovery import events
from tpu_ops.recovery.decide import over_budget, suspected
from tpu_ops.recovery.events import (
    Action,
    Ended,
    EndingRanks,
    Fail,
    Finish,
    Following,
    Interrupted,
    Next,
    Planned,
    StartFailed,
    Starting,
    Stop,
    StopWanted,
    TryFailed,
    Wait,
)
from tpu_ops.remote.fanout import Fanout
from tpu_ops.remote.renewal import in_thread
from tpu_ops.runs import advice, control, endings, launch, records, recovery, spec, sync, turns
from tpu_ops.runs.endings import STOPPED
from tpu_ops.runs.follow import Follower
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.runs.recovery import Recovery


@contextlib.contextmanager
def alone(settings: Settings, run_id: str) -> Iterator[None]:
    """Be the only one on this machine to recover a run.

    Raises:
        UsageError: Another process does.
    """
    with contextlib.ExitStack() as stack:
        try:
            # Whoever only looks whether somebody does holds it for a moment.
            recovery.sign(stack.enter_context(recovery.lock(settings.state_dir, run_id, 0.5)))
        except TimeoutError:
            what = "another process on this machine is already recovering it"
            fix = f"`tpu_ops attach {run_id}` follows it without recovering it"
            raise UsageError(what, where=f"run {run_id}", fix=fix) from None
        yield


class Recovering(Bringing):
    """One run that this process follows to its end, through all its attempts.

    Args:
        settings: Of the fleet.
        kept: What is kept of the run.
        run: What its last attempt was started with.
        args: ``rank``, ``json`` and ``exit_code`` of the command line.
        begun: Whether the run has been on before.
        said: Warnings of the fleet that this command has said before.
        sleep: Waits for some seconds before another try.
    """

    def __init__(
        self,
        settings: Settings,
        kept: Recovery,
        run: spec.RunSpec,
        args: argparse.Namespace,
        *,
        begun: bool,
        said: Iterable[str] = (),
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(settings, kept, run, begun=begun, said=said)
        self._args, self._sleep = args, sleep
        self._on: tuple[Fanout, control.RunRef] | None = None
        self._outcomes: list[Outcome] | None = None
        self._lost: Mapping[str, str] = {}
        #: The workers of the first attempt, where this process starts it.
        self._first: Sequence[Worker] = ()
        #: What may be made again otherwise than it is, in words.
        self._lacking: list[str] = []

    async def begin(self, workers: Sequence[Worker], tree: sync.Tree | None) -> sync.Tree | None:
        """Keep what starts the run again, before it is started; return the code that goes to the workers.

        Raises:
            UsageError: A run of this name was recovered here before, or its nodes cannot be made again.
            CloudError: The API refused.
        """
        state_dir, run_id = self._settings.state_dir, self.kept.run_id
        place = recovery.folder(state_dir, run_id)
        recovery.require_none(state_dir, run_id, alone=True)
        if any(place.glob("attempt-*")):
            what = f"logs of a run with this name are in {place}"
            raise UsageError(what, where=f"run {run_id}", fix=advice.OTHER_NAME)
        # What is interrupted goes on in its thread, and so may only ask: nothing is written behind a start given up.
        plan = await in_thread(lambda: self._plan_of(workers))
        if self._lacking:
            what = "the API has fields that this version of tpu_ops does not know; what is recreated may lack them"
            output.warning(f"{', '.join(self._lacking)}: {what}")
        self._first = workers
        # Left by one that died before it had kept all.
        recovery.forget(state_dir, run_id)
        copy = recovery.keep_code(state_dir, run_id, tree) if tree else None
        self._take(Planned(plan))
        return copy

    def starts(self) -> None:
        """Know that the first attempt is asked for now: whatever is heard of that, it may be on.

        Raises:
            OpsError: That cannot be kept.
        """
        self._take(Starting())

    def _plan_of(self, workers: Sequence[Worker]) -> remaking.Plan:
        with origin.api(self._settings) as tpu:
            names = dict.fromkeys(worker.node.full_name for worker in workers)
            return remaking.remember(tpu, names, self._lacking.append)

    def to_the_end(self, work: Coroutine[Any, Any, int] | None) -> int:
        """Follow the run until it has ended for good or is left; return the exit code.

        Args:
            work: What starts the attempt that is followed first; None where its nodes are to be brought back before.
        """
        try:
            return self._followed_to_the_end(work)
        finally:
            self.tell_requested()

    def _followed_to_the_end(self, work: Coroutine[Any, Any, int] | None) -> int:
        step: Action | None = None
        try:
            with ended_by(lambda: (self.state.begun or bool(self._first)) and self._on is None and self._asked()):
                code = self._begun_with(work) if work else self._next()
                while self._outcomes and isinstance(step := self._after(self._outcomes), Next):
                    code = self._next()
        except Asked:
            step = self._take(StopWanted(self._outcomes or (), self._lost))
        except BrokenPipeError:
            # Whoever read the lines has gone, as `head` does.
            if not self.state.begun:
                raise
            output.give_up()
            self.left()
            return ExitCode.INTERRUPTED
        except KeyboardInterrupt:
            output.info("")
            self.left()
            raise
        except (OpsError, OSError):
            if self.state.begun and not over_budget(self.kept):
                self._hint()
            raise
        if isinstance(step, Stop):
            return self._stopped(forget=step.forget)
        return self._finish(self._outcomes or ()) if isinstance(step, Finish) else code

    def _begun_with(self, work: Coroutine[Any, Any, int]) -> int:
        """Do what the command begins with, and follow the run from there."""
        try:
            return self._followed(work)
        except Superseded:
            pass
        except Renamed as exc:
            self._take(events.Renamed(str(exc)))
        except OpsError as exc:
            if not isinstance(self._failed(StartFailed(exc)), Next):
                raise
            # `status`, `stop` and others find it from now on.
            self._remember(self._first, self.kept.attempt)
        finally:
            # The file may be another run's of this name, which goes on: only what this process has kept is removed.
            if self._first and not self.state.begun:
                recovery.forget(self._settings.state_dir, self.kept.run_id)
        return self._next()

    def _after(self, outcomes: Sequence[Outcome]) -> Action | None:
        """Say how an attempt ended; return what follows."""
        return self._take(Ended(outcomes, self._lost, stop_wanted=self._asked()))

    def _failed(self, event: StartFailed | TryFailed) -> Action | None:
        """Decide on an error, once it is known whether nodes were lost; return what follows.

        Raises:
            UnreachableError: They were, and the budget is used up.
        """
        if plan := suspected(self.state, event):
            with contextlib.suppress(OpsError):
                event = replace(event, lost=lost_of(self._settings, plan))
        return self._take(event)

    def _asked(self) -> bool:
        return recovery.asked_to_stop(self._settings.state_dir, self.kept.run_id)

    def _never_again(self, outcomes: Sequence[Outcome] = ()) -> None:
        state = runs_output.run_state(outcomes) if outcomes else STOPPED
        recovery.forget(self._settings.state_dir, self.kept.run_id)
        records.close(self._settings.state_dir, self.kept.run_id, state, STOPPED, outcomes)
        output.info(f"run {self.kept.run_id}: stopped; it will not be started again")

    def _stopped(self, *, forget: bool) -> int:
        """Say that the run is not started again; whoever asked for the stop ends what may be on."""
        if forget:
            self._never_again()
        else:
            output.info(f"run {self.kept.run_id}: not started again; attempt {self.kept.attempt} may be running")
        if self._args.json:
            output.as_json({"run_id": self.kept.run_id, "state": STOPPED, "ranks": [], **self.facts()})
        return ExitCode.FAILED

    def _followed(self, work: Coroutine[Any, Any, int]) -> int:
        """Follow one attempt; without outcomes afterwards, it was left."""
        self._outcomes = None
        how: dict[str, Any] = {"command": self._settings.command, "as_json": self._args.json}
        return asyncio.run(leaving.followed(work, lambda: self._on, self.left, self._never_again, **how))

    def may_be_on(self) -> None:
        """Know that the start, of which not all was heard, may have been one: nothing of what is kept goes."""
        self._take(Interrupted(may_be_on=True))

    def left(self) -> None:
        """Say after Ctrl-C what goes on and how to get at it."""
        if not self.state.begun:
            output.info("interrupted before the run was started")
            return
        if self._on:
            how = f"detached: run {self.kept.run_id} continues"
        else:
            # Not all was heard of its start, or nobody has been asked yet.
            how = f"run {self.kept.run_id} {'is not' if self.kept.pending else 'may be'} running"
        output.info(f"{how}; nothing will {'restart' if self.kept.attempt else 'start'} it")
        _, stop = advice.reaching(self.kept.run_id)
        runs_output.steps([stop, advice.resuming(self.kept.run_id)], self._settings.command)

    def _hint(self) -> None:
        runs_output.steps([advice.resuming(self.kept.run_id)], self._settings.command)

    # --- one attempt ----------------------------------------------------------------------------------------

    async def attached(self) -> int:
        """Follow the attempt that is on or has ended, as this machine remembers it; not one that no worker knows of."""
        known = records.read(self._settings.state_dir, self.kept.run_id)
        if known is None:
            where, fix = f"run {self.kept.run_id}", "`tpu_ops runs` lists those it knows"
            raise UsageError("this machine remembers no such run", where=where, fix=fix)
        fleet = self._fleet()
        one = self._attempt(contact.fanout(fleet), names_of(known, self.kept.plan, fleet.workers))
        self._on = (one.fanout, one.run)
        outcomes = await one.heard(range(len(known.hosts)))
        if one.newest > self.kept.attempt:
            # What is known of its nodes here is as old as what is known of its attempts.
            self._on = None
            self._take(events.Superseded(one.newest))
            raise Superseded
        if one.lost or any(outcome.record for outcome in outcomes):
            return await self._follow(one, started=endings.was_started(outcomes))
        self._on, self._outcomes, self._lost = None, outcomes, one.lost
        return ExitCode.OK

    async def started(self, fanout: Fanout, workers: Sequence[Worker]) -> int:
        """Follow the attempt that was just started on these workers."""
        names = {worker.host: worker.node.full_name for worker in workers}
        return await self._follow(self._attempt(fanout, names), started=True)

    async def _follow(self, one: Attempt, *, started: bool) -> int:
        self._take(Following(started))
        self._on = (one.fanout, one.run)
        outcomes = await one.to_its_end()
        self._on, self._outcomes, self._lost = None, outcomes, one.lost
        return ExitCode.OK

    def _attempt(self, fanout: Fanout, names: Mapping[str, str]) -> Attempt:
        run = control.RunRef(self.kept.run_id, tuple(names))
        shown = self._shown(len(names))
        line = runs_output.line_aside if self._args.json else runs_output.line
        part = runs_output.part_aside if self._args.json else runs_output.part
        return Attempt(
            self._settings,
            self.kept,
            fanout,
            run,
            names=names,
            follower=lambda logs: Follower(
                fanout,
                run.run_id,
                run.hosts,
                shown=shown,
                line=line,
                part=part,
                say=output.info,
                data=logs.write,
                offsets=logs.offsets,
            ),
            losing=lambda: self._take(EndingRanks()),
        )

    def _shown(self, count: int) -> list[int]:
        return runs_output.ranks(self._args.rank, count)

    async def _again(self, workers: Sequence[Worker]) -> int:
        """Start the next attempt on these workers and follow it."""
        attempt, state_dir = self.kept.attempt + 1, self._settings.state_dir
        self._shown(len(workers))
        self._spec = recovery.next_attempt(self._spec, attempt)
        fanout = contact.fanout(self._fleet())
        hosts = tuple(worker.host for worker in workers)
        tree = recovery.kept_code(state_dir, self.kept)
        async with contextlib.AsyncExitStack() as stack:
            # Before the code is copied: another run may be on these workers by now, in the same directory.
            if stopped := await self._check(fanout, workers):
                self._outcomes = stopped
                return ExitCode.OK
            if tree:
                turn = await stack.enter_async_context(turns.alone(fanout, hosts, tree.name))
                await sync.push(fanout, hosts, tree, turn)
                output.info(f"synced {tree.name}, digest {tree.digest}, to {texts.count(len(hosts), 'worker')}")
            if self.kept.git:
                await projects.look(fanout, hosts, self._spec)
            self._remember(workers, attempt)
            # From here on it may be on, whatever is heard of its start.
            self._take(Starting())
            try:
                await launch.start(fanout, self._spec, workers)
            except launch.Interrupted as exc:
                self._take(Interrupted(exc.may_be_on))
                raise
        output.info(f"run {self.kept.run_id}, attempt {attempt}: started on {texts.count(len(hosts), 'worker')}")
        return await self.started(fanout, workers)

    # --- between two attempts -------------------------------------------------------------------------------

    def _next(self) -> int:
        """Bring the nodes back, start the next attempt and follow it, again where something is in the way for now."""
        while True:
            self._on = None
            try:
                # A start of which not all was heard may have been one.
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
                self._sleep(step.seconds)

    def _finish(self, outcomes: Sequence[Outcome]) -> int:
        recovery.forget(self._settings.state_dir, self.kept.run_id)
        state = runs_output.run_state(outcomes)
        records.close(self._settings.state_dir, self.kept.run_id, state, outcomes=outcomes)
        return runs_output.finish(
            self.kept.run_id,
            outcomes,
            self._shown(len(outcomes)),
            as_json=self._args.json,
            of_rank=self._args.exit_code == "rank",
            command=self._settings.command,
            more=self.facts(),
        )
