#!/usr/bin/python
"""Module that mounts data disks and formats blank ones; runs on Python 3.8."""

from __future__ import annotations

import errno
import glob
import grp
import os
import pwd
import stat
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.disk_state import (
    HEADER,
    WANTS,
    Disk,
    Mount,
    check_unit,
    device_number,
    exports_below,
    first_data,
    lacks_journal,
    parse_blkid,
    processes_below,
    resolve,
    unit_text,
    used_by,
    wrong_options,
)
from ansible.module_utils.guarded_paths import Refused, give, open_directory
from ansible.module_utils.mount_points import UNITS, Mounted, Refusal, check_free, read, unit_name
from ansible.module_utils.turns import take_turn
from ansible.module_utils.worker import Worker, number

DOCUMENTATION = r"""
module: data_disks
short_description: Format blank disks, mount them by UUID with systemd units, and unmount them
description:
  - Checks all entries first. If one of them cannot be applied without losing data, nothing is changed, and every reason
    is reported.
  - Mounts, units and ownership that differ from the request are corrected. Data are never overwritten.
options:
  mounts:
    description: What is mounted where.
    type: list
    elements: dict
    required: true
    suboptions:
      device: {description: Name below /dev/disk/by-id or serial or path below /dev/disk., type: str, default: ""}
      uuid: {description: UUID of the file system., type: str, default: ""}
      label: {description: Label of the file system., type: str, default: ""}
      path: {description: Mount point., type: path, required: true}
      fstype: {description: Type of the file system., type: str, required: true}
      format: {description: Whether a blank disk gets a file system., type: bool, default: false}
      options: {description: All mount options., type: list, elements: str, default: []}
      owner: {description: Owner of the root of the file system., type: str, default: ""}
      group: {description: Group of it., type: str, default: ""}
      mode: {description: Mode of it in octal digits., type: str, default: ""}
      read_only: {description: Whether the disk may be read-only., type: bool, default: false}
      state: {description: Mounted or absent., type: str, choices: [mounted, absent], default: mounted}
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Mount the first data disk
  data_disks:
    mounts:
      - {device: google-persistent-disk-1, path: /mnt/data, fstype: ext4, format: true, options: [rw, nofail]}
"""

RETURN = r"""
actions:
  description: What was or would be done, in order.
  type: list
  returned: always
"""

#: Time limit in seconds for udev to make the links of a new file system.
LINK_TIMEOUT = 30.0
#: Commands that make a file system. They discard no blocks: if the disk only looked blank, its data can still be read.
MKFS = {
    # -m 0 reserves no blocks for root, since the system does not write to a data disk.
    "ext4": ["mkfs.ext4", "-q", "-m", "0", "-E", "nodiscard"],
    "xfs": ["mkfs.xfs", "-q", "-K"],
}


#: Commands that check an unmounted file system and repair nothing.
CHECK = {"ext4": "e2fsck -fn %s", "xfs": "xfs_repair -n %s"}


