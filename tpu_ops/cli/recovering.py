"""`--recover` of `tpu_ops train` and `attach`: follows a run, and starts it again when its nodes are taken away."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tpu_ops import texts
from tpu_ops.cli import leaving, output, projects, runs_output
from tpu_ops.cli.asked import Asked, ended_by
from tpu_ops.cli.attempt import REFUSALS, Attempt, Renamed, may_pass, names_of, passes
from tpu_ops.cli.bookkeeping import MORE
from tpu_ops.cli.bringing import Bringing, Superseded
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode, OpsError, RefusedError, UsageError
from tpu_ops.fleet import contact, origin, remaking
from tpu_ops.fleet.model import Worker
from tpu_ops.remote.fanout import Fanout
from tpu_ops.remote.renewal import in_thread
from tpu_ops.runs import advice, control, endings, launch, records, recovery, spec, sync, turns
from tpu_ops.runs.endings import STOPPED, SUCCEEDED, TAKEN
from tpu_ops.runs.follow import Follower
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.runs.recovery import Recovery


class _TakenEarly(OpsError):
    """Nodes were taken away while the first attempt was being started on them."""


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
    ) -> None:
        super().__init__(settings, kept, run, begun=begun, said=said)
        self._args = args
        self._on: tuple[Fanout, control.RunRef] | None = None
        self._outcomes: list[Outcome] | None = None
        self._lost: Mapping[str, str] = {}
        self._wrote = self._has_followed = False
        self._first: Sequence[Worker] = ()
        #: What may be made again otherwise than it is, in words.
        self._lacking: list[str] = []
        self._refusals = 0
        #: Seconds before the next try where something is in the way for now.
        self._pause = remaking.FIRST_PAUSE

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
        self._wrote, self._first = True, workers
        # Left by one that died before it had kept all.
        recovery.forget(state_dir, run_id)
        copy = recovery.keep_code(state_dir, run_id, tree) if tree else None
        self._keep(plan=plan)
        return copy

    def starts(self) -> None:
        """Know that the first attempt is asked for now: whatever is heard of that, it may be on.

        Raises:
            OpsError: That cannot be kept.
        """
        self._keep(attempt=1, pending=False)

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
        try:
            with ended_by(lambda: (self._begun or self._wrote) and self._on is None and self._asked()):
                try:
                    code = self._followed(work) if work else self._next()
                except (_TakenEarly, Superseded):
                    code = self._next()
                except Renamed as exc:
                    why = self._on_fleet(str(exc))
                    output.info(f"run {self.kept.run_id}: {why}; looking for its workers by their new names")
                    code = self._next()
                while self._outcomes and self._goes_on(self._outcomes):
                    code = self._next()
        except Asked:
            return self._stopped()
        except BrokenPipeError:
            # Whoever read the lines has gone, as `head` does.
            if not self._begun:
                raise
            output.give_up()
            self.left()
            return ExitCode.INTERRUPTED
        except KeyboardInterrupt:
            output.info("")
            self.left()
            raise
        except (OpsError, OSError):
            if self._begun and not self.kept.over_budget():
                self._hint()
            raise
        return self._finish(self._outcomes) if self._outcomes else code

    def _asked(self) -> bool:
        return recovery.asked_to_stop(self._settings.state_dir, self.kept.run_id)

    def _never_again(self, outcomes: Sequence[Outcome] = ()) -> None:
        state = runs_output.run_state(outcomes) if outcomes else STOPPED
        recovery.forget(self._settings.state_dir, self.kept.run_id)
        records.close(self._settings.state_dir, self.kept.run_id, state, STOPPED, outcomes)
        output.info(f"run {self.kept.run_id}: stopped; it will not be started again")

    def _stopped(self) -> int:
        """Say that the run is started no more, or how it has ended meanwhile; whoever asked ends what may be on."""
        outcomes = self._outcomes or []
        known, kind = any(outcome.record for outcome in outcomes), endings.ending(outcomes, self._lost)[0]
        # While the next attempt is prepared, ranks were stopped for that.
        if known and (kind == SUCCEEDED or (kind == STOPPED and not self.kept.pending)):
            return self._finish(outcomes)
        if outcomes or self.kept.pending or not self.kept.attempt or not self._begun:
            self._never_again()
        else:
            output.info(f"run {self.kept.run_id}: not started again; attempt {self.kept.attempt} may be running")
        if self._args.json:
            output.as_json({"run_id": self.kept.run_id, "state": STOPPED, "ranks": [], **self.facts()})
        return ExitCode.FAILED

    def _followed(self, work: Coroutine[Any, Any, int]) -> int:
        """Follow one attempt; without outcomes afterwards, it was left."""
        self._outcomes = None
        try:
            how: dict[str, Any] = {"command": self._settings.command, "as_json": self._args.json}
            return asyncio.run(leaving.followed(work, lambda: self._on, self.left, self._never_again, **how))
        except OpsError as exc:
            first = self._wrote and not self._has_followed and self.kept.attempt == 1
            if not (first and (passes(exc) or may_pass(exc)) and self._count_lost(self.kept.plan, exc)):
                raise
            # As it might have been a moment later. Who asks for it meanwhile finds it.
            self._begun = True
            self._remember(self._first, self.kept.attempt)
            raise _TakenEarly("its nodes were taken away while it was being started") from exc
        finally:
            # What stands there may be of another run of this name, which goes on.
            if self._wrote and not self._begun:
                recovery.forget(self._settings.state_dir, self.kept.run_id)

    def may_be_on(self) -> None:
        """Know that the start, of which not all was heard, may have been one: nothing of what is kept goes."""
        self._begun = True

    def left(self) -> None:
        """Say after Ctrl-C what goes on and how to get at it."""
        if not self._begun:
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
            self._keep(pending=True)
            raise Superseded(one.newest)
        if endings.was_started(outcomes):
            self._is_on()
        if one.lost or any(outcome.record for outcome in outcomes):
            return await self._follow(one)
        self._on, self._outcomes, self._lost = None, outcomes, one.lost
        return ExitCode.OK

    async def started(self, fanout: Fanout, workers: Sequence[Worker]) -> int:
        """Follow the attempt that was just started on these workers."""
        self._is_on()
        return await self._follow(self._attempt(fanout, {worker.host: worker.node.full_name for worker in workers}))

    def _is_on(self) -> None:
        """Know that the attempt has begun: what is refused or lost from now on is so for the first time."""
        self._refusals, self._pause = 0, remaking.FIRST_PAUSE
        self._requests.drop(*(request.name for request in self._requests.all))
        if self.kept.counted or self.kept.early:
            self._keep(counted=False, early=False)

    async def _follow(self, one: Attempt) -> int:
        self._begun = self._has_followed = True
        # What becomes of its nodes from now on ends the attempt.
        self._now = None
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
            losing=self._losing,
        )

    def _losing(self) -> None:
        """Count a node that is lost, before what is left is ended: whoever takes over would not know why that was."""
        self._count_one(TAKEN, anew=True)

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
            self._keep(attempt=attempt, pending=False)
            try:
                await launch.start(fanout, self._spec, workers)
            except launch.Interrupted as exc:
                self._keep(pending=not exc.may_be_on)
                raise
        output.info(f"run {self.kept.run_id}, attempt {attempt}: started on {texts.count(len(hosts), 'worker')}")
        return await self.started(fanout, workers)

    # --- between two attempts -------------------------------------------------------------------------------

    def _goes_on(self, outcomes: Sequence[Outcome]) -> bool:
        """Say how an attempt ended; return whether another one follows.

        Raises:
            Asked: One would, and none is wanted.
        """
        kind, why = endings.ending(outcomes, self._lost)
        if kind == SUCCEEDED:
            return False
        if who := endings.stop_requested_by(outcomes):
            if not any(outcome.record for outcome in outcomes):
                # Of an attempt that was refused for that nothing is to be told.
                raise Asked
            if any(outcome.intent != "stop" for outcome in outcomes):
                self._tell(f"stopped by {who}", "not started again")
            return False
        if not (self.kept.pending or self._lost or endings.was_started(outcomes)):
            self._keep(pending=True)
            if self._asked():
                raise Asked
            self._tell("it has not begun", "starting the next one")
            return True
        if self.kept.pending:
            # The ranks that were left have been ended because of a node that was lost.
            kind, why = TAKEN, "; ".join(self._lost.values())
        if kind == STOPPED:
            return False
        if self._asked():
            raise Asked
        over = self._count_one(kind, early=kind == TAKEN and not self._lost)
        then = "bringing its nodes back" if kind == TAKEN else "starting it again"
        self._tell(why, f"not started again: {over} is used up" if over else then)
        if over:
            output.info(f"  fix: {self._on_fleet(MORE)}")
        return not over

    def _next(self) -> int:
        """Bring the nodes back, start the next attempt and follow it, again where something is in the way for now."""
        while True:
            self._on = None
            try:
                # A start of which not all was heard may have been one.
                work = self._again(self._bring_back()) if self.kept.pending else self.attached()
                return self._followed(work)
            except Superseded as exc:
                if not self.kept.pending:
                    self._tell(str(exc), "following it")
            except BrokenPipeError:
                raise
            except (OpsError, OSError) as failure:
                if self.kept.over_budget():
                    raise
                # What this machine lacks for a moment, as processes or open files, may be there again as well.
                error = failure if isinstance(failure, OpsError) else OpsError(str(failure))
                silent = passes(error) and not isinstance(error, RefusedError)
                self._refusals = 0 if silent else self._refusals + 1
                # Whatever went wrong: Ansible knows no such worker, for example, once its node is taken away.
                if self._now and self._count_lost(self._now, error, anew=True):
                    self._now, self._refusals = None, 0
                    continue
                # Whoever has just called the command is told at once what is wrong, and mends it.
                late = self._has_followed or self._has_made
                hopeful = isinstance(error, RefusedError) or (late and (error is not failure or may_pass(error)))
                if not (silent or hopeful) or self._refusals >= REFUSALS:
                    raise
                self._tell(str(error), f"trying again in {self._pause:g} s; Ctrl-C gives up")
                # A start that was refused is an attempt that is over when the next try begins: the pause grows all the
                # same, and the time that all tries take with it.
                seconds, self._pause = self._pause, min(self._pause * 2, remaking.LONGEST_PAUSE)
                time.sleep(seconds)

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
