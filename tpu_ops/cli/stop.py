"""`tpu_ops stop`: stop a run on all its workers."""

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
from tpu_ops.runs.outcomes import Outcome, of_refused, run_state
from tpu_ops.runs.spec import GRACE_STOP
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.renewal import in_thread
from tpu_ops.ssh.replies import Reply

#: The reason in the outcomes of a run that is stopped between two attempts.
NOT_ON = "no attempt was running"
#: Seconds after which a stop prints a message that it is waiting.
MOMENT = 1.0
#: Seconds to wait for a worker's answer on the grace of an earlier stop.
LOOK_LIMIT = 5.0
#: Seconds after the beginning of a start within which a worker has to know the run, and seconds between two checks.
STARTING, AGAIN = 10.0, 0.5
#: Seconds to wait for a process of this machine that is bringing a run's nodes back.
RECOVERY_LIMIT = 30.0
#: Seconds to wait for a process of this machine that recovers a run, once no rank of the run is left.
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
    """Stop the run or runs that the argument stands for."""
    fleet = view.current(config.load(args.fleet))
    settings = fleet.settings
    # After an earlier stop, the open requests may be all that is left of a run: then finding no run is no error.
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
        # The run's nodes were taken away during its first start.
        recovery.is_kept(state_dir, args.run) and records.read(state_dir, args.run) is None
    )
    kept = unheard and not control.is_target(fleet, args.run)
    # No worker knows the run. If the recovery has just started it after all, the code below stops it like any run.
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
    """Stop one run and its recovery on this machine; return the error if the recovery may start the run again.

    Args:
        fleet: The fleet.
        fanout: The connections to the workers.
        run_: The run.
        args: The arguments of the command.
        begun: When this command first asked the workers (seconds since 1970).
    """
    off, deaf, again = False, None, recovery.is_kept(fleet.settings.state_dir, run_.run_id)
    if records.is_of(fleet.settings.state_dir, run_.run_id, run_.hosts, fleet.workers):
        last = 0
        with contextlib.suppress(OpsError):
            last = recovery.read(fleet.settings.state_dir, run_.run_id).attempt if again else 0
        try:
            idle = await _not_again(fleet.settings.state_dir, run_.run_id)
            # Another machine may also recover the run, and may have started a newer attempt.
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
        state, ends = run_state(stopped.outcomes), stopped.outcomes
        records.close(fleet.settings.state_dir, run_.run_id, state, outcomes=ends)
        if not off and exit_code(stopped.outcomes) == ExitCode.OK:
            await _none_left(fleet.settings.state_dir, run_.run_id)
            if again and not recovery.is_kept(fleet.settings.state_dir, run_.run_id):
                output.info(f"run {run_.run_id}: its recovery is over; it will not be started again")
    if deaf and not stopped.already:
        # The process that recovers the run learns from the workers that the run was stopped.
        why = str(deaf)
        output.warning(f"run {run_.run_id}: {why}; its workers were told to stop anyway")
    if not deaf or not stopped.already:
        return stopped, None
    what = (
        "the process on this machine that recovers the run could not be told to stop, and may start the run again: "
        f"{deaf.what}"
    )
    fix = f"end that process with Ctrl-C, or check that the disk has space (df); repeat `tpu_ops stop {run_.run_id}`"
    return stopped, OpsError(what, where=f"run {run_.run_id}, {deaf.where}", fix=fix)


def _not_theirs(run_: control.RunRef, outcomes: Sequence[Outcome], refusal: Reply) -> OpsError:
    """Return the error for a user who is not allowed to stop a run."""
    since = runs_output.summary(run_.run_id, outcomes)["since"]
    where = texts.folded(run_.hosts) + (f", active since {output.at(since)}" if since else "")
    return HostError(f"run {run_.run_id} was not stopped: {refusal.problem}", where=where, fix=refusal.fix)


