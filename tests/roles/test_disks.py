"""The role disks: faults in its list, and its changes of disks and mounts."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from roles.disks.filter_plugins import disks
from roles.disks.library import data_disks
from roles.disks.module_utils import disk_state
from roles.facts.module_utils import mount_points
from roles.facts.module_utils.mount_points import Mounted, Refusal, unit_name
from tests.roles.conftest import Run

DATA = {"device": "google-persistent-disk-1", "path": "/mnt/data"}


def faults(*mounts: dict[str, Any]) -> str:
    return "; ".join(disks.disks_faults(list(mounts), accounts=["root", "ada"], groups=["root", "tpu-run"]))


@pytest.mark.parametrize(
    "mount",
    [
        DATA,
        {
            **DATA,
            "format": True,
            "owner": "ada",
            "group": "tpu-run",
            "mode": "2775",
            "options": ["noatime", "commit=30"],
        },
        {**DATA, "owner": "4711", "mode": "755"},
        {"uuid": "0a1b2c3d-0000-4000-8000-000000000000", "path": "/data", "read_only": True},
        {"label": "my data", "path": "/home/shared", "fstype": "xfs"},
        {"device": "/dev/disk/by-id/nvme-nvme_card-pd_data", "path": "/srv/a.b/c_d-e"},
        {"path": "/mnt/old", "state": "absent"},
    ],
)
def test_entries_that_say_all_there_is_to_say(mount: dict[str, Any]) -> None:
    assert faults(mount) == ""


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"device": ""}, "no disk is named; give device, uuid or label"),
        ({"uuid": "1234-abcd"}, "device and uuid are given, and only one of them can name the disk"),
        ({"state": "absent", "label": "x"}, "device and label are given"),
        ({"device": "/dev/sdb"}, "/dev/sdb may be another disk after the next boot"),
        ({"device": "../../sda"}, "is not a name below /dev/disk/by-id"),
        ({"device": "a; rm -rf /"}, "is not a name below /dev/disk/by-id"),
        ({"device": "", "uuid": "$(id)"}, "uuid '$(id)' is not a UUID"),
        ({"device": "", "label": "../x"}, "label must not contain '/'"),
        ({"device": "", "label": "x", "format": True}, "format needs device"),
        ({"read_only": True, "format": True, "owner": "ada"}, "format cannot be given with read_only"),
        ({"read_only": True, "mode": "0755"}, "mode cannot be given with read_only"),
        ({"mode": "493"}, "mode '493' is not octal in quotes"),
        ({"mode": "u+w"}, "mode 'u+w' is not octal in quotes"),
        ({"owner": "eve"}, "there is no owner eve, and users_people does not add it"),
        ({"group": "nobody"}, "there is no group nobody"),
        ({"options": ["noatime,nosuid"]}, "'noatime,nosuid' is not a single option"),
        ({"options": ["x-systemd.automount\n"]}, "is not a single option"),
        *(({"options": [option]}, "is set by the role") for option in ("ro", "nofail", "discard", "noload", "user")),
        *(
            ({"path": path}, "or contains '//'")
            for path in ("mnt", "/mnt/a b", "/mnt/../etc", "/mnt/", "//mnt/a", "/mnt/%h")
        ),
        *(
            ({"path": path}, "is a directory of the system")
            for path in ("/", "/mnt", "/home", "/var/lib", "/etc/x", "/run/x", "/usr", "/usr/bin")
        ),
    ],
)
def test_entries_that_are_refused_before_anything_changes(change: dict[str, Any], fault: str) -> None:
    said = faults({**DATA, **change})
    assert said.startswith("disks_mounts[0]: ")
    assert fault in said


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({**DATA, "device": "b"}, "/mnt/data is listed twice"),
        (
            {"device": "b", "path": "/mnt/data/deeper"},
            "of the paths /mnt/data and /mnt/data/deeper, one is inside the other",
        ),
        (
            {**DATA, "path": "/mnt/other"},
            "device google-persistent-disk-1 is listed for both /mnt/data and /mnt/other",
        ),
        ({**DATA, "path": "/mnt/data2", "state": "absent"}, ""),
        ({"device": "b", "path": "/mnt/data2"}, ""),
    ],
)
def test_entries_that_do_not_go_together(other: dict[str, Any], fault: str) -> None:
    said = faults(DATA, other)
    assert fault in said
    assert bool(said) == bool(fault)


@pytest.mark.parametrize("mounts", ["/mnt/data", {"path": "/mnt/data"}, ["/mnt/data"]])
def test_mounts_that_are_not_a_list_of_mappings_are_refused(mounts: Any) -> None:
    assert disks.disks_faults(mounts, [], []) == [
        "disks_mounts: must be a list of mappings, each with path and other keys"
    ]


@pytest.mark.parametrize(
    ("mount", "trim", "options"),
    [
        (DATA, "discard", "rw,discard,nofail"),
        ({**DATA, "options": ["noatime"]}, "timer", "rw,nodiscard,nofail,noatime"),
        ({**DATA, "read_only": True}, "discard", "ro,noload,nofail"),
        ({**DATA, "read_only": True, "fstype": "xfs"}, "none", "ro,norecovery,nofail"),
    ],
)
def test_mount_options_say_what_a_remount_must_know(mount: dict[str, Any], trim: str, options: str) -> None:
    (complete,) = disks.disks_complete([mount], trim)
    assert ",".join(complete["options"]) == options


def test_only_file_systems_that_may_be_made_take_packages() -> None:
    mounts: list[dict[str, Any]] = [
        {**DATA, "format": True},
        {**DATA, "fstype": "xfs"},
        {**DATA, "fstype": "xfs", "format": True, "state": "absent"},
    ]
    assert disks.disks_packages(mounts) == ["e2fsprogs"]
    assert disks.disks_packages([{**DATA, "fstype": "xfs", "format": True}]) == ["xfsprogs"]


MOUNTED = Mounted("7:4", "/mnt/data", "rw,nosuid", "xfs", "/dev/sdc", "rw,discard")


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["rw", "discard", "nofail", "nosuid"], []),
        (["rw", "nodiscard", "nofail", "nosuid"], ["discard"]),
        (["ro", "discard", "nosuid", "noatime"], ["noatime", "ro"]),
    ],
)
def test_options_that_differ_are_seen(options: list[str], wrong: list[str]) -> None:
    assert disk_state.wrong_options({"options": options}, MOUNTED) == wrong


@pytest.mark.parametrize(
    ("options", "there", "wrong"),
    [
        (["rw", "discard"], "rw,discard,norecovery", ["norecovery"]),
        (["rw", "nodiscard"], "ro,norecovery", ["norecovery", "ro"]),
        (["ro", "noload"], "ro,norecovery", []),
        (["ro", "norecovery"], "ro,norecovery", []),
        (["ro", "noload"], "ro", []),
    ],
)
def test_a_journal_that_is_left_alone_is_seen_where_it_is_to_be_written(
    options: list[str], there: str, wrong: list[str]
) -> None:
    mounted = Mounted("7:4", "/mnt/data", there[:2], "ext4", "/dev/sdc", there)
    assert disk_state.wrong_options({"options": options}, mounted) == wrong


class Host:
    """A host with one disk: what is mounted, and the commands that were given. It remounts as the kernel does ext4."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, there: str) -> None:
        self.path, self.there, self.busy = str(folder / "data"), there, False
        self.commands: list[str] = []
        Path(self.path).mkdir()
        self.mount = {"device": "data", "path": self.path, "fstype": "ext4", "options": ["rw", "discard", "nofail"]}
        for module in (data_disks, disk_state):
            patch.setattr(module, "UNITS", str(folder))
        patch.setattr(data_disks, "WANTS", str(folder))
        patch.setattr(data_disks, "processes_below", lambda _: "python (7)" if self.busy else "")
        patch.setattr(data_disks, "used_by", lambda *_: "python (7)" if self.busy else "")
        disk = disk_state.Disk("/dev/sdb", "8:16", {"TYPE": "ext4", "UUID": "1"}, read_only=False)
        patch.setattr(data_disks.DataDisks, "disk", lambda *_: disk)
        patch.setattr(data_disks.DataDisks, "linked", lambda *_: "1")
        patch.setattr(data_disks.DataDisks, "mounts", lambda _: self.mounts())
        patch.setattr(data_disks.DataDisks, "run", lambda _, *command, **__: self.run(command))

    def mounts(self) -> list[Mounted]:
        options = self.there
        return [Mounted("8:16", self.path, options[:2], "ext4", "/dev/sdb", options)] if options else []

    def run(self, command: tuple[str, ...]) -> tuple[int, str]:
        if command[:2] == ("systemctl", "is-active"):
            return (0 if self.there else 3), ""
        if command[:2] == ("systemctl", "show"):
            return 0, "NeedDaemonReload=no\n"
        if command[0] == "systemctl" and command[1] not in ("start", "reload"):
            return 0, ""
        self.commands.append(" ".join(command[:2]))
        if command[0] == "umount":
            self.there = ""
        elif command[1] == "start":
            self.there = "rw,discard"
        else:
            self.there = "rw,discard" + (",norecovery" if "norecovery" in self.there else "")
        return 0, ""


