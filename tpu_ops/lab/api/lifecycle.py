"""The lifecycle of nodes: the operations that create, start, stop, update, maintain, preempt and delete nodes.

If a restart of the API interrupts an operation, the operation is executed again from the beginning. Its function
therefore checks the node's state and the arguments that are stored with the operation; the backend's methods are
idempotent.
"""

from __future__ import annotations

import contextlib
import logging
import time

from tpu_ops.lab.api.capacity import check_quota
from tpu_ops.lab.api.errors import ApiError, Code, already_exists, precondition
from tpu_ops.lab.api.operations import EMPTY, Undo, effect, result
from tpu_ops.lab.api.records import NodeRecord, OperationRecord, timestamp
from tpu_ops.lab.api.service import Service
from tpu_ops.lab.api.wire import Json
from tpu_ops.lab.backend import BackendError, disk_resource


def add(service: Service, name: str, body: Json) -> NodeRecord:
    """Add a node in state CREATING to the API's state, and assign addresses to its workers.

    Raises:
        ApiError: ALREADY_EXISTS; RESOURCE_EXHAUSTED if the project has no quota or the lab's networks have no free
            addresses; FAILED_PRECONDITION if another node uses one of the node's disks.
    """
    state = service.state
    if name in state.nodes:
        raise already_exists(name)
    body = {**body, "id": state.new_node_id(), "createTime": timestamp(time.time())}
    record = NodeRecord(name, body, "CREATING", [], [])
    check_disks(service, record, body)
    # A queued resource has used quota for its nodes since it was requested.
    if not record.queued:
        check_quota(state, record.location, [body])
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
    """Reject data disks that are attached to another node, unless both nodes use them READ_ONLY.

    Raises:
        ApiError: FAILED_PRECONDITION; a disk is attached to another node, or to this node in the other mode.
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
                    "several nodes can use a disk only if all of them use it READ_ONLY"
                )
            if "READ_ONLY" in (mine.get("mode"), disk.get("mode")):
                raise precondition(
                    f"disk {disk['sourceDisk']} is already attached in the other mode: "
                    "detach the disk, then attach it again"
                )


def become(service: Service, record: NodeRecord, state: str, health: str = "", description: str = "") -> Undo:
    """Set a node's state; return a function that restores the old state, unless the state has changed again."""
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
        BackendError: The method raised any exception.
    """
    try:
        await getattr(service.backend, action)(record.workers())
    except BackendError:
        raise
    except Exception as failure:
        logging.getLogger(__name__).exception("%s of the workers of %s failed", action, record.name)
        raise BackendError(f"{type(failure).__name__}: {failure}") from failure


def renew_external(service: Service, record: NodeRecord) -> None:
    """Assign new external addresses to a node's workers and release the old addresses."""
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
    """Remove a node from the API's state and release the addresses of its workers."""
    service.state.nodes.remove(record.name)
    service.state.internal.release(record.internal_ips)
    service.state.external.release(record.external_ips)
    service.store.changed()
    service.lost(record)


def _target(service: Service, operation: OperationRecord) -> NodeRecord:
    """Return the node for which the operation was started.

    Raises:
        ApiError: CANCELLED; the node was deleted. Another node might have the same name now.
    """
    record = service.state.nodes.find(operation.target)
    if record is None or record.body["id"] != operation.args["id"]:
        raise ApiError(Code.CANCELLED, f"node {operation.target} was deleted during the operation")
    return record


def _arrive(service: Service, record: NodeRecord, underway: str, state: str, health: str = "") -> None:
    """Set a node's state at the end of an operation.

    Raises:
        ApiError: CANCELLED; the state has changed during the operation, for example because the node is being deleted.
    """
    if record.state != underway:
        raise ApiError(Code.CANCELLED, f"node {record.name} became {record.state} during the operation")
    become(service, record, state, health)


async def bring_up(service: Service, record: NodeRecord) -> None:
    """Boot the workers of a node in state CREATING and set the node READY; the caller holds the node's lock.

    Raises:
        ApiError: INTERNAL; the workers did not boot, and the node was removed (or is listed as UNKNOWN if removing its
            workers failed too). CANCELLED; the node is being deleted.
    """
    try:
        await ask(service, record, "boot")
    except BackendError as failure:
        await abandon(service, record)
        raise ApiError(Code.INTERNAL, f"node {record.name} could not be created: {failure}") from failure
    _arrive(service, record, "CREATING", "READY", "HEALTHY")


async def abandon(service: Service, record: NodeRecord) -> None:
    """Remove a node whose creation failed or was cancelled; if removing it fails, it stays listed as UNKNOWN."""
    try:
        await ask(service, record, "remove")
    except BackendError as failure:
        become(service, record, "UNKNOWN", "TIMEOUT", f"creating the node failed, and so did removing it: {failure}")
    else:
        forget(service, record)


async def remove(service: Service, record: NodeRecord) -> None:
    """Remove a node and its workers; if this fails, the node stays listed, so that a client can delete it again.

    Raises:
        BackendError: A worker could not be removed.
    """
    async with service.lock(record.name):
        if service.state.nodes.find(record.name) is not record:
            return
        try:
            await ask(service, record, "remove")
        except BackendError as failure:
            become(service, record, "UNKNOWN", "TIMEOUT", f"removing the node failed: {failure}")
            raise
        forget(service, record)
    service.unlock(record.name)


async def _halt(service: Service, record: NodeRecord) -> None:
    try:
        await ask(service, record, "halt")
    except BackendError as failure:
        become(service, record, "UNKNOWN", "TIMEOUT", f"halting the workers failed: {failure}")
        raise


async def _boot(service: Service, record: NodeRecord) -> None:
    try:
        # Write the workers' new addresses to the state file before the workers use these addresses.
        await service.store.flush()
        await ask(service, record, "boot")
    except (ApiError, BackendError) as failure:
        become(service, record, "UNKNOWN", "TIMEOUT", f"the workers did not boot: {failure}")
        raise


async def maintain(service: Service, record: NodeRecord, operation: OperationRecord) -> None:
    """Halt a node's workers, assign new external addresses and boot the workers; the caller holds the node's lock."""
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


def _stockout(service: Service, record: NodeRecord) -> ApiError | None:
    """Return the error if the node's zone has no capacity for the node now; None if it has."""
    return service.state.capacity.stockout(record.location.zone, record.accelerator.name)


def resume(service: Service) -> None:
    """Boot the workers of all READY nodes: workers might have stopped while the API was not running."""

    async def mind(record: NodeRecord) -> None:
        async with service.lock(record.name):
            if record.state == "READY":
                with contextlib.suppress(ApiError, BackendError):  # an error makes the node UNKNOWN, with the reason
                    await _boot(service, record)

    for record in service.state.nodes:
        if record.state == "READY":
            service.spawn(record.name, mind(record))


@effect("create")
async def _create(service: Service, operation: OperationRecord) -> Json:
    record = _target(service, operation)
    async with service.lock(record.name):
        if record.state == "CREATING":
            if stockout := _stockout(service, record):
                await abandon(service, record)
                raise stockout
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
            if stockout := _stockout(service, record):
                await _halt(service, record)
                drop_external(service, record)
                become(service, record, "STOPPED")
                raise stockout
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
                with contextlib.suppress(BackendError):  # detaches disks that the failed call has attached
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