async def _newest(fleet: view.Fleet, fanout: Fanout, run_: control.RunRef) -> int:
    """Return the newest attempt of a run that is known to its workers; ask only workers of running nodes, briefly."""
    serving = {worker.host for worker in fleet.workers if worker.node.state in SERVING_STATES}
    hosts = tuple(host for host in run_.hosts if host in serving)
    return await control.newest_attempt(fanout, control.RunRef(run_.run_id, hosts)) if hosts else 0


def _is_starting(state_dir: Path, run_: control.RunRef, workers: Sequence[Worker], stopped: control.Stopped) -> bool:
    """Return whether this machine has just begun to start an attempt that no worker of the run knows yet."""
    known = records.read(state_dir, run_.run_id)
    if known is None or not 0 <= time.time() - known.since < STARTING:
        return False
    heard = any(int(outcome.record["attempt"]) >= known.attempt for outcome in stopped.outcomes if outcome.record)
    silent = any(outcome.record is None and outcome.state != "gone" for outcome in stopped.outcomes)
    return not heard and not silent and records.is_of(state_dir, run_.run_id, run_.hosts, workers)


async def _not_again(state_dir: Path, run_id: str) -> bool:
    """End the recovery of a run on this machine; return whether no attempt of the run is active.

    Raises:
        OpsError: The process that recovers the run could not be told to end.
    """
    try:
        return await in_thread(lambda: recovery.stop(state_dir, run_id, RECOVERY_LIMIT))
    except TimeoutError:
        what = "the process that brings its nodes back still runs; it will end before it starts another attempt"
        output.warning(f"run {run_id}: {what}")
        return False


async def _none_left(state_dir: Path, run_id: str) -> None:
    """Remove the recovery state of an ended run, so that no process on this machine starts the run again.

    A process that recovers the run removes the state itself, unless it is waiting between two tries.
    """
    if recovery.is_kept(state_dir, run_id):
        with contextlib.suppress(TimeoutError, OpsError):
            await in_thread(lambda: recovery.none_left(state_dir, run_id, ENDING_LIMIT))


async def end(
    fanout: Fanout, run_: control.RunRef, *, force: bool = False, grace: float | None = None
) -> control.Stopped:
    """Stop one run; print a message if this takes longer than MOMENT seconds."""
    task = asyncio.ensure_future(control.stop(fanout, run_, force=force, grace=grace))
    try:
        _, waiting = await asyncio.wait({task}, timeout=MOMENT)
        if waiting:
            await _say(task, fanout, run_, grace or GRACE_STOP)
        return await task
    finally:
        task.cancel()


async def _say(stopping: asyncio.Future[control.Stopped], fanout: Fanout, run_: control.RunRef, grace: float) -> None:
    """Print how long the ranks may take to end; ask a worker whether an earlier stop gave them a longer grace."""
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
    """Print the outcomes of runs that were stopped.

    Args:
        ended: The runs.
        as_json: Whether to print JSON.
        left: Run id -> open requests as `open_requests.settle` returns them; also for runs that are not in ``ended``.
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
    """Return the state of a run after the stop, or how it had ended before, as words to put after its id."""
    records_ = [outcome.record for outcome in stopped.outcomes if outcome.record]
    if not stopped.already:
        state = run_state(stopped.outcomes)
        # A run that is partly gone is not active any more, so it counts as stopped. A run of which no worker has a
        # record was not stopped by this command.
        is_stopped = state == "gone" and any(out.record or out.reason == NOT_ON for out in stopped.outcomes)
        return f": {'stopped' if is_stopped and exit_code(stopped.outcomes) == ExitCode.OK else state}"
    if not records_:
        return " is not running: none of its workers knows it (if it is only just being started, run this again):"
    began = any(record["began"] or record["attempt"] > 1 for record in records_)
    return " had already ended:" if began else " was given up before it began:"


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return the exit code: 0 if no rank is left, however the ranks have ended."""
    states = {outcome.state for outcome in outcomes}
    if "unreachable" in states:
        return ExitCode.UNREACHABLE
    stuck = any((outcome.record or {}).get("stuck") for outcome in outcomes)
    return ExitCode.FAILED if stuck or states & {"unknown", "starting", "running", "ending"} else ExitCode.OK
