"""Ctrl-C, SIGTERM and SIGHUP at a run that is followed, as real signals."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.runs.test_parts import stand_in
from tpu_ops.cli import attach, foreground, interrupts
from tpu_ops.cloud.remaking import Plan
from tpu_ops.errors import ExitCode, OpsError
from tpu_ops.runs import records, recovery, spec
from tpu_ops.runs.control import RunRef, Stopped
from tpu_ops.runs.outcomes import Outcome

RUN = RunRef("r1", ("pod-w0",))
FANOUT: Any = object()
SETTINGS = stand_in(Path())


#: What ends a process that nobody sits before.
ENDS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)


def press(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


@pytest.fixture(autouse=True)
def _as_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take signals, even where these tests run in the background of a shell; a second Ctrl-C always comes in time."""
    taken: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in taken.items()}
    monkeypatch.setattr(foreground, "AGAIN", 30.0)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Stop:
    """Stands for what stops a run; `asked` has the runs. While it works, Ctrl-C is pressed if `pressed` says so."""

    def __init__(self, seconds: float = 0.0, *, pressed: bool = False) -> None:
        self.asked: list[str] = []
        self._seconds, self._pressed = seconds, pressed

    async def __call__(self, fanout: object, run: RunRef) -> Stopped:
        assert fanout is FANOUT
        self.asked.append(run.run_id)
        if self._pressed:
            press()
        await asyncio.sleep(self._seconds)
        return Stopped((Outcome(0, "pod-w0", "stopped", {"signal": 15}, "stopped by ada"),), already=False)


async def followed(work: Any, *, on: bool = True, left: Callable[[], None] = lambda: None) -> int:
    return await foreground.followed(work, lambda: (FANOUT, RUN) if on else None, left, as_json=False)


async def pressed(*seconds: float, cleanup: float = 0.0, then: int = signal.SIGINT) -> int:
    """Follow a run that never ends, and press Ctrl-C after so many seconds, `then` the last time; it takes a while."""
    for at in seconds:
        asyncio.get_running_loop().call_later(at, press, then if at == seconds[-1] else signal.SIGINT)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(cleanup)
    return 0


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Stop:
    found = Stop()
    monkeypatch.setattr("tpu_ops.recovery.termination.end", found)
    return found


async def test_a_run_that_nobody_leaves_ends_as_it_does() -> None:
    async def work() -> int:
        return 7

    assert await followed(work()) == 7


async def test_the_first_ctrl_c_detaches_and_announces_that_a_second_stops(
    stop: Stop, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreground, "AGAIN", 0.2)
    said: list[str] = []
    assert await followed(pressed(0), left=lambda: said.append("left")) == ExitCode.INTERRUPTED
    assert (said, stop.asked) == (["left"], [])
    assert "Ctrl-C again within 0.2 s stops the run" in capsys.readouterr().err


@pytest.mark.parametrize(("second", "cleanup"), [(0.1, 0.0), (0.01, 0.3)], ids=["soon after", "while the first works"])
async def test_a_second_ctrl_c_stops_the_run_and_tells_how_it_ended(
    stop: Stop, capsys: Any, second: float, cleanup: float
) -> None:
    assert await followed(pressed(0, second, cleanup=cleanup)) == ExitCode.INTERRUPTED
    assert stop.asked == ["r1"]
    assert "stopped by ada" in capsys.readouterr().out


