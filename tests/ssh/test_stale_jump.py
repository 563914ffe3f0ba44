"""Workers behind a jump whose open connection no longer serves: a stand-in for ssh plays both."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tpu_ops.ssh import masters, openssh, processes

#: Opens masters, unless the jump's master ($PLAY/stale) or the worker is silent; what is asked over the former waits.
STAND_IN = r"""#!/bin/sh
echo "$*" >>"$PLAY/calls"
for last; do :; done
case "$*" in
*"-O check"*) exit 1 ;;
*"-O stop"*) rm -f "$PLAY/stale" ;;
*"-f -N"*)
    [ -e "$PLAY/stale" ] || [ -e "$PLAY/silent-$last" ] || exit 0
    printf 'Connection timed out during banner exchange\r\nConnection to UNKNOWN port 65535 timed out\r\n' >&2
    exit 255 ;;
*"ProxyCommand=false"*) [ ! -e "$PLAY/stale" ] || exec sleep 30 ;;
esac
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that steers the stand-in, which is first on PATH."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAY", str(tmp_path))
    monkeypatch.setattr(processes, "CONTROL_LIMIT", 0.5)
    return tmp_path


def masters_of(play: Path) -> masters.Masters:
    jump = openssh.Jump(play / "jump_config", ("-l", "ada", "-p", "2222"), "bastion")
    return masters.Masters(play / "ssh_config", ["pod-w0", "pod-w1", "pod-w2"], jump=jump)


def told_of_the_jump(play: Path) -> list[str]:
    return [call for call in (play / "calls").read_text().splitlines() if "bastion" in call]


async def test_a_dead_connection_to_a_jump_is_closed_once_for_all_workers(play: Path) -> None:
    (play / "stale").touch()
    opened = masters_of(play)
    await asyncio.gather(*(opened.ensure(host) for host in ("pod-w0", "pod-w1", "pod-w2")))
    common = f"-F {play}/jump_config -o BatchMode=yes"
    assert told_of_the_jump(play) == [
        f"{common} -o ControlMaster=no -o ProxyCommand=false -T -l ada -p 2222 bastion true",
        f"{common} -O stop -l ada -p 2222 bastion",
    ]


async def test_a_worker_that_is_silent_behind_a_jump_that_serves_is_given_up(play: Path) -> None:
    (play / "silent-pod-w1").touch()
    opened = masters_of(play)
    with pytest.raises(masters.Unreachable) as caught:
        await opened.ensure("pod-w1")
    assert str(caught.value) == "Connection timed out during banner exchange"
    await opened.ensure("pod-w0")
    assert [call for call in told_of_the_jump(play) if "-O" in call] == []


async def test_without_a_configured_jump_no_jump_is_asked(play: Path) -> None:
    (play / "stale").touch()
    with pytest.raises(masters.Unreachable):
        await masters.Masters(play / "ssh_config", ["pod-w0"]).ensure("pod-w0")
    assert told_of_the_jump(play) == []
