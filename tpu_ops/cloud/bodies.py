"""Requests that recreate a node or a queued resource: the fields that a client can set, as JSON.

The requests include the values of a node's metadata, which may be secret and must not be shown.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_ops.cloud.accelerators import type_of
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.node import Json
from tpu_ops.cloud.nodes import create_node, node_in_words
from tpu_ops.cloud.operations import status_of
from tpu_ops.cloud.zones import raw

#: Fields of google.cloud.tpu.v2.Node that a client sets; the service sets all other fields.
_NODE = (
    "description",
    "accelerator_type",
    "accelerator_config",
    "runtime_version",
    "network_config",
    "network_configs",
    "service_account",
    "scheduling_config",
    "labels",
    "metadata",
    "tags",
    "data_disks",
    "shielded_instance_config",
)
#: TPU generations whose slices a client requests by type and three-dimensional topology (`--type` and `--topology` in
#: the documentation).
_TORUS = ("V4", "V5P")
#: Fields of google.cloud.tpu.v2.QueuedResource that a client sets, of its queueing policy and of its node specs.
#: Absolute times in the policy are left out.
_QUEUED = ("spot", "guaranteed", "reservation_name")
_RELATIVE = ("valid_until_duration", "valid_after_duration")
_NODE_SPEC = ("node_id", "multislice_params")
#: Fields of a node, besides the metadata, that can be updated (UpdateNodeRequest; attaching and detaching disks changes
#: `data_disks`). An update does not change the values in the node's queued resource.
_UPDATED = ("description", "labels", "tags", "data_disks")
#: Key of the node's metadata whose value has one line for each ssh key.
_SSH_KEYS = "ssh-keys"


@dataclass(frozen=True)
class Queued:
    """A queued resource as the API describes it.

    Attributes:
        state: Name of QueuedResourceState.State.
        error: Why the queued resource has failed, or empty.
        status: Name of the status code of this error, or empty.
        body: The request that recreates the queued resource.
        nodes: Resource names of the nodes of the queued resource.
        created: Creation time as the API writes it, or empty. A later queued resource of the same name has another
            time.
        lacks: Whether the API returned fields that the installed client library does not know, so that a recreated
            resource might lack these fields.
    """

    state: str
    error: str
    status: str
    body: Json
    nodes: tuple[str, ...]
    created: str = ""
    lacks: bool = False


def node_body(tpu: Tpu, name: str) -> tuple[Json, str, str, bool]:
    """Return the request that recreates a node, its id, its queued resource's name or "", and `lacks`.

    `lacks` is described in `Queued`.

    Raises:
        ApiError: NOT_FOUND if the node does not exist.
    """
    node = raw(tpu.call("get_node", {"name": name}, node_in_words(name)))
    short = str(node.queued_resource).rpartition("/")[2]
    # The full name in `node.queued_resource` contains the project's number, but requests use the project's id.
    source = f"{name.rpartition('/nodes/')[0]}/queuedResources/{short}" if short else ""
    return _settable(_json(node)), str(node.id), source, _has_unknown(node, _NODE)


def kind_of(body: Json) -> tuple[str, bool]:
    """Return the accelerator type that a request for a node names, and whether it is for a spot node."""
    config, scheduling = body.get("accelerator_config", {}), body.get("scheduling_config", {})
    kind = body.get("accelerator_type") or type_of(config.get("type_", ""), config.get("topology", ""))
    return kind, bool(scheduling.get("spot") or scheduling.get("preemptible"))


def create(tpu: Tpu, name: str, body: Json) -> str:
    """Begin to create the node with a resource name; return the operation's name.

    Raises:
        ApiError: The API refused; ALREADY_EXISTS if another client was faster.
    """
    from google.cloud.tpu_v2.types import cloud_tpu

    parent, _, short = name.rpartition("/nodes/")
    node: Any = cloud_tpu.Node.from_json(json.dumps(body))
    return create_node(tpu, parent, short, node)


def queued(tpu: Tpu, name: str) -> Queued | None:
    """Return a queued resource; None if it does not exist.

    Raises:
        ApiError: The API refused.
    """
    try:
        answer = raw(tpu.call("get_queued_resource", {"name": name}, queued_in_words(name)))
    except ApiError as exc:
        if exc.status == "NOT_FOUND":
            return None
        raise
    body = _json(answer)
    kept = {key: body[key] for key in _QUEUED if key in body}
    policy = {key: body["queueing_policy"][key] for key in _RELATIVE if key in body.get("queueing_policy", {})}
    if policy:
        kept["queueing_policy"] = policy
    tiered = bool({"spot", "guaranteed"} & kept.keys())
    specs = [_spec(spec, _parent(name), tiered=tiered) for spec in body["tpu"]["node_spec"]]
    kept["tpu"] = {"node_spec": specs}
    state = answer.state
    word = state.DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number.get(state.state)
    failure = state.failed_data.error
    return Queued(
        word.name if word else str(state.state),
        failure.message,
        status_of(failure.code) if failure.code else "",
        kept,
        tuple(node for spec in specs for node in _nodes(name, spec)),
        body.get("create_time", ""),
        _has_unknown(answer, (*_QUEUED, "queueing_policy", "tpu")),
    )


def as_updated(name: str, body: Json, nodes: Mapping[str, Json]) -> Json:
    """Return the request that recreates a queued resource, including updates of its nodes.

    Updates include ssh keys that gcloud adds to a node at a login, and ssh keys that were removed. If the nodes of one
    node spec differ in a field, the originally requested value is used. Only ssh keys that all these nodes have are
    kept.

    Args:
        name: The resource name of the queued resource.
        body: See `Queued`.
        nodes: Resource name of each node of the queued resource -> the request that recreates the node.
    """
    specs = []
    for spec in body["tpu"]["node_spec"]:
        now = [nodes[node] for node in _nodes(name, spec)]
        specs.append({**spec, "node": _with_updates(spec["node"], now)})
    return {**body, "tpu": {"node_spec": specs}}


def _with_updates(asked: Json, now: Sequence[Json]) -> Json:
    first, *others = now
    alike = {key: first.get(key) for key in _UPDATED if all(one.get(key) == first.get(key) for one in others)}
    # Other metadata stays as requested: on nodes of slices, the service itself sometimes adds metadata.
    keys, *more = [one.get("metadata", {}).get(_SSH_KEYS, "").splitlines() for one in now]
    lines = [line for line in keys if all(line in several for several in more)]
    metadata = {key: value for key, value in asked.get("metadata", {}).items() if key != _SSH_KEYS}
    if lines:
        metadata[_SSH_KEYS] = "\n".join(lines)
    node = {**asked, **alike, "metadata": metadata}
    return {key: value for key, value in node.items() if value or key not in (*_UPDATED, "metadata")}


def create_queued(tpu: Tpu, name: str, body: Json, request_id: str) -> str:
    """Begin to create a queued resource; return the operation's name, which is the same for the same request id.

    Raises:
        ApiError: The API refused; ALREADY_EXISTS if another client was faster.
    """
    from google.cloud.tpu_v2.types import cloud_tpu

    parent, _, short = name.rpartition("/queuedResources/")
    resource: Any = cloud_tpu.QueuedResource.from_json(json.dumps(body))
    request = {
        "parent": parent,
        "queued_resource_id": short,
        "queued_resource": resource,
        "request_id": request_id,
    }
    return str(tpu.call("create_queued_resource", request, queued_in_words(name), repeat=False).operation.name)


def delete_queued(tpu: Tpu, name: str, request_id: str) -> str:
    """Begin to delete a queued resource and all its nodes; return the operation's name."""
    request = {"name": name, "force": True, "request_id": request_id}
    return str(tpu.call("delete_queued_resource", request, queued_in_words(name), repeat=False).operation.name)


