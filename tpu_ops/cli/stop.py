"""`tpu_ops stop`: end a run on all its workers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_ops import config, texts
from tpu_ops.cli import open_requests, options, output, runs_output
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.errors import ExitCode, HostError, OpsError
from tpu_ops.fleet import contact, view
from tpu_ops.protocol.spec import MAX_GRACE
from tpu_ops.runs import control, endings, nodes, records, recovery
from tpu_ops.runs.outcomes import Outcome, of_refused
from tpu_ops.runs.spec import GRACE_STOP
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.renewal import in_thread
from tpu_ops.ssh.replies import Reply

#: Why a rank is gone of a run that is stopped between two attempts.
NOT_ON = "no attempt was running"
#: Seconds after which a stop says what it waits for.
MOMENT = 1.0
#: Seconds for workers to say what grace an earlier stop has asked for.
LOOK_LIMIT = 5.0
#: Seconds in which the first worker of a run knows of it once its start has begun, and between two questions.
STARTING, AGAIN = 10.0, 0.5
#: Seconds for a process of this machine to end what it does to bring a run's nodes back.
RECOVERY_LIMIT = 30.0
#: Seconds for the same once no rank of the run is left.
ENDING_LIMIT = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops stop`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("--force", action="store_true", help="stop another person's run (administrators only)")
    parser.add_argument(
        "--grace",
        type=options.grace(MAX_GRACE),
        metavar="SECONDS",
        help=f"seconds from SIGTERM until SIGKILL (default: {GRACE_STOP:.0f}, at most {MAX_GRACE})",
    )
    parser.add_argument(
        open_requests.DELETE,
        action="store_true",
        help="delete nodes and queued resources that the run's recovery has requested and no run uses, without asking",
    )
    parser.add_argument("run", help=runs_output.RUN)


def run(args: argparse.Namespace) -> int:
    """Stop it."""
    fleet = view.current(config.load(args.fleet))
    settings = fleet.settings
    # Nothing else may be kept of it, as once an earlier stop has ended its recovery.
    only = recovery.requests_file(settings.state_dir, args.run).exists() and not control.is_target(fleet, args.run)
    try:
        ended, problem = asyncio.run(_stop(fleet, args))
    except OpsError:
        if not only:
            raise
        ended, problem = [], None
    if not args.json and (ended or not problem):
        report(ended, as_json=False)
    if not ended and not problem and not args.json and not only:
        output.info(f"no run is active on {args.run}")
    left: dict[str, list[dict[str, Any]]] = {}
    for run_id in {run_.run_id for run_, _ in ended} or ({args.run} if only else set()):
        ask = options.can_ask() and not args.json
        left[run_id], failure = open_requests.settle(settings, run_id, delete=args.delete_requested, ask=ask)
        problem = problem or failure
    if args.json and (ended or not problem):
        report(ended, as_json=True, left=left)
    if problem:
        raise problem
    return exit_code([outcome for _, stopped in ended for outcome in stopped.outcomes])


async def _stop(
    fleet: view.Fleet, args: argparse.Namespace
) -> tuple[list[tuple[control.RunRef, control.Stopped]], OpsError | None]:
    fanout, state_dir, begun = contact.fanout(fleet), fleet.settings.state_dir, time.time()
    unheard = recovery.not_begun(state_dir, args.run) or (
        # Its nodes were taken away under its first start.
        recovery.is_kept(state_dir, args.run) and records.read(state_dir, args.run) is None
    )
    kept = unheard and not control.is_target(fleet, args.run)
    # No worker knows it; one that is begun just now is stopped as any other.
    if kept and (await _not_again(state_dir, args.run) or not recovery.is_kept(state_dir, args.run)):
        output.info(f"run {args.run}: it had not begun, and will not be started")
        return [], None
    found = await control.find(fleet, fanout, args.run)
    ended = await asyncio.gather(*(_end_of_all(fleet, fanout, run, args, begun) for run in found.runs))
    problem = next((problem for _, problem in ended if problem), None)
    asked = [(run, stopped) for run, (stopped, _) in zip(found.runs, ended, strict=True) if not stopped.refusal]
    return asked, problem or found.problem()


async def _end_of_all(
    fleet: view.Fleet, fanout: Fanout, run_: control.RunRef, args: argparse.Namespace, begun: float
) -> tuple[control.Stopped, OpsError | None]:
    """Stop one run, and see to it that it is not started again from here; return the error where that is not sure.

    Args:
        fleet: The fleet.
        fanout: Reaches its workers.
        run_: The run.
        args: Of the command line.
        begun: When workers were asked first (seconds since 1970).
    """
    off, deaf, again = False, None, recovery.is_kept(fleet.settings.state_dir, run_.run_id)
    if records.is_of(fleet.settings.state_dir, run_.run_id, run_.hosts, fleet.workers):
        last = 0
        with contextlib.suppress(OpsError):
            last = recovery.read(fleet.settings.state_dir, run_.run_id).attempt if again else 0
        try:
            idle = await _not_again(fleet.settings.state_dir, run_.run_id)
            # Another machine that recovers it as well may have been faster.
            off = idle and await _newest(fleet, fanout, run_) <= last
        except OpsError as exc:
            deaf = exc
    if off:
        output.info(f"run {run_.run_id}: its nodes were being brought back; it will not be started again")
        records.close(fleet.settings.state_dir, run_.run_id, endings.STOPPED)
        gone = (Outcome(rank, host, "gone", reason=NOT_ON) for rank, host in enumerate(run_.hosts))
        return control.Stopped(tuple(gone), already=False), None
    stopped = await end(fanout, run_, force=args.force, grace=args.grace)
    while _is_starting(fleet.settings.state_dir, run_, fleet.workers, stopped):
        await asyncio.sleep(AGAIN)
        stopped = await end(fanout, run_, force=args.force, grace=args.grace)
    if stopped.refusal:
        return stopped, _not_theirs(run_, stopped.outcomes, stopped.refusal)
    known = nodes.without_nodes(fleet, run_.run_id, stopped.outcomes, begun)
    stopped = stopped._replace(outcomes=tuple(of_refused(known)))
    if records.is_of(fleet.settings.state_dir, run_.run_id, run_.hosts, fleet.workers):
        state, ends = runs_output.run_state(stopped.outcomes), stopped.outcomes
        records.close(fleet.settings.state_dir, run_.run_id, state, outcomes=ends)
        if not off and exit_code(stopped.outcomes) == ExitCode.OK:
            await _none_left(fleet.settings.state_dir, run_.run_id)
            if again and not recovery.is_kept(fleet.settings.state_dir, run_.run_id):
                output.info(f"run {run_.run_id}: its recovery is over; it will not be started again")
    if deaf and not stopped.already:
        # Who recovers it learns from the workers that it was stopped.
        why = str(deaf)
        output.warning(f"run {run_.run_id}: {why}; its workers were told to stop anyway")
    if not deaf or not stopped.already:
        return stopped, None
    what = f"the process here that recovers it could not be told to stop, and may start it again: {deaf.what}"
    fix = f"press Ctrl-C there, or check that the disk has space (df), and repeat `tpu_ops stop {run_.run_id}`"
    return stopped, OpsError(what, where=f"run {run_.run_id}, {deaf.where}", fix=fix)


def _not_theirs(run_: control.RunRef, outcomes: Sequence[Outcome], refusal: Reply) -> OpsError:
    """Return the error that somebody wants to stop a run which they may not."""
    since = runs_output.summary(run_.run_id, outcomes)["since"]
    where = texts.folded(run_.hosts) + (f", active since {output.at(since)}" if since else "")
    return HostError(f"run {run_.run_id} was not stopped: {refusal.problem}", where=where, fix=refusal.fix)


async def _newest(fleet: view.Fleet, fanout: Fanout, run_: control.RunRef) -> int:
    """Return the newest attempt of a run that those of its workers tell of in a moment whose nodes serve."""
    serving = {worker.host for worker in fleet.workers if worker.node.state in SERVING_STATES}
    hosts = tuple(host for host in run_.hosts if host in serving)
    return await control.newest_attempt(fanout, control.RunRef(run_.run_id, hosts)) if hosts else 0


def _is_starting(state_dir: Path, run_: control.RunRef, workers: Sequence[Worker], stopped: control.Stopped) -> bool:
    """Return whether this machine has just begun to start an attempt that none of the run's workers knew of yet."""
    known = records.read(state_dir, run_.run_id)
    if known is None or not 0 <= time.time() - known.since < STARTING:
        return False
    heard = any(int(outcome.record["attempt"]) >= known.attempt for outcome in stopped.outcomes if outcome.record)
    silent = any(outcome.record is None and outcome.state != "gone" for outcome in stopped.outcomes)
    return not heard and not silent and records.is_of(state_dir, run_.run_id, run_.hosts, workers)


