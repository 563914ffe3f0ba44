"""Decides which nodes and queued resources a command deletes, and deletes them all at once.

A queued resource that has lost its nodes uses quota until it is deleted. So it is deleted together with its last nodes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from tpu_ops import texts
from tpu_ops.cloud import bodies, lifecycle, operations
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.listing import Place
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.nodes import node_in_words
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.queued_resources import QueuedResource
from tpu_ops.errors import CloudError, OpsError

#: States of a queued resource that still waits for its nodes.
_WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES")


class Deletion(NamedTuple):
    """One request to delete: a node, or a queued resource with all its nodes.

    Attributes:
        nodes: The nodes that are deleted; exactly one if there is no queued resource.
        queued: The queued resource, or None.
    """

    nodes: tuple[Node, ...]
    queued: QueuedResource | None = None

    @property
    def name(self) -> str:
        """Resource name of the node or the queued resource."""
        return self.queued.full_name if self.queued else self.nodes[0].full_name

    @property
    def in_words(self) -> str:
        """The node or the queued resource as words for a message."""
        return bodies.queued_in_words(self.name) if self.queued else node_in_words(self.name)

    @property
    def whole(self) -> str:
        """The same, with the nodes of a queued resource."""
        if not self.queued or not self.nodes:
            return self.in_words
        names = texts.some([node.name for node in self.nodes])
        return f"{self.in_words}, with its {'node' if len(self.nodes) == 1 else 'nodes'} {names}"

    @property
    def size(self) -> str:
        """Type and workers of the nodes; for a queued resource its state, and what it requests if it has no nodes."""
        kinds = [f"{node.accelerator_type}, {texts.count(node.worker_count, 'worker')}" for node in self.nodes]
        if self.queued and not kinds:
            kinds = [f"requests {asked.name} ({asked.accelerator_type})" for asked in self.queued.nodes]
        return "; ".join([*([self.queued.state] if self.queued else []), *dict.fromkeys(kinds)])

    @property
    def lost(self) -> str:
        """What the deletion destroys besides the machines, as words; empty if nothing."""
        if self.nodes:
            return "the files on the workers' own disks"
        return "the place in the queue" if self.queued and self.queued.state in _WAITING else ""


class DeletionPlan(NamedTuple):
    """What a command deletes.

    Attributes:
        deletions: The requests, in the order of the resource names.
        stays: The nodes that are deleted although their queued resource stays, since it has further nodes.
    """

    deletions: tuple[Deletion, ...]
    stays: tuple[Node, ...] = ()


def source_of(node: Node) -> str:
    """Return the resource name of the queued resource that created a node; empty if none did."""
    parent = node.full_name.rpartition("/nodes/")[0]
    return f"{parent}/queuedResources/{node.queued_resource}" if node.queued_resource else ""


def plan(
    nodes: Iterable[Node],
    named: Iterable[QueuedResource],
    *,
    listed: Sequence[Node],
    queued: Iterable[QueuedResource],
) -> DeletionPlan:
    """Return what is deleted for some targets.

    A queued resource is deleted if it is a target itself, or if all its listed nodes are targets.

    Args:
        nodes: The nodes among the targets.
        named: The queued resources among the targets.
        listed: All nodes of the projects and zones.
        queued: All known queued resources of the projects and zones.
    """
    targets = {node.full_name: node for node in nodes}
    known = {one.full_name: one for one in queued}
    whole = {one.full_name: one for one in named}
    members: dict[str, list[Node]] = {}
    for node in listed:
        if source := source_of(node):
            members.setdefault(source, []).append(node)
    for source in {source_of(node) for node in targets.values()} & known.keys():
        if all(node.full_name in targets for node in members[source]):
            whole[source] = known[source]
    alone = [node for node in targets.values() if source_of(node) not in whole]
    deletions = [Deletion(tuple(members.get(name, ())), one) for name, one in whole.items()]
    deletions += [Deletion((node,)) for node in alone]
    stays = tuple(node for node in alone if node.queued_resource)
    return DeletionPlan(tuple(sorted(deletions, key=lambda one: texts.natural(one.name))), stays)


class Husks(NamedTuple):
    """The queued resources that never get a node and use quota.

    Attributes:
        deletions: Those that can be deleted without any loss.
        left: The others, each with the reason why it is left.
    """

    deletions: tuple[Deletion, ...]
    left: tuple[tuple[QueuedResource, str], ...]


def husks(queued: Iterable[QueuedResource], nodes: Sequence[Node], unanswered: Collection[Place]) -> Husks:
    """Return the queued resources that are FAILED or SUSPENDED.

    Args:
        queued: The queued resources.
        nodes: All nodes of their projects and zones.
        unanswered: Projects and zones whose nodes could not be listed.
    """
    deletions, left = [], []
    for one in (one for one in queued if one.is_husk):
        members = [node for node in nodes if source_of(node) == one.full_name]
        if members:
            has = texts.some([f"{node.name} ({node.state})" for node in members])
            left.append((one, f"it still has {'node' if len(members) == 1 else 'nodes'} {has}"))
        elif is_unlisted(one, unanswered):
            left.append((one, "it is unknown whether it has nodes, since the nodes there could not be listed"))
        else:
            deletions.append(Deletion((), one))
    return Husks(tuple(deletions), tuple(left))


def is_unlisted(one: Node | QueuedResource, unanswered: Collection[Place]) -> bool:
    """Return whether the place of a node or queued resource could not be listed; ``-`` means all projects or zones."""
    return any(place in unanswered for place in ((one.project, one.zone), (one.project, "-"), ("-", "-")))


def delete_all(
    tpu: Tpu,
    deletions: Sequence[Deletion],
    *,
    wait: bool,
    timeout: float,
    progress: Callable[[Deletion], Progress],
) -> list[OpsError | None]:
    """Delete all at once, and return the error of each deletion, or None; an error of one does not end the others.

    Args:
        tpu: The client.
        deletions: What is deleted.
        wait: Whether to wait until everything is gone.
        timeout: Seconds to wait for each deletion.
        progress: Given a deletion, returns the function that is called during the wait.
    """

    def delete(deletion: Deletion) -> None:
        told = progress(deletion)
        if deletion.queued:
            one = deletion.queued
            delete_queued(tpu, one.full_name, one.created, wait=wait, timeout=timeout, progress=told)
            return
        node = deletion.nodes[0]
        lifecycle.delete(
            tpu, node.full_name, node.node_id, what=deletion.in_words, wait=wait, timeout=timeout, progress=told
        )

    return [failure for _, failure in operations.each(tpu, delete, deletions)]


def delete_queued(tpu: Tpu, name: str, created: str, *, wait: bool, timeout: float, progress: Progress) -> None:
    """Delete a queued resource with all its nodes, or continue waiting for a deletion that an earlier command began.

    Args:
        tpu: The client.
        name: Its resource name. The API deletes by name, whenever the queued resource was created.
        created: The creation time of the intended queued resource; empty if unknown.
        wait: Whether to wait until it is gone.
        timeout: Seconds to wait.
        progress: Called while waiting.

    Raises:
        CloudError: The API refused, another queued resource now has the name, or it still existed after the timeout.
    """
    what = bodies.queued_in_words(name)
    now = bodies.queued(tpu, name)
    if now is None:
        return
    if created and now.created not in ("", created):
        raise CloudError(
            "the queued resource was recreated after this command had looked it up; nothing was deleted",
            where=what,
            fix="run the same command again",
        )
    operation = "" if now.state == "DELETING" else _begin(tpu, name)
    if not wait:
        return
    state = now.state

    def is_gone() -> bool:
        nonlocal state, operation
        if operation and operations.is_done(tpu, operation, what=what):
            operation = ""
        found = bodies.queued(tpu, name)
        state = found.state if found else "gone"
        # Another client may have requested the name again.
        return found is None or bool(created and found.created not in ("", created))

    operations.until(is_gone, what=what, timeout=timeout, progress=lambda elapsed: progress(elapsed, state))


def _begin(tpu: Tpu, name: str) -> str:
    """Begin to delete a queued resource; return the operation's name, or "" if the name is lost or not needed.

    The answer can be lost, and another client can be faster: both are no error once the API is deleting it.
    """
    try:
        return bodies.delete_queued(tpu, name, str(uuid.uuid4()))
    except ApiError as exc:
        if exc.status == "NOT_FOUND":
            return ""
        if exc.status in ("FAILED_PRECONDITION", *lifecycle.UNCLEAR):
            now = bodies.queued(tpu, name)
            if now is None or now.state == "DELETING":
                return ""
        raise
