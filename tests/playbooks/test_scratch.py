"""Directories of runs of playbooks: gone with the run, and those of killed ones with the next run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_ops.ansible import scratch
from tpu_ops.files import take

#: A process that has a directory and waits.
OWNER = """
import os, sys
from tpu_ops.ansible import scratch
with scratch.directory(os.environ) as made:
    (made / "artifacts").mkdir()
    print(made, flush=True)
    sys.stdin.read()
"""


def started(runtime: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that has a directory, and return both."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env=os.environ | {"XDG_RUNTIME_DIR": str(runtime)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_next_run_removes_what_a_killed_one_has_left_and_nothing_else(tmp_path: Path) -> None:
    killed, left = started(tmp_path)
    living, used = started(tmp_path)
    killed.kill()
    killed.communicate()
    for name in ("tpu_ops-configure-new", "other-configure-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "tpu_ops-configure-link").symlink_to(tmp_path / "other-configure-x")
    old = tmp_path / "tpu_ops-configure-of-an-older-version"
    old.mkdir()
    os.utime(old, (0, 0))
    assert left.exists()
    with scratch.directory({"XDG_RUNTIME_DIR": str(tmp_path)}) as made:
        assert {path.name for path in tmp_path.iterdir()} == {
            used.name,
            made.name,
            "tpu_ops-configure-new",
            "other-configure-x",
            "tpu_ops-configure-link",
        }
        assert made.stat().st_mode & 0o777 == 0o700
    assert not made.exists()
    living.communicate()
    assert not used.exists()


def test_scratch_directories_of_another_user_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "tpu_ops-configure-theirs"
    old.mkdir()
    os.utime(old, (0, 0))
    uid = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: uid + 1)
    with scratch.directory({"XDG_RUNTIME_DIR": str(tmp_path)}):
        assert old.exists()


def test_a_directory_that_is_just_being_made_is_nobodys_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two playbooks may be started at the same moment."""
    others = [1]

    def swept_first(handle: int) -> bool:
        if others:
            others.clear()
            scratch._sweep(tmp_path)
        return take(handle)

    monkeypatch.setattr("tpu_ops.ansible.scratch.take", swept_first)
    with scratch.directory({"XDG_RUNTIME_DIR": str(tmp_path)}) as made:
        assert made.exists()
