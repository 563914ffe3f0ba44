"""Preempts spot nodes in the background, at the rate that the lab's capacity declares."""

from __future__ import annotations

import contextlib
import time

from tpu_ops.lab.api import nodes
from tpu_ops.lab.api.capacity import is_spot
from tpu_ops.lab.api.errors import ApiError
from tpu_ops.lab.api.service import Service

#: Longest pause in seconds: nodes that became READY meanwhile are noticed after it.
_LONGEST_PAUSE = 0.5


def resume(service: Service) -> None:
    """Begin to preempt spot nodes, and end with the service."""
    service.spawn("preemptions", _preempt(service))


async def _preempt(service: Service) -> None:
    while True:
        pause = await _preempt_due(service) if service.state.capacity.per_hour else None
        await service.next_declaration(pause)


async def _preempt_due(service: Service) -> float:
    """Preempt the spot nodes whose lifetime is over; return the seconds until the next look."""
    pause = _LONGEST_PAUSE
    for node in [node for node in service.state.nodes if node.state == "READY" and is_spot(node.body)]:
        left = service.state.capacity.preemption(node) - time.time()
        if left > 0:
            pause = min(pause, left)
            continue
        service.state.capacity = service.state.capacity.count_preemption(node.name)
        # An error means that the node has changed its state meanwhile, or that the state file cannot be written.
        with contextlib.suppress(ApiError):
            await nodes.preempt(service, node.name)
    return pause
