"""Nodes of the Cloud TPU API as plain dictionaries; changes to them as operations.

A node's dictionary has only JSON types and is read from the raw protobuf: the wrappers around it cost fifteen
times as much. Text in it is as the API gave it: data, and not to be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.zones import raw

Json = dict[str, Any]


def get_node(tpu: Tpu, name: str) -> Json:
    """Return the node of a resource name.

    Raises:
        ApiError: NOT_FOUND where there is none.
    """
    return node_data(raw(tpu.call("get_node", {"name": name}, node_in_words(name))))


def create_node(tpu: Tpu, parent: str, node_id: str, node: Json) -> str:
    """Begin to create a node; return the operation's name.

    Args:
        tpu: The client.
        parent: ``projects/P/locations/Z``.
        node_id: The node's short name.
        node: Fields of google.cloud.tpu.v2.Node.

    Raises:
        ApiError: The API refused.
    """
    request = {"parent": parent, "node_id": node_id, "node": node}
    return _operation(tpu.call("create_node", request, node_in_words(f"{parent}/nodes/{node_id}"), repeat=False))


def delete_node(tpu: Tpu, name: str) -> str:
    """Begin to delete a node; return the operation's name."""
    return _operation(tpu.call("delete_node", {"name": name}, node_in_words(name), repeat=False))


def start_node(tpu: Tpu, name: str) -> str:
    """Begin to start a stopped node; return the operation's name."""
    return _operation(tpu.call("start_node", {"name": name}, node_in_words(name), repeat=False))


def stop_node(tpu: Tpu, name: str) -> str:
    """Begin to stop a node; return the operation's name."""
    return _operation(tpu.call("stop_node", {"name": name}, node_in_words(name), repeat=False))


def node_metadata(tpu: Tpu, name: str) -> dict[str, str]:
    """Return a node's metadata; values may hold secrets, and none is to be shown.

    Raises:
        ApiError: NOT_FOUND where there is no such node.
    """
    return dict(raw(tpu.call("get_node", {"name": name}, node_in_words(name))).metadata)


def replace_metadata(tpu: Tpu, name: str, metadata: dict[str, str]) -> str:
    """Begin to replace all of a node's metadata; return the operation's name."""
    request = {"node": {"name": name, "metadata": metadata}, "update_mask": {"paths": ["metadata"]}}
    return _operation(tpu.call("update_node", request, node_in_words(name), repeat=False))


@dataclass(frozen=True)
class GuestAttributes:
    """What a worker says of itself as guest attributes.

    Attributes:
        host_keys: Key type -> base64 blob; empty where it says none.
        instance_name: Its name as a Compute Engine instance, or empty.
    """

    host_keys: dict[str, str]
    instance_name: str = ""


def guest_attributes(tpu: Tpu, name: str, worker_count: int, *, instance_names: bool = False) -> list[GuestAttributes]:
    """Return the guest attributes of each worker of a node, in order; empty where the API does not say.

    Args:
        tpu: The client.
        name: The node's resource name.
        worker_count: How many workers it has.
        instance_names: Whether their instance names are asked for as well.

    Raises:
        ApiError: The API refused.
    """
    path = "" if instance_names else "hostkeys/"
    answers = _guest_attributes(tpu, name, path, [""])
    if len(answers) != worker_count:
        # An answer names no worker: it is of use only where it has as many entries as workers were asked for.
        each = (_guest_attributes(tpu, name, path, [str(index)]) for index in range(worker_count))
        answers = [found[0] if len(found) == 1 else GuestAttributes({}) for found in each]
    return answers


def _guest_attributes(tpu: Tpu, name: str, path: str, worker_ids: list[str]) -> list[GuestAttributes]:
    request = {"name": name, "query_path": path, "worker_ids": worker_ids}
    answer = raw(tpu.call("get_guest_attributes", request, node_in_words(name)))
    return [
        GuestAttributes(
            {entry.key: entry.value for entry in attributes.query_value.items if entry.namespace == "hostkeys"},
            next((entry.value for entry in attributes.query_value.items if entry.key == "hostname"), ""),
        )
        for attributes in answer.guest_attributes
    ]


def _operation(answer: Any) -> str:
    return str(answer.operation.name)


def node_in_words(name: str) -> str:
    """``projects/P/locations/Z/nodes/N`` in words."""
    _, project, _, zone, _, node = name.split("/")
    return f"node {node}, zone {zone}, project {project}"


def has_workers(node: Any) -> bool:
    """Given a raw google.cloud.tpu.v2.Node, return whether it has workers that somebody could log in to.

    The API lists those of its version 1, too, which have none; gcloud leaves them out as well.
    """
    return not _enum(node, "api_version", node.api_version).startswith("V1")


def node_data(node: Any) -> Json:
    """Given a raw google.cloud.tpu.v2.Node, return its dictionary.

    Values of the node's metadata are left out: they may hold secrets.
    """
    endpoints = node.network_endpoints
    scheduling = node.scheduling_config
    return {
        "name": node.name,
        "node_id": str(node.id) if node.id else "",
        "accelerator_type": node.accelerator_type,
        "topology": node.accelerator_config.topology,
        "runtime_version": node.runtime_version,
        "state": _enum(node, "state", node.state),
        "health": _enum(node, "health", node.health),
        "health_description": node.health_description,
        "network_configs": len(node.network_configs),
        "internal_ips": [endpoint.ip_address for endpoint in endpoints],
        "external_ips": [endpoint.access_config.external_ip for endpoint in endpoints],
        "labels": dict(node.labels),
        "symptoms": [
            {
                "worker_id": symptom.worker_id,
                "type": _enum(symptom, "symptom_type", symptom.symptom_type),
                "details": symptom.details,
                "create_time": _time(symptom, "create_time"),
            }
            for symptom in node.symptoms
        ],
        "queued_resource": node.queued_resource,
        "multislice": node.multislice_node,
        "preemptible": scheduling.preemptible,
        "spot": scheduling.spot,
        "reserved": scheduling.reserved,
        "data_disks": [
            {"source": disk.source_disk, "mode": _enum(disk, "mode", disk.mode)} for disk in node.data_disks
        ],
        "service_account": node.service_account.email,
        "create_time": _time(node, "create_time"),
        "metadata_keys": sorted(node.metadata),
    }


def _enum(message: Any, field: str, number: int) -> str:
    """Return the name of an enum's number; the number itself where it is newer than the installed client."""
    value = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(number)
    return value.name if value else str(number)


def _time(message: Any, field: str) -> str:
    """Return a time as RFC 3339; empty where there is none, or none of this calendar."""
    try:
        return str(getattr(message, field).ToJsonString()) if message.HasField(field) else ""
    except ValueError:
        return ""