async def _not_again(state_dir: Path, run_id: str) -> bool:
    """See to it that a run is not started again from here; return whether no attempt of it is on.

    Raises:
        OpsError: Who recovers it here could not be told.
    """
    try:
        return await in_thread(lambda: recovery.stop(state_dir, run_id, RECOVERY_LIMIT))
    except TimeoutError:
        what = "the process that brings its nodes back has not ended yet; it will before it starts another attempt"
        output.warning(f"run {run_id}: {what}")
        return False


async def _none_left(state_dir: Path, run_id: str) -> None:
    """See to it that nothing is left that would start a run again which has ended.

    A process of this machine that recovers it removes that itself, or is between two tries and knows no end of it.
    """
    if recovery.is_kept(state_dir, run_id):
        with contextlib.suppress(TimeoutError, OpsError):
            await in_thread(lambda: recovery.none_left(state_dir, run_id, ENDING_LIMIT))


async def end(
    fanout: Fanout, run_: control.RunRef, *, force: bool = False, grace: float | None = None
) -> control.Stopped:
    """Stop one run; where that is not a matter of a moment, say what is waited for."""
    task = asyncio.ensure_future(control.stop(fanout, run_, force=force, grace=grace))
    try:
        _, waiting = await asyncio.wait({task}, timeout=MOMENT)
        if waiting:
            await _say(task, fanout, run_, grace or GRACE_STOP)
        return await task
    finally:
        task.cancel()


