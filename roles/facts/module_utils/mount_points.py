"""The mounts of a worker, and the paths at which a role may mount; runs on Python 3.8."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

FSTAB = "/etc/fstab"
#: The directory of the roles' own units.
UNITS = "/etc/systemd/system"


class Refusal(Exception):
    """Why an entry cannot be applied without losing something."""


class Mounted(NamedTuple):
    """A line of /proc/self/mountinfo (proc_pid_mountinfo(5)).

    Attributes:
        number: Major and minor number of the device.
        target: Mount point.
        options: Of this mount, parted by commas.
        fstype: Type of the file system.
        source: What is mounted.
        super_options: Of the file system, parted by commas.
    """

    number: str
    target: str
    options: str
    fstype: str
    source: str
    super_options: str


def unescaped(field: str) -> str:
    r"""Return a field of mountinfo or fstab with its \040 and the like as characters."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def parse_mounts(mountinfo: str) -> list[Mounted]:
    """Given /proc/self/mountinfo, return the mounts in its order: the last one at a path is the one that is seen."""
    found = []
    # Not `splitlines`: a carriage return and others may stand in a path, of which anybody may make one by FUSE.
    for line in filter(None, mountinfo.split("\n")):
        left, _, right = line.partition(" - ")
        fields, (fstype, source, super_options) = left.split(" "), (right.split(" ") + [""])[:3]
        found.append(Mounted(fields[2], unescaped(fields[4]), fields[5], fstype, unescaped(source), super_options))
    return found


def unit_name(path: str, suffix: str = "mount") -> str:
    """Return the name of the unit of a path, as `systemd-escape --path` does."""
    escaped = "".join(
        c if re.match(r"[A-Za-z0-9_:.]", c) else "\\x%02x" % ord(c) for c in path.strip("/").replace("/", "\0")
    )
    return "%s.%s" % (escaped.replace("\\x00", "-"), suffix)


def read(path: str, start: int = 0) -> str:
    """Return the text of a file, from a number of bytes on; empty where there is none."""
    try:
        with open(path, "rb") as stream:
            stream.seek(start)
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def parse_fstab(fstab: str) -> list[list[str]]:
    """Given the text of /etc/fstab, return the fields of each entry.

    A `#` starts a comment only at the start of a line (fstab(5)): `sshfs#ada@host:/d` is a source.
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
        Refusal: It would hide something.
    """
    if os.path.realpath(path) != path:
        raise Refusal("the path leads through a symbolic link to %s; give that path" % os.path.realpath(path))
    if os.path.lexists(path) and not os.path.isdir(path):
        raise Refusal("the mount point is not a directory; move it away, or give another path")
    inside = os.listdir(path) if os.path.isdir(path) else []
    if inside:
        raise Refusal("the mount point is not empty (%s); move that away" % ", ".join(sorted(inside)[:3]))
