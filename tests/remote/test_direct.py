"""One command on workers whose masters are open, without an event loop; what is not so is left to the fan-out."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.remote.master import Master, worker_runs
from tpu_ops.errors import OpsError
from tpu_ops.remote import direct, replies, silence, wire
from tpu_ops.remote import mux_protocol as protocol
from tpu_ops.remote.replies import Result


@pytest.fixture
def masters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Master]]:
    """Makes the masters of workers, in a directory near by: a socket's path may not be long."""
    monkeypatch.chdir(tmp_path)
    made: list[Master] = []

    def make(host: str) -> Master:
        made.append(Master(Path(host)))
        return made[-1]

    yield make
    for master in made:
        master.close()


async def elsewhere(hosts: Sequence[str]) -> dict[str, Result]:
    """Stand in for the fan-out."""
    return {host: Result(host, 0, b"elsewhere") for host in hosts}


async def stays(_host: str, _begun: float) -> str:
    """Stand in for whoever looks for silent workers, and finds them where they were."""
    return ""


def run(masters: Mapping[str, protocol.Master], argv: Sequence[str], limit: float = 20) -> dict[str, Result]:
    """Run a command; what is left to others ends at once."""
    return direct.run(masters, argv, limit=limit, others=elsewhere, gone=stays)


def left(found: Mapping[str, Result]) -> list[str]:
    """Return the workers on which others ran the command."""
    return [host for host, result in found.items() if result.stdout == b"elsewhere"]


def ways(*hosts: str, agent: bool = False) -> dict[str, protocol.Master]:
    """Return where the masters of workers listen."""
    return {host: protocol.Master(Path(host), agent) for host in hosts}


def test_each_worker_has_its_own_result(masters: Callable[[str], Master]) -> None:
    for host in "abc":
        masters(host)
    script = 'echo "$1"; echo said >&2; cat; exit 7'
    found = run(ways("a", "b", "c"), ["sh", "-c", script, "-", "two  words\n$X"])
    assert [*found] == ["a", "b", "c"]
    for host, result in found.items():
        assert result == (host, 7, b"two  words\n$X\n", b"said\n", "", True, False)


def test_long_output_arrives_whole_on_both_ways(masters: Callable[[str], Master]) -> None:
    masters("a")
    script = "head -c 3000000 /dev/zero | tr '\\0' x; head -c 2000000 /dev/zero | tr '\\0' y >&2"
    result = run(ways("a"), ["sh", "-c", script])["a"]
    assert (result.code, result.stdout == b"x" * 3000000, result.stderr == b"y" * 2000000) == (0, True, True)


def test_of_endless_output_the_beginning_is_kept_and_the_end_is_known(
    masters: Callable[[str], Master], monkeypatch: pytest.MonkeyPatch
) -> None:
    masters("a")
    monkeypatch.setattr(replies, "LONGEST", 300_000)
    zeros = "head -c 5000000 /dev/zero | tr '\\0' "
    cut = run(ways("a"), ["sh", "-c", f"echo begun; {zeros} x; echo last; exit 7"])["a"]
    assert (cut.code, cut.stderr, cut.cut) == (7, b"", True)
    assert cut.stdout.startswith(b"begun\nxxx")
    assert 299_000 < len(cut.stdout) <= 300_000
    assert cut.stdout.count(b"x") == len(cut.stdout) - len(b"begun\n")
    cut = run(ways("a"), ["sh", "-c", f"echo begun; {zeros} y >&2; exit 7"])["a"]
    assert (cut.code, cut.stdout, cut.cut) == (7, b"begun\n", True)
    assert 299_000 < len(cut.stderr) == cut.stderr.count(b"y") <= 300_000


def test_the_agent_is_asked_for_where_it_is_forwarded(masters: Callable[[str], Master]) -> None:
    master = masters("a")
    assert run(ways("a", agent=True), ["true"])["a"].ok
    assert (master.agents, master.environments) == ([True], [[]])


