"""Finds the workers of a target on the command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from ClusterShell.NodeSet import NodeSet, NodeSetException
from ClusterShell.NodeUtils import GroupResolver, GroupResolverError

from tpu_ops import texts
from tpu_ops.cloud.node import Node, Worker, node_labels, without_workers, workers_of
from tpu_ops.cloud.remedies import until_ready
from tpu_ops.errors import UsageError
from tpu_ops.fleet import hostvars

#: A range of numbers in a node set. Maximum count of names in one part of a target, and of digits in a number.
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:/(\d+))?)?")
_MOST_NAMES, _MOST_DIGITS = 100_000, 9

#: Operators between node sets (not inside brackets): union, difference, intersection, symmetric difference.
_OPERATOR = re.compile(r"([,!&^])(?![^\[]*\])")

_EMPTY_FLEET = (
    "the fleet has no workers: create a node with `tpu_ops create`, or look for new ones with `tpu_ops refresh`"
)
#: Part of messages: where the fleet's filters are set.
FILTERS = "see `names`, `labels` and `accelerator_types` in inventory/tpu_vm.yml"


class UnknownError(UsageError):
    """No known node, worker or group has this name."""


def select(
    workers: Sequence[Worker], target: str, states: Collection[str] = (), listed: Sequence[Node] = ()
) -> list[Worker]:
    """Return the workers that a target means, in the fleet's order.

    Args:
        workers: All workers of the fleet.
        target: A node's label (`pod`), a host (`pod-w0`), a ClusterShell node set of either (`pod-w[0-3]`), a group of
            the inventory (`@zone_us_central2_b`, `@all`), or several of them joined by `,` (union), `!` (difference),
            `&` (intersection) or `^` (symmetric difference).
        states: Groups contain only workers of nodes in these states; empty means all states.
        listed: All nodes of the projects and zones, which determine group names; may be omitted if no filter applies.

    Raises:
        UnknownError: A name in the target is unknown, or the target consists of empty groups.
        UsageError: A name is ambiguous, or the operators leave no worker.
    """
    names = _Names(workers, states, listed)
    parts = _OPERATOR.split(target.replace(" ", ""))
    chosen = names.expand(parts[0], target)
    for operator, part in zip(parts[1::2], parts[2::2], strict=True):
        hosts = names.expand(part, target)
        match operator:
            case ",":
                chosen |= hosts
            case "!":
                chosen -= hosts
            case "&":
                chosen &= hosts
            case _:
                chosen ^= hosts
    if not chosen:
        what, where = "the target matches no worker", f"target {shortened(target)}"
        if not workers:
            raise UnknownError(what, where=where, fix=of_empty_fleet(listed))
        if {*parts[1::2]} - {","}:
            raise UsageError(what, where=where, fix="check the operators in the target (, ! & ^): they leave no worker")
        fix = f"groups hold workers of nodes that are {' or '.join(states)}; `tpu_ops list` shows the state of each"
        raise UnknownError(what, where=where, fix=fix)
    return [worker for worker in workers if worker.host in chosen]


class _Names:
    """All names that a target can contain, and the hosts that each name stands for."""

    def __init__(self, workers: Sequence[Worker], states: Collection[str], listed: Sequence[Node]) -> None:
        self._workers, self._states = workers, states
        self._listed = listed or list({worker.node.full_name: worker.node for worker in workers}.values())
        self.hosts = {worker.host for worker in workers}
        self.nodes: dict[str, set[str]] = {}
        self.shared: dict[str, list[str]] = {}
        for worker in workers:
            label = worker.label
            if label not in self.nodes and label != worker.node.name:
                self.shared.setdefault(worker.node.name, []).append(label)
            self.nodes.setdefault(label, set()).add(worker.host)

    def expand(self, part: str, target: str) -> set[str]:
        """Return the hosts of a node set that has no operators outside its brackets."""
        return set().union(*(self._hosts_of(name, target) for name in _fold_out(part, target)))

    def _hosts_of(self, name: str, target: str) -> set[str]:
        where = f"target {shortened(target)}"
        if name in self.nodes and name in self.hosts:
            raise UsageError(
                f"{name!r} is the name of a node and of another node's worker",
                where=where,
                fix=f"use {name}-w[0-{len(self.nodes[name]) - 1}] for the node",
            )
        if name in self.nodes:
            return self.nodes[name]
        if name in self.hosts:
            return {name}
        if name in self.shared:
            raise UsageError(
                f"several nodes are called {name!r}", where=where, fix=f"use {' or '.join(self.shared[name])}"
            )
        if name.startswith("@"):
            return self._group(name[1:], where)
        if node := self._without_workers(name):
            raise UnknownError(f"node {shortened(name)} {without_workers(node)}", where=where, fix=until_ready(node))
        raise UnknownError(f"no node or worker is called {shortened(name)}", where=where, fix=self._hint(name))

    def _without_workers(self, name: str) -> Node | None:
        """Return the node with this label if it has no workers; else None."""
        labels = node_labels(self._listed)
        return next((node for node in self._listed if labels[node.full_name] == name and not node.worker_count), None)

    def _groups(self) -> dict[str, set[str]]:
        """Return group name -> hosts, for each built-in group of the inventory and for `all`. A group can be empty."""
        labels = node_labels(self._listed) | {worker.node.full_name: worker.label for worker in self._workers}
        names, found = hostvars.groups(self._listed, labels), {"all": set[str]()}
        for worker in self._workers:
            for name in ("all", *names[worker.node.full_name]):
                hosts = found.setdefault(name, set())
                if not self._states or worker.node.state in self._states:
                    hosts.add(worker.host)
        return found

    def _group(self, name: str, where: str) -> set[str]:
        groups = self._groups()
        if name in groups:
            return groups[name]
        close = alike(name, groups)
        fix = f"did you mean @{' or @'.join(close)}?" if close else f"groups: {texts.some(sorted(groups))}"
        raise UnknownError(f"no group is called {shortened(name)}", where=where, fix=fix)

    def _hint(self, name: str) -> str:
        if name in self._groups():
            return f"{'for all workers, write' if name == 'all' else 'this is the name of a group: write'} @{name}"
        label, dash, index = name.rpartition("-w")
        if dash and index.isascii() and index.isdecimal() and label in self.nodes:
            count = len(self.nodes[label])
            return f"{label} has worker{f's 0 to {count - 1}' if count > 1 else ' 0 only'}"
        if any(name in (label, *hosts) for label, hosts in _hidden(self._workers, self._listed).items()):
            return f"a node or worker of this name exists, but the fleet's filters exclude it: {FILTERS}"
        if close := alike(name, [*self.nodes, *self.hosts]):
            return f"did you mean {' or '.join(close)}? `tpu_ops refresh` looks for new nodes"
        if self.nodes:
            known = texts.some(sorted(self.nodes, key=texts.natural))
            return f"known nodes: {known}; `tpu_ops refresh` looks for new ones"
        return of_empty_fleet(self._listed)


def _hidden(workers: Sequence[Worker], listed: Sequence[Node]) -> dict[str, list[str]]:
    """Return label -> hosts for each node that the fleet's filters exclude."""
    seen, hidden = {worker.node.full_name for worker in workers}, dict[str, list[str]]()
    for worker in workers_of(listed):
        if worker.node.full_name not in seen:
            hidden.setdefault(worker.label, []).append(worker.host)
    return hidden


