"""The plan of `tpu_ops apply`: the steps that make the nodes of a fleet what nodes.yml declares. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tpu_ops import texts
from tpu_ops.cloud import deletion
from tpu_ops.cloud.data_disks import known_mode
from tpu_ops.cloud.lifecycle import ON_THE_WAY
from tpu_ops.cloud.names import short_name, split_name
from tpu_ops.cloud.node import SERVING_STATES, Node, node_labels
from tpu_ops.cloud.queued_resources import QueuedResource
from tpu_ops.cloud.remedies import queued_deletion, until_ready
from tpu_ops.cloud.setups import Setup
from tpu_ops.cloud.wish import DISK_MODES
from tpu_ops.config.settings import Filters
from tpu_ops.fleet.changing import Change
from tpu_ops.fleet.declared import Declared
from tpu_ops.fleet.holdings import Holdings

#: States of a node whose machine is gone or goes, so that the node has to be made again.
_LOST = ("PREEMPTED", "TERMINATED", "DELETING")


class Action(StrEnum):
    """What a step does."""

    CREATE = "create"
    AGAIN = "make again"
    WAIT = "wait"
    CHANGE = "change"
    CONFIGURE = "configure"
    RECREATE = "recreate"
    DELETE = "delete"
    LEAVE = "leave"


@dataclass(frozen=True)
class Step:
    """One step of a plan.

    Attributes:
        action: What is done.
        name: Short name of the node, or of a queued resource that is not declared.
        project: The project.
        zone: The zone; empty if the node does not exist yet.
        why: The reasons, in words.
        does: Whether this command does the step; False for steps that need another option or another command.
        declared: The declared node; None if it is not declared.
        node: The existing node.
        queued: The queued resource of the node.
        change: The change of an existing node.
    """

    action: Action
    name: str
    project: str
    zone: str = ""
    why: tuple[str, ...] = ()
    does: bool = True
    declared: Declared | None = None
    node: Node | None = None
    queued: QueuedResource | None = None
    change: Change = field(default_factory=Change)

    @property
    def creates(self) -> bool:
        """Whether the step makes a node."""
        return self.does and self.action in (Action.CREATE, Action.AGAIN, Action.RECREATE)

    @property
    def removes(self) -> bool:
        """Whether the step deletes the existing node or queued resource."""
        return self.does and self.action in (Action.AGAIN, Action.RECREATE, Action.DELETE)

    @property
    def destroys(self) -> bool:
        """Whether the step deletes something that may be in use."""
        return self.does and self.action in (Action.RECREATE, Action.DELETE)

    @property
    def deleted_nodes(self) -> tuple[str, ...]:
        """Resource names of the nodes that the step deletes if they exist: also those of its queued resource."""
        if not self.removes:
            return ()
        members = self.queued.nodes if self.queued else ()
        parent = self.queued.full_name.rpartition("/queuedResources/")[0] if self.queued else ""
        own = [self.node.full_name] if self.node else []
        return tuple(dict.fromkeys([*own, *(f"{parent}/nodes/{member.name}" for member in members)]))

    @property
    def removed(self) -> tuple[str, ...]:
        """Resource names of what the step deletes."""
        found = [one.full_name for one in (self.node, self.queued) if one is not None]
        return tuple(found) if self.removes else ()


@dataclass(frozen=True)
class Terms:
    """What a command may do, and what it knows besides the API's answers.

    Attributes:
        recreate: Whether nodes are recreated whose properties differ.
        prune: Whether nodes and disks that are not declared are deleted and detached.
        kept: Resource name of each node that a recovery on this machine brings back -> the run.
        unconfigured: Project and name of each node that apply has made, but not configured.
        zones: The fleet's zones; empty means all. Other zones are never pruned.
        filters: The fleet's filters. Nodes that they exclude are never pruned.
    """

    recreate: bool = False
    prune: bool = False
    kept: Mapping[str, str] = field(default_factory=dict)
    unconfigured: Collection[tuple[str, str]] = ()
    zones: tuple[str, ...] = ()
    filters: Filters = field(default_factory=Filters)


def steps(declared: Sequence[Declared], held: Holdings, terms: Terms) -> tuple[Step, ...]:
    """Return the steps in the order of the file; what is not declared comes last."""
    found: list[Step] = []
    used: set[str] = set()
    for one in declared:
        node = _node_of(one, held.nodes)
        if node is not None:
            used.add(node.full_name)
        found += _Decision(one, node, held, terms).steps()
    return (*found, *_undeclared(declared, used, held, terms))


def _node_of(one: Declared, nodes: Iterable[Node]) -> Node | None:
    """Return the existing node: of several, one in a declared zone first, then one that is not lost."""

    def rank(node: Node) -> tuple[bool, bool, str]:
        return (bool(one.zones) and node.zone not in one.zones, node.state in _LOST, node.full_name)

    return min((node for node in nodes if one.fits(node.project, node.name)), key=rank, default=None)


def _queued_of(one: Declared, queued: Iterable[QueuedResource]) -> QueuedResource | None:
    found = (each for each in queued if any(one.fits(each.project, node.name) for node in each.nodes))
    return min(found, key=lambda each: (each.is_husk, each.full_name), default=None)


def _source(node: Node, queued: Iterable[QueuedResource]) -> QueuedResource | None:
    """Return the queued resource that created a node, if it still exists."""
    place = (node.project, node.zone, node.queued_resource)
    return next((one for one in queued if (one.project, one.zone, one.name) == place), None)


def _source_unlisted(node: Node, queued: QueuedResource | None, held: Holdings) -> str:
    """Return, in words, that the queued resource of a node could not be listed; empty if it is known or has none."""
    if queued or not node.queued_resource or not deletion.is_unlisted(node, held.unlisted):
        return ""
    return f"its queued resource {node.queued_resource} could not be listed"


class _Decision:
    """Decides the steps for one declared node."""

    def __init__(self, one: Declared, node: Node | None, held: Holdings, terms: Terms) -> None:
        self._one, self._node, self._held, self._terms = one, node, held, terms
        self._queued = _source(node, held.queued) if node else _queued_of(one, held.queued)

    def steps(self) -> list[Step]:
        """Return the steps; none if the node is as declared."""
        found = [self._missing()] if self._node is None else self._existing(self._node)
        if not found or not (found[0].creates or found[0].action is Action.WAIT):
            return found
        if run := _recovered(self._one, self._node, self._terms.kept):
            return [self._left(f"left to the recovery of run {run}")]
        if self._node and found[0].removes and (why := _source_unlisted(self._node, self._queued, self._held)):
            return [self._left(why)]
        others = _others(found[0], self._held.nodes)
        if others and self._queued:
            stays = f"its queued resource {self._queued.name} also has {texts.some(others)}"
            fix = f": `{queued_deletion(self._node)}` deletes all of them" if self._node else ""
            return [self._left(f"{stays}{fix}")]
        return found

    def _step(self, action: Action, *why: str, does: bool = True, change: Change | None = None) -> Step:
        project, name = self._one.key
        place = self._node or self._queued
        zone = place.zone if place else ""
        known = (self._one, self._node, self._queued)
        return Step(action, name, project, zone, why, does, *known, change or Change())

    def _left(self, why: str) -> Step:
        return self._step(Action.LEAVE, why, does=False)

    def _missing(self) -> Step:
        """Return the step for a node that does not exist."""
        one, queued = self._one, self._queued
        project, _ = one.key
        for lost, zone in self._held.unlisted:
            may_be_there = zone == "-" or not one.zones or zone in one.zones or (queued and zone == queued.zone)
            if lost in (project, "-") and may_be_there:
                where = f"project {project}" if zone == "-" else f"zone {zone}"
                return self._left(f"{where} could not be listed, so the node may exist")
        if queued is not None:
            if queued.state == "ACTIVE":
                return self._step(Action.AGAIN, f"the node of queued resource {queued.name} is gone")
            if queued.state == "DELETING" or queued.is_husk:
                why = f": {queued.error}" if queued.error else ""
                return self._step(Action.AGAIN, f"queued resource {queued.name} is {queued.state}{why}")
            return self._left(f"requested: queued resource {queued.name} is {queued.state}")
        return self._step(Action.CREATE)

    def _existing(self, node: Node) -> list[Step]:
        """Return the steps for a node that exists."""
        one, terms = self._one, self._terms
        if node.state in _LOST:
            return [self._step(Action.AGAIN, f"is {node.state}")]
        setup = self._held.setups.get(node.full_name)
        if differs := differences(one, node, setup):
            only = [] if terms.recreate else ["only with --recreate"]
            lost = "everything on its boot disk is lost"
            return [self._step(Action.RECREATE, *differs, lost, *only, does=terms.recreate)]
        if node.state in ON_THE_WAY:
            return [self._step(Action.WAIT, f"is {node.state}")]
        if node.state not in SERVING_STATES:
            return [self._left(f"is {node.state}: {until_ready(node)}")]
        change, why, extra = changes(one, node, setup, detach=terms.prune)
        found = [self._step(Action.CHANGE, *why, change=change)] if change else []
        if extra and not terms.prune:
            are = "disk {} is" if len(extra) == 1 else "disks {} are"
            found.append(self._left(f"{are.format(texts.some(extra))} not declared: detached only with --prune"))
        if one.key in terms.unconfigured:
            found.append(self._step(Action.CONFIGURE, "site.yml has not run since the node was made"))
        return found


def differences(one: Declared, node: Node, setup: Setup | None) -> list[str]:
    """Return what differs, in words, between an existing node and its declaration, and cannot be changed.

    Properties that the file leaves out are not compared.
    """
    wish, found = one.wish, []

    def compare(key: str, has: object, wants: object, words: str = "") -> None:
        if key in one.given and has != wants:
            found.append(f"{words or key} is {has or 'none'}, not {wants}")

    compare("type", node.accelerator_type, wish.accelerator_type)
    compare("runtime", node.runtime_version, wish.runtime_version)
    if one.zones and node.zone not in one.zones:
        found.append(f"zone is {node.zone}, not {' or '.join(one.zones)}")
    if one.spot is not None and node.preemptible != one.spot:
        found.append("it is on-demand, not spot" if one.spot else "it is spot, not on-demand")
    if "reserved" in one.given and node.reserved != wish.reserved:
        found.append("it is not reserved" if wish.reserved else "it is reserved")
    compare("service_account", node.service_account, wish.service_account, "service account")
    if setup is None:
        return found
    for key in ("network", "subnetwork"):
        wants = getattr(wish, key)
        has = getattr(setup, key)
        compare(key, has if "/" in wants else short_name(has), wants)
    if "internal_only" in one.given and setup.internal_only != wish.internal_only:
        found.append("it has external addresses" if wish.internal_only else "it has no external addresses")
    if "scopes" in one.given and set(setup.scopes) != set(wish.scopes):
        found.append(f"scopes are {texts.some(sorted(setup.scopes)) or 'none'}, not {texts.some(sorted(wish.scopes))}")
    return found


def changes(
    one: Declared, node: Node, setup: Setup | None, *, detach: bool = False
) -> tuple[Change, list[str], list[str]]:
    """Return how an existing node is changed, the reasons in words, and its disks that are not declared.

    Labels, entries of the metadata and disks that the file does not declare stay; with ``detach``, disks do not.
    """
    wish, why = one.wish, []
    labels = {key: value for key, value in wish.labels.items() if node.labels.get(key) != value}
    for key, value in labels.items():
        why.append(f"label {key}={value}{f' (now {node.labels[key]})' if key in node.labels else ''}")
    has = setup.metadata if setup else wish.metadata
    metadata = {key: value for key, value in wish.metadata.items() if has.get(key) != value}
    # The values may be secret.
    why += [f"metadata {key} {'differs' if key in has else 'is missing'}" for key in metadata]
    attached = {short_name(disk["source"]): known_mode(disk["mode"]) for disk in node.data_disks}
    disks = {name: mode for name, mode in wish.disks.items() if attached.get(name) != DISK_MODES[mode]}
    why += [
        f"disk {name}:{mode}{' (attached in the other mode)' if name in attached else ' attached'}"
        for name, mode in disks.items()
    ]
    extra = sorted(set(attached) - set(wish.disks)) if "disks" in one.given else []
    gone = tuple(extra) if detach else ()
    why += [f"disk {name} detached" for name in gone]
    return Change(labels, metadata, disks, gone), why, extra


def _recovered(one: Declared, node: Node | None, kept: Mapping[str, str]) -> str:
    """Return the run whose recovery on this machine brings a declared node back; empty if there is none."""
    for name, run in kept.items():
        project, zone, short = split_name(name) or ("", "", "")
        if one.fits(project, short) and (node is None or node.zone == zone):
            return run
    return ""


def _others(step: Step, nodes: Iterable[Node]) -> list[str]:
    """Return other live nodes of the queued resource that a step deletes."""
    if step.queued is None or not step.removes:
        return []
    place, names = (step.queued.project, step.queued.zone), {one.name for one in step.queued.nodes} - {step.name}
    return sorted(
        node.name
        for node in nodes
        if (node.project, node.zone) == place and node.name in names and node.state not in _LOST
    )


def _undeclared(declared: Sequence[Declared], used: set[str], held: Holdings, terms: Terms) -> list[Step]:
    """Return a step for each node and queued resource of the fleet that is not declared."""
    labels, known = node_labels(held.nodes), {one.key for one in declared}
    only = () if terms.prune else ("deleted only with --prune",)
    found, seen = [], set[str]()
    for node in held.nodes:
        if node.full_name in used or node.state == "DELETING" or (terms.zones and node.zone not in terms.zones):
            continue
        if not terms.filters.match(node.name, labels[node.full_name], node.accelerator_type, node.labels):
            continue
        queued = _source(node, held.queued)
        seen.update([queued.full_name] if queued else [])
        if run := terms.kept.get(node.full_name):
            found.append(_left(node, f"not declared, but left to the recovery of run {run}"))
        elif unknown := _source_unlisted(node, queued, held):
            found.append(_left(node, f"not declared, but {unknown}"))
        elif queued and (needed := _needed(queued, known, held, terms)):
            found.append(_left(node, f"not declared, but its queued resource {queued.name} {needed}"))
        else:
            why = (f"{node.accelerator_type}, {node.state}", "not declared", *only)
            place = (Action.DELETE, node.name, node.project, node.zone)
            found.append(Step(*place, why, terms.prune, node=node, queued=queued))
    for one in held.queued:
        if one.full_name in seen or one.state == "DELETING" or (terms.zones and one.zone not in terms.zones):
            continue
        if not _needed(one, known, held, terms):
            why = (f"queued resource, {one.state}", "not declared", *only)
            found.append(Step(Action.DELETE, one.name, one.project, one.zone, why, terms.prune, queued=one))
    return found


def _needed(one: QueuedResource, known: Collection[tuple[str, str]], held: Holdings, terms: Terms) -> str:
    """Return why a queued resource is not pruned, in words; empty if all its nodes may be deleted.

    Args:
        one: The queued resource.
        known: Project and name of each declared node.
        held: What exists.
        terms: What the command may do.
    """
    if deletion.is_unlisted(one, held.unlisted):
        return "is in a zone that could not be listed"
    requested = {asked.name: asked.accelerator_type for asked in one.nodes}
    there = {
        node.name: node
        for node in held.nodes
        if (node.project, node.zone) == (one.project, one.zone)
        and (node.name in requested or node.queued_resource == one.name)
    }
    labels = node_labels(held.nodes)
    # The labels of a node that does not exist are unknown: the existing nodes decide.
    absent = terms.filters._replace(labels=()) if there else terms.filters
    parent = one.full_name.rpartition("/queuedResources/")[0]
    for name in sorted({*requested, *there}):
        if (one.project, name) in known:
            return "has declared nodes"
        if run := terms.kept.get(f"{parent}/nodes/{name}"):
            return f"also has {name}, left to the recovery of run {run}"
        node = there.get(name)
        if node is None:
            belongs = absent.match(name, name, requested[name], {})
        else:
            belongs = terms.filters.match(name, labels[node.full_name], node.accelerator_type, node.labels)
        if not belongs:
            return f"also has {name}, which the fleet's filters exclude"
    return ""


def _left(node: Node, why: str) -> Step:
    return Step(Action.LEAVE, node.name, node.project, node.zone, (why,), does=False, node=node)
