"""Filters that check and complete disks_mounts; no side effects, so that their tests are tables."""

from __future__ import annotations

import itertools
import posixpath
import re
from typing import Any

Mount = dict[str, Any]

#: The keys of an entry of disks_mounts that can name a disk.
NAMES = ("device", "uuid", "label")
#: Mount points that need no quoting in shells or in names of systemd units.
PATH = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+")
#: Top-level directories of the system; no mount point may be in them (hier(7), file-hierarchy(7)).
SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "root", "run", "sbin", "sys", "tmp")
#: Directories of the system that may have mount points below them but must not be mount points themselves (hier(7)).
PARENTS = (
    "/",
    "/home",
    "/media",
    "/mnt",
    "/opt",
    "/srv",
    "/usr",
    "/usr/local",
    "/var",
    "/var/lib",
    "/var/log",
    "/var/tmp",  # noqa: S108 - in the list of refused paths
)
OPTION = re.compile(r"[a-z][A-Za-z0-9_.-]*(=[A-Za-z0-9_.:/+-]+)?")
#: Mount options that users must not list: those that the role sets itself, and words that are not mount options for
#: systemd or mount(8).
TAKEN = {
    *("auto", "noauto", "nofail", "user", "users", "nouser", "owner", "group", "defaults"),
    *("bind", "rbind", "remount", "loop", "ro", "rw", "discard", "nodiscard", "noload", "norecovery"),
}
#: Type of file system -> the option that mounts it without replaying its journal (ext4(5), xfs(5)).
NO_JOURNAL = {"ext4": "noload", "xfs": "norecovery"}
#: Type of file system -> the package with its mkfs (Debian and Ubuntu).
PACKAGES = {"ext4": "e2fsprogs", "xfs": "xfsprogs"}


def path_fault(path: str) -> str:
    """Return the fault of a mount point's path, or the empty string."""
    if path not in PARENTS and (not PATH.fullmatch(path) or posixpath.normpath(path) != path):
        return (
            "is not an absolute path of letters, digits, '_', '.' and '-', or contains '//', '..' or a '/' at the end"
        )
    usr = path.startswith("/usr/") and not path.startswith("/usr/local/")
    if path in PARENTS or path.split("/")[1] in SYSTEM or usr:
        return "is a directory of the system; choose a directory for this mount only, for example /mnt/data"
    return ""


def name_faults(mount: Mount) -> list[str]:
    """Return the faults of an entry's keys device, uuid and label, which name its disk."""
    named = [key for key in NAMES if mount.get(key)]
    faults = []
    if len(named) > 1:
        faults.append(f"{' and '.join(named)} are given, and only one of them can name the disk; remove the others")
    if not named and mount.get("state", "mounted") == "mounted":
        faults.append("no disk is named; give device, uuid or label")
    device = str(mount.get("device", ""))
    if device.startswith("/") and not device.startswith("/dev/disk/by-"):
        faults.append(f"device {device} may be another disk after the next boot; give a name below /dev/disk/by-id")
    elif device and (not re.fullmatch(r"[A-Za-z0-9_.:+\\/-]+", device) or ".." in device):
        faults.append(f"device '{device}' is not a name below /dev/disk/by-id; give one that `ls` lists there")
    if (uuid := str(mount.get("uuid", ""))) and not re.fullmatch(r"[0-9A-Fa-f-]{4,36}", uuid):
        faults.append(f"uuid '{uuid}' is not a UUID; give one that `blkid` lists on the worker")
    if "/" in str(mount.get("label", "")):
        faults.append("label must not contain '/'")
    return faults


