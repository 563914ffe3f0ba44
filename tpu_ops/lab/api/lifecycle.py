"""What happens to nodes: the operations that boot, halt, renumber and remove their workers.

Every effect may be called again after a restart in the middle; it looks at the node's state and at what it noted
in the operation's arguments, and asks the backend again, whose methods are idempotent.
"""

from __future__ import annotations

import contextlib
import logging
import time

from tpu_ops.lab.api.errors import ApiError, Code, already_exists
from tpu_ops.lab.api.operations import EMPTY, Undo, effect, result
from tpu_ops.lab.api.records import NodeRecord, OperationRecord, timestamp
from tpu_ops.lab.api.service import Service
from tpu_ops.lab.api.wire import Json
from tpu_ops.lab.backend import BackendError


def add(service: Service, name: str, body: Json) -> NodeRecord:
    """Take a new node into the state, with addresses, in state CREATING.

    Raises:
        ApiError: ALREADY_EXISTS, or RESOURCE_EXHAUSTED where the lab's networks have no addresses left.
    """
    state = service.state
    if name in state.nodes:
        raise already_exists(name)
    body = {**body, "id": state.new_node_id(), "createTime": timestamp(time.time())}
    record = NodeRecord(name, body, "CREATING", [], [])
    workers = record.accelerator.workers
    record.internal_ips = state.internal.take(workers)
    try:
        record.external_ips = _take_external(service, record)
    except ApiError:
        state.internal.release(record.internal_ips)
        raise
    service.store.changed()
    return state.nodes.add(record)


def become(service: Service, record: NodeRecord, state: str, health: str = "", description: str = "") -> Undo:
    """Put a node into a state and return what puts it back, unless it went on to another one meanwhile."""
    before = (record.state, record.health, record.health_description)

    def undo() -> None:
        if record.state == state:
            become(service, record, *before)

    record.state, record.health, record.health_description = state, health, description
    record.touch()
    service.store.changed()
    return undo


async def ask(service: Service, record: NodeRecord, action: str) -> None:
    """Ask the backend to do something with all workers of a node.

    Raises:
        BackendError: It failed, in whatever way.
    """
    try:
        await getattr(service.backend, action)(record.workers())
    except BackendError:
        raise
    except Exception as failure:
        logging.getLogger(__name__).exception("%s of the workers of %s failed", action, record.name)
        raise BackendError(f"{type(failure).__name__}: {failure}") from failure


def renew_external(service: Service, record: NodeRecord) -> None:
    """Give a node's workers external addresses that they did not have before; the old ones become free."""
    old = record.external_ips
    record.external_ips = _take_external(service, record)
    service.state.external.release(old)
    record.touch()
    service.store.changed()


def _take_external(service: Service, record: NodeRecord) -> list[str]:
    count = len(record.internal_ips)
    return service.state.external.take(count) if record.wants_external else [""] * count


def drop_external(service: Service, record: NodeRecord) -> None:
    """Take a node's external addresses away, as from one that is stopped."""
    service.state.external.release(record.external_ips)
    record.external_ips = [""] * len(record.internal_ips)
    record.touch()
    service.store.changed()


def forget(service: Service, record: NodeRecord) -> None:
    """Take a node out of the state and give its addresses back."""
    service.state.nodes.remove(record.name)
    service.state.internal.release(record.internal_ips)
    service.state.external.release(record.external_ips)
    service.store.changed()
    service.lost(record)


def _target(service: Service, operation: OperationRecord) -> NodeRecord:
    """Return the very node that the operation was begun on.

    Raises:
        ApiError: CANCELLED; it is gone, or another one stands under its name.
    """
    record = service.state.nodes.find(operation.target)
    if record is None or record.body["id"] != operation.args["id"]:
        raise ApiError(Code.CANCELLED, f"node {operation.target} was deleted meanwhile")
    return record


def _arrive(service: Service, record: NodeRecord, underway: str, state: str, health: str = "") -> None:
    """Put a node into the state that an operation ends in, unless a deletion came in between.

    Raises:
        ApiError: CANCELLED.
    """
    if record.state != underway:
        raise ApiError(Code.CANCELLED, f"node {record.name} is {record.state} meanwhile")
    become(service, record, state, health)


async def bring_up(service: Service, record: NodeRecord) -> None:
    """Boot the workers of a node that is being created and make it READY; the caller holds the node's lock.

    Raises:
        ApiError: INTERNAL; they did not boot, and the node is gone (or stays listed as UNKNOWN where removing what
            had come up failed too). CANCELLED; the node is being deleted.
    """
    try:
        await ask(service, record, "boot")
    except BackendError as failure:
        await abandon(service, record)
        raise ApiError(Code.INTERNAL, f"node {record.name} could not be created: {failure}") from failure
    _arrive(service, record, "CREATING", "READY", "HEALTHY")


async def abandon(service: Service, record: NodeRecord) -> None:
    """Undo a creation; what cannot be undone stays listed."""
    try:
        await ask(service, record, "remove")
    except BackendError as failure:
        become(service, record, "UNKNOWN", "TIMEOUT", f"its creation failed, and so did removing it: {failure}")
    else:
        forget(service, record)


