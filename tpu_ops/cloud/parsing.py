"""Turns what the API said about a node into a `Node`: the boundary behind which its text may be relied on.

Names and addresses end up in file names, ssh configuration and group names, so only those of the documented form
pass; what is printed as it is comes out in one line without control characters. Labels and descriptions stay any text.
What is made here always has the form that a published snapshot must have (`tpu_ops.fleet.publishing.documents`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tpu_ops.cloud import forms
from tpu_ops.cloud.accelerators import AcceleratorType, accelerator_type
from tpu_ops.cloud.names import split_name
from tpu_ops.cloud.node import Node
from tpu_ops.errors import CloudError, printable


def node(data: dict[str, Any]) -> Node:
    """Given a node's dictionary from `tpu_ops.cloud.nodes`, return the node.

    Raises:
        CloudError: Its resource name is not of the documented form.
    """
    parts = split_name(data["name"])
    if parts is None:
        raise CloudError(
            "the API gave a node whose name is not of the documented form",
            where=f"node {data['name']!r}",
            fix="check that the endpoint is the Cloud TPU API, and whether tpu_ops has an update",
        )
    project, zone, name = parts
    kind = _kind(data["accelerator_type"])
    return Node(
        name=name,
        project=project,
        zone=zone,
        node_id=data["node_id"] if forms.ID.fullmatch(data["node_id"]) else "",
        accelerator_type=_line(data["accelerator_type"]),
        runtime_version=_line(data["runtime_version"]),
        state=_word(data["state"], "STATE_UNSPECIFIED"),
        health=_word(data["health"], "HEALTH_UNSPECIFIED"),
        health_description=_prose(data["health_description"]),
        internal_ips=_addresses(data["internal_ips"], data["network_configs"], kind),
        external_ips=_addresses(data["external_ips"], data["network_configs"], kind),
        chips=kind.chips if kind else 0,
        chips_per_worker=kind.chips_per_worker if kind else 0,
        topology=_line(data["topology"]) or (kind.topology if kind else ""),
        labels=_texts(dict(sorted(data["labels"].items()))),
        symptoms=tuple(_texts(symptom) for symptom in data["symptoms"]),
        queued_resource=_line(data["queued_resource"].rsplit("/", 1)[-1]),
        multislice=data["multislice"],
        preemptible=data["preemptible"] or data["spot"],
        spot=data["spot"],
        reserved=data["reserved"],
        data_disks=tuple(_texts(disk) for disk in data["data_disks"]),
        service_account=_line(data["service_account"]),
        create_time=_line(data["create_time"]),
        metadata_keys=tuple(_line(key) for key in data["metadata_keys"]),
    )


def nodes(listing: Iterable[dict[str, Any]]) -> tuple[Node, ...]:
    """Return the nodes of a listing in a fixed order, whatever the order of the answers.

    Raises:
        CloudError: A resource name is not of the documented form.
    """
    return tuple(sorted((node(data) for data in listing), key=lambda entry: entry.full_name))


def _kind(name: str) -> AcceleratorType | None:
    """Return what the table knows of an accelerator type."""
    try:
        return accelerator_type(name)
    except ValueError:
        return None


def _line(text: str) -> str:
    return printable(text)[: forms.LINE]


def _word(text: str, unknown: str) -> str:
    """Return the name or number of an enum's value, or what is said of a value that has neither."""
    return text if forms.WORD.fullmatch(text) else unknown


def _prose(text: str) -> str:
    return text[: forms.PROSE]


def _texts(data: dict[str, str]) -> dict[str, str]:
    return {_prose(key): _prose(value) for key, value in data.items()}


def _addresses(listed: list[str], interfaces: int, kind: AcceleratorType | None) -> tuple[str, ...]:
    """Return one address per worker: with several network interfaces, a worker's endpoints follow each other."""
    several = interfaces > 1 and len(listed) % interfaces == 0
    step = interfaces if several and not (kind and len(listed) == kind.workers) else 1
    return tuple(forms.address(text) for text in listed[::step])
