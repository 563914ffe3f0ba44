"""Stop a run for good: end its recovery on this machine, stop its ranks, and close its record."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_ops import texts
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.errors import HostError, OpsError
from tpu_ops.fleet import contact, view
from tpu_ops.runs import control, endings, nodes, records, recovery
from tpu_ops.runs.outcomes import Outcome, newest_records, of_refused, run_state
from tpu_ops.runs.spec import GRACE_STOP
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.renewal import in_thread
from tpu_ops.ssh.replies import Reply

#: The reason in the outcomes of a run that is stopped between two attempts.
NOT_ON = "no attempt was running"
#: Seconds after which a stop logs a message that it is waiting.
MOMENT = 1.0
#: Seconds to wait for a worker's answer on the grace of an earlier stop.
LOOK_LIMIT = 5.0
#: Seconds after the beginning of a start within which a worker has to know the run, and seconds between two checks.
STARTING, AGAIN = 10.0, 0.5
#: Seconds to wait for a process of this machine that is bringing a run's nodes back.
RECOVERY_LIMIT = 30.0
#: Seconds to wait for a process of this machine that recovers a run, once no rank of the run is left.
ENDING_LIMIT = 3.0

_log = logging.getLogger(__name__)


async def end_named(
    fleet: view.Fleet, word: str, *, force: bool = False, grace: float | None = None
) -> tuple[list[tuple[control.RunRef, control.Stopped]], OpsError | None]:
    """Stop the runs that a word names, and their recoveries on this machine.

    Args:
        fleet: The fleet.
        word: A run id, or a target, which stands for the runs on it.
        force: Whether to stop runs of other users.
        grace: Seconds from SIGTERM until SIGKILL; None for the default.

    Returns:
        The stopped runs, and the first error, if any.
    """
    fanout, state_dir, begun = contact.fanout(fleet), fleet.settings.state_dir, time.time()
    unheard = recovery.not_begun(state_dir, word) or (
        # The run's nodes were taken away during its first start.
        recovery.is_kept(state_dir, word) and records.read(state_dir, word) is None
    )
    kept = unheard and not control.is_target(fleet, word)
    # No worker knows the run. If the recovery has just started it after all, the code below stops it like any run.
    if kept and (await _not_again(state_dir, word) or not recovery.is_kept(state_dir, word)):
        _log.info("run %s: it had not begun, and will not be started", word)
        return [], None
    found = await control.find(fleet, fanout, word)
    ended = await asyncio.gather(
        *(end_with_recovery(fleet, fanout, run, begun, force=force, grace=grace) for run in found.runs)
    )
    problem = next((problem for _, problem in ended if problem), None)
    asked = [(run, stopped) for run, (stopped, _) in zip(found.runs, ended, strict=True) if not stopped.refusal]
    return asked, problem or found.problem()


async def end_with_recovery(
    fleet: view.Fleet,
    fanout: Fanout,
    run_: control.RunRef,
    begun: float,
    *,
    force: bool = False,
    grace: float | None = None,
) -> tuple[control.Stopped, OpsError | None]:
    """Stop one run and its recovery on this machine; return the error if the recovery may start the run again.

    Args:
        fleet: The fleet.
        fanout: The connections to the workers.
        run_: The run.
        begun: When this process first asked the workers (seconds since 1970).
        force: Whether to stop the run of another user.
        grace: Seconds from SIGTERM until SIGKILL; None for the default.
    """
    state_dir = fleet.settings.state_dir
    off, deaf, again = False, None, recovery.is_kept(state_dir, run_.run_id)
    if records.is_of(state_dir, run_.run_id, run_.hosts, fleet.workers):
        last = 0
        with contextlib.suppress(OpsError):
            last = recovery.read(state_dir, run_.run_id).attempt if again else 0
        try:
            idle = await _not_again(state_dir, run_.run_id)
            # Another machine may also recover the run, and may have started a newer attempt.
            off = idle and await _newest(fleet, fanout, run_) <= last
        except OpsError as exc:
            deaf = exc
    if off:
        _log.info("run %s: its nodes were being brought back; it will not be started again", run_.run_id)
        records.close(state_dir, run_.run_id, endings.STOPPED)
        gone = (Outcome(rank, host, "gone", reason=NOT_ON) for rank, host in enumerate(run_.hosts))
        return control.Stopped(tuple(gone), already=False), None
    stopped = await end(fanout, run_, force=force, grace=grace)
    while _is_starting(state_dir, run_, fleet.workers, stopped):
        await asyncio.sleep(AGAIN)
        stopped = await end(fanout, run_, force=force, grace=grace)
    if stopped.refusal:
        return stopped, not_theirs(run_, stopped.outcomes, stopped.refusal)
    known = nodes.without_nodes(fleet, run_.run_id, stopped.outcomes, begun)
    stopped = stopped._replace(outcomes=tuple(of_refused(known)))
    if records.is_of(state_dir, run_.run_id, run_.hosts, fleet.workers):
        records.close(state_dir, run_.run_id, run_state(stopped.outcomes), outcomes=stopped.outcomes)
        if not off and is_ended(stopped.outcomes):
            await _none_left(state_dir, run_.run_id)
            if again and not recovery.is_kept(state_dir, run_.run_id):
                _log.info("run %s: its recovery is over; it will not be started again", run_.run_id)
    if deaf and not stopped.already:
        # The process that recovers the run learns from the workers that the run was stopped.
        _log.warning("run %s: %s; its workers were told to stop anyway", run_.run_id, deaf)
    if not deaf or not stopped.already:
        return stopped, None
    what = (
        "the process on this machine that recovers the run could not be told to stop, and may start the run again: "
        f"{deaf.what}"
    )
    fix = f"end that process with Ctrl-C, or check that the disk has space (df); repeat `tpu_ops stop {run_.run_id}`"
    return stopped, OpsError(what, where=f"run {run_.run_id}, {deaf.where}", fix=fix)


def not_theirs(run_: control.RunRef, outcomes: Sequence[Outcome], refusal: Reply) -> OpsError:
    """Return the error for a user who is not allowed to stop a run."""
    since = min((record["since"] for record in newest_records(outcomes)), default=None)
    where = texts.folded(run_.hosts) + (f", active since {texts.at(since)}" if since else "")
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
        _log.warning("run %s: %s", run_id, what)
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
    """Stop the ranks of one run; log a message if this takes longer than MOMENT seconds."""
    task = asyncio.ensure_future(control.stop(fanout, run_, force=force, grace=grace))
    try:
        _, waiting = await asyncio.wait({task}, timeout=MOMENT)
        if waiting:
            await _say(task, fanout, run_, grace or GRACE_STOP)
        return await task
    finally:
        task.cancel()


async def _say(stopping: asyncio.Future[control.Stopped], fanout: Fanout, run_: control.RunRef, grace: float) -> None:
    """Log how long the ranks may take to end; ask a worker whether an earlier stop gave them a longer grace."""
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
    _log.info("run %s: %s", run_.run_id, text)


def is_ended(outcomes: Sequence[Outcome]) -> bool:
    """Return whether no rank of a run is left, however the ranks have ended."""
    left = {"unreachable", "unknown", "starting", "running", "ending"}
    return not any(outcome.state in left or (outcome.record or {}).get("stuck") for outcome in outcomes)
