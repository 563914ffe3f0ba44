"""A run whose end some ranks have reported when its nodes vanish or become silent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.world import DONE, STOPPED, World
from tpu_ops.cloud.remaking import Made, Plan, Seen
from tpu_ops.protocol.wire import DATA, END, NOTE
from tpu_ops.recovery import attempt, decide
from tpu_ops.recovery.events import EndingRanks, Finish, StopWanted
from tpu_ops.runs import endings, follow, records, recovery
from tpu_ops.runs.outcomes import Outcome, outcome_of
from tpu_ops.ssh.masters import Unreachable
from tpu_ops.ssh.replies import Reply
from tpu_ops.ssh.stream import Frame

#: Two slices of one worker each.
NODES_OF = {"a-w0": "n/a", "b-w0": "n/b"}


def cut_after(monkeypatch: pytest.MonkeyPatch, world: World, first: str, then: Callable[[], None]) -> None:
    """Let something happen once the end of one worker's rank was read; no other one answers in that attempt."""
    stream, read = world.stream, asyncio.Event()

    @contextlib.asynccontextmanager
    async def cut(host: str, action: str, values: Mapping[str, Any]) -> AsyncIterator[Any]:
        if world.attempt == 1 and host != first:
            await read.wait()
            then()
            raise Unreachable("no route to host")
        async with stream(host, action, values) as found:
            yield found
        read.set()

    monkeypatch.setattr(world, "stream", cut)


@pytest.mark.parametrize("first", ["pod-w0", "pod-w1"])
@pytest.mark.parametrize("seen", [True, False], ids=["its loss is seen", "its worker is given up"])
def test_a_run_that_a_rank_reports_as_over_is_not_started_again(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, *, first: str, seen: bool
) -> None:
    monkeypatch.setattr(*(follow, "ALONE_LIMIT", 60.0) if seen else (attempt, "LOOK", 60.0))
    world = World(DONE, DONE)
    cut_after(monkeypatch, world, first, lambda: setattr(world, "state", "PREEMPTED"))
    records.write(tmp_path, records.new("r1", ("pod",), ("1",), ("pod-w0", "pod-w1"), ("true",)))
    code, world, job = run(world, "--json")
    assert (code, world.done) == (0, []), "nothing is brought back, stopped or started"
    assert (job.kept.attempt, job.kept.preemptions) == (1, 0)
    out, err = capsys.readouterr()
    told, other = json.loads(out), int(first == "pod-w0")
    assert (told["state"], [one["state"] for one in told["ranks"]]) == ("succeeded", ["succeeded"] * 2)
    assert told["ranks"][other]["reason"].endswith(f"; {first} reports that the run succeeded")
    assert "run r1 succeeded on all 2 ranks\n  pod-w" in err
    known = records.read(tmp_path, "r1")
    assert known is not None
    assert known.ended == "succeeded", "which is what `status` and `logs` tell once the node is gone"
    assert not recovery.is_kept(tmp_path, "r1")


def test_a_stop_that_one_rank_tells_of_is_one_where_its_node_goes(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "ALONE_LIMIT", 60.0)
    world = World({**STOPPED, "stop_requested_by": "ada"}, DONE)
    cut_after(monkeypatch, world, "pod-w0", lambda: setattr(world, "state", "PREEMPTED"))
    code, world, _ = run(world)
    assert (code, world.done) == (1, [])


def test_a_lost_node_is_noticed_soon_after_its_rank_stops_answering(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "ALONE_LIMIT", 60.0)
    monkeypatch.setattr(attempt, "LOOK", 60.0)
    world, began = World(DONE, DONE), time.monotonic()
    cut_after(monkeypatch, world, "pod-w0", lambda: setattr(world, "state", "PREEMPTED"))
    code, world, _ = run(world)
    assert (code, world.done) == (0, [])
    assert time.monotonic() - began < 30.0


