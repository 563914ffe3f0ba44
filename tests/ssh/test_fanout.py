"""Fan-out over a stand-in for ssh that plays masters and sessions on this machine."""

from __future__ import annotations

import asyncio
import fcntl
import json
import signal
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from tpu_ops.errors import OpsError
from tpu_ops.protocol import wire
from tpu_ops.ssh import masters, openssh, processes, replies, stream
from tpu_ops.ssh.fanout import SESSIONS, Fanout
from tpu_ops.ssh.replies import reply_of
from tpu_ops.ssh.stream import Broken


def calls(play: Path, word: str) -> list[str]:
    return [line for line in (play / "calls").read_text().splitlines() if word in line]


async def test_each_worker_has_its_own_result_in_order(play: Path) -> None:
    (play / "down-b").touch()
    script = 'printf "%s" "$1"; cat; echo said >&2; [ "$HOST_NAME" = a ] || exit 3'
    results = await Fanout(play / "config").run(
        ["c", "b", "a"], ["sh", "-c", script, "sh", "$x '"], limit=20, stdin={"a": b"\0one", "c": b"two"}
    )
    assert list(results) == ["c", "b", "a"]
    assert (results["a"].code, results["a"].stdout, results["a"].stderr) == (0, b"$x '\0one", b"said\n")
    assert (results["c"].code, results["c"].stdout) == (3, b"$x 'two")
    assert (results["b"].reached, results["b"].problem) == (False, "ssh: connect to host b port 22: Connection refused")


async def test_a_master_is_opened_once_and_used_by_all(play: Path) -> None:
    fanout = Fanout(play / "config")
    await asyncio.gather(*(fanout.run(["a"], ["true"], limit=20) for _ in range(5)))
    assert len(calls(play, "-f -N")) == 1
    assert all("ControlMaster=no" in call for call in calls(play, "/bin/sh"))


async def test_an_agent_that_signs_for_one_at_a_time_is_asked_so(
    play: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(masters, "WIDTH", 4)
    (play / "agent-for-one").touch()
    results = await Fanout(play / "config").run("abcdefghijkl", ["true"], limit=20)
    assert [result.problem for result in results.values()] == [""] * 12
    assert "opening connections one after the other" in caplog.text


async def test_a_cancelled_wait_for_the_agent_does_not_block_others(play: Path) -> None:
    fanout = Fanout(play / "config")
    (play / "masters").mkdir()
    (play / "agent-for-none").write_text("0")
    with (play / "masters" / ".agent").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = asyncio.create_task(fanout.run(["a"], ["true"], limit=2))
        async with asyncio.timeout(20):
            while not fanout.masters._alone:  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.01)
        # The time until it has the agent is not its own.
        await asyncio.sleep(2.2)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    (play / "agent-for-none").unlink()
    assert (await fanout.run(["a"], ["true"], limit=20))["a"].ok
    assert fanout.masters._alone == fanout.masters._beside == 0


async def test_the_wait_for_a_process_that_holds_the_agent_is_limited(
    play: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masters, "_AGENT_LIMIT", 0.2)
    (play / "masters").mkdir()
    (play / "agent-for-none").write_text("0")
    with (play / "masters" / ".agent").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = (await Fanout(play / "config").run(["a"], ["true"], limit=20))["a"]
    assert result.problem == "another process has been opening a connection to this worker for too long"


