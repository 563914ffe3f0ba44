"""`--recover` of `tpu_ops train` and `attach`: follows a run, and starts it again when its nodes are taken away."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpu_ops import texts
from tpu_ops.cli import configure, leaving, options, output, projects, runs_output
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode, OpsError, UnreachableError, UsageError
from tpu_ops.fleet import contact, newcomers, origin, remaking, view
from tpu_ops.fleet.model import Worker, label_of
from tpu_ops.remote.fanout import Fanout
from tpu_ops.remote.renewal import in_thread
from tpu_ops.runs import control, launch, preflight, records, recovery, spec, sync
from tpu_ops.runs.follow import ON, Follower, Outcome
from tpu_ops.runs.recovery import FAILED, STOPPED, SUCCEEDED, TAKEN, Recovery

#: Seconds between two looks at the nodes while a rank does not answer.
LOOK = 10.0
#: What to do where a budget is used up.
MORE = "`tpu_ops train` with a larger one and another --name goes on from the last checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --recover."""
    parser.add_argument(
        "--recover",
        action="store_true",
        help="start the run again with its next attempt when a node is preempted, deleted, stopped or in maintenance",
    )


def add_budgets(parser: argparse.ArgumentParser) -> None:
    """Declare how often a run may be started again."""
    parser.add_argument(
        "--max-preemptions",
        type=_count,
        metavar="N",
        help="with --recover: start again after at most N preemptions (default: however many)",
    )
    parser.add_argument(
        "--max-failures",
        type=_count,
        metavar="N",
        help="with --recover: start again after at most N failures of the command itself (default: 0)",
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 999999")
    return int(text)


def check(args: argparse.Namespace) -> None:
    """Refuse what does not go together.

    Raises:
        UsageError: There is such.
    """
    for option, value in (("--max-preemptions", args.max_preemptions), ("--max-failures", args.max_failures)):
        if value is not None and not args.recover:
            raise UsageError("there is no recovery", where=option, fix="add --recover")
    if args.recover and args.detach:
        what = "recovery needs this command to stay"
        fix = "leave out --detach, and Ctrl-C later: `tpu_ops attach RUN --recover` goes on from any other shell"
        raise UsageError(what, where="--recover and --detach", fix=fix)


@contextlib.contextmanager
def alone(settings: Settings, run_id: str) -> Iterator[None]:
    """Be the only one on this machine to recover a run.

    Raises:
        UsageError: Another process does.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(recovery.lock(settings.state_dir, run_id))
        except TimeoutError:
            what = "another process of this machine recovers it already"
            fix = f"`tpu_ops attach {run_id}` follows it without that"
            raise UsageError(what, where=f"run {run_id}", fix=fix) from None
        yield


class Recovering:
    """One run that this process follows to its end, through all its attempts.

    Args:
        settings: Of the fleet.
        kept: What is kept of the run.
        run: What its last attempt was started with.
        args: ``rank``, ``json`` and ``exit_code`` of the command line.
        begun: Whether the run has been on before.
    """

    def __init__(
        self, settings: Settings, kept: Recovery, run: spec.RunSpec, args: argparse.Namespace, *, begun: bool
    ) -> None:
        self._settings, self.kept, self._spec, self._args, self._begun = settings, kept, run, args, begun
        self._on: tuple[Fanout, control.RunRef] | None = None
        self._outcomes: list[Outcome] | None = None
        self._lost: Mapping[str, str] = {}
        self._labels: Mapping[str, str] = {}
        self._events: list[dict[str, Any]] = []
        self._now: remaking.Plan | None = None
        self._wrote = False

    def begin(self, workers: Sequence[Worker], tree: sync.Tree | None) -> sync.Tree | None:
        """Keep what starts the run again, before it is started; return the code that goes to the workers. It blocks.

        Raises:
            UsageError: A run of this name was recovered here before, or its nodes cannot be made again.
            CloudError: The API refused.
        """
        state_dir, run_id = self._settings.state_dir, self.kept.run_id
        place = recovery.folder(state_dir, run_id)
        recovery.require_none(state_dir, run_id)
        if any(place.glob("attempt-*")):
            what = f"logs of a run of this name are in {place}"
            raise UsageError(what, where=f"run {run_id}", fix="choose another --name")
        with origin.api(self._settings) as tpu:
            plan = remaking.remember(tpu, dict.fromkeys(worker.node.full_name for worker in workers))
        self._wrote = True
        copy = recovery.keep_code(state_dir, run_id, tree) if tree else None
        self._keep(plan=plan)
        return copy

    def to_the_end(self, work: Coroutine[Any, Any, int] | None) -> int:
        """Follow the run until it has ended for good or is left; return the exit code.

        Args:
            work: What starts the attempt that is followed first; None where its nodes are to be brought back before.
        """
        try:
            code = self._followed(work) if work else self._next()
            while self._outcomes:
                if not self._goes_on(self._outcomes):
                    return self._finish(self._outcomes)
                code = self._next()
        except KeyboardInterrupt:
            output.info("")
            self.left()
            raise
        except OpsError:
            if self._begun and not self.kept.over_budget():
                self._hint()
            raise
        return code

    def _followed(self, work: Coroutine[Any, Any, int]) -> int:
        """Follow one attempt; without outcomes afterwards, it was left."""
        self._outcomes = None
        try:
            return asyncio.run(leaving.followed(work, lambda: self._on, self.left, as_json=self._args.json))
        finally:
            # What stands there may be of another run of this name, which goes on.
            if self._wrote and not self._begun:
                recovery.forget(self._settings.state_dir, self.kept.run_id)

    def may_be_on(self) -> None:
        """Know that the start, of which not all was heard, may have been one: nothing of what is kept goes."""
        self._begun = True

    def left(self) -> None:
        """Say after Ctrl-C what goes on and how to get at it."""
        if self._on:
            output.info(f"detached: run {self.kept.run_id} goes on, and nobody starts it again")
            output.info(f"  stop:    tpu_ops stop {self.kept.run_id}")
        elif self._begun:
            output.info(f"run {self.kept.run_id} is not on, and nobody starts it again")
        else:
            output.info("interrupted before the run was started")
            return
        self._hint()

    def _hint(self) -> None:
        output.info(f"  recover: tpu_ops attach {self.kept.run_id} --recover")

    # --- one attempt ----------------------------------------------------------------------------------------

    async def attached(self) -> int:
        """Follow the attempt that is on or has ended, as this machine remembers it; not one that no worker knows of."""
        known = records.read(self._settings.state_dir, self.kept.run_id)
        if known is None:
            where, fix = f"run {self.kept.run_id}", "`tpu_ops runs` lists those there are"
            raise UsageError("this machine remembers no such run", where=where, fix=fix)
        self._labels = dict(zip(known.nodes, (made.name for made in self.kept.plan.nodes), strict=True))
        fanout = contact.fanout(view.current(self._settings))
        self._on = (fanout, control.RunRef(self.kept.run_id, known.hosts))
        outcomes = await self._heard(*self._on, range(len(known.hosts)))
        if self._lost or any(outcome.record for outcome in outcomes):
            return await self.follow(fanout, known.hosts)
        self._on, self._outcomes = None, outcomes
        return ExitCode.OK

    async def started(self, fanout: Fanout, workers: Sequence[Worker]) -> int:
        """Follow the attempt that was just started on these workers."""
        self._labels = {worker.label: worker.node.full_name for worker in workers}
        return await self.follow(fanout, [worker.host for worker in workers])

    async def follow(self, fanout: Fanout, hosts: Sequence[str]) -> int:
        """Follow an attempt to its end and keep its logs here; a node that is taken away ends it at once."""
        self._begun = True
        run = control.RunRef(self.kept.run_id, tuple(hosts))
        self._on = (fanout, run)
        place = recovery.folder(self._settings.state_dir, self.kept.run_id) / f"attempt-{self.kept.attempt}"
        with contextlib.closing(recovery.Logs(place, len(hosts), output.warning)) as logs:
            output.info(f"run {self.kept.run_id}, attempt {self.kept.attempt}: logs of all ranks go to {place}")
            while True:
                outcomes = await self._once(fanout, hosts, logs)
                silent = [outcome.rank for outcome in outcomes if outcome.record is None]
                if self._lost or not silent:
                    break
                # That this machine heard nothing of a rank says nothing of the rank.
                outcomes = await self._heard(fanout, run, silent)
                if self._lost:
                    outcomes = await self._without_lost(fanout, hosts)
                    break
                if not any(outcomes[rank].record for rank in silent):
                    break
                await asyncio.sleep(LOOK)
        self._on, self._outcomes = None, outcomes
        return ExitCode.OK

    async def _once(self, fanout: Fanout, hosts: Sequence[str], logs: recovery.Logs) -> list[Outcome]:
        """Follow an attempt until its ranks have ended or are given up, or a node is taken away."""
        follower = Follower(
            fanout,
            self.kept.run_id,
            hosts,
            shown=self._shown(len(hosts)),
            line=runs_output.line_aside if self._args.json else runs_output.line,
            say=output.info,
            data=logs.write,
            offsets=logs.offsets,
        )
        following, watching = asyncio.ensure_future(follower.run()), asyncio.ensure_future(self._watch(follower))
        try:
            await asyncio.wait({following, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                self._lost = watching.result()
                return await self._without_lost(fanout, hosts)
            outcomes = recovery.of_attempt(following.result(), self.kept.attempt)
            done = all(outcome.state == "succeeded" for outcome in outcomes)
            self._lost = {} if done else await self._look()
            return outcomes
        finally:
            for task in (following, watching):
                task.cancel()
            await asyncio.gather(following, watching, return_exceptions=True)

    async def _heard(self, fanout: Fanout, run: control.RunRef, ranks: Sequence[int]) -> list[Outcome]:
        """Return how all ranks are once a worker of some tells of this attempt, or all of these have answered.

        Nobody is waited for where a node is not what it was.
        """
        said = False
        while True:
            outcomes = recovery.of_attempt(await control.outcomes(fanout, run), self.kept.attempt)
            self._lost = await self._look()
            asked = [outcomes[rank] for rank in ranks]
            silent = [outcome.host for outcome in asked if outcome.state == "unreachable"]
            if self._lost or not silent or any(outcome.record for outcome in asked):
                return outcomes
            if not said:
                what = f"nothing is known of {', '.join(silent)}, whose node is there"
                output.info(f"run {self.kept.run_id}: {what}; asking every {LOOK:g} s")
                said = True
            for host in silent:
                await fanout.masters.drop(host)
            await asyncio.sleep(LOOK)

    def _shown(self, count: int) -> list[int]:
        return runs_output.ranks(self._args.rank, count)

    async def _watch(self, follower: Follower) -> Mapping[str, str]:
        """Return what became of the nodes once one is not what it was; they are looked at while a rank is silent."""
        while True:
            await asyncio.sleep(LOOK)
            if follower.silent and (lost := await self._look()):
                return lost

    async def _look(self) -> Mapping[str, str]:
        """Return what became of the nodes that are not what they were; an API that does not answer is asked again."""
        while True:
            try:
                return await in_thread(lambda: self._lost_of(self.kept.plan))
            except OpsError as exc:
                if not _passes(exc):
                    raise
                output.info(f"run {self.kept.run_id}: {exc}; asking again in {LOOK:g} s")
            await asyncio.sleep(LOOK)

    def _lost_of(self, plan: remaking.Plan) -> dict[str, str]:
        with origin.api(self._settings) as tpu:
            return remaking.lost(plan, remaking.look(tpu, plan))

    async def _without_lost(self, fanout: Fanout, hosts: Sequence[str]) -> list[Outcome]:
        """End the ranks of the nodes that are left; return how all are."""
        gone = {host: self._lost[name] for host in hosts if (name := self._labels[label_of(host)]) in self._lost}
        left = tuple(host for host in hosts if host not in gone)
        found = {host: Outcome(0, host, "unknown", reason=why) for host, why in gone.items()}
        if left:
            self._keep(pending=True)
            reason = "; ".join(self._lost.values())
            run = control.RunRef(self.kept.run_id, left)
            stopped = await control.stop(fanout, run, grace=spec.GRACE_FAILURE, reason=reason)
            found |= {outcome.host: outcome for outcome in stopped.outcomes}
        return [replace(found[host], rank=rank) for rank, host in enumerate(hosts)]

    async def _again(self, workers: Sequence[Worker]) -> int:
        """Start the next attempt on these workers and follow it."""
        attempt, state_dir = self.kept.attempt + 1, self._settings.state_dir
        self._spec = recovery.next_attempt(self._spec, attempt)
        fanout = contact.fanout(view.current(self._settings))
        hosts = tuple(worker.host for worker in workers)
        if tree := recovery.kept_code(state_dir, self.kept):
            await sync.push(fanout, hosts, tree)
            output.info(f"synced {tree.name}, digest {tree.digest}, to {texts.count(len(hosts), 'worker')}")
        await self._check(fanout, workers)
        if self.kept.git:
            await projects.look(fanout, hosts, self._spec)
        nodes = tuple(dict.fromkeys(worker.label for worker in workers))
        ids = tuple(dict.fromkeys(worker.node.node_id for worker in workers))
        record = records.new(self.kept.run_id, nodes, ids, hosts, self._spec.argv)
        records.write(state_dir, replace(record, attempt=attempt))
        # From here on it may be on, whatever is heard of its start.
        self._keep(attempt=attempt, pending=False)
        await launch.start(fanout, self._spec, workers)
        output.info(f"run {self.kept.run_id}, attempt {attempt}: started on {texts.count(len(hosts), 'worker')}")
        return await self.started(fanout, workers)

    async def _check(self, fanout: Fanout, workers: Sequence[Worker]) -> None:
        """Look at the workers as before any run; what an attempt that is over has left on them is ended first."""
        run = control.RunRef(self.kept.run_id, tuple(worker.host for worker in workers))
        outcomes = recovery.of_attempt(await control.outcomes(fanout, run), self.kept.attempt)
        if left := tuple(outcome.host for outcome in outcomes if outcome.state in ON):
            reason = f"attempt {self.kept.attempt} is over"
            await control.stop(fanout, replace(run, hosts=left), grace=spec.GRACE_FAILURE, reason=reason)
        forced = _forced if self.kept.force else None
        await preflight.check(fanout, workers, self._spec.venv, self._spec.user, forced)

    # --- between two attempts -------------------------------------------------------------------------------

    def _goes_on(self, outcomes: Sequence[Outcome]) -> bool:
        """Say how an attempt ended; return whether another one follows."""
        if not (self.kept.pending or self._lost or recovery.was_started(outcomes)):
            self._keep(pending=True)
            self._tell("it has not begun", "starting the next one")
            return True
        kind, why = recovery.ending(outcomes, self._lost)
        if self.kept.pending:
            # The ranks that were left have been ended because of a node that was lost.
            kind, why = TAKEN, "; ".join(self._lost.values())
        if kind in (SUCCEEDED, STOPPED):
            return False
        over, then = self._count_one(kind), "bringing its nodes back" if kind == TAKEN else "starting it again"
        self._tell(why, f"not started again: {over} is used up" if over else then)
        if over:
            output.info(f"  fix: {MORE}")
        return not over

    def _count_one(self, kind: str) -> str:
        """Count an end of an attempt; return which budget is used up, if any."""
        failed = kind == FAILED
        self._keep(failures=self.kept.failures + failed, preemptions=self.kept.preemptions + (not failed), pending=True)
        return self.kept.over_budget()

    def _tell(self, what: str, then: str) -> None:
        self._events.append({"attempt": self.kept.attempt, "what": what, "then": then})
        output.info(f"run {self.kept.run_id}, attempt {self.kept.attempt}: {what}; {then}")

    def _bring_back(self) -> list[Worker]:
        """Return the workers by rank once all nodes are READY, known and configured."""
        self._on = self._now = None
        self._keep(pending=True)
        plan = self.kept.plan
        with origin.api(self._settings) as tpu:
            seen = remaking.bring_back(tpu, plan, f"{self.kept.run_id}/{self.kept.attempt + 1}", output.info)
        names = [made.name for made in plan.nodes]
        if remaking.fresh(plan, seen):
            # What becomes of these from now on is a preemption of its own.
            self._now = plan.now(seen, names)
        fleet, found = newcomers.known(self._settings, names, options.Waiting(f"run {self.kept.run_id}"))
        for text in fleet.warnings:
            output.warning(text)
        workers = control.by_rank(found, self.kept.run_id)
        listed = {worker.node.full_name for worker in workers}
        if missing := [name for name in names if name not in listed]:
            what = "the fleet does not list its nodes"
            raise UsageError(
                what, where=", ".join(missing), fix="see filters and zones in inventory/tpu_vm.yml, and `tpu_ops list`"
            )
        if new := [worker for worker in workers if worker.node.full_name in remaking.fresh(plan, seen)]:
            output.info(f"run {self.kept.run_id}: configuring {', '.join(worker.host for worker in new)} (site.yml)")
            configure.converge(self._settings, fleet, new)
        self._keep(plan=plan.now(seen, [worker.node.full_name for worker in workers]))
        if self.kept.git:
            asyncio.run(self._check(contact.fanout(fleet), workers))
            projects.bring(self._settings, fleet, workers, self.kept.git)
        return workers

    def _next(self) -> int:
        """Bring the nodes back, start the next attempt and follow it, again where something is in the way for now."""
        pause = remaking.FIRST_PAUSE
        while True:
            try:
                # A start of which not all was heard may have been one.
                work = self._again(self._bring_back()) if self.kept.pending else self.attached()
                return self._followed(work)
            except OpsError as exc:
                if not _passes(exc):
                    raise
                lost: Mapping[str, str] = {}
                with contextlib.suppress(OpsError):
                    lost = self._lost_of(self._now) if self._now else {}
                if not lost:
                    self._tell(str(exc), f"trying again in {pause:g} s; Ctrl-C ends that")
                    time.sleep(pause)
                    pause = min(pause * 2, remaking.LONGEST_PAUSE)
                    continue
                why, over = "; ".join(lost.values()), self._count_one(TAKEN)
                if over:
                    recovery.forget(self._settings.state_dir, self.kept.run_id)
                    what = f"not started again: {why}, and {over} is used up"
                    raise UnreachableError(what, where=f"run {self.kept.run_id}", fix=MORE) from exc
                self._tell(why, "bringing its nodes back")

    def _keep(self, **changes: Any) -> None:
        self.kept = replace(self.kept, **changes)
        recovery.write(self._settings.state_dir, self.kept)

    def _finish(self, outcomes: Sequence[Outcome]) -> int:
        recovery.forget(self._settings.state_dir, self.kept.run_id)
        more = {key: getattr(self.kept, key) for key in ("attempt", "preemptions", "failures")}
        return runs_output.finish(
            self.kept.run_id,
            outcomes,
            self._shown(len(outcomes)),
            as_json=self._args.json,
            of_rank=self._args.exit_code == "rank",
            more={**more, "events": self._events},
        )


def _forced(fault: preflight.Fault) -> None:
    output.warning(f"{fault.worker}: {fault.problem}; overridden by --force")


def _passes(exc: OpsError) -> bool:
    """Return whether the same may succeed a while later: a worker or the API did not answer."""
    silent = isinstance(exc, launch.NotStarted) and all(map(control.is_lost, exc.refused))
    return silent or exc.exit_code == ExitCode.UNREACHABLE or remaking.passes(exc)
