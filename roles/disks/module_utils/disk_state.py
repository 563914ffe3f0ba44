"""What disks and mounts a worker has, and what a mount unit says; runs on Python 3.8."""

from __future__ import annotations

import glob
import os
import re
import stat
from typing import Any, Dict, NamedTuple

from ansible.module_utils.mount_points import UNITS, Mounted, Refusal, check_fstab, read, unit_name

DISKS = "/dev/disk"
WANTS = UNITS + "/local-fs.target.wants"
HEADER = "# Written by Ansible (role disks); changes are lost."
#: Options that can be seen on a mount, and are there exactly where they are asked for.
VISIBLE = frozenset(("ro", "nosuid", "nodev", "noexec", "noatime", "nodiratime", "sync", "dirsync", "discard"))
#: A mount as the module's argument has it.
Mount = Dict[str, Any]


class Disk(NamedTuple):
    """A block device."""

    path: str
    number: str
    names: Dict[str, str]
    read_only: bool


def unit_text(mount: Mount, uuid: str) -> str:
    """Return the mount unit of an entry."""
    return "\n".join(
        [
            HEADER,
            "[Unit]",
            "Description=Data disk at %s" % mount["path"],
            "",
            "[Mount]",
            "What=/dev/disk/by-uuid/%s" % uuid,
            "Where=%s" % mount["path"],
            "Type=%s" % mount["fstype"],
            "Options=%s" % ",".join(mount["options"]),
            "",
            "[Install]",
            "WantedBy=local-fs.target",
            "",
        ]
    )


def parse_blkid(text: str) -> dict[str, str]:
    """Given the answer of `blkid -p -o export`, return its pairs."""
    return {key: value for key, _, value in (line.partition("=") for line in text.splitlines()) if value}


def wrong_options(mount: Mount, mounted: Mounted) -> list[str]:
    """Return the options that a mount has and should not have, or lacks."""
    there = frozenset(mounted.options.split(",") + mounted.super_options.split(","))
    return sorted(VISIBLE & (frozenset(mount["options"]) ^ there))


def resolve(mount: Mount) -> str:
    """Return the device file of an entry's disk.

    Raises:
        Refusal: There is none, or more than one.
    """
    if mount["uuid"] or mount["label"]:
        kind, name = ("uuid", mount["uuid"].lower()) if mount["uuid"] else ("label", mount["label"])
        # As udev writes names that are no file names.
        name = "".join(c if re.match(r"[\w#+.:=@-]", c) else "".join("\\x%02x" % b for b in c.encode()) for c in name)
        links = [
            path for path in glob.glob("%s/by-%s/*" % (DISKS, kind)) if os.path.basename(path) in (name, name.upper())
        ]
        wanted = "with the %s %s" % (kind, mount[kind])
    elif mount["device"].startswith("/"):
        links, wanted = [mount["device"]], mount["device"]
    else:
        name, wanted = mount["device"], "named %s" % mount["device"]
        every = [path for path in glob.glob(DISKS + "/by-id/*") if not re.search(r"-part\d+$", path) or "-part" in name]
        # By serial: how udev's rules and Google's form their links from it.
        forms = (name, "google-" + name, "virtio-" + name)
        links = [path for path in every if os.path.basename(path) in forms or path.endswith("_" + name)]
    found = sorted({os.path.realpath(path) for path in links if os.path.exists(path)})
    if len(found) > 1:
        raise Refusal("%s are all %s; give another name" % (" and ".join(found), wanted))
    if not found:
        here = sorted(os.path.basename(path) for path in glob.glob(DISKS + "/by-id/google-*"))
        raise Refusal("no disk %s is attached; data disks here: %s" % (wanted, ", ".join(here) or "none"))
    if not stat.S_ISBLK(os.stat(found[0]).st_mode):
        raise Refusal("%s is no disk" % found[0])
    return found[0]


def device_number(path: str) -> str:
    """Return major and minor number of a device file."""
    number = os.stat(path).st_rdev
    return "%d:%d" % (os.major(number), os.minor(number))


def check_unit(path: str) -> None:
    """Refuse a path that somebody else cares for."""
    check_fstab(path)
    unit = os.path.join(UNITS, unit_name(path))
    if os.path.lexists(unit) and (os.path.islink(unit) or not read(unit).startswith(HEADER)):
        raise Refusal("%s is not this role's; remove it" % unit)


def processes_below(path: str) -> str:
    """Return the processes that have something open below a path."""
    found = set()
    for link in glob.glob("/proc/[0-9]*/cwd") + glob.glob("/proc/[0-9]*/root") + glob.glob("/proc/[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if (target + "/").startswith(path + "/"):
            pid = link.split("/")[2]
            found.add("%s (%s)" % (read("/proc/%s/comm" % pid).strip(), pid))
    return ", ".join(sorted(found)[:5])
