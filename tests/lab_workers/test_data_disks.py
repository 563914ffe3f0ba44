"""Data disks in real workers: what they see of them, and that no loop device is left on this machine."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.lab_workers.test_boot import make_pod, until
from tpu_ops.lab import containers, disks, removal, shared
from tpu_ops.lab.backend import BackendError, DataDisk, WorkerSpec
from tpu_ops.lab.workers import ContainerBackend

pytestmark = [pytest.mark.lab, pytest.mark.asyncio(loop_scope="module")]

BY_ID = "/dev/disk/by-id/google-persistent-disk-"
SCRATCH = DataDisk("projects/lab/zones/us-central2-b/disks/scratch", 1, read_only=False)
SHARED = DataDisk("projects/lab/zones/us-central2-b/disks/shared", 1, read_only=True)


@dataclass
class Lab:
    """A node of one worker and a pod of two."""

    backend: ContainerBackend
    one: WorkerSpec
    pod: list[WorkerSpec]

    def run(self, worker: WorkerSpec, script: str) -> str:
        """Run a script as root in a worker; its output, whatever its exit code, both in one text."""
        name = containers.container_name(self.backend.instance, worker)
        done = self.backend.engine.call("exec", name, "sh", "-c", f"exec 2>&1; {script}", check=False)
        return done.stdout.strip()

    def loops(self) -> list[tuple[str, bool]]:
        """Return name of file and mode of this lab's loop devices."""
        found = disks.loops(disks.directory(self.backend.instance))
        return [(re.sub("-[0-9a-f]{12}", "", loop.file.stem), loop.read_only) for loop in found]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory of this module's own."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_OPS_STATE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _this_state(state: Path, _no_real_service: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_OPS_STATE", str(state))


