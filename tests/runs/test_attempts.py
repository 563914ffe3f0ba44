"""A command that follows a run continues through all attempts of a recovery in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import pod, stand_in
from tests.runs.world import DONE, FAILED, STOPPED
from tpu_ops.cli import runs_output
from tpu_ops.cloud.remaking import Plan
from tpu_ops.runs import attempts, records, recovery
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.outcomes import KNOWS_NOTHING, Outcome, outcome_of
from tpu_ops.runs.spec import RunSpec

HOSTS = ("pod-w0", "pod-w1")
GONE = [Outcome(rank, host, "gone", reason=KNOWS_NOTHING) for rank, host in enumerate(HOSTS)]


def ended(record: dict[str, Any], attempt: int) -> list[Outcome]:
    return [outcome_of(rank, host, {**record, "attempt": attempt}) for rank, host in enumerate(HOSTS)]


class Recoverer:
    """Another process of this machine that recovers run r1; what it does next is done whenever somebody looks.

    Args:
        state_dir: Of the fleet.
    """

    def __init__(self, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state_dir, self.held = state_dir, ExitStack()
        kept = recovery.Recovery("r1", 1, Plan(()), recovery.options_of(RunSpec("r1", ("true",)), {}))
        recovery.write(state_dir, kept)
        records.write(state_dir, records.new("r1", ("pod",), ("1",), HOSTS, ("true",)))
        self.held.enter_context(recovery.lock(state_dir, "r1"))
        self.steps: Iterator[Callable[[], object]] = iter(())
        #: The newest attempt of which the workers tell.
        self.told = 1
        self.followed: list[tuple[str, int, float]] = []
        self.fleet: Any = SimpleNamespace(settings=stand_in(state_dir), workers=pod(2), unlisted=(), path="")
        monkeypatch.setattr(attempts, "LOOK", 0.01)
        monkeypatch.setattr("tpu_ops.runs.attempts.view.current", lambda _: self.fleet)
        monkeypatch.setattr(attempts, "_newest", self.newest)
        monkeypatch.setattr("tpu_ops.runs.attempts.asyncio.sleep", self.look)

    async def look(self, _: float) -> None:
        next(self.steps, lambda: pytest.fail("somebody waits for what never comes"))()

    async def newest(self, *_: object) -> int:
        return self.told

    def keep(self, **changes: Any) -> None:
        kept = replace(recovery.read(self.state_dir, "r1"), **changes)
        recovery.write(self.state_dir, kept)
        if known := records.read(self.state_dir, "r1"):
            records.write(self.state_dir, replace(known, attempt=max(1, kept.attempt)))

    def prepares(self) -> None:
        self.keep(pending=True)

    def starts(self) -> None:
        """Ask the workers for attempt 2, which they begin a moment later."""
        self.keep(attempt=2, pending=False)

    def begins(self) -> None:
        self.told = 2

    def ends(self) -> None:
        recovery.forget(self.state_dir, "r1")
        self.held.close()

    def dies(self) -> None:
        self.held.close()

    def stopped(self) -> None:
        records.close(self.state_dir, "r1", "stopped")
        self.ends()

    def follow(self, *ends: list[Outcome], word: str = "r1") -> tuple[list[Outcome], list[str]]:
        """Follow the run, whose attempts are seen to end so; return how it ended, and what was told to the caller."""
        endings, said = iter(ends), []

        async def followed(_: object, word: str, *__: object, since: float, begun: Any, **___: Any) -> Any:
            self.followed.append((word, recovery_attempt(self), since))
            begun(None, RunRef("r1", HOSTS))
            return RunRef("r1", HOSTS), next(endings), [0]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attempts, "followed", followed)
            work = attempts.to_the_last(
                self.fleet, word, None, runs_output.terminal(), since=9.0, over=lambda: said.append("over")
            )
            _, outcomes, _ = asyncio.run(work)
        assert next(endings, None) is None
        return outcomes, said


def recovery_attempt(made: Recoverer) -> int:
    known = records.read(made.state_dir, "r1")
    assert known is not None
    return known.attempt


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recoverer]:
    made = Recoverer(tmp_path, monkeypatch)
    yield made
    made.held.close()


@pytest.mark.parametrize("first", [ended(FAILED, 1), GONE], ids=["failed", "taken away"])
@pytest.mark.parametrize("word", ["r1", "pod"])
def test_the_next_attempt_is_followed_once_its_workers_know_it(
    made: Recoverer, capsys: Any, first: list[Outcome], word: str
) -> None:
    made.steps = iter([made.prepares, lambda: None, made.starts, made.begins])
    outcomes, said = made.follow(first, ended(DONE, 2), word=word)
    assert [outcome.state for outcome in outcomes] == ["succeeded"] * 2
    assert made.followed == [(word, 1, 9.0), ("r1", 2, 0.0)]
    assert said == ["over", "over"]
    err = capsys.readouterr().err
    assert err.count("a process on this machine is preparing attempt 2") == 1
    assert err.endswith("; waiting for that attempt\n")


def test_attach_while_nodes_are_brought_back_waits_for_them(made: Recoverer) -> None:
    made.prepares()
    made.steps = iter([lambda: None, made.starts, made.begins])
    outcomes, said = made.follow(ended(DONE, 2))
    assert made.followed == [("r1", 2, 0.0)]
    assert (outcomes[0].state, said) == ("succeeded", ["over"])


def test_an_attempt_that_begins_and_ends_between_two_looks_is_followed(made: Recoverer) -> None:
    def all_at_once() -> None:
        made.prepares()
        made.starts()
        made.ends()

    made.steps = iter([all_at_once])
    made.follow(ended(FAILED, 1), ended(FAILED, 2))
    assert [attempt for _, attempt, _ in made.followed] == [1, 2]


@pytest.mark.parametrize("end", ["ends", "dies"])
def test_a_run_that_nobody_starts_again_has_ended(made: Recoverer, end: str) -> None:
    made.steps = iter([getattr(made, end)])
    outcomes, _ = made.follow(ended(FAILED, 1))
    assert outcomes[0].state == "failed"


def test_a_run_that_is_stopped_while_its_nodes_are_away_was_stopped(made: Recoverer) -> None:
    made.steps = iter([made.prepares, made.stopped])
    outcomes, _ = made.follow(GONE)
    assert {outcome.state for outcome in outcomes} == {"stopped"}


@pytest.mark.parametrize("record", [DONE, STOPPED])
def test_nobody_is_waited_for_once_a_run_has_succeeded_or_was_stopped(made: Recoverer, record: dict[str, Any]) -> None:
    outcomes, _ = made.follow(ended(record, 1))
    assert len(outcomes) == 2


def test_attach_while_an_attempt_starts_follows_this_attempt(made: Recoverer) -> None:
    made.starts()
    made.steps = iter([made.begins])
    made.follow(ended(DONE, 2))
    assert made.followed == [("r1", 2, 9.0)]
