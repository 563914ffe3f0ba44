"""A run's command on its worker: its unit, the child that is held back, and the end of its processes."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.specs import myself
from tpu_ops.host import child, unit
from tpu_ops.host.command import NotReady
from tpu_ops.host.ending import end_tree, left_behind
from tpu_ops.host.person import Person


def test_nothing_of_the_person_stands_in_the_unit() -> None:
    command = unit.start_command("/usr/local/lib/tpu_ops/0123/tpu-host", "digits-1", 30, "0123456789abcdef")
    assert "--property=KillMode=mixed" in command
    assert "--property=TimeoutStopSec=45" in command
    assert "--property=CollectMode=inactive-or-failed" in command
    after = "/usr/bin/python3 -IS /usr/local/lib/tpu_ops/0123/tpu-host after digits-1 0123456789abcdef"
    assert "--property=ExecStopPost=" + after in command
    assert command[-4:] == ["-IS", "/usr/local/lib/tpu_ops/0123/tpu-host", "supervise", "digits-1"]
    assert not any(char in word for word in command for char in "$%")


def test_a_held_child_runs_nothing_until_it_may(tmp_path: Path) -> None:
    source, sink = os.pipe()
    env = {b"PATH": b"/usr/bin:/bin", b"X": b"\xff"}
    held = child.Child.fork(["sh", "-c", 'printf "%s" "$X"; pwd; kill -TERM $$'], env, str(tmp_path), myself(), sink)
    os.close(sink)
    os.set_blocking(source, False)
    with pytest.raises(BlockingIOError):
        os.read(source, 1)
    os.set_blocking(source, True)
    assert held.go() == ""
    with os.fdopen(source, "rb") as file:
        assert file.read() == b"\xff" + str(tmp_path).encode() + b"\n"
    assert os.WTERMSIG(os.waitpid(held.pid, 0)[1]) == 15


@pytest.mark.skipif(os.getuid() != 0, reason="it takes root to be somebody else")
def test_the_person_may_open_the_output_by_its_name() -> None:
    somebody = Person(pwd.getpwnam("nobody"))
    source, sink = child.output_pipe(somebody)
    script = "echo one >/dev/stderr; echo two | tee /dev/stdout"
    held = child.Child.fork(["sh", "-c", script], {b"PATH": b"/usr/bin:/bin"}, "/", somebody, sink)
    os.close(sink)
    assert held.go() == ""
    with os.fdopen(source) as file:
        assert file.read() == "one\ntwo\ntwo\n"
    assert os.waitpid(held.pid, 0)[1] == 0


def test_a_working_directory_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    forked, end = list[int](), child._end

    def ended(pid: int) -> None:
        forked.append(pid)
        end(pid)

    monkeypatch.setattr(child, "_end", ended)
    monkeypatch.setattr(child, "LIMIT", 0.5)
    # In the child, which comes to the mount of a server that is gone.
    monkeypatch.setattr("tpu_ops.host.child.os.chdir", lambda _: time.sleep(60))
    with (
        Path(os.devnull).open("wb") as sink,
        pytest.raises(
            NotReady, match="no answer within 0 s from the working directory /mnt/gone or from PATH, where true is"
        ) as raised,
    ):
        child.Child.fork(["true"], {b"PATH": b"/usr/bin:/bin"}, "/mnt/gone", myself(), sink.fileno())
    assert "is the server of a mount there down? " in str(raised.value)
    assert "`sudo umount -f -l MOUNT`" in str(raised.value)
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)


def test_a_child_whose_supervisor_is_gone_ends_without_running(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with Path(os.devnull).open("wb") as sink:
        held = child.Child.fork(["touch", str(mark)], {b"PATH": b"/usr/bin:/bin"}, "/", myself(), sink.fileno())
    os.close(held._go)
    os.waitpid(held.pid, 0)
    assert not mark.exists()


def test_a_child_that_was_killed_while_it_was_held_ends_as_it_ended() -> None:
    with Path(os.devnull).open("wb") as sink:
        held = child.Child.fork(["true"], {b"PATH": b"/usr/bin:/bin"}, "/", myself(), sink.fileno())
    os.kill(held.pid, 9)
    _, status = os.waitpid(held.pid, 0)
    assert (held.go(), os.WTERMSIG(status)) == ("", 9)


def test_the_tree_is_told_first_and_killed_after_the_grace(tmp_path: Path) -> None:
    """A directory of files plays the control group: this process and two others, one of which ignores SIGTERM."""
    ready = tmp_path / "ready"
    stubborn = subprocess.Popen(["sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.05; done"])
    polite = subprocess.Popen(["sleep", "60"])
    deadline = time.monotonic() + 10
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polls until the deadline
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n{stubborn.pid}\n{polite.pid}\n")
    begun = time.monotonic()
    assert end_tree(str(tmp_path), 0.4, time.sleep) == []
    assert time.monotonic() - begun >= 0.4
    assert (polite.wait(5), stubborn.wait(5)) == (-15, -9)


def test_only_processes_that_stay_after_a_command_are_named(tmp_path: Path) -> None:
    """A directory of files plays the control group."""
    stays = subprocess.Popen(["sleep", "60"])
    goes = subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE)
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n{stays.pid}\n{goes.pid}\n")

    def pause(seconds: float) -> None:
        assert goes.stdin is not None
        goes.stdin.close()
        time.sleep(seconds)  # as the supervisor waits for a signal

    assert left_behind(str(tmp_path), pause) == [{"pid": stays.pid, "command": "sleep 60"}]
    stays.kill()
    assert (stays.wait(5), goes.wait(5)) == (-9, 1)
    assert left_behind(str(tmp_path), pause) == []
