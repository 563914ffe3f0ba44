"""Turns what the API said about a node into a `Node`: the boundary behind which its text may be relied on.

Names and addresses end up in file names, ssh configuration and group names, so only those of the documented form
pass. Labels and descriptions stay any text and are only ever shown.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Any

from tpu_ops.cloud.accelerators import accelerator_type
from tpu_ops.errors import CloudError
from tpu_ops.fleet.model import Node

_NAME = re.compile(
    r"^projects/(?P<project>[a-z0-9][a-z0-9.:-]*)/locations/(?P<zone>[a-z][a-z0-9-]*)/nodes/(?P<name>[a-z][a-z0-9_-]*)$"
)


def node(data: dict[str, Any]) -> Node:
    """Given a node's dictionary from `tpu_ops.cloud.nodes`, return the node.

    Raises:
        CloudError: Its resource name is not of the documented form.
    """
    match = _NAME.fullmatch(data["name"])
    if match is None:
        raise CloudError(f"the API listed a node whose name is not of the documented form: {data['name']!r}")
    chips, chips_per_worker, topology = _shape(data["accelerator_type"])
    return Node(
        name=match["name"],
        project=match["project"],
        zone=match["zone"],
        node_id=data["node_id"] if data["node_id"].isdecimal() else "",
        accelerator_type=data["accelerator_type"],
        runtime_version=data["runtime_version"],
        state=data["state"],
        health=data["health"],
        health_description=data["health_description"],
        internal_ips=_addresses(data["internal_ips"], data["network_configs"]),
        external_ips=_addresses(data["external_ips"], data["network_configs"]),
        chips=chips,
        chips_per_worker=chips_per_worker,
        topology=data["topology"] or topology,
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


def _shape(name: str) -> tuple[int, int, str]:
    """Chips, chips per worker and topology of an accelerator type; zeros where the table does not know it."""
    try:
        kind = accelerator_type(name)
    except ValueError:
        return 0, 0, ""
    return kind.chips, kind.chips_per_worker, kind.topology


def _addresses(listed: list[str], network_configs: int) -> tuple[str, ...]:
    """Return one address per worker: with several network interfaces, a worker's endpoints follow each other."""
    step = network_configs if network_configs > 1 and len(listed) % network_configs == 0 else 1
    return tuple(_address(text) for text in listed[::step])


def _address(text: str) -> str:
    """Return an address that is one, else the empty string."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""
