"""Following a run over connections that break, and giving up workers that the run itself has given up."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from tpu_ops.remote.replies import Reply
from tpu_ops.remote.stream import Broken
from tpu_ops.remote.wire import DATA, END, NOTE, Frame
from tpu_ops.runs import follow
from tpu_ops.runs.follow import Follower

RECORD = {"state": "stopped", "exit": None, "reason": "", "first": None}


def end(offset: int = 0) -> Frame:
    return Frame(END, offset, json.dumps({"record": RECORD, "tail": ""}).encode())


class Stream:
    """Sends frames, then breaks unless the last one is the end."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._frames = frames

    async def answer(self) -> Reply:
        return Reply("", {})

    async def frames(self) -> AsyncIterator[Frame]:
        for frame in self._frames:
            yield frame
        if not self._frames or self._frames[-1].kind != END:
            raise Broken("the connection ended")


class Masters:
    async def drop(self, host: str) -> None:
        """Nothing is kept."""


class Workers:
    """Stands for the workers: what each sends over its first connection, its second, and all later ones."""

    masters = Masters()

    def __init__(self, **sent: list[list[Frame]]) -> None:
        self._sent = sent
        self.asked: list[Mapping[str, Any]] = []

    @contextlib.asynccontextmanager
    async def stream(self, host: str, action: str, values: Mapping[str, Any]) -> AsyncIterator[Stream]:
        assert action == "follow"
        self.asked.append(values)
        connections = self._sent[host]
        yield Stream(connections.pop(0) if len(connections) > 1 else connections[0])


async def followed(workers: Workers, hosts: Sequence[str]) -> tuple[list[follow.Outcome], list[str], list[str]]:
    said: list[str] = []
    lines: list[str] = []
    fanout: Any = workers
    follower = Follower(fanout, "r1", hosts, shown=[0], line=lambda _, text: lines.append(text), say=said.append)
    return await follower.run(), said, lines


async def test_notes_and_lines_come_once_however_often_the_connection_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    first = [Frame(DATA, 0, b"one\n"), Frame(NOTE, 4, b"rank 1 failed")]
    workers = Workers(w0=[first, [Frame(DATA, 4, b"two\n"), Frame(NOTE, 8, b"another"), end(8)]])
    _, said, lines = await followed(workers, ["w0"])
    assert lines == ["one", "two"]
    assert [text for text in said if "does not answer" not in text] == ["rank 1 failed", "another"]
    assert [(asked["offset"], asked["notes"]) for asked in workers.asked] == [(0, 0), (4, 1)]


async def test_silent_workers_are_given_up_once_all_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(follow, "ALONE_LIMIT", 0.1)
    workers = Workers(w0=[[end()]], w1=[[]], w2=[[]])
    outcomes, _, _ = await followed(workers, ["w0", "w1", "w2"])
    assert [outcome.state for outcome in outcomes] == ["stopped", "unknown", "unknown"]


async def test_a_silent_worker_is_waited_for_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(follow, "ALONE_LIMIT", 0.0)
    workers = Workers(w0=[[], [], [], [end()]])
    outcomes, _, _ = await followed(workers, ["w0"])
    assert [outcome.state for outcome in outcomes] == ["stopped"]
