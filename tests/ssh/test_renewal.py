"""Workers that do not answer, over a stand-in for ssh: they are looked for once, and tried once more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tpu_ops.errors import OpsError
from tpu_ops.ssh import renewal, silence
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.masters import Unreachable
from tpu_ops.ssh.renewal import News
from tpu_ops.ssh.replies import Reply


class Api:
    """Plays who knows where workers are.

    Attributes:
        moved: Workers that are elsewhere now, where they answer.
        asked: The workers of each question.
    """

    def __init__(self, play: Path, moved: Iterable[str] = (), **notes: str) -> None:
        self.play, self.moved, self.notes = play, frozenset(moved), notes
        self.asked: list[list[str]] = []

    def __call__(self, hosts: Sequence[str]) -> News:
        self.asked.append(list(hosts))
        for host in self.moved:
            (self.play / f"down-{host}").unlink(missing_ok=True)
        return News(self.moved, self.notes)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "GATHER", 0.1)


def down(play: Path, *hosts: str) -> None:
    for host in hosts:
        (play / f"down-{host}").touch()


def opened(play: Path, host: str) -> int:
    return sum(line.endswith(f"-f -N -T {host}") for line in (play / "calls").read_text().splitlines())


async def test_workers_that_moved_are_asked_for_together_and_tried_once_more(
    play: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three processes have to fail within it, on a busy machine too.
    monkeypatch.setattr(renewal, "GATHER", 1.0)
    down(play, "a", "b", "c")
    api = Api(play, "ab", c="its node is PREEMPTED now")
    results = await Fanout(play / "config", api).run("abcd", ["true"], limit=20)
    assert api.asked == [["a", "b", "c"]]
    assert [results[host].code for host in "abcd"] == [0, 0, None, 0]
    assert results["c"].problem == "ssh: connect to host c port 22: Connection refused; its node is PREEMPTED now"
    assert [opened(play, host) for host in "abcd"] == [2, 2, 1, 1]


async def test_nobody_is_asked_when_all_answer(play: Path) -> None:
    api = Api(play, "ab")
    results = await Fanout(play / "config", api).run("ab", ["sh", "-c", "exit 3"], limit=20)
    assert [result.code for result in results.values()] == [3, 3]
    assert api.asked == []


async def test_a_worker_that_answers_and_refuses_the_person_has_not_moved(play: Path) -> None:
    (play / "denied-a").touch()
    api = Api(play, "a")
    result = (await Fanout(play / "config", api).run("a", ["true"], limit=20))["a"]
    assert "Permission denied" in result.problem
    assert api.asked == []


async def test_a_worker_that_moved_and_still_does_not_answer_is_given_up(play: Path) -> None:
    down(play, "a")
    asked: list[Sequence[str]] = []

    def renew(hosts: Sequence[str]) -> News:
        asked.append(hosts)
        return News(frozenset("a"))

    assert not (await Fanout(play / "config", renew).run("a", ["true"], limit=20))["a"].reached
    assert (len(asked), opened(play, "a")) == (1, 2)


async def test_the_question_is_not_repeated_before_its_time(play: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down(play, "a")
    api = Api(play, a="its node is STARTING now")
    fanout = Fanout(play / "config", api)
    for _ in range(3):
        assert (await fanout.run("a", ["true"], limit=20))["a"].problem.endswith("its node is STARTING now")
    assert len(api.asked) == 1
    monkeypatch.setattr(renewal, "AGAIN", 0.0)
    api.moved = frozenset("a")
    assert (await fanout.run("a", ["true"], limit=20))["a"].ok
    assert len(api.asked) == 2


async def test_a_worker_that_fails_late_uses_the_answer_that_came_meanwhile(play: Path) -> None:
    """Its attempt began before the question: one connection is refused at once, another not answered for seconds."""
    down(play, "a", "b")
    api = Api(play, "ab")
    fanout = Fanout(play / "config", api)
    (play / "held-b").touch()
    late = asyncio.create_task(fanout.run("b", ["true"], limit=60))
    async with asyncio.timeout(60):
        while not (play / "holding-b").exists():  # noqa: ASYNC110 - there is no event, only polling
            await asyncio.sleep(0.01)
    assert (await fanout.run("a", ["true"], limit=60))["a"].ok
    (play / "held-b").unlink()
    assert (await late)["b"].ok
    assert (api.asked, opened(play, "b")) == ([["a"]], 2)


async def test_a_stale_master_leads_there_too(play: Path) -> None:
    (play / "master-a").touch()
    (play / "stale-a").touch()
    down(play, "a")
    api = Api(play, "a")
    assert (await Fanout(play / "config", api).run("a", ["true"], limit=20))["a"].ok
    assert api.asked == [["a"]]


async def test_a_master_of_before_the_move_is_looked_for_again(play: Path) -> None:
    api = Api(play, "ab")
    fanout = Fanout(play / "config", api)
    await fanout.run("a", ["true"], limit=20)
    (play / "master-a").unlink()
    down(play, "b")
    await fanout.run("b", ["true"], limit=20)
    await fanout.run("a", ["true"], limit=20)
    assert opened(play, "a") == 2


async def test_a_stream_is_opened_where_the_worker_is_now(play: Path) -> None:
    down(play, "a")
    async with Fanout(play / "config", Api(play, "a")).stream("a", "status", {}) as stream:
        assert (await stream.answer()).ok


async def test_the_time_of_the_question_is_not_the_workers(play: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down(play, "a")
    api, loop, late = Api(play, "a"), asyncio.get_running_loop(), [0.0]
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + late[0])

    def slowly(hosts: Sequence[str]) -> News:
        late[0] = 60.0
        return api(hosts)

    assert (await Fanout(play / "config", slowly).run("a", ["true"], limit=30))["a"].ok


async def test_a_question_that_fails_leaves_the_deadline_in_force() -> None:
    async with asyncio.timeout(60) as deadline:
        before = deadline.when()
        assert before is not None
        with contextlib.suppress(OSError), renewal.paused(deadline):
            await asyncio.sleep(0)
            assert deadline.when() is None
            raise OSError
        assert deadline.when() == pytest.approx(before, abs=10)


async def test_a_late_answer_is_reported_with_the_time_of_the_api_request(
    play: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both have to fail within it, on a busy machine too: who fails later is not held up by the question.
    monkeypatch.setattr(renewal, "GATHER", 1.0)
    down(play, "a", "b")
    for host in "ab":
        (play / f"mute-{host}").touch()
    fanout = Fanout(play / "config", Api(play, "ab"))
    replies, results = await asyncio.gather(
        fanout.call({"a": {}}, "status", limit=3), fanout.run("b", ["true"], limit=3)
    )
    besides = r"within 3 s, plus \d+\.\d s in the queue and for the worker's address"
    assert re.fullmatch(f"the launcher did not answer {besides}", replies["a"].problem)
    assert re.fullmatch(f"did not answer {besides}", results["b"].problem)
    assert not results["b"].reached


async def test_an_alarm_of_the_question_ends_the_command(play: Path) -> None:
    down(play, "a", "b")

    def alarm(hosts: Sequence[str]) -> News:
        raise OpsError("the host key CHANGED")

    with pytest.raises(OpsError, match="CHANGED"):
        await Fanout(play / "config", alarm).run("abc", ["true"], limit=20)
    with pytest.raises(OpsError, match="CHANGED"):
        async with Fanout(play / "config", alarm).stream("a", "follow", {}):
            pytest.fail("there is no connection")


def test_an_interrupted_command_does_not_wait_for_the_answer(play: Path) -> None:
    down(play, "a")
    over, answered = threading.Event(), threading.Event()

    async def command() -> None:
        asked, loop = asyncio.Event(), asyncio.get_running_loop()

        def endless(hosts: Sequence[str]) -> News:
            loop.call_soon_threadsafe(asked.set)
            over.wait(60)
            answered.set()
            return News()

        async with asyncio.timeout(50):
            task = asyncio.create_task(Fanout(play / "config", endless).reach("a"))
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(command())
    assert not answered.is_set()
    over.set()


async def test_a_worker_of_a_deleted_node_is_looked_up_before_ssh_waits(play: Path) -> None:
    down(play, "a", "b", "c")
    away = {"a", "b", "c"}

    def renew(hosts: Sequence[str]) -> News:
        asked.append(list(hosts))
        away.remove("b")
        (play / "down-b").unlink()
        return News(frozenset("b"), {"a": "its node is PREEMPTED now"}, {"a": "make it anew"})

    asked: list[list[str]] = []
    fanout = Fanout(play / "config", renew, taken=away.__contains__)
    replies = await fanout.call({host: {} for host in "abcd"}, "status", limit=20)
    assert asked == [["a", "b", "c"]]
    assert replies["a"] == Reply("a", {}, "unreachable", "its node is PREEMPTED now", "make it anew")
    assert (replies["b"].ok, replies["d"].ok) == (True, True)
    assert "Connection refused" in replies["c"].problem, "nobody could say what became of it"
    assert [opened(play, host) for host in "abcd"] == [0, 1, 1, 1]
    with pytest.raises(Unreachable, match=r"^its node is PREEMPTED now$") as raised:
        async with fanout.stream("a", "follow", {}):
            pytest.fail("there is no connection")
    assert (raised.value.fix, len(asked)) == ("make it anew", 1)


async def test_the_fix_for_a_worker_whose_node_is_preempted_is_reported(play: Path) -> None:
    down(play, "a")
    news = News(notes={"a": "its node is PREEMPTED now"}, fixes={"a": "make it anew"})
    reply = (await Fanout(play / "config", lambda _: news).call({"a": {}}, "status", limit=20))["a"]
    assert (reply.problem.endswith("; its node is PREEMPTED now"), reply.fix) == (True, "make it anew")


async def nowhere(_host: str) -> bool:
    """Stand in for a look at an address at which nobody is any more."""
    return False


class Moved(Api):
    """The same, where those that moved answer at their new place."""

    def __call__(self, hosts: Sequence[str]) -> News:
        for host in self.moved:
            for what in ("mute", "held"):
                (self.play / f"{what}-{host}").unlink(missing_ok=True)
        return super().__call__(hosts)


def silenced(play: Path, how: str) -> None:
    """Have worker a say nothing, over the connection that there is or before there is one."""
    if how == "before it has one":
        down(play, "a")
        (play / "held-a").touch()
    else:
        (play / "master-a").touch()
        (play / "mute-a").touch()


@pytest.fixture
def _looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "LOOK_AFTER", 0.2)


@pytest.mark.usefixtures("_looks_soon")
@pytest.mark.parametrize("silent", ["over its connection", "before it has one"])
async def test_a_silent_worker_that_moved_is_reached_there_before_ssh_gives_up(play: Path, silent: str) -> None:
    silenced(play, silent)
    api = Moved(play, "a")
    fanout = Fanout(play / "config", api, connects=nowhere)
    result = (await fanout.run("a", ["true"], limit=20))["a"]
    assert (result.code, api.asked) == (0, [["a"]])


@pytest.mark.usefixtures("_looks_soon")
async def test_a_stream_leads_there_too(play: Path) -> None:
    silenced(play, "over its connection")
    api = Moved(play, "a")
    fanout = Fanout(play / "config", api, connects=nowhere)
    with pytest.raises(Unreachable, match="the worker has another address now"):
        async with fanout.stream("a", "follow", {}) as stream:
            await stream.answer()
    async with fanout.stream("a", "follow", {}) as stream:
        assert (await stream.answer()).ok


@pytest.mark.usefixtures("_looks_soon")
@pytest.mark.parametrize("silent", ["over its connection", "before it has one"])
async def test_a_silent_worker_that_is_known_to_be_away_is_given_up(play: Path, silent: str) -> None:
    silenced(play, silent)
    news = News(notes={"a": "its node no longer exists"}, fixes={"a": "make it anew"})
    fanout = Fanout(play / "config", lambda _: news, connects=nowhere)
    reply = (await fanout.call({"a": {}}, "status", limit=20))["a"]
    assert reply == Reply("a", {}, "unreachable", "its node no longer exists", "make it anew")


@pytest.mark.usefixtures("_looks_soon")
@pytest.mark.parametrize("connects", [True, False], ids=["it connects", "it does not, and is there"])
async def test_a_silent_worker_that_is_where_it_was_is_waited_for(play: Path, connects: bool) -> None:
    (play / "mute-a").touch()
    api, looked = Api(play), asyncio.Event()

    async def look(_host: str) -> bool:
        looked.set()
        return connects

    result = (await Fanout(play / "config", api, connects=look).run("a", ["true"], limit=2))["a"]
    assert looked.is_set()
    assert (result.problem, api.asked) == ("did not answer within 2 s", [] if connects else [["a"]])


@pytest.mark.usefixtures("_looks_soon")
async def test_a_silent_worker_is_not_tested_while_others_answer(play: Path) -> None:
    (play / "mute-a").touch()
    loop, looked, requests = asyncio.get_running_loop(), list[float](), list[tuple[float, float]]()

    async def look(_host: str) -> bool:
        looked.append(loop.time())
        return True

    fanout = Fanout(play / "config", Api(play), connects=look)
    silent = asyncio.create_task(fanout.run("a", ["true"], limit=2))
    until = loop.time() + 5 * silence.LOOK_AFTER
    while (begun := loop.time()) < until:
        assert (await fanout.run("b", ["true"], limit=20))["b"].ok
        requests.append((begun, loop.time()))
    await silent
    answered = [begun for begun, ended in requests if ended < looked[0]]
    assert [begun for begun in answered if looked[0] - begun < silence.LOOK_AFTER] == []


@pytest.mark.usefixtures("_looks_soon")
async def test_an_alarm_about_a_silent_worker_ends_the_command(play: Path) -> None:
    (play / "mute-a").touch()

    def alarm(hosts: Sequence[str]) -> News:
        raise OpsError("the host key CHANGED")

    with pytest.raises(OpsError, match="CHANGED"):
        await Fanout(play / "config", alarm, connects=nowhere).run("a", ["true"], limit=20)


async def test_without_anyone_to_ask_the_first_problem_stands(play: Path) -> None:
    down(play, "a")
    with pytest.raises(Unreachable, match="Connection refused"):
        await Fanout(play / "config").reach("a")


async def test_workers_that_are_silent_over_an_open_connection_are_named(
    play: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Long beside what the worker that answers takes on a busy machine.
    monkeypatch.setattr(silence, "PATIENCE", 1.5)
    monkeypatch.setattr(silence, "GATHER", 0.3)
    monkeypatch.setattr(logging.getLogger("tpu_ops"), "propagate", True)
    caplog.set_level(logging.INFO, "tpu_ops")
    for host in "ab":
        (play / f"master-{host}").touch()
        (play / f"mute-{host}").touch()
    await Fanout(play / "config").run("abc", ["sleep", "2"], limit=20)
    # Once for each of ssh's processes that is silent for so long; the worker that works is never named.
    assert {record.getMessage() for record in caplog.records} == {"a, b are silent: waiting for an answer"}