@pytest.mark.parametrize("what", ["nobody listens", "no socket", "another version", "mute", "not a person's own"])
def test_nothing_is_started_anywhere_where_one_worker_has_no_master(
    masters: Callable[[str], Master], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    masters("a")
    master = masters("b")
    monkeypatch.setattr(direct, "_PATIENCE", 0.2)
    if what == "nobody listens":
        master.close()
    elif what == "no socket":
        master.path.unlink()
    elif what == "not a person's own":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    master.version, master.mute = 3 if what == "another version" else 4, what == "mute"
    assert left(run(ways("a", "b"), ["touch", str(tmp_path / "started")])) == ["a", "b"]
    assert not (tmp_path / "started").exists()


def test_a_worker_that_allows_no_more_sessions_is_left_to_others_while_the_rest_waits_for_it(
    masters: Callable[[str], Master], tmp_path: Path
) -> None:
    masters("a")
    masters("b").refuses = True
    there = tmp_path / "there"

    async def others(hosts: Sequence[str]) -> dict[str, Result]:
        there.touch()
        return await elsewhere(hosts)

    script = f"until [ -e {there} ]; do sleep 0.05; done; echo met; echo said >&2; exit 3"
    found = direct.run(ways("a", "b"), ["sh", "-c", script], limit=20, others=others, gone=stays)
    assert found["a"] == ("a", 3, b"met\n", b"said\n", "", True, False)
    assert left(found) == ["b"]


Look = Callable[[str, Callable[[], Any]], Result]


@pytest.fixture
def silent(masters: Callable[[str], Master], monkeypatch: pytest.MonkeyPatch) -> Look:
    """Run a script that says nothing at first on worker a, and look for it soon; what is then called says the rest."""

    def run(script: str, answer: Callable[[], Any]) -> Result:
        async def gone(_host: str, _begun: float) -> Any:
            return await answer()

        monkeypatch.setattr(silence, "LOOK_AFTER", 0.2)
        worker_runs(monkeypatch, script)
        masters("a")
        return direct.run(ways("a"), ["true"], limit=20, others=elsewhere, gone=gone)["a"]

    return run


@pytest.mark.parametrize("moved", [True, False])
def test_a_silent_worker_is_left_to_others_only_once_it_is_known_to_be_elsewhere(silent: Look, moved: bool) -> None:
    answer = AsyncMock(return_value=moved)
    found = silent('sleep 1; printf "\\n%s\\nran\\n%s 0\\n" "$0" "$0"', answer)
    assert found.stdout == (b"elsewhere" if moved else b"ran")
    answer.assert_awaited_once()


def test_a_worker_that_answers_while_it_is_looked_for_is_not_left_to_others(silent: Look) -> None:
    async def late() -> bool:
        await asyncio.sleep(0.8)
        return True

    found = silent('sleep 0.5; printf "\\n%s\\nran" "$0"; sleep 1; printf "\\n%s 0\\n" "$0"', late)
    assert (found.code, found.stdout) == (0, b"ran")


def test_an_alarm_of_whoever_looks_for_a_silent_worker_ends_the_command(silent: Look) -> None:
    with pytest.raises(OpsError, match="CHANGED"):
        silent("sleep 30", AsyncMock(side_effect=OpsError("the host key CHANGED")))


def test_what_others_could_not_do_is_an_error(masters: Callable[[str], Master]) -> None:
    masters("a").refuses = True

    async def others(hosts: Sequence[str]) -> dict[str, Result]:
        raise OpsError(f"no way to {hosts}")

    with pytest.raises(OpsError, match="no way to"):
        direct.run(ways("a"), ["true"], limit=20, others=others, gone=stays)


def test_a_worker_that_is_waited_for_beside_others_is_given_up_in_time(
    masters: Callable[[str], Master], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = masters("a")
    masters("b").refuses = True
    monkeypatch.setattr(silence, "PATIENCE", 1.0)
    worker_runs(monkeypatch, "sleep 60")
    caplog.set_level(logging.INFO)
    found = run(ways("a", "b"), ["true"], limit=2)
    assert (found["a"].problem, found["a"].reached, left(found)) == ("did not answer within 2 s", False, ["b"])
    assert caplog.messages == ["a is silent: waiting for an answer"]
    assert slow.hung_up.wait(5)


def test_a_command_too_long_to_be_sent_at_once_is_left_to_others(masters: Callable[[str], Master]) -> None:
    masters("a")
    assert left(run(ways("a"), ["true", "x" * 70_000])) == ["a"]


@pytest.mark.parametrize("begun", [True, False])
def test_what_is_known_to_have_been_started_is_not_left_to_others(
    masters: Callable[[str], Master], monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    masters("a").cut = True
    all_of_it = "read -r _ _ _ timer _ </proc/$PPID/stat; read -r _ _ _ outer _ </proc/$timer/stat"
    if not begun:
        # What the master starts dies before it prints a word.
        monkeypatch.setattr(wire, "ENVELOPE", "kill -9 0")
    found = run(ways("a"), ["sh", "-c", f"{all_of_it}; kill -9 -$outer -$timer"])
    if begun:
        assert found["a"].code is None
        assert found["a"].problem == "the connection ended before the command: ssh ended with 255"
    else:
        assert left(found) == ["a"]


def test_a_command_that_takes_too_long_is_given_up_and_ended(
    masters: Callable[[str], Master], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {host: masters(host) for host in "ab"}
    # The worker that is the first one sleeps.
    once = f"mkdir {tmp_path / 'once'} 2>&- && sleep 60"
    worker_runs(monkeypatch, f'printf "\\n%s\\n" "$0"; {once}; printf "done\\n%s 0\\n" "$0"')
    found = run(ways("a", "b"), ["true"], limit=3)
    late = {host: result.problem for host, result in found.items() if result.problem}
    assert [*late.values()] == ["did not end within 3 s"]
    assert [result.stdout for result in found.values() if result.ok] == [b"done"]
    assert both[next(iter(late))].hung_up.wait(5)


def test_what_a_command_has_printed_until_its_time_was_over_is_not_lost(masters: Callable[[str], Master]) -> None:
    masters("a")
    late = run(ways("a"), ["sh", "-c", "echo step 1; echo careful >&2; exec sleep 60"], limit=2)["a"]
    assert (late.problem, late.code, late.reached) == ("did not end within 2 s", None, True)
    assert (late.stdout, late.stderr) == (b"step 1\n", b"careful\n")
    # What it leaves behind holds the session open: nobody knows whether more is to come.
    left_behind = run(ways("a"), ["sh", "-c", "echo done; sleep 60 &"], limit=2)["a"]
    assert (left_behind.problem, left_behind.code, left_behind.ok) == ("did not end within 2 s", None, False)


def test_a_worker_that_says_nothing_in_time_is_not_reached_and_the_command_is_not_sent_again(
    masters: Callable[[str], Master], monkeypatch: pytest.MonkeyPatch
) -> None:
    masters("a")
    # As of a worker whose processes are all frozen: sshd has taken the command.
    worker_runs(monkeypatch, "exec sleep 60")
    assert run(ways("a"), ["true"], limit=1)["a"] == ("a", None, b"", b"", "did not answer within 1 s", False, False)


def test_what_a_command_leaves_behind_may_print_after_its_end(masters: Callable[[str], Master]) -> None:
    masters("a")
    gone = "read -r _ _ _ envelope _ </proc/$PPID/stat; (while [ -e /proc/$envelope ]; do sleep 0.05; done"
    found = run(ways("a"), ["sh", "-c", f"{gone}; echo late; echo later >&2) & echo now; exit 3"])["a"]
    assert (found.code, found.problem, found.stdout, found.stderr) == (3, "", b"now\nlate\n", b"later\n")
    held = run(ways("a"), ["sh", "-c", f"{gone}; echo late; sleep 60) & echo now; exit 3"], limit=2)["a"]
    assert (held.code, held.problem, held.stdout) == (None, "did not end within 2 s", b"now\nlate\n")


def test_workers_that_are_waited_for_are_named_once(
    masters: Callable[[str], Master], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for host in "ab":
        masters(host)
    monkeypatch.setattr(silence, "PATIENCE", 0.2)
    monkeypatch.setattr(wire, "ENVELOPE", 'sleep 2; printf "\\n%s\\n" "$0"; "$@"; printf "\\n%s 0\\n" "$0"')
    caplog.set_level(logging.INFO)
    assert all(result.ok for result in run(ways("a", "b"), ["true"]).values())
    assert caplog.messages == ["a, b are silent: waiting for an answer"]


@pytest.mark.parametrize("refuses", [False, True], ids=["alone", "beside others"])
def test_workers_that_are_heard_at_the_moment_of_saying_who_is_silent_are_waited_for(
    masters: Callable[[str], Master], monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    masters("a")
    masters("b").refuses = refuses
    attend = direct._Together.attend

    def attend_until_it_is_to_be_said(sessions: direct._Together) -> bool:
        whole = attend(sessions)
        monkeypatch.setattr(silence, "PATIENCE", 0.0)
        return whole

    if refuses:
        monkeypatch.setattr(direct._Together, "attend", attend_until_it_is_to_be_said)
    else:
        monkeypatch.setattr(silence, "PATIENCE", 0.0)
    found = run(ways("a", "b"), ["sleep", "0.1"])
    assert (found["a"].ok, left(found)) == (True, ["b"] if refuses else [])


def test_files_that_sessions_had_open_are_closed_again(masters: Callable[[str], Master]) -> None:
    master, refusing = masters("a"), masters("b")
    refusing.refuses = True
    run(ways("a", "b"), ["true"])
    master.rest()
    refusing.rest()
    before = _open_files()
    for _ in range(3):
        run(ways("a", "b"), ["true"])
        run(ways("a"), ["sleep", "60"], limit=0.1)
        run({**ways("a"), "none": protocol.Master(Path("none"))}, ["true"])
    # The masters are threads of this process, and may be late.
    until = time.monotonic() + 10
    while _open_files() > before and time.monotonic() < until:
        time.sleep(0.05)
    assert _open_files() <= before


def _open_files() -> int:
    return len([*Path("/dev/fd").iterdir()])


def test_many_workers_take_no_longer_than_the_slowest(masters: Callable[[str], Master]) -> None:
    hosts = [f"w{number}" for number in range(40)]
    for host in hosts:
        masters(host)
    began = time.monotonic()
    found = run(ways(*hosts), ["sleep", "1"], limit=60)
    assert all(result.ok for result in found.values())
    assert time.monotonic() - began < 35


def test_nothing_that_takes_long_is_imported_for_it(masters: Callable[[str], Master]) -> None:
    masters("a")
    script = """
import pathlib, sys, typing
def compiled(self, text, *rest, **options):
    raise AssertionError(f"an annotation is compiled: {text}")
typing.ForwardRef.__init__ = compiled
from tpu_ops.cli.main import main
from tpu_ops.remote import direct, mux_protocol
code = main(["run", "pod"])
found = direct.run({"a": mux_protocol.Master(pathlib.Path("a"))}, ["echo", "hi"], limit=20, others=None, gone=None)
heavy = {"asyncio", "dataclasses", "hashlib", "inspect", "locale", "logging", "shutil", "subprocess", "yaml"}
print(code, found["a"].stdout, heavy & sys.modules.keys(), "tpu_ops.fleet.contact" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "2 b'hi\\n' set() True\n"


def test_a_master_that_says_nonsense_is_left_to_others_at_once(
    masters: Callable[[str], Master], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_PATIENCE", 60.0)
    masters("a").version = 2**31
    began = time.monotonic()
    assert left(run(ways("a"), ["true"])) == ["a"]
    assert time.monotonic() - began < 30
