"""The automatic state changes of a queued resource.

The usual order is CREATING, ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING (the nodes are being created), ACTIVE. The
state becomes FAILED if the nodes cannot be created. It becomes SUSPENDING and then SUSPENDED after a node was preempted
or all nodes were deleted, and DELETING when a client deletes the queued resource.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from datetime import datetime
from typing import Any

from tpu_ops.lab.api import lifecycle
from tpu_ops.lab.api.errors import ApiError, Code
from tpu_ops.lab.api.operations import Undo
from tpu_ops.lab.api.records import NodeRecord, QueuedRecord
from tpu_ops.lab.api.service import Service
from tpu_ops.lab.api.wire import Json
from tpu_ops.lab.backend import BackendError


def become(
    service: Service, record: QueuedRecord, state: str, initiator: str = "SERVICE", error: Json | None = None
) -> Undo:
    """Set a queued resource's state; return a function that restores the old one, if the new one is still set."""
    before = (record.state, record.initiator, record.error)

    def undo() -> None:
        if record.state == state:
            become(service, record, *before)
            begun = [operation for operation in service.state.operations if operation.target == record.name]
            if record.state == "CREATING" and all(operation.done for operation in begun):
                # The creating operation found another state than CREATING and ended without effect: accept the queued
                # resource now.
                become(service, record, "ACCEPTED", "USER")
            if record.state in _STEPS and record.name not in service.running:
                set_out(service, record)

    record.state, record.since, record.initiator, record.error = state, time.time(), initiator, error
    record.touch()
    service.store.changed()
    return undo


def _fail(service: Service, record: QueuedRecord, failure: ApiError) -> None:
    become(service, record, "FAILED", error={"code": failure.code.number, "message": failure.message})


def nodes_of(service: Service, record: QueuedRecord) -> list[NodeRecord]:
    """Return the existing nodes that a queued resource has created."""
    found = (service.state.nodes.find(name) for name, _, _ in record.specs())
    return [node for node in found if node is not None and node.queued == record.name]


async def all_of(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently until all have ended; then raise the first error, if there was one."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for found in results:
        if isinstance(found, BaseException):
            raise found


async def remove_nodes(service: Service, record: QueuedRecord) -> None:
    """Remove all nodes of a queued resource."""
    nodes = nodes_of(service, record)
    for node in nodes:
        lifecycle.become(service, node, "DELETING")
    await service.store.settle()
    await all_of(lifecycle.remove(service, node) for node in nodes)


def resume(service: Service) -> None:
    """Continue the state changes after a start of the API; from now on, suspend active resources that lose nodes."""

    def lost(node: NodeRecord) -> None:
        record = service.state.queued.find(node.queued) if node.queued else None
        if record is None or record.state != "ACTIVE":
            return
        if node.state == "PREEMPTED" or not nodes_of(service, record):
            become(service, record, "SUSPENDING", "SERVICE" if node.state == "PREEMPTED" else "USER")
            set_out(service, record)

    service.on_lost = lost
    resetting = {operation.target for operation in service.state.operations if not operation.done}
    for record in service.state.queued:
        if record.state in _STEPS and not (record.state == "SUSPENDING" and record.name in resetting):
            set_out(service, record)


def set_out(service: Service, record: QueuedRecord) -> None:
    """Start the automatic state changes of a queued resource in the background."""
    service.spawn(record.name, _walk(service, record))


async def _walk(service: Service, record: QueuedRecord) -> None:
    """Change a queued resource's state step by step, until no automatic change is left or the resource is removed."""
    while (step := _STEPS.get(record.state)) is not None and service.state.queued.find(record.name) is record:
        state = record.state
        await service.store.settle()
        await asyncio.sleep(record.since + service.seconds - time.time())
        if record.state == state:
            await step(service, record)


def _times(record: QueuedRecord) -> tuple[float, float]:
    """Return the earliest and the latest time for creating a queued resource's nodes, in seconds since the epoch."""
    policy = record.body.get("queueingPolicy", {})
    created = _seconds(record.body["createTime"])
    interval = policy.get("validInterval", {})
    after, until = 0.0, float("inf")
    if "validAfterDuration" in policy:
        after = created + float(policy["validAfterDuration"].rstrip("s"))
    if start := policy.get("validAfterTime") or interval.get("startTime"):
        after = _seconds(start)
    if "validUntilDuration" in policy:
        until = created + float(policy["validUntilDuration"].rstrip("s"))
    if end := policy.get("validUntilTime") or interval.get("endTime"):
        until = _seconds(end)
    return after, until


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


async def _accepted(service: Service, record: QueuedRecord) -> None:
    become(service, record, "WAITING_FOR_RESOURCES")


async def _waiting(service: Service, record: QueuedRecord) -> None:
    after, until = _times(record)
    await service.next_declaration(_pause(min(max(after, _available(service, record)), until)))
    if record.state != "WAITING_FOR_RESOURCES":
        return
    if time.time() >= until:
        _fail(
            service,
            record,
            ApiError(
                Code.FAILED_PRECONDITION,
                "the valid interval of the queued resource ended before its nodes were created",
            ),
        )
    elif time.time() >= max(after, _available(service, record)):
        _provision(service, record)


def _available(service: Service, record: QueuedRecord) -> float:
    """Return when the zone has capacity for all nodes of a queued resource, in seconds since the epoch."""
    names = [node["acceleratorType"] for _, node, _ in record.specs()]
    return service.state.capacity.available(record.location.zone, names)


def _pause(end: float) -> float | None:
    """Return the seconds until a time, at least 0; None if the time is infinite."""
    return None if end == float("inf") else max(0.0, end - time.time())


def _provision(service: Service, record: QueuedRecord) -> None:
    """Add all nodes of a queued resource to the API's state; if one cannot be added, add none."""
    added: list[NodeRecord] = []
    try:
        for name, body, several in record.specs():
            added.append(
                lifecycle.add(service, name, {**body, "queuedResource": record.name, "multisliceNode": several})
            )
    except ApiError as failure:
        for node in added:
            lifecycle.forget(service, node)
        _fail(service, record, failure)
    else:
        become(service, record, "PROVISIONING")


async def _provisioning(service: Service, record: QueuedRecord) -> None:
    async def one(node: NodeRecord) -> None:
        async with service.lock(node.name):
            if node.state == "CREATING":
                await lifecycle.bring_up(service, node)

    failure: ApiError | None = None
    try:
        await all_of(one(node) for node in nodes_of(service, record))
    except ApiError as refused:
        failure = refused
    if record.state != "PROVISIONING":
        return
    if failure is None and len(nodes_of(service, record)) < len(record.specs()):
        failure = ApiError(Code.CANCELLED, "a node was deleted while it was being created")
    if failure is None:
        become(service, record, "ACTIVE")
    else:
        await _give_up(service, record, failure)


async def _give_up(service: Service, record: QueuedRecord, failure: ApiError) -> None:
    try:
        await remove_nodes(service, record)
    except BackendError as second:
        failure = ApiError(failure.code, f"{failure.message}; removing the nodes failed too: {second}")
    if record.state == "PROVISIONING":
        _fail(service, record, failure)


async def _suspending(service: Service, record: QueuedRecord) -> None:
    become(service, record, "SUSPENDED", record.initiator)


_STEPS = {
    "ACCEPTED": _accepted,
    "WAITING_FOR_RESOURCES": _waiting,
    "PROVISIONING": _provisioning,
    "SUSPENDING": _suspending,
}
