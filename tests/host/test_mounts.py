"""At the host's shutdown a run ends before what is mounted goes: its unit is ordered behind the units of the mounts."""

from __future__ import annotations

import shlex
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


def test_what_is_mounted_twice_at_one_place_is_one_unit() -> None:
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


def test_the_unit_has_one_order_for_each_and_systemd_run_takes_none_of_a_name_for_a_quote(
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
    assert mounts.gone("/mnt/home/ada").startswith("is the server of a mount there gone? see to it, or")
    lines = [("/", "ext4", "/dev/sda1"), ("/mnt", "autofs", "systemd-1"), ("/mnt/home", "autofs", "systemd-1")]
    lines.append((r"/mnt/home", "nfs4", r"10.0.0.5:/my\040home"))
    table.write_text("".join(LINE.format(path, kind, source) for path, kind, source in lines))
    for path in ("/mnt/home/ada", "/mnt/home", "/mnt/x/../home/"):
        assert mounts.told(path) == "/mnt/home is 10.0.0.5:/my home (nfs4)"
    assert mounts.told("/mnt/homes") == "/mnt is systemd-1 (autofs)"
    assert mounts.told("/opt") == "/ is /dev/sda1 (ext4)"
    assert "gone? /mnt/home is 10.0.0.5:/my home (nfs4): see to it, or unmount" in mounts.gone("/mnt/home/ada")