async def remove(service: Service, record: NodeRecord) -> None:
    """Remove a node and its workers. Where that fails the node stays listed, so that it can be tried again.

    Raises:
        BackendError: A worker could not be removed.
    """
    async with service.lock(record.name):
        if service.state.nodes.find(record.name) is not record:
            return
        try:
            await ask(service, record, "remove")
        except BackendError as failure:
            become(service, record, "UNKNOWN", "TIMEOUT", f"removing it failed: {failure}")
            raise
        forget(service, record)
    service.unlock(record.name)


async def _halt(service: Service, record: NodeRecord) -> None:
    try:
        await ask(service, record, "halt")
    except BackendError as failure:
        become(service, record, "UNKNOWN", "TIMEOUT", f"halting its workers failed: {failure}")
        raise


async def _boot(service: Service, record: NodeRecord) -> None:
    try:
        # The addresses that the workers boot under must outlive this process.
        await service.store.flush()
        await ask(service, record, "boot")
    except (ApiError, BackendError) as failure:
        become(service, record, "UNKNOWN", "TIMEOUT", f"its workers did not boot: {failure}")
        raise


async def maintain(service: Service, record: NodeRecord, operation: OperationRecord) -> None:
    """Halt a node's workers, give them new external addresses, boot them again; the caller holds the lock."""
    if record.state != "REPAIRING":
        return
    await _halt(service, record)
    renewed = operation.args.setdefault("renewed", [])
    if record.name not in renewed:
        renew_external(service, record)
        renewed.append(record.name)
        operation.touch()
    await _boot(service, record)
    _arrive(service, record, "REPAIRING", "READY", "HEALTHY")


def resume(service: Service) -> None:
    """Boot the workers of nodes that should be running: they may have gone down while no API served."""

    async def mind(record: NodeRecord) -> None:
        async with service.lock(record.name):
            if record.state == "READY":
                with contextlib.suppress(ApiError, BackendError):  # the node says it: UNKNOWN, with the reason
                    await _boot(service, record)

    for record in service.state.nodes:
        if record.state == "READY":
            service.spawn(record.name, mind(record))


@effect("create")
async def _create(service: Service, operation: OperationRecord) -> Json:
    record = _target(service, operation)
    async with service.lock(record.name):
        if record.state == "CREATING":
            if not operation.cancel_requested:
                await bring_up(service, record)
            if operation.cancel_requested:
                await abandon(service, record)
                raise ApiError(Code.CANCELLED, f"the creation of node {record.name} was cancelled")
    return result(operation.api, "Node", _target(service, operation))


@effect("delete")
async def _delete(service: Service, operation: OperationRecord) -> Json:
    record = service.state.nodes.find(operation.target)
    if record is not None and record.body["id"] == operation.args["id"]:
        await remove(service, record)
    return EMPTY


@effect("stop")
async def _stop(service: Service, operation: OperationRecord) -> Json:
    record = _target(service, operation)
    async with service.lock(record.name):
        if record.state == "STOPPING":
            await _halt(service, record)
            _arrive(service, record, "STOPPING", "STOPPED")
            drop_external(service, record)
    return result(operation.api, "Node", record)


@effect("start")
async def _start(service: Service, operation: OperationRecord) -> Json:
    record = _target(service, operation)
    async with service.lock(record.name):
        if record.state == "STARTING":
            await _boot(service, record)
            _arrive(service, record, "STARTING", "READY", "HEALTHY")
    return result(operation.api, "Node", record)


@effect("simulateMaintenanceEvent")
async def _maintenance(service: Service, operation: OperationRecord) -> Json:
    record = _target(service, operation)
    async with service.lock(record.name):
        await maintain(service, record, operation)
    return result(operation.api, "Node", record)


@effect("update")
async def _update(service: Service, operation: OperationRecord) -> Json:
    record = _target(service, operation)
    async with service.lock(record.name):
        wanted, before = operation.args["changes"], record.body
        record.body = {**before, **wanted}
        record.touch()
        service.store.changed()
        try:
            await service.store.flush()
        except ApiError:
            record.body = before
            record.touch()
            raise
        if "metadata" in wanted and record.state == "READY":
            await ask(service, record, "publish")
        if record.state == "READY" and record.wants_external != any(record.external_ips):
            become(service, record, "RESTARTING")
        if record.state == "RESTARTING":
            await _halt(service, record)
            renew_external(service, record)
            await _boot(service, record)
            _arrive(service, record, "RESTARTING", "READY", "HEALTHY")
    return result(operation.api, "Node", record)


@effect("preempt")
async def _preempt(service: Service, operation: OperationRecord) -> Json:
    record = _target(service, operation)
    async with service.lock(record.name):
        if record.state == "PREEMPTED":
            await ask(service, record, "kill")
            drop_external(service, record)
            service.lost(record)
    return result(operation.api, "Node", record)
