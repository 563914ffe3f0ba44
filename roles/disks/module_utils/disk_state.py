"""Disks and mounts of a worker, and the text of mount units; runs on Python 3.8."""

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
#: Options that the kernel reports for a mount if, and only if, they were requested.
VISIBLE = frozenset(("ro", "nosuid", "nodev", "noexec", "noatime", "nodiratime", "sync", "dirsync", "discard"))
#: The option that the kernel reports for a mount that was mounted without its journal (noload, norecovery).
NO_JOURNAL = "norecovery"
#: Size in bytes of each sample that is read to find out whether a disk is blank; a power of two.
PIECE = 1 << 20
#: Number of bytes at the beginning of a disk that are read completely, since every file system writes there first.
HEAD = 256 * PIECE
#: Number of samples that are spread evenly over a disk; XFS has copies of its superblock at the quarters.
SAMPLES = 256
#: Size in bytes of a block group of ext4, and the largest size of an allocation group of XFS (mke2fs(8), mkfs.xfs(8)).
#: ext4 keeps copies of its superblock in group 1 and in the groups that are powers of 3, 5 and 7.
EXT4_GROUP, XFS_PART = 32768 * 4096, (1 << 40) - 4096
#: The kernel's list of exports that NFS clients have used (nfsd(7)).
EXPORTS = "/proc/fs/nfsd/exports"
#: An entry of the argument `mounts` of the module data_disks.
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
    """Given the output of `blkid -p -o export`, return the contents' tags, such as TYPE; none for a blank disk."""
    pairs = {key: value for key, _, value in (line.partition("=") for line in text.splitlines()) if value}
    # For a partition, blkid also reports where it is on its disk, in PART_ENTRY_ tags.
    return {key: value for key, value in pairs.items() if key != "DEVNAME" and not key.startswith("PART_ENTRY_")}


def places(size: int) -> list[int]:
    """Given the size of a disk in bytes, return the positions of the samples that are read to see if it is blank."""
    found = {*range(0, HEAD, PIECE), size - PIECE, *(size * part // SAMPLES for part in range(SAMPLES))}
    found |= {EXT4_GROUP * factor**power for factor in (3, 5, 7) for power in range(1, 20)}
    found |= set(range(0, size, XFS_PART))
    return sorted({place // PIECE * PIECE for place in found if 0 <= place < size} | {max(0, size - PIECE)})


def first_data(stream: BinaryIO) -> int | None:
    """Return the position of the first sample of a disk that is not all zeros; None if the disk looks blank."""
    size = stream.seek(0, os.SEEK_END)
    for place in places(size):
        stream.seek(place)
        if stream.read(PIECE).strip(b"\0"):
            return place
    return None


def wrong_options(mount: Mount, mounted: Mounted) -> list[str]:
    """Return the options in which a mount differs from its entry: missing ones and ones that are not listed."""
    wrong = VISIBLE & (frozenset(mount["options"]) ^ _options(mounted))
    return sorted(wrong | ({NO_JOURNAL} if lacks_journal(mount, mounted) else set()))


def lacks_journal(mount: Mount, mounted: Mounted) -> bool:
    """Return whether a mount that should be writable was mounted without its journal.

    A remount as writable does not help: ext4 would be written to without a journal, and XFS would stay read-only
    (ext4(5), xfs(5)).
    """
    return "ro" not in mount["options"] and NO_JOURNAL in _options(mounted)


def _options(mounted: Mounted) -> frozenset[str]:
    return frozenset(mounted.options.split(",") + mounted.super_options.split(","))


def resolve(mount: Mount) -> str:
    """Return the device file of an entry's disk.

    Raises:
        Refusal: There is no such disk, or more than one.
    """
    if mount["uuid"] or mount["label"]:
        kind = "uuid" if mount["uuid"] else "label"
        # udev escapes ASCII characters that are invalid in file names, but keeps non-ASCII ones (blkid_encode_string of
        # libblkid).
        label = "".join(c if re.match(r"[\w#+.:=@-]|[^\0-\x7f]", c) else "\\x%02x" % ord(c) for c in mount["label"])
        names = (mount["uuid"].lower(), mount["uuid"].upper()) if mount["uuid"] else (label,)
        links = [path for path in glob.glob("%s/by-%s/*" % (DISKS, kind)) if os.path.basename(path) in names]
        wanted = "with the %s %s" % (kind, mount[kind])
    elif mount["device"].startswith("/"):
        links, wanted = [mount["device"]], mount["device"]
    else:
        name, wanted = mount["device"], "named %s" % mount["device"]
        every = [path for path in glob.glob(DISKS + "/by-id/*") if not re.search(r"-part\d+$", path) or "-part" in name]
        # udev's and Google's rules put a prefix before a disk's serial in the names of links.
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
    """Reject a mount point that is in /etc/fstab, or whose mount unit does not belong to this role."""
    check_fstab(path)
    unit = os.path.join(UNITS, unit_name(path))
    if os.path.lexists(unit) and (os.path.islink(unit) or not read(unit).startswith(HEADER)):
        raise Refusal("%s does not belong to this role; remove it" % unit)


def used_by(path: str, number: str, mounts: list[Mounted]) -> str:
    """Return what uses a mounted disk: processes, exports and mounts below its mount point, and mounts in containers.

    Args:
        path: The mount point.
        number: The disk's major and minor number.
        mounts: The mounts of the host.
    """
    found = [processes_below(path), exports_below(path), _containers(number)]
    found += sorted(
        "the mount at %s" % each.target
        for each in mounts
        if each.target.startswith(path + "/") or (each.number == number and each.target != path)
    )
    return ", ".join(each for each in found if each)


def _containers(number: str) -> str:
    """Return processes in whose own mount namespace a disk is mounted and stays so when the host unmounts it."""
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
    """Given a mount namespace's mountinfo, return whether a disk stays mounted in it when the host unmounts the disk.

    A mount that shares propagation with the host's mount, or is its slave, is unmounted together with it
    (mount_namespaces(7)).
    """
    lines = [line.partition(" - ")[0].split(" ") for line in mountinfo.split("\n") if line]
    return any(
        fields[2] == number and not any(field.startswith(("shared:", "master:")) for field in fields[6:])
        for fields in lines
    )


def exports_below(path: str) -> str:
    """Return the directories below a path that the kernel's NFS server exports; no process shows them as open."""
    lines = (line.split() for line in read(EXPORTS).splitlines())
    found = sorted({words[0] for words in lines if words and (words[0] + "/").startswith(path + "/")})
    way = "if nfs_exports no longer lists it, a run with --tags nfs ends the export"
    return "the NFS export of %s (%s)" % (" and ".join(found), way) if found else ""


def processes_below(path: str) -> str:
    """Return the first few processes that have a file or directory below a path open."""
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