async def _say(stopping: asyncio.Future[control.Stopped], fanout: Fanout, run_: control.RunRef, grace: float) -> None:
    """Say how long the ranks may take to end, which a worker knows better where an earlier stop gave them longer."""
    asked = control.longest_grace(fanout, run_.run_id, run_.hosts[:1], LOOK_LIMIT)
    look, earlier = asyncio.ensure_future(asked), 0.0
    try:
        both: set[asyncio.Future[Any]] = {stopping, look}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return
        with contextlib.suppress(OpsError):
            earlier = look.result()
    finally:
        look.cancel()
    why = ", as an earlier stop requested" if earlier > grace else ""
    text = f"asked {texts.count(len(run_.hosts), 'rank')} to end; SIGKILL after {max(grace, earlier):g} s{why}"
    output.info(f"run {run_.run_id}: {text}")


def report(
    ended: Sequence[tuple[control.RunRef, control.Stopped]],
    *,
    as_json: bool,
    left: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> None:
    """Say how runs that were stopped have ended.

    Args:
        ended: The runs.
        as_json: Whether as JSON.
        left: What `open_requests.settle` returned for each run, which may be one of which nothing else is known.
    """
    if as_json:
        left = left or {}
        of = {run.run_id: stopped.outcomes for run, stopped in ended}
        runs = [runs_output.summary(run_id, of[run_id]) for run_id in of]
        runs += [{"run_id": run_id} for run_id in left if run_id not in of and left[run_id]]
        with output.read_or_not():
            output.as_json([one | {"requested": list(left.get(one["run_id"], ()))} for one in runs])
    for run_, stopped in ended:
        if not as_json:
            output.info(f"run {run_.run_id}{_how(stopped)}")
            with output.read_or_not():
                runs_output.table(stopped.outcomes)
        runs_output.leftovers(stopped.outcomes)


def _how(stopped: control.Stopped) -> str:
    """Return how a run is, or what had become of it before anybody asked it to end, in words that follow its name."""
    records_ = [outcome.record for outcome in stopped.outcomes if outcome.record]
    if not stopped.already:
        state = runs_output.run_state(stopped.outcomes)
        # What is gone as well is on no more. Of what is gone altogether nothing was asked to end.
        is_stopped = state == "gone" and any(out.record or out.reason == NOT_ON for out in stopped.outcomes)
        return f": {'stopped' if is_stopped and exit_code(stopped.outcomes) == ExitCode.OK else state}"
    if not records_:
        return " is not running: none of its workers knows it (if it is only just being started, run this again):"
    began = any(record["began"] or record["attempt"] > 1 for record in records_)
    return " had already ended:" if began else " was given up before it began:"


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return the exit code: 0 once no rank is left, whatever became of it."""
    states = {outcome.state for outcome in outcomes}
    if "unreachable" in states:
        return ExitCode.UNREACHABLE
    stuck = any((outcome.record or {}).get("stuck") for outcome in outcomes)
    return ExitCode.FAILED if stuck or states & {"unknown", "starting", "running", "ending"} else ExitCode.OK
