"""At shutdown, a run ends before its mounts are unmounted: its unit is ordered after theirs."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from tpu_ops.host import mounts, unit

LINE = "36 35 8:16 / {} rw,relatime shared:1 - {} {} rw\n"
#: What every host has mounted, and systemd keeps or nobody writes to.
SYSTEM = {
    "/": "ext4",
    "/proc": "proc",
    "/proc/sys/fs/binfmt_misc": "autofs",
    "/sys/fs/cgroup": "cgroup2",
    "/dev/shm": "tmpfs",
    "/run": "tmpfs",
    "/run/user/1000": "tmpfs",
}


def mountinfo(found: dict[str, str]) -> bytes:
    return "".join(LINE.format(path, fstype, "/dev/sdb") for path, fstype in found.items()).encode()


@pytest.mark.parametrize(
    ("found", "units"),
    [
        ({}, []),
        ({"/mnt/data": "ext4"}, ["mnt-data.mount"]),
        ({"/processes": "ext4", "/runs": "ext4"}, ["processes.mount", "runs.mount"]),
        ({"/mnt/data": "xfs", "/home": "ext4", "/mnt": "ext4"}, ["home.mount", "mnt.mount", "mnt-data.mount"]),
        # It is mounted when it is used, after the start of the run for example.
        ({"/mnt/nfs": "autofs"}, ["mnt-nfs.automount", "mnt-nfs.mount"]),
        ({r"/mnt/my-disk\0401": "ext4"}, [r"mnt-my\x2ddisk\x201.mount"]),
    ],
)
def test_a_run_is_ordered_behind_what_is_mounted(found: dict[str, str], units: list[str]) -> None:
    assert mounts.units(mountinfo(SYSTEM | found)) == units


def test_two_mounts_of_one_kind_at_one_path_are_one_unit() -> None:
    both = mountinfo({"/mnt/nfs": "autofs"}) + mountinfo({"/mnt/nfs": "nfs4"}) * 2
    assert mounts.units(both) == ["mnt-nfs.automount", "mnt-nfs.mount"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/mnt/data-1", r"mnt-data\x2d1"),
        ("/mnt/a b", r"mnt-a\x20b"),
        ("/.hidden/.x", r"\x2ehidden-.x"),
        ("/mnt/é@:_", r"mnt-\xc3\xa9\x40:_"),
        ("/mnt/back\\slash", r"mnt-back\x5cslash"),
        ("/mnt/100%$x", r"mnt-100\x25\x24x"),
        ("/mnt/#1", r"mnt-\x231"),
        ("/mnt/a\tb\nc\rd", r"mnt-a\x09b\x0ac\x0dd"),
    ],
)
def test_units_are_called_as_systemd_calls_them(path: str, name: str) -> None:
    """The names are those of `systemd-escape --path`, the paths stand there as the kernel tells them."""
    told = "".join(f"\\{ord(char):03o}" if char in " \t\n\\#" else char for char in path)
    assert mounts.units(mountinfo({told: "ext4"})) == [f"{name}.mount"]


def test_hundreds_of_mounts_of_containers_leave_the_shallow_ones() -> None:
    deep = {f"/var/lib/docker/overlay2/{number:064x}/merged": "overlay" for number in range(500)}
    found = mounts.units(mountinfo(deep | {"/mnt/disks/data/set": "ext4"}))
    assert (len(found), found[0]) == (mounts.MOST, "mnt-disks-data-set.mount")


def test_a_path_that_makes_no_unit_s_name_is_left_out() -> None:
    assert mounts.units(mountinfo({"/mnt/" + "-" * 62: "ext4", "/mnt/" + "-" * 61: "ext4"})) == [
        "mnt-" + r"\x2d" * 61 + ".mount"
    ]


def test_the_unit_has_one_dependency_per_mount_with_names_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mountinfo").write_bytes(mountinfo(SYSTEM | {"/mnt/data": "ext4", "/mnt/my-disk": "ext4"}))
    monkeypatch.setattr(mounts, "MOUNTINFO", str(tmp_path / "mountinfo"))
    command = unit.start_command("/usr/local/sbin/tpu-host", "r1", 30, "0123456789abcdef")
    orders = [word for word in command if word.startswith("--property=After=")]
    # As systemd-run, which takes a value apart at its spaces, without quotes and backslashes that quote.
    assert [shlex.split(order.partition("After=")[2]) for order in orders] == [
        ["network-online.target"],
        ["mnt-data.mount"],
        [r"mnt-my\x2ddisk.mount"],
    ]


def test_a_host_that_does_not_say_what_is_mounted_has_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "MOUNTINFO", str(tmp_path / "absent"))
    assert mounts.found() == []


def test_the_mount_that_a_path_is_on_is_told_without_a_look_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    monkeypatch.setattr(mounts, "MOUNTINFO", str(table))
    assert mounts.told("/mnt/home/ada") == ""
    assert mounts.gone("/mnt/home/ada").startswith("is the server of a mount there down? check the server, or")
    lines = [("/", "ext4", "/dev/sda1"), ("/mnt", "autofs", "systemd-1"), ("/mnt/home", "autofs", "systemd-1")]
    lines.append((r"/mnt/home", "nfs4", r"10.0.0.5:/my\040home"))
    table.write_text("".join(LINE.format(path, kind, source) for path, kind, source in lines))
    for path in ("/mnt/home/ada", "/mnt/home", "/mnt/x/../home/"):
        assert mounts.told(path) == "/mnt/home is 10.0.0.5:/my home (nfs4)"
    assert mounts.told("/mnt/homes") == "/mnt is systemd-1 (autofs)"
    # A disk is not what does not answer.
    assert mounts.told("/opt") == ""
    assert mounts.gone("/opt").startswith("is the server of a mount there down? check the server, or")
    assert "down? /mnt/home is 10.0.0.5:/my home (nfs4): check the server, or unmount" in mounts.gone("/mnt/home/ada")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with mounts of which some are answered for, and which are asked in other processes than this one."""
    found = {
        "/mnt/data": "ext4",
        "/mnt/well": "nfs4",
        "/mnt/gone": "nfs4",
        "/mnt/my bucket": "fuse.gcsfuse",
        "/mnt/theirs": "fuse.sshfs",
        "/mnt/later": "autofs",
    }
    file, parent = tmp_path / "mountinfo", os.getpid()
    file.write_bytes(mountinfo(SYSTEM | {path.replace(" ", r"\040"): kind for path, kind in found.items()}))
    monkeypatch.setattr(mounts, "MOUNTINFO", str(file))

    def statvfs(path: bytes) -> None:
        if os.getpid() == parent or [entry.name for entry in Path("/proc/self/fd").iterdir()] != ["0"]:
            raise OSError(errno.EBADF, "")
        if path == b"/mnt/gone":
            signal.pause()
        codes = {b"/mnt/my bucket": errno.ENOTCONN, b"/mnt/theirs": errno.EACCES, b"/mnt/well": 0}
        if code := codes[path]:
            raise OSError(code, "")

    monkeypatch.setattr(os, "statvfs", statvfs)