async def test_an_agent_that_will_not_sign_is_told_of_and_not_asked_again_for_each(
    play: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine some would come to ask when others have been refused, and would be told at once.
    (play / "agent-for-none").write_text("8")
    monkeypatch.setattr(masters.Masters, "_alive", AsyncMock(return_value=False))
    fanout = Fanout(play / "config")
    results = await fanout.run("abcdefgh", ["true"], limit=20)
    said = (
        "the agent that holds the key did not sign (agent refused operation): unlock the agent; `ssh-add -l` "
        "lists its keys"
    )
    assert {result.problem for result in results.values()} == {said}
    assert 8 + masters._TRIES <= len(calls(play, "-f -N")) < 8 * masters._TRIES
    # Once it is unlocked it is asked again.
    (play / "agent-for-none").unlink()
    assert (await fanout.run("ab", ["true"], limit=20))["b"].ok


@pytest.mark.parametrize("memory", [True, False])
async def test_a_full_disk_is_no_reason_not_to_reach_a_worker(
    play: Path, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    def full(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    if not memory:
        monkeypatch.delattr("os.memfd_create")
    fanout = Fanout(play / "config")
    assert (await fanout.run(["a"], ["true"], limit=20))["a"].ok
    code, said = await processes.quiet(["sh", "-c", "echo why >&2; exit 3"], 5)
    assert (code, said) == (3, "why\n" if memory else "")


async def test_a_proxy_that_works_again_when_it_is_checked_is_not_a_failure(play: Path) -> None:
    for host in "ab":
        (play / f"blinks-{host}").touch()
    (play / "proxy-b").write_text("ERROR: gcloud is not logged in\n")
    opened = masters.Masters(play / "config", proxied="ab")
    await opened.ensure("a")
    assert len(calls(play, "-f -N")) == 2
    with pytest.raises(masters.Unreachable, match="gcloud is not logged in"):
        await opened.ensure("b")
    assert len(calls(play, "-f -N")) == 3


async def test_over_an_open_master_a_command_takes_one_ssh(play: Path) -> None:
    (play / "master-a").touch()
    fanout = Fanout(play / "config")
    assert (await fanout.run(["a"], ["true"], limit=20))["a"].ok
    assert len(calls(play, "BatchMode=yes")) == 1
    async with fanout.stream("a", "status", {}) as stream:
        assert (await stream.answer()).ok
    assert len(calls(play, "BatchMode=yes")) == 2


async def test_a_master_with_all_the_sessions_it_may_have_is_left_alone(play: Path) -> None:
    (play / "master-a").touch()
    (play / "full-a").touch()
    result = (await Fanout(play / "config").run(["a"], ["echo", "hi"], limit=20))["a"]
    assert (result.code, result.stdout) == (0, b"hi\n")
    assert calls(play, "-O stop") == calls(play, "-f -N") == []


async def test_a_stale_master_is_replaced_once_before_the_command_begins(play: Path) -> None:
    (play / "master-a").touch()
    (play / "stale-a").touch()
    result = (await Fanout(play / "config").run(["a"], ["echo", "hi"], limit=20))["a"]
    assert (result.code, result.stdout) == (0, b"hi\n")
    assert len(calls(play, "-O stop")) == len(calls(play, "-f -N")) == 1


async def test_a_command_that_has_started_is_never_started_again(play: Path) -> None:
    (play / "cut-a").touch()
    mark = play / "times"
    result = (await Fanout(play / "config").run(["a"], ["sh", "-c", f"echo x >>{mark}"], limit=20))["a"]
    assert result.code is None
    assert "and before it ended" in result.problem
    assert mark.read_text() == "x\n"


async def test_every_call_has_its_own_deadline(play: Path) -> None:
    mark = play / "ended"
    result = (await Fanout(play / "config").run(["a"], ["sh", "-c", f"sleep 60; touch {mark}"], limit=2))["a"]
    assert result.problem == "did not end within 2 s"
    assert not mark.exists()


async def test_output_before_the_deadline_is_kept(play: Path) -> None:
    script = "echo step 1; echo careful >&2; exec sleep 30"
    late = (await Fanout(play / "config").run(["a"], ["sh", "-c", script], limit=2))["a"]
    assert (late.problem, late.code, late.reached) == ("did not end within 2 s", None, True)
    assert (late.stdout, late.stderr) == (b"step 1\n", b"careful\n")
    left_behind = (await Fanout(play / "config").run(["a"], ["sh", "-c", "echo done; sleep 30 &"], limit=2))["a"]
    assert (left_behind.problem, left_behind.code, left_behind.ok) == ("did not end within 2 s", None, False)


async def test_a_silent_worker_counts_as_unreached_and_nothing_is_sent_again(play: Path) -> None:
    (play / "master-a").touch()
    (play / "mute-a").touch()
    result = (await Fanout(play / "config").run(["a"], ["true"], limit=1))["a"]
    assert (result.problem, result.code, result.reached) == ("did not answer within 1 s", None, False)
    assert len(calls(play, "/bin/sh")) == 1


async def test_of_endless_output_the_beginning_is_kept_and_the_end_is_known(
    play: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "LONGEST", 300_000)
    script = "head -c 5000000 /dev/zero | tr '\\0' x; exit 7"
    cut = (await Fanout(play / "config").run(["a"], ["sh", "-c", script], limit=20))["a"]
    assert (cut.code, cut.stderr, cut.cut) == (7, b"", True)
    assert 299_000 < len(cut.stdout) == cut.stdout.count(b"x") <= 300_000


async def test_a_background_process_may_print_after_the_commands_end(play: Path) -> None:
    gone = "read -r _ _ _ envelope _ </proc/$PPID/stat; (while [ -e /proc/$envelope ]; do sleep 0.05; done"
    script = f"{gone}; echo late; echo later >&2) & echo now; exit 3"
    found = (await Fanout(play / "config").run(["a"], ["sh", "-c", script], limit=20))["a"]
    assert (found.code, found.problem, found.stdout, found.stderr) == (3, "", b"now\nlate\n", b"later\n")
    script = f"{gone}; echo late; sleep 30) & echo now; exit 3"
    held = (await Fanout(play / "config").run(["a"], ["sh", "-c", script], limit=2))["a"]
    assert (held.code, held.problem, held.stdout) == (None, "did not end within 2 s", b"now\nlate\n")


async def test_a_process_that_is_let_go_is_collected_before_its_pipes_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing the pipes of a process that has just died collects it behind asyncio's back: its end is then 255."""
    process = await asyncio.create_subprocess_exec("sleep", "60", stdin=asyncio.subprocess.PIPE)
    transport = process._transport  # type: ignore[attr-defined]
    close, seen = transport.close, []

    def closing() -> None:
        seen.append(process.returncode)
        close()

    monkeypatch.setattr(transport, "close", closing)
    await processes.end(process)
    assert seen[:1] == [-signal.SIGKILL]


async def test_a_process_is_collected_though_its_end_is_cancelled_as_well() -> None:
    """Ctrl-C or the end of a command closes the loop; asyncio itself would report a process that ends later."""
    process = await asyncio.create_subprocess_exec("sleep", "600")
    ending = asyncio.create_task(processes.end(process))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert process.returncode == -signal.SIGKILL


async def test_a_lock_that_cannot_be_written_is_an_error_for_people(play: Path) -> None:
    (play.parent / "masters").touch()
    with pytest.raises(OpsError, match="lock file for opening a connection") as caught:
        await Fanout(play.parent / "ssh_config").run(["a", "b"], ["true"], limit=5)
    assert caught.value.where.startswith(str(play.parent / "masters"))


async def test_no_more_sessions_at_once_than_a_server_allows(play: Path) -> None:
    log = play / "log"
    script = f"echo + >>{log}; sleep 0.2; echo - >>{log}"
    fanout = Fanout(play / "config")
    await asyncio.gather(*(fanout.run(["a"], ["sh", "-c", script], limit=30) for _ in range(2 * SESSIONS)))
    open_, most = 0, 0
    for line in log.read_text().split():
        open_ += 1 if line == "+" else -1
        most = max(most, open_)
    assert 1 < most <= SESSIONS


async def test_a_request_reaches_the_host_program_as_one_constant_line(play: Path) -> None:
    values = {"spec": {"argv": ["$x", "\udcff"]}}
    reply = (await Fanout(play / "config").call({"a": values}, "start", limit=20))["a"]
    assert reply.ok
    assert reply.value["request"]["spec"] == values["spec"]
    assert calls(play, wire.COMMAND)[0].endswith(f"a {wire.COMMAND}")


async def test_the_host_program_knows_by_its_input_that_somebody_waits(play: Path) -> None:
    reply = (await Fanout(play / "config").call({"a": {}}, "look", limit=20))["a"]
    assert reply.ok
    assert (reply.value["request"]["attended"], reply.value["request"]["gone"]) == (True, False)


async def test_a_worker_with_a_head_start_is_asked_alone_until_it_answers(play: Path) -> None:
    fanout, requests = Fanout(play / "config"), {host: dict[str, str]() for host in "cab"}
    replies = await asyncio.wait_for(fanout.call(requests, "start", limit=20, head_start=3600), 15)
    assert [(host, reply.ok) for host, reply in replies.items()] == [("c", True), ("a", True), ("b", True)]
    asked = [line.removesuffix(wire.COMMAND).split()[-1] for line in calls(play, wire.COMMAND)]
    assert asked[0] == "c"
    assert {*asked} == {"a", "b", "c"}


async def test_a_silent_worker_with_a_head_start_delays_no_other(play: Path) -> None:
    for host in "ab":
        (play / f"master-{host}").touch()
    (play / "mute-a").touch()
    began = asyncio.get_running_loop().time()
    answered = dict[str, float]()
    replies = await Fanout(play / "config").call(
        {"a": {}, "b": {}},
        "start",
        limit=5,
        head_start=0.3,
        done=lambda reply: answered.update({reply.host: asyncio.get_running_loop().time() - began}),
    )
    assert (replies["a"].kind, replies["b"].ok) == ("timeout", True)
    assert 0.3 <= answered["b"] < answered["a"]


async def test_frames_come_as_they_were_sent(play: Path) -> None:
    async with Fanout(play / "config").stream("a", "follow", {}) as stream:
        assert (await stream.answer()).ok
        frames = [frame async for frame in stream.frames()]
    assert [(frame.kind, frame.offset, frame.payload) for frame in frames] == [
        (b"D", 0, b"ab"),
        (b"G", 10, b""),
        (b"D", 10, b"c"),
        (b"E", 11, b"{}"),
    ]


async def test_a_frame_of_a_kind_that_the_protocol_does_not_have_is_no_end(play: Path) -> None:
    async with Fanout(play / "config").stream("a", "follow", {"last": "X"}) as stream:
        assert (await stream.answer()).ok
        frames = stream.frames()
        assert [(await anext(frames)).kind for _ in range(3)] == [b"D", b"G", b"D"]
        with pytest.raises(Broken, match="frame of kind b'X', which version 4 of the protocol does not have"):
            await anext(frames)


async def test_a_stream_that_ends_early_is_broken(play: Path) -> None:
    async with Fanout(play / "config").stream("a", "status", {}) as stream:
        assert (await stream.answer()).ok
        with pytest.raises(Broken):
            [frame async for frame in stream.frames()]


async def test_a_stream_whose_answer_does_not_come_is_broken(play: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (play / "master-a").touch()
    (play / "mute-a").touch()
    monkeypatch.setattr(stream, "LIMIT", 0.2)
    async with Fanout(play / "config").stream("a", "follow", {}) as following:
        with pytest.raises(Broken, match=r"did not answer within 0\.2 s"):
            await asyncio.wait_for(following.answer(), 2)


async def test_a_worker_that_cannot_be_reached_does_not_stream(play: Path) -> None:
    (play / "down-a").touch()
    with pytest.raises(masters.Unreachable, match="Connection refused"):
        async with Fanout(play / "config").stream("a", "follow", {}):
            pytest.fail("there is no connection")


@pytest.mark.parametrize(
    ("answer", "stderr", "code", "kind", "words"),
    [
        ({"ok": True}, "", 0, "", ""),
        ({"ok": False, "error": {"kind": "held", "message": "taken", "fix": "wait"}}, "", 0, "held", "taken"),
        ({"ok": False, "error": {"kind": "invalid", "message": "unknown action 'usage'"}}, "", 0, "old", "too old"),
        (None, "sudo: a password is required\n", 1, "denied", "sudo"),
        (None, "sudo: /usr/local/sbin/tpu-host: command not found\n", 1, "no-launcher", "not installed"),
        (None, "Connection to 10.0.0.1 closed\n", 255, "unreachable", "closed"),
        (None, "", 7, "failed", "7"),
    ],
)
def test_a_missing_answer_is_explained_with_a_fix(
    answer: object, stderr: str, code: int, kind: str, words: str
) -> None:
    reply = reply_of("pod-w1", answer, stderr, code)
    assert reply.kind == kind
    assert words in reply.problem
    assert reply.ok or reply.kind in {"held", "unreachable"} or "tpu_ops configure pod-w1" in reply.fix


def test_words_of_a_command_line() -> None:
    config = Path("/state/ssh config")
    assert openssh.session(config, "pod-w0", "true")[-4:] == ["ControlMaster=no", "-T", "pod-w0", "true"]
    assert openssh.open_master(config, "pod-w0")[-4:] == ["-f", "-N", "-T", "pod-w0"]
    assert "'/state/ssh config'" in openssh.rsync_shell(config)
    assert json.loads(wire.request("m" * 16, "probe", {}))["protocol"] == wire.PROTOCOL
