"""The disks of a fleet's projects: which nodes use them, which nobody uses, and their changes on nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tpu_ops import texts
from tpu_ops.cloud import data_disks
from tpu_ops.cloud import disks as cloud
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.compute import Compute
from tpu_ops.cloud.data_disks import READ_ONLY, READ_WRITE, WORDS, known_mode
from tpu_ops.cloud.disks import Disk, DiskPlace
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.operations import Progress
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, UsageError
from tpu_ops.fleet import changing, origin
from tpu_ops.fleet.changing import DATA_DISKS, Edit

#: Seconds that `ask` waits for the Compute Engine API.
PATIENCE = 3.0
#: Errors of a project whose disks this user cannot list at any time.
_NOT_FOR_THIS_USER = ("PERMISSION_DENIED", "NOT_FOUND", "UNIMPLEMENTED")


class Listed(NamedTuple):
    """Disks, and one sentence for each place whose disks could not be listed."""

    disks: tuple[Disk, ...] = ()
    warnings: tuple[str, ...] = ()


class Use(NamedTuple):
    """A node that has a disk, and the mode (``READ_ONLY`` or ``READ_WRITE``)."""

    node: Node
    mode: str


class Held(NamedTuple):
    """A disk with the nodes that have it.

    Attributes:
        disk: The disk.
        uses: The nodes that have it.
        certain: Whether all nodes of its zone could be listed.
    """

    disk: Disk
    uses: tuple[Use, ...]
    certain: bool = True

    @property
    def is_unused(self) -> bool:
        """Whether nothing uses the disk, as far as the API lists it: neither a node nor an instance."""
        return self.certain and not self.uses and not self.disk.users


def look(
    client: Compute, projects: Iterable[str], nodes: Sequence[Node], unanswered: Collection[tuple[str, str]] = ()
) -> tuple[list[Held], list[str]]:
    """Return the disks of projects with the nodes that have them, and one sentence for each place not listed.

    One request is sent for each project.

    Args:
        client: The client.
        projects: Project ids.
        nodes: All nodes of these projects, without the fleet's filters.
        unanswered: Projects and zones whose nodes could not be listed.

    Raises:
        ApiError: The API refused or did not answer.
    """
    found: list[Held] = []
    warnings: list[str] = []
    for project in dict.fromkeys(projects):
        listed, more = cloud.list_disks(client, project)
        warnings += more
        found += [_held(disk, nodes, unanswered) for disk in listed]
    return found, warnings


def ask(tpu: Tpu, settings: Settings) -> Listed:
    """List the disks of the fleet's projects, for a command that can do without them.

    An error of a project is a warning. There is none if the user may not list the project's disks, or if it does not
    use Compute Engine.

    Args:
        tpu: A client, whose threads are used.
        settings: The fleet's settings.
    """

    def of(project: str) -> Listed:
        try:
            listed, warnings = cloud.list_disks(client, project)
            return Listed(tuple(listed), tuple(warnings))
        except ApiError as exc:
            return Listed() if exc.status in _NOT_FOR_THIS_USER else Listed(warnings=(str(exc),))

    try:
        with origin.compute_api(settings, PATIENCE) as client:
            found = tpu.concurrently(of, settings.projects)
    except UsageError:
        return Listed()  # there is an endpoint of the TPU API only
    except CloudError as exc:
        return Listed(warnings=(str(exc),))
    return Listed(
        tuple(disk for one in found for disk in one.disks), tuple(text for one in found for text in one.warnings)
    )


def unused(
    listed: Iterable[Disk], nodes: Sequence[Node], unanswered: Collection[tuple[str, str]], zones: Collection[str]
) -> list[Disk]:
    """Return the disks that cost money without a node.

    Args:
        listed: The disks.
        nodes: All nodes of the fleet's projects and zones, without the filters.
        unanswered: Projects and zones whose nodes could not be listed; their disks are left out.
        zones: The zones of the nodes, to which the disks are limited; empty means all zones.
    """
    held = (_held(disk, nodes, unanswered) for disk in listed if not zones or disk.zone in zones)
    return [one.disk for one in held if one.is_unused]


def _held(disk: Disk, nodes: Iterable[Node], unanswered: Collection[tuple[str, str]]) -> Held:
    certain = not {(disk.project, disk.zone), (disk.project, "-")} & {*unanswered}
    return Held(disk, uses(disk.place, nodes), certain)


def uses(place: DiskPlace, nodes: Iterable[Node]) -> tuple[Use, ...]:
    """Return the nodes that have a disk."""
    return tuple(
        Use(node, known_mode(disk["mode"]))
        for node in nodes
        for disk in node.data_disks
        if data_disks.same(disk["source"], place)
    )


def chosen(disks: Sequence[Disk], name: str, *, zone: str | None) -> Disk:
    """Return the disk with this name.

    Raises:
        UsageError: No disk or more than one disk matches.
    """
    found = [disk for disk in disks if disk.name == name and zone in (None, disk.zone)]
    if not found:
        known = texts.some(sorted({disk.name for disk in disks}, key=texts.natural)) or "none"
        place = f", zone {zone}" if zone else ""
        raise UsageError(f"no disk is called {name!r}", where=f"this project{place}", fix=f"there are: {known}")
    if len(found) > 1:
        zones = " or ".join(disk.zone for disk in found)
        raise UsageError(f"several disks are called {name!r}", where="this project", fix=f"add --zone {zones}")
    return found[0]


def for_node(disks: Sequence[Disk], name: str, node: Node) -> Disk:
    """Return the disk with this name that the node can have.

    Raises:
        UsageError: There is no such disk in the node's zone.
    """
    named = [disk for disk in disks if disk.name == name]
    for disk in named:
        if disk.zone == node.zone and not disk.regional:
            return disk
    where = f"disk {name}, node {node.name}"
    if named:
        zones = texts.some([disk.zone for disk in named])
        what = f"a node can only have disks of its own zone: the node is in {node.zone}, the disk in {zones}"
        fix = "make a disk there from a snapshot of this one, or a node in the disk's zone"
        raise UsageError(what, where=where, fix=fix)
    known = texts.some([disk.name for disk in disks if disk.zone == node.zone]) or "none"
    fix = f"zone {node.zone} has: {known}; `tpu_ops disk create {name} --size GB --zone {node.zone}` makes one"
    raise UsageError(f"no disk is called {name!r}", where=where, fix=fix)


def check_mode(place: DiskPlace, mode: str, node: Node, nodes: Iterable[Node]) -> None:
    """Refuse an attachment that the API would refuse, before it is asked.

    Raises:
        UsageError: The node has several workers and the disk would be writable, another node uses the disk and one of
            the two could write, or the node has it in another mode.
    """
    where = f"disk {place.name}, node {node.name}"
    if mode == READ_WRITE and node.worker_count > 1:
        what = f"several workers cannot write to one disk, and the node has {node.worker_count}"
        raise UsageError(what, where=where, fix="attach it read-only: --mode ro")
    for other, its in uses(place, nodes):
        if other.full_name == node.full_name:
            if its != mode:
                fix = f"to change the mode, detach the disk first: `tpu_ops disk detach {place.name} {node.name}`"
                raise UsageError(f"the node has the disk already, {WORDS[its]}", where=where, fix=fix)
        elif READ_WRITE in (mode, its):
            fix = f"`tpu_ops disk detach {place.name} {other.name}` first"
            if its == READ_ONLY:
                fix += ", or attach it read-only here too: --mode ro"
            what = f"node {other.name} has the disk, {WORDS[its]}; nodes can share a disk only if all of them read it"
            raise UsageError(what, where=where, fix=fix)


def attach(
    tpu: Tpu, settings: Settings, node: str, place: DiskPlace, mode: str, *, timeout: float, progress: Progress
) -> bool:
    """Attach a disk to a node, given its resource name; return False if the node had it already.

    Raises:
        CloudError: The API refused, or the change was not done in time.
        UsageError: The node has the disk in another mode.
    """
    edit = Edit(DATA_DISKS, lambda message: data_disks.attach(message, place, mode))
    return changing.change(tpu, settings, node, [edit], timeout=timeout, progress=progress)


def detach(tpu: Tpu, settings: Settings, node: str, place: DiskPlace, *, timeout: float, progress: Progress) -> bool:
    """Detach a disk from a node, given its resource name; return False if the node did not have it.

    Raises:
        CloudError: The API refused, or the change was not done in time.
    """

    def is_gone(disk: Any) -> bool:
        return data_disks.same(disk.source_disk, place)

    edit = Edit(DATA_DISKS, lambda message: data_disks.detach(message, is_gone))
    return changing.change(tpu, settings, node, [edit], timeout=timeout, progress=progress)


def in_words(use: Use, labels: Mapping[str, str]) -> str:
    """Return a node that has a disk, with its mode, for a table."""
    return f"{labels.get(use.node.full_name, use.node.name)} ({'ro' if use.mode == READ_ONLY else 'rw'})"