def mount_faults(mount: Mount) -> list[str]:
    """Return the faults of one entry of disks_mounts that do not depend on other entries."""
    faults = [f"path {fault}"] if (fault := path_fault(str(mount.get("path", "")))) else []
    faults += name_faults(mount)
    if mount.get("state", "mounted") == "absent":
        return faults
    if mount.get("format") and (mount.get("uuid") or mount.get("label")):
        faults.append("format needs device: a blank disk has neither UUID nor label")
    if mount.get("read_only"):
        writing = ("format", "owner", "group", "mode")
        faults += [f"{key} cannot be given with read_only; remove one of them" for key in writing if mount.get(key)]
    if (mode := str(mount.get("mode", ""))) and not re.fullmatch(r"[0-7]{3,4}", mode):
        faults.append(f"mode '{mode}' is not octal in quotes, for example \"0755\"")
    for option in mount.get("options", []):
        if not OPTION.fullmatch(str(option)):
            faults.append(f"options: '{option}' is not a single option; list each separately, for example noatime")
        elif str(option).partition("=")[0] in TAKEN:
            faults.append(f"options: {option} is set by the role, or would change what is mounted; remove this option")
    return faults


def disks_faults(mounts: list[Mount], accounts: list[str], groups: list[str]) -> list[str]:
    """Return every fault of disks_mounts, each with its entry.

    Args:
        mounts: disks_mounts.
        accounts: The accounts that the worker has once site.yml has run.
        groups: The groups that the worker has then.
    """
    if not isinstance(mounts, list) or not all(isinstance(mount, dict) for mount in mounts):
        return ["disks_mounts: must be a list of mappings, each with path and other keys"]
    faults = []
    for position, mount in enumerate(mounts):
        where = f"disks_mounts[{position}]: {mount.get('path', 'no path')}"
        faults += [f"{where}: {fault}" for fault in mount_faults(mount)]
        for key, known in (("owner", accounts), ("group", groups)):
            name = str(mount.get(key, ""))
            if name and not name.isdecimal() and not {name, "*"} & set(known):
                faults.append(
                    f"{where}: there is no {key} {name}, and users_people does not add it on this node; set {key}, or"
                    f" list {name} for this node"
                )
    for one, other in itertools.combinations(mounts, 2):
        a, b = str(one.get("path")), str(other.get("path"))
        if a == b:
            faults.append(f"disks_mounts: {a} is listed twice; remove one of them")
        elif (a + "/").startswith(b + "/") or (b + "/").startswith(a + "/"):
            faults.append(
                f"disks_mounts: of the paths {a} and {b}, one is inside the other; choose two paths next to each other"
            )
        if "absent" in (one.get("state"), other.get("state")):
            continue
        faults += [
            f"disks_mounts: {key} {one[key]} is listed for both {a} and {b}; remove one of them, or name another disk"
            for key in NAMES
            if one.get(key) and one[key] == other.get(key)
        ]
    return faults


def disks_complete(mounts: list[Mount], trim: str) -> list[Mount]:
    """Return the entries of disks_mounts in the form of the module `data_disks`, with all mount options."""
    return [_complete(mount, trim) for mount in mounts]


def _complete(mount: Mount, trim: str) -> Mount:
    fstype, read_only = mount.get("fstype", "ext4"), bool(mount.get("read_only"))
    # Default options are listed too, since a remount keeps every option that it does not name.
    own = ["ro", NO_JOURNAL[fstype]] if read_only else ["rw", "discard" if trim == "discard" else "nodiscard"]
    kept = {key: mount[key] for key in (*NAMES, "path", "format", "owner", "group", "mode", "state") if mount.get(key)}
    return {**kept, "fstype": fstype, "read_only": read_only, "options": [*own, "nofail", *mount.get("options", [])]}


def disks_packages(mounts: list[Mount]) -> list[str]:
    """Return the packages that are needed to format the disks of entries with `format`."""
    making = [mount for mount in mounts if mount.get("format") and mount.get("state", "mounted") != "absent"]
    return sorted({PACKAGES[mount.get("fstype", "ext4")] for mount in making})


def disks_enabled_mounts(units: dict[str, dict[str, str]]) -> list[str]:
    """Given the worker's units, return all enabled mount units, whether this role or somebody else wrote them."""
    return sorted(name for name, unit in units.items() if name.endswith(".mount") and unit["enabled"] == "enabled")


class FilterModule:
    """Filters of the role disks."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "disks_complete": disks_complete,
            "disks_enabled_mounts": disks_enabled_mounts,
            "disks_faults": disks_faults,
            "disks_packages": disks_packages,
        }
