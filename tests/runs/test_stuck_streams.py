"""Silent streams: the run has ended on their workers, or the workers send nothing more."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.runs.test_follow import RECORD, Second, Stream, Workers, end, followed
from tpu_ops.cli import logs as cli_logs
from tpu_ops.errors import ExitCode
from tpu_ops.protocol.wire import DATA, END
from tpu_ops.runs import follow, stuck_streams
from tpu_ops.runs.control import Found, RunRef
from tpu_ops.ssh.masters import Unreachable
from tpu_ops.ssh.replies import Reply
from tpu_ops.ssh.stream import Frame

ONE = Frame(DATA, 0, b"one\n")
SILENT, DENIED, LACKING = "no answer", "denied", "too many open files"
CUT = "rank 1 (w1): the rank's log could not be read to its end: the worker stopped sending the log"


class Standing(Stream):
    """Sends frames, its end once it is let go, and does not break."""

    def __init__(self, frames: Sequence[Frame], go: asyncio.Event) -> None:
        super().__init__(frames)
        self._go = go

    async def frames(self) -> AsyncIterator[Frame]:
        for frame in self._frames:
            if frame.kind == END:
                await self._go.wait()
            # As between two frames of a connection: others have their turn.
            await asyncio.sleep(0)
            yield frame
        await asyncio.Event().wait()


class Mute(Workers):
    """The same, whose streams stand.

    Args:
        told: What each look at a worker finds, the last one again and again: the state of its rank, the number of a
            later attempt that is on, that it does not answer, that it refuses to, or that it cannot be asked.
        late: Whether the ends come with the last look only.
    """

    def __init__(self, *told: str | int, late: bool = False, **sent: list[list[Frame]]) -> None:
        super().__init__(**sent)
        self._told = list(told)
        self.looks: list[str] = []
        self._go = asyncio.Event()
        if not late:
            self._go.set()

    async def call(self, requests: Mapping[str, Any], action: str, **_: Any) -> dict[str, Reply]:
        (host,) = requests
        assert (action, requests[host]) == ("status", {"run_id": "r1"})
        self.looks.append(host)
        told = self._told.pop(0) if self._told[1:] else self._told[0]
        if not self._told[1:] and not self._go.is_set():
            self._go.set()
            # What comes meanwhile is read before the answer is.
            await asyncio.sleep(0.05)
        if told == LACKING:
            raise OSError(LACKING)
        if told in (SILENT, DENIED):
            return {host: Reply(host, {}, "timeout" if told == SILENT else "denied", str(told))}
        record = {"attempt": told, "state": "running"} if isinstance(told, int) else {"attempt": 1, "state": told}
        return {host: Reply(host, {"record": RECORD | record})}

    @contextlib.asynccontextmanager
    async def stream(self, host: str, action: str, values: Mapping[str, Any]) -> AsyncIterator[Any]:
        async with super().stream(host, action, values) as stream:
            if not stream._frames:
                raise Unreachable("no route to host")
            yield Standing(stream._frames, self._go if host == "w1" else self._set())

    @staticmethod
    def _set() -> asyncio.Event:
        event = asyncio.Event()
        event.set()
        return event


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuck_streams, "AFTER", 0.02)
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(follow, "ALONE_LIMIT", 0.1)


@pytest.mark.parametrize(
    ("told", "looks"),
    [
        (["succeeded"], 2),
        # One look may come just before the end does.
        (["running", "succeeded", "running", "succeeded"], 5),
        ([SILENT, "succeeded", SILENT, "succeeded"], 5),
    ],
)
async def test_a_rank_with_a_silent_stream_ends_after_two_equal_reports(told: list[str], looks: int) -> None:
    workers = Mute(*told, w0=[[end()]], w1=[[ONE]])
    outcomes, said, lines = await asyncio.wait_for(followed(workers, ["w0", "w1"], shown=[1]), 20)
    assert [(outcome.state, outcome.cut) for outcome in outcomes] == [("stopped", False), ("succeeded", True)]
    assert (said, lines, workers.looks) == ([CUT], ["one"], ["w1"] * looks)


async def test_a_rank_that_is_only_quiet_is_followed_to_its_end() -> None:
    """The rank ends when its worker reports the end for the second time."""
    sent = [ONE, end(4, state="succeeded")]
    workers = Mute("running", *["succeeded"] * 3, late=True, w0=[[end()]], w1=[sent])
    outcomes, said, _ = await asyncio.wait_for(followed(workers, ["w0", "w1"]), 20)
    assert [(outcome.state, outcome.cut) for outcome in outcomes] == [("stopped", False), ("succeeded", False)]
    assert (said, len(workers.looks)) == ([], 3)


@pytest.mark.parametrize("late", [0.01, 60.0], ids=["what is late by little", "what is late by much"])
async def test_a_rank_with_unread_output_does_not_count_as_silent(monkeypatch: pytest.MonkeyPatch, late: float) -> None:
    """A blocked pager stops the whole process, which then reads no input."""
    monkeypatch.setattr(stuck_streams, "LATE", late)
    frames = [Frame(DATA, 4 * number, b"one\n") for number in range(12)]
    workers = Mute("succeeded", w0=[[*frames, end(48, state="succeeded")]])
    read: list[str] = []

    def line(_: Sequence[int], text: str) -> None:
        time.sleep(3 * stuck_streams.AFTER)  # stands still as a pager does, longer than a stream may be mute
        read.append(text)

    outcomes, said, _ = await asyncio.wait_for(followed(workers, ["w0"], line=line), 20)
    assert (outcomes[0].cut, len(read), said) == (False, 12, [])


@pytest.mark.parametrize("told", [SILENT, DENIED, LACKING])
async def test_a_worker_that_tells_nothing_more_at_all_is_one_that_does_not_answer(told: str) -> None:
    workers = Mute(told, w0=[[end()]], w1=[[ONE], []])
    outcomes, said, _ = await asyncio.wait_for(followed(workers, ["w0", "w1"]), 20)
    assert [outcome.state for outcome in outcomes] == ["stopped", "unreachable"]
    assert said == [f"rank 1 (w1) does not answer: {told}; retrying for 120 s"]


async def test_a_silent_stream_is_reopened_for_the_next_attempt() -> None:
    again = Second([Frame(DATA, 0, b"two\n"), end(4, attempt=2)])
    workers = Mute(2, w0=[[end()], Second([end(attempt=2)])], w1=[[ONE], again])
    outcomes, _, lines = await asyncio.wait_for(followed(workers, ["w0", "w1"], shown=[1]), 20)
    assert [outcome.record and outcome.record["attempt"] for outcome in outcomes] == [2, 2]
    assert lines == ["one", "two"]


@pytest.mark.parametrize(("hosts", "live"), [(1, True), (2, False)], ids=["one worker", "what there is"])
async def test_a_silent_rank_without_others_to_wait_for_is_asked_as_well(hosts: int, live: bool) -> None:
    names = [f"w{number}" for number in range(hosts)]
    sent: Any = {name: [[ONE]] for name in names}
    workers = Mute("succeeded" if live else "running", **sent)
    outcomes, *_ = await asyncio.wait_for(followed(workers, names, live=live, shown=range(hosts)), 20)
    assert [outcome.cut for outcome in outcomes] == [True] * hosts


async def test_ranks_that_are_all_quiet_are_asked_for_nothing() -> None:
    workers = Mute("running", w0=[[ONE]], w1=[[ONE]])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(followed(workers, ["w0", "w1"]), 0.3)
    assert workers.looks == []


@pytest.mark.parametrize("live", [[], ["--follow"]], ids=["what there is", "to its end"])
def test_a_log_that_could_not_be_read_to_its_end_is_copied_as_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, live: list[str]
) -> None:
    fleet = SimpleNamespace(settings=SimpleNamespace(state_dir=tmp_path))
    fanout = Mute("succeeded", w0=[[Frame(DATA, 0, b"zero\n"), end(5, state="succeeded")]], w1=[[ONE]])
    monkeypatch.setattr("tpu_ops.cli.logs.config.load", lambda _: None)
    monkeypatch.setattr("tpu_ops.cli.logs.view.current", lambda _: fleet)
    monkeypatch.setattr("tpu_ops.cli.logs.contact.fanout", lambda _: fanout)
    found = AsyncMock(return_value=Found([RunRef("r1", ("w0", "w1"))]))
    monkeypatch.setattr("tpu_ops.cli.logs.control.find", found)
    parser = argparse.ArgumentParser()
    cli_logs.add_arguments(parser)
    assert cli_logs.run(parser.parse_args(["r1", "--fetch", str(tmp_path), *live])) == ExitCode.UNREACHABLE
    part, said = tmp_path / "r1" / "rank-1.log.part", capsys.readouterr().err.splitlines()
    assert (part.read_text(), sorted(path.name for path in part.parent.iterdir())) == (
        "one\n",
        ["rank-0.log", "rank-1.log.part"],
    )
    assert f"warning: rank 1 (w1): its log is incomplete; {part} has its earlier output" in said
    assert f"logs of 1 rank are in {tmp_path / 'r1'}" in said
