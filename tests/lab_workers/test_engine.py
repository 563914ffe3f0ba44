"""Which container engine is taken, and what is said when none answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_ops.errors import UsageError
from tpu_ops.lab import engine
from tpu_ops.lab.engine import Engine, EngineError


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that is the whole PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_the_first_engine_that_answers_is_taken(programs: Path) -> None:
    program(programs, "docker", "echo cannot connect >&2; exit 1")
    program(programs, "podman", "echo false")
    assert engine.find({}) == Engine(("podman",))


def test_an_engine_that_only_root_may_use_is_asked_through_sudo(programs: Path) -> None:
    program(programs, "docker", "echo permission denied >&2; exit 1")
    program(programs, "sudo", 'test "$1 $2 $3" = "-n docker info" && echo 20.10')
    assert engine.find({}).command == ("sudo", "-n", "docker")


def test_a_rootless_podman_does_not_serve(programs: Path) -> None:
    program(programs, "podman", "echo true")
    with pytest.raises(UsageError) as caught:
        engine.find({})
    assert "podman: rootless" in caught.value.fix


def test_the_named_engine_and_no_other_is_asked(programs: Path) -> None:
    program(programs, "docker", "echo 20.10")
    with pytest.raises(UsageError) as caught:
        engine.find({"TPU_OPS_ENGINE": "podman"})
    assert caught.value.where == "TPU_OPS_ENGINE"
    assert caught.value.what == "podman does not answer"


def test_without_an_engine_the_error_says_what_each_one_said_and_what_to_do(programs: Path) -> None:
    program(programs, "docker", "echo first line >&2; echo Cannot connect to the daemon >&2; exit 1")
    with pytest.raises(UsageError) as caught:
        engine.find({})
    assert caught.value.what == "no container engine answers"
    assert "make demo" in caught.value.fix
    assert "tools/setup.sh engine" in caught.value.fix
    assert "docker: Cannot connect to the daemon" in caught.value.fix
    assert "podman: not installed" in caught.value.fix


async def test_a_command_that_hangs_is_ended(programs: Path) -> None:
    program(programs, "docker", "exec /bin/sleep 60")
    with pytest.raises(EngineError, match="`docker wait x` did not end within 0 s"):
        await Engine(("docker",)).run("wait", "x", timeout=0.2)


async def test_a_failing_command_is_quoted_by_its_last_line(programs: Path) -> None:
    program(programs, "docker", "echo one >&2; echo no such network >&2; exit 1")
    with pytest.raises(EngineError, match="`docker network rm` failed: no such network"):
        await Engine(("docker",)).run("network", "rm", "x")


async def test_an_error_shows_the_daemons_message_not_the_clients(programs: Path) -> None:
    complaint = "echo 'Error response from daemon: no space left'; echo 'Error: failed to start containers: x'"
    program(programs, "docker", f"({complaint}) >&2; exit 1")
    with pytest.raises(EngineError, match=r"failed: Error response from daemon: no space left$"):
        await Engine(("docker",)).run("start", "x")
