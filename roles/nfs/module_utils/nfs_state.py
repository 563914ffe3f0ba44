"""Read the NFS state of a worker: mounts, units and servers; supports Python 3.8."""

from __future__ import annotations

import json
import os
from typing import Any, Dict

from ansible.module_utils.mount_points import (
    UNITS,
    Mounted,
    Refusal,
    check_free,
    check_fstab,
    read,
    unit_name,
)

HEADER = "# Written by Ansible (role nfs); changes are lost."
SERVICES = {"kernel": "nfs-server.service", "ganesha": "nfs-ganesha.service"}
#: Kind of server -> the files that the role writes for it; the first file contains the exports.
SERVER_FILES = {
    "kernel": ("/etc/exports.d/tpu_ops.exports", "/etc/nfs.conf.d/tpu_ops.conf"),
    "ganesha": ("/etc/ganesha/tpu_ops.conf", "/etc/ganesha/ganesha.conf"),
}
LOG = "/var/log/ganesha/ganesha.log"
PORT = 2049
Entry = Dict[str, Any]


def ours(path: str) -> bool:
    """Return whether a file was written by this role."""
    return not os.path.islink(path) and read(path).startswith(HEADER)


def parse_ganesha(text: str) -> list[str]:
    """Given nfs-ganesha's answer to ShowExports, printed by busctl as JSON, return the paths of the exports."""
    try:
        rows = json.loads(text)["data"][1]
        return sorted(row[1] for row in rows if row[1] != "/")
    except (ValueError, KeyError, IndexError, TypeError):
        return []


def parse_log(text: str) -> list[str]:
    """Given a part of nfs-ganesha's log, return the errors that prevent its start or an export."""
    lines = [line for line in text.splitlines() if ":CRIT :" in line or ":FATAL :" in line]
    return [line.partition("] ")[2] for line in lines]


def parse_exportfs(text: str) -> list[str]:
    """Given the output of `exportfs -s`, return the paths that the kernel's server exports."""
    return sorted({line.split()[0] for line in text.splitlines() if line.startswith("/")})


def same(path: str, what: str) -> bool:
    """Return whether two paths are the same directory of this worker, for example by a bind mount."""
    return os.path.isdir(what) and os.path.isdir(path) and os.path.samefile(path, what)


def read_only(path: str) -> bool:
    """Return whether the mount at a path is read-only."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def check_point(path: str, mounts: list[Mounted], what: str) -> None:
    """Reject a mount point that would hide files or another mount, or that this role does not manage.

    Raises:
        Refusal: The mount point is in /etc/fstab, has a unit of somebody else, is in use or is not empty.
    """
    check_fstab(path)
    for suffix in ("mount", "automount"):
        unit = os.path.join(UNITS, unit_name(path, suffix))
        if os.path.lexists(unit) and not ours(unit) and (os.path.islink(unit) or read(unit)):
            raise Refusal("%s does not belong to this role; remove it" % unit)
    here = [mount for mount in mounts if mount.target == path]
    if here:
        known = here[-1].fstype.startswith(("nfs", "autofs")) or ours(os.path.join(UNITS, unit_name(path, "mount")))
        if not known and not same(path, what):
            found = "%s from %s" % (here[-1].fstype, here[-1].source)
            raise Refusal("another file system is mounted at this path (%s); unmount it, or give another path" % found)
        # The mount point is not inspected if it is mounted: its server may not answer.
        return
    check_free(path)
