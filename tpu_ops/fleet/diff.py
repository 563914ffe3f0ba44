"""Finds the changes between two views of a fleet: nodes, names, states and addresses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tpu_ops.cloud.node import Node, Worker, label_of, workers_of


@dataclass(frozen=True)
class NameChange:
    """A node got another label, and its workers other names, because another node of the same name appeared or went."""

    old: str
    new: str


@dataclass(frozen=True)
class StateChange:
    """A node's state changed."""

    node: str
    old: str
    new: str


@dataclass(frozen=True)
class AddressChange:
    """A worker's address changed. ``kind`` is ``external`` or ``internal``; an empty string means no address."""

    host: str
    kind: str
    old: str
    new: str


@dataclass(frozen=True)
class Changes:
    """The changes between two views of a fleet, in the order of the fleet's nodes.

    Attributes:
        first: Whether this is the first view of the fleet, with no earlier view to compare with.
        new: Labels of new nodes.
        gone: Former labels of nodes that no longer exist.
        recreated: Labels of nodes that were deleted and created again under the same name.
        renamed: Nodes whose label changed.
        states: Nodes whose state changed.
        addresses: Workers whose address changed.
    """

    first: bool = False
    new: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    recreated: tuple[str, ...] = ()
    renamed: tuple[NameChange, ...] = ()
    states: tuple[StateChange, ...] = ()
    addresses: tuple[AddressChange, ...] = ()

    def __bool__(self) -> bool:
        return any((self.new, self.gone, self.recreated, self.renamed, self.states, self.addresses))

    def news(self) -> list[str]:
        """Return one line per change; no lines for the first view, in which everything is new."""
        if self.first:
            return []
        return [
            *(f"new        {label}" for label in self.new),
            *(f"gone       {label}" for label in self.gone),
            *(f"recreated  {label}" for label in self.recreated),
            *(f"renamed    {change.old} -> {change.new}" for change in self.renamed),
            *(f"state      {change.node}: {change.old} -> {change.new}" for change in self.states),
            *(
                f"address    {change.host} {change.kind}: {change.old or '-'} -> {change.new or '-'}"
                for change in self.addresses
            ),
        ]

    def about(self, hosts: Collection[str]) -> Changes:
        """Return only the changes of these workers and their nodes."""
        labels = {label_of(host) for host in hosts}
        return replace(
            self,
            new=(),
            gone=tuple(label for label in self.gone if label in labels),
            recreated=tuple(label for label in self.recreated if label in labels),
            renamed=tuple(change for change in self.renamed if {change.old, change.new} & labels),
            states=tuple(change for change in self.states if change.node in labels),
            addresses=tuple(change for change in self.addresses if change.host in hosts),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the changes as a dictionary of JSON types."""
        return asdict(self)


#: Some nodes, and full name -> label for these nodes. Labels are unique among all nodes of the projects and zones.
Labelled = tuple[Iterable[Node], Mapping[str, str]]


def diff(old: Labelled | None, new: Labelled) -> Changes:
    """Return the changes between two views; ``old`` is None if there was no earlier view.

    The new addresses of a recreated node are not reported as changes of addresses.
    """
    before = {node.full_name: node for node in (old[0] if old else ())}
    now = {node.full_name: node for node in new[0]}
    labels, old_labels = new[1], old[1] if old else {}
    names = ((old_labels[name], labels[name]) for name in now if name in before)
    kept = [(before[name], node) for name, node in now.items() if name in before]
    same = [(was, node) for was, node in kept if was.node_id == node.node_id]
    return Changes(
        first=old is None,
        new=tuple(labels[name] for name in now if name not in before),
        gone=tuple(old_labels[name] for name in before if name not in now),
        recreated=tuple(labels[node.full_name] for was, node in kept if was.node_id != node.node_id),
        renamed=tuple(NameChange(was, label) for was, label in names if was != label),
        states=tuple(
            StateChange(labels[node.full_name], was.state, node.state) for was, node in kept if was.state != node.state
        ),
        addresses=_addresses(same, workers_of(now.values(), labels)),
    )


def _addresses(same: list[tuple[Node, Node]], now: Iterable[Worker]) -> tuple[AddressChange, ...]:
    before = {node.full_name: was for was, node in same}
    changes = []
    for worker in now:
        was = before.get(worker.node.full_name)
        if was is None:
            continue
        for kind, old, new in (
            ("internal", was.internal_ips, worker.internal_ip),
            ("external", was.external_ips, worker.external_ip),
        ):
            address = old[worker.index] if worker.index < len(old) else ""
            if address != new:
                changes.append(AddressChange(worker.host, kind, address, new))
    return tuple(changes)
