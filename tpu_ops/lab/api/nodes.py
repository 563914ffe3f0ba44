"""Handlers of the API methods for nodes: they validate requests and start operations."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from tpu_ops.lab.api import lifecycle, operations, wire
from tpu_ops.lab.api.catalogue import check_runtime, find_config, find_type
from tpu_ops.lab.api.errors import invalid, precondition
from tpu_ops.lab.api.names import Location, check_node_id
from tpu_ops.lab.api.operations import Undo
from tpu_ops.lab.api.records import NodeRecord
from tpu_ops.lab.api.service import Service, paged
from tpu_ops.lab.api.wire import Json, Message, Page
from tpu_ops.lab.backend import MAX_DISKS, disk_resource

#: Path in the update mask of UpdateNode -> key of the node's JSON. Google documents the first five paths; gcloud's
#: attach-disk and detach-disk send data_disks.
UPDATABLE = {
    "description": "description",
    "tags": "tags",
    "labels": "labels",
    "metadata": "metadata",
    "network_config.enable_external_ips": "networkConfig",
    "data_disks": "dataDisks",
}
_EMPTY: Json = {"description": "", "tags": [], "labels": {}, "metadata": {}, "dataDisks": []}


def complete(location: Location, body: Json, field: str = "node") -> Json:
    """Check a node that a client has sent; return it with the real API's defaults filled in.

    Raises:
        ApiError: INVALID_ARGUMENT; the message names the field.
    """
    body = dict(body)
    config = body.get("acceleratorConfig")
    if not body.get("acceleratorType") and not config:
        raise invalid(f"{field}.accelerator_type: missing")
    by_config = find_config(location.zone, config.get("type", ""), config.get("topology", "")) if config else None
    entry = find_type(location.zone, body["acceleratorType"]) if body.get("acceleratorType") else by_config
    if entry is None or (by_config and by_config != entry):
        raise invalid(f"{field}: accelerator_type and accelerator_config name different accelerators")
    body["acceleratorType"] = entry.name
    body["acceleratorConfig"] = {"type": entry.api_version, "topology": entry.topology} | (config or {})
    if not body.get("runtimeVersion"):
        raise invalid(f"{field}.runtime_version: missing")
    check_runtime(body["runtimeVersion"])
    _check_disks(body.get("dataDisks", []), entry.workers, f"{field}.data_disks")
    if len(several := body.pop("networkConfigs", [])) > 1:
        raise invalid(
            f"{field}.network_configs: only one is allowed, since workers of the lab have one network interface"
        )
    # Workers get external addresses if the node has no network configuration, or if its enableExternalIps is true.
    network = body["networkConfig"] if "networkConfig" in body else (several or [{"enableExternalIps": True}])[0]
    body["networkConfig"] = {**network, **_network_names(location, network)}
    body["schedulingConfig"] = body.get("schedulingConfig", {})
    body["serviceAccount"] = {
        "email": f"{location.project}-compute@developer.gserviceaccount.com",
        "scope": ["https://www.googleapis.com/auth/cloud-platform"],
        **body.get("serviceAccount", {}),
    }
    return body


def _network_names(location: Location, network: Json) -> Json:
    """Return the full names of a node's network and subnetwork; each is ``default`` if not set."""
    parents = {
        "network": f"projects/{location.project}/global/networks",
        "subnetwork": f"projects/{location.project}/regions/{location.zone.rsplit('-', 1)[0]}/subnetworks",
    }
    given = {key: network.get(key) or "default" for key in parents}
    return {key: name if "/" in name else f"{parents[key]}/{name}" for key, name in given.items()}


def _check_disks(disks: list[Json], workers: int, field: str) -> None:
    """Reject data disks that cannot be attached to a node with this many workers."""
    sources = [disk_resource(disk.get("sourceDisk", "")) for disk in disks]
    if "" in sources:
        raise invalid(f"{field}: source_disk is missing")
    if len(set(sources)) < len(sources):
        raise invalid(f"{field}: the same disk is listed twice")
    if len(disks) > MAX_DISKS:
        raise invalid(f"{field}: {len(disks)} disks are too many; a worker of the lab can have {MAX_DISKS}")
    if workers > 1 and any(disk.get("mode") != "READ_ONLY" for disk in disks):
        raise invalid(f"{field}: disks of a node with {workers} workers must have the mode READ_ONLY")


def find(service: Service, name: str) -> NodeRecord:
    """Return the node with this full name.

    Raises:
        ApiError: INVALID_ARGUMENT for an invalid name; PERMISSION_DENIED for an unknown project or zone; NOT_FOUND.
    """
    service.resource(name, "nodes")
    return service.state.nodes.get(name)


def require(record: NodeRecord, action: str, states: Collection[str]) -> None:
    """Reject an action that is not allowed in the node's state.

    Raises:
        ApiError: FAILED_PRECONDITION; the node is in another state.
    """
    if record.state not in states:
        hint = ": delete it and create it again" if record.state == "PREEMPTED" else ""
        raise precondition(
            f"node {record.name} is {record.state} and cannot be {action} (only in state {' or '.join(states)}){hint}"
        )


async def _begin(
    service: Service, api: str, verb: str, record: NodeRecord, undo: Undo, *, request_id: str = "", **args: Json
) -> Message:
    args["id"] = record.body["id"]
    return await operations.start(service, api, verb, record.name, args=args, undo=undo, request_id=request_id)


async def list_nodes(service: Service, api: str, request: Message) -> Page:
    """Handle ListNodes; the zone ``-`` means all zones of the project."""
    location = service.location(request.parent, wildcard=True)
    return paged(
        api,
        request,
        lambda last: service.state.nodes.below(location, last),
        response="ListNodesResponse",
        field="nodes",
    )