class DataDisks(Worker):  # type: ignore[misc]  # only Ansible can import module_utils
    """The checks and changes of the module data_disks on this worker."""

    about = "disks_mounts: "

    def at(self, path: str) -> Mounted | None:
        """Return the mount at a path; of several, the one that hides the others; None if there is none."""
        found = [each for each in self.mounts() if each.target == path]
        return found[-1] if found else None

    # Methods that only check

    def disk(self, mount: Mount) -> Disk:
        """Return what blkid and the kernel report about an entry's disk.

        Raises:
            Refusal: There is no such disk, or its contents cannot be determined.
        """
        path = resolve(mount)
        code, out = self.run("blkid", "-p", "-o", "export", path, check=False)
        # Exit codes of blkid: 2 if it finds nothing, 8 if signatures contradict each other (blkid(8)).
        if code not in (0, 2):
            raise Refusal("the contents of %s cannot be determined; `wipefs -n %s` lists its signatures" % (path, path))
        number = device_number(path)
        names = parse_blkid(out) if code == 0 else {}
        return Disk(path, number, names, read("/sys/dev/block/%s/ro" % number).strip() == "1")

    def check(self, mount: Mount, leaving: list[str]) -> Disk:
        """Check whether an entry can be mounted, and return its disk.

        Args:
            mount: The entry.
            leaving: The mount points that this run unmounts before.

        Raises:
            Refusal: The entry cannot be mounted without losing data.
        """
        disk = self.disk(mount)
        fstype = disk.names.get("TYPE", "")
        if disk.names.get("PTTYPE") or glob.glob("/sys/dev/block/%s/*/partition" % disk.number):
            raise Refusal("%s is partitioned; name one of its partitions" % disk.path)
        if os.path.isdir("/sys/dev/block/%s/holders" % disk.number):
            holders = os.listdir("/sys/dev/block/%s/holders" % disk.number)
            if holders:
                raise Refusal("%s is part of %s; name another disk" % (disk.path, ", ".join(holders)))
        if not disk.names:
            self.check_blank(mount, disk)
        elif fstype != mount["fstype"]:
            raise Refusal(
                "%s holds %s, not %s; to have it formatted, save what is on it and empty it by hand (`blkdiscard -z`)"
                % (disk.path, fstype or "an unknown signature", mount["fstype"])
            )
        elif not disk.names.get("UUID"):
            ways = {"ext4": "tune2fs -U random", "xfs": "xfs_admin -U generate"}
            raise Refusal("the file system on %s has no UUID; give it one (`%s`)" % (disk.path, ways[fstype]))
        if disk.read_only and not mount["read_only"]:
            raise Refusal("%s is attached read-only; set read_only: true" % disk.path)
        there = self.at(mount["path"])
        if there is None:
            paths = [each.target for each in self.mounts() if each.number == disk.number and each.target not in leaving]
            if paths:
                raise Refusal("%s is mounted at %s; unmount it there, or give that path" % (disk.path, paths[0]))
            check_free(mount["path"])
        elif there.number != disk.number:
            found = "%s, device %s" % (there.fstype, there.number)
            raise Refusal("another file system is mounted at this path (%s); unmount it, or give another path" % found)
        elif lacks_journal(mount, there):
            held = used_by(mount["path"], disk.number, self.mounts())
            if held:
                raise Refusal(
                    "the disk is mounted without its journal, and must be unmounted before it can be written to safely;"
                    " used by %s: end that and run again" % held
                )
        self.check_accounts(mount)
        return disk

    def check_accounts(self, mount: Mount) -> None:
        """Reject an owner or group that does not exist. Check mode rejects none, since it creates no accounts."""
        for key, find in (("owner", pwd.getpwnam), ("group", grp.getgrnam)):
            if mount[key] and not mount[key].isdigit() and not self.module.check_mode:
                try:
                    find(mount[key])
                except KeyError as exc:
                    raise Refusal(
                        "this worker has no %s %s; set %s in disks_mounts, or create the account or group"
                        % (key, mount[key], key)
                    ) from exc

    def check_blank(self, mount: Mount, disk: Disk) -> None:
        """Check that a disk without a file system may be formatted.

        Raises:
            Refusal: `format` is not set, or the disk is read-only, in use or not blank.
        """
        if not mount["format"]:
            raise Refusal("%s holds no file system; set format: true to have one made" % disk.path)
        if disk.read_only:
            raise Refusal("%s is blank and read-only; attach it read-write to have it formatted" % disk.path)
        if self.run("wipefs", "-n", disk.path, check=False)[1].strip():
            raise Refusal(
                "%s holds a signature, which `wipefs -n %s` shows; if nobody needs what is on the disk, empty it by"
                " hand (`blkdiscard -z`)" % (disk.path, disk.path)
            )
        try:
            # With O_EXCL, the kernel rejects the opening of a disk that is in use.
            handle = os.open(disk.path, os.O_RDONLY | os.O_EXCL)
        except OSError as exc:
            reason = "in use; end the processes that use it" if exc.errno == errno.EBUSY else exc.strerror
            raise Refusal("%s cannot be formatted: %s" % (disk.path, reason)) from exc
        with os.fdopen(handle, "rb") as stream:
            try:
                place = first_data(stream)
            except OSError as exc:
                raise Refusal("%s cannot be read (%s); name another disk" % (disk.path, exc.strerror)) from exc
        if place is not None:
            raise Refusal(
                "%s holds data without a signature, near byte %d; if nobody needs it, empty the disk by hand"
                " (`blkdiscard -z`)" % (disk.path, place)
            )

    # Methods that change the worker

    def format(self, mount: Mount, disk: Disk) -> None:
        """Make a file system on a blank disk and wait until udev has made its links in /dev/disk."""
        self.run(*MKFS[mount["fstype"]], disk.path)
        if self.module.get_bin_path("udevadm"):
            self.run("udevadm", "settle", "--timeout=%d" % LINK_TIMEOUT, check=False)

    def linked(self, disk: Disk) -> str:
        """Wait for the link of the disk's UUID and return the UUID; fail if another disk has the same UUID."""
        _, out = self.run("blkid", "-p", "-o", "export", disk.path)
        uuid: str = parse_blkid(out)["UUID"]
        link, deadline = "/dev/disk/by-uuid/" + uuid, time.monotonic() + LINK_TIMEOUT
        while not os.path.exists(link) and time.monotonic() < deadline:
            time.sleep(0.1)  # polls for udev's link until the deadline
        if not os.path.exists(link):
            self.fail(
                "%s did not appear within %d s; check what udev reports (`journalctl -u systemd-udevd`) and run again"
                % (link, LINK_TIMEOUT)
            )
        if device_number(link) != disk.number:
            self.fail(
                "%s and %s have the same UUID %s; give one of them another" % (disk.path, os.path.realpath(link), uuid)
            )
        return uuid

    def mounted(self, mount: Mount) -> None:
        """Mount an entry with its options, unit and ownership; format its disk first if it is blank."""
        path, name = mount["path"], unit_name(mount["path"])
        disk = self.disk(mount)
        blank = not disk.names
        if blank and self.act("format %s as %s" % (disk.path, mount["fstype"])):
            self.format(mount, disk)
        if blank and self.module.check_mode:
            self.actions += ["write %s" % name, "enable %s" % name, "mount %s" % path]
            return
        self.write_unit(mount, self.linked(disk))
        there = self.at(path)
        if there is None:
            if self.act("mount %s" % path):
                os.makedirs(path, mode=0o755, exist_ok=True)
                self.systemctl("start", name)
        elif lacks_journal(mount, there):
            self.anew(mount, there, disk)
        elif wrong_options(mount, there) and self.act(
            "remount %s (%s)" % (path, ", ".join(wrong_options(mount, there)))
        ):
            self.systemctl("reload", name)
        if there is None and self.module.check_mode:
            return
        now = self.at(path)
        if not self.module.check_mode and (now is None or now.number != disk.number or wrong_options(mount, now)):
            self.fail("%s is not mounted as requested, although systemd said so: %s" % (path, now))
        self.ownership(mount)

    def anew(self, mount: Mount, there: Mounted, disk: Disk) -> None:
        """Unmount a file system that was mounted without its journal, and mount it with the journal."""
        path, name = mount["path"], unit_name(mount["path"])
        if "ro" not in there.options.split(",") + there.super_options.split(","):
            self.module.warn(
                "%s was writable without its journal; a crash in that time may have damaged it: unmount it when nobody"
                " needs it, and check it (`%s`)" % (path, CHECK[mount["fstype"]] % disk.path)
            )
        if not self.act("unmount %s and mount it again (%s)" % (path, ", ".join(wrong_options(mount, there)))):
            return
        self.unmount(path)
        # The next start does nothing as long as systemd considers the mount unit active, so wait until it has noticed
        # the unmount.
        deadline = time.monotonic() + LINK_TIMEOUT
        while self.run("systemctl", "is-active", "--quiet", name, check=False)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.1)  # polls systemd until the deadline
        self.systemctl("start", name)

    def unmount(self, path: str) -> None:
        """Unmount a path. If this fails, the module's error names the processes and exports that use the path."""
        # `systemctl stop` is not used: it would first stop the services that use the mount, such as runs.
        code, _ = self.run("umount", path, check=False)
        if code or self.at(path):
            used_by = ", ".join(filter(None, (processes_below(path), exports_below(path))))
            self.fail("%s cannot be unmounted; used by %s: end that and run again" % (path, used_by or "something"))

    def write_unit(self, mount: Mount, uuid: str) -> None:
        """Write, load and enable the mount unit."""
        name = unit_name(mount["path"])
        path, text = os.path.join(UNITS, name), unit_text(mount, uuid)
        self.load(name, written=self.write(path, text, name))
        if os.path.realpath(os.path.join(WANTS, name)) != path and self.act("enable %s" % name):
            self.run("systemctl", "enable", "--quiet", name)

    def ownership(self, mount: Mount) -> None:
        """Set owner, group and mode of the root of the file system."""
        path = mount["path"]
        try:
            # If others than root can write to a parent directory, they could put a link there and get ownership of its
            # target.
            root, missing = open_directory(path)
        except Refused as exc:
            self.fail("%s: %s" % (path, exc))
        found = os.fstat(root)
        # An id is -1 only in check mode, which creates no accounts.
        owner = number(mount["owner"], pwd.getpwnam) if mount["owner"] else found.st_uid
        group = number(mount["group"], grp.getgrnam) if mount["group"] else found.st_gid
        who = mount["owner"] or found.st_uid, mount["group"] or found.st_gid
        mode = int(mount["mode"], 8) if mount["mode"] else stat.S_IMODE(found.st_mode)
        try:
            if not missing:
                give(root, path, who=who, ids=(owner, group), mode=mode, act=self.act)
        except OSError as exc:
            self.fail(
                "%s: owner, group and mode cannot be set: %s; after an error the kernel lets a file system only be"
                " read: see `sudo dmesg`" % (path, exc.strerror)
            )
        finally:
            os.close(root)

    def absent(self, mount: Mount) -> None:
        """Unmount the disk of an entry with state absent, and remove its mount unit and mount point."""
        path, name = mount["path"], unit_name(mount["path"])
        unit, there = os.path.join(UNITS, name), self.at(mount["path"])
        if there is not None and self.act("unmount %s" % path):
            self.unmount(path)
        if os.path.lexists(unit):
            if not self.module.check_mode:
                self.run("systemctl", "disable", "--quiet", name)
            self.remove(unit, name)
            self.load(written=True)
        # In check mode the disk is still mounted and hides the directory.
        if os.path.isdir(path) and self.at(path) is None and not os.listdir(path) and self.act("remove %s" % path):
            os.rmdir(path)

    def check_absent(self, mount: Mount) -> None:
        """Check that what is mounted at the path of an entry with state absent may be unmounted.

        Raises:
            Refusal: Another disk is mounted there, or something other than a disk.
        """
        there = self.at(mount["path"])
        if there is None:
            return
        if there.number.startswith("0:"):
            raise Refusal(
                "what is mounted at this path is not a disk but %s; remove the entry from the list" % there.fstype
            )
        named = mount["device"] or mount["uuid"] or mount["label"]
        # The named disk is not looked up if the mount unit belongs to this role: the disk may have been detached
        # already.
        ours = os.path.exists(os.path.join(UNITS, unit_name(mount["path"])))
        if named and not ours and device_number(resolve(mount)) != there.number:
            raise Refusal("another disk (device %s) is mounted at this path; name that disk" % there.number)

    def unlisted(self, listed: list[str]) -> list[str]:
        """Return the files of mount units that this role wrote for paths which are not listed any more."""
        names = {unit_name(path) for path in listed}
        paths = sorted(glob.glob(UNITS + "/*.mount"))
        return [path for path in paths if os.path.basename(path) not in names and read(path).startswith(HEADER)]