def _json(message: Any) -> Json:
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True)


def _has_unknown(message: Any, names: Collection[str] = ()) -> bool:
    """Return whether a message, or a message nested in it, has fields that the installed client library does not know.

    Args:
        message: The message.
        names: Fields of the message to search; empty means all fields.
    """
    from google.protobuf.unknown_fields import UnknownFieldSet

    if len(UnknownFieldSet(message)):
        return True
    for field, value in message.ListFields():
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.message_type is None or is_map or (names and field.name not in names):
            continue
        if any(map(_has_unknown, [value] if hasattr(value, "ListFields") else value)):
            return True
    return False


def _settable(node: Json) -> Json:
    """Return the fields of a node's JSON that a request to create it contains; of two equivalent fields, only one."""
    kept = {key: node[key] for key in _NODE if key in node}
    # For a torus, `accelerator_config` has the chosen topology and is kept. For other types it is incomplete, and
    # `accelerator_type` is kept.
    if {"accelerator_type", "accelerator_config"} <= kept.keys():
        torus = kept["accelerator_config"].get("type_") in _TORUS
        kept.pop("accelerator_type" if torus else "accelerator_config")
    if len(kept.get("network_configs", ())) > 1:
        kept.pop("network_config", None)
    elif "network_config" in kept:
        kept.pop("network_configs", None)
    return kept


def _spec(spec: Json, parent: str, *, tiered: bool) -> Json:
    """Return one node spec of a queued resource as a request contains it.

    Args:
        spec: The node spec from the API, whose `parent` contains the project's number.
        parent: The `parent` for requests, which contains the project's id.
        tiered: Whether the queued resource has a tier (spot or guaranteed).
    """
    node = _settable(spec["node"])
    if tiered:
        # The nodes inherit the scheduling from the queued resource.
        node.pop("scheduling_config", None)
    return {"parent": parent, **{key: spec[key] for key in _NODE_SPEC if key in spec}, "node": node}


def _parent(name: str) -> str:
    return name.rpartition("/queuedResources/")[0]


def _nodes(name: str, spec: Json) -> list[str]:
    """Return the resource names of the nodes of one node spec of a queued resource."""
    short = name.rpartition("/")[2]
    several = spec.get("multislice_params")
    if not several:
        return [f"{_parent(name)}/nodes/{spec['node_id']}"]
    prefix = several.get("node_id_prefix") or short
    return [f"{_parent(name)}/nodes/{prefix}-{index}" for index in range(several["node_count"])]


def queued_in_words(name: str) -> str:
    """Return the resource name ``projects/P/locations/Z/queuedResources/Q`` as words for a message."""
    _, project, _, zone, _, short = name.split("/")
    return f"queued resource {short}, zone {zone}, project {project}"
