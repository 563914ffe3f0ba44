"""The lifecycle of nodes: the operations that boot, halt, renumber and remove their workers.

Every effect may be repeated after a restart in the middle. It checks the node's state and its own notes in the
operation's arguments, and calls the backend's idempotent methods again.
"""

from __future__ import annotations

import contextlib
import logging
import time

from tpu_ops.lab.api.errors import ApiError, Code, already_exists, precondition
from tpu_ops.lab.api.operations import EMPTY, Undo, effect, result
from tpu_ops.lab.api.records import NodeRecord, OperationRecord, timestamp
from tpu_ops.lab.api.service import Service
from tpu_ops.lab.api.wire import Json
from tpu_ops.lab.backend import BackendError, disk_resource


def add(service: Service, name: str, body: Json) -> NodeRecord:
    """Add a new node with addresses to the state, in state CREATING.

    Raises:
        ApiError: ALREADY_EXISTS; RESOURCE_EXHAUSTED if the lab's networks have no free addresses; FAILED_PRECONDITION
            if another node has one of its disks.
    """
    state = service.state
    if name in state.nodes:
        raise already_exists(name)
    body = {**body, "id": state.new_node_id(), "createTime": timestamp(time.time())}
    record = NodeRecord(name, body, "CREATING", [], [])
    check_disks(service, record, body)
    workers = record.accelerator.workers
    record.internal_ips = state.internal.take(workers)
    try:
        record.external_ips = _take_external(service, record)
    except ApiError:
        state.internal.release(record.internal_ips)
        raise
    service.store.changed()
    return state.nodes.add(record)


def check_disks(service: Service, record: NodeRecord, wanted: Json) -> None:
    """Reject data disks that another node has, unless both have them READ_ONLY.

    Raises:
        ApiError: FAILED_PRECONDITION. Also for a disk that the node itself has in the other mode.
    """
    asked = {disk_resource(disk["sourceDisk"]): disk for disk in wanted.get("dataDisks", [])}
    for node in service.state.nodes if asked else ():
        for disk in node.body.get("dataDisks", []):
            mine = asked.get(disk_resource(disk["sourceDisk"]))
            if mine is None or {mine.get("mode"), disk.get("mode")} == {"READ_ONLY"}:
                continue
            if node is not record:
                mode = "READ_ONLY" if disk.get("mode") == "READ_ONLY" else "READ_WRITE"
                raise precondition(
                    f"disk {disk['sourceDisk']} is attached to node {node.name} in mode {mode}; "
                    "several nodes may have it only if all have it READ_ONLY"
                )
            if "READ_ONLY" in (mine.get("mode"), disk.get("mode")):
                raise precondition(
                    f"disk {disk['sourceDisk']} is attached in the other mode: detach it, then attach it again"
                )


def become(service: Service, record: NodeRecord, state: str, health: str = "", description: str = "") -> Undo:
    """Set a node's state; return a function that restores the old one, unless the state has changed since."""
    before = (record.state, record.health, record.health_description)

    def undo() -> None:
        if record.state == state:
            become(service, record, *before)

    record.state, record.health, record.health_description = state, health, description
    record.touch()
    service.store.changed()
    return undo


async def ask(service: Service, record: NodeRecord, action: str) -> None:
    """Call a method of the backend for all workers of a node.

    Raises:
        BackendError: The method failed, with any exception.
    """
    try:
        await getattr(service.backend, action)(record.workers())
    except BackendError:
        raise
    except Exception as failure:
        logging.getLogger(__name__).exception("%s of the workers of %s failed", action, record.name)
        raise BackendError(f"{type(failure).__name__}: {failure}") from failure


def renew_external(service: Service, record: NodeRecord) -> None:
    """Give a node's workers new external addresses; the old ones become free."""
    old = record.external_ips
    record.external_ips = _take_external(service, record)
    service.state.external.release(old)
    record.touch()
    service.store.changed()


def _take_external(service: Service, record: NodeRecord) -> list[str]:
    count = len(record.internal_ips)
    return service.state.external.take(count) if record.wants_external else [""] * count


