"""The data disks of a node: their modes, and changes of the whole list in a protobuf message of the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpu_ops.cloud import parsing
from tpu_ops.cloud.disks import DiskPlace, disk_place
from tpu_ops.errors import UsageError

READ_ONLY, READ_WRITE = "READ_ONLY", "READ_WRITE"
#: Modes of data disks in words for messages.
WORDS = {READ_ONLY: "read-only", READ_WRITE: "read-write"}


def known_mode(name: str) -> str:
    """Return `READ_ONLY` or `READ_WRITE`: a mode that is not set, or not known, counts as the one that allows more."""
    return name if name in WORDS else READ_WRITE


def mode_of(disk: Any) -> str:
    """Return the mode of a message google.cloud.tpu.v2.AttachedDisk, as `known_mode` does."""
    return known_mode(parsing.enum_name(disk, "mode"))


def same(source: str, place: DiskPlace) -> bool:
    """Return whether the source of a node's data disk is the disk in a place.

    The API may write the project's number instead of its id.
    """
    found = disk_place(source)
    return found is not None and (found == place or (found.project.isdecimal() and found[1:] == place[1:]))


def attach(node: Any, place: DiskPlace, mode: str) -> None:
    """Add a disk to a message google.cloud.tpu.v2.Node, unless the node has it.

    Raises:
        UsageError: The node has the disk in another mode.
    """
    for disk in node.data_disks:
        if same(disk.source_disk, place):
            if (now := mode_of(disk)) == mode:
                return
            raise UsageError(
                f"the node has the disk already, {WORDS[now]}",
                where=place.where,
                fix=f"to change the mode, detach the disk first: `tpu_ops disk detach {place.name} NODE`",
            )
    node.data_disks.add(source_disk=place.source, mode=mode)


def detach(node: Any, is_gone: Callable[[Any], bool]) -> None:
    """Remove the disks from a message google.cloud.tpu.v2.Node for which a function returns true."""
    for index in reversed(range(len(node.data_disks))):
        if is_gone(node.data_disks[index]):
            del node.data_disks[index]
