"""Starts a run on all workers at once; where one refuses, those that started are stopped again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_ops.errors import ExitCode, OpsError
from tpu_ops.fleet.model import Worker
from tpu_ops.remote.fanout import Fanout
from tpu_ops.remote.replies import Reply
from tpu_ops.runs.spec import RunSpec

#: Seconds for each worker to have its command ready, a cold connection included.
LIMIT = 90.0


class NotStarted(OpsError):
    """The run is on no worker: at least one refused it."""

    def __init__(self, refused: Sequence[Reply], left: Sequence[Reply]) -> None:
        first = refused[0]
        fix = first.fix
        if left:
            names = ", ".join(f"{reply.host} ({reply.problem})" for reply in left)
            fix = f"it may still be on {names}: stop it there once they answer; {fix}"
        super().__init__(
            f"the run was not started: {first.problem}", where=", ".join(reply.host for reply in refused), fix=fix
        )
        self.refused = tuple(refused)
        if all(not reply.reached for reply in refused):
            self.exit_code = ExitCode.UNREACHABLE


async def start(fanout: Fanout, spec: RunSpec, workers: Sequence[Worker]) -> dict[str, Mapping[str, Any]]:
    """Start a run on these workers, whose order is the order of the ranks; return each worker's record.

    Raises:
        NotStarted: A worker refused or did not answer; the run was ended wherever it had started.
    """
    requests = {worker.host: {"spec": spec.for_rank(worker, rank, len(workers))} for rank, worker in enumerate(workers)}
    replies: dict[str, Reply] = {}
    try:
        await fanout.call(requests, "start", limit=LIMIT, done=lambda reply: replies.update({reply.host: reply}))
    except asyncio.CancelledError:
        await undo(fanout, spec, list(requests), "its start was interrupted")
        raise
    refused = [replies[host] for host in requests if not replies[host].ok]
    if refused:
        # A worker that did not answer in time may have started it all the same.
        doubtful = [host for host in requests if replies[host].ok or replies[host].kind in {"timeout", "unreachable"}]
        left = await undo(fanout, spec, doubtful, f"{refused[0].host} did not start: {refused[0].problem}")
        raise NotStarted(refused, left)
    return {host: reply.value["record"] for host, reply in replies.items()}


async def undo(fanout: Fanout, spec: RunSpec, hosts: Sequence[str], reason: str) -> list[Reply]:
    """End a run that did not start everywhere; return the workers where that could not be done."""
    request = {"run_id": spec.run_id, "kind": "failed", "reason": reason, "grace": spec.grace_failure}
    limit = spec.grace_failure + LIMIT
    replies = await fanout.call(dict.fromkeys(hosts, request), "stop", limit=limit)
    return [reply for reply in replies.values() if not reply.ok and reply.kind != "missing"]