async def get_node(service: Service, api: str, request: Message) -> Message:
    """Handle GetNode."""
    return find(service, request.name).pb(api)


async def create_node(service: Service, api: str, request: Message) -> Message:
    """Handle CreateNode."""
    location = service.location(request.parent)
    name = location.child("nodes", check_node_id(request.node_id))
    request_id = getattr(request, "request_id", "")
    if earlier := operations.repeated(service, api, "create", name, request_id):
        return earlier
    record = lifecycle.add(service, name, complete(location, wire.node_input(request.node)))

    def undo() -> None:
        if record.state == "CREATING":
            lifecycle.forget(service, record)

    return await _begin(service, api, "create", record, undo, request_id=request_id)


async def delete_node(service: Service, api: str, request: Message) -> Message:
    """Handle DeleteNode."""
    service.resource(request.name, "nodes")
    request_id = getattr(request, "request_id", "")
    if earlier := operations.repeated(service, api, "delete", request.name, request_id):
        return earlier
    record = service.state.nodes.get(request.name)
    if record.state == "DELETING":
        raise precondition(f"node {record.name} is being deleted already")
    undo = lifecycle.become(service, record, "DELETING")
    return await _begin(service, api, "delete", record, undo, request_id=request_id)


async def stop_node(service: Service, api: str, request: Message) -> Message:
    """Handle StopNode."""
    record = find(service, request.name)
    require(record, "stopped", ("READY",))
    undo = lifecycle.become(service, record, "STOPPING")
    return await _begin(service, api, "stop", record, undo)


async def start_node(service: Service, api: str, request: Message) -> Message:
    """Handle StartNode."""
    record = find(service, request.name)
    require(record, "started", ("STOPPED", "UNKNOWN"))
    lifecycle.renew_external(service, record)
    back = lifecycle.become(service, record, "STARTING")

    def undo() -> None:
        back()
        if record.state == "STOPPED":
            lifecycle.drop_external(service, record)

    return await _begin(service, api, "start", record, undo)


async def update_node(service: Service, api: str, request: Message) -> Message:
    """Handle UpdateNode: each field in the update mask is replaced as a whole."""
    record = find(service, request.node.name)
    paths = list(request.update_mask.paths)
    if not paths:
        raise invalid("update_mask: missing")
    wanted = wire.node_input(request.node)
    changes: Json = {}
    for path in paths:
        key = UPDATABLE.get(path)
        if key is None:
            raise invalid(f"update_mask: {path!r} cannot be updated; the updatable paths are {', '.join(UPDATABLE)}")
        if key == "networkConfig":
            flag = wanted.get(key, {}).get("enableExternalIps", False)
            changes[key] = {**record.body[key], "enableExternalIps": flag}
        else:
            changes[key] = wanted.get(key, _EMPTY[key])
    _check_disks(changes.get("dataDisks", []), len(record.internal_ips), "node.data_disks")
    require(record, "updated", ("READY", "STOPPED"))
    lifecycle.check_disks(service, record, changes)
    return await _begin(service, api, "update", record, lambda: None, changes=changes)


async def simulate_maintenance_event(service: Service, api: str, request: Message) -> Message:
    """Handle SimulateMaintenanceEvent (v2alpha1): all workers of the node are affected, even if only some are named."""
    record = find(service, request.name)
    for worker in request.worker_ids:
        _worker_index(record, worker)
    return await _maintain(service, api, record)


async def perform_maintenance(service: Service, api: str, request: Message) -> Message:
    """Handle PerformMaintenance (v2alpha1)."""
    return await _maintain(service, api, find(service, request.name))


async def _maintain(service: Service, api: str, record: NodeRecord) -> Message:
    require(record, "maintained", ("READY",))
    undo = lifecycle.become(service, record, "REPAIRING", "UNHEALTHY_MAINTENANCE", "maintenance event")
    return await _begin(service, api, "simulateMaintenanceEvent", record, undo)


async def preempt(service: Service, name: str) -> Message:
    """Start to preempt a node (a request that only the lab offers); return the operation that kills its workers."""
    record = find(service, name)
    require(record, "preempted", ("READY",))
    undo = lifecycle.become(service, record, "PREEMPTED")
    return await _begin(service, "v2", "preempt", record, undo)


def _worker_index(record: NodeRecord, worker: str) -> int:
    if not worker.isdecimal() or int(worker) >= len(record.internal_ips):
        raise invalid(
            f"worker_ids: {worker!r} is not a worker of {record.name}, "
            f"which has the workers 0 to {len(record.internal_ips) - 1}"
        )
    return int(worker)


async def get_guest_attributes(service: Service, api: str, request: Message) -> Message:
    """Handle GetGuestAttributes: return one entry for each requested worker, in the order of the request.

    A request without worker ids, or with empty ids only, means all workers.
    """
    record = find(service, request.name)
    asked = [worker for worker in request.worker_ids if worker]
    workers = record.workers()
    chosen = [workers[_worker_index(record, worker)] for worker in asked] if asked else workers
    found = await asyncio.gather(*(service.backend.guest_attributes(worker) for worker in chosen))
    namespace, _, key = request.query_path.strip("/").partition("/")
    response = wire.message(api, "GetGuestAttributesResponse")()
    for worker, attributes in zip(chosen, found, strict=True):
        entry = response.guest_attributes.add(query_path=request.query_path)
        entry.query_value.SetInParent()
        # gcloud reads the worker's name from the key `hostname`, in any namespace.
        published = {**attributes, "instance": {"hostname": worker.hostname}} if attributes else {}
        for space, values in sorted(published.items()):
            for name, value in sorted(values.items()):
                if namespace in ("", space) and key in ("", name):
                    entry.query_value.items.add(namespace=space, key=name, value=value)
    return response