@pytest.mark.parametrize(
    ("there", "reason"),
    [("ro,norecovery", "discard, norecovery, ro"), ("rw,discard,norecovery", "norecovery")],
)
def test_a_mount_without_its_journal_is_mounted_again_for_writing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, reason: str
) -> None:
    host = Host(tmp_path, monkeypatch, there)
    name = unit_name(host.path)
    actions = [f"write {name}", f"unmount {host.path} and mount it again ({reason})"]
    checked = run(data_disks, {"mounts": [host.mount]}, check=True)
    assert (checked["actions"], host.commands) == (actions, [])
    done = run(data_disks, {"mounts": [host.mount]})
    assert done["actions"] == actions
    assert host.commands == [f"umount {host.path}", "systemctl start"]
    assert ("check it (`e2fsck -fn /dev/sdb`)" in str(done.get("warnings"))) == there.startswith("rw")
    assert run(data_disks, {"mounts": [host.mount]})["actions"] == []


def test_a_file_system_that_can_only_be_read_after_an_error_is_told_of(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    host = Host(tmp_path, monkeypatch, "rw,discard")
    assert run(data_disks, {"mounts": [host.mount]})["changed"]
    monkeypatch.setattr(os, "fchmod", refuse)
    said = run(data_disks, {"mounts": [host.mount | {"mode": "2775"}]})["msg"]
    assert f"{host.path}: owner, group and mode cannot be set: Read-only file system; after an error" in said


def test_a_link_on_the_way_to_a_mount_gives_no_ownership_of_its_target(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path, monkeypatch, "rw,discard")
    assert run(data_disks, {"mounts": [host.mount | {"mode": "2775"}]})["changed"]
    assert stat.S_IMODE(Path(host.path).stat().st_mode) == 0o2775
    # After the mount was looked for, which is known by its path.
    shared, system = tmp_path / "shared", tmp_path / "system"
    shared.mkdir()
    shared.chmod(0o777)
    (system / "data").mkdir(parents=True, mode=0o755)
    (shared / "way").symlink_to(system)
    host.path = str(shared / "way" / "data")
    said = run(data_disks, {"mounts": [host.mount | {"path": host.path, "mode": "2775"}]})
    assert f"{host.path}: {shared}/way is a symbolic link in a place where others" in said["msg"]
    assert stat.S_IMODE((system / "data").stat().st_mode) == 0o755


def test_a_mount_in_use_is_not_mounted_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, monkeypatch, "ro,norecovery")
    host.busy = True
    for check in (True, False):
        said = run(data_disks, {"mounts": [host.mount]}, check=check)
        assert said["failed"]
        assert said["msg"].startswith("nothing was changed here; disks_mounts: ")
        assert "used by python (7): end that and run again" in said["msg"]
    assert host.commands == []