async def test_a_third_ctrl_c_does_not_wait_for_the_stop(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    slow = Stop(60, pressed=True)
    monkeypatch.setattr("tpu_ops.recovery.termination.end", slow)
    assert await followed(pressed(0, 0.05)) == ExitCode.INTERRUPTED
    assert slow.asked == ["r1"]
    assert "to make sure that every worker was told: `tpu_ops stop r1`" in capsys.readouterr().err


def test_a_stop_whose_outcome_nobody_reads_any_more_was_one(stop: Stop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C has also ended the reader of the output."""
    said: list[str] = []
    monkeypatch.setattr("tpu_ops.cli.output._result", Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr("tpu_ops.cli.output.give_up", lambda: said.append("given up"))
    code = foreground.to_its_end(
        pressed(0, 0.1),
        lambda: (FANOUT, RUN),
        lambda: said.append("left"),
        lambda outcomes: said.extend(outcome.state for outcome in outcomes),
        as_json=False,
    )
    assert (code, stop.asked) == (ExitCode.INTERRUPTED, ["r1"])
    assert said == ["left", "given up", "stopped"]


async def test_three_quick_ctrl_c_stop_the_run(stop: Stop, capsys: Any) -> None:
    assert await followed(pressed(0, 0.01, 0.02, cleanup=0.1)) == ExitCode.INTERRUPTED
    assert stop.asked == ["r1"]
    assert "stopped by ada" in capsys.readouterr().out


async def test_before_a_run_is_on_a_second_ctrl_c_gives_up_at_once(stop: Stop) -> None:
    assert await followed(pressed(0, 0.05, cleanup=60), on=False) == ExitCode.INTERRUPTED
    assert stop.asked == []


@ENDS
@pytest.mark.parametrize("before", [(), (0.0,)], ids=["first", "after Ctrl-C"])
@pytest.mark.parametrize("is_ignored", [False, True], ids=["heard", "ignored"])
async def test_a_signal_leaves_the_run_alone_and_waits_for_nobody(
    stop: Stop, capsys: Any, number: int, before: tuple[float, ...], is_ignored: bool
) -> None:
    if is_ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        before = ()
    said: list[str] = []
    leaves = followed(pressed(*before, 0.1, then=number), left=lambda: said.append("left"))
    assert await asyncio.wait_for(leaves, 20) == ExitCode.INTERRUPTED
    assert (said, stop.asked) == (["left"], [])
    assert ("Ctrl-C again" in capsys.readouterr().err) is bool(before)
    assert signal.getsignal(number) is signal.SIG_DFL


@ENDS
async def test_a_signal_does_not_wait_for_a_stop(monkeypatch: pytest.MonkeyPatch, capsys: Any, number: int) -> None:
    slow = Stop(60)
    monkeypatch.setattr("tpu_ops.recovery.termination.end", slow)
    leaves = followed(pressed(0, 0.05, 0.3, then=number))
    assert await asyncio.wait_for(leaves, 20) == ExitCode.INTERRUPTED
    assert slow.asked == ["r1"]
    assert "to make sure that every worker was told: `tpu_ops stop r1`" in capsys.readouterr().err


@pytest.mark.parametrize(("on", "together", "ends"), [(True, 0.0, True), (False, 0.0, True), (True, 60.0, False)])
async def test_simultaneous_signals_count_once_and_a_later_one_does_not_wait(
    stop: Stop, monkeypatch: pytest.MonkeyPatch, on: bool, together: float, ends: bool
) -> None:
    monkeypatch.setattr(interrupts, "TOGETHER", together)
    asyncio.get_running_loop().call_later(0.1, press, signal.SIGHUP)
    leaves = asyncio.ensure_future(followed(pressed(0, then=signal.SIGTERM, cleanup=0.5 if together else 60), on=on))
    begun = asyncio.get_running_loop().time()
    assert await asyncio.wait_for(leaves, 20) == ExitCode.INTERRUPTED
    # Where it ends what the first is ending, that would take longer than anybody waits here.
    assert ends or asyncio.get_running_loop().time() - begun >= 0.5
    assert stop.asked == []


@ENDS
async def test_an_ignored_signal_stays_ignored(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)

    async def work() -> int:
        press(number)
        await asyncio.sleep(0)
        return 7

    try:
        assert await followed(work()) == 7
        with interrupts.ended_by_signals():
            press(number)
    finally:
        signal.signal(number, before)


@ENDS
def test_a_signal_ends_what_blocks_as_ctrl_c_does(number: int) -> None:
    def blocks() -> None:
        press(number)
        raise AssertionError("it goes on")

    with pytest.raises(KeyboardInterrupt), interrupts.ended_by_signals():
        blocks()


@ENDS
@pytest.mark.parametrize("cleanup", [0.1, 60.0], ids=["once", "again"])
def test_a_signal_lets_what_is_awaited_clean_up_unless_it_comes_again(
    monkeypatch: pytest.MonkeyPatch, number: int, cleanup: float
) -> None:
    """A task ends the tasks that it waits for, so that one that just starts a process can wait for it."""
    monkeypatch.setattr(interrupts, "TOGETHER", 0.0)
    said: list[str] = []

    async def started() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            said.append("cancelled")
            raise

    async def work() -> None:
        below = asyncio.ensure_future(started())
        await asyncio.sleep(0)
        press(number)
        try:
            await asyncio.Event().wait()
        finally:
            assert said == []
            if cleanup > 1:
                press(number)
            await asyncio.sleep(cleanup)
            below.cancel()
            said.append("cleaned up")

    with pytest.raises(KeyboardInterrupt), interrupts.ended_by_signals():
        asyncio.run(work())
    assert said == (["cleaned up", "cancelled"] if cleanup < 1 else ["cancelled"])


async def test_an_ignored_ctrl_c_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def work() -> int:
        press()
        await asyncio.sleep(0)
        return 7

    assert await followed(work()) == 7


@pytest.mark.parametrize("error", [OpsError("the disk is full"), OSError("no more processes")], ids=repr)
@pytest.mark.parametrize("on", [True, False])
def test_an_error_while_a_run_is_on_says_that_it_goes_on(error: Exception, on: bool) -> None:
    said: list[str] = []

    async def work() -> int:
        raise error

    with pytest.raises(type(error), check=lambda raised: raised is error):
        foreground.to_its_end(
            work(),
            lambda: (FANOUT, RUN) if on else None,
            lambda: said.append("left"),
            as_json=False,
        )
    assert said == (["left"] if on else [])


def test_a_closed_output_detaches_from_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("tpu_ops.cli.output.give_up", lambda: said.append("given up"))

    async def work() -> int:
        raise BrokenPipeError

    code = foreground.to_its_end(work(), lambda: (FANOUT, RUN), lambda: said.append("left"), as_json=False)
    assert (code, said) == (ExitCode.INTERRUPTED, ["given up", "left"])
    with pytest.raises(BrokenPipeError):
        foreground.to_its_end(work(), lambda: None, lambda: None, as_json=False)


@pytest.mark.parametrize("over", [True, False])
def test_of_a_run_that_has_ended_nobody_says_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, over: bool
) -> None:
    full = OpsError("the result cannot be written")

    async def found(
        *_: Any, begun: Callable[[object, RunRef], None], **__: Any
    ) -> tuple[RunRef, list[Outcome], list[int]]:
        begun(FANOUT, RUN)
        if not over:
            raise full
        return RUN, [], []

    monkeypatch.setattr("tpu_ops.cli.attach.config.load", lambda _: SETTINGS)
    monkeypatch.setattr("tpu_ops.cli.attach.view.current", lambda s: SimpleNamespace(workers=(), settings=s))
    monkeypatch.setattr("tpu_ops.runs.attempts.followed", found)
    monkeypatch.setattr("tpu_ops.cli.attach.runs_output.finish", Mock(side_effect=full))
    parser = argparse.ArgumentParser()
    attach.add_arguments(parser)
    with pytest.raises(OpsError, match="cannot be written"):
        attach.run(parser.parse_args(["r1"]))
    assert ("continues" in capsys.readouterr().err) is not over


def test_a_run_stopped_from_another_shell_is_not_kept_to_be_started_again(
    stop: Stop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(*_: Any, begun: Callable[[object, RunRef], None], **__: Any) -> None:
        begun(FANOUT, RUN)
        await pressed(0, 0.05)

    records.write(tmp_path, records.new("r1", ("pod",), ("1",), RUN.hosts, ("true",)))
    kept = recovery.Recovery("r1", 1, Plan(()), recovery.options_of(spec.RunSpec("r1", ("true",)), {}))
    recovery.write(tmp_path, kept)
    monkeypatch.setattr("tpu_ops.cli.attach.config.load", lambda _: stand_in(tmp_path))
    monkeypatch.setattr("tpu_ops.cli.attach.view.current", lambda s: SimpleNamespace(workers=(), settings=s))
    monkeypatch.setattr("tpu_ops.runs.attempts.followed", found)
    parser = argparse.ArgumentParser()
    attach.add_arguments(parser)
    assert attach.run(parser.parse_args(["r1"])) == ExitCode.INTERRUPTED
    assert stop.asked == ["r1"]
    assert not (tmp_path / "runs/r1/recovery.json").exists()


def test_a_detached_user_is_told_how_to_follow_and_stop_the_run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(foreground, "AGAIN", 0.2)

    async def found(*_: Any, begun: Callable[[object, RunRef], None], on: Callable[[], None], **__: Any) -> None:
        begun(FANOUT, RUN)
        on()
        on()
        press()
        await asyncio.Event().wait()

    monkeypatch.setattr("tpu_ops.cli.attach.config.load", lambda _: SETTINGS)
    monkeypatch.setattr("tpu_ops.cli.attach.view.current", lambda s: SimpleNamespace(workers=(), settings=s))
    monkeypatch.setattr("tpu_ops.runs.attempts.followed", found)
    parser = argparse.ArgumentParser()
    attach.add_arguments(parser)
    assert attach.run(parser.parse_args(["r1"])) == ExitCode.INTERRUPTED
    said = ["detached: run r1 continues", "  follow: tpu_ops attach r1", "  stop:   tpu_ops stop r1"]
    assert capsys.readouterr().err.splitlines()[2:5] == said
