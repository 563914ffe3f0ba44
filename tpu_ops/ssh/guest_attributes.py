"""Reads host keys and instance names of workers from their guest attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tpu_ops.cloud import forms
from tpu_ops.cloud import nodes as cloud_nodes
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.node import SERVING_STATES, Node, Worker
from tpu_ops.cloud.pages import PATIENCE
from tpu_ops.ssh.host_keys import differ
from tpu_ops.ssh.known_hosts import Keys, valid_key

#: Errors by which the API says that it gives no guest attributes of a node. After other errors, it is unknown whether
#: the node has some.
_TOLD = ("NOT_FOUND", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNIMPLEMENTED", "PERMISSION_DENIED")


@dataclass(frozen=True)
class Learned:
    """The host keys and instance names that were read from the guest attributes of nodes.

    Attributes:
        keys: Worker's alias in known_hosts -> the worker's host keys.
        instance_names: Node's full name -> the instance names of its workers.
        reasons: Node's full name -> why its host keys are missing.
        unheard: Full names of the nodes of which it is unknown whether they publish host keys.
        trusted_first: Aliases whose keys in the published snapshot were trusted on first contact.
    """

    keys: dict[str, Keys] = field(default_factory=dict)
    instance_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    unheard: frozenset[str] = frozenset()
    trusted_first: frozenset[str] = frozenset()


def wanted(
    workers: Iterable[Worker], known: Mapping[str, Keys], *, verify: bool = False, instance_names: bool = False
) -> list[Node]:
    """Return the READY nodes whose guest attributes have to be read.

    Args:
        workers: The workers of the fleet.
        known: The known host keys.
        verify: Whether to include all nodes, not only nodes with an unknown host key.
        instance_names: Whether to include nodes with an unknown instance name too.
    """
    nodes = {
        worker.node.full_name: worker.node
        for worker in workers
        if worker.node.state in SERVING_STATES
        and worker.node.node_id
        and (verify or worker.host_key_alias not in known or (instance_names and not worker.instance_name))
    }
    return list(nodes.values())


def fetch(tpu: Tpu, nodes: Sequence[Node], *, instance_names: bool = False) -> Learned:
    """Read the guest attributes of all nodes concurrently. If that fails for a node, record only the reason.

    The time limit for all nodes together is that of a listing.
    """
    tpu = tpu.within(PATIENCE * tpu.timeout)
    answers = tpu.concurrently(lambda node: _fetch(tpu, node, instance_names), nodes)
    unheard = [
        node.full_name
        for node, answer in zip(nodes, answers, strict=True)
        if isinstance(answer, ApiError) and answer.status not in _TOLD
    ]
    learned = Learned(unheard=frozenset(unheard))
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, ApiError):
            learned.reasons[node.full_name] = answer.what
            continue
        names = tuple(entry.instance_name if forms.INSTANCE.fullmatch(entry.instance_name) else "" for entry in answer)
        if any(names):
            learned.instance_names[node.full_name] = names
        for index, attributes in enumerate(answer):
            keys = {kind: blob for kind, blob in attributes.host_keys.items() if valid_key(kind, blob)}
            if keys:
                learned.keys[Worker("", node, index).host_key_alias] = keys
    return learned


def of_the_same(tpu: Tpu, nodes: Sequence[Node], learned: Learned, known: Mapping[str, Keys]) -> Learned:
    """Return what was learned, without nodes that were recreated after they were listed.

    Only nodes with a changed host key are checked, by another request for the node.

    Args:
        tpu: The client.
        nodes: The nodes that were asked, as listed.
        learned: What was learned from the nodes.
        known: The known host keys.
    """
    doubtful = [
        node
        for node in nodes
        if any(
            differ(known[alias], learned.keys[alias])
            for alias in _aliases(node)
            if alias in known and alias in learned.keys
        )
    ]
    answers = tpu.concurrently(lambda node: _replaced(tpu, node), doubtful)
    replaced = [node for node, gone in zip(doubtful, answers, strict=True) if gone]
    names = {node.full_name for node in replaced}
    dropped = {alias for node in replaced for alias in _aliases(node)}
    return Learned(
        {alias: keys for alias, keys in learned.keys.items() if alias not in dropped},
        {name: instances for name, instances in learned.instance_names.items() if name not in names},
        learned.reasons | dict.fromkeys(names, "the node was deleted or recreated while its host keys were being read"),
        learned.unheard | names,
    )


def _aliases(node: Node) -> list[str]:
    return [Worker("", node, index).host_key_alias for index in range(node.worker_count)]


def _replaced(tpu: Tpu, node: Node) -> bool:
    """Return whether a node was deleted or recreated after it was listed; False if the API gives no answer."""
    try:
        return cloud_nodes.get_node(tpu, node.full_name).node_id not in ("", node.node_id)
    except ApiError as exc:
        return exc.status == "NOT_FOUND"


def _fetch(tpu: Tpu, node: Node, instance_names: bool) -> list[cloud_nodes.GuestAttributes] | ApiError:
    try:
        return cloud_nodes.guest_attributes(tpu, node.full_name, node.worker_count, instance_names=instance_names)
    except ApiError as exc:
        return exc
