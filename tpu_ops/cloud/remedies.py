"""Fixes for nodes that do not serve, and the commands that delete nodes, as texts for messages."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tpu_ops.cloud.accelerators import default_runtime
from tpu_ops.cloud.node import SERVING_STATES, Node


def until_ready(node: Node) -> str:
    """Return the fix for a node that is not READY, or that has no workers."""
    if node.state in SERVING_STATES and not node.worker_count:
        return f"`tpu_ops refresh` asks the API again; if the API still lists no workers: {made_again(node)}"
    if node.state in ("PREEMPTED", "TERMINATED"):
        return f"the node does not come back by itself: {made_again(node)}"
    if node.state in ("STOPPED", "STOPPING"):
        words = ["tpu_ops", "node", "start", node.name]
        if node.worker_count > 1 or node.queued_resource or node.preemptible:
            # `tpu_ops node` refuses these.
            words = ["gcloud", "compute", "tpus", "tpu-vm", "start", node.name]
        start = shlex.join([*words, "--zone", node.zone, "--project", node.project])
        return f"start the node{' once it is STOPPED' if node.state == 'STOPPING' else ''}: `{start}`"
    if node.state == "DELETING":
        return "the node is being deleted; create it again once `tpu_ops list` no longer shows it"
    return "`tpu_ops list` shows when the node is READY; `tpu_ops refresh` asks the API for its current state"


def made_again(node: Node) -> str:
    """Return the commands that delete a node and create it again."""
    place = ["--zone", node.zone, "--project", node.project]
    if node.queued_resource:
        # The nodes of a queued resource can only be created together.
        return f"`{queued_deletion(node)}` deletes the queued resource and all its nodes; then request it again"
    delete = node_deletion(node.name, node.zone, node.project)
    return f"`{delete}`, then `{shlex.join(_creation(node, place))}`"


def node_deletion(name: str, zone: str, project: str = "") -> str:
    """Return the command that deletes a node."""
    return shlex.join(["tpu_ops", "delete", name, "--zone", zone, *(["--project", project] if project else [])])


def queued_deletion(node: Node) -> str:
    """Return the command that deletes the queued resource of a node, with all its nodes."""
    return node_deletion(node.queued_resource, node.zone, node.project)


def _creation(node: Node, place: Sequence[str]) -> list[str]:
    """Return the `tpu_ops create` command for a node with the same properties, as far as it has options for them."""
    runtime = node.runtime_version
    return [
        *("tpu_ops", "create", node.name, "--type", node.accelerator_type, *place),
        *(["--runtime", runtime] if runtime not in ("", default_runtime(node.accelerator_type)) else []),
        *(["--spot"] if node.preemptible or node.spot else []),
        *(["--reserved"] if node.reserved else []),
        *(word for key, value in sorted(node.labels.items()) for word in ("--label", f"{key}={value}")),
    ]
