"""The lab's data disks without containers: which files and loop devices are whose, and what a worker makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_ops.lab import disks
from tpu_ops.lab.backend import DataDisk, WorkerSpec, disk_resource
from tpu_ops.lab.disks import DiskError, Loop
from tpu_ops.lab.image import data_disks

NAME = "projects/lab/zones/us-central2-b/disks/data"


@pytest.mark.parametrize("source", [NAME, f"https://compute.example/compute/v1/{NAME}"])
def test_a_disk_is_the_same_as_name_and_as_url(source: str) -> None:
    assert disk_resource(source) == NAME
    assert disks.file_name(source) == disks.file_name(NAME)


def test_files_of_disks_are_told_apart_and_stay_in_their_directory() -> None:
    sources = [
        NAME,
        NAME.replace("us-central2-b", "europe-west4-a"),
        "d",
        "../../etc/passwd",
        "disks/$(id)",
        "/",
        "x" * 999,
    ]
    names = [disks.file_name(source) for source in sources]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) < 80 and name.endswith(".img") for name in names)


def loop(sysfs: Path, number: int, file: str, *, read_only: bool = False, leaving: bool = False) -> None:
    folder = sysfs / f"loop{number}"
    (folder / "loop").mkdir(parents=True)
    (folder / "loop" / "backing_file").write_text(f"{file}\n")
    (folder / "loop" / "autoclear").write_text(f"{leaving:d}\n")
    (folder / "ro").write_text(f"{read_only:d}\n")
    (folder / "dev").write_text(f"7:{number}\n")


def test_only_loop_devices_with_a_file_in_the_labs_directory_are_the_labs(tmp_path: Path) -> None:
    sysfs, real = tmp_path / "sys", tmp_path / "state" / "disks"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    loop(sysfs, 0, "/var/lib/somebody/disk.img")
    loop(sysfs, 1, f"{real}/a.img", read_only=True)
    loop(sysfs, 2, f"{real}-2/a.img")
    loop(sysfs, 3, f"{real}/b.img (deleted)", leaving=True)
    loop(sysfs, 4, f"{real}/deeper/c.img")
    (sysfs / "loop5").mkdir()  # attached to nothing
    found = [
        Loop("/dev/loop1", "7:1", real / "a.img", read_only=True, leaving=False),
        Loop("/dev/loop3", "7:3", real / "b.img", read_only=False, leaving=True),
    ]
    assert disks.loops(real, sysfs) == disks.loops(tmp_path / "link", sysfs) == found


def worker(*attached: DataDisk) -> WorkerSpec:
    return WorkerSpec(
        project="lab",
        zone="us-central2-b",
        node="pod",
        node_id="1",
        index=0,
        peers=("10.0.0.9",),
        external_ip="",
        runtime_version="tpu-ubuntu2204-base",
        accelerator_type="v4-8",
        chip_devices=(),
        disks=attached,
    )


class Machine:
    """Loop devices that only this test has."""

    def __init__(self, sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sysfs, self.calls = sysfs, 0
        monkeypatch.setattr(disks, "SYSFS", sysfs)
        monkeypatch.setattr(disks.loops, "__defaults__", (sysfs,))
        monkeypatch.setattr(disks, "_losetup", self.losetup)

    def losetup(self, *args: str, what: str) -> None:
        assert what
        self.calls += 1
        if args[0] == "--find":
            loop(self.sysfs, self.calls, args[-1], read_only="--read-only" in args)
        else:
            (self.sysfs / Path(args[-1]).name / "loop" / "backing_file").unlink()

    def attached(self, folder: Path) -> dict[str, bool]:
        return {each.file.name: each.read_only for each in disks.loops(folder)}


async def test_a_disk_is_attached_once_and_goes_with_its_last_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, held = Machine(tmp_path / "sys", monkeypatch), disks.Attachments(tmp_path / "disks")
    shared, own = DataDisk(NAME, 1, read_only=True), DataDisk("own", 2, read_only=False)
    await held.attach({"a": worker(shared), "b": worker(shared, own)})
    await held.attach({"a": worker(shared), "b": worker(shared, own)})
    both = {disks.file_name(NAME): True, disks.file_name("own"): False}
    assert (machine.attached(tmp_path / "disks"), machine.calls) == (both, 2)
    told = held.devices(worker(shared, own))
    assert [(each["number"], str(each["file"]).endswith(".img")) for each in told] == [(1, True), (2, True)]
    file = tmp_path / "disks" / disks.file_name("own")
    assert (file.stat().st_size, file.stat().st_blocks) == (disks.SIZE, 0)

    await held.attach({"b": worker(own)})
    await held.release()
    assert machine.attached(tmp_path / "disks") == both
    await held.release(["a"])
    assert machine.attached(tmp_path / "disks") == {disks.file_name("own"): False}
    # A new process knows all workers before it lets anything go.
    anew = disks.Attachments(tmp_path / "disks")
    anew.count({"b": worker(own)})
    await anew.release()
    assert machine.attached(tmp_path / "disks") == {disks.file_name("own"): False}
    await anew.release(["b"])
    assert machine.attached(tmp_path / "disks") == {}
    assert file.exists()


async def test_a_disk_that_a_worker_still_mounts_is_not_attached_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(tmp_path / "sys", monkeypatch)
    (tmp_path / "disks").mkdir()
    loop(tmp_path / "sys", 9, str(tmp_path / "disks" / disks.file_name(NAME)), leaving=True)
    with pytest.raises(DiskError, match=f"data disk {NAME}: a worker still has the disk mounted"):
        await disks.Attachments(tmp_path / "disks").attach({"a": worker(DataDisk(NAME, 1, read_only=True))})


def test_a_machine_that_lets_nobody_attach_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake = tmp_path / "losetup"
    fake.write_text("#!/bin/sh\necho 'losetup: cannot find an unused loop device' >&2; exit 1\n")
    fake.chmod(0o755)
    (tmp_path / "sudo").write_text('#!/bin/sh\nshift; exec "$@"\n')
    (tmp_path / "sudo").chmod(0o755)
    with pytest.raises(DiskError, match=r"data disk d: losetup failed: .*unused loop device .*passwordless sudo"):
        disks.attach(tmp_path / "disks", DataDisk("d", 1, read_only=False))


def test_links_are_those_of_a_tpu_vm() -> None:
    found = {"sdb": (1, {"by-uuid": "1234-ab", "by-label": "my\\x20data"}), "sdd": (3, {})}
    assert data_disks.wanted_links(found) == {
        "by-id/google-persistent-disk-1": "sdb",
        "by-id/scsi-0Google_PersistentDisk_persistent-disk-1": "sdb",
        "by-uuid/1234-ab": "sdb",
        "by-label/my\\x20data": "sdb",
        "by-id/google-persistent-disk-3": "sdd",
        "by-id/scsi-0Google_PersistentDisk_persistent-disk-3": "sdd",
    }


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", {}),
        ("ID_FS_UUID=a\nID_FS_UUID_ENC=a\nID_FS_TYPE=ext4\n", {"by-uuid": "a"}),
        ("ID_FS_UUID_ENC=a\nID_FS_LABEL_ENC=my\\x20data=1\n", {"by-uuid": "a", "by-label": "my\\x20data=1"}),
        ("ID_FS_LABEL_ENC=\nID_FS_UUID_ENC=../../x\n", {}),
    ],
)
def test_names_of_a_file_system(text: str, names: dict[str, str]) -> None:
    assert data_disks.parse_blkid(text) == names


def test_links_follow_the_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_disks, "DEV", tmp_path)
    data_disks.set_links({"by-id/one": "sdb", "by-uuid/u": "sdb"})
    (tmp_path / "disk" / "by-id" / "one").unlink()
    (tmp_path / "disk" / "by-uuid" / "stale").symlink_to("../../sdz")
    data_disks.set_links({"by-id/one": "sdc"})
    found = {path.name: str(path.readlink()) for path in (tmp_path / "disk").glob("*/*")}
    assert found == {"one": "../../sdc"}
    data_disks.set_links({})
    assert list((tmp_path / "disk").glob("*/*")) == []


def test_a_loop_device_that_is_somebody_elses_by_now_gets_no_device_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_disks, "DEV", tmp_path / "dev")
    monkeypatch.setattr(data_disks, "SYSFS", tmp_path / "sys")
    (tmp_path / "dev").mkdir()
    (tmp_path / "sys" / "7:4" / "loop").mkdir(parents=True)
    (tmp_path / "sys" / "7:4" / "loop" / "backing_file").write_text("/somebody/else.img\n")
    fault = data_disks.DataDisks().sync([{"number": 1, "device": "7:4", "file": "/lab/d.img"}])
    assert fault == "sdb: loop device 7:4 is not the lab's"
    assert list((tmp_path / "dev").glob("*")) == []
