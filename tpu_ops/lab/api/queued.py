"""Handlers of the API methods for queued resources; `queued_walk` has the automatic state changes."""

from __future__ import annotations

import secrets
import time

from tpu_ops.lab.api import lifecycle, operations, wire
from tpu_ops.lab.api import queued_walk as walk
from tpu_ops.lab.api.capacity import check_quota
from tpu_ops.lab.api.errors import ApiError, Code, already_exists, invalid, precondition
from tpu_ops.lab.api.names import Location, check_node_id, check_queued_id
from tpu_ops.lab.api.nodes import complete, require
from tpu_ops.lab.api.operations import EMPTY, effect, result
from tpu_ops.lab.api.records import NodeRecord, OperationRecord, QueuedRecord, timestamp
from tpu_ops.lab.api.service import Service, paged
from tpu_ops.lab.api.wire import Json, Message, Page

#: States in which a queued resource with nodes can be deleted without force.
_DELETABLE = ("ACCEPTED", "FAILED", "SUSPENDED")
_RESETTABLE = ("ACTIVE", "FAILED", "SUSPENDED")
_MAX_SLICES = 256


def _check(location: Location, short: str, body: Json) -> Json:
    """Check a queued resource that a client has sent; return it with the defaults of its nodes filled in.

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


async def list_queued_resources(service: Service, api: str, request: Message) -> Page:
    """Handle ListQueuedResources; the zone ``-`` means all zones of the project."""
    location = service.location(request.parent, wildcard=True)
    return paged(
        api,
        request,
        lambda last: service.state.queued.below(location, last),
        response="ListQueuedResourcesResponse",
        field="queued_resources",
    )


async def get_queued_resource(service: Service, api: str, request: Message) -> Message:
    """Handle GetQueuedResource."""
    return _find(service, request.name).pb(api)


async def create_queued_resource(service: Service, api: str, request: Message) -> Message:
    """Handle CreateQueuedResource."""
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
    check_quota(service.state, location, [node for _, node, _ in record.specs()])
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
        walk.become(service, record, "ACCEPTED", "USER")
        walk.set_out(service, record)
    return result(operation.api, "QueuedResource", record)


async def delete_queued_resource(service: Service, api: str, request: Message) -> Message:
    """Handle DeleteQueuedResource: without force, a queued resource with nodes must be in one of `_DELETABLE`."""
    service.resource(request.name, "queuedResources")
    if earlier := operations.repeated(service, api, "deleteQueuedResource", request.name, request.request_id):
        return earlier
    record = service.state.queued.get(request.name)
    if record.state == "DELETING":
        raise precondition(f"queued resource {record.name} is being deleted already")
    nodes = walk.nodes_of(service, record)
    if nodes and not request.force and record.state not in _DELETABLE:
        raise precondition(
            f"queued resource {record.name} is {record.state} and has nodes "
            f"({', '.join(node.short for node in nodes)}): delete the nodes first, or set force"
        )
    undo = walk.become(service, record, "DELETING", "USER")
    args = {"createTime": record.body["createTime"]}
    return await operations.start(
        service, api, "deleteQueuedResource", record.name, args=args, undo=undo, request_id=request.request_id
    )


@effect("deleteQueuedResource")
async def _delete(service: Service, operation: OperationRecord) -> Json:
    record = service.state.queued.find(operation.target)
    if record is not None and record.body["createTime"] == operation.args["createTime"]:
        await walk.remove_nodes(service, record)
        service.state.queued.remove(record.name)
        service.store.changed()
    return EMPTY


async def reset_queued_resource(service: Service, api: str, request: Message) -> Message:
    """Handle ResetQueuedResource: remove the queued resource's nodes and set its state to ACCEPTED again."""
    record = _find(service, request.name)
    if record.state not in _RESETTABLE:
        raise precondition(
            f"queued resource {record.name} is {record.state} and cannot be reset "
            f"(only in state {' or '.join(_RESETTABLE)})"
        )
    undo = walk.become(service, record, "SUSPENDING", "USER")
    args = {"createTime": record.body["createTime"]}
    return await operations.start(service, api, "resetQueuedResource", record.name, args=args, undo=undo)


@effect("resetQueuedResource")
async def _reset(service: Service, operation: OperationRecord) -> Json:
    record = _target(service, operation)
    if record.state == "SUSPENDING":
        await walk.remove_nodes(service, record)
        if record.state == "SUSPENDING":
            walk.become(service, record, "ACCEPTED", "USER")
            walk.set_out(service, record)
    return result(operation.api, "QueuedResource", record)


async def perform_maintenance_queued_resource(service: Service, api: str, request: Message) -> Message:
    """Handle PerformMaintenanceQueuedResource (v2alpha1): maintain the named nodes, or all nodes if none is named."""
    record = _find(service, request.name)
    nodes = walk.nodes_of(service, record)
    for asked in request.node_names:
        if asked not in {name for node in nodes for name in (node.name, node.short)}:
            raise invalid(f"node_names: {asked!r} is not a node of {record.name}")
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
    await walk.all_of(one(node) for node in walk.nodes_of(service, record) if node.name in operation.args["nodes"])
    return result(operation.api, "QueuedResource", record)


def _target(service: Service, operation: OperationRecord) -> QueuedRecord:
    record = service.state.queued.find(operation.target)
    if record is None or record.body["createTime"] != operation.args["createTime"]:
        raise ApiError(Code.CANCELLED, f"queued resource {operation.target} was deleted during the operation")
    return record
