"""What makes a node or a queued resource again as it was: the fields that a client may set, as JSON.

A node's metadata is among them, with its values: they may hold secrets, and none is to be shown.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.nodes import Json, create_node, node_in_words
from tpu_ops.cloud.zones import raw

#: Fields of google.cloud.tpu.v2.Node that a client sets; the service fills in the others.
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
#: Types whose topology in three dimensions says all (the documentation's `--type` and `--topology`).
_TORUS = ("V4", "V5P")
#: The same of a QueuedResource. Of its queueing policy only what counts from its creation stays.
_QUEUED = ("spot", "guaranteed", "reservation_name")
_RELATIVE = ("valid_until_duration", "valid_after_duration")
_NODE_SPEC = ("parent", "node_id", "multislice_params")


@dataclass(frozen=True)
class Queued:
    """A queued resource as the API describes it.

    Attributes:
        state: Name of QueuedResourceState.State.
        error: Why it has failed, or empty.
        body: What makes it again.
        nodes: Resource names of the nodes that it asks for.
        created: When it was created, as the API writes times; empty where it does not say. Another one that is made
            later under the same name has another.
        lacks: Whether the API tells of something that the installed version of its library does not know, and that what
            is made of the body may lack.
    """

    state: str
    error: str
    body: Json
    nodes: tuple[str, ...]
    created: str = ""
    lacks: bool = False


def node_body(tpu: Tpu, name: str) -> tuple[Json, str, str, bool]:
    """Return what makes a node again, its id, the resource name of its queued resource or an empty text, and `lacks`.

    The last is as of `Queued`.

    Raises:
        ApiError: NOT_FOUND where there is none.
    """
    node = raw(tpu.call("get_node", {"name": name}, node_in_words(name)))
    short = str(node.queued_resource).rpartition("/")[2]
    # The node has it with the project's number, itself and its queued resource have the name that they are asked by.
    source = f"{name.rpartition('/nodes/')[0]}/queuedResources/{short}" if short else ""
    return _settable(_json(node)), str(node.id), source, _has_unknown(node, _NODE)


def create(tpu: Tpu, name: str, body: Json) -> str:
    """Begin to create a node of a resource name; return the operation's name.

    Raises:
        ApiError: The API refused; ALREADY_EXISTS where somebody was faster.
    """
    from google.cloud.tpu_v2.types import cloud_tpu

    parent, _, short = name.rpartition("/nodes/")
    node: Any = cloud_tpu.Node.from_json(json.dumps(body))
    return create_node(tpu, parent, short, node)


def queued(tpu: Tpu, name: str) -> Queued | None:
    """Return a queued resource; None where there is none.

    Raises:
        ApiError: The API refused.
    """
    try:
        answer = raw(tpu.call("get_queued_resource", {"name": name}, _in_words(name)))
    except ApiError as exc:
        if exc.status == "NOT_FOUND":
            return None
        raise
    body = _json(answer)
    kept = {key: body[key] for key in _QUEUED if key in body}
    policy = {key: body["queueing_policy"][key] for key in _RELATIVE if key in body.get("queueing_policy", {})}
    if policy:
        kept["queueing_policy"] = policy
    specs = [_spec(spec, tiered=bool({"spot", "guaranteed"} & kept.keys())) for spec in body["tpu"]["node_spec"]]
    kept["tpu"] = {"node_spec": specs}
    state = answer.state
    word = state.DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number.get(state.state)
    return Queued(
        word.name if word else str(state.state),
        state.failed_data.error.message,
        kept,
        tuple(_nodes(name, specs)),
        body.get("create_time", ""),
        _has_unknown(answer, (*_QUEUED, "queueing_policy", "tpu")),
    )


def create_queued(tpu: Tpu, name: str, body: Json, request_id: str) -> str:
    """Begin to create a queued resource; return the operation's name, the same one for the same request id.

    Raises:
        ApiError: The API refused; ALREADY_EXISTS where somebody was faster.
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
    return str(tpu.call("create_queued_resource", request, _in_words(name), repeat=False).operation.name)


def delete_queued(tpu: Tpu, name: str, request_id: str) -> str:
    """Begin to delete a queued resource and its nodes; return the operation's name."""
    request = {"name": name, "force": True, "request_id": request_id}
    return str(tpu.call("delete_queued_resource", request, _in_words(name), repeat=False).operation.name)


def _json(message: Any) -> Json:
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True)


def _has_unknown(message: Any, names: Collection[str] = ()) -> bool:
    """Return whether a message has fields that the installed library does not know, or one within it does.

    Args:
        message: The message.
        names: Fields of it that are looked into; empty is all.
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
    """Given a node's JSON, return what a client would send; of two ways to say the same thing, one."""
    kept = {key: node[key] for key in _NODE if key in node}
    # Of a type that is a torus, whoever chose a topology is to have it again; the config of others leaves things open.
    if {"accelerator_type", "accelerator_config"} <= kept.keys():
        torus = kept["accelerator_config"].get("type_") in _TORUS
        kept.pop("accelerator_type" if torus else "accelerator_config")
    if len(kept.get("network_configs", ())) > 1:
        kept.pop("network_config", None)
    elif "network_config" in kept:
        kept.pop("network_configs", None)
    return kept


def _spec(spec: Json, *, tiered: bool) -> Json:
    """Given one entry of a queued resource, return what a client would send."""
    node = _settable(spec["node"])
    if tiered:
        # The queued resource says it, and its nodes have it from there.
        node.pop("scheduling_config", None)
    return {**{key: spec[key] for key in _NODE_SPEC if key in spec}, "node": node}


def _nodes(name: str, specs: list[Json]) -> list[str]:
    parent, _, short = name.rpartition("/queuedResources/")
    found = []
    for spec in specs:
        several = spec.get("multislice_params")
        if several:
            prefix = several.get("node_id_prefix") or short
            found += [f"{parent}/nodes/{prefix}-{index}" for index in range(several["node_count"])]
        else:
            found.append(f"{parent}/nodes/{spec['node_id']}")
    return found


def _in_words(name: str) -> str:
    """``projects/P/locations/Z/queuedResources/Q`` in words."""
    _, project, _, zone, _, short = name.split("/")
    return f"queued resource {short}, zone {zone}, project {project}"
