"""Obstacles to a command's execution are reported before the attempt, with the fix."""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.specs import myself
from tpu_ops.host import child, command
from tpu_ops.host.command import NotReady
from tpu_ops.host.person import Person

PATH = b"/usr/bin:/bin"


def refused(argv: list[str], cwd: str = "/", path: bytes = PATH, person: Person | None = None) -> str:
    """Return why a command is not ready."""
    with Path(os.devnull).open("wb") as sink, pytest.raises(NotReady) as raised:
        child.Child.fork(argv, {b"PATH": path}, cwd, person or myself(), sink.fileno())
    return str(raised.value)


def text(path: Path, content: str = "", mode: int = 0o644) -> Path:
    """Write a file."""
    path.write_text(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["no-such-program"], "no-such-program is not on PATH (/usr/bin:/bin); install it on this worker, give its"),
        (["train.py"], "train.py is not on PATH (/usr/bin:/bin); to run it with Python: -- python train.py"),
        (["A=1"], "A=1 is not on PATH (/usr/bin:/bin); set a variable with --env NAME=VALUE"),
        (["./x"], "there is no ./x in /; --sync DIR copies a directory"),
        (["./x.py"], "there is no ./x.py in /; --sync DIR copies a directory"),
        (["/nowhere/x"], "there is no /nowhere/x on this worker; --sync DIR copies a directory"),
        (["/etc/passwd/x"], "there is no /etc/passwd/x on this worker; --sync DIR copies a directory"),
        (["./x; ./y"], "there is no ./x; ./y in /; for a shell line: --shell -- 'LINE'"),
        (["/etc/passwd"], "/etc/passwd is not an executable file; `chmod +x` makes it executable (--sync copies"),
        (["/etc"], "/etc is a directory, not an executable file; name a program in the directory"),
        (["/dev/null"], "/dev/null is not an executable file; name a program"),
    ],
)
def test_a_missing_program_is_reported_with_the_fix(argv: list[str], said: str) -> None:
    assert refused(argv).startswith(said)


def test_a_command_that_is_not_found_is_refused_with_an_alternative(tmp_path: Path) -> None:
    text(tmp_path / "launch", mode=0o755)
    assert refused(["launch"], str(tmp_path)).endswith(f"; for the file in {tmp_path}: -- ./launch")
    (tmp_path / "python3").symlink_to("/usr/bin/true")
    only = os.fsencode(tmp_path)
    assert refused(["python"], path=only).endswith(
        "; without an environment there is only python3 here: -- python3, or name an environment with --venv"
    )
    text(tmp_path / "tool")
    assert refused(["tool"], path=only).endswith(
        f"; {tmp_path}/tool is not an executable file; `chmod +x` makes it executable (--sync copies the mode too)"
    )


def test_a_link_to_nothing_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "tool").symlink_to("gone")
    assert refused(["./tool"], str(tmp_path)).startswith("./tool is a link to gone, which does not exist; --sync DIR")
    # One on PATH is not what --sync copies.
    assert refused(["tool"], path=os.fsencode(tmp_path)).endswith(
        f"; {tmp_path}/tool is a link to gone, which does not exist; install its target, or name another program"
    )
    (tmp_path / "tool").unlink()
    (tmp_path / "tool").symlink_to("tool")
    assert refused(["./tool"], str(tmp_path)).startswith("./tool cannot be looked at: Too many levels of symbolic")


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("#!/no/such/python -u\n", "its first line names /no/such/python, which is not on this worker; install it, or"),
        ("#!/bin/sh\r\n", "the file has Windows line ends"),
    ],
)
def test_a_script_that_nothing_can_run_is_not_ready(tmp_path: Path, first: str, said: str) -> None:
    text(tmp_path / "tool", first + "exit 0\n", 0o755)
    assert refused(["./tool"], str(tmp_path)).startswith(f"./tool cannot be executed: {said}")
    assert refused(["tool"], path=os.fsencode(tmp_path)).startswith(f"{tmp_path}/tool cannot be executed: {said}")


@pytest.mark.parametrize("content", ["#!/bin/sh\nexit 0\n", "#! /bin/sh -e\n", "#!" + "x" * 400, "#!\n", ""])
def test_an_executable_file_is_accepted_whatever_its_content(tmp_path: Path, content: str) -> None:
    text(tmp_path / "tool", content, 0o755)
    with Path(os.devnull).open("wb") as sink:
        held = child.Child.fork(["./tool"], {b"PATH": PATH}, str(tmp_path), myself(), sink.fileno())
    held.drop()
    os.waitpid(held.pid, 0)


def test_a_file_the_kernel_cannot_execute_is_reported_with_the_fix(tmp_path: Path) -> None:
    text(tmp_path / "tool", "exit 0\n", 0o755)
    with Path(os.devnull).open("wb") as sink:
        held = child.Child.fork(["./tool"], {b"PATH": PATH}, str(tmp_path), myself(), sink.fileno())
    said = held.go()
    os.waitpid(held.pid, 0)
    assert said.startswith(
        "./tool: Exec format error; the file is no program for this machine, and its first line names"
    )
    assert command.not_executed("x", OSError(errno.EIO, "Input/output error")) == "x: Input/output error"


@pytest.fixture
def ada(tmp_path: Path) -> Callable[[str], Person]:
    def make(home: str) -> Person:
        own = myself()
        entry = pwd.struct_passwd((own.name, "x", own.uid, own.gid, "", home, "/bin/sh"))
        return Person(entry)

    return make


def test_a_working_directory_that_is_missing_is_told_by_what_it_is(
    tmp_path: Path, ada: Callable[[str], Person]
) -> None:
    home = tmp_path / "ada"
    begins = "working directory {}: No such file or directory; "
    said = refused(["true"], str(home), person=ada(str(home)))
    assert said.startswith(begins.format(home) + f"the home of {myself().name} is missing on this worker: mount the")
    copy, clone = home / "tpu_ops/digits", "/no/such/clone"
    for place, how in ((str(copy), "--sync DIR"), (clone, "--git")):
        said = refused(["true"], place, person=ada(str(home)))
        assert said == begins.format(place) + f"the directory was removed: start again, with {how}"


@pytest.mark.skipif(os.getuid() != 0, reason="it takes root to be somebody else")
def test_a_path_closed_to_the_user_is_refused_with_the_reason(tmp_path: Path) -> None:
    nobody = Person(pwd.getpwnam("nobody"))
    (tmp_path / "hers").mkdir(mode=0o700)
    said = refused(["true"], str(tmp_path / "hers"), person=nobody)
    way = f"`namei -l {tmp_path}/hers` on this worker shows the directory that nobody may not enter"
    assert f"hers: Permission denied; {way}" in said
    assert said.endswith("or run as its owner with --user")
    said = refused([str(tmp_path / "hers/tool")], person=nobody)
    assert "hers/tool cannot be looked at: Permission denied; `namei -l " in said
    own = Path("/tmp/tpu_ops-of-root-alone")
    try:
        text(own, "", 0o700)
        assert refused([str(own)], person=nobody).endswith(
            "; only other users may execute it: change its owner, group or mode"
        )
    finally:
        own.unlink()
