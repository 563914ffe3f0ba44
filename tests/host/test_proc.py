"""What is read from /proc, on trees made for the purpose."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import HEADLESS
from tpu_ops.host import ending, proc

V2 = "24 1 0:21 / /proc rw - proc proc rw\n30 1 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "25 1 0:22 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n"
    "31 25 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
    "32 25 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
HYBRID = V1 + "33 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
#: A container whose own group is the root of what it sees.
BOUND = "31 25 0:27 /docker/abc /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
UNIT = "system.slice/tpu-run.service"
#: Mounts of anybody's, by FUSE: at paths that are no UTF-8, or hold what other readers take for the end of a line.
FOREIGN = "90 1 0:40 / /mnt/\udce9 rw - fuse.sshfs a rw\n91 1 0:41 / /mnt/\x85x\u2028y rw - fuse.sshfs a\u2003b rw\n"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "expected"),
    [
        (f"0::/{UNIT}\n", V2, [f"/sys/fs/cgroup/{UNIT}"]),
        (f"5:memory:/x\n1:name=systemd:/{UNIT}\n", V1, [f"/sys/fs/cgroup/systemd/{UNIT}"]),
        (
            f"1:name=systemd:/{UNIT}\n0::/{UNIT}\n",
            HYBRID,
            [f"/sys/fs/cgroup/systemd/{UNIT}", f"/sys/fs/cgroup/unified/{UNIT}"],
        ),
        (f"1:name=systemd:/docker/abc/{UNIT}\n0::/\n", BOUND, [f"/sys/fs/cgroup/systemd/{UNIT}"]),
        ("1:name=systemd:/docker/abcd\n", BOUND, []),
        ("0::/a:b\n", V2, ["/sys/fs/cgroup/a:b"]),
        (f"0::/{UNIT}\n", FOREIGN + V2, [f"/sys/fs/cgroup/{UNIT}"]),
    ],
)
def test_the_control_group_is_found_on_every_layout(cgroup: str, mounts: str, expected: list[str]) -> None:
    assert proc.cgroup_candidates(cgroup, mounts) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to mount")
def test_a_path_of_somebodys_mount_keeps_no_run_from_its_control_group(tmp_path: Path) -> None:
    place = tmp_path / "\udce9"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    try:
        assert os.getpid() in proc.cgroup_pids(proc.own_cgroup())
    finally:
        subprocess.run(["umount", place], check=True)


def test_processes_of_groups_below_count_and_foreign_ones_do_not(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "cgroup.procs").write_text("12\n0\n")
    (tmp_path / "a" / "b" / "cgroup.procs").write_text("7\n9\n")
    assert proc.cgroup_pids(str(tmp_path)) == [7, 9, 12]


def test_a_command_name_with_brackets_does_not_mislead() -> None:
    text = "42 (a) b (c)) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987654 0 0"
    assert proc.parse_stat(text) == {"state": "S", "parent": 1, "start": 987654}


def test_start_time_tells_processes_apart_and_is_0_for_none() -> None:
    assert proc.start_time(os.getpid()) > 0
    assert proc.start_time(2**22 + 1) == 0


def process(root: Path, pid: int, command: str, *targets: str) -> None:
    folder = root / "proc" / str(pid) / "fd"
    folder.mkdir(parents=True)
    for number, target in enumerate(targets):
        (folder / str(number)).symlink_to(target)
    (folder.parent / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
    (folder.parent / "comm").write_text("name\n")


def test_holders_are_those_with_a_chip_open(tmp_path: Path) -> None:
    process(tmp_path, 10, "python train.py", "/dev/null", "/dev/accel1", "/dev/accel0", "/dev/accel0")
    process(tmp_path, 11, "python vfio.py", "/dev/vfio/vfio", "/dev/vfio/3")
    process(tmp_path, 12, "cat", "/dev/accelerate", "/tmp/dev/accel0", "pipe:[1]")
    process(tmp_path, 13, "gone", "/dev/accel2 (deleted)")
    found = proc.holders(str(tmp_path))
    assert [(holder["pid"], holder["devices"]) for holder in found] == [
        (10, ["/dev/accel0", "/dev/accel1"]),
        (11, ["/dev/vfio/3", "/dev/vfio/vfio"]),
        (13, ["/dev/accel2"]),
    ]
    assert found[0]["command"] == "python train.py"
    assert found[0]["user"] == proc.person_name(os.getuid())


def test_a_look_at_many_open_files_lets_others_know_that_it_goes_on(tmp_path: Path) -> None:
    for pid in (10, 11):
        process(tmp_path, pid, "python load.py", *["/dev/null"] * 1600, "/dev/accel0")
    beats: list[None] = []
    found = proc.holders(str(tmp_path), beat=lambda: beats.append(None))
    assert ([holder["pid"] for holder in found], len(beats)) == ([10, 11], 3)


def test_chips_are_listed_in_order(tmp_path: Path) -> None:
    for name in ("accel10", "accel2", "accel0", "accelerate", "vfio/vfio", "vfio/1"):
        path = tmp_path / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert proc.chips(str(tmp_path)) == ["/dev/accel0", "/dev/accel2", "/dev/vfio/1", "/dev/accel10"]


@pytest.fixture
def headless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process whose first thread has ended, with a file open that counts as a chip."""
    chip = tmp_path / "accel0"
    chip.touch()
    monkeypatch.setattr(proc, "_CHIP_OR_CONTAINER", re.compile(re.escape(str(chip))))
    with subprocess.Popen([sys.executable, "-c", HEADLESS, chip], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "settled\n"
        deadline = time.monotonic() + 10
        while proc.parse_stat(Path(f"/proc/{process.pid}/stat").read_text())["state"] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process
        process.kill()


def test_a_process_whose_first_thread_has_ended_holds_its_chips(
    headless: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert os.listdir(f"/proc/{headless.pid}/fd") == []  # noqa: PTH208
    (found,) = proc.holders(only=[headless.pid])
    assert (found["pid"], found["user"]) == (headless.pid, proc.person_name(os.getuid()))
    assert found["devices"] == [str(tmp_path / "accel0")]
    assert "HEADLESS" in found["command"]


def test_a_process_whose_first_thread_has_ended_is_ended_by_sigkill_alone(
    headless: subprocess.Popen[str], tmp_path: Path
) -> None:
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n{headless.pid}\n")
    begun = time.monotonic()
    assert ending.end_tree(str(tmp_path), 0.3, time.sleep) == []
    assert time.monotonic() - begun >= 0.3, "the grace was given"
    assert headless.wait(10) == -signal.SIGKILL


def test_a_zombie_process_is_not_alive() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert proc.process_state(process.pid) == "Z"
        assert not proc.is_alive(process.pid)
    assert not proc.is_alive(process.pid)


def thread(root: Path, pid: int, number: int, state: str) -> None:
    folder = root / "proc" / str(pid) / "task" / str(number)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{number} (x) {state} 1" + " 0" * 40)
    if number == pid:
        (folder.parent.parent / "stat").write_text((folder / "stat").read_text())


@pytest.mark.parametrize(
    ("states", "expected"), [("ZSD", "D"), ("XRS", "R"), ("ZSR", "R"), ("ZZX", "Z"), ("SD", "S"), ("Z", "Z")]
)
def test_a_process_has_the_state_of_its_living_threads(tmp_path: Path, states: str, expected: str) -> None:
    for number, state in enumerate(states):
        thread(tmp_path, 10, 10 + number, state)
    assert proc.process_state(10, str(tmp_path)) == expected
