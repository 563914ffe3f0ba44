"""A recovery that is taken over, overtaken by another one, or ended in an uncertain state."""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs.test_parts import stand_in
from tests.runs.world import DONE, FAILED, PREEMPTED, World, keep
from tpu_ops import files
from tpu_ops.cli import attach, interrupts
from tpu_ops.errors import ExitCode, HostError, UnreachableError, UsageError
from tpu_ops.runs import launch, records, recovery


def later(monkeypatch: pytest.MonkeyPatch, world: World, name: str, then: Callable[[], None]) -> None:
    """Let something happen whenever the world does one thing, after that."""
    before = getattr(world, name)

    def both(*args: Any, **more: Any) -> Any:
        found = before(*args, **more)
        then()
        return found

    monkeypatch.setattr(world, name, both)


def test_faults_caused_by_a_lost_new_node_count_as_its_loss(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ansible knows no such worker any more, for example, and does not begin."""
    world, faults = World(PREEMPTED, DONE), [UsageError("Ansible did not run the playbook")]

    def lost() -> None:
        if faults:
            world.state = "PREEMPTED"
            raise faults.pop()

    later(monkeypatch, world, "configure", lost)
    code, _, job = run(world)
    assert (code, job.kept.attempt, job.kept.preemptions) == (0, 2, 2)


@pytest.mark.parametrize("is_made", [True, False])
def test_an_error_of_a_new_node_is_retried_and_of_an_old_one_raised(
    run: Any, monkeypatch: pytest.MonkeyPatch, is_made: bool
) -> None:
    """If no node is new, the user is still at the terminal: fail at once."""
    world, faults = World(None, DONE), [HostError("apt is locked by the first boot")]
    world.state = "PREEMPTED" if is_made else "READY"

    def locked() -> None:
        if faults:
            raise faults.pop()

    later(monkeypatch, world, "configure" if is_made else "workers_of", locked)
    if is_made:
        code, _, job = run(world, pending=True)
        assert (code, job.kept.attempt) == (0, 2)
    else:
        with pytest.raises(HostError):
            run(world, pending=True)


def test_a_loss_that_the_api_does_not_tell_of_is_counted_once_it_does(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once() -> Callable[[], None]:
        silent = [UnreachableError("the API does not answer")]

        def looked() -> None:
            if silent:
                raise silent.pop()

        return looked

    world = World(None, DONE)
    world.state = "PREEMPTED"
    later(monkeypatch, world, "look", once())
    code, _, job = run(world, pending=True, failures=1, max_failures=1)
    assert (code, job.kept.preemptions) == (0, 1)
    world = World(None, DONE)
    world.state = "PREEMPTED"
    later(monkeypatch, world, "look", once())
    with pytest.raises(UnreachableError, match="--max-preemptions 0 is used up"):
        run(world, pending=True, failures=1, max_failures=1, max_preemptions=0)


def test_nodes_that_are_lost_after_they_were_looked_at_are_counted(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world, bring_back = World(None, DONE), World.bring_back

    def lost(*args: Any, **named: Any) -> Any:
        world.state = "PREEMPTED"
        return bring_back(world, *args, **named)

    monkeypatch.setattr(world, "bring_back", lost)
    code, _, job = run(world, pending=True, failures=1, max_failures=1)
    assert (code, job.kept.preemptions) == (0, 1)


def test_a_node_lost_while_the_api_is_silent_is_counted_later(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world, lost = World(PREEMPTED, DONE), [True]
    look = world.look

    def converged() -> None:
        if lost:
            lost.pop()
            world.state = "PREEMPTED"
            monkeypatch.setattr(world, "look", silent)
            raise UnreachableError("no route to host")

    def silent(*_: Any) -> Any:
        monkeypatch.setattr(world, "look", look)
        raise UnreachableError("the API does not answer")

    later(monkeypatch, world, "configure", converged)
    code, _, job = run(world)
    assert (code, job.kept.attempt, job.kept.preemptions) == (0, 2, 2)


def test_a_takeover_with_an_old_state_follows_the_active_attempt(run: Any, tmp_path: Path) -> None:
    """The state is old, for example, if the home is on NFS or the local disk was full."""
    world = World(None, DONE)
    world.attempt, world.node_id = 2, "2"
    records.write(tmp_path, replace(records.new("r1", ("pod",), ("1",), ("pod-w0", "pod-w1"), ("true",)), attempt=1))
    code, world, job = run(world, attempt=1, first=lambda driver: driver.attached())
    assert (code, job.kept.attempt) == (0, 2)
    assert [one for one in world.done if not one.startswith("bring back")] == [], "nothing was started from here"
    assert (tmp_path / "runs/r1/attempt-2/rank-0.log").read_text() == "attempt 2\n"


@pytest.mark.parametrize("may_be_on", [True, False])
def test_a_stop_at_the_start_of_an_attempt_that_may_be_on_asks_its_workers(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, may_be_on: bool
) -> None:
    monkeypatch.setattr(interrupts, "EVERY", 0.01)
    answers: list[bool] = []
    stopping = threading.Thread(target=lambda: answers.append(recovery.stop(tmp_path, "r1", 10.0)))
    world = World(PREEMPTED, DONE)

    async def start(*_: Any) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise launch.Interrupted(may_be_on=may_be_on) from None

    write = recovery.write

    def kept(state_dir: Path, found: recovery.Recovery) -> None:
        if found.attempt == 2 and not found.pending and not stopping.ident:
            # The stop is requested just before the start.
            stopping.start()
            while not recovery.asked_to_stop(tmp_path, "r1"):
                pass
        write(state_dir, found)

    monkeypatch.setattr(recovery, "write", kept)
    monkeypatch.setattr(launch, "start", start)
    with recovery.alone(tmp_path, "r1"):
        code, _, _ = run(world)
    stopping.join()
    assert (code, answers) == (ExitCode.FAILED, [not may_be_on])
    assert not recovery.is_kept(tmp_path, "r1")
    said = capsys.readouterr().err
    assert ("attempt 2 may be running" in said) is may_be_on
    known = records.read(tmp_path, "r1")
    assert known is not None
    assert known.ended == ("" if may_be_on else "stopped")


def test_a_termination_signal_lets_the_active_work_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds during a step of the clean-up as well."""
    monkeypatch.setattr(interrupts, "EVERY", 0.01)
    cleaned = []

    async def work() -> None:
        try:
            while True:
                signal.sigtimedwait([], 0.01)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            cleaned.append(True)
            raise

    with pytest.raises(interrupts.Asked), interrupts.ended_by(lambda: True):
        asyncio.run(work())
    assert cleaned == [True]


@pytest.fixture
def attached(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """What takes over a run of two workers whose next attempt is being prepared."""
    *_, job = run(World(FAILED, DONE), max_failures=1)
    keep(job.driver, pending=True)
    records.write(tmp_path, records.new("r1", ("pod",), ("1",), ("pod-w0", "pod-w1"), ("true",)))
    monkeypatch.setattr("tpu_ops.cli.attach.config.load", lambda _: stand_in(tmp_path))
    parser = argparse.ArgumentParser()
    attach.add_arguments(parser)
    return lambda *words: attach.run(parser.parse_args(["r1", "--recover", *words]))


def test_a_rank_that_is_none_is_refused_before_anything_is_brought_back(
    attached: Callable[..., int], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="9"):
        attached("--rank", "9")
    assert recovery.is_kept(tmp_path, "r1")


def test_a_run_that_is_stopped_just_before_it_is_taken_over_is_not_started(
    attached: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = files.locked

    def stopped(*args: Any) -> Any:
        recovery.forget(tmp_path, "r1")
        return locked(*args)

    monkeypatch.setattr(files, "locked", stopped)
    with pytest.raises(UsageError, match="this machine has no recovery state"):
        attached()
    assert not recovery.is_kept(tmp_path, "r1")
