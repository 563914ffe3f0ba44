"""A worker's host variables and groups for Ansible, as plain data."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tpu_ops.cloud.node import Node, Worker, node_labels

#: Facts that roles and playbooks read as `tpu_<name>`, even if the fleet's file sets another prefix for host variables.
READ_BY_ROLES = frozenset(
    {
        "accelerator_type",
        "chips",
        "chips_per_worker",
        "external_ip",
        "internal_ip",
        "internal_ips",
        "node",
        "node_label",
        "preemptible",
        "project",
        "queued_resource",
        "slice_index",
        "spot",
        "state",
        "worker_count",
        "worker_index",
        "zone",
    }
)


def facts(worker: Worker) -> dict[str, Any]:
    """Return the facts of a worker and its node; the keys are the names of host variables without the prefix."""
    return node_facts(worker.node) | worker_facts(worker)


def node_facts(node: Node) -> dict[str, Any]:
    """Return the facts that all workers of a node share."""
    return {
        "node": node.name,
        "node_id": node.node_id,
        "worker_count": node.worker_count,
        "project": node.project,
        "zone": node.zone,
        "region": node.region,
        "accelerator_type": node.accelerator_type,
        "chips": node.chips,
        "chips_per_worker": node.chips_per_worker,
        "topology": node.topology,
        "runtime_version": node.runtime_version,
        "state": node.state,
        "health": node.health,
        "health_description": node.health_description,
        "labels": dict(node.labels),
        "internal_ips": list(node.internal_ips),
        "external_ips": list(node.external_ips),
        "queued_resource": node.queued_resource,
        "slice_index": node.slice_index,
        "preemptible": node.preemptible,
        "spot": node.spot,
        "reserved": node.reserved,
        "data_disks": [dict(disk) for disk in node.data_disks],
        "service_account": node.service_account,
        "create_time": node.create_time,
    }


def worker_facts(worker: Worker) -> dict[str, Any]:
    """Return the facts of one worker."""
    return {
        "host": worker.host,
        "node_label": worker.label,
        "worker_index": worker.index,
        "is_first_worker": worker.index == 0,
        "symptoms": [dict(entry) for entry in worker.node.symptoms if entry["worker_id"] in ("", str(worker.index))],
        "internal_ip": worker.internal_ip,
        "external_ip": worker.external_ip,
        "instance_name": worker.instance_name,
        "host_key_alias": worker.host_key_alias,
    }


def facts_without_worker(node: Node, label: str) -> dict[str, Any]:
    """Return the facts of a node without workers: the facts of a worker are null or empty.

    Args:
        node: The node.
        label: The node's unique short label.
    """
    return node_facts(node) | {
        "host": None,
        "node_label": label,
        "worker_index": None,
        "is_first_worker": False,
        "symptoms": [dict(entry) for entry in node.symptoms],
        "internal_ip": "",
        "external_ip": "",
        "instance_name": "",
        "host_key_alias": "",
    }


def groups(nodes: Iterable[Node], labels: Mapping[str, str] | None = None) -> dict[str, tuple[str, ...]]:
    """Return the groups of each node's workers, by the node's full name.

    Groups are named after node, zone, accelerator type, state and queued resource; characters other than letters,
    digits and underscores are replaced. A host name always contains a dash and a group name never does, so the two
    cannot collide. If several nodes or queued resources would share a group name, a short digest is added to each name.

    Args:
        nodes: All listed nodes, or a part of them.
        labels: Full name of each node -> its label among all listed nodes; needed if ``nodes`` is only a part.
    """
    nodes = list(nodes)
    labels = node_labels(nodes) if labels is None else labels
    own = _unique({node.full_name: group_name("node", labels[node.full_name]) for node in nodes})
    places = {node.full_name: f"{node.project}/{node.zone}/{node.queued_resource}" for node in nodes}
    queued = _unique(
        {places[node.full_name]: group_name("queued", node.queued_resource) for node in nodes if node.queued_resource}
    )
    return {
        node.full_name: (
            own[node.full_name],
            group_name("zone", node.zone),
            group_name("type", node.accelerator_type or "unknown"),
            group_name("state", node.state.lower()),
            *((queued[places[node.full_name]],) if node.queued_resource else ()),
        )
        for node in nodes
    }


def _unique(names: Mapping[str, str]) -> dict[str, str]:
    """Return the group names by key; a name that several keys share gets a digest of the key."""
    shared = Counter(names.values())
    return {
        thing: f"{name}_{hashlib.sha256(thing.encode()).hexdigest()[:6]}" if shared[name] > 1 else name
        for thing, name in names.items()
    }


def group_name(kind: str, text: str) -> str:
    """Return ``<kind>_<text>`` as a valid group name."""
    return f"{kind}_{re.sub(r'[^A-Za-z0-9_]', '_', text)}"
