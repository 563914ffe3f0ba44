"""The mounts that roles read, and the mount points that they reject."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from roles.facts.module_utils import mount_points
from roles.facts.module_utils.mount_points import Mounted, Refusal


@pytest.mark.parametrize("suffix", ["mount", "automount"])
@pytest.mark.parametrize("path", ["/mnt/data", "/srv/my-data", "/a.b/c_d", "/x y"])
def test_units_are_named_as_systemd_names_them(path: str, suffix: str) -> None:
    expected = subprocess.run(
        ["systemd-escape", "--path", f"--suffix={suffix}", path], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert mount_points.unit_name(path, suffix) == expected


def test_mounts_are_read_as_the_kernel_writes_them() -> None:
    mountinfo = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 7:3 / /mnt/my\040data ro,noatime - ext4 /dev/sdb ro,norecovery
40 22 0:50 / /mnt/share rw - autofs systemd-1
41 40 0:51 / /mnt/share rw,nosuid shared:1 master:2 - nfs4 10.0.0.2:/srv/my\040share rw,vers=4.2
"""
    assert mount_points.parse_mounts(mountinfo.strip()) == [
        Mounted("254:0", "/", "rw,relatime", "ext4", "/dev/vda", "rw"),
        Mounted("7:3", "/mnt/my data", "ro,noatime", "ext4", "/dev/sdb", "ro,norecovery"),
        Mounted("0:50", "/mnt/share", "rw", "autofs", "systemd-1", ""),
        Mounted("0:51", "/mnt/share", "rw,nosuid", "nfs4", "10.0.0.2:/srv/my share", "rw,vers=4.2"),
    ]


@pytest.mark.parametrize("odd", ["\r", "\x0b", "\x0c", "\x1e", "\x85", "\u2028"])
def test_a_mount_of_somebody_whose_path_reads_as_two_lines_is_one(odd: str) -> None:
    path = f"/home/bob/a{odd}b"
    mountinfo = f"36 22 0:50 / {path} rw - fuse.sshfs bob: rw,user_id=1002\n"
    assert mount_points.parse_mounts(mountinfo) == [
        Mounted("0:50", path, "rw", "fuse.sshfs", "bob:", "rw,user_id=1002")
    ]


def test_mount_points_that_would_hide_something_are_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    for name, reason in {
        "full": r"not empty \(thesis.tex\)",
        "full/thesis.tex": "not a directory; move it away, or give another path",
        "link": f"symbolic link to {tmp_path}/empty; give that path",
        "link/below": "symbolic link",
    }.items():
        with pytest.raises(Refusal, match=reason):
            mount_points.check_free(str(tmp_path / name))
    for name in ("empty", "new", "new/deeper"):
        mount_points.check_free(str(tmp_path / name))


def test_mount_points_of_fstab_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_points, "FSTAB", str(tmp_path / "fstab"))
    lines = (
        "# UUID=1 /mnt/a ext4",
        " #UUID=1 /mnt/a ext4",
        "UUID=2 /mnt/b ext4 defaults 0 2",
        "UUID=3 /mnt/c/ ext4",
        "sshfs#ada@host:/d /mnt/d fuse noauto 0 0",
        r"UUID=4 /mnt/my\040data ext4",
        "LABEL=e#1 /mnt/#e ext4",
        "",
    )
    (tmp_path / "fstab").write_text("\n".join(lines))
    mount_points.check_fstab("/mnt/a")
    for path in ("/mnt/b", "/mnt/c", "/mnt/d", "/mnt/my data", "/mnt/#e"):
        with pytest.raises(Refusal, match="fstab has a line"):
            mount_points.check_fstab(path)
