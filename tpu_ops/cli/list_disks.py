"""What `tpu_ops list` shows of disks that no node uses."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_ops import texts
from tpu_ops.cli import output
from tpu_ops.cloud.disks import Disk
from tpu_ops.fleet.disks import Listed

COLUMNS = ("disk without a node", "zone", "type", "size", "created")


def warnings(listed: Listed) -> list[str]:
    """Return warnings about disks that could not be listed."""
    return [f"whether a disk costs money without a node is unknown: {text}" for text in listed.warnings]


def show(disks: Sequence[Disk], now: float, *, first: bool) -> None:
    """Print disks that cost money without a node, if there are any.

    Args:
        disks: The disks.
        now: The present time.
        first: Whether nothing was printed above.
    """
    if not disks:
        return
    if not first:
        output.line()
    output.table([_row(disk, now) for disk in disks], COLUMNS)
    costs, one = ("costs", "it") if len(disks) == 1 else ("cost", "one")
    count = texts.count(len(disks), "disk")
    output.info(f"{count} that no node uses {costs} money: `tpu_ops disk delete NAME` deletes {one} with its data")


def _row(disk: Disk, now: float) -> dict[str, str]:
    created = texts.moment(disk.created)
    return {
        "disk without a node": disk.name,
        "zone": disk.zone,
        "type": disk.kind,
        "size": f"{disk.size} GB",
        "created": "-" if created is None else texts.ago(created, now),
    }
