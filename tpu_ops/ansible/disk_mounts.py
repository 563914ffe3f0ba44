"""Mounts data disks on all workers of a node, and unmounts them, by the role disks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpu_ops.ansible.convergence import NewDisplay, converge
from tpu_ops.cloud import operations
from tpu_ops.cloud.node import Node, Worker
from tpu_ops.cloud.operations import Progress
from tpu_ops.errors import UnreachableError
from tpu_ops.fleet import devices
from tpu_ops.fleet.devices import Devices
from tpu_ops.fleet.view import Fleet

#: Seconds until all workers have to see a disk that was attached.
DEVICE_LIMIT = 60.0
#: The tag of the role in site.yml, and the variable that lists its mounts.
_ROLE, _MOUNTS = "disks", "disks_mounts"


class Mount(NamedTuple):
    """How an attached disk is mounted.

    Attributes:
        path: The mount point.
        read_only: Whether the disk is attached read-only.
        blank: Whether a file system is made if the disk is blank.
    """

    path: str
    read_only: bool
    blank: bool

    def entry(self, device: str) -> dict[str, object]:
        """Return the role's entry for the disk, given its name below /dev/disk/by-id."""
        made: dict[str, object] = {"device": device, "path": self.path}
        return made | ({"read_only": True} if self.read_only else {}) | ({"format": True} if self.blank else {})


def seen(fleet: Fleet, node: Node) -> dict[str, Devices]:
    """Return the devices that each worker of a node sees.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: A worker answered, but could not list its devices.
    """
    return dict(devices.probe(fleet, [worker.host for worker in _workers(fleet, node)]))


def mount(
    fleet: Fleet, node: Node, how: Mount, before: Mapping[str, Devices], *, display: NewDisplay, progress: Progress
) -> dict[str, object]:
    """Mount a disk that was attached to a node, and return the role's entry for it.

    Args:
        fleet: The fleet.
        node: The node, with the disk.
        how: How the disk is mounted.
        before: The devices that each worker saw before; empty if the disk was attached earlier.
        display: Returns the display of a playbook.
        progress: Called while the workers do not see the disk yet.

    Raises:
        Late: A worker did not see all disks of the node in time.
        UnreachableError: Workers did not answer, or refused the login.
        HostError: The role failed on a worker.
        UsageError: The disk's device is not known, or Ansible did not run the playbook.
    """
    found: dict[str, Devices] = {}

    def look() -> bool:
        found.update(seen(fleet, node))
        return min(map(len, found.values()), default=0) >= len(node.data_disks)

    operations.until(
        look,
        what=f"node {node.name}: until all workers see the disk",
        timeout=DEVICE_LIMIT,
        progress=lambda elapsed: progress(elapsed, "waiting for the device"),
    )
    # Without an earlier look, no device is new.
    names = {host: devices.new_device(before.get(host, now), now, how.path) for host, now in found.items()}
    entry = how.entry(devices.of_all(names))
    converge(fleet, _workers(fleet, node), display, variables={_MOUNTS: [entry]}, tags=_ROLE)
    return entry


def unmount(fleet: Fleet, node: Node, named: Sequence[str], display: NewDisplay) -> list[str]:
    """Unmount a disk of a node on all workers, and return where it was mounted; its data stays.

    Args:
        fleet: The fleet.
        node: The node, with the disk.
        named: Mount points that the user has named; needed if the node has several disks that are mounted.
        display: Returns the display of a playbook.

    Raises:
        UnreachableError: Workers did not answer, or refused the login.
        HostError: The role failed on a worker, for example because a process uses the file system.
        UsageError: Several disks are mounted and none was named, or Ansible did not run the playbook.
    """
    try:
        found = seen(fleet, node)
    except UnreachableError as exc:
        exc.fix = f"{exc.fix}; --no-unmount detaches the disk without asking the workers"
        raise
    points = devices.mount_points(found, len(node.data_disks), named)
    if points:
        gone = [{"path": path, "state": "absent"} for path in points]
        converge(fleet, _workers(fleet, node), display, variables={_MOUNTS: gone}, tags=_ROLE)
    return points


def _workers(fleet: Fleet, node: Node) -> list[Worker]:
    return [worker for worker in fleet.workers if worker.node.full_name == node.full_name]