def main() -> None:
    """Run the module."""
    text = {"type": "str", "default": ""}
    suboptions: dict[str, dict[str, Any]] = dict.fromkeys(("device", "uuid", "label", "owner", "group", "mode"), text)
    suboptions.update(
        path={"type": "path", "required": True},
        fstype={"type": "str", "required": True, "choices": sorted(MKFS)},
        format={"type": "bool", "default": False},
        read_only={"type": "bool", "default": False},
        options={"type": "list", "elements": "str", "default": []},
        state={"type": "str", "choices": ["mounted", "absent"], "default": "mounted"},
    )
    module = AnsibleModule(
        argument_spec={"mounts": {"type": "list", "elements": "dict", "required": True, "options": suboptions}},
        supports_check_mode=True,
    )
    take_turn(module, "data disks")
    work, mounts = DataDisks(module), module.params["mounts"]
    # Disks are unmounted first: an entry may use the path or the disk of an entry with state absent.
    leaving = [mount for mount in mounts if mount["state"] == "absent"]
    coming = [mount for mount in mounts if mount["state"] == "mounted"]
    refusals: list[str] = []
    taken: dict[str, str] = {}
    for mount in leaving + coming:
        path = mount["path"]
        try:
            check_unit(path)
            if mount["state"] == "absent":
                work.check_absent(mount)
                continue
            disk = work.check(mount, [each["path"] for each in leaving])
            if disk.number in taken:
                way = "remove one of the two entries, or name another disk"
                raise Refusal(  # noqa: TRY301
                    "%s is also listed for %s; %s" % (disk.path, taken[disk.number], way)
                )
            taken[disk.number] = path
        except Refusal as exc:
            refusals.append("%s: %s" % (path, exc))
    if refusals:
        module.fail_json(msg="nothing was changed here; disks_mounts: %s" % "; ".join(refusals), actions=[])
    for mount in leaving:
        work.absent(mount)
    for mount in coming:
        work.mounted(mount)
    for unit in work.unlisted([mount["path"] for mount in mounts]):
        module.warn("%s is no longer in disks_mounts but stays; list it with state absent to unmount it" % unit)
    work.end()


if __name__ == "__main__":
    main()
