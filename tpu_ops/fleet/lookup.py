"""Looks up the nodes and queued resources that a user names to change them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from tpu_ops import texts
from tpu_ops.cloud import deletion
from tpu_ops.cloud.listing import QueuedListing
from tpu_ops.cloud.node import Node, node_labels
from tpu_ops.cloud.nodes import node_in_words
from tpu_ops.cloud.queued_resources import QueuedResource
from tpu_ops.errors import CloudError, UsageError
from tpu_ops.fleet import targets
from tpu_ops.fleet.targets import UnknownError
from tpu_ops.fleet.view import Fleet


class NamedPlace(NamedTuple):
    """The zone and the project that a user names, as far as they are named.

    Attributes:
        zone: The zone; None means any.
        project: The project; None means any.
    """

    zone: str | None = None
    project: str | None = None

    def has(self, thing: Node | QueuedResource) -> bool:
        """Return whether a node or a queued resource is there."""
        return self.zone in (None, thing.zone) and self.project in (None, thing.project)

    @property
    def in_words(self) -> str:
        """Zone and project as the end of a sentence; empty if any."""
        return "".join(f", {kind} {value}" for kind, value in zip(("zone", "project"), self, strict=True) if value)


class Found(NamedTuple):
    """What some names mean.

    Attributes:
        nodes: The nodes.
        queued: The queued resources that are named themselves.
        gone: The nodes that no longer exist, as the last snapshot has them.
        known: All queued resources of the fleet's projects and zones, if they were needed.
        unknown: One sentence for each name that means nothing.
        single: Whether there is only one name, and it means a node.
    """

    nodes: tuple[Node, ...]
    queued: tuple[QueuedResource, ...]
    gone: tuple[Node, ...]
    known: tuple[QueuedResource, ...]
    unknown: tuple[str, ...] = ()
    single: bool = False


def names(words: Iterable[str]) -> list[str]:
    """Return the names in all words, each a name, a node set such as ``tpu-[1-4]`` or a list with commas.

    Raises:
        UsageError: A word is not a node set.
    """
    return list(dict.fromkeys(name for word in words for name in targets.names_of(word)))


def node(fleet: Fleet, name: str, place: NamedPlace) -> Node:
    """Return the node with this name, or with this label if several nodes share the name.

    Raises:
        UnknownError: No node matches.
        UsageError: More than one node matches, or the fleet's filters exclude the node.
    """
    labels = {one.full_name: fleet.labels[one.full_name] for one in fleet.nodes}
    found = [one for one in fleet.nodes if name in (one.name, labels[one.full_name]) and place.has(one)]
    if not found:
        known = texts.some(sorted(labels.values(), key=texts.natural)) or "none"
        what, where = f"no node is called {name!r}", f"this fleet{place.in_words}"
        if any(name in (one.name, fleet.labels[one.full_name]) for one in fleet.listed if one not in fleet.nodes):
            fix = f"the node exists, but the fleet's filters exclude it: {targets.FILTERS}"
            raise UsageError(what, where=where, fix=fix)
        raise UnknownError(what, where=where, fix=f"known nodes: {known}")
    if len(found) > 1:
        several = " or ".join(sorted(labels[one.full_name] for one in found))
        fix = f"use {several}, or add --zone or --project"
        raise UsageError(f"several nodes are called {name!r}", where="this fleet", fix=fix)
    return found[0]


def find(
    fleet: Fleet,
    names: Sequence[str],
    place: NamedPlace,
    *,
    queued: Callable[[bool], QueuedListing],
    last: Callable[[], Sequence[Node]],
) -> Found:
    """Return the nodes and queued resources that some names mean.

    A command that was killed has deleted some of its nodes. So it can be repeated: a node of the last snapshot counts
    as gone, and a name without any meaning is an error only if all names are.

    Args:
        fleet: The fleet as the API lists it.
        names: The names.
        place: Where the nodes and queued resources are.
        queued: Returns all queued resources of the fleet's projects and zones; its argument is whether a name depends
            on them. It is called only if a name is no node, or if a queued resource created one of the nodes.
            A node is refused if its queued resource is in an unanswered place.
        last: Returns the nodes of the last snapshot; called only if a name is no node.

    Raises:
        UsageError: A name is ambiguous, excluded by the fleet's filters, or no name means anything.
        CloudError: The queued resources could not be listed, or that of a node, or the nodes of one.
    """
    nodes: dict[str, Node] = {}
    others: dict[str, UnknownError] = {}
    for name in names:
        try:
            found = node(fleet, name, place)
        except UnknownError as exc:
            others[name] = exc
        else:
            nodes[found.full_name] = found
    needed = others or any(one.queued_resource for one in nodes.values())
    listing = queued(bool(others)) if needed else QueuedListing()
    known = listing.queued
    _require_sources(nodes.values(), listing)
    old, listed = last() if others else (), {one.full_name for one in fleet.listed}
    sources, lost = list[QueuedResource](), list[Node]()
    for name in list(others):
        if source := _queued(known, name, place, fleet):
            sources.append(source)
        elif former := gone(old, name, place, listed):
            lost.append(former)
        else:
            continue
        del others[name]
    if len(others) == len(names):
        problem = next(iter(others.values()))
        if known:
            all_names = texts.some(sorted({one.name for one in known}, key=texts.natural))
            problem.fix += f"; known queued resources: {all_names}"
        raise problem
    unknown = tuple(problem.what for problem in others.values())
    return Found(
        tuple(nodes.values()), tuple(sources), tuple(lost), known, unknown, single=len(names) == 1 and not sources
    )


def _require_sources(nodes: Iterable[Node], listing: QueuedListing) -> None:
    """Check that the queued resource of each node is known, as far as it exists.

    Raises:
        CloudError: The queued resources in the place of one could not be listed.
    """
    known = {one.full_name for one in listing.queued}
    for one in nodes:
        source = deletion.source_of(one)
        if source and source not in known and deletion.is_unlisted(one, listing.unanswered):
            what = f"queued resource {one.queued_resource}, which created the node, could not be listed"
            raise CloudError(what, where=node_in_words(one.full_name), fix="run the same command again later")


def _queued(found: Sequence[QueuedResource], name: str, place: NamedPlace, fleet: Fleet) -> QueuedResource | None:
    """Return the queued resource with this name; None if there is none.

    Args:
        found: The queued resources of the fleet's projects and zones.
        name: The name.
        place: Where it is.
        fleet: The fleet, whose filters protect the nodes of others.

    Raises:
        UsageError: More than one queued resource matches, or the fleet's filters exclude a node of it.
        CloudError: The nodes in its place could not be listed.
    """
    matching = [one for one in found if one.name == name and place.has(one)]
    if not matching:
        return None
    if len(matching) > 1:
        several = texts.some([f"zone {one.zone}, project {one.project}" for one in matching])
        what = f"several queued resources are called {name!r}"
        raise UsageError(what, where="this fleet", fix=f"add --zone or --project; they are in {several}")
    one = matching[0]
    where = deletion.Deletion((), one).in_words
    if deletion.is_unlisted(one, fleet.unanswered):
        what = "the nodes of the queued resource are unknown: the API did not list the nodes there"
        raise CloudError(what, where=where, fix="run the same command again later")
    mine = {member.full_name for member in fleet.nodes}
    others = [member for member in fleet.listed if deletion.source_of(member) == one.full_name]
    if hidden := [member.name for member in others if member.full_name not in mine]:
        what = f"the fleet's filters exclude a node of the queued resource: {texts.some(hidden)}"
        raise UsageError(what, where=where, fix=targets.FILTERS)
    return one


def gone(last: Sequence[Node], name: str, place: NamedPlace, listed: Collection[str]) -> Node | None:
    """Return the node of this name that the last snapshot has and the API no longer lists; None if there is none.

    Args:
        last: The nodes of the last snapshot.
        name: The node's name or label in that snapshot.
        place: Where it was.
        listed: Resource names of the nodes that the API lists now.
    """
    labels = node_labels(last)
    found = [
        one
        for one in last
        if name in (one.name, labels[one.full_name]) and place.has(one) and one.full_name not in listed
    ]
    return found[0] if len(found) == 1 else None
