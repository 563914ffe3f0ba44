"""Changes labels, metadata and data disks of existing nodes, among other programs that change the same nodes.

The API replaces each of these parts as a whole and does not detect concurrent changes. So a change reads the node,
sends the complete new part, and reads the node again once all changes of the node are done.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpu_ops.cloud import data_disks, operations
from tpu_ops.cloud.client import FIRST_DELAY, RETRIED, ApiError, Tpu
from tpu_ops.cloud.disks import DiskPlace
from tpu_ops.cloud.lifecycle import UNCLEAR
from tpu_ops.cloud.names import short_name
from tpu_ops.cloud.nodes import node_in_words
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.wish import DISK_MODES
from tpu_ops.cloud.zones import raw
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError
from tpu_ops.fleet import node_lock

_log = logging.getLogger(__name__)

#: How often a change is sent if other programs undo it.
TRIES = 5
LABELS, METADATA, DATA_DISKS = "labels", "metadata", "data_disks"


class Edit(NamedTuple):
    """A change of one part of a node.

    Attributes:
        part: `LABELS`, `METADATA` or `DATA_DISKS`: the field of google.cloud.tpu.v2.Node.
        make: Makes the change in the protobuf message of a node; leaves a node that has the change as it is.
    """

    part: str
    make: Callable[[Any], object]


@dataclass(frozen=True)
class Change:
    """What `tpu_ops apply` changes on a node; everything else stays.

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

    def edits(self, name: str) -> list[Edit]:
        """Return the edits of a node, given its resource name.

        A disk that is attached in the other mode is detached first: the API does not change a mode.
        """
        _, project, _, zone, _, _ = name.split("/")
        modes = {disk: DISK_MODES[mode] for disk, mode in self.disks.items()}

        def is_wrong(disk: Any) -> bool:
            short, mode = short_name(disk.source_disk), data_disks.mode_of(disk)
            return short in self.detach or modes.get(short, mode) != mode

        def attach(node: Any) -> None:
            for disk, mode in modes.items():
                data_disks.attach(node, DiskPlace(project, zone, disk), mode)

        found = [Edit(LABELS, lambda node: node.labels.update(self.labels))] if self.labels else []
        found += [Edit(METADATA, lambda node: node.metadata.update(self.metadata))] if self.metadata else []
        if self.disks or self.detach:
            found.append(Edit(DATA_DISKS, lambda node: data_disks.detach(node, is_wrong)))
        return [*found, Edit(DATA_DISKS, attach)] if self.disks else found


def change(
    tpu: Tpu,
    settings: Settings,
    name: str,
    edits: Sequence[Edit],
    *,
    timeout: float,
    progress: Progress,
    pause: Callable[[float], object] = time.sleep,
) -> bool:
    """Change a node until all edits are in place; return whether anything was written.

    Other commands on this machine wait for the node's lock. If a program elsewhere has replaced a part by one without
    the edit, the edit is made again, in the new part. Fields that the client library does not know stay.

    Args:
        tpu: The client.
        settings: The fleet's settings.
        name: Resource name of the node.
        edits: What is changed, in this order.
        timeout: Seconds to wait for each update, and for another command on this machine.
        progress: Called while waiting.
        pause: Waits for a number of seconds.

    Raises:
        ApiError: The API refused; NOT_FOUND if the node does not exist.
        CloudError: An update was not done in time, or other programs undid the change each time.
        OpsError: An edit is not possible on the present node, or another command here did not end in time.
    """
    with node_lock.locked(settings, name, timeout):
        made = [_make(tpu, name, edit, timeout=timeout, progress=progress, pause=pause) for edit in edits]
    return any(made)


def _make(
    tpu: Tpu, name: str, edit: Edit, *, timeout: float, progress: Progress, pause: Callable[[float], object]
) -> bool:
    where, words = node_in_words(name), edit.part.replace("_", " ")
    for attempt in range(TRIES + 1):
        now = raw(tpu.call("get_node", {"name": name}, where))
        wanted = type(now)()
        wanted.CopyFrom(now)
        edit.make(wanted)
        if wanted == now:
            return attempt > 0
        if attempt == TRIES:
            break
        if attempt:
            _log.warning("%s: the change of its %s is not in place; trying again", where, words)
        try:
            _write(tpu, name, edit.part, wanted, timeout=timeout, progress=progress)
        except ApiError as exc:
            if attempt == TRIES - 1 or not _can_retry(exc):
                raise
            _log.warning("%s", exc)
            # Random delays keep two programs from trying again at the same moment.
            pause(FIRST_DELAY * 2**attempt * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
        operations.settle(tpu, name, timeout=timeout, progress=progress)
    raise CloudError(
        f"after {TRIES} tries, the node's {words} are still as another program sets them",
        where=where,
        fix="find out who changes them, then run the same command again",
    )


def _write(tpu: Tpu, name: str, part: str, wanted: Any, *, timeout: float, progress: Progress) -> None:
    """Replace one part of a node by that of a message, and wait until this is done.

    Raises:
        ApiError: The API refused, or its answer was lost.
        CloudError: The update was not done in time.
    """
    from google.cloud.tpu_v2.types import cloud_tpu

    node: Any = cloud_tpu.Node(name=name)
    getattr(raw(node), part).MergeFrom(getattr(wanted, part))
    where, request = node_in_words(name), {"node": node, "update_mask": {"paths": [part]}}
    operation = str(tpu.call("update_node", request, where, repeat=False).operation.name)
    operations.wait(tpu, operation, what=where, timeout=timeout, progress=progress)


def _can_retry(failure: ApiError) -> bool:
    """Return whether the API was busy, or it is unknown whether it has accepted the update."""
    return failure.status in (RETRIED if isinstance(failure, operations.Failed) else (*RETRIED, *UNCLEAR))
