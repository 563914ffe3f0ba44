"""Starts a run: rank 0's worker first, whose supervisor is the lock and the meeting point; then all others at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpu_ops.errors import ExitCode, OpsError, UsageError
from tpu_ops.fleet.model import Worker
from tpu_ops.remote.fanout import Fanout
from tpu_ops.remote.replies import Reply
from tpu_ops.runs.spec import RunSpec

#: Seconds for each worker to answer beyond the barrier's own, a cold connection included.
MARGIN = 45.0


class NotStarted(OpsError):
    """The run is on no worker: at least one refused it."""

    def __init__(self, refused: Sequence[Reply], doubtful: Sequence[str] = (), barrier: float = 0.0) -> None:
        first = refused[0]
        fix = first.fix
        if doubtful:
            fix = f"{fix}; " if fix else ""
            fix += f"what was started on {', '.join(doubtful)} ends by itself within {barrier:.0f} s"
        super().__init__(
            f"the run was not started: {first.problem}", where=", ".join(reply.host for reply in refused), fix=fix
        )
        self.refused = tuple(refused)
        if all(not reply.reached for reply in refused):
            self.exit_code = ExitCode.UNREACHABLE


async def start(fanout: Fanout, spec: RunSpec, workers: Sequence[Worker]) -> None:
    """Start a run on these workers, whose order is the order of the ranks; return once the command runs on all.

    Raises:
        NotStarted: A worker refused or did not answer; the command was executed nowhere.
        UsageError: The workers cannot reach each other.
    """
    if len(workers) > 1 and (bare := [worker.host for worker in workers if not worker.internal_ip]):
        what = f"the API lists no internal address of {bare[0]}"
        raise UsageError(what, where=", ".join(bare), fix="`tpu_ops refresh`")
    limit = spec.barrier + MARGIN
    first = workers[0].host
    try:
        reply = (await fanout.call({first: {"spec": spec.for_rank(workers, 0)}}, "start", limit=limit))[first]
        if not reply.ok:
            # A worker that did not answer in time may have begun to wait for the others all the same.
            doubtful = await _give_up(fanout, spec, first, "its starter heard nothing") if _is_silent(reply) else []
            raise NotStarted([reply], doubtful, spec.barrier)
        if len(workers) > 1:
            await _start_others(fanout, spec, workers, reply.value["record"])
    except asyncio.CancelledError:
        await _give_up(fanout, spec, first, "its start was interrupted")
        raise


async def _start_others(fanout: Fanout, spec: RunSpec, workers: Sequence[Worker], reserved: Mapping[str, Any]) -> None:
    """Start all ranks but 0; the first one that cannot be started makes rank 0 give the run up.

    Raises:
        NotStarted: As of `start`.
    """
    first, port = workers[0].host, int(reserved["port"])
    requests = {
        worker.host: {"spec": spec.for_rank(workers, rank, port)} for rank, worker in enumerate(workers) if rank > 0
    }
    replies: dict[str, Reply] = {}
    giving_up: list[asyncio.Task[list[str]]] = []

    def came(reply: Reply) -> None:
        replies[reply.host] = reply
        # Rank 0 may know already; then this waits until its worker is free again.
        if not reply.ok and not giving_up:
            giving_up.append(asyncio.create_task(_give_up(fanout, spec, first, f"{reply.host}: {reply.problem}")))

    await fanout.call(requests, "start", limit=spec.barrier + MARGIN, done=came)
    doubtful = [name for task in giving_up for name in await task]
    refused = [replies[host] for host in requests if not replies[host].ok]
    if refused:
        doubtful += [reply.host for reply in refused if _is_silent(reply)]
        raise NotStarted(_at_fault(refused, workers), doubtful, spec.barrier)


def _is_silent(reply: Reply) -> bool:
    return reply.kind in {"timeout", "unreachable"}


def _at_fault(refused: Sequence[Reply], workers: Sequence[Worker]) -> list[Reply]:
    """Given all refusals, return those of the workers at fault; the others only tell of them."""
    own = [reply for reply in refused if "blamed" not in reply.value]
    if own:
        return own
    blamed = {workers[rank].host for reply in refused for rank in reply.value["blamed"] if rank < len(workers)}
    return [replace(refused[0], host=host) for host in sorted(blamed)] or list(refused)


async def _give_up(fanout: Fanout, spec: RunSpec, first: str, reason: str) -> list[str]:
    """Let rank 0 give up a run that has not begun; return where that could not be done."""
    request = {"run_id": spec.run_id, "reason": f"not started: {reason}", "grace": spec.grace_failure}
    limit = spec.grace_failure + MARGIN
    reply = (await fanout.call({first: request}, "stop", limit=limit))[first]
    return [] if reply.ok or reply.kind == "missing" else [first]
