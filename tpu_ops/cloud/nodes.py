"""Reads, creates, deletes, starts and stops single nodes of the Cloud TPU API. Changes are long-running operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpu_ops.cloud import parsing
from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.node import Json, Node
from tpu_ops.cloud.zones import raw


def get_node(tpu: Tpu, name: str) -> Node:
    """Return the node with a resource name.

    Raises:
        ApiError: NOT_FOUND if the node does not exist.
    """
    return parsing.node(raw(tpu.call("get_node", {"name": name}, node_in_words(name))))


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
    """Return a node's metadata, whose values may be secret and must not be shown.

    Raises:
        ApiError: NOT_FOUND if the node does not exist.
    """
    return dict(raw(tpu.call("get_node", {"name": name}, node_in_words(name))).metadata)


@dataclass(frozen=True)
class GuestAttributes:
    """A worker's guest attributes.

    Attributes:
        host_keys: Type of each host key -> the key in base64; empty if there are none.
        instance_name: The worker's name as a Compute Engine instance, or empty.
    """

    host_keys: dict[str, str]
    instance_name: str = ""


def guest_attributes(tpu: Tpu, name: str, worker_count: int, *, instance_names: bool = False) -> list[GuestAttributes]:
    """Return the guest attributes of each worker of a node, in order; empty ones for workers that the API leaves out.

    Args:
        tpu: The client.
        name: The node's resource name.
        worker_count: The number of the node's workers.
        instance_names: Whether to request the workers' instance names as well.

    Raises:
        ApiError: The API refused.
    """
    path = "" if instance_names else "hostkeys/"
    answers = _guest_attributes(tpu, name, path, [""])
    if len(answers) != worker_count:
        # An answer does not say which guest attributes belong to which worker. So it is usable only if it has one entry
        # for each requested worker.
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
    """Return the resource name ``projects/P/locations/Z/nodes/N`` as words for a message."""
    _, project, _, zone, _, node = name.split("/")
    return f"node {node}, zone {zone}, project {project}"
