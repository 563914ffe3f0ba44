"""Sessions opened through a master directly, as ssh does, or by ssh if the master refuses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ssh.master import Master, worker_runs
from tpu_ops.ssh import mux, processes
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.masters import Masters
from tpu_ops.ssh.stream import Broken


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Master]:
    """A master, in a directory near by: a socket's path may not be long."""
    (tmp_path / "mux").mkdir()
    monkeypatch.chdir(tmp_path)
    found = Master(Path("mux/a"))
    yield found
    found.close()


@pytest.fixture
def fanout(play: Path) -> Fanout:
    """Reaches all workers over that master."""
    return Fanout(play / "config", find=lambda host: mux.Master(Path("mux/a")))


def calls(play: Path) -> list[str]:
    """Return the calls of ssh; the words of one may have several lines."""
    return [line for line in (play / "calls").read_text().splitlines() if "BatchMode=yes" in line]


def test_openssh_takes_the_stand_in_for_a_master(master: Master) -> None:
    words = ["ssh", "-F", "none", "-o", f"ControlPath={master.path}", "-o", "ProxyCommand=false"]
    assert subprocess.run([*words, "-O", "check", "a"], capture_output=True, check=False).returncode == 0
    sent = {**os.environ, "LC_SENT": "x"}
    command = [*words, "-o", "SendEnv=LC_SENT", "-o", "ForwardAgent=yes", "-T", "a", "cat; echo bad >&2; exit 3"]
    done = subprocess.run(command, input=b"in", capture_output=True, check=False, env=sent)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"in", b"bad\n")
    assert (master.agents, master.environments) == ([True], [[b"LC_SENT=x"]])
    master.refuses = True
    done = subprocess.run([*words, "-T", "a", "true"], capture_output=True, check=False)
    assert (done.returncode, b"Session open refused by peer" in done.stderr) == (255, True)


async def test_over_an_open_master_nothing_takes_an_ssh(master: Master, fanout: Fanout, play: Path) -> None:
    data = os.urandom(3 * 10**6)
    result = (await fanout.run(["a"], ["sh", "-c", "cat; echo said >&2; exit 7"], limit=20, stdin=data))["a"]
    assert (result.code, result.stdout == data, result.stderr) == (7, True, b"said\n")
    assert (await fanout.run(["a"], ["true"], limit=20, stdin=data))["a"].ok
    reply = (await fanout.call({"a": {}}, "look", limit=20))["a"]
    assert (reply.ok, reply.value["request"]["gone"]) == (True, False)
    async with fanout.stream("a", "follow", {}) as stream:
        assert (await stream.answer()).ok
        assert [frame.payload async for frame in stream.frames()] == [b"ab", b"", b"c", b"{}"]
    assert calls(play) == []
    assert (master.agents, master.environments) == ([False] * 4, [[]] * 4)


async def test_a_stream_that_ended_with_its_last_byte_is_let_go() -> None:
    def read() -> int:
        with its:
            return sum(map(len, iter(lambda: its.recv(2**16), b"")))

    ours, its = socket.socketpair()
    ours.setblocking(False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ours)
        _, writer = await mux._stream(ours, stack)
        writer.write(bytes(10**7))
        writer.close()
        assert await asyncio.to_thread(read) == 10**7


async def test_files_that_sessions_had_open_are_closed_again(master: Master, fanout: Fanout) -> None:
    def open_files() -> int:
        return len([*Path("/dev/fd").iterdir()])

    await fanout.run(["a"], ["true"], limit=20)
    await asyncio.to_thread(master.rest)
    before = open_files()
    for _ in range(3):
        assert (await fanout.run(["a"], ["true"], limit=20))["a"].ok
    master.refuses = True
    with pytest.raises(mux.Unavailable):
        await mux.open_session(mux.Master(master.path), "true", limit=99, patience=5)
    await asyncio.to_thread(master.rest)
    assert open_files() == before


async def test_the_agent_is_asked_for_where_it_is_forwarded(master: Master) -> None:
    session = await mux.open_session(mux.Master(master.path, agent=True), "exit 300", limit=99, patience=5)
    assert (await session.wait(), session.returncode, master.agents) == (300 % 256, 44, [True])
    session.close()


WRONG = ["another version", "all sessions are open", "mute", "not a person's own"]


@pytest.mark.parametrize("what", WRONG)
async def test_ssh_does_what_a_master_connection_cannot_do(
    master: Master, fanout: Fanout, play: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(processes, "CONTROL_LIMIT", 0.3 if what == "mute" else 5)
    (play / "master-a").touch()
    if what == "not a person's own":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    master.version, master.refuses = 3 if what == "another version" else 4, what == "all sessions are open"
    master.mute = what == "mute"
    result = (await fanout.run(["a"], ["echo", "hi"], limit=20))["a"]
    assert (result.code, result.stdout) == (0, b"hi\n")
    assert ["ProxyCommand=false" in call for call in calls(play)] == [True]


@pytest.mark.parametrize("what", ["nobody listens", "no socket", "no directory"])
async def test_without_a_master_the_only_ssh_process_before_the_session_opens_one(
    master: Master, fanout: Fanout, play: Path, what: str
) -> None:
    master.close()
    if what != "nobody listens":
        master.path.unlink()
    if what == "no directory":
        master.path.parent.rmdir()
    result = (await fanout.run(["a"], ["echo", "hi"], limit=20))["a"]
    assert (result.code, result.stdout) == (0, b"hi\n")
    # The stand-in for ssh opens no socket, so that the session needs an ssh process too.
    opening, session = calls(play)
    assert ("ControlMaster=auto -f -N" in opening, "ControlMaster=no" in session) == (True, True)


async def test_a_session_whose_end_is_not_told_has_the_code_of_ssh(master: Master, fanout: Fanout, play: Path) -> None:
    master.cut = True
    times = play / "times"
    all_of_it = "read -r _ _ _ timer _ </proc/$PPID/stat; read -r _ _ _ outer _ </proc/$timer/stat"
    script = f"echo x >>{times}; {all_of_it}; kill -9 -$outer -$timer"
    result = (await fanout.run(["a"], ["sh", "-c", script], limit=20))["a"]
    assert (result.code, times.read_text(), calls(play)) == (None, "x\n", [])
    assert (
        result.problem
        == "the connection was lost after the command had started and before it ended: ssh ended with 255"
    )
    async with fanout.stream("a", "status", {}) as stream:
        assert (await stream.answer()).ok
        with pytest.raises(Broken, match="ssh ended with 255"):
            [frame async for frame in stream.frames()]


async def test_a_session_ends_with_whoever_wanted_it(
    master: Master, fanout: Fanout, play: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_runs(monkeypatch, "sleep 60")
    result = (await fanout.run(["a"], ["sleep", "60"], limit=2))["a"]
    assert (result.problem, result.reached) == ("did not answer within 2 s", False)
    assert await asyncio.to_thread(master.hung_up.wait, 5)
    assert calls(play) == []


async def test_a_master_is_asked_itself_whether_it_is_there(master: Master, play: Path) -> None:
    masters = Masters(play / "config", find=lambda host: mux.Master(master.path))
    await masters.ensure("a")
    assert calls(play) == []
    master.version = 3
    masters.forget(["a"])
    await masters.ensure("a")
    assert ["-O check" in call for call in calls(play)] == [True, True, False]
