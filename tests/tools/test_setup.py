"""What `make` sets up, with nothing but the programs that a machine of each kind has."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.support.fleet import ROOT

#: Of the machine, on Linux and macOS alike.
USUAL = ("cat", "cut", "dirname", "getconf", "id", "mkdir", "rm")


def path_of(folder: Path, **programs: str) -> str:
    """Return a PATH with the usual programs and these scripts."""
    folder.mkdir()
    for name in USUAL:
        (folder / name).symlink_to(str(shutil.which(name)))
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o700)
    return str(folder)


@pytest.mark.parametrize(
    "digest",
    [{"sha256sum": "exec {real}"}, {"shasum": '[ "$*" = "-a 256" ] && exec {real}'}],
    ids=["linux", "macos"],
)
def test_the_environment_is_made_once_for_what_the_lock_says(digest: dict[str, str], tmp_path: Path) -> None:
    programs = {name: script.format(real=shutil.which("sha256sum")) for name, script in digest.items()}
    python = f'exec {sys.executable} "$@"'
    make = f'for last in "$@"; do :; done; mkdir -p "$last/bin"; echo {python!r} >"$last/bin/python"'
    uv = f'[ "$1" != venv ] || {{ {make}; {shutil.which("chmod")} 0700 "$last/bin/python"; }}'
    path = path_of(tmp_path / "bin", python3=python, uv=uv, **programs)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup.sh", tmp_path / "tools")
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).write_text(f"of {name}")

    def env() -> str:
        command = ["/bin/bash", str(tmp_path / "tools" / "setup.sh"), "env"]
        return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True).stderr

    assert env() == "setup: creating .venv/ from requirements.lock\n"
    expected = hashlib.sha256(b"of requirements.lockof pyproject.toml").hexdigest()
    assert (tmp_path / ".venv" / ".requirements.sha256").read_text().strip() == expected
    assert env() == ""
    (tmp_path / "requirements.lock").write_text("another")
    assert env() == "setup: creating .venv/ from requirements.lock\n"


ACCEPTED = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])


@pytest.mark.parametrize("present", [range(10, 17), range(11, 13), (10, 16)], ids=["many", "old", "none accepted"])
def test_the_environment_gets_the_newest_python_that_the_project_accepts(
    present: Sequence[int], tmp_path: Path
) -> None:
    pythons = {
        f"python3.{minor}": f"exec {sys.executable} -c 'import sys; sys.version_info = (3, {minor});"
        f' sys.executable = "3.{minor}"; exec(sys.argv[2])\' "$@"'
        for minor in present
    }
    asked = tmp_path / "asked"
    uv = f'[ "$1" != venv ] || echo "$*" >{asked}'
    path = path_of(tmp_path / "bin", uv=uv, sha256sum=f"exec {shutil.which('sha256sum')}", **pythons)
    (tmp_path / "tools").mkdir()
    (tmp_path / ".venv").mkdir()
    for name in ("tools/setup.sh", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    command = ["/bin/bash", str(tmp_path / "tools" / "setup.sh"), "env"]
    subprocess.run(command, env={"PATH": path}, capture_output=True, check=True)
    accepted = [f"3.{minor}" for minor in present if f"3.{minor}" in ACCEPTED]
    assert f"--python {accepted[-1] if accepted else '3.13'} " in asked.read_text()


def test_missing_programs_that_the_commands_call_are_installed(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    there = dict.fromkeys(("ssh", "git"), "exit 0")
    path = path_of(tmp_path / "bin", **{"apt-get": f'echo "$*" >>{asked}', "sudo": 'exec "$@"'}, **there)
    (tmp_path / "bin" / "env").symlink_to(str(shutil.which("env")))
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup.sh", tmp_path / "tools")

    def tools() -> str:
        command = ["/bin/bash", str(tmp_path / "tools" / "setup.sh"), "tools"]
        return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True).stderr

    assert tools() == "setup: installing packages: rsync\n"
    assert asked.read_text().splitlines()[-1].endswith(" rsync")
    (tmp_path / "bin" / "rsync").symlink_to("git")
    assert tools() == ""


def test_a_bare_machine_has_what_the_fast_tests_call_before_they_run() -> None:
    command = [str(shutil.which("make")), "-n", "check"]
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert 0 <= steps.find("tools/setup.sh tools") < steps.find("pytest")


def test_tests_run_in_as_many_processes_as_suit_the_machine_without_nproc(tmp_path: Path) -> None:
    command = [str(shutil.which("make")), "-n", "check"]
    environ = {"PATH": path_of(tmp_path / "bin")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert f" -n {min(os.sysconf('SC_NPROCESSORS_ONLN') + 1, 8)} " in done.stdout
    assert done.stderr == ""
