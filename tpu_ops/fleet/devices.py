"""The data disks as workers see them: which devices there are, and what is mounted from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tpu_ops import texts
from tpu_ops.errors import HostError, UnreachableError, UsageError
from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet

_SCRIPT = (
    'for link in /dev/disk/by-id/google-persistent-disk-*; do [ ! -e "$link" ] || '
    'stat -L -c "disk ${link##*/} %t %T" "$link"; done; cat /proc/self/mountinfo'
)
#: Prints a line `disk NAME MAJOR MINOR` (hexadecimal) for each data disk, and the worker's mounts. It needs no rights.
PROBE = ("sh", "-c", _SCRIPT)
#: Seconds for the answer of one worker.
PROBE_LIMIT = 60.0
#: Name of a data disk; number 0 is the boot disk, and names with a suffix are partitions.
_NAME = re.compile(r"google-persistent-disk-[1-9][0-9]{0,3}")
#: Octal escapes of the kernel in a mount point.
_ESCAPE = re.compile(r"\\([0-7]{3})")

#: Name of each data disk that a worker sees, as in ``google-persistent-disk-1`` -> where it is mounted.
Devices = Mapping[str, tuple[str, ...]]


def parsed(text: str) -> dict[str, tuple[str, ...]]:
    """Return the devices in the output of `PROBE`."""
    numbers: dict[str, str] = {}
    mounts: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["disk"] and len(words) == 4 and _NAME.fullmatch(words[1]):
            numbers[words[1]] = f"{int(words[2], 16)}:{int(words[3], 16)}"
        elif len(words) > 5 and words[0].isdecimal():
            point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), words[4])
            mounts.setdefault(words[2], []).append(point)
    return {name: tuple(dict.fromkeys(mounts.get(number, ()))) for name, number in numbers.items()}


def probe(fleet: Fleet, hosts: Sequence[str]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the devices that each worker sees.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: A worker answered, but could not list its devices.
    """
    found = contact.run(fleet, hosts, PROBE, PROBE_LIMIT)
    for result in found.values():
        if result.code is None:
            what = f"the worker does not say which disks it has mounted: {result.problem}"
            raise UnreachableError(what, where=result.host, fix="run the same command again once the worker answers")
        if not result.ok:
            said = result.stderr.decode(errors="replace").strip() or f"exit code {result.code}"
            raise HostError(f"the worker cannot list its disks: {said:.200}", where=result.host, fix="log in and look")
    return {host: parsed(result.stdout.decode(errors="replace")) for host, result in found.items()}


def new_device(before: Devices, after: Devices, path: str) -> str:
    """Return the device of a disk that was attached, or was attached by an earlier command that was interrupted.

    Args:
        before: What a worker saw before.
        after: What it sees now.
        path: Where the disk is to be mounted.

    Raises:
        UsageError: Several devices are possible, or none.
    """
    new = [name for name in after if name not in before]
    at_path = [name for name, mounts in after.items() if path in mounts]
    unmounted = [name for name, mounts in after.items() if not mounts]
    for possible in (new, at_path, unmounted):
        if len(possible) == 1:
            return possible[0]
    what = "which device is the disk is not known: the worker has " + (texts.some([*after]) or "no data disk")
    fix = "detach the disk and attach it again, or list it in disks_mounts (roles/disks/README.md)"
    raise UsageError(what, where=f"--mount {path}", fix=fix)


def of_all(found: Mapping[str, str]) -> str:
    """Return the device of a disk, given its device on each worker.

    Raises:
        UsageError: The workers have the disk as different devices.
    """
    names = {name: host for host, name in found.items()}
    if len(names) == 1:
        return next(iter(names))
    what = f"the workers have the disk as different devices: {', '.join(f'{names[name]}: {name}' for name in names)}"
    raise UsageError(what, where="--mount", fix="list the disk in disks_mounts of each worker (roles/disks/README.md)")


def mount_points(found: Mapping[str, Devices], attached: int, named: Sequence[str]) -> list[str]:
    """Return what has to be unmounted before one disk is detached.

    Args:
        found: The devices that each worker sees.
        attached: Number of data disks that the node has.
        named: Mount points that the user has named; empty if none.

    Raises:
        UsageError: Several disks are mounted, and the user did not say where this one is.
    """
    mounted = sorted({point for devices in found.values() for points in devices.values() for point in points})
    if named:
        return [point for point in named if point in mounted]
    if mounted and attached > 1:
        what = f"the node has several disks, so it is not known which of them is mounted where ({', '.join(mounted)})"
        fix = "name the disk's mount point with --unmount PATH; with --no-unmount, the disk is detached as it is"
        raise UsageError(what, where="--unmount", fix=fix)
    return mounted
