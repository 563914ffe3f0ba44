"""Data disks inside a worker: their device nodes, and the links that udev makes on a TPU VM (there is no udev here).

Runs with the worker's system Python (3.8 or newer), standard library only. It runs once before systemd starts, so that
units can mount the disks, and then within the guest agent.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

METADATA = Path("/var/lib/tpu-lab/worker/metadata.json")
DEV = Path("/dev")
SYSFS = Path("/sys/dev/block")
LOOP_MAJOR = 7
LINKS = ("by-id", "by-uuid", "by-label")
#: Keys in the output of `blkid -o udev` whose values are safe as file names.
NAMES = {"ID_FS_UUID_ENC": "by-uuid", "ID_FS_LABEL_ENC": "by-label"}


def node_name(number: int) -> str:
    """Return the device name of a disk; sda would be the boot disk."""
    return f"sd{chr(ord('a') + number)}"


def parse_blkid(text: str) -> dict[str, str]:
    """Return a file system's UUID and label by their directories of LINKS, from the output of ``blkid -o udev``."""
    pairs = (line.partition("=") for line in text.splitlines())
    found = {NAMES[key]: value for key, _, value in pairs if key in NAMES}
    return {kind: name for kind, name in found.items() if name and "/" not in name}


def wanted_links(disks: dict[str, tuple[int, dict[str, str]]]) -> dict[str, str]:
    """Return link below /dev/disk -> device file, from the number and file system names of each device file."""
    links = {}
    for device, (number, names) in disks.items():
        links[f"by-id/google-persistent-disk-{number}"] = device
        links[f"by-id/scsi-0Google_PersistentDisk_persistent-disk-{number}"] = device
        links.update({f"{kind}/{name}": device for kind, name in names.items()})
    return links


class DataDisks:
    """The data disks of this worker."""

    def __init__(self) -> None:
        self._probed: dict[str, tuple[str, dict[str, str]]] = {}
        self._any = True

    def sync(self, disks: list[dict[str, Any]]) -> str:
        """Create the devices and links of these disks and remove all others; return the errors, or the empty string."""
        if not disks and not self._any:
            return ""
        faults, found = [], {}
        for disk in disks:
            name = node_name(disk["number"])
            # The loop device may belong to another program after this worker was down.
            if backing_file(disk["device"]) != disk["file"]:
                faults.append(f"{name}: loop device {disk['device']} is not the lab's")
                continue
            try:
                make_node(DEV / name, disk["device"])
            except OSError as exc:
                faults.append(f"{name}: {exc}")
                continue
            found[name] = (disk["number"], self._names(name, disk["device"]))
        for path in DEV.glob("sd?"):
            if path.name not in found and is_loop(path):
                path.unlink()
        self._probed = {name: probed for name, probed in self._probed.items() if name in found}
        try:
            set_links(wanted_links(found))
        except OSError as exc:
            faults.append(f"links: {exc}")
        self._any = bool(disks)
        return "; ".join(faults)

    def _names(self, name: str, device: str) -> dict[str, str]:
        """Return a file system's names; read again whenever the device was written to."""
        try:
            writes = (SYSFS / device / "stat").read_text().split()[4]
        except (OSError, IndexError):
            writes = ""
        if name not in self._probed or self._probed[name][0] != f"{device} {writes}":
            command = ["blkid", "-p", "-o", "udev", str(DEV / name)]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            self._probed[name] = (f"{device} {writes}", parse_blkid(done.stdout))
        return self._probed[name][1]


def backing_file(device: str) -> str:
    """Return the file of a loop device; empty if there is none."""
    try:
        return (SYSFS / device / "loop" / "backing_file").read_text().rstrip("\n")
    except OSError:
        return ""


def is_loop(path: Path) -> bool:
    """Return whether a path is the device file of a loop device."""
    found = path.lstat()
    return stat.S_ISBLK(found.st_mode) and os.major(found.st_rdev) == LOOP_MAJOR


def make_node(path: Path, device: str) -> None:
    """Create a device file if it does not exist.

    Raises:
        OSError: The kernel does not allow it.
    """
    number = os.makedev(*map(int, device.split(":")))
    if path.exists() and path.lstat().st_rdev != number:
        path.unlink()
    if not path.exists():
        os.mknod(str(path), 0o660 | stat.S_IFBLK, number)
        path.chmod(0o660)  # independent of the umask


def set_links(wanted: dict[str, str]) -> None:
    """Create these links of data disks and remove all others."""
    for kind in LINKS:
        folder = DEV / "disk" / kind
        if wanted:
            folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*") if folder.is_dir() else ():
            if f"{kind}/{path.name}" not in wanted:
                path.unlink()
    for link, device in wanted.items():
        path, target = DEV / "disk" / link, f"../../{device}"
        if not path.is_symlink() or os.readlink(str(path)) != target:  # noqa: PTH115 - Python 3.9's
            if os.path.lexists(str(path)):
                path.unlink()
            path.symlink_to(target)


def main() -> None:
    """Create devices and links from the metadata once; the guest agent reports errors later."""
    DataDisks().sync(json.loads(METADATA.read_text()).get("disks", []))


if __name__ == "__main__":
    main()
