"""Changes labels, metadata and data disks of existing nodes.

The API replaces each of these as a whole. So the complete new value is sent, made from the value just read, and the
node is read again afterwards: another client may have changed it in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpu_ops.cloud import operations
from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.names import short_name
from tpu_ops.cloud.nodes import node_in_words
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.wish import DISK_MODES
from tpu_ops.cloud.zones import raw
from tpu_ops.errors import CloudError

#: Number of times that a change is sent if another client undoes it.
TRIES = 5


@dataclass(frozen=True)
class Change:
    """What is changed on a node; everything else stays.

    Attributes:
        labels: The labels to set.
        metadata: The entries of the metadata to set; values may be secret.
        disks: Name of each data disk to attach -> its mode, ``ro`` or ``rw``.
        detach: Names of the data disks to detach.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False)
    disks: Mapping[str, str] = field(default_factory=dict)
    detach: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.labels or self.metadata or self.disks or self.detach)


def change(tpu: Tpu, name: str, wanted: Change, *, timeout: float, progress: Progress) -> None:
    """Change a node, and wait until that is done.

    Args:
        tpu: The client.
        name: Resource name of the node.
        wanted: The change; parts that the node has already are not sent.
        timeout: Seconds to wait for each update.
        progress: Called while waiting.

    Raises:
        CloudError: The API refused, an update was not done in time, or other clients undid each try.
    """
    where = node_in_words(name)
    for _ in range(TRIES):
        update = _next(name, wanted, raw(tpu.call("get_node", {"name": name}, where)))
        if update is None:
            return
        key, value = update
        request = {"node": {"name": name, key: value}, "update_mask": {"paths": [key]}}
        operation = str(tpu.call("update_node", request, where, repeat=False).operation.name)
        operations.wait(tpu, operation, what=where, timeout=timeout, progress=progress)
    fix = "repeat the command once the other command has ended"
    raise CloudError("another command changes this node at the same time", where=where, fix=fix)


def _next(name: str, wanted: Change, node: Any) -> tuple[str, Any] | None:
    """Return the next field to update with its complete value; None if the node has everything."""
    for key in ("labels", "metadata"):
        has, needs = dict(getattr(node, key)), getattr(wanted, key)
        if any(has.get(word) != value for word, value in needs.items()):
            return key, {**has, **needs}
    disks = merged_disks(
        [(disk.source_disk, _mode(disk)) for disk in node.data_disks], wanted.disks, wanted.detach, _disks_of(name)
    )
    return None if disks is None else ("data_disks", [{"source_disk": disk, "mode": mode} for disk, mode in disks])


def merged_disks(
    now: list[tuple[str, str]], attach: Mapping[str, str], detach: tuple[str, ...], place: str
) -> list[tuple[str, str]] | None:
    """Return the next complete list of a node's data disks; None if the list needs no update.

    A disk that is attached in the other mode is detached first: the API does not change a mode.

    Args:
        now: Source and mode of each attached disk, as the API writes them.
        attach: Name of each disk to attach -> ``ro`` or ``rw``.
        detach: Names of the disks to detach.
        place: Resource name of the collection of disks to attach from.
    """
    modes = {name: DISK_MODES[mode] for name, mode in attach.items()}
    kept = [(disk, mode) for disk, mode in now if short_name(disk) not in detach]
    right = [(disk, mode) for disk, mode in kept if modes.get(short_name(disk), mode) == mode]
    if len(right) < len(now):
        return right
    there = {short_name(disk) for disk, _ in right}
    new = [(f"{place}/{name}", mode) for name, mode in modes.items() if name not in there]
    return [*right, *new] if new else None


def _mode(disk: Any) -> str:
    value = disk.DESCRIPTOR.fields_by_name["mode"].enum_type.values_by_number.get(disk.mode)
    return value.name if value else str(disk.mode)


def _disks_of(name: str) -> str:
    _, project, _, zone, _, _ = name.split("/")
    return f"projects/{project}/zones/{zone}/disks"
