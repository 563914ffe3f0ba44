"""What Ansible is told about a worker: host variables and groups, as plain data."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tpu_ops.fleet.model import Node, Worker, node_labels


def facts(worker: Worker) -> dict[str, Any]:
    """Return what is known about a worker and its node; the keys are host variables without their prefix."""
    node = worker.node
    return {
        "node": node.name,
        "node_label": worker.label,
        "node_id": node.node_id,
        "worker_index": worker.index,
        "worker_count": node.worker_count,
        "is_first_worker": worker.index == 0,
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
        "symptoms": [symptom for symptom in node.symptoms if symptom["worker_id"] in ("", str(worker.index))],
        "labels": dict(node.labels),
        "internal_ip": worker.internal_ip,
        "external_ip": worker.external_ip,
        "internal_ips": list(node.internal_ips),
        "external_ips": list(node.external_ips),
        "queued_resource": node.queued_resource,
        "preemptible": node.preemptible,
        "spot": node.spot,
        "reserved": node.reserved,
        "data_disks": [dict(disk) for disk in node.data_disks],
        "service_account": node.service_account,
        "create_time": node.create_time,
        "host_key_alias": worker.host_key_alias,
    }


def groups(nodes: Iterable[Node]) -> dict[str, tuple[str, ...]]:
    """Given all nodes in scope, return the groups of each node's workers by its full name.

    They are called after node, zone, accelerator type and state, with everything but letters, digits and
    underscores replaced. A host name always has a dash and a group name never, so that none can be both. Nodes
    whose labels would fall on one group name get a short digest in it.
    """
    nodes = list(nodes)
    labels = node_labels(nodes)
    shared = Counter(group_name("node", label) for label in labels.values())
    found: dict[str, tuple[str, ...]] = {}
    for node in nodes:
        own = group_name("node", labels[node.full_name])
        if shared[own] > 1:
            own += "_" + hashlib.sha256(node.full_name.encode()).hexdigest()[:6]
        found[node.full_name] = (
            own,
            group_name("zone", node.zone),
            group_name("type", node.accelerator_type or "unknown"),
            group_name("state", node.state.lower()),
        )
    return found


def group_name(kind: str, text: str) -> str:
    """Return ``<kind>_<text>`` as a valid group name."""
    return f"{kind}_{re.sub(r'[^A-Za-z0-9_]', '_', text)}"