def test_a_silent_rank_succeeded_if_another_reports_that_all_did(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(DONE)
    cut_after(monkeypatch, world, "pod-w0", lambda: None)
    monkeypatch.setattr(world, "status", lambda host: Reply(host, {}, "unreachable", "no route to host"))
    code, world, _ = run(world)
    assert (code, world.done) == (0, [])


def test_an_end_that_blames_somebody_says_nothing_of_the_other_ranks(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({**DONE, "first": {"rank": 1, "worker": "pod-w1", "cause": "exit code 3"}}, DONE)
    cut_after(monkeypatch, world, "pod-w0", lambda: setattr(world, "state", "PREEMPTED"))
    code, _, job = run(world)
    assert (code, job.kept.attempt, job.kept.preemptions) == (0, 2, 1)


@pytest.mark.parametrize("git", ["", "vision@0123456789abcdef0123456789abcdef01234567"])
def test_a_takeover_of_a_run_that_a_worker_reports_over_starts_nothing(run: Any, git: str) -> None:
    """The node was lost at the end of the run, and the recovering process died before it learnt that."""
    code, world, _ = run(World(DONE), pending=True, counted=True, preemptions=1, git=git)
    assert (code, world.done) == (0, ["bring back r1/2"])


def test_a_takeover_sees_the_end_of_a_run_before_it_counts_a_loss(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is being preempted still answers for a while."""
    monkeypatch.setattr(follow, "ALONE_LIMIT", 60.0)
    world = World(DONE, DONE)
    records.write(tmp_path, records.new("r1", ("pod",), ("1",), ("pod-w0", "pod-w1"), ("true",)))
    monkeypatch.setattr(world, "status", answers_once(world))
    code, world, job = run(world, first=lambda driver: driver.attached())
    assert (code, world.done, job.kept.preemptions) == (0, [], 0)


def answers_once(world: World) -> Callable[[str], Reply]:
    """Return what lets both workers tell how the run is, just before their node goes."""
    status, asked = world.status, iter(("pod-w0", "pod-w1"))

    def told(host: str) -> Reply:
        found = status(host)
        if next(asked, None) in (None, "pod-w1"):
            world.state = "PREEMPTED"
        return found

    return told


def test_remaining_ranks_are_left_alone_if_one_reports_the_end_of_all(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, job = run(World(DONE))
    one = job.driver.attempt(object(), NODES_OF)
    one.lost = {"n/a": "node a is PREEMPTED"}
    heard = outcome_of(0, "a-w0", {**DONE, "attempt": 1})
    one.hear([heard])
    before = job.kept.preemptions
    outcomes = asyncio.run(one.without_lost())
    assert [outcome.state for outcome in outcomes] == ["succeeded", "succeeded"]
    assert outcomes[0] == heard
    assert (job.kept.preemptions, job.kept.pending) == (before, False)


@pytest.mark.parametrize("how", ["found as they were ended", "asked for"])
def test_an_end_reported_after_the_loss_was_counted_still_counts(
    run: Any, tmp_path: Path, capsys: Any, how: str
) -> None:
    *_, job = run(World(DONE))
    capsys.readouterr()
    job.driver.lost = {"n/a": "node a is PREEMPTED"}
    job.driver.take(EndingRanks())
    told = outcome_of(1, "b-w0", {**DONE, "attempt": 1})
    job.driver.outcomes = endings.as_told([Outcome(0, "a-w0", "gone", reason="node a is PREEMPTED"), told])
    step = (
        job.driver.take(StopWanted(job.driver.outcomes, job.driver.lost))
        if how == "asked for"
        else job.driver.after(job.driver.outcomes)
    )
    assert step == Finish()
    assert job._finish(job.driver.outcomes) == 0
    assert "run r1 succeeded on all 2 ranks\n  a-w0: node a is PREEMPTED; b-w0 reports that the run succeeded" in (
        capsys.readouterr().err
    )


class Slices:
    """Stands for the workers of two slices, the first of which is lost: the other one's rank ends once it is stopped.

    Args:
        late: Seconds from the answer to the stop until the rest of the log comes; None is never.
    """

    masters: Any = SimpleNamespace(drop=lambda host: asyncio.sleep(0))

    def __init__(self, late: float | None) -> None:
        self._late, self._stopped = late, asyncio.Event()
        self.record = {**STOPPED, "attempt": 1, "reason": "node a is PREEMPTED"}

    async def call(self, requests: Any, action: str, **_: Any) -> dict[str, Reply]:
        assert (action, list(requests)) == ("stop", ["b-w0"])
        self._stopped.set()
        return {host: Reply(host, {"record": self.record}) for host in requests}

    @contextlib.asynccontextmanager
    async def stream(self, host: str, action: str, values: Mapping[str, Any]) -> AsyncIterator[Any]:
        if host == "a-w0":
            raise Unreachable("no route to host")

        async def frames() -> AsyncIterator[Frame]:
            await self._stopped.wait()
            if self._late is None:
                await asyncio.Event().wait()
            await asyncio.sleep(self._late or 0.0)
            yield Frame(DATA, 0, b"saved a checkpoint\n")
            yield Frame(END, 19, json.dumps({"record": self.record, "tail": ""}).encode())

        async def answer() -> Reply:
            return Reply(host, {"record": {"attempt": 1}})

        yield SimpleNamespace(answer=answer, frames=frames)


@pytest.mark.parametrize("late", [0.2, None])
def test_the_last_lines_of_remaining_ranks_are_awaited_briefly(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: float | None
) -> None:
    _, world, job = run(World(DONE), plan=Plan((Made("n/a", "1", {}), Made("n/b", "1", {}))))
    states = {"n/a": Seen("PREEMPTED", "1"), "n/b": Seen("READY", "1")}
    monkeypatch.setattr(world, "look", lambda _: states)
    monkeypatch.setattr(attempt, "ENDS", 0.1 if late is None else 30.0)
    shutil.rmtree(tmp_path / "runs/r1")

    async def followed() -> list[Outcome]:
        async with asyncio.timeout(20):
            outcomes: list[Outcome] = await job.driver.attempt(Slices(late), NODES_OF).to_its_end()
            return outcomes

    outcomes = asyncio.run(followed())
    assert [outcome.state for outcome in outcomes] == ["gone", "stopped"]
    read = (tmp_path / "runs/r1/attempt-1/rank-1.log").read_text()
    assert read == ("" if late is None else "saved a checkpoint\n")


class Going:
    """Stands for a worker that announces its preemption, has an active rank for a while, and then falls silent.

    The connection stays open, as if the host had lost its power.

    Args:
        active: How many requests for the rank's state find it active.
        silent: Whether there is no answer after that; otherwise the rank has ended.
    """

    masters: Any = SimpleNamespace(drop=lambda host: asyncio.sleep(0))

    def __init__(self, active: int, *, silent: bool) -> None:
        self._active, self._silent, self.asked = active, silent, 0

    async def call(self, requests: Any, action: str, **_: Any) -> dict[str, Reply]:
        assert (action, list(requests)) == ("status", ["a-w0"])
        self.asked += 1
        state = "running" if self.asked <= self._active else "stopped"
        if self._silent and state == "stopped":
            return {"a-w0": Reply("a-w0", {}, "timeout", "no answer within 3 s")}
        return {"a-w0": Reply("a-w0", {"record": {**STOPPED, "attempt": 1, "state": state}})}

    @contextlib.asynccontextmanager
    async def stream(self, host: str, action: str, values: Mapping[str, Any]) -> AsyncIterator[Any]:
        async def frames() -> AsyncIterator[Frame]:
            yield Frame(NOTE, 0, b"rank 0 (a-w0): this worker is being preempted")
            await asyncio.Event().wait()

        async def answer() -> Reply:
            return Reply(host, {"record": {"attempt": 1}})

        yield SimpleNamespace(answer=answer, frames=frames)


@pytest.mark.parametrize("active", [0, 2])
@pytest.mark.parametrize("silent", [True, False])
def test_an_announced_loss_ends_an_attempt_once_its_ranks_are_not_active(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, active: int, silent: bool
) -> None:
    """Nobody waits until ssh gives the connection up; a rank that saves a checkpoint keeps its node."""
    _, world, job = run(World(DONE), plan=Plan((Made("n/a", "1", {}),)))
    monkeypatch.setattr(world, "look", lambda _: {"n/a": Seen("PREEMPTED", "1")})
    monkeypatch.setattr(attempt, "FIRST_LOOK", 0.01)
    monkeypatch.setattr(attempt, "LOOK", 60.0)
    monkeypatch.setattr(decide, "SOON", 0.01)
    shutil.rmtree(tmp_path / "runs/r1")
    going = Going(active, silent=silent)
    one = job.driver.attempt(going, {"a-w0": "n/a"})

    async def followed() -> list[Outcome]:
        async with asyncio.timeout(20):
            outcomes: list[Outcome] = await one.to_its_end()
            return outcomes

    outcomes = asyncio.run(followed())
    assert [(outcome.state, outcome.reason) for outcome in outcomes] == [("gone", "node a is PREEMPTED")]
    assert (one.announced, going.asked) == ("preempted", active + 1)
