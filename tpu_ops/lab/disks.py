"""Data disks of the lab: sparse files in the lab's directory, attached to loop devices of this machine.

Loop devices belong to the whole machine; the lab's loop devices are those whose file is in the lab's directory. The
devices are not recorded elsewhere, so that a new process also finds the devices of a killed process. A file has at most
one loop device, which all workers with this disk share.
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
#: Maximum number of seconds to wait until loop devices of removed workers are no longer in use.
RELEASE_TIMEOUT = 10.0
_DELETED = " (deleted)"


class DiskError(OpsError):
    """A data disk cannot be attached to workers or detached from them."""


@dataclass(frozen=True)
class Loop:
    """A loop device of the lab.

    Attributes:
        path: The device file, for example ``/dev/loop0``.
        number: Major and minor number, for example ``7:0``.
        file: The disk's file, as the kernel reports it.
        read_only: Whether the device is read-only.
        leaving: Whether the device was detached while in use; the kernel removes it when its last user closes it.
    """

    path: str
    number: str
    file: Path
    read_only: bool
    leaving: bool


class Attachments:
    """Attaches the data disks of one lab's workers to loop devices, and detaches unused disks.

    Args:
        folder: The directory of the lab's disks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, frozenset[str]] = {}
        self._changing = asyncio.Lock()

    def count(self, workers: Mapping[str, WorkerSpec]) -> None:
        """Record which disks these workers use from now on.

        Args:
            workers: Name of the container -> worker.
        """
        self._files |= {name: frozenset(file_name(d.source) for d in each.disks) for name, each in workers.items()}

    async def attach(self, workers: Mapping[str, WorkerSpec]) -> None:
        """Record which disks these workers use from now on, and attach the disks to loop devices.

        Raises:
            DiskError: A disk cannot be attached.
        """
        async with self._changing:
            self.count(workers)
            for disk in dict.fromkeys(disk for worker in workers.values() for disk in worker.disks):
                await asyncio.to_thread(attach, self._folder, disk)

    async def release(self, gone: Iterable[str] = ()) -> None:
        """Detach the disks that no worker uses any more.

        Args:
            gone: Names of the containers of removed workers.

        Raises:
            DiskError: A disk cannot be detached.
        """
        async with self._changing:
            for name in gone:
                self._files.pop(name, None)
            await asyncio.to_thread(keep, self._folder, frozenset[str]().union(*self._files.values()))

    async def forget(self, source: str) -> None:
        """Remove the file of a disk that no worker uses; a disk of the same name that is made later is blank.

        Raises:
            DiskError: The file cannot be removed.
        """
        async with self._changing:
            try:
                (self._folder / file_name(source)).unlink(missing_ok=True)
            except OSError as exc:
                raise DiskError(
                    f"the disk's file cannot be removed: {exc.strerror or exc}",
                    where=f"data disk {source}, {self._folder}",
                    fix="make the directory writable, then try again",
                ) from exc

    def devices(self, worker: WorkerSpec) -> list[dict[str, object]]:
        """Return a worker's attached disks in the form that its guest agent reads."""
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
    """Return a safe file name for a disk, since a client can send any text as the disk's name."""
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
        except OSError:  # the loop device has no file, or has just been detached
            continue
        found.append(Loop(f"/dev/{entry.name}", number, file, read_only, leaving))
    return found


def attach(folder: Path, disk: DataDisk) -> None:
    """Create a disk's file and attach the file to a loop device, unless this was done before.

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
            "a worker still has the disk mounted, although the disk was detached from this worker",
            where=f"data disk {disk.source}",
            fix="unmount the disk on this worker, then attach the disk again",
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
            f"the disk's file cannot be created: {exc.strerror or exc}",
            where=f"data disk {disk.source}, {file}",
            fix="free some disk space or make the directory writable, then try again",
        ) from exc
    _losetup("--find", *(["--read-only"] if disk.read_only else []), str(file), what=f"data disk {disk.source}")


def detach(loop: Loop) -> None:
    """Detach a loop device; a device in use is removed by the kernel when its last user closes it.

    Raises:
        DiskError: The kernel or this machine's permissions do not allow it.
    """
    _losetup("--detach", loop.path, what=f"data disk {loop.file.name}")


def keep(folder: Path, names: Collection[str]) -> None:
    """Detach all loop devices of the lab, except the devices of the files with these names.

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
        time.sleep(0.05)  # polls until the kernel has removed the last device, or the deadline
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
            fix="use a kernel with loop devices, and root or passwordless sudo",
        )
