"""A run that is stopped for good, with its recovery on this machine."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.runs.test_control import ENDED, Ending
from tests.runs.test_parts import pod, stand_in
from tpu_ops import files
from tpu_ops.cloud.remaking import Plan
from tpu_ops.errors import OpsError
from tpu_ops.fleet import contact
from tpu_ops.recovery import termination
from tpu_ops.runs import control, records, recovery, spec
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.ssh.replies import Reply


def fleet_of(tmp_path: Path) -> Any:
    """Return a fleet without workers."""
    return SimpleNamespace(settings=stand_in(tmp_path), workers=(), listed=())


async def test_stop_ends_a_recovery_and_asks_workers_with_a_possible_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    known, asked = records.new("r1", ("pod",), ("1",), ("pod-w0",), ("true",)), []
    fleet = fleet_of(tmp_path)

    async def end(_: object, run_: Any, **__: Any) -> Any:
        asked.append(run_.run_id)
        return control.Stopped((Outcome(0, "pod-w0", "stopped"),), already=False)

    monkeypatch.setattr(termination, "end", end)
    monkeypatch.setattr(contact, "fanout", lambda _: None)
    records.write(tmp_path, known)
    kept = recovery.Recovery("r1", 1, Plan(()), recovery.options_of(spec.RunSpec("r1", ("true",)), {}), pending=True)
    recovery.write(tmp_path, kept)
    await termination.end_named(fleet, "r1")
    assert asked == ["r1"], "whoever recovered it has died, and may have left ranks on"
    assert not (tmp_path / "runs/r1/recovery.json").exists()
    monkeypatch.setattr(recovery, "stop", lambda *_: True)
    (((_, stopped),), problem) = await termination.end_named(fleet, "r1")
    assert ([outcome.state for outcome in stopped.outcomes], problem, asked) == (["gone"], None, ["r1"])
    assert termination.is_ended(stopped.outcomes)
    assert "it will not be started again" in logged.text


@pytest.mark.parametrize(("attempt", "ends"), [(1, []), (2, ["r1"])])
async def test_a_stop_during_recovery_ends_an_attempt_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: int, ends: list[str]
) -> None:
    asked = []

    class Workers:
        async def call(self, requests: Any, *_: object, **__: Any) -> dict[str, Reply]:
            record = {"attempt": attempt, "state": "running"}
            return {host: Reply(host, {"record": record, "records": [], "holder": None}) for host in requests}

    async def end(_: object, run_: Any, **__: Any) -> control.Stopped:
        asked.append(run_.run_id)
        return control.Stopped((Outcome(0, "pod-w0", "stopped"),), already=False)

    monkeypatch.setattr(termination, "end", end)
    monkeypatch.setattr(contact, "fanout", lambda _: Workers())
    monkeypatch.setattr(recovery, "stop", lambda *_: True)
    records.write(tmp_path, records.new("r1", ("pod",), ("1",), ("pod-w0",), ("true",)))
    options = recovery.options_of(spec.RunSpec("r1", ("true",)), {})
    recovery.write(tmp_path, recovery.Recovery("r1", 1, Plan(()), options, pending=True))
    fleet = fleet_of(tmp_path)
    fleet.workers = tuple(pod(1))
    await termination.end_with_recovery(fleet, Workers(), control.RunRef("r1", ("pod-w0",)), 0.0)  # type: ignore[arg-type]
    assert asked == ends


@pytest.mark.parametrize(("since", "asked"), [(0.0, 3), (60.0, 1)])
async def test_a_starting_run_is_stopped_once_a_worker_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, since: float, asked: int
) -> None:
    states = ["gone", "gone", "stopped"]

    async def end(*_: object, **__: Any) -> control.Stopped:
        return control.Stopped((Outcome(0, "pod-w0", states.pop(0)),), already=False)

    monkeypatch.setattr(termination, "end", end)
    monkeypatch.setattr(termination, "AGAIN", 0.01)
    monkeypatch.setattr(contact, "fanout", lambda _: None)
    known = records.new("r1", ("pod",), ("1",), ("pod-w0",), ("true",))
    records.write(tmp_path, replace(known, since=known.since - since))
    await termination.end_named(fleet_of(tmp_path), "r1")
    assert 3 - len(states) == asked


@pytest.mark.parametrize("already", [False, True])
async def test_a_full_disk_keeps_no_worker_from_being_told_of_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture, already: bool
) -> None:
    told: list[str] = []

    async def end(_: object, run_: control.RunRef, **__: Any) -> control.Stopped:
        told.append(run_.run_id)
        return control.Stopped((Outcome(0, "pod-w0", "stopped"),), already=already)

    async def find(*_: object) -> control.Found:
        return control.Found([control.RunRef(name, ("pod-w0",)) for name in ("r1", "r2")])

    def full(path: Path, *_: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    fleet = fleet_of(tmp_path)
    records.write(tmp_path, records.new("r1", ("pod",), ("1",), ("pod-w0",), ("true",)))
    recovery.write(tmp_path, recovery.Recovery("r1", 1, Plan(()), recovery.options_of(spec.RunSpec("r1", ("x",)), {})))
    monkeypatch.setattr(termination, "end", end)
    monkeypatch.setattr(contact, "fanout", lambda _: None)
    monkeypatch.setattr(control, "find", find)
    monkeypatch.setattr(files, "replace", full)
    with recovery.alone(fleet.settings.state_dir, "r1"):
        ended, problem = await termination.end_named(fleet, "r1")
    assert (sorted(told), [run_.run_id for run_, _ in ended]) == (["r1", "r2"], ["r1", "r2"])
    said = logged.text
    if already:
        # No worker has a record of a stop that would tell whoever recovers it.
        assert "may start the run again" in str(problem)
        assert "end that process with Ctrl-C" in str(problem)
    else:
        assert problem is None
        assert logged.records[0].levelname == "WARNING"
        assert "No space left on device" in said


async def test_a_run_that_lost_its_nodes_in_its_first_start_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contact, "fanout", lambda _: None)
    options = recovery.options_of(spec.RunSpec("r1", ("x",)), {})
    recovery.write(tmp_path, recovery.Recovery("r1", 1, Plan(()), options, pending=True))
    fleet = fleet_of(tmp_path)
    monkeypatch.setattr(recovery, "stop", lambda *_: True)
    assert await termination.end_named(fleet, "r1") == ([], None)
    assert "it had not begun, and will not be started" in logged.text


async def test_a_recovery_that_died_under_its_first_start_is_ended_by_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contact, "fanout", lambda _: None)
    options = recovery.options_of(spec.RunSpec("r1", ("x",)), {})
    recovery.write(tmp_path, recovery.Recovery("r1", 1, Plan(()), options, pending=True))
    assert await termination.end_named(fleet_of(tmp_path), "r1") == ([], None)
    assert not recovery.is_kept(tmp_path, "r1")
    assert "it had not begun, and will not be started" in logged.text


async def test_a_stop_between_two_tries_of_one_attempt_leaves_nothing_to_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery does not know whether the attempt is active; the workers have reported it."""
    options = recovery.options_of(spec.RunSpec("r1", ("true",)), {})
    recovery.write(tmp_path, recovery.Recovery("r1", 2, Plan(()), options))
    ended = control.Stopped((Outcome(0, "pod-w0", "stopped"),), already=False)
    monkeypatch.setattr(termination, "end", AsyncMock(return_value=ended))
    monkeypatch.setattr(contact, "fanout", lambda _: None)
    records.write(tmp_path, records.new("r1", ("pod",), ("1",), ("pod-w0",), ("true",)))
    fleet = fleet_of(tmp_path)
    held, go = threading.Event(), threading.Event()

    def recovers() -> None:
        with recovery.alone(tmp_path, "r1"):
            held.set()
            go.wait(30)

    other = threading.Thread(target=recovers)
    other.start()
    held.wait(30)
    asyncio.get_running_loop().call_later(0.2, go.set)
    await termination.end_named(fleet, "r1")
    other.join()
    assert not recovery.is_kept(tmp_path, "r1")


