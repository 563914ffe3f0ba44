"""Data disks of the lab: sparse files in the lab's directory, attached to loop devices of this machine.

Loop devices belong to the whole machine. The lab's own are those whose file is in its directory. No other state is
kept, so that the devices of a killed process are found again. A file has at most one loop device, which all workers
with the disk share.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu_ops.errors import OpsError
from tpu_ops.files import state_root
from tpu_ops.lab.backend import DataDisk, WorkerSpec, disk_resource

#: Size of every disk in bytes, the minimum of Compute Engine's persistent disks. The files are sparse.
SIZE = 10 * 2**30
SYSFS = Path("/sys/block")
#: Seconds that a device may stay in use after its last worker was removed.
RELEASE_TIMEOUT = 10.0
_DELETED = " (deleted)"


class DiskError(OpsError):
    """A data disk cannot be attached to workers or detached from them."""


@dataclass(frozen=True)
class Loop:
    """A loop device of the lab.

    Attributes:
        path: For example ``/dev/loop0``.
        number: Major and minor number, ``7:0``.
        file: The disk's file, as the kernel knows it.
        read_only: Whether the device is read-only.
        leaving: Whether it was detached while in use; the kernel removes it when it is closed.
    """

    path: str
    number: str
    file: Path
    read_only: bool
    leaving: bool


class Attachments:
    """The disks of one lab's workers, attached to loop devices.

    Args:
        folder: The result of `directory`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, frozenset[str]] = {}
        self._changing = asyncio.Lock()

    def count(self, workers: Mapping[str, WorkerSpec]) -> None:
        """Record the disks that these workers, by the names of their containers, have from now on."""
        self._files |= {name: frozenset(file_name(d.source) for d in each.disks) for name, each in workers.items()}

    async def attach(self, workers: Mapping[str, WorkerSpec]) -> None:
        """Attach these workers' disks to loop devices.

        Raises:
            DiskError: A disk cannot be attached.
        """
        async with self._changing:
            self.count(workers)
            for disk in dict.fromkeys(disk for worker in workers.values() for disk in worker.disks):
                await asyncio.to_thread(attach, self._folder, disk)

    async def release(self, gone: Iterable[str] = ()) -> None:
        """Detach the disks that no worker uses any more, after these workers were removed.

        Raises:
            DiskError: A disk cannot be detached.
        """
        async with self._changing:
            for name in gone:
                self._files.pop(name, None)
            await asyncio.to_thread(keep, self._folder, frozenset[str]().union(*self._files.values()))

    def devices(self, worker: WorkerSpec) -> list[dict[str, object]]:
        """Return the attached disks for a worker's guest agent, which makes device nodes and links for them."""
        attached = {loop.file.name: loop for loop in (loops(self._folder) if worker.disks else ()) if not loop.leaving}
        return [
            {"number": disk.number, "device": loop.number, "file": str(loop.file)}
            for disk in worker.disks
            if (loop := attached.get(file_name(disk.source)))
        ]


def directory(instance: str) -> Path:
    """Return the directory of a lab's disks."""
    return state_root() / "lab" / instance / "disks"


def file_name(source: str) -> str:
    """Return the name of a disk's file; a client may give any text as the disk's name."""
    resource = disk_resource(source)
    readable = re.sub(r"[^a-z0-9]+", "-", resource.rsplit("/", 1)[-1].lower())[:40]
    return f"{readable}-{hashlib.sha256(resource.encode()).hexdigest()[:12]}.img"


def loops(folder: Path, sysfs: Path = SYSFS) -> list[Loop]:
    """Return the loop devices whose files are in a directory, even if the files were deleted."""
    real = Path(os.path.realpath(folder))
    found = []
    for entry in sorted(sysfs.glob("loop*")):
        try:
            file = Path((entry / "loop" / "backing_file").read_text().rstrip("\n").removesuffix(_DELETED))
            if file.parent != real:
                continue
            number, read_only = (entry / "dev").read_text().strip(), (entry / "ro").read_text().strip() == "1"
            leaving = (entry / "loop" / "autoclear").read_text().strip() == "1"
        except OSError:  # not attached, or detached meanwhile
            continue
        found.append(Loop(f"/dev/{entry.name}", number, file, read_only, leaving))
    return found


def attach(folder: Path, disk: DataDisk) -> None:
    """Create a disk's file and attach it to a loop device, unless this is already done.

    Raises:
        DiskError: The disk cannot be attached; the text names the disk and the reason.
    """
    name = file_name(disk.source)
    present = [loop for loop in loops(folder) if loop.file.name == name]
    for loop in present:
        if not loop.leaving and loop.read_only != disk.read_only:
            detach(loop)
    present = [loop for loop in loops(folder) if loop.file.name == name]
    if any(loop.leaving for loop in present):
        raise DiskError(
            "a worker still has it mounted, although it was detached there",
            where=f"data disk {disk.source}",
            fix="unmount it on that worker, then attach it again",
        )
    if present:
        return
    file = Path(os.path.realpath(folder)) / name
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as stream:
            if os.fstat(stream.fileno()).st_size < SIZE:
                os.truncate(stream.fileno(), SIZE)
    except OSError as exc:
        raise DiskError(
            f"its file cannot be created: {exc.strerror or exc}",
            where=f"data disk {disk.source}, {file}",
            fix="free some space or make it writable, then try again",
        ) from exc
    _losetup("--find", *(["--read-only"] if disk.read_only else []), str(file), what=f"data disk {disk.source}")


def detach(loop: Loop) -> None:
    """Detach a loop device; if it is in use, the kernel removes it when it is closed.

    Raises:
        DiskError: The kernel or this machine's permissions do not allow it.
    """
    _losetup("--detach", loop.path, what=f"data disk {loop.file.name}")


def keep(folder: Path, names: Collection[str]) -> None:
    """Detach every loop device of the lab whose file has none of these names.

    Raises:
        DiskError: A device cannot be detached.
    """
    for loop in loops(folder):
        if loop.file.name not in names and not loop.leaving:
            detach(loop)


def remove_all(folder: Path) -> list[str]:
    """Detach all loop devices of a lab whose workers were removed, and remove its disks; return what was removed.

    Raises:
        DiskError: A device cannot be detached.
    """
    removed = [described(loop) for loop in loops(folder)]
    keep(folder, ())
    deadline = time.monotonic() + RELEASE_TIMEOUT
    while loops(folder) and time.monotonic() < deadline:
        time.sleep(0.05)  # polls until the kernel has removed the last one, or the deadline
    removed += [f"disk {path}" for path in sorted(folder.glob("*"))]
    shutil.rmtree(folder, ignore_errors=True)
    return removed


def described(loop: Loop) -> str:
    """Return a description of a loop device for users."""
    return f"loop device {loop.path} of {loop.file}"


def _losetup(*args: str, what: str) -> None:
    command = [*([] if os.geteuid() == 0 else ["sudo", "-n"]), "losetup", *args]
    environment = os.environ | {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False, env=environment
        )
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as exc:
        done, said = None, str(exc)
    if done is None or done.returncode:
        raise DiskError(
            f"losetup failed: {said.splitlines()[-1]}",
            where=what,
            fix="loop devices need a kernel that has them, and root or passwordless sudo",
        )