@pytest.mark.parametrize(
    ("line", "stays"),
    [
        ("36 35 8:16 / /data rw,relatime - ext4 /dev/sdb rw", True),
        ("36 35 8:16 / /data rw,relatime master:7 - ext4 /dev/sdb rw", False),
        ("36 35 8:16 / /data rw,relatime shared:7 - ext4 /dev/sdb rw", False),
        ("36 35 8:1 / /data rw,relatime - ext4 /dev/sda1 rw", False),
        # Anybody can mount something in a user namespace, at whatever path.
        ("36 35 0:50 / /home/bob/a\rb rw - tmpfs x rw\n36 35 8:16 / /data rw - ext4 /dev/sdb rw\n", True),
        ("", False),
    ],
)
def test_mounts_of_containers_that_outlive_the_hosts_are_known(line: str, stays: bool) -> None:
    assert disk_state.stays_mounted(line, "8:16") == stays


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Links as udev makes them, to files that pass for disks."""
    monkeypatch.setattr(disk_state, "DISKS", str(tmp_path / "disk"))
    monkeypatch.setattr("stat.S_ISBLK", lambda _mode: True)
    for link, target in {
        "by-id/google-persistent-disk-1": "sdb",
        "by-id/scsi-0Google_PersistentDisk_persistent-disk-1": "sdb",
        "by-id/google-data": "sdc",
        "by-id/google-data-part1": "sdc1",
        "by-id/nvme-card_AB12": "nvme0n1",
        "by-id/virtio-AB12": "vdb",
        "by-uuid/1234-abcd": "sdb",
        "by-uuid/ABCD-1234": "sdc",
        "by-label/my\\x20data": "sdc",
        "by-label/d\u00e4ta\u2013\\x5c1": "sdd",
        "by-label/BIG": "sdd",
        "by-id/google-gone": "gone",
    }.items():
        path = tmp_path / "disk" / link
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(tmp_path / target)
        if target != "gone":
            (tmp_path / target).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ({"device": "google-persistent-disk-1"}, "sdb"),
        ({"device": "persistent-disk-1"}, "sdb"),
        ({"device": "data"}, "sdc"),
        ({"device": "google-data-part1"}, "sdc1"),
        ({"device": "nvme-card_AB12"}, "nvme0n1"),
        ({"uuid": "1234-ABCD"}, "sdb"),
        ({"uuid": "abcd-1234"}, "sdc"),
        ({"label": "my data"}, "sdc"),
        ({"label": "d\u00e4ta\u2013\\1"}, "sdd"),
    ],
)
def test_disks_are_found_by_serial_uuid_and_label(devices: Path, named: dict[str, str], found: str) -> None:
    mount = {"device": "", "uuid": "", "label": "", **named}
    assert disk_state.resolve(mount) == str(devices / found)


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"device": "AB12"}, "nvme0n1 and .*vdb are all named AB12"),
        ({"device": "disk-1"}, "no disk named disk-1 is attached; data disks here: google-data, "),
        ({"device": "gone"}, "no disk named gone"),
        ({"uuid": "9999"}, "no disk with the uuid 9999"),
        ({"label": "data"}, "no disk with the label data"),
        ({"label": "big"}, "no disk with the label big"),
    ],
)
def test_disks_that_are_not_one_are_refused(devices: Path, named: dict[str, str], reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        disk_state.resolve({"device": "", "uuid": "", "label": "", **named})


def test_paths_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_state, "UNITS", str(tmp_path))
    monkeypatch.setattr(mount_points, "FSTAB", str(tmp_path / "fstab"))
    (tmp_path / "fstab").write_text("UUID=2 /mnt/b ext4 defaults 0 2\n")
    (tmp_path / "mnt-c.mount").write_text("[Mount]\n")
    (tmp_path / "mnt-d.mount").symlink_to("/dev/null")
    (tmp_path / "mnt-e.mount").write_text(
        disk_state.unit_text({"path": "/mnt/e", "fstype": "ext4", "options": []}, "1")
    )
    for path, reason in {
        "/mnt/b": "fstab has a line",
        "/mnt/c": "does not belong to this role",
        "/mnt/d": "does not belong to this role",
    }.items():
        with pytest.raises(Refusal, match=reason):
            disk_state.check_unit(path)
    for path in ("/mnt/a", "/mnt/e"):
        disk_state.check_unit(path)


def sparse(path: Path, size: int, *places: int) -> Path:
    """Make a file that plays a disk of zeros with a byte of data at some places."""
    with path.open("wb") as stream:
        stream.truncate(size)
        for place in places:
            stream.seek(place)
            stream.write(b"x")
    return path


#: A partition as blkid 2.38 has it, and what it adds for a file system.
PARTITION = """\
DEVNAME=/dev/sdb1
PART_ENTRY_SCHEME=dos
PART_ENTRY_TYPE=0x83
PART_ENTRY_NUMBER=1
PART_ENTRY_OFFSET=2048
PART_ENTRY_SIZE=100000
PART_ENTRY_DISK=8:16
"""
EXT4 = "UUID=9694b85f-039c-4a28-b850-9d7c87d640e2\nTYPE=ext4\nUSAGE=filesystem\n"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", {}),
        (PARTITION, {}),
        (PARTITION + EXT4, {"UUID": "9694b85f-039c-4a28-b850-9d7c87d640e2", "TYPE": "ext4", "USAGE": "filesystem"}),
        ("DEVNAME=/dev/sdb\nPTTYPE=gpt\n", {"PTTYPE": "gpt"}),
    ],
)
def test_the_position_of_a_partition_is_not_one_of_its_contents(text: str, names: dict[str, str]) -> None:
    assert disk_state.parse_blkid(text) == names


@pytest.mark.parametrize(
    ("place", "asked", "said"),
    [
        (None, True, "format {} as ext4"),
        (None, False, "{} holds no file system; set format: true to have one made"),
        (100 << 20, True, "{} holds data without a signature, near byte 104857600"),
    ],
)
def test_a_blank_partition_is_formatted_where_that_is_asked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, place: int | None, asked: bool, said: str
) -> None:
    disk = sparse(tmp_path / "sdb1", 300 << 20, *([] if place is None else [place]))
    monkeypatch.setattr(data_disks, "resolve", lambda _: str(disk))
    monkeypatch.setattr(data_disks, "device_number", lambda _: "8:17")
    monkeypatch.setattr(
        data_disks.DataDisks, "run", lambda _, *command, **__: (0, PARTITION if command[0] == "blkid" else "")
    )
    mount = {"device": "data-part1", "path": str(tmp_path / "data"), "fstype": "ext4", "format": asked}
    answer = run(data_disks, {"mounts": [mount]}, check=True)
    assert said.format(disk) in "; ".join([*answer["actions"], answer.get("msg", "")])


GROUP = 128 << 20


@pytest.mark.parametrize("place", [0, 100 << 20, 3 * GROUP + 1024, 25 * GROUP, (4 << 30) - 1])
def test_a_disk_with_data_anywhere_that_file_systems_write_is_not_blank(tmp_path: Path, place: int) -> None:
    with sparse(tmp_path / "disk", 4 << 30, place).open("rb") as stream:
        assert disk_state.first_data(stream) == place >> 20 << 20


@pytest.mark.parametrize("size", [0, 512, (1 << 20) + 512, (300 << 20) + 5])
def test_a_disk_of_zeros_is_blank_whatever_its_size(tmp_path: Path, size: int) -> None:
    with sparse(tmp_path / "disk", size).open("rb") as stream:
        assert disk_state.first_data(stream) is None


@pytest.mark.parametrize("size", [10 << 30, 100 << 30, (2 << 40) + 4096, 64 << 40])
def test_the_copies_of_superblocks_are_looked_at(size: int) -> None:
    looked = set(disk_state.places(size))
    assert len(looked) < 700
    part = min(size // 4096 // 4 * 4096, (1 << 40) - 4096)
    copies = {GROUP * number for number in (1, 3, 5, 7, 9, 25, 27, 49, 81)} | {part * number for number in (1, 2, 3)}
    assert {copy >> 20 << 20 for copy in copies if copy < size} <= looked


def test_a_file_system_that_lost_its_beginning_is_found(tmp_path: Path) -> None:
    disk = sparse(tmp_path / "disk", 4 << 30)
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True, env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"})
    with disk.open("r+b") as stream:
        stream.write(bytes(64 << 20))
    with disk.open("rb") as stream:
        assert disk_state.first_data(stream) is not None


@pytest.mark.parametrize(("fstype", "option"), [("ext4", "nodiscard"), ("xfs", "-K")])
def test_making_a_file_system_discards_nothing(fstype: str, option: str) -> None:
    assert option in data_disks.MKFS[fstype]
