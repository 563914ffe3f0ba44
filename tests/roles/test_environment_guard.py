"""root runs nothing in environments that somebody else could have put there."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roles.python.library import uv_environments
from roles.python.module_utils import environment_guard
from tests.roles.conftest import Run
from tests.support.environments import by_hand, more, state

NOBODY = pwd.getpwnam("nobody").pw_uid


def _home(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, -1)


def _group(tmp_path: Path) -> None:
    os.chown(tmp_path / "venv", -1, NOBODY)
    (tmp_path / "venv").chmod(0o775)


def _program(tmp_path: Path) -> None:
    os.chown(tmp_path / "venv" / "bin" / "python", NOBODY, -1)


def _behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", NOBODY, -1)
    (tmp_path / "venv").rename(tmp_path / "theirs" / "venv")
    (tmp_path / "venv").symlink_to("theirs/venv")


def _started(tmp_path: Path) -> None:
    path = tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "theirs.pth"
    path.touch()
    os.chown(path, NOBODY, -1)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("theirs", [_home, _group, _program, _behind_a_link, _started])
@pytest.mark.parametrize("step", ["look", "resolve", "fill"])
def test_root_runs_nothing_that_somebody_else_can_put_there(
    run: Run, tmp_path: Path, arguments: dict[str, Any], theirs: Callable[[Path], None], step: str
) -> None:
    by_hand(tmp_path / "venv", "3.11")
    (tmp_path / "venv" / "bin" / "python").unlink()
    (tmp_path / "venv" / "bin" / "python").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho 3.11\n")
    (tmp_path / "venv" / "bin" / "python").chmod(0o755)
    theirs(tmp_path)
    wanted = more(arguments, variable="python_environments[0]")
    for check in (True, False):
        said = run(uv_environments, wanted | {"step": step}, check=check)["msg"]
        assert said.startswith(
            "python_environments[0]: environment jax: root would run code that others than root could"
        )
    assert not (tmp_path / "ran").exists()


def test_nothing_is_run_for_an_owner_who_has_no_account_yet(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    by_hand(tmp_path / "venv", "3.11")
    (tmp_path / "venv" / "bin" / "python").unlink()
    (tmp_path / "venv" / "bin" / "python").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho 3.11\n")
    (tmp_path / "venv" / "bin" / "python").chmod(0o755)
    assert state(run(uv_environments, more(arguments, owner="notyet") | {"step": "look"}))["fresh"] is True
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_an_environment_of_another_owner_is_refused_before_any_change(
    run: Run, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    by_hand(tmp_path / "venv", "3.11")
    wanted = more(arguments, owner="nobody")
    for check in (True, False):
        said = run(uv_environments, wanted | {"step": "look"}, check=check)["msg"]
        assert said.startswith(f"environment jax: {tmp_path}/venv belongs to uid 0 and not to nobody; remove")


@pytest.mark.parametrize(
    ("uid", "path", "reason"),
    [
        (0, "sticky/x/y", "everybody can create files in"),
        (0, "sticky/mine", ""),
        (0, "loop", "too many symbolic links"),
        (0, "venv/file/x", ""),
        (4711, "open/x", "others can write in"),
        (4711, "team/x", ""),
        (0, "team/x", "others can write in"),
    ],
)
def test_ways_on_which_others_have_a_say(tmp_path: Path, uid: int, path: str, reason: str) -> None:
    for name, mode in (("sticky", 0o1777), ("open", 0o777), ("team", 0o775), ("venv", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    os.chown(tmp_path / "team", -1, 4711 if os.geteuid() == 0 else -1)
    (tmp_path / "sticky" / "mine").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "venv" / "file").touch()
    found = environment_guard.stranger(str(tmp_path / path), uid)
    assert reason in found if reason else found == ""
