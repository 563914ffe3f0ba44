"""Read a worker's mounts, and check the paths at which a role mounts; supports Python 3.8."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

FSTAB = "/etc/fstab"
#: The directory for the mount units that roles write.
UNITS = "/etc/systemd/system"


class Refusal(Exception):
    """An entry that cannot be applied without losing data or access to it; the text says why."""


class Mounted(NamedTuple):
    """A line of /proc/self/mountinfo (proc_pid_mountinfo(5)).

    Attributes:
        number: Major and minor number of the device.
        target: Mount point.
        options: Options of this mount, separated by commas.
        fstype: Type of the file system.
        source: The device, directory or export that is mounted.
        super_options: Options of the file system, separated by commas.
    """

    number: str
    target: str
    options: str
    fstype: str
    source: str
    super_options: str


def unescaped(field: str) -> str:
    r"""Replace the octal escapes in a field of mountinfo or fstab, such as \040, by their characters."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def parse_mounts(mountinfo: str) -> list[Mounted]:
    """Parse /proc/self/mountinfo into mounts, in its order: the last mount at a path hides the earlier ones."""
    found = []
    # `splitlines` is not used: anybody can mount FUSE at a path with a carriage return, which `splitlines` takes as a
    # line end.
    for line in filter(None, mountinfo.split("\n")):
        left, _, right = line.partition(" - ")
        fields, (fstype, source, super_options) = left.split(" "), (right.split(" ") + [""])[:3]
        found.append(Mounted(fields[2], unescaped(fields[4]), fields[5], fstype, unescaped(source), super_options))
    return found


def unit_name(path: str, suffix: str = "mount") -> str:
    """Return the name of the mount unit (or with another suffix) for a path, as `systemd-escape --path` does."""
    escaped = "".join(
        c if re.match(r"[A-Za-z0-9_:.]", c) else "\\x%02x" % ord(c) for c in path.strip("/").replace("/", "\0")
    )
    return "%s.%s" % (escaped.replace("\\x00", "-"), suffix)


def read(path: str, start: int = 0) -> str:
    """Return the text of a file from the byte `start` on; empty if the file cannot be read."""
    try:
        with open(path, "rb") as stream:
            stream.seek(start)
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def parse_fstab(fstab: str) -> list[list[str]]:
    """Given the text of /etc/fstab, return the fields of each entry.

    A `#` starts a comment only at the start of a line (fstab(5)): `sshfs#ada@host:/d` is the name of a file system.
    """
    lines = (line.split() for line in fstab.splitlines())
    return [[unescaped(field) for field in fields] for fields in lines if fields and not fields[0].startswith("#")]


def check_fstab(path: str) -> None:
    """Reject a mount point that is in /etc/fstab.

    Raises:
        Refusal: /etc/fstab has this mount point.
    """
    for fields in parse_fstab(read(FSTAB)):
        if len(fields) > 1 and os.path.normpath(fields[1]) == path:
            raise Refusal("/etc/fstab has a line for it; remove that line: this role writes units instead")


def check_free(path: str) -> None:
    """Reject a mount point that would hide existing files.

    Raises:
        Refusal: The mount point is a symbolic link, is not a directory, or is not empty.
    """
    if os.path.realpath(path) != path:
        raise Refusal("the path leads through a symbolic link to %s; give that path" % os.path.realpath(path))
    if os.path.lexists(path) and not os.path.isdir(path):
        raise Refusal("the mount point is not a directory; move it away, or give another path")
    inside = os.listdir(path) if os.path.isdir(path) else []
    if inside:
        raise Refusal("the mount point is not empty (%s); move its content away" % ", ".join(sorted(inside)[:3]))
