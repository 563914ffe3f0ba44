"""What disks and mounts a worker has, and what a mount unit says; runs on Python 3.8."""

from __future__ import annotations

import glob
import os
import re
import stat
from typing import Any, BinaryIO, Dict, NamedTuple

from ansible.module_utils.mount_points import UNITS, Mounted, Refusal, check_fstab, read, unit_name

DISKS = "/dev/disk"
WANTS = UNITS + "/local-fs.target.wants"
HEADER = "# Written by Ansible (role disks); changes are lost."
#: Options that can be seen on a mount, and are there exactly where they are asked for.
VISIBLE = frozenset(("ro", "nosuid", "nodev", "noexec", "noatime", "nodiratime", "sync", "dirsync", "discard"))
#: How the kernel shows that a journal is left alone, whatever the option is called (noload, norecovery).
NO_JOURNAL = "norecovery"
#: Bytes that are read at one place of a disk that may be blank; a power of two.
PIECE = 1 << 20
#: Bytes at its beginning that are read completely: every file system writes there first.
HEAD = 256 * PIECE
#: How many places are read, evenly over the disk; XFS puts copies of its superblock at the quarters.
SAMPLES = 256
#: Bytes in a block group of ext4, whose superblock's copies are in the groups 1 and powers of 3, 5 and 7, and most that
#: XFS puts into one of its parts (mke2fs(8), mkfs.xfs(8)).
EXT4_GROUP, XFS_PART = 32768 * 4096, (1 << 40) - 4096
#: What the kernel's NFS server has exported to clients that have asked for it (nfsd(7)).
EXPORTS = "/proc/fs/nfsd/exports"
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
    """Given the answer of `blkid -p -o export`, return its pairs about what the disk holds; a blank one has none."""
    pairs = {key: value for key, _, value in (line.partition("=") for line in text.splitlines()) if value}
    # For a partition it also reports its location.
    return {key: value for key, value in pairs.items() if key != "DEVNAME" and not key.startswith("PART_ENTRY_")}


def places(size: int) -> list[int]:
    """Given the size of a disk in bytes, return where it is checked before it counts as blank, in bytes."""
    found = {*range(0, HEAD, PIECE), size - PIECE, *(size * part // SAMPLES for part in range(SAMPLES))}
    found |= {EXT4_GROUP * factor**power for factor in (3, 5, 7) for power in range(1, 20)}
    found |= set(range(0, size, XFS_PART))
    return sorted({place // PIECE * PIECE for place in found if 0 <= place < size} | {max(0, size - PIECE)})


def first_data(stream: BinaryIO) -> int | None:
    """Return roughly where a disk holds something other than zeros, in bytes; None if it looks blank."""
    size = stream.seek(0, os.SEEK_END)
    for place in places(size):
        stream.seek(place)
        if stream.read(PIECE).strip(b"\0"):
            return place
    return None


def wrong_options(mount: Mount, mounted: Mounted) -> list[str]:
    """Return the options that a mount has and should not have, or lacks."""
    wrong = VISIBLE & (frozenset(mount["options"]) ^ _options(mounted))
    return sorted(wrong | ({NO_JOURNAL} if lacks_journal(mount, mounted) else set()))


def lacks_journal(mount: Mount, mounted: Mounted) -> bool:
    """Return whether what is to be written to is mounted with its journal left alone.

    A remount keeps it so: ext4 is then written to without a journal, and XFS stays read-only (ext4(5), xfs(5)).
    """
    return "ro" not in mount["options"] and NO_JOURNAL in _options(mounted)


def _options(mounted: Mounted) -> frozenset[str]:
    return frozenset(mounted.options.split(",") + mounted.super_options.split(","))


def resolve(mount: Mount) -> str:
    """Return the device file of an entry's disk.

    Raises:
        Refusal: There is none, or more than one.
    """
    if mount["uuid"] or mount["label"]:
        kind = "uuid" if mount["uuid"] else "label"
        # As udev writes names that are no file names; what is not ASCII stays (blkid_encode_string of libblkid).
        label = "".join(c if re.match(r"[\w#+.:=@-]|[^\0-\x7f]", c) else "\\x%02x" % ord(c) for c in mount["label"])
        names = (mount["uuid"].lower(), mount["uuid"].upper()) if mount["uuid"] else (label,)
        links = [path for path in glob.glob("%s/by-%s/*" % (DISKS, kind)) if os.path.basename(path) in names]
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
        raise Refusal("%s is not a disk; name another" % found[0])
    return found[0]


def device_number(path: str) -> str:
    """Return major and minor number of a device file."""
    number = os.stat(path).st_rdev
    return "%d:%d" % (os.major(number), os.minor(number))


def check_unit(path: str) -> None:
    """Refuse a path that somebody else manages."""
    check_fstab(path)
    unit = os.path.join(UNITS, unit_name(path))
    if os.path.lexists(unit) and (os.path.islink(unit) or not read(unit).startswith(HEADER)):
        raise Refusal("%s does not belong to this role; remove it" % unit)


def used_by(path: str, number: str, mounts: list[Mounted]) -> str:
    """Return what keeps a disk mounted at a path: processes and exports below it, further mounts, and in containers.

    Args:
        path: The mount point.
        number: Major and minor number of the disk.
        mounts: What is mounted on the host.
    """
    found = [processes_below(path), exports_below(path), _containers(number)]
    found += sorted(
        "the mount at %s" % each.target
        for each in mounts
        if each.target.startswith(path + "/") or (each.number == number and each.target != path)
    )
    return ", ".join(each for each in found if each)


def _containers(number: str) -> str:
    """Return processes that have a disk mounted on their own, so that the host's umount does not reach them."""
    spaces = {os.readlink("/proc/self/ns/mnt")}
    found = set()
    for link in glob.glob("/proc/[0-9]*/ns/mnt"):
        try:
            space = os.readlink(link)
        except OSError:
            continue
        pid = link.split("/")[2]
        mountinfo = "" if space in spaces else read("/proc/%s/mountinfo" % pid)
        if mountinfo:
            spaces.add(space)
        if stays_mounted(mountinfo, number):
            found.add("%s (%s)" % (read("/proc/%s/comm" % pid).strip(), pid))
    return ", ".join(sorted(found)[:5])


def stays_mounted(mountinfo: str, number: str) -> bool:
    """Given mountinfo of another mount namespace, return whether a disk stays mounted there when the host unmounts it.

    A mount that is shared with the host's or follows it (master) goes with it (mount_namespaces(7)).
    """
    lines = [line.partition(" - ")[0].split(" ") for line in mountinfo.split("\n") if line]
    return any(
        fields[2] == number and not any(field.startswith(("shared:", "master:")) for field in fields[6:])
        for fields in lines
    )


def exports_below(path: str) -> str:
    """Return the directories below a path that the kernel's NFS server exports: no process has them open."""
    lines = (line.split() for line in read(EXPORTS).splitlines())
    found = sorted({words[0] for words in lines if words and (words[0] + "/").startswith(path + "/")})
    way = "if it is no longer in nfs_exports, --tags nfs ends it"
    return "the NFS export of %s (%s)" % (" and ".join(found), way) if found else ""


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
