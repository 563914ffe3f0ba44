"""Reads a fleet's nodes and host keys from a published snapshot."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tpu_ops import texts
from tpu_ops.cloud.client import told
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.zones import zones_in_words
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, UsageError
from tpu_ops.fleet.publishing import documents, sources
from tpu_ops.fleet.state import Snapshot
from tpu_ops.ssh.guest_attributes import Learned


class OutdatedError(CloudError):
    """The published snapshot is older than the snapshot on this machine."""


@dataclass(frozen=True)
class Seen:
    """The answer of the API, or a published snapshot, for one fleet.

    Attributes:
        asked_at: When the API was asked, in seconds since 1970.
        nodes: Nodes of the fleet's projects and zones, in the order of their full names.
        unanswered: Pairs (project, zone) that could not be listed.
        learned: Host keys and instance names of the workers, from guest attributes or the published snapshot.
        warnings: What could not be listed, in words.
        source: Source of the published snapshot; empty if the API was asked.
    """

    asked_at: float
    nodes: tuple[Node, ...]
    unanswered: tuple[tuple[str, str], ...]
    learned: Learned
    warnings: tuple[str, ...]
    source: str = ""


def read(settings: Settings, source: str, *, learn: bool) -> Seen:
    """Read a published snapshot, limited to a fleet's projects and zones.

    Args:
        settings: The fleet's settings.
        source: The source, as `sources.parse` returns it.
        learn: Whether to use the host keys in the snapshot.

    Raises:
        CloudError: The snapshot cannot be read, or is invalid.
        UsageError: The snapshot contains none of the fleet's projects.
    """
    where = sources.shown(source)
    with told(f"reading the published snapshot at {where}, at most {settings.request_timeout:g} s"):
        data = sources.read(source, settings)
    found = documents.parse(data, where, time.time())
    projects, zones = settings.projects or found.projects, settings.zones or found.zones
    if not set(projects) & set(found.projects):
        raise UsageError(
            f"the published snapshot is about {' and '.join(found.projects) or 'no project'}, "
            f"but this fleet needs {' and '.join(projects) or 'none'}",
            where=where,
            fix=f"see projects in {settings.file}, or ask the snapshot's publisher",
        )
    nodes = tuple(node for node in found.nodes if node.project in projects and (not zones or node.zone in zones))
    lacking = [f"project {name}" for name in projects if name not in found.projects]
    lacking += [f"zone {name}" for name in zones if found.zones and name not in found.zones]
    learned = Learned(
        keys=dict(found.host_keys) if learn else {},
        reasons={node.full_name: "the published snapshot has none" for node in nodes},
        trusted_first=found.trusted_first,
    )
    unlisted = tuple(
        (project, zone) for project, zone in found.unlisted if project in projects and zone in ("-", *(zones or [zone]))
    )
    warnings = [f"{name}: not in the published snapshot ({where})" for name in lacking]
    warnings += [
        f"{zones_in_words(project, zone)}: could not be listed when the snapshot was published: its nodes are shown as "
        "they were before"
        for project, zone in unlisted
    ]
    return Seen(found.asked_at, nodes, unlisted, learned, tuple(warnings), source)


def refuse_outdated(settings: Settings, seen: Seen, old: Snapshot | None) -> None:
    """Reject a published snapshot that is older than the snapshot on this machine.

    Raises:
        OutdatedError: The published snapshot is older.
    """
    now = time.time()
    # Ignore a local snapshot with a time in the future: this machine's clock was set back after it was written.
    if old is None or seen.asked_at >= old.asked_at or old.asked_at > now + documents.AHEAD:
        return
    raise OutdatedError(
        f"the published snapshot is older than the local one: the published one was read from the API "
        f"{texts.ago(seen.asked_at, now)}, the local one {texts.ago(old.asked_at, now)}",
        where=sources.shown(seen.source),
        fix="ask the snapshot's publisher to publish again; with credentials for the API, read the API instead: "
        "`tpu_ops refresh --from api`",
    )