@pytest.fixture(scope="module")
def _foreign(state: Path) -> Iterator[None]:
    """A loop device that is not the lab's, and is there before and after all it does."""
    file = state / "foreign.img"
    with file.open("wb") as stream:
        stream.truncate(1 << 20)
    losetup = [*([] if os.geteuid() == 0 else ["sudo", "-n"]), "losetup"]
    attached = subprocess.run([*losetup, "--find", "--show", file], check=True, capture_output=True, text=True)
    device = attached.stdout.strip()
    try:
        yield
        assert Path(f"/sys/block/{Path(device).name}/loop/backing_file").read_text().strip() == str(file)
    finally:
        subprocess.run([*losetup, "--detach", device], check=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(state: Path, _foreign: None) -> AsyncIterator[Lab]:
    """Both nodes, booted with their disks."""
    instance = f"d{os.getpid()}"
    backend = ContainerBackend(instance)
    try:
        (one,) = make_pod(backend, "", 1, node_id="1")
        pod = make_pod(backend, "", 2, node_id="2", first=20)
        made = Lab(backend, replace(one, disks=(SCRATCH,)), [replace(each, disks=(SHARED,)) for each in pod])
        await backend.boot([made.one, *made.pod])
        yield made
    finally:
        await asyncio.to_thread(removal.teardown, instance)
        assert await asyncio.to_thread(removal.leftovers, instance) == []


async def test_each_worker_sees_its_own_disks_only(lab: Lab) -> None:
    command = "ls /dev/sd* /dev/loop* 2>/dev/null; readlink -f /dev/disk/by-id/*; blockdev --getro --getsize64 /dev/sdb"
    for worker, mode in [(lab.one, 0), *((each, 1) for each in lab.pod)]:
        assert lab.run(worker, command).split() == ["/dev/sdb"] * 3 + [str(mode), str(disks.SIZE)]
    # Shared disks share one device: file systems that refuse a second one with their identity can be mounted by all.
    assert sorted(lab.loops()) == [("scratch", False), ("shared", True)]
    assert "error writing" in lab.run(lab.pod[0], "dd if=/dev/zero of=/dev/sdb bs=4096 count=1 conv=fsync")


async def test_a_file_system_made_on_a_disk_is_found_by_uuid_and_label_and_survives_everything(lab: Lab) -> None:
    made = lab.run(
        lab.one,
        "mkfs.ext4 -q -m 0 -L data /dev/sdb; mkdir -p /mnt/d; u=$(blkid -p -o value -s UUID /dev/sdb); "
        "for i in $(seq 100); do test -e /dev/disk/by-uuid/$u && break; sleep 0.1; done; "
        "mount /dev/disk/by-label/data /mnt/d && echo kept >/mnt/d/file; echo $u",
    )
    status = lab.backend.directory(lab.one) / "status.json"
    before = containers.parse_status(shared.read(status)).boot_id
    lab.run(lab.one, "systemctl reboot")
    await until(lambda: (now := containers.parse_status(shared.read(status))).ready and now.boot_id != before)
    read = f"mount /dev/disk/by-uuid/{made} /mnt/d; cat /mnt/d/file"
    assert lab.run(lab.one, read) == "kept"
    await lab.backend.halt([lab.one])
    assert ("scratch", False) in lab.loops()
    await lab.backend.boot([lab.one])
    assert lab.run(lab.one, read) == "kept"
    # A killed API: the next one is told of all workers and asked to boot them.
    anew = ContainerBackend(lab.backend.instance)
    await anew.prune([lab.one, *lab.pod])
    await anew.boot([lab.one])
    assert lab.run(lab.one, "cat /mnt/d/file; ls /dev/sd*").split() == ["kept", "/dev/sdb"]
    lab.backend = anew


async def test_disks_come_and_go_while_a_worker_runs(lab: Lab) -> None:
    more = DataDisk("more", 2, read_only=False)
    await lab.backend.publish([replace(lab.one, disks=(SCRATCH, more))])
    assert lab.run(lab.one, f"readlink -f {BY_ID}1 {BY_ID}2; blockdev --getsize64 {BY_ID}2").split() == [
        *("/dev/sdb", "/dev/sdc"),
        str(disks.SIZE),
    ]
    # One that leaves while it is mounted goes with the mount; until then nobody gets it a second time.
    lab.run(lab.one, f"mkfs.ext4 -q {BY_ID}2; mkdir -p /mnt/more; mount /dev/sdc /mnt/more")
    await lab.backend.publish([lab.one])
    assert lab.run(lab.one, "ls /dev/sd* /dev/disk/by-id").split() == [
        *("/dev/sdb", "/dev/disk/by-id:", "google-persistent-disk-1", "scsi-0Google_PersistentDisk_persistent-disk-1"),
    ]
    with pytest.raises(BackendError, match="data disk more: a worker still has the disk mounted"):
        await lab.backend.publish([replace(lab.one, disks=(SCRATCH, more))])
    lab.run(lab.one, "umount /mnt/more")
    await until(lambda: ("more", False) not in lab.loops())
    await lab.backend.publish([replace(lab.one, disks=(SCRATCH, more))])
    assert lab.run(lab.one, "mount /dev/sdc /mnt/more && echo mounted; umount /mnt/more") == "mounted"
    await lab.backend.publish([lab.one])
    assert sorted(lab.loops()) == [("scratch", False), ("shared", True)]


async def test_data_that_one_node_wrote_is_read_by_workers_of_another(lab: Lab) -> None:
    writable = replace(SHARED, number=2, read_only=False)
    for worker in lab.pod:
        await lab.backend.publish([replace(worker, disks=())])
    await lab.backend.publish([replace(lab.one, disks=(SCRATCH, writable))])
    script = "mkfs.ext4 -q /dev/sdc; mkdir -p /mnt/s; mount /dev/sdc /mnt/s; echo data >/mnt/s/set; umount /mnt/s"
    assert lab.run(lab.one, script) == ""
    await lab.backend.publish([lab.one])
    await lab.backend.publish(lab.pod)
    for worker in lab.pod:
        assert lab.run(worker, "mkdir -p /mnt/s; mount -o ro,noload /dev/sdb /mnt/s; cat /mnt/s/set") == "data"


async def test_a_node_that_is_deleted_takes_its_devices_along_and_leaves_the_disks_of_others(lab: Lab) -> None:
    lab.run(lab.one, "mount /dev/sdb /mnt/d")
    await lab.backend.remove([lab.one])
    await until(lambda: lab.loops() == [("shared", True)])
    # Disks outlive nodes, as real ones do; only the lab's own end removes them.
    kept = {re.sub("-[0-9a-f]{12}", "", path.stem) for path in disks.directory(lab.backend.instance).iterdir()}
    assert kept == {"scratch", "shared", "more"}