def drop_external(service: Service, record: NodeRecord) -> None:
    """Release a node's external addresses, for example when it is stopped."""
    service.state.external.release(record.external_ips)
    record.external_ips = [""] * len(record.internal_ips)
    record.touch()
    service.store.changed()


def forget(service: Service, record: NodeRecord) -> None:
    """Remove a node from the state and release its addresses."""
    service.state.nodes.remove(record.name)
    service.state.internal.release(record.internal_ips)
    service.state.external.release(record.external_ips)
    service.store.changed()
    service.lost(record)


def _target(service: Service, operation: OperationRecord) -> NodeRecord:
    """Return the node on which the operation was started.

    Raises:
        ApiError: CANCELLED; the node was deleted, and another one may have its name.
    """
    record = service.state.nodes.find(operation.target)
    if record is None or record.body["id"] != operation.args["id"]:
        raise ApiError(Code.CANCELLED, f"node {operation.target} was deleted meanwhile")
    return record


def _arrive(service: Service, record: NodeRecord, underway: str, state: str, health: str = "") -> None:
    """Set the final state of an operation's node, unless the node is being deleted.

    Raises:
        ApiError: CANCELLED.
    """
    if record.state != underway:
        raise ApiError(Code.CANCELLED, f"node {record.name} is {record.state} meanwhile")
    become(service, record, state, health)


async def bring_up(service: Service, record: NodeRecord) -> None:
    """Boot the workers of a node that is being created and set it READY; the caller holds the node's lock.

    Raises:
        ApiError: INTERNAL; they did not boot, and the node was removed (or is listed as UNKNOWN if removing its workers
            failed too). CANCELLED; the node is being deleted.
    """
    try:
        await ask(service, record, "boot")
    except BackendError as failure:
        await abandon(service, record)
        raise ApiError(Code.INTERNAL, f"node {record.name} could not be created: {failure}") from failure
    _arrive(service, record, "CREATING", "READY", "HEALTHY")


async def abandon(service: Service, record: NodeRecord) -> None:
    """Undo a creation; if that fails, the node stays listed."""
    try:
        await ask(service, record, "remove")
    except BackendError as failure:
        become(service, record, "UNKNOWN", "TIMEOUT", f"its creation failed, and so did removing it: {failure}")
    else:
        forget(service, record)


async def remove(service: Service, record: NodeRecord) -> None:
    """Remove a node and its workers. If that fails, the node stays listed, so that it can be tried again.

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
        # Store the workers' new addresses before the workers use them.
        await service.store.flush()
        await ask(service, record, "boot")
    except (ApiError, BackendError) as failure:
        become(service, record, "UNKNOWN", "TIMEOUT", f"its workers did not boot: {failure}")
        raise


async def maintain(service: Service, record: NodeRecord, operation: OperationRecord) -> None:
    """Halt a node's workers, give them new external addresses, and boot them again; the caller holds the lock."""
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
    """Boot the workers of nodes that should be running: they may have stopped while the API was down."""

    async def mind(record: NodeRecord) -> None:
        async with service.lock(record.name):
            if record.state == "READY":
                with contextlib.suppress(ApiError, BackendError):  # the node's state is then UNKNOWN, with the reason
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


def _change(service: Service, record: NodeRecord, body: Json, numbers: dict[str, int] | None = None) -> None:
    record.body, record.disk_numbers = body, record.disk_numbers if numbers is None else numbers
    record.number_disks()
    record.touch()
    service.store.changed()


@effect("update")
async def _update(service: Service, operation: OperationRecord) -> Json:
    record = _target(service, operation)
    async with service.lock(record.name):
        wanted, before, numbers = operation.args["changes"], record.body, record.disk_numbers
        check_disks(service, record, wanted)
        _change(service, record, {**before, **wanted})
        try:
            await service.store.flush()
        except ApiError:
            _change(service, record, before, numbers)
            raise
        if "dataDisks" in wanted or ("metadata" in wanted and record.state == "READY"):
            try:
                await ask(service, record, "publish")
            except BackendError:
                _change(service, record, {**record.body, "dataDisks": before.get("dataDisks", [])}, numbers)
                with contextlib.suppress(BackendError):  # detaches the disks that were attached before the failure
                    await ask(service, record, "publish")
                raise
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
