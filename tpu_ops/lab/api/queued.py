"""The queued resource methods, and the walk of a queued resource from CREATING to ACTIVE and back.

CREATING, ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING (its nodes are created), ACTIVE; FAILED where that cannot be;
SUSPENDING and SUSPENDED once a node was preempted or all were deleted; DELETING.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Iterable
from datetime import datetime
from typing import Any

from tpu_ops.lab.api import lifecycle, operations, wire
from tpu_ops.lab.api.errors import ApiError, Code, already_exists, invalid, precondition
from tpu_ops.lab.api.names import Location, check_node_id, check_queued_id
from tpu_ops.lab.api.nodes import complete, require
from tpu_ops.lab.api.operations import EMPTY, Undo, effect, result
from tpu_ops.lab.api.records import NodeRecord, OperationRecord, QueuedRecord, timestamp
from tpu_ops.lab.api.service import Service, paged
from tpu_ops.lab.api.wire import Json, Message, Page
from tpu_ops.lab.backend import BackendError

#: States in which it may be deleted although its nodes exist and nobody forces it.
_DELETABLE = ("ACCEPTED", "FAILED", "SUSPENDED")
_RESETTABLE = ("ACTIVE", "FAILED", "SUSPENDED")
_MAX_SLICES = 256


def _check(location: Location, short: str, body: Json) -> Json:
    """Given a queued resource as a client sent it, return it with its nodes completed.

    Raises:
        ApiError: INVALID_ARGUMENT; the message names the field.
    """
    specs = body.get("tpu", {}).get("nodeSpec", [])
    if not specs:
        raise invalid("queued_resource.tpu.node_spec: missing")
    scheduling: Json = {}
    if "spot" in body:
        scheduling["spot"] = True
    if "bestEffort" in body:
        scheduling["preemptible"] = True
    if body.get("guaranteed", {}).get("reserved") or body.get("reservationName"):
        scheduling["reserved"] = True
    checked = []
    for index, spec in enumerate(specs):
        field = f"queued_resource.tpu.node_spec[{index}]"
        if spec.get("parent", location.name) != location.name:
            raise invalid(f"{field}.parent: {spec['parent']!r} is not {location.name}")
        several = spec.get("multisliceParams")
        if several is not None and spec.get("nodeId"):
            raise invalid(f"{field}: node_id and multislice_params exclude each other")
        if several is not None:
            if not 1 <= several.get("nodeCount", 0) <= _MAX_SLICES:
                raise invalid(f"{field}.multislice_params.node_count: must be 1 to {_MAX_SLICES}")
            prefix = several.get("nodeIdPrefix") or short
            check_node_id(f"{prefix}-{several['nodeCount'] - 1}", f"{field}.multislice_params.node_id_prefix")
        elif not spec.get("nodeId"):
            raise invalid(f"{field}.node_id: missing")
        else:
            check_node_id(spec["nodeId"], f"{field}.node_id")
        node = complete(location, spec["node"], f"{field}.node")
        node["schedulingConfig"] = {**node["schedulingConfig"], **scheduling}
        checked.append({**spec, "parent": location.name, "node": node})
    return {**body, "tpu": {"nodeSpec": checked}}


def _find(service: Service, name: str) -> QueuedRecord:
    service.resource(name, "queuedResources")
    return service.state.queued.get(name)


def _become(
    service: Service, record: QueuedRecord, state: str, initiator: str = "SERVICE", error: Json | None = None
) -> Undo:
    """Put a queued resource into a state and return what puts it back, and lets it go on, unless it went on already."""
    before = (record.state, record.initiator, record.error)

    def undo() -> None:
        if record.state == state:
            _become(service, record, *before)
            begun = [operation for operation in service.state.operations if operation.target == record.name]
            if record.state == "CREATING" and all(operation.done for operation in begun):
                # Its creation ended meanwhile, and left it to what is taken back now.
                _become(service, record, "ACCEPTED", "USER")
            if record.state in _STEPS and record.name not in service.running:
                _set_out(service, record)

    record.state, record.since, record.initiator, record.error = state, time.time(), initiator, error
    record.touch()
    service.store.changed()
    return undo


def _fail(service: Service, record: QueuedRecord, failure: ApiError) -> None:
    _become(service, record, "FAILED", error={"code": failure.code.number, "message": failure.message})


def _nodes(service: Service, record: QueuedRecord) -> list[NodeRecord]:
    """Return the nodes of a queued resource that exist."""
    found = (service.state.nodes.find(name) for name, _, _ in record.specs())
    return [node for node in found if node is not None and node.queued == record.name]


async def list_queued_resources(service: Service, api: str, request: Message) -> Page:
    """ListQueuedResources; the location ``-`` lists every zone of the project."""
    location = service.location(request.parent, wildcard=True)
    return paged(
        api,
        request,
        lambda last: service.state.queued.below(location, last),
        response="ListQueuedResourcesResponse",
        field="queued_resources",
    )


async def get_queued_resource(service: Service, api: str, request: Message) -> Message:
    """GetQueuedResource."""
    return _find(service, request.name).pb(api)


async def create_queued_resource(service: Service, api: str, request: Message) -> Message:
    """CreateQueuedResource."""
    location = service.location(request.parent)
    short = check_queued_id(request.queued_resource_id or f"qr-{secrets.token_hex(6)}")
    name = location.child("queuedResources", short)
    if earlier := operations.repeated(service, api, "createQueuedResource", name, request.request_id):
        return earlier
    if name in service.state.queued:
        raise already_exists(name)
    body = _check(location, short, wire.queued_input(request.queued_resource))
    now = time.time()
    record = QueuedRecord(name, {**body, "createTime": timestamp(now)}, "CREATING", now)
    wanted = [node for node, _, _ in record.specs()]
    for node in wanted:
        if node in service.state.nodes or wanted.count(node) > 1:
            raise already_exists(node)
    service.state.queued.add(record)
    args = {"createTime": record.body["createTime"]}

    def undo() -> None:
        if record.state == "CREATING":
            service.state.queued.remove(name)

    return await operations.start(
        service, api, "createQueuedResource", name, args=args, undo=undo, request_id=request.request_id
    )


@effect("createQueuedResource")
async def _create(service: Service, operation: OperationRecord) -> Json:
    record = _target(service, operation)
    if record.state == "CREATING":
        _become(service, record, "ACCEPTED", "USER")
        _set_out(service, record)
    return result(operation.api, "QueuedResource", record)


async def delete_queued_resource(service: Service, api: str, request: Message) -> Message:
    """DeleteQueuedResource: without force only where no node would be lost."""
    service.resource(request.name, "queuedResources")
    if earlier := operations.repeated(service, api, "deleteQueuedResource", request.name, request.request_id):
        return earlier
    record = service.state.queued.get(request.name)
    if record.state == "DELETING":
        raise precondition(f"queued resource {record.name} is being deleted already")
    nodes = _nodes(service, record)
    if nodes and not request.force and record.state not in _DELETABLE:
        raise precondition(
            f"queued resource {record.name} is {record.state} and has nodes "
            f"({', '.join(node.short for node in nodes)}): delete them first, or set force"
        )
    undo = _become(service, record, "DELETING", "USER")
    args = {"createTime": record.body["createTime"]}
    return await operations.start(
        service, api, "deleteQueuedResource", record.name, args=args, undo=undo, request_id=request.request_id
    )


@effect("deleteQueuedResource")
async def _delete(service: Service, operation: OperationRecord) -> Json:
    record = service.state.queued.find(operation.target)
    if record is not None and record.body["createTime"] == operation.args["createTime"]:
        await _remove_nodes(service, record)
        service.state.queued.remove(record.name)
        service.store.changed()
    return EMPTY


async def reset_queued_resource(service: Service, api: str, request: Message) -> Message:
    """ResetQueuedResource: its nodes are removed and it walks its way again."""
    record = _find(service, request.name)
    if record.state not in _RESETTABLE:
        raise precondition(
            f"queued resource {record.name} is {record.state} and cannot be reset "
            f"(only when {' or '.join(_RESETTABLE)})"
        )
    undo = _become(service, record, "SUSPENDING", "USER")
    args = {"createTime": record.body["createTime"]}
    return await operations.start(service, api, "resetQueuedResource", record.name, args=args, undo=undo)


@effect("resetQueuedResource")
async def _reset(service: Service, operation: OperationRecord) -> Json:
    record = _target(service, operation)
    if record.state == "SUSPENDING":
        await _remove_nodes(service, record)
        if record.state == "SUSPENDING":
            _become(service, record, "ACCEPTED", "USER")
            _set_out(service, record)
    return result(operation.api, "QueuedResource", record)


async def perform_maintenance_queued_resource(service: Service, api: str, request: Message) -> Message:
    """PerformMaintenanceQueuedResource (v2alpha1): the named nodes of it, or all."""
    record = _find(service, request.name)
    nodes = _nodes(service, record)
    for asked in request.node_names:
        if asked not in {name for node in nodes for name in (node.name, node.short)}:
            raise invalid(f"node_names: {asked!r} is no node of {record.name}")
    chosen = [node for node in nodes if not request.node_names or {node.name, node.short} & {*request.node_names}]
    for node in chosen:
        require(node, "maintained", ("READY",))
    undone = [
        lifecycle.become(service, node, "REPAIRING", "UNHEALTHY_MAINTENANCE", "maintenance event") for node in chosen
    ]
    args = {"createTime": record.body["createTime"], "nodes": [node.name for node in chosen]}

    def undo() -> None:
        for each in undone:
            each()

    return await operations.start(service, api, "performMaintenanceQueuedResource", record.name, args=args, undo=undo)


@effect("performMaintenanceQueuedResource")
async def _maintain(service: Service, operation: OperationRecord) -> Json:
    async def one(node: NodeRecord) -> None:
        async with service.lock(node.name):
            await lifecycle.maintain(service, node, operation)

    record = _target(service, operation)
    await _all(one(node) for node in _nodes(service, record) if node.name in operation.args["nodes"])
    return result(operation.api, "QueuedResource", record)


def _target(service: Service, operation: OperationRecord) -> QueuedRecord:
    record = service.state.queued.find(operation.target)
    if record is None or record.body["createTime"] != operation.args["createTime"]:
        raise ApiError(Code.CANCELLED, f"queued resource {operation.target} was deleted meanwhile")
    return record


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Let all of these come to their end, then raise the first error."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for found in results:
        if isinstance(found, BaseException):
            raise found


async def _remove_nodes(service: Service, record: QueuedRecord) -> None:
    nodes = _nodes(service, record)
    for node in nodes:
        lifecycle.become(service, node, "DELETING")
    await service.store.settle()
    await _all(lifecycle.remove(service, node) for node in nodes)


def resume(service: Service) -> None:
    """Go on with the queued resources that an earlier process left on their way, and mind those that are active."""

    def lost(node: NodeRecord) -> None:
        record = service.state.queued.find(node.queued) if node.queued else None
        if record is None or record.state != "ACTIVE":
            return
        if node.state == "PREEMPTED" or not _nodes(service, record):
            _become(service, record, "SUSPENDING", "SERVICE" if node.state == "PREEMPTED" else "USER")
            _set_out(service, record)

    service.on_lost = lost
    resetting = {operation.target for operation in service.state.operations if not operation.done}
    for record in service.state.queued:
        if record.state in _STEPS and not (record.state == "SUSPENDING" and record.name in resetting):
            _set_out(service, record)


def _set_out(service: Service, record: QueuedRecord) -> None:
    service.spawn(record.name, _walk(service, record))


async def _walk(service: Service, record: QueuedRecord) -> None:
    """Lead a queued resource from state to state until it stays, or until something else takes it over."""
    while (step := _STEPS.get(record.state)) is not None and service.state.queued.find(record.name) is record:
        state = record.state
        await service.store.settle()
        await asyncio.sleep(record.since + service.seconds - time.time())
        if record.state == state:
            await step(service, record)


def _times(record: QueuedRecord) -> tuple[float, float]:
    """Return from when on, and until when, resources may be created; seconds since the epoch."""
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
    _become(service, record, "WAITING_FOR_RESOURCES")


async def _waiting(service: Service, record: QueuedRecord) -> None:
    after, until = _times(record)
    await asyncio.sleep(min(after, until) - time.time())
    if record.state != "WAITING_FOR_RESOURCES":
        return
    if time.time() >= until:
        _fail(service, record, ApiError(Code.FAILED_PRECONDITION, "the request was not fulfilled in its valid time"))
    else:
        _provision(service, record)


def _provision(service: Service, record: QueuedRecord) -> None:
    """Create the nodes of a queued resource, all or none."""
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
        _become(service, record, "PROVISIONING")


async def _provisioning(service: Service, record: QueuedRecord) -> None:
    async def one(node: NodeRecord) -> None:
        async with service.lock(node.name):
            if node.state == "CREATING":
                await lifecycle.bring_up(service, node)

    failure: ApiError | None = None
    try:
        await _all(one(node) for node in _nodes(service, record))
    except ApiError as refused:
        failure = refused
    if record.state != "PROVISIONING":
        return
    if failure is None and len(_nodes(service, record)) < len(record.specs()):
        failure = ApiError(Code.CANCELLED, "a node was deleted while it was being created")
    if failure is None:
        _become(service, record, "ACTIVE")
    else:
        await _give_up(service, record, failure)


async def _give_up(service: Service, record: QueuedRecord, failure: ApiError) -> None:
    try:
        await _remove_nodes(service, record)
    except BackendError as second:
        failure = ApiError(failure.code, f"{failure.message}; removing its nodes failed too: {second}")
    if record.state == "PROVISIONING":
        _fail(service, record, failure)


async def _suspending(service: Service, record: QueuedRecord) -> None:
    _become(service, record, "SUSPENDED", record.initiator)


_STEPS = {
    "ACCEPTED": _accepted,
    "WAITING_FOR_RESOURCES": _waiting,
    "PROVISIONING": _provisioning,
    "SUSPENDING": _suspending,
}
