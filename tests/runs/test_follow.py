"""Following a run over connections that break, and giving up workers that the run itself has given up."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tpu_ops.cli import logs as cli_logs
from tpu_ops.errors import ExitCode, OpsError
from tpu_ops.protocol.wire import DATA, END, GAP, NOTE
from tpu_ops.runs import fetch, fold, follow
from tpu_ops.runs.control import Found, RunRef
from tpu_ops.runs.follow import Follower
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.ssh.replies import Reply
from tpu_ops.ssh.stream import Broken, Frame

RECORD = {"state": "stopped", "exit": None, "reason": "", "first": None, "attempt": 1}


def end(offset: int = 0, attempt: int = 1, state: str = "stopped") -> Frame:
    record = RECORD | {"attempt": attempt, "state": state}
    return Frame(END, offset, json.dumps({"record": record, "tail": ""}).encode())


class Second(list[Frame]):
    """What a worker sends of the run's second attempt."""


class Nothing(list[Frame]):
    """What a worker answers that has no launcher yet, or knows nothing of the run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind


class Stream:
    """Sends frames, then breaks unless the last one is the end."""

    heard_at = 0.0

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._frames = frames

    async def answer(self) -> Reply:
        if isinstance(self._frames, Nothing):
            return Reply("", {}, self._frames.kind, "it knows nothing of that")
        return Reply("", {"record": RECORD | {"attempt": 2 if isinstance(self._frames, Second) else 1}})

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


async def followed(
    workers: Workers, hosts: Sequence[str], **options: Any
) -> tuple[list[Outcome], list[str], list[str]]:
    said: list[str] = []
    lines: list[str] = []
    fanout: Any = workers
    asked: dict[str, Any] = {"shown": [0], "line": lambda _, text: lines.append(text), "say": said.append, **options}
    follower = Follower(fanout, "r1", hosts, **asked)
    return await follower.run(), said, lines


@pytest.mark.parametrize(
    ("notes", "kind"),
    [
        ([], ""),
        (["rank 1 failed", "this worker is being preempted"], ""),
        (["rank 1 (w1): maintenance of this worker's host is planned from 2026-12-01T19:00:00Z"], ""),
        (["rank 1 (w1): the host of this worker goes down for maintenance now"], "maintenance"),
        (
            [
                "rank 1 (w1): maintenance of this worker's host is under way since 2026-12-01T19:00:00Z",
                "rank 1 (w1): this worker is being preempted",
                "rank 0 (w0): the host of this worker goes down for maintenance now",
            ],
            "preempted",
        ),
    ],
)
async def test_a_follower_knows_what_notes_announce_for_now(notes: list[str], kind: str) -> None:
    workers: Any = Workers(w0=[[*(Frame(NOTE, 0, note.encode()) for note in notes), end()]])
    follower = Follower(workers, "r1", ["w0"], shown=[0], line=lambda *_: None, say=lambda _: None)
    await follower.run()
    assert follower.announced == kind


async def test_notes_and_lines_come_once_however_often_the_connection_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    first = [Frame(DATA, 0, b"one\n"), Frame(NOTE, 4, b"rank 1 failed")]
    workers = Workers(w0=[first, [Frame(DATA, 4, b"two\n"), Frame(NOTE, 8, b"another"), end(8)]])
    _, said, lines = await followed(workers, ["w0"])
    assert lines == ["one", "two"]
    assert [text for text in said if "does not answer" not in text] == ["rank 1 failed", "another"]
    assert [(asked["offset"], asked["notes"]) for asked in workers.asked] == [(0, 0), (4, 1)]


async def test_logs_without_follow_ask_only_the_shown_ranks() -> None:
    workers = Workers(w1=[[Frame(DATA, 0, b"one\n"), end(4)]])
    outcomes, said, lines = await followed(workers, ["w0", "w1"], shown=[1], live=False)
    assert [outcome.state for outcome in outcomes] == ["unknown", RECORD["state"]]
    assert (said, lines, len(workers.asked)) == ([], ["one"], 1)


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("live", [True, False])
async def test_the_beginning_of_a_line_is_shown_though_its_worker_is_given_up(
    live: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RETRY_EVERY", "RETRY_LIMIT", "ALONE_LIMIT"):
        monkeypatch.setattr(follow, name, 0.01)
    workers = Workers(w0=[[Frame(DATA, 0, b"whole\nloss 0.")], []])
    outcomes, _, lines = await asyncio.wait_for(followed(workers, ["w0"], live=live, taken=lambda _: taken), 5)
    assert [outcome.state for outcome in outcomes] == ["gone" if taken else "unreachable"]
    assert lines == ["whole", "loss 0."]


async def test_logs_without_follow_do_not_wait_for_a_deleted_node() -> None:
    outcomes, said, _ = await asyncio.wait_for(followed(Workers(w0=[[]]), ["w0"], live=False, taken=lambda _: True), 5)
    assert ([outcome.state for outcome in outcomes], said) == (["gone"], [])


async def test_a_line_whose_end_is_missing_is_not_joined_to_a_later_one() -> None:
    sent = [Frame(DATA, 0, b"whole\nloss 0."), Frame(GAP, 900, b""), Frame(DATA, 900, b"h 7\nnext\n"), end(908)]
    _, said, lines = await followed(Workers(w0=[sent]), ["w0"])
    assert lines == ["whole", "loss 0.", "h 7", "next"]
    why = "the log was rotated, or the disk could not store them"
    assert said == [f"rank 0: 887 bytes before byte 900 are not in the log on w0: {why}"]


class Unfinished(Workers):
    """Each sends its next piece of output once a part of a line was shown."""

    def __init__(self, **sent: list[list[Frame]]) -> None:
        super().__init__(**sent)
        self.parts: list[tuple[tuple[int, ...], str, bool]] = []
        self._shown = asyncio.Event()

    def part(self, ranks: Sequence[int], text: str, ended: bool) -> None:
        self.parts.append((tuple(ranks), text, ended))
        self._shown.set()
        self._shown = asyncio.Event()

    async def next_part(self, number: int) -> None:
        if len(self.parts) == number:
            await asyncio.wait_for(self._shown.wait(), 10)

    @contextlib.asynccontextmanager
    async def stream(self, host: str, action: str, values: Mapping[str, Any]) -> AsyncIterator[Stream]:
        workers = self

        class OneByOne(Stream):
            async def frames(self) -> AsyncIterator[Frame]:
                async for frame in super().frames():
                    number = len(workers.parts)
                    yield frame
                    if frame.kind == DATA:
                        await workers.next_part(number)

        async with super().stream(host, action, values) as stream:
            yield OneByOne(stream._frames)


async def test_a_line_that_is_not_finished_is_shown_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "UNFINISHED", 0.0)
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    first = [Frame(DATA, 0, b"."), Frame(DATA, 1, b".\xc3"), Frame(DATA, 3, b"\xa4\n")]
    second = [Frame(DATA, 5, b"whole\n."), Frame(DATA, 12, b"."), end(13)]
    workers = Unfinished(w0=[first, second])
    _, _, lines = await followed(workers, ["w0"], part=workers.part)
    told = [(".", False), (".", False), ("ä", True), (".", False), (".", False), ("", True)]
    assert (workers.parts, lines) == ([((0,), *part) for part in told], ["whole"])


async def test_unfinished_lines_that_are_equal_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "UNFINISHED", 0.0)
    frames = [Frame(DATA, 0, b"..."), Frame(DATA, 3, b"\n"), end(4)]
    workers = Unfinished(w0=[frames], w1=[frames])
    _, _, lines = await followed(workers, ["w0", "w1"], shown=[0, 1], part=workers.part)
    assert (workers.parts, lines) == ([((0, 1), "...", False), ((0, 1), "", True)], [])


async def test_silent_workers_are_given_up_once_all_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(follow, "ALONE_LIMIT", 0.1)
    workers = Workers(w0=[[end()]], w1=[[]], w2=[[]])
    outcomes, _, _ = await followed(workers, ["w0", "w1", "w2"])
    assert [outcome.state for outcome in outcomes] == ["stopped", "unreachable", "unreachable"]


async def test_if_the_end_is_not_awaited_a_silent_worker_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(follow, "ALONE_LIMIT", 0.1)
    workers = Workers(w0=[[] for _ in range(1000)])
    outcomes, said, _ = await followed(workers, ["w0"], live=False)
    assert [outcome.state for outcome in outcomes] == ["unreachable"]
    assert said == ["rank 0 (w0) does not answer: the connection ended; retrying for 0 s"]


async def test_a_worker_whose_node_was_taken_away_for_good_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(follow, "ALONE_LIMIT", 60.0)
    workers, gone = Workers(w0=[[]], w1=[[], [], [end()]]), ["w0"]
    outcomes, said, _ = await followed(workers, ["w0", "w1"], taken=gone.__contains__)
    assert [outcome.state for outcome in outcomes] == ["gone", "stopped"]
    assert "rank 0 (w0) is gone: the connection ended" in said
    assert "rank 1 (w1) does not answer: the connection ended; retrying for 120 s" in said


async def test_a_silent_worker_is_waited_for_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(follow, "ALONE_LIMIT", 0.0)
    workers = Workers(w0=[[], [], [], [end()]])
    outcomes, _, _ = await followed(workers, ["w0"])
    assert [outcome.state for outcome in outcomes] == ["stopped"]


class Beside(Stream):
    """Sends frames once a condition holds."""

    def __init__(self, frames: Sequence[Frame], ready: asyncio.Event) -> None:
        super().__init__(frames)
        self._ready = ready

    async def frames(self) -> AsyncIterator[Frame]:
        await self._ready.wait()
        async for frame in super().frames():
            yield frame


async def test_a_silent_rank_is_not_given_up_while_another_one_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(follow, "RETRY_LIMIT", 0.05)
    back = asyncio.Event()

    class OneIsAway(Workers):
        @contextlib.asynccontextmanager
        async def stream(self, host: str, action: str, values: Mapping[str, Any]) -> AsyncIterator[Stream]:
            if host == "w1":
                yield Beside([end(state="succeeded")], back)
                return
            async with super().stream(host, action, values) as stream:
                if not self._sent["w0"][1:]:
                    back.set()
                yield stream

    lines = [Frame(DATA, 0, b"one\n"), end(4, state="succeeded")]
    workers = OneIsAway(w0=[*([] for _ in range(30)), lines], w1=[[]])
    outcomes, said, printed = await followed(workers, ["w0", "w1"])
    assert [outcome.state for outcome in outcomes] == ["succeeded", "succeeded"]
    assert printed == ["one"]
    assert said == [
        "rank 0 (w0) does not answer: the connection ended; retrying for 0 s",
        "rank 0 (w0) still does not answer; retrying while others are followed",
    ]


async def test_ranks_that_were_silent_before_are_not_given_up_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(follow, "RETRY_LIMIT", 0.5)
    monkeypatch.setattr(follow, "ALONE_LIMIT", 0.0)
    cut, loop = asyncio.Event(), asyncio.get_running_loop()

    class AllAway(Workers):
        @contextlib.asynccontextmanager
        async def stream(self, host: str, action: str, values: Mapping[str, Any]) -> AsyncIterator[Stream]:
            yield Beside([], cut) if host == "w1" else Stream([])

    began = loop.time()
    loop.call_later(1.0, cut.set)
    outcomes, _, _ = await followed(AllAway(w0=[[]], w1=[[]]), ["w0", "w1"])
    assert [outcome.state for outcome in outcomes] == ["unreachable", "unreachable"]
    # Its timers may fire by their resolution too early.
    assert loop.time() - began >= 1.49


@pytest.mark.parametrize("shown", [[0], [0, 1]], ids=["one rank", "lines that wait for other ranks"])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, "No space left on device")], ids=repr)
async def test_lines_that_nobody_takes_end_it_with_that_error(
    monkeypatch: pytest.MonkeyPatch, shown: list[int], error: OSError
) -> None:
    monkeypatch.setattr(fold, "WINDOW", 0.0)
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)

    def line(*_: object) -> None:
        raise error

    workers = Workers(w0=[[Frame(DATA, 0, b"one\n")], []], w1=[[]])
    with pytest.raises(type(error), check=lambda raised: raised is error):
        await asyncio.wait_for(followed(workers, ["w0", "w1"], shown=shown, line=line), 10)


async def test_logs_that_cannot_be_written_are_an_error_that_names_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1" / "rank-0.log.part").symlink_to("/dev/full")
    fanout: Any = Workers(w0=[[Frame(DATA, 0, b"x" * 2**20), end(2**20)]])
    with pytest.raises(OpsError, match="No space left") as raised:
        await fetch.logs(fanout, RunRef("r1", ("w0",)), tmp_path, taken=lambda _: False)
    assert raised.value.where == str(tmp_path / "r1")


def test_of_a_run_of_which_no_log_came_no_directory_is_left(tmp_path: Path) -> None:
    fanout: Any = Workers(w0=[[]])
    copied = asyncio.run(fetch.logs(fanout, RunRef("r1", ("w0",)), tmp_path, taken=lambda _: True))
    assert [outcome.state for outcome in copied.outcomes] == ["gone"]
    assert list(tmp_path.iterdir()) == []


DENIED = Reply("", {}, "denied", "the run belongs to ada")


class Partly(Workers):
    """The same, of which one refuses: at once, or once its connection has broken."""

    @contextlib.asynccontextmanager
    async def stream(self, host: str, action: str, values: Mapping[str, Any]) -> AsyncIterator[Any]:
        async with super().stream(host, action, values) as stream:
            refused = SimpleNamespace(answer=AsyncMock(return_value=DENIED))
            yield stream if stream._frames else refused


@pytest.mark.parametrize("live", [[], ["--follow"]], ids=["what there is", "to its end"])
@pytest.mark.parametrize(
    ("fetched", "begins"), [(True, True), (True, False), (False, True)], ids=["fetched in part", "fetched", "shown"]
)
def test_a_rank_whose_log_a_worker_does_not_give_is_said(
    fetched: bool, begins: bool, live: list[str], tmp_path: Path, capsys: Any
) -> None:
    first = [[Frame(DATA, 0, b"one\n")]] if begins else []
    fanout = Partly(w0=[[Frame(DATA, 0, b"zero\n"), end(5, state="succeeded")]], w1=[*first, []])
    parser = argparse.ArgumentParser()
    cli_logs.add_arguments(parser)
    wanted = ["--fetch", str(tmp_path)] if fetched else ["--rank", "all"]
    found = AsyncMock(return_value=Found([RunRef("r1", ("w0", "w1"))]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, "RETRY_EVERY", 0.01)
        patch.setattr("tpu_ops.cli.logs.config.load", lambda _: None)
        fleet = SimpleNamespace(settings=SimpleNamespace(state_dir=tmp_path))
        patch.setattr("tpu_ops.cli.logs.view.current", lambda _: fleet)
        patch.setattr("tpu_ops.cli.logs.contact.fanout", lambda _: fanout)
        patch.setattr("tpu_ops.cli.logs.control.find", found)
        code = cli_logs.run(parser.parse_args(["r1", *wanted, *live]))
    part = tmp_path / "r1" / "rank-1.log.part"
    kept = f"; {part} has its earlier output" if fetched and begins else ""
    said = capsys.readouterr().err.splitlines()
    assert code == ExitCode.UNREACHABLE
    assert f"warning: rank 1 (w1): the run belongs to ada{kept}" in said
    assert (f"logs of 1 rank are in {tmp_path / 'r1'}" in said) is fetched
    further = ["run r1: unknown", "  nodes:  tpu_ops list", "  follow: tpu_ops attach r1", "  stop:   tpu_ops stop r1"]
    assert (said[-4:] == further) is bool(live)
    if fetched:
        names = ["rank-0.log", *(["rank-1.log.part"] if begins else [])]
        assert sorted(path.name for path in part.parent.iterdir()) == names


async def test_the_next_attempt_is_followed_from_its_beginning_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    again = Second([Frame(NOTE, 0, b"note 2"), Frame(DATA, 0, b"three\n"), end(6, attempt=2)])
    workers = Workers(
        w0=[[Frame(DATA, 0, b"one\ntw"), Frame(NOTE, 6, b"note 1")], again],
        w1=[[end()], Second([end(attempt=2)])],
    )
    outcomes, said, lines = await followed(workers, ["w0", "w1"])
    assert lines == ["one", "tw", "three"]
    assert [text for text in said if "does not answer" not in text] == [
        "note 1",
        "run r1: attempt 2 has begun; its output follows from the beginning",
        "note 2",
    ]
    assert (workers.asked[-1]["offset"], workers.asked[-1]["notes"]) == (0, 0)
    assert [outcome.record and outcome.record["attempt"] for outcome in outcomes] == [2, 2]


@pytest.mark.parametrize("kind", ["missing", "no-launcher"])
async def test_a_recreated_node_is_followed_in_its_own_attempt(kind: str) -> None:
    second = Second([Frame(DATA, 0, b"three\n"), end(6, attempt=2)])
    outcomes, _, lines = await followed(Workers(w0=[second], w1=[Nothing(kind), second]), ["w0", "w1"])
    assert [outcome.record and outcome.record["attempt"] for outcome in outcomes] == [2, 2]
    assert lines == ["three"]


async def test_a_copy_of_a_log_never_goes_on_with_that_of_another_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    copied = []
    workers = Workers(w0=[[Frame(DATA, 0, b"one\n")], Second([Frame(DATA, 0, b"two\n"), end(4, attempt=2)])])
    outcomes, _, _ = await followed(workers, ["w0"], data=lambda *written: copied.append(written))
    assert copied == [(0, 0, b"one\n")]
    assert (outcomes[0].state, outcomes[0].reason) == ("gone", "attempt 2 has begun on this worker")