def of_empty_fleet(listed: Sequence[Node]) -> str:
    """Return the fix for a fleet without workers, given all nodes of the projects and zones."""
    for node in listed:
        if not node.worker_count:
            return f"node {node_labels(listed)[node.full_name]} {without_workers(node)}: {until_ready(node)}"
    if hidden := _hidden((), listed):
        names = texts.some(sorted(hidden, key=texts.natural))
        return f"the fleet's filters exclude all of its nodes ({names}): {FILTERS}"
    return _EMPTY_FLEET


def alike(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that resemble a name."""
    return difflib.get_close_matches(name, list(known), n=3)


def shortened(text: str, limit: int = 80) -> str:
    """Return a text in quotes for an error, shortened to one line."""
    return repr(text if len(text) <= limit else f"{text[:limit]}...")


def _too_many(part: str) -> bool:
    """Return whether a node set has too many names. Checked here since ClusterShell would first create all names."""
    product = 1
    for inside in re.findall(r"\[([^\]]*)\]?", part):
        count = 0
        for piece in inside.split(","):
            found = _RANGE.fullmatch(piece.strip())
            if not found:
                continue  # ClusterShell reports the error
            if any(len(number or "") > _MOST_DIGITS for number in found.groups()):
                return True
            first, last, step = (int(number) if number else None for number in found.groups())
            count += 1 if last is None else max(0, last - (first or 0)) // (step or 1) + 1
        product *= max(1, count)
    return product > _MOST_NAMES


def _fold_out(part: str, target: str) -> Iterable[str]:
    """Return all names that a node set such as `pod-w[0-1]` stands for; a text without brackets is one name."""
    if not part:
        raise UsageError("a name is missing", where=f"target {shortened(target)}", fix="name a node, as in `pod`")
    if "[" not in part:
        return [part]
    if _too_many(part):
        raise UsageError(
            f"the node set stands for more than {_MOST_NAMES} names",
            where=f"target {shortened(target)}",
            fix="for all workers of a node, write only the node's name, as in `pod`",
        )
    try:
        return [str(name) for name in NodeSet(part, resolver=GroupResolver())]
    except (NodeSetException, GroupResolverError) as exc:
        # For groups and wildcards ClusterShell's message would not help: it says only that a source is missing.
        what = (
            f"not a node set: {exc}"
            if isinstance(exc, NodeSetException)
            else "a group or wildcard cannot have brackets"
        )
        raise UsageError(what, where=f"target {shortened(target)}", fix="write the node set as pod-w[0-3]") from exc


def names_of(text: str) -> list[str]:
    """Return the names of a node set or of a list with commas, such as ``tpu-[1-4]`` or ``a,b``, without duplicates.

    Raises:
        UsageError: The text is not a node set, or has too many names.
    """
    parts = [text] if "[" in text else text.split(",")
    names = (name for part in parts for name in _fold_out(part.strip(), text))
    return sorted(dict.fromkeys(names), key=texts.natural)
