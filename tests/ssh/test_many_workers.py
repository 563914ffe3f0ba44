"""Several hundred workers at once: the ranks of a run wait for each other while the session of each lasts."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.runs.test_parts import pod
from tpu_ops.errors import OpsError
from tpu_ops.runs import launch
from tpu_ops.runs.spec import RunSpec
from tpu_ops.ssh import masters, room
from tpu_ops.ssh.fanout import Fanout

COUNT = 200
#: Plays ssh and the host program: rank 0 is ready at once; all others answer once somebody writes to the pipe.
TOGETHER = """#!/bin/sh
all="$*"
case "$all" in
*ProxyCommand=false*) ;;
*) exit 1 ;;
esac
shift $(($# - 2))
IFS= read -r request
marker="${request#*\\"marker\\": \\"}"
if [ "$1" != pod-w0 ]; then
    echo "$1" >"$PLAY/waiting"
    read -r go <"$PLAY/gate"
fi
printf '\\n%s\\n{"ok": true, "record": {"state": "running", "port": 8503}}\\n' "${marker%%\\"*}"
"""


@pytest.fixture
async def together(play: Path) -> AsyncIterator[Path]:
    """Where the stand-in's files are; the ranks go once all of them wait."""
    (play.parent / "bin" / "ssh").write_text(TOGETHER)
    for name in ("waiting", "gate"):
        os.mkfifo(play / name)
    waiting, gate = (os.open(play / name, os.O_RDWR | os.O_NONBLOCK) for name in ("waiting", "gate"))
    hosts = set[bytes]()

    def heard() -> None:
        hosts.update(os.read(waiting, 2**16).split())
        if len(hosts) == COUNT - 1:
            os.write(gate, b"\n" * COUNT)

    asyncio.get_running_loop().add_reader(waiting, heard)
    yield play
    asyncio.get_running_loop().remove_reader(waiting)
    os.close(waiting)
    os.close(gate)


@pytest.fixture
def few_files() -> Iterator[None]:
    """A limit that lets this process open some more files, far fewer than the sessions take."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/dev/fd").iterdir()]) + 64, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_all_ranks_of_a_run_meet_however_many_there_are(together: Path, few_files: None) -> None:
    async with asyncio.timeout(30):
        await launch.start(Fanout(together / "config"), RunSpec("r1", ("true",)), pod(COUNT))


async def test_waiting_for_a_free_connection_slot_does_not_use_up_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masters, "WIDTH", 2)
    own, opening = masters.Masters(tmp_path / "config"), set[str]()
    two, go = asyncio.Event(), asyncio.Event()
    deadlines: dict[str, asyncio.Timeout] = {}

    async def nobody(host: str) -> bool:
        return False

    async def opened(host: str) -> None:
        opening.add(host)
        if len(opening) == 2:
            two.set()
        await go.wait()

    async def ensure(host: str) -> None:
        async with asyncio.timeout(60) as deadlines[host]:
            await own.ensure(host, deadlines[host])

    monkeypatch.setattr(own, "_alive", nobody)
    monkeypatch.setattr(own, "_open", opened)
    async with asyncio.TaskGroup() as group:
        for host in "abcde":
            group.create_task(ensure(host))
        await two.wait()
        assert opening == {host for host, deadline in deadlines.items() if deadline.when() is not None}
        assert (len(opening), len(deadlines)) == (2, 5)
        go.set()
    assert opening == set("abcde")


async def test_more_sessions_than_the_system_allows_are_an_error_for_people(
    play: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hard = 300

    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, hard))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with pytest.raises(OpsError, match="a process may have only 300") as caught:
        await Fanout(play / "config").run([f"w{number}" for number in range(COUNT)], ["true"], limit=5)
    assert "ulimit -Hn" in caught.value.where
    assert (play / "calls").read_text() == ""


def test_a_process_that_cannot_open_one_more_file_still_gets_room(few_files: None) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    room.make(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1
    room.make(COUNT)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > COUNT


def test_the_first_session_raises_the_file_limit_for_all_workers(
    few_files: None,
) -> None:
    room.make(1)
    allowed = subprocess.run(["sh", "-c", "ulimit -Sn"], check=True, capture_output=True, text=True).stdout
    assert int(allowed) >= min(5 * COUNT, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def test_a_system_that_allows_no_more_than_what_is_taken_allows_that(few_files: None) -> None:
    system = resource.setrlimit

    def allow(kind: int, limits: tuple[int, int]) -> None:
        if limits[0] > 1024:
            raise ValueError("current limit exceeds maximum limit")
        system(kind, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "setrlimit", allow)
        room.make(10)
        assert 80 < resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1024
        room.make(10)
