"""Turns what the API said about a node into a `Node`: the boundary behind which its text may be relied on.

Names and addresses end up in file names, ssh configuration and group names, so only those of the documented form
pass. Labels and descriptions stay any text and are only ever shown.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any

from tpu_ops.cloud.accelerators import AcceleratorType, accelerator_type
from tpu_ops.cloud.nodes import split_name
from tpu_ops.errors import CloudError
from tpu_ops.fleet.model import Node


def node(data: dict[str, Any]) -> Node:
    """Given a node's dictionary from `tpu_ops.cloud.nodes`, return the node.

    Raises:
        CloudError: Its resource name is not of the documented form.
    """
    parts = split_name(data["name"])
    if parts is None:
        raise CloudError(f"the API gave a node whose name is not of the documented form: {data['name']!r}")
    project, zone, name = parts
    kind = _kind(data["accelerator_type"])
    return Node(
        name=name,
        project=project,
        zone=zone,
        node_id=data["node_id"] if data["node_id"].isdecimal() else "",
        accelerator_type=data["accelerator_type"],
        runtime_version=data["runtime_version"],
        state=data["state"],
        health=data["health"],
        health_description=data["health_description"],
        internal_ips=_addresses(data["internal_ips"], data["network_configs"], kind),
        external_ips=_addresses(data["external_ips"], data["network_configs"], kind),
        chips=kind.chips if kind else 0,
        chips_per_worker=kind.chips_per_worker if kind else 0,
        topology=data["topology"] or (kind.topology if kind else ""),
        labels=dict(sorted(data["labels"].items())),
        symptoms=tuple(data["symptoms"]),
        queued_resource=data["queued_resource"].rsplit("/", 1)[-1],
        multislice=data["multislice"],
        preemptible=data["preemptible"] or data["spot"],
        spot=data["spot"],
        reserved=data["reserved"],
        data_disks=tuple(data["data_disks"]),
        service_account=data["service_account"],
        create_time=data["create_time"],
        metadata_keys=tuple(data["metadata_keys"]),
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


def _addresses(listed: list[str], interfaces: int, kind: AcceleratorType | None) -> tuple[str, ...]:
    """Return one address per worker: with several network interfaces, a worker's endpoints follow each other."""
    several = interfaces > 1 and len(listed) % interfaces == 0
    step = interfaces if several and not (kind and len(listed) == kind.workers) else 1
    return tuple(_address(text) for text in listed[::step])


def _address(text: str) -> str:
    """Return an address that is one, else the empty string."""
    try:
        # Behind a % an IPv6 address has a scope: any text, and of no use on another machine.
        return "" if "%" in text else str(ipaddress.ip_address(text))
    except ValueError:
        return ""
