"""`tpu_ops` with a start that no controller should have: it asks the workers from the last to the first, at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tpu_ops.cli import main
from tpu_ops.cloud.node import Worker
from tpu_ops.host.environment import PORTS
from tpu_ops.runs import launch
from tpu_ops.runs.spec import RunSpec
from tpu_ops.ssh.fanout import Fanout


async def start(fanout: Fanout, spec: RunSpec, workers: Sequence[Worker]) -> None:
    """Start a run in the place of `launch.start`: every rank expects rank 0 at the first port."""
    requests = {
        worker.host: {"spec": spec.for_rank(workers, rank, PORTS[0] if rank else 0)}
        for rank, worker in reversed(list(enumerate(workers)))
    }
    replies = await fanout.call(requests, "start", limit=spec.barrier + launch.MARGIN)
    refused = sorted((reply for reply in replies.values() if not reply.ok), key=lambda reply: reply.kind != "held")
    if refused:
        await fanout.call({host: {"run_id": spec.run_id} for host in requests}, "stop", limit=launch.MARGIN)
        raise launch.NotStarted(refused)


if __name__ == "__main__":
    launch.start = start
    sys.exit(main.main())
