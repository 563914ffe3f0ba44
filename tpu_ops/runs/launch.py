"""Starts a run: first rank 0, the lock and meeting point; then worker 0 of each other slice; then all other workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpu_ops import texts
from tpu_ops.cloud.node import Worker, label_of
from tpu_ops.errors import ExitCode, OpsError, UsageError
from tpu_ops.runs import advice
from tpu_ops.runs.outcomes import GIVEN_UP
from tpu_ops.runs.spec import RunSpec
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

#: Seconds for each worker to answer in addition to the barrier's timeout, including a cold connection.
MARGIN = 45.0
#: Part of a launcher's refusal of options that it does not have.
_OTHER_VERSION = "differ from those of this version"


class NotStarted(OpsError):
    """No worker runs the command: at least one worker refused the start, or its answer was lost.

    Args:
        refused: The answers of the workers that refused the start or did not answer.
        doubtful: Workers on which a rank might still wait at the barrier.
        barrier: Seconds after which such a rank gives up.
        may_be_on: Whether the run might have begun in spite of the error.
    """

    def __init__(
        self, refused: Sequence[Reply], doubtful: Sequence[str] = (), barrier: float = 0.0, *, may_be_on: bool = False
    ) -> None:
        first = refused[0]
        hosts = [reply.host for reply in refused]
        fix = first.fix
        if _OTHER_VERSION in first.problem:
            nodes = ",".join(dict.fromkeys(map(label_of, hosts)))
            fix = f"the launcher there is of another version: tpu_ops configure {nodes} --tags launcher"
        if doubtful:
            fix = f"{fix}; " if fix else ""
            began = f"what this command started on {texts.folded(doubtful)}"
            fix += (
                f"{began} may still run: `tpu_ops who`"
                if may_be_on
                else f"{began} ends by itself within {barrier:.0f} s"
            )
        super().__init__(f"the run was not started: {first.problem}", where=texts.folded(hosts), fix=fix)
        self.refused = tuple(refused)
        self.may_be_on = may_be_on
        if all(not reply.reached for reply in refused):
            self.exit_code = ExitCode.UNREACHABLE


class Interrupted(asyncio.CancelledError):
    """The start was cancelled, and rank 0 was asked to give up the run.

    Args:
        may_be_on: Whether rank 0 could not be asked, so that the run might still begin.
    """

    def __init__(self, *, may_be_on: bool) -> None:
        super().__init__()
        self.may_be_on = may_be_on


async def start(fanout: Fanout, spec: RunSpec, workers: Sequence[Worker]) -> None:
    """Start a run on workers, given in the order of the ranks; return once the command runs on all of them.

    Raises:
        NotStarted: A worker refused or did not answer; the command was not executed on any worker.
        UsageError: The workers cannot reach each other.
        Interrupted: The start was cancelled.
        OSError: This machine failed, for example because it has no more processes. The command might have been
            executed.
    """
    if len(workers) > 1 and (bare := [worker.host for worker in workers if not worker.internal_ip]):
        what = f"the API lists no internal address for {bare[0]}"
        raise UsageError(what, where=texts.folded(bare), fix="`tpu_ops refresh`")
    # Before all workers have been asked, no rank can pass the barrier.
    all_asked = len(workers) == 1
    try:
        port = await _reserve(fanout, spec, workers)
        if len(workers) > 1:
            all_asked = True
            await _start_others(fanout, spec, workers, port)
    except asyncio.CancelledError:
        deaf = True
        # If the user interrupts again, it stays unknown whether rank 0 has given up the run.
        with contextlib.suppress(asyncio.CancelledError):
            deaf = _is_deaf(await _give_up(fanout, spec, workers[0].host, "its start was interrupted"))
        raise Interrupted(may_be_on=all_asked and deaf) from None
    except OSError:
        # For example, this machine cannot start another ssh process. If rank 0 can still be reached, tell it not to
        # wait.
        with contextlib.suppress(OSError):
            await _give_up(fanout, spec, workers[0].host, "the command that started the run failed")
        raise


def _leaders(workers: Sequence[Worker]) -> list[int]:
    """Return the leaders in the order of requests. A leader is the rank on worker 0 of a slice, and locks the slice.

    Every start asks in the order of the ranks, which is that of node ids. So of two starts with common slices, the
    start that gets the first common slice gets all of them, and succeeds. If every slice is a single worker, the last
    worker does not count as a leader.
    """
    found = [rank for rank, worker in enumerate(workers) if worker.index == 0]
    return found[:-1] if len(found) == len(workers) > 1 else found


async def _reserve(fanout: Fanout, spec: RunSpec, workers: Sequence[Worker]) -> int:
    """Reserve the leaders one after the other, or start a single rank; return the port of rank 0's supervisor.

    Raises:
        NotStarted: A leader refused or did not answer; rank 0 was asked to give up the run.
    """
    first, port = workers[0].host, 0
    for rank in _leaders(workers):
        host = workers[rank].host
        request = {"spec": spec.for_rank(workers, rank, port), "reserve": len(workers) > 1}
        reply = (await _call(fanout, spec, {host: request}))[host]
        if not reply.ok:
            # A worker whose answer was lost might be reserved for the run.
            silent, doubtful, stopped = _is_silent(reply), list[str](), None
            if rank > 0 or silent:
                reason = f"{host}: {reply.problem}" if rank > 0 else "the command that started the run got no answer"
                told = await _give_up(fanout, spec, first, reason)
                doubtful = [first] if _is_deaf(told) else []
                stopped = _stopped(spec.run_id, told)
            if rank > 0 and silent:
                doubtful.append(host)
            alone = len(workers) == 1 and bool(doubtful)
            raise NotStarted(stopped or _at_fault([reply], workers), doubtful, spec.barrier, may_be_on=alone)
        port = port or int(reply.value["record"]["port"])
    return port


async def _start_others(fanout: Fanout, spec: RunSpec, workers: Sequence[Worker], port: int) -> None:
    """Start all ranks that are not leaders; at the first failure, ask rank 0 to give up the run.

    Raises:
        NotStarted: A worker refused or did not answer; see `start`.
    """
    first, leaders = workers[0].host, _leaders(workers)
    requests = {
        worker.host: {"spec": spec.for_rank(workers, rank, port)}
        for rank, worker in enumerate(workers)
        if rank not in leaders
    }
    replies: dict[str, Reply] = {}
    giving_up: list[asyncio.Task[Reply]] = []

    def has_begun(reply: Reply) -> bool:
        """Return whether a worker that did not answer was ready: the success of another worker means that all were."""
        return _is_silent(reply) and any(other.ok for other in replies.values())

    def came(reply: Reply) -> None:
        replies[reply.host] = reply
        # Rank 0 might already know of the failure. Then the request waits until rank 0's worker is free again.
        if not reply.ok and not giving_up and not has_begun(reply):
            giving_up.append(asyncio.create_task(_give_up(fanout, spec, first, f"{reply.host}: {reply.problem}")))

    await _call(fanout, spec, requests, done=came)
    told = [await task for task in giving_up]
    doubtful = [reply.host for reply in told if _is_deaf(reply)]
    refused = [replies[host] for host in requests if not replies[host].ok]
    if refused and (giving_up or not all(map(has_begun, refused))):
        doubtful += [reply.host for reply in refused if _is_silent(reply)]
        # A lost answer might have reported that the run has begun. If rank 0 did not answer either, the run might be
        # active.
        lost = first in doubtful and any(map(_is_silent, refused))
        stopped = _stopped(spec.run_id, told[0]) if told else None
        raise NotStarted(stopped or _at_fault(refused, workers), doubtful, spec.barrier, may_be_on=lost)


async def _call(
    fanout: Fanout,
    spec: RunSpec,
    requests: Mapping[str, Mapping[str, Any]],
    done: Callable[[Reply], None] | None = None,
) -> dict[str, Reply]:
    return await fanout.call(requests, "start", limit=spec.barrier + MARGIN, done=done)


def _is_silent(reply: Reply) -> bool:
    return reply.kind in {"timeout", "unreachable"}


def _at_fault(refused: Sequence[Reply], workers: Sequence[Worker]) -> list[Reply]:
    """Return the refusals of the workers at fault. All other workers only report that those workers failed."""
    own = [reply for reply in refused if "blamed" not in reply.value]
    if own:
        return own
    blamed: dict[str, Reply] = {}
    for reply in refused:
        for host in (workers[rank].host for rank in reply.value["blamed"] if rank < len(workers)):
            # A worker's own report has the most details. A worker that became ready too late blames nobody.
            if host == reply.host or host not in blamed:
                blamed[host] = reply._replace(host=host)
    return [blamed[host] for host in sorted(blamed, key=texts.natural)] or list(refused)


def _stopped(run_id: str, told: Reply) -> list[Reply] | None:
    """Return a refusal that names the user who stopped the run; None if nobody stopped it.

    Rank 0 knows the user. A worker that became ready too late only knows that rank 0 no longer listens.

    Args:
        run_id: The run.
        told: Rank 0's answer to the request to give up the run; its record names the user.
    """
    who = (told.value.get("record") or {}).get("stop_requested_by") if told.ok else ""
    if not who:
        return None
    return [told._replace(kind="failed", problem=f"run {run_id} was stopped by {who}", fix=advice.STOPPED)]


def _is_deaf(told: Reply) -> bool:
    """Return whether rank 0 could not give up the run, given its answer to this request."""
    return not told.ok and told.kind != "missing"


async def _give_up(fanout: Fanout, spec: RunSpec, first: str, reason: str) -> Reply:
    """Ask rank 0 to give up a run that has not begun; return its answer."""
    # The request names the attempt, so that the record of an earlier attempt does not count as the end of this attempt.
    request = {"run_id": spec.run_id, "attempt": spec.attempt, "reason": GIVEN_UP + reason, "grace": spec.grace_failure}
    limit = spec.grace_failure + MARGIN
    return (await fanout.call({first: request}, "stop", limit=limit))[first]