async def test_a_second_stop_reports_the_grace_of_the_first(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(termination, "MOMENT", 0.01)
    over = asyncio.Event()

    class Slow(Ending):
        async def call(self, requests: Any, action: str, *, limit: float = 0.0, **options: Any) -> dict[str, Reply]:
            if action == "stop":
                await over.wait()
            else:
                asyncio.get_running_loop().call_later(0.01, over.set)
            return await super().call(requests, action, limit=limit, **options)

    fanout: Any = Slow(pod_w0=ENDED)
    fanout.limits = []
    await asyncio.wait_for(termination.end(fanout, control.RunRef("r1", ("pod-w0",))), 10)
    assert logged.messages == ["run r1: asked 1 rank to end; SIGKILL after 600 s, as an earlier stop requested"]


@pytest.mark.parametrize("ends", ["before", "after"])
async def test_a_stop_neither_waits_for_its_own_question_nor_ends_with_it(
    ends: str, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(termination, "MOMENT", 0.01)
    over = asyncio.Event()

    class Silent(Ending):
        async def call(self, requests: Any, action: str, *, limit: float = 0.0, **options: Any) -> dict[str, Reply]:
            if action == "stop":
                await over.wait()
                return await super().call(requests, action, limit=limit, **options)
            asyncio.get_running_loop().call_later(0.01, over.set)
            if ends == "before":
                await asyncio.Event().wait()
            raise OpsError("600 sessions at once need too many open files")

    fanout: Any = Silent(pod_w0=ENDED)
    fanout.limits = []
    stopped = await asyncio.wait_for(termination.end(fanout, control.RunRef("r1", ("pod-w0",))), 10)
    assert [outcome.state for outcome in stopped.outcomes] == ["stopped"]
    said = ["run r1: asked 1 rank to end; SIGKILL after 30 s"] if ends == "after" else []
    assert logged.messages == said