@pytest.mark.usefixtures("served")
def test_a_mount_whose_server_does_not_answer_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, pids = os.fork, list[int]()

    def forked() -> int:
        pid = fork()
        pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", forked)
    began = time.monotonic()
    found = mounts.unfit(1001, limit=1.0)
    assert time.monotonic() - began < 20
    assert found == [
        {
            "path": "/mnt/gone",
            "problem": "/mnt/gone, where /dev/sdb (nfs4) is mounted, does not answer within 1 s",
            "fix": "check the server, or unmount the file system on this worker: `sudo umount -f -l /mnt/gone`",
        },
        {
            "path": "/mnt/my bucket",
            "problem": "/mnt/my bucket, where /dev/sdb (fuse.gcsfuse) is mounted, fails: "
            "Transport endpoint is not connected",
            "fix": "check the server, or unmount the file system on this worker: `sudo umount -f -l '/mnt/my bucket'`",
        },
    ]
    # One each, of which the one that still waited was killed.
    assert len(pids) == 4
    _, status = os.waitpid(pids[1], 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    ("uid", "needed", "asked"),
    [
        (1001, [], ["/mnt/all", "/home/ada/b"]),
        (1002, ["/home/ada"], ["/mnt/all", "/home/bob/b"]),
        (1002, ["/home/ada/b/venv"], ["/mnt/all", "/home/ada/b", "/home/bob/b"]),
    ],
)
def test_a_silent_mount_of_another_user_blocks_only_runs_that_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, needed: list[str], asked: list[str]
) -> None:
    line = "36 22 0:50 / {} rw,nosuid shared:1 - fuse.gcsfuse bucket rw,user_id={},group_id=1,allow_other\n"
    found = {"/mnt/all": 0, "/home/ada/b": 1001, "/home/bob/b": 1002}
    (tmp_path / "mountinfo").write_text("".join(line.format(*each) for each in found.items()))
    monkeypatch.setattr(mounts, "MOUNTINFO", str(tmp_path / "mountinfo"))
    monkeypatch.setattr(mounts, "_answers", lambda paths, _: dict.fromkeys(paths, errno.ENOTCONN))
    assert [fault["path"] for fault in mounts.unfit(uid, needed)] == asked


@pytest.mark.parametrize(
    ("path", "point", "on"),
    [
        ("/mnt/a/venv", "/mnt/a", True),
        ("/mnt/a", "/mnt/a", True),
        ("/mnt/ab", "/mnt/a", False),
        ("/mnt/ab/../a/x", "/mnt/a", True),
        ("/mnt/ab", "/", True),
    ],
)
def test_a_path_is_on_a_mount_by_its_name(path: str, point: str, on: bool) -> None:
    assert mounts.is_on(path, point) is on


def test_a_run_needs_all_buckets_mounted_and_ends_before_they_are_unmounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mountinfo").write_bytes(mountinfo(SYSTEM | {"/mnt/data": "ext4"}))
    (tmp_path / "buckets").write_text("/mnt/data\n/mnt/my-data\n")
    monkeypatch.setattr(mounts, "MOUNTINFO", str(tmp_path / "mountinfo"))
    monkeypatch.setattr(mounts, "BUCKETS", str(tmp_path / "buckets"))
    # The run is ordered after the services, so that it ends before they unmount.
    assert mounts.found()[1:] == ["tpu_ops-bucket-mnt-data.service", r"tpu_ops-bucket-mnt-my\x2ddata.service"]
    (found,) = mounts.unfit(1001)
    assert (found["path"], found["problem"]) == ("/mnt/my-data", "the bucket at /mnt/my-data is not mounted")
    assert r"systemctl restart 'tpu_ops-bucket-mnt-my\x2ddata.service'" in found["fix"]
    (tmp_path / "buckets").unlink()
    assert mounts.unfit(1001) == []
