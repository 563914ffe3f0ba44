"""The queued resources of a fleet whose nodes do not exist: they wait, have failed, or have lost their nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.listing import Place, list_queued
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.queued_resources import QueuedResource
from tpu_ops.config import Filters, Settings
from tpu_ops.errors import CloudError


class Queue(NamedTuple):
    """The API's answer about the queued resources of a fleet.

    Attributes:
        queued: The queued resources in every state.
        warnings: One sentence for each project or zone that could not be listed.
        failure: The error if none could be listed.
        unanswered: Places that could not be listed.
    """

    queued: tuple[QueuedResource, ...] = ()
    warnings: tuple[str, ...] = ()
    failure: CloudError | None = None
    unanswered: tuple[Place, ...] = ()


def ask(tpu: Tpu, settings: Settings) -> Queue:
    """List the queued resources in the fleet's projects and zones; an error of the API becomes part of the result."""
    try:
        found = list_queued(tpu, settings.projects, settings.zones)
        return Queue(found.queued, found.warnings, unanswered=found.unanswered)
    except ApiError as exc:
        return Queue(failure=exc)


def missing(one: QueuedResource, listed: Iterable[Node]) -> list[str]:
    """Return the names of the nodes that a queued resource requests and that do not exist."""
    there = {node.name for node in listed if (node.project, node.zone) == (one.project, one.zone)}
    return [asked.name for asked in one.nodes if asked.name not in there]


def unfulfilled(queued: Iterable[QueuedResource], listed: Iterable[Node]) -> list[QueuedResource]:
    """Return the queued resources that are not, or not wholly, listed as nodes, and those that only use quota.

    Args:
        queued: The queued resources.
        listed: All nodes in the same projects and zones.
    """
    listed = list(listed)
    return [one for one in queued if one.is_husk or not one.nodes or missing(one, listed)]


def belongs(one: QueuedResource, filters: Filters) -> bool:
    """Return whether the fleet's filters match a queued resource or a node that it requests.

    The API lists the labels of nodes only, so filters of labels are not applied.
    """
    without_labels = filters._replace(labels=())
    names = [(one.name, kind) for kind in {asked.accelerator_type for asked in one.nodes} or {""}]
    requested = [(asked.name, asked.accelerator_type) for asked in one.nodes]
    return any(without_labels.match(name, name, kind, {}) for name, kind in (*names, *requested))
