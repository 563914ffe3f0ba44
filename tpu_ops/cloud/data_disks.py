"""The data disks of a node. The API replaces them as a whole list, so a change is: read, modify, write, read again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from tpu_ops.cloud import operations, parsing
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.disks import Place, place_of
from tpu_ops.cloud.lifecycle import UNCLEAR
from tpu_ops.cloud.nodes import node_in_words
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.zones import raw
from tpu_ops.errors import CloudError, UsageError

_log = logging.getLogger(__name__)

READ_ONLY, READ_WRITE = "READ_ONLY", "READ_WRITE"
#: Modes of data disks in words for messages.
WORDS = {READ_ONLY: "read-only", READ_WRITE: "read-write"}
#: How often a change is tried if other machines change the same list at the same time, and seconds before a retry.
TRIES, PAUSE = 5, 1.0


class Attached(NamedTuple):
    """A data disk of a node.

    Attributes:
        source: The disk's resource name, or a URL that ends with it.
        mode: ``READ_ONLY`` or ``READ_WRITE``.
        message: The serialized google.cloud.tpu.v2.AttachedDisk, with fields that the installed client library does not
            know, such as the workers that have the disk; empty for a disk that is not attached yet.
    """

    source: str
    mode: str
    message: bytes = b""

    def is_disk(self, place: Place) -> bool:
        """Return whether this is the disk in a place; the API may write the project's number instead of its id."""
        return same(self.source, place)


def same(source: str, place: Place) -> bool:
    """Return whether the source of a node's data disk is the disk in a place."""
    found = place_of(source)
    return found is not None and (found == place or (found.project.isdecimal() and found[1:] == place[1:]))


Disks = tuple[Attached, ...]
Edit = Callable[[Disks], Disks]


def with_disk(disks: Disks, place: Place, mode: str) -> Disks:
    """Return a node's data disks with one more; unchanged if the node has it.

    Raises:
        UsageError: The node has the disk in another mode.
    """
    for disk in disks:
        if disk.is_disk(place):
            if disk.mode == mode:
                return disks
            raise UsageError(
                f"the node has the disk already, {WORDS[disk.mode]}",
                where=place.where,
                fix=f"to change the mode, detach the disk first: `tpu_ops disk detach {place.name} NODE`",
            )
    return (*disks, Attached(place.source, mode))


def without_disk(disks: Disks, place: Place) -> Disks:
    """Return a node's data disks without one; unchanged if the node does not have it."""
    return tuple(disk for disk in disks if not disk.is_disk(place))


class List(Protocol):
    """The list of one node's data disks, which other machines may change at any time."""

    def read(self) -> Disks:
        """Return the list."""

    def write(self, disks: Disks) -> None:
        """Replace the whole list, and wait until this is done."""

    def settle(self) -> None:
        """Wait for changes of the node that others have begun and that are not done yet."""


def change(
    disks: List, edit: Edit, where: str, *, tries: int = TRIES, pause: Callable[[float], object] = time.sleep
) -> bool:
    """Change the list until the change is in place; return whether anything was written.

    The list is read right before each write, and again once all changes that were begun meanwhile are done. If another
    machine has replaced it by a list without this change, the change is made again, in the new list.

    Args:
        disks: The list of a node.
        edit: Returns the list with the change; it returns a list that has the change as it is.
        where: Subject of errors.
        tries: How often to try.
        pause: Waits for a number of seconds.

    Raises:
        CloudError: The API refused, or other machines undid the change each time.
        UsageError: The change is not possible in the present list.
    """
    written = False
    before = disks.read()
    for attempt in range(tries):
        wanted = edit(before)
        if wanted == before:
            return written
        written = True
        try:
            disks.write(wanted)
        except ApiError as exc:
            if not _is_unclear(exc) or attempt == tries - 1:
                raise
            _log.warning("%s; looking at the node's disks again", exc)
            pause(PAUSE)
        disks.settle()
        before = disks.read()
        if edit(before) == before:
            return written
        if attempt < tries - 1:
            _log.warning("%s: another machine changed the node's disks at the same time; trying again", where)
    raise CloudError(
        f"after {tries} tries, the node's disks are still as another machine sets them",
        where=where,
        fix="find out who changes them, then run the same command again",
    )


def _is_unclear(failure: ApiError) -> bool:
    """Return whether it is unknown if the API has accepted a change, or another change of the node is in progress."""
    return failure.status in (("ABORTED",) if isinstance(failure, operations.Failed) else (*UNCLEAR, "ABORTED"))


class OfNode:
    """The list of a node's data disks in the API.

    Args:
        tpu: The client.
        name: The node's resource name.
        timeout: Seconds to wait for one change.
        progress: Called while waiting.
    """

    def __init__(self, tpu: Tpu, name: str, *, timeout: float, progress: Progress) -> None:
        self._tpu, self._name, self._timeout, self._progress = tpu, name, timeout, progress

    def read(self) -> Disks:
        """Return the list.

        Raises:
            ApiError: NOT_FOUND if the node does not exist.
        """
        node = raw(self._tpu.call("get_node", {"name": self._name}, node_in_words(self._name)))
        return tuple(map(_attached, node.data_disks))

    def write(self, disks: Sequence[Attached]) -> None:
        """Replace the whole list, and wait until this is done.

        Raises:
            ApiError: The API refused, or its answer was lost.
            CloudError: The change was not done in time.
        """
        from google.cloud.tpu_v2.types import cloud_tpu

        node: Any = cloud_tpu.Node(name=self._name)
        for disk in disks:
            message = raw(node).data_disks.add()
            if disk.message:
                message.ParseFromString(disk.message)
            else:
                message.source_disk, message.mode = disk.source, cloud_tpu.AttachedDisk.DiskMode[disk.mode].value
        request = {"node": node, "update_mask": {"paths": ["data_disks"]}}
        where = node_in_words(self._name)
        operation = str(self._tpu.call("update_node", request, where, repeat=False).operation.name)
        operations.wait(self._tpu, operation, what=where, timeout=self._timeout, progress=self._progress)

    def settle(self) -> None:
        """Wait for changes of the node that others have begun and that are not done yet.

        Raises:
            CloudError: A change was not done in time.
        """
        operations.settle(self._tpu, self._name, timeout=self._timeout, progress=self._progress)


def _attached(message: Any) -> Attached:
    mode = parsing.enum_name(message, "mode")
    # A mode that is not set, or that is not known, is the one that allows more.
    known = mode if mode in WORDS else READ_WRITE
    return Attached(message.source_disk, known, message.SerializeToString(deterministic=True))
