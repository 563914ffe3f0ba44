"""A run through its attempts: counts, actions between two attempts, and messages."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from tests.runs.test_parts import pod, probe, stand_in
from tests.runs.world import COMMIT, DONE, FAILED, NODE, PREEMPTED, SILENT, STOPPED, World, ended, keep
from tpu_ops import files
from tpu_ops.cli import attach, foreground, interrupts, recovering, train, train_job
from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.node import Worker
from tpu_ops.cloud.remaking import Made, Plan, Seen
from tpu_ops.errors import ExitCode, HostError, OpsError, UnreachableError, UsageError
from tpu_ops.files import UnwritableError, unwritable
from tpu_ops.fleet import contact
from tpu_ops.recovery import attempt, decide, termination
from tpu_ops.recovery.driver import Driver
from tpu_ops.recovery.events import Next, Planned
from tpu_ops.runs import (
    control,
    endings,
    follow,
    installs,
    launch,
    outcomes,
    preflight,
    records,
    recovery,
    spec,
    sync,
    turns,
)
from tpu_ops.ssh.replies import Reply


def test_a_preempted_node_is_recreated_and_the_next_attempt_starts(run: Any, tmp_path: Path, capsys: Any) -> None:
    code, world, job = run(World(PREEMPTED, PREEMPTED, DONE), "--json")
    assert code == 0
    assert job.ended == ("succeeded", job.driver.outcomes), "the end that --notify tells"
    assert job.begun_run() == control.RunRef("r1", ("pod-w0", "pod-w1"))
    one_more = ["configure 2", "start {0}", "start {0}"]
    assert world.done == [
        "bring back r1/2",
        *(word.format(2) for word in one_more),
        "bring back r1/3",
        *(word.format(3) for word in one_more),
    ]
    assert [sent["attempt"] for sent in world.specs] == [2, 2, 3, 3]
    assert len({sent["net"]["key"] for sent in world.specs}) == 2, "each attempt has its own key"
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert {key: told[key] for key in ("run_id", "state", "attempt", "preemptions", "failures")} == {
        "run_id": "r1",
        "state": "succeeded",
        "attempt": 3,
        "preemptions": 2,
        "failures": 0,
    }
    assert told["events"][0] == {"attempt": 1, "what": "node pod is PREEMPTED", "then": "bringing its nodes back"}
    assert "run r1, attempt 1: node pod is PREEMPTED; bringing its nodes back" in err
    assert not (tmp_path / "runs/r1/recovery.json").exists()
    assert (tmp_path / "runs/r1/attempt-3/rank-1.log").read_text() == "attempt 3\n", "of every rank, shown or not"
    remembered = records.read(tmp_path, "r1")
    assert remembered is not None
    assert (remembered.attempt, remembered.node_ids) == (3, ("3",))


def test_every_attempt_has_the_commit_of_the_first_one(run: Any) -> None:
    code, world, _ = run(World(PREEMPTED, FAILED, DONE), max_failures=1, git=f"vision@{COMMIT}")
    assert code == 0
    bring = f"workspace vision@{COMMIT}"
    assert world.done == [
        "bring back r1/2",
        "configure 2",
        *(bring, "start 2", "start 2"),
        "bring back r1/3",
        *(bring, "start 3", "start 3"),
    ]
    assert {(sent["cwd"], sent["code_digest"]) for sent in world.specs} == {("/srv/vision", COMMIT)}
    world = World(PREEMPTED, DONE)
    world.commit = "f" * 40
    with pytest.raises(HostError, match="no longer at 0123456789ab"):
        run(world, git=f"vision@{COMMIT}")


def test_a_failure_of_the_command_is_final_unless_it_has_a_budget(run: Any, capsys: Any) -> None:
    code, world, _ = run(World(FAILED))
    assert (code, world.done) == (1, [])
    assert "failed first: exit code 3" in (said := capsys.readouterr().err)
    assert "not started again: --max-failures 0 is used up\n  fix: `tpu_ops train` with a higher limit" in said
    code, world, _ = run(World(FAILED, FAILED, DONE), max_failures=1)
    assert code == 1
    assert world.done == ["bring back r1/2", "start 2", "start 2"], "the same workers need no site.yml"
    assert "attempt 1: rank 0 (pod-w0): exit code 3; starting the run again" in capsys.readouterr().err


def heals(monkeypatch: pytest.MonkeyPatch, world: World, then: Mapping[str, Any]) -> None:
    """Let the workers answer again when they are asked for the second time, with this record."""
    status, asked = world.status, iter((True, True))

    def healed(host: str) -> Reply:
        if not next(asked, False):
            world.endings[1] = dict(then)
        return status(host)

    monkeypatch.setattr(world, "status", healed)


def test_a_restarted_worker_of_a_ready_node_is_not_a_failure(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(SILENT, DONE)
    heals(monkeypatch, world, ended("lost"))
    code, world, job = run(world)
    assert (code, job.kept.preemptions, job.kept.failures) == (0, 1, 0)
    assert world.done == ["bring back r1/2", "start 2", "start 2"]


@pytest.mark.parametrize(("then", "code", "failures"), [(DONE, 0, 0), (FAILED, 1, 1), (STOPPED, 1, 0)])
def test_an_unknown_outcome_is_requested_and_not_taken_for_a_preemption(
    then: Any, code: int, failures: int, run: Any, tmp_path: Path
) -> None:
    world = World(SILENT)
    with pytest.MonkeyPatch.context() as patch:
        heals(patch, world, then)
        found, world, job = run(world)
    assert (found, world.done) == (code, []), "nothing is brought back, stopped or started"
    assert (job.kept.attempt, job.kept.preemptions, job.kept.failures) == (1, 0, failures)
    assert (tmp_path / "runs/r1/attempt-1/rank-1.log").read_text() == "attempt 1\n", "the rest of it"


def test_an_attempt_whose_start_was_not_heard_of_is_followed_where_it_is_on(run: Any, tmp_path: Path) -> None:
    world = World(PREEMPTED, DONE)
    gone = Reply("", {}, "unreachable", "no route to host")
    world.refusals = [("start", Reply("", {}, "timeout", "no answer")), ("stop", gone), ("status", gone)]
    code, world, job = run(world)
    assert (code, job.kept.attempt, job.kept.preemptions) == (0, 2, 1)
    assert [sent["attempt"] for sent in world.specs] == [2], "it is not started twice"
    assert (tmp_path / "runs/r1/attempt-2/rank-1.log").read_text() == "attempt 2\n"


def test_a_controller_that_dies_before_the_start_leaves_no_end_to_be_counted(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    async def dies(*_: Any) -> None:
        raise SystemExit(9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start", dies)
        with pytest.raises(SystemExit):
            run(World(FAILED), max_failures=1)
    kept = recovery.read(tmp_path, "r1")
    assert (kept.attempt, kept.failures, kept.pending) == (2, 1, False)
    world: Any = World(FAILED, None, DONE)
    *_, job = run(World(DONE))
    job = recovering.Recovering(job._settings, kept, job.driver.spec, job._args, begun=True, uses=world)
    assert job.to_the_end(job.driver.attached()) == 0
    assert (job.kept.attempt, job.kept.failures, job.kept.preemptions) == (3, 1, 0)
    assert not (tmp_path / "runs/r1/attempt-2").exists(), "no copy of another attempt's log"
    assert "attempt 2: the attempt has not begun; starting the next attempt" in capsys.readouterr().err


def test_an_attempt_is_followed_by_the_names_that_its_workers_have_now(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Another node of that name was made in another zone, so that both have longer labels."""
    *_, job = run(World(DONE))
    records.write(tmp_path, records.new("r1", ("pod",), ("1",), ("pod-w0", "pod-w1"), ("true",)))
    world: Any = World(DONE)
    world.called = "pod.us-central2-b"
    status, times = world.status, iter(range(50))

    def asked_again(host: str) -> Reply:
        assert next(times, None) is not None, "asked for ever"
        reply: Reply = status(host)
        return reply

    monkeypatch.setattr(world, "status", asked_again)
    fleets: list[str] = []
    for before in ("attached", "while it was followed"):
        job = recovering.Recovering(job._settings, job.kept, job.driver.spec, job._args, begun=True, uses=world)
        work = job.driver.attached() if before == "attached" else job.driver.started(world, pod(2))
        assert job.to_the_end(work) == 0
        fleets.append(capsys.readouterr().err)
    assert "by their new names" not in fleets[0]
    assert "no longer has workers of these names" in fleets[1]
    assert all("succeeded on all 2 ranks" in said for said in fleets)


@pytest.mark.parametrize(
    ("digests", "more", "differ"),
    [
        (("a", "b"), {}, True),
        (("a", "a"), {}, False),
        (("a", "b"), {"venv": "/my/venv"}, False),
        (("a", "b"), {"force": True}, False),
        # Somebody's run, whose packages are not to change.
        (("a", "b"), {"fault": {"check": "free", "problem": "a run of bob is active", "fix": "wait"}}, False),
    ],
)
def test_environments_of_old_and_new_workers_are_compared_before_a_retry(
    run: Any, monkeypatch: pytest.MonkeyPatch, digests: tuple[str, str], more: dict[str, Any], differ: bool
) -> None:
    _, world, job = run(World(DONE))
    job.driver.spec = replace(job.driver.spec, venv=more.get("venv", ""))
    keep(job.driver, force=more.get("force", False))
    faults = [more["fault"]] if "fault" in more else []

    async def call(requests: Any, action: str, **_: Any) -> dict[str, Reply]:
        seen = zip(requests, digests, strict=True)
        venvs = {host: probe()["venv"] | {"digest": digest} for host, digest in seen}
        probes = {host: probe(boot_id=host, venv=venv, faults=faults) for host, venv in venvs.items()}
        return {host: Reply(host, {"probe": found}) for host, found in probes.items()}

    monkeypatch.setattr(world, "call", call)
    assert asyncio.run(job.driver.differ(world, world.workers)) is differ


FIRST = {**probe()["venv"], "installed": {"jax": "0.10.2"}}
LATER = {**FIRST, "packages": {"jax": "0.11"}, "installed": {"jax": "0.11", "six": "1"}, "digest": "d2"}


def test_a_later_attempt_has_the_packages_of_the_first_one(run: Any, tmp_path: Path) -> None:
    code, world, job = run(World(PREEMPTED, DONE), environment=FIRST)
    assert (code, world.kept_versions) == (0, {"/v": {"jax": "0.10.2"}})
    recovery.write(tmp_path, job.kept)
    assert recovery.read(tmp_path, "r1").environment == FIRST


def test_a_later_attempt_with_other_packages_is_refused_with_their_names(run: Any) -> None:
    world = World(PREEMPTED, DONE)
    world.venv = LATER
    with pytest.raises(OpsError, match="not that of attempt 1") as refused:
        run(world, environment=FIRST)
    assert str(refused.value).startswith(
        "run r1, pod-w[0-1]: the environment is not that of attempt 1: jax 0.11 (before 0.10.2), six 1 (before none)"
    )
    assert "`tpu_ops configure pod-w0,pod-w1` and `tpu_ops attach r1 --recover`" in refused.value.fix
    assert (world.specs, world.pauses) == ([], []), "no start, and no other try"


@pytest.mark.parametrize("changes", [{}, {"environment": FIRST, "force": True}])
def test_packages_are_not_compared_if_those_of_the_first_attempt_are_unknown_or_with_force(
    run: Any, changes: dict[str, Any]
) -> None:
    world = World(PREEMPTED, DONE)
    world.venv = LATER
    code, *_ = run(world, **changes)
    assert (code, world.kept_versions) == (0, {})


def test_transient_failures_are_retried(run: Any, capsys: Any) -> None:
    world = World(PREEMPTED, DONE, DONE)
    world.refusal = ApiError("a bad moment", status="UNAVAILABLE")
    world.refusals = [("start", Reply("", {}, "unreachable", "no route to host"))]
    code, world, job = run(world)
    assert (code, job.kept.attempt, job.kept.preemptions) == (0, 3, 1)
    said = capsys.readouterr().err
    assert "a bad moment; trying again in 15 s" in said
    assert "no route to host" in said


@pytest.mark.parametrize(("times", "ends"), [(1, False), (decide.REFUSALS, True)])
def test_a_brief_local_shortage_is_waited_for_and_a_long_one_reported(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, times: int, ends: bool
) -> None:
    world = World(PREEMPTED, DONE)
    lacks, configure = iter([OSError(errno.EAGAIN, "Resource temporarily unavailable")] * times), world.configure

    def forked(*words: Any) -> None:
        for lack in lacks:
            raise lack
        configure(*words)

    monkeypatch.setattr(world, "configure", forked)
    if ends:
        with pytest.raises(OSError, match="temporarily unavailable"):
            run(world)
    else:
        code, *_ = run(world)
        assert code == 0
    said = capsys.readouterr().err
    assert "Resource temporarily unavailable; trying again in 15 s" in said
    assert ("  recover: tpu_ops attach r1 --recover" in said) is ends


def test_code_is_copied_only_to_workers_that_were_found_free_and_locked(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run of the same person in the same directory may be active there or starting."""
    world, steps = World(PREEMPTED, DONE), []
    tree = sync.Tree(tmp_path, "code", ("a",), {b"a": "f"}, "0")
    monkeypatch.setattr(recovery, "kept_code", lambda *_: tree)
    check = Driver._check

    async def checked(*words: Any) -> Any:
        found = await check(*words)
        steps.append("checked")
        return found

    @contextlib.asynccontextmanager
    async def alone(*_: object) -> AsyncIterator[str]:
        steps.append("locked")
        yield "the turn"
        steps.append("started")

    async def pushed(*given: object) -> None:
        steps.append(f"pushed in {given[-1]}")

    monkeypatch.setattr(Driver, "_check", checked)
    monkeypatch.setattr(turns, "alone", alone)
    monkeypatch.setattr(sync, "push", pushed)
    code, *_ = run(world)
    assert (code, steps) == (0, ["checked", "locked", "pushed in the turn", "started"])


@pytest.mark.parametrize("same", [True, False])
def test_a_later_attempt_has_the_packages_of_the_first_one_or_is_refused(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    world, asked = World(PREEMPTED, DONE), []
    (tmp_path / "requirements.txt").write_text("pillow\n")
    monkeypatch.setattr(recovery, "kept_code", lambda *_: sync.read_copy(tmp_path))
    kept = {"base": "/opt/venvs/jax", "path": "/home/me/first", "pins": "pillow==1\n"}
    monkeypatch.setattr(recovery, "kept_packages", lambda *_: kept)
    monkeypatch.setattr(turns, "alone", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(sync, "push", AsyncMock())
    monkeypatch.setattr(installs, "look", AsyncMock(return_value=SimpleNamespace(installed=None)))

    async def install(*_: object, base: str, pins: str) -> installs.Installed:
        asked.append((base, pins))
        return installs.Installed("/home/me/first" if same else "/home/me/other", base, pins, "0", 1)

    monkeypatch.setattr(installs, "install", install)
    if same:
        assert run(world)[0] == 0
        assert {sent["venv"] for sent in world.specs} == {"/home/me/first"}
    else:
        with pytest.raises(UsageError, match="/opt/venvs/jax has other packages than at the first attempt"):
            run(world)
    assert asked == [("/opt/venvs/jax", "pillow==1\n")]


def test_an_api_that_tells_late_of_a_preemption_has_it_counted_once(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(SILENT, DONE)
    status, asked = world.status, iter((True, True))

    def late(host: str) -> Reply:
        if world.node_id == "1" and not next(asked, False):
            world.state = "PREEMPTED"
        return status(host)

    monkeypatch.setattr(world, "status", late)
    code, _, job = run(world)
    assert (code, job.kept.preemptions, job.kept.attempt) == (0, 1, 2)
    assert world.done == ["bring back r1/2", "configure 2", "start 2", "start 2"]


SHUT_DOWN = {**ended("stopped", {"signal": 15}, "shutdown"), "reason": "host shuts down"}


@pytest.mark.parametrize("again", ["probe", "start", "start that may be one"])
@pytest.mark.parametrize("silent", [0, 1], ids=["seen at once", "seen later"])
def test_a_shutdown_before_the_api_reports_preemption_counts_once(
    run: Any, monkeypatch: pytest.MonkeyPatch, again: str, silent: int
) -> None:
    """The ranks have reported the shutdown, and the node is READY until the next attempt starts."""
    world = World(SHUT_DOWN, DONE, DONE)
    call, lost, tells = world.call, False, iter([False] * silent)

    async def goes(requests: Any, action: str, **options: Any) -> dict[str, Reply]:
        nonlocal lost
        lost = lost or (again.startswith(action) and world.node_id == "1")
        if not lost or world.node_id != "1":
            return await call(requests, action, **options)
        if next(tells, True):
            world.state = "PREEMPTED"
        if action == "start" and again != "start":
            world.attempt = next(iter(requests.values()))["spec"]["attempt"]
        kind = "timeout" if again != "start" else "unreachable"
        return {host: Reply(host, {}, kind, "no route to host") for host in requests}

    monkeypatch.setattr(world, "call", goes)
    code, _, job = run(world, max_preemptions=1)
    assert (code, job.kept.preemptions, world.node_id) == (0, 1, "2")
    assert not job.kept.counted


NOTICED = {**SHUT_DOWN, "intent": {"kind": "shutdown", "notice": "preempted"}}


def test_an_announced_preemption_is_awaited_before_a_worker_is_asked(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    world = World(NOTICED, DONE)
    look, ready = world.look, iter(range(3))

    def late(plan: Plan) -> dict[str, Seen]:
        if world.node_id == "1" and next(ready, None) is None:
            world.state = "PREEMPTED"
        return look(plan)

    monkeypatch.setattr(world, "look", late)
    code, _, job = run(world, max_preemptions=1)
    assert (code, job.kept.preemptions, job.kept.attempt, world.node_id) == (0, 1, 2, "2")
    assert world.done == ["bring back r1/2", "configure 2", "start 2", "start 2"]
    assert world.pauses == [decide.SOON] * 2, "after the look at the end of the attempt"
    assert "a preemption was announced; waiting for at most 120 s until the API reports it" in capsys.readouterr().err


def test_an_announced_preemption_that_never_comes_is_awaited_once(run: Any) -> None:
    code, world, job = run(World(NOTICED, DONE))
    assert (code, job.kept.preemptions, world.done) == (0, 1, ["bring back r1/2", "start 2", "start 2"])
    assert sum(world.pauses) == decide.GOING


def test_a_shutdown_and_the_loss_of_the_replacement_count_twice(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(SHUT_DOWN, DONE)
    call = world.call

    async def goes(requests: Any, action: str, **options: Any) -> dict[str, Reply]:
        if action == "probe" and world.node_id in ("1", "2"):
            world.state = "PREEMPTED"
            return {host: Reply(host, {}, "unreachable", "no route to host") for host in requests}
        return await call(requests, action, **options)

    monkeypatch.setattr(world, "call", goes)
    code, _, job = run(world)
    assert (code, job.kept.preemptions, world.node_id) == (0, 2, "3")


def test_a_new_node_that_is_preempted_before_the_run_is_on_it_counts(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    world = World(PREEMPTED, DONE)
    call = world.call

    async def dead(requests: Any, action: str, **options: Any) -> dict[str, Reply]:
        if action == "probe" and world.node_id == "2":
            world.state = "PREEMPTED"
            return {host: Reply(host, {}, "unreachable", "no route to host") for host in requests}
        return await call(requests, action, **options)

    monkeypatch.setattr(world, "call", dead)
    with pytest.raises(UnreachableError, match="node pod is PREEMPTED, and --max-preemptions 1 is used up"):
        run(world, max_preemptions=1)
    assert "--recover" not in capsys.readouterr().err, "nobody is told to take over what is over its budget"
    assert not (tmp_path / "runs/r1/recovery.json").exists()


def test_a_permanent_refusal_ends_the_recovery_and_leaves_its_state(run: Any, tmp_path: Path, capsys: Any) -> None:
    world = World(PREEMPTED, DONE)
    world.refusal = ApiError("not you", status="PERMISSION_DENIED")
    with pytest.raises(ApiError, match="not you"):
        run(world)
    assert "recover: tpu_ops attach r1 --recover" in capsys.readouterr().err
    kept = recovery.read(tmp_path, "r1")
    assert (kept.pending, kept.attempt, kept.preemptions) == (True, 1, 1)


def test_ctrl_c_leaves_the_run_alone_and_says_how_to_go_on(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(foreground, "AGAIN", 0.05)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(follow, "RETRY_LIMIT", 60)
    monkeypatch.setattr(follow.Follower, "_follow", _pressed)
    try:
        code, *_ = run(World(SILENT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == ExitCode.INTERRUPTED
    said = capsys.readouterr().err
    assert "detached: run r1 continues; nothing will restart it" in said
    assert "recover: tpu_ops attach r1 --recover" in said


def test_a_closed_output_detaches_from_the_run_and_its_recovery(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    recovery.write(tmp_path, recovery.Recovery("r1", 1, Plan(()), recovery.options_of(spec.RunSpec("r1", ("x",)), {})))
    gone: list[str] = []
    monkeypatch.setattr("tpu_ops.cli.output.give_up", lambda: gone.append("given up"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpu_ops.cli.output._result", Mock(side_effect=BrokenPipeError))
        code, *_ = run(World(DONE))
    assert (code, gone) == (ExitCode.INTERRUPTED, ["given up"])
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "detached: run r1 continues; nothing will restart it",
        "  stop:    tpu_ops stop r1",
        "  recover: tpu_ops attach r1 --recover",
    ]
    assert (tmp_path / "runs/r1/recovery.json").exists(), "it can be taken over"


@pytest.mark.parametrize("error", [BrokenPipeError(), OpsError("the result cannot be written")], ids=repr)
def test_of_a_recovered_run_that_is_over_nobody_says_that_it_goes_on(
    run: Any, tmp_path: Path, capsys: Any, error: Exception
) -> None:
    code = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpu_ops.cli.output.give_up", lambda: None)
        patch.setattr("tpu_ops.cli.output.table", Mock(side_effect=error))
        with contextlib.suppress(OpsError):
            code, *_ = run(World(STOPPED))
    said = capsys.readouterr().err
    # Whoever reads nothing any more learns the end from the exit code and what is said besides.
    assert (code, "run r1: stopped" in said) == ((ExitCode.FAILED, True) if code is not None else (None, False))
    assert (code is None) is isinstance(error, OpsError)
    assert "run r1 continues" not in said
    assert "attach r1 --recover" not in said


def test_a_run_stopped_while_nodes_are_recreated_is_not_started_again(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(interrupts, "EVERY", 0.01)
    world, answers = World(PREEMPTED, DONE), []

    def bring_back(*_: Any, **__: Any) -> None:
        stopping = threading.Thread(target=lambda: answers.append(recovery.stop(tmp_path, "r1", 5.0)))
        threads.append(stopping)
        stopping.start()
        threading.Event().wait(30)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(world, "bring_back", bring_back)
    before = signal.getsignal(signal.SIGUSR1)
    with recovery.alone(tmp_path, "r1"):
        code, _, job = run(world, "--json")
    threads[0].join()
    assert job.ended == ("stopped", ())
    assert (code, answers, world.done) == (1, [True], []), "no attempt was on: nobody need be asked to stop"
    assert signal.getsignal(signal.SIGUSR1) is before
    assert not (tmp_path / "runs/r1/recovery.json").exists()
    out, err = capsys.readouterr()
    assert json.loads(out)["state"] == "stopped"
    assert "run r1: stopped; it will not be started again" in err


@pytest.mark.parametrize("ending", [PREEMPTED, FAILED])
def test_a_run_with_a_stop_request_is_not_started_again(run: Any, tmp_path: Path, ending: Any) -> None:
    (tmp_path / "runs/r1").mkdir(parents=True)
    (tmp_path / "runs/r1/stop").touch()
    code, world, _ = run(World(ending, DONE), max_failures=5)
    assert (code, [one for one in world.done if not one.startswith("stop")]) == (1, [])
    assert not (tmp_path / "runs/r1/stop").exists(), "a later run of this name is not meant"


def test_a_disk_that_takes_no_lock_is_an_error_that_a_stop_goes_on_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = recovery.Recovery("r1", 1, Plan(()), recovery.options_of(spec.RunSpec("r1", ("true",)), {}))
    recovery.write(tmp_path, kept)

    def broken(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files, "locked", broken)
    for call in (recovery.stop, recovery.none_left):
        with pytest.raises(UnwritableError, match="Read-only file system"):
            call(tmp_path, "r1", 0.1)


@pytest.mark.parametrize(("kept", "held", "told"), [(True, False, True), (True, True, False), (False, False, False)])
def test_a_run_that_nobody_recovers_any_more_is_said_to_be_one(
    tmp_path: Path, kept: bool, held: bool, told: bool
) -> None:
    options = recovery.options_of(spec.RunSpec("r1", ("x",)), {})
    if kept:
        recovery.write(tmp_path, recovery.Recovery("r1", 1, Plan(()), options))
    with recovery.alone(tmp_path, "r1") if held else contextlib.nullcontext():
        note = recovery.note_of(tmp_path, "r1")
    assert ("no process is recovering it; `tpu_ops attach r1 --recover` resumes the recovery" in note) is told
    assert (note == f"run r1: a process on this machine recovers it ({spec.here()}, pid {os.getpid()})") is held


@pytest.mark.parametrize(
    ("content", "who", "pid"),
    [
        ('{"who": "ada@desk", "pid": 7}\n', "ada@desk", 7),
        ("7\n", "", 7),
        ("", "", 0),
        ('{"who": "ada@desk", "pid": "x"}', "", 0),
        ("[7]", "", 0),
    ],
    ids=["this version", "an older version", "a full disk", "no number", "another form"],
)
def test_the_process_that_recovers_a_run_is_named_as_far_as_its_lock_has_it(
    tmp_path: Path, content: str, who: str, pid: int
) -> None:
    recovery.write(tmp_path, recovery.Recovery("r1", 1, Plan(()), recovery.options_of(spec.RunSpec("r1", ("x",)), {})))
    with recovery.lock(tmp_path, "r1"):
        (tmp_path / "runs/r1/lock").write_text(content)
        found = recovery.recoverer(tmp_path, "r1")
    assert found is not None
    assert (found.held, found.who, found.pid) == (True, who, pid)


@pytest.mark.parametrize(("pending", "held", "told"), [(True, True, True), (False, True, False), (True, False, False)])
def test_a_run_that_is_being_brought_back_here_is_said_to_be(
    tmp_path: Path, pending: bool, held: bool, told: bool
) -> None:
    options = recovery.options_of(spec.RunSpec("r1", ("x",)), {})
    recovery.write(tmp_path, recovery.Recovery("r1", 1, Plan(()), options, pending=pending))
    settings = stand_in(tmp_path)
    with recovery.alone(settings.state_dir, "r1") if held else contextlib.nullcontext():
        found = recovery.under_way(tmp_path, "r1")
    assert (str(tmp_path / "runs/r1/attempt-1") in found) is told
    assert recovery.under_way(tmp_path, "r2") == ""


def test_copies_of_logs_that_cannot_be_made_end_no_recovery(run: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "runs/r1").mkdir(parents=True)
    (tmp_path / "runs/r1/attempt-2").touch()
    code, _, job = run(World(PREEMPTED, DONE))
    assert (code, job.kept.attempt) == (0, 2)
    out, err = capsys.readouterr()
    assert "attempt 2" in out
    assert "attempt-2/rank-0.log: " in err
    assert "the run continues" in err


def test_a_full_disk_of_this_machine_ends_no_recovery(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    world, bring_back, write = World(PREEMPTED, DONE), World.bring_back, files.replace

    def full(path: Path, *_: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    def back(*words: Any, **named: Any) -> Any:
        monkeypatch.setattr(files, "replace", write)
        return bring_back(world, *words, **named)

    monkeypatch.setattr(world, "bring_back", back)
    monkeypatch.setattr(files, "replace", full)
    code, _, job = run(world)
    assert (code, job.kept.attempt, job.kept.preemptions) == (0, 2, 1)
    said = capsys.readouterr().err
    assert "recovery.json: cannot write the fleet's state: No space left on device" in said
    assert "recovery continues" in said


@pytest.mark.parametrize(("early", "preemptions"), [(True, 1), (False, 2)])
def test_a_takeover_knows_of_a_loss_counted_before_the_api_reported_it(
    run: Any, monkeypatch: pytest.MonkeyPatch, early: bool, preemptions: int
) -> None:
    world = World(SHUT_DOWN, DONE, DONE)
    call = world.call

    async def goes(requests: Any, action: str, **options: Any) -> dict[str, Reply]:
        if world.node_id != "1" or action != "start":
            return await call(requests, action, **options)
        world.state = "PREEMPTED"
        return {host: Reply(host, {}, "unreachable", "no route to host") for host in requests}

    monkeypatch.setattr(world, "call", goes)
    code, _, job = run(world, pending=True, preemptions=1, counted=True, early=early)
    assert (code, job.kept.preemptions, job.kept.early, world.node_id) == (0, preemptions, False, "2")


@pytest.mark.parametrize(("preemptions", "counted"), [(1, True), (0, False)])
def test_a_preemption_kept_by_an_older_version_is_not_counted_twice(
    tmp_path: Path, preemptions: int, counted: bool
) -> None:
    options = recovery.options_of(spec.RunSpec("r1", ("x",)), {})
    recovery.write(tmp_path, recovery.Recovery("r1", 1, Plan(()), options, preemptions=preemptions, pending=True))
    file = tmp_path / "runs/r1/recovery.json"
    data = json.loads(file.read_text())
    del data["counted"]
    file.write_text(json.dumps(data))
    assert recovery.read(tmp_path, "r1").counted is counted


def test_a_stop_that_an_older_attempt_heard_is_one_of_the_run() -> None:
    record = {**FAILED, "attempt": 1, "stop_requested_by": "ada"}
    found = endings.of_attempt([outcomes.outcome_of(0, "pod-w0", record)], 2)
    assert [(outcome.state, outcome.record) for outcome in found] == [("gone", None)]
    assert endings.stop_requested_by(found) == "ada"


def test_a_takeover_with_a_used_up_budget_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = recovery.options_of(spec.RunSpec("r1", ("x",)), {})
    spent = recovery.Recovery("r1", 1, Plan(()), options, max_preemptions=0, preemptions=1, pending=True, counted=True)
    recovery.write(tmp_path, spent)
    words: Any = SimpleNamespace(run="r1", since=None)
    with pytest.raises(UsageError, match="--max-preemptions 0 is used up"):
        attach._take_over(stand_in(tmp_path), words)
    assert not recovery.is_kept(tmp_path, "r1")


def test_an_attempt_that_is_refused_for_a_stop_ends_the_recovery_as_stopped(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    world = World(FAILED, DONE)
    world.refusals = [("start", Reply("", {}, "held", "run r1 was stopped by ada"))]
    call = world.call

    async def stopped(requests: Any, action: str, **more: Any) -> dict[str, Reply]:
        if action == "start":
            world.endings[1] = {**FAILED, "stop_requested_by": "ada"}
        return await call(requests, action, **more)

    monkeypatch.setattr(world, "call", stopped)
    code, _, _ = run(world, max_failures=5)
    assert (code, [sent["attempt"] for sent in world.specs]) == (1, [2])
    assert "run r1: stopped; it will not be started again" in capsys.readouterr().err


@pytest.mark.parametrize("may_be_on", [False, True])
@pytest.mark.parametrize(("state", "limit"), [("PREEMPTED", None), ("PREEMPTED", 0), ("READY", None)])
def test_a_node_that_is_taken_away_under_the_first_start_is_brought_back(
    run: Any, tmp_path: Path, state: str, limit: int | None, may_be_on: bool
) -> None:
    world = World(None, DONE)

    async def starts(driver: Driver) -> int:
        keep(driver, attempt=0)
        driver.first = pod(2)
        driver.take(Planned(driver.kept.plan))
        driver.starts()
        world.state = state
        if may_be_on:
            driver.may_be_on()
        raise launch.NotStarted([Reply("pod-w0", {}, "failed", "D-Bus connection terminated")])

    if state == "READY" or limit == 0:
        error = launch.NotStarted if state == "READY" else UnreachableError
        with pytest.raises(error):
            run(world, first=starts, max_preemptions=limit)
        assert world.done == []
        assert recovery.is_kept(tmp_path, "r1") is (may_be_on and state == "READY")
    else:
        code, _, job = run(world, first=starts, max_preemptions=limit)
        assert (code, job.kept.attempt, job.kept.preemptions) == (0, 2, 1)
        assert world.done[0] == "bring back r1/2"


def test_a_run_that_lost_its_nodes_in_its_first_start_is_found(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[Any] = []

    async def starts(driver: Driver) -> int:
        keep(driver, attempt=0)
        recovery.forget(tmp_path, "r1")
        await driver.begin(pod(2), None)
        driver.starts()
        world.state = "PREEMPTED"
        raise launch.NotStarted([Reply("pod-w0", {}, "failed", "D-Bus connection terminated")])

    world = World(None, DONE)
    bring_back = world.bring_back

    def looked(*args: Any, **named: Any) -> dict[str, Seen]:
        known.append(records.read(tmp_path, "r1"))
        return bring_back(*args, **named)

    monkeypatch.setattr(world, "bring_back", looked)
    code, *_ = run(world, first=starts)
    assert (code, [record.hosts for record in known]) == (0, [("pod-w0", "pod-w1")])


def test_an_attempt_of_another_machine_is_followed_and_not_configured(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    world = World(PREEMPTED, None, DONE)
    bring_back, status = world.bring_back, world.status

    def elsewhere(*args: Any, **named: Any) -> dict[str, Seen]:
        world.attempt = 3
        return bring_back(*args, **named)

    def on(host: str) -> Reply:
        found = status(host)
        return Reply(host, {"record": {**found.value["record"], "state": "running"}}) if world.attempt == 3 else found

    monkeypatch.setattr(world, "bring_back", elsewhere)
    monkeypatch.setattr(world, "status", on)
    code, world, job = run(world)
    assert (code, job.kept.attempt) == (0, 3)
    assert world.done == ["bring back r1/2"], "nothing was configured or started from here"
    assert "attempt 3 was started by somebody else; following that attempt" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [FAILED, PREEMPTED])
def test_a_full_disk_does_not_stop_the_next_attempt_on_known_nodes(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, ending: Any
) -> None:
    world = World(ending, DONE)

    def full(*_: object) -> Any:
        raise unwritable(Path("known_hosts"), OSError(28, "No space left on device"))

    monkeypatch.setattr(world, "workers_of", full)
    if ending == PREEMPTED:
        with pytest.raises(UnwritableError):
            run(world, max_failures=1)
        return
    code, _, job = run(world, max_failures=1)
    assert (code, job.kept.attempt) == (0, 2)
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["failed", "held"])
def test_a_worker_that_stays_unready_ends_the_recovery_after_retries(run: Any, kind: str) -> None:
    refusal = ("start", Reply("", {}, kind, "the chips are not there yet"))
    world = World(PREEMPTED, DONE, DONE, DONE)
    world.refusals = [refusal]
    code, world, _ = run(world)
    assert code == 0
    world = World(PREEMPTED, *[DONE] * 9)
    world.refusals = [refusal] * decide.REFUSALS
    with pytest.raises(launch.NotStarted):
        run(world)


def test_pauses_between_refused_starts_double_until_an_attempt_is_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an attempt of its own, which its workers remember as refused."""
    refused = [{**ended("refused"), "reason": "port 8482 cannot be reached"}] * 3
    world = World(PREEMPTED, *refused, PREEMPTED, *refused[:2], DONE)
    call = world.call

    async def refusing(requests: Any, action: str, **options: Any) -> dict[str, Reply]:
        number = requests["pod-w0"]["spec"]["attempt"] if action == "start" and "pod-w0" in requests else 0
        if number not in (2, 3, 4, 6, 7):
            return await call(requests, action, **options)
        world.attempt = number
        return {host: Reply(host, {}, "failed", "port 8482 cannot be reached") for host in requests}

    monkeypatch.setattr(world, "call", refusing)
    code, _, job = run(world, max_preemptions=2)
    assert (code, job.kept.attempt) == (0, 8)
    assert world.pauses == [15, 30, 60, 15, 30]


def test_a_node_lost_during_a_start_is_a_preemption(run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """systemd answers while its host goes down."""
    world = World(PREEMPTED, None, DONE, DONE)
    call, dying = world.call, [Reply("", {}, "failed", "D-Bus connection terminated")]

    async def going(requests: Any, action: str, **more: Any) -> dict[str, Reply]:
        if action == "start" and dying:
            world.state, world.refusals = "PREEMPTED", [("start", dying.pop())]
        return await call(requests, action, **more)

    monkeypatch.setattr(world, "call", going)
    code, _, job = run(world)
    assert (code, job.kept.preemptions) == (0, 2)
    assert "attempt 2: node pod is PREEMPTED; bringing its nodes back" in capsys.readouterr().err


def test_a_stop_between_two_attempts_ends_the_recovery(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(FAILED, DONE)
    bring_back = world.bring_back

    def stopped(*args: Any, **named: Any) -> dict[str, Seen]:
        world.endings[1] = {**FAILED, "stop_requested_by": "ada"}
        return bring_back(*args, **named)

    monkeypatch.setattr(world, "bring_back", stopped)
    code, world, job = run(world, max_failures=5)
    assert (code, job.kept.attempt, world.done) == (1, 1, ["bring back r1/2"])


@pytest.mark.parametrize("endings", [(SILENT,), (PREEMPTED, SILENT)], ids=["at once", "in a later attempt"])
def test_a_recovery_ends_where_a_worker_cannot_tell_and_starts_nothing(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, endings: Any
) -> None:
    """Its launcher is being replaced, for example: the run goes on."""
    world = World(*endings, DONE)
    call, asked = world.call, []

    async def refusing(requests: Any, action: str, **more: Any) -> dict[str, Reply]:
        if action != "status" or world.attempt < len(endings):
            return await call(requests, action, **more)
        asked.append(action)
        return {host: Reply(host, {}, "invalid", "this launcher speaks another protocol") for host in requests}

    monkeypatch.setattr(world, "call", refusing)
    with pytest.raises(attempt.CannotTell, match="cannot tell whether the run is active: this launcher speaks another"):
        run(world)
    assert len(asked) == attempt.CANNOT_TELL
    assert max([0, *(sent["attempt"] for sent in world.specs)]) == (2 if len(endings) > 1 else 0)
    assert "recover: tpu_ops attach r1 --recover" in capsys.readouterr().err


@pytest.mark.parametrize("git", ["", f"vision@{COMMIT}"])
def test_the_rest_of_an_ended_attempt_is_ended_before_the_next_one(run: Any, git: str) -> None:
    # Its end was on its way to the slices that are left when whoever recovered it died.
    code, world, _ = run(World(ended("running"), DONE), pending=True, git=git)
    assert code == 0
    assert world.done[:2] == ["bring back r1/2", "stop 1 others"]
    assert world.done[-2:] == ["start 2", "start 2"]


def test_nodes_are_looked_for_and_named_in_the_order_of_the_plan(run: Any) -> None:
    names = [f"{NODE}-{number}" for number in (9, 3, 7, 1, 5)]
    world = World(None)
    asked: list[str] = []

    def known(found: Sequence[str]) -> tuple[Any, list[Worker]]:
        asked.extend(found)
        return SimpleNamespace(warnings=()), []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "workers_of", known)
        with pytest.raises(UsageError) as refusal:
            run(world, pending=True, plan=Plan(tuple(Made(name, "0", {}) for name in names)))
    assert asked == names
    assert refusal.value.where == ", ".join(names)


def test_ranks_on_the_slices_that_are_left_are_ended_before_the_next_attempt(run: Any, tmp_path: Path) -> None:
    *_, job = run(World(DONE))
    asked: list[tuple[str, Any]] = []

    async def call(requests: Any, action: str, **_: Any) -> dict[str, Reply]:
        asked.append((action, requests))
        return {host: Reply(host, {"record": {**ended("stopped", intent="stop"), "attempt": 1}}) for host in requests}

    one = job.driver.attempt(SimpleNamespace(call=call), {"a-w0": "n/a", "b-w0": "n/b"})
    one.lost = job.driver.lost = {"n/a": "node a is PREEMPTED"}
    outcomes = asyncio.run(one.without_lost())
    assert [(outcome.rank, outcome.host, outcome.state) for outcome in outcomes] == [
        (0, "a-w0", "gone"),
        (1, "b-w0", "stopped"),
    ]
    assert [(action, list(requests)) for action, requests in asked] == [("stop", ["b-w0"])]
    assert asked[0][1]["b-w0"]["reason"] == "node a is PREEMPTED"
    # Its ranks were stopped by nobody who wants the run to end.
    assert isinstance(job.driver.after(outcomes), Next)
    assert recovery.read(tmp_path, "r1").pending


def test_a_name_with_local_logs_or_in_recovery_is_refused(run: Any, tmp_path: Path) -> None:
    *_, job = run(World(DONE))
    with pytest.raises(UsageError, match="logs of a run with this name"):
        asyncio.run(job.driver.begin(pod(2), None))
    keep(job.driver)
    with pytest.raises(UsageError, match="as far as this machine knows, the run has not ended"):
        asyncio.run(job.driver.begin(pod(2), None))


@pytest.fixture
def second(run: Any, tmp_path: Path) -> recovering.Recovering:
    """What another `train --recover` of the same name makes, before it has asked anybody."""
    _, world, job = run(World(DONE))
    shutil.rmtree(tmp_path / "runs/r1")
    kept = replace(job.kept, attempt=0, pending=True)
    return recovering.Recovering(job._settings, kept, job.driver.spec, job._args, begun=False, uses=world)


def test_fields_that_a_recreated_node_may_lack_are_named_once(second: recovering.Recovering, capsys: Any) -> None:
    services: Any = second.driver._services
    services.lacking = ["queued resource q", "node b"]
    asyncio.run(second.driver.begin(pod(2), None))
    assert capsys.readouterr().err == (
        "warning: queued resource q, node b: some fields are unknown to this version of tpu_ops "
        "and may be missing after a recreation\n"
    )


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_controller_that_died_before_any_contact_can_be_replaced(
    run: Any, second: recovering.Recovering, tmp_path: Path, capsys: Any, elsewhere: bool
) -> None:
    asyncio.run(second.driver.begin(pod(2), None))
    if elsewhere:
        earlier = records.new("r1", ("a", "b"), ("7", "8"), ("a-w0", "b-w0"), ("true",))
        records.write(tmp_path, earlier)
    kept = recovery.read(tmp_path, "r1")
    world = World(None, DONE, attempt=0)
    world.refusal = ApiError("a bad moment", status="UNAVAILABLE")
    code, world, job = run(world, pending=kept.pending, attempt=kept.attempt)
    assert (code, job.kept.preemptions, job.kept.failures) == (0, 0, 0)
    assert world.done == ["bring back r1/1", "bring back r1/1", "start 1", "start 1"]
    assert "run r1, not begun: a bad moment; trying again" in capsys.readouterr().err
    assert not (tmp_path / "runs/r1/recovery.json").exists()


async def test_stop_removes_the_files_of_a_controller_that_died_early(
    second: recovering.Recovering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contact, "fanout", lambda _: None)
    fleet: Any = SimpleNamespace(settings=stand_in(tmp_path), workers=(), listed=())
    source = tmp_path / "digits"
    source.mkdir()
    (source / "train.py").write_text("first")
    await second.driver.begin(pod(2), sync.read(source))
    assert await termination.end_named(fleet, "r1") == ([], None)
    assert logged.messages == ["run r1: it had not begun, and will not be started"]
    assert not (tmp_path / "runs/r1/recovery.json").exists()
    assert not (tmp_path / "runs/r1/code").exists()


def test_stop_ends_a_start_that_is_still_bringing_the_code(
    second: recovering.Recovering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "EVERY", 0.01)
    answers: list[bool] = []
    stopping = threading.Thread(target=lambda: answers.append(recovery.stop(tmp_path, "r1", 5.0)))

    async def brings() -> int:
        await second.driver.begin(pod(2), None)
        stopping.start()
        await asyncio.sleep(30)
        return 0

    with recovery.alone(second._settings.state_dir, "r1"):
        code = second.to_the_end(brings())
    stopping.join()
    assert (code, answers) == (1, [True])
    assert not (tmp_path / "runs/r1/recovery.json").exists()


def test_code_and_stop_file_of_a_start_that_died_are_discarded(second: recovering.Recovering, tmp_path: Path) -> None:
    left = tmp_path / "runs/r1/code/digits/old.py"
    left.parent.mkdir(parents=True)
    left.touch()
    (tmp_path / "runs/r1/stop").touch()
    source = tmp_path / "digits"
    source.mkdir()
    (source / "train.py").touch()
    tree = asyncio.run(second.driver.begin(pod(2), sync.read(source)))
    assert tree is not None
    assert [path.name for path in tree.source.iterdir()] == ["train.py"]
    assert not second.driver.stop_wanted()


def test_a_run_that_could_not_be_started_leaves_nothing_to_take_over(
    second: recovering.Recovering, tmp_path: Path
) -> None:
    async def refused() -> int:
        await second.driver.begin(pod(2), None)
        assert (tmp_path / "runs/r1/recovery.json").exists()
        raise OpsError("no")

    with pytest.raises(OpsError, match="no"):
        second.to_the_end(refused())
    assert not (tmp_path / "runs/r1/recovery.json").exists()


def test_ctrl_c_while_the_nodes_are_looked_up_leaves_nothing_to_take_over(
    second: recovering.Recovering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, gone = threading.Event(), threading.Event()

    def slow(*_: Any) -> Any:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        go.wait(30)
        gone.set()
        return second.kept.plan

    monkeypatch.setattr(second.driver._services, "remember", slow)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    async def begun() -> int:
        await second.driver.begin(pod(2), None)
        return 0

    try:
        assert second.to_the_end(begun()) == ExitCode.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
        go.set()
    assert gone.wait(30)
    left = [thread for thread in threading.enumerate() if thread.name == "renewal"]
    for thread in left:
        thread.join(30)
    assert not (tmp_path / "runs/r1/recovery.json").exists()


@pytest.mark.parametrize("may_be_on", [True, False])
def test_ctrl_c_at_an_uncertain_start_keeps_the_files_and_names_the_next_step(
    second: recovering.Recovering, tmp_path: Path, capsys: Any, may_be_on: bool
) -> None:
    async def starts() -> int:
        await second.driver.begin(pod(2), None)
        second.driver.starts()
        if may_be_on:
            second.driver.may_be_on()
        raise launch.Interrupted(may_be_on=may_be_on)

    assert second.to_the_end(starts()) == ExitCode.INTERRUPTED
    assert (tmp_path / "runs/r1/recovery.json").exists() is may_be_on
    said = capsys.readouterr().err
    assert ("run r1 may be running; nothing will restart it\n  stop:    tpu_ops stop r1\n" in said) is may_be_on
    assert ("  recover: tpu_ops attach r1 --recover" in said) is may_be_on


@pytest.mark.parametrize("state", ["stopped", "unreachable"])
def test_a_second_ctrl_c_that_stops_the_run_leaves_nothing_to_take_over(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, state: str
) -> None:
    async def end(*_: object) -> control.Stopped:
        return control.Stopped((outcomes.Outcome(0, "pod-w0", state),), already=False)

    async def pressed_twice(one: object, rank: int) -> None:
        if rank == 0:
            asyncio.get_running_loop().call_later(0.05, signal.raise_signal, signal.SIGINT)
        await _pressed(one, rank)

    recovery.write(tmp_path, recovery.Recovery("r1", 1, Plan(()), recovery.options_of(spec.RunSpec("r1", ("x",)), {})))
    monkeypatch.setattr(termination, "end", end)
    monkeypatch.setattr(follow, "RETRY_LIMIT", 60)
    monkeypatch.setattr(follow.Follower, "_follow", pressed_twice)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, *_ = run(World(SILENT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == ExitCode.INTERRUPTED
    # Where a worker does not say that it has ended it may be on, and `attach --recover` may be wanted after all.
    assert (tmp_path / "runs/r1/recovery.json").exists() is (state == "unreachable")
    assert ("run r1: stopped; it will not be started again" in capsys.readouterr().err) is (state == "stopped")


@pytest.mark.parametrize("may_be_on", [True, False])
def test_ctrl_c_at_the_start_of_a_later_attempt_tells_whether_it_may_be_on(
    run: Any, tmp_path: Path, capsys: Any, may_be_on: bool
) -> None:
    async def interrupted(*_: Any) -> None:
        raise launch.Interrupted(may_be_on=may_be_on)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start", interrupted)
        assert run(World(PREEMPTED, DONE))[0] == ExitCode.INTERRUPTED
    kept = recovery.read(tmp_path, "r1")
    assert (kept.attempt, kept.pending) == (2, not may_be_on)
    assert f"run r1 {'may be' if may_be_on else 'is not'} running; nothing will restart it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "refusal", ["as far as this machine knows, the run has not ended", "run r1 of ada has held this worker"]
)
def test_a_refused_second_start_keeps_the_files_of_the_first(
    second: recovering.Recovering, refusal: str, tmp_path: Path
) -> None:
    recovery.write(tmp_path, second.kept)
    code = tmp_path / "runs/r1/code/digits/train.py"
    code.parent.mkdir(parents=True)
    code.write_text("first")

    async def refused() -> int:
        if refusal.startswith("run"):
            raise HostError(refusal)
        await second.driver.begin(pod(2), None)
        return 0

    with pytest.raises(OpsError, match=refusal):
        second.to_the_end(refused())
    assert recovery.read(tmp_path, "r1").plan == second.kept.plan
    assert code.read_text() == "first"


async def _pressed(_: object, rank: int) -> None:
    if rank == 0:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
    await asyncio.Event().wait()


def test_the_options_of_train_are_kept_for_the_recovery(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    words = ["pod", "--recover", "--max-preemptions", "3", "--env", "A=1", "--env-file", "e", "--secret", "S=~/s"]
    args = parser.parse_args(words)
    asked = spec.RunSpec("r1", ("true",), {"A": "1", "B": "of the file"}, lease=20.0)
    fleet: Any = SimpleNamespace(settings=stand_in(tmp_path), warnings=())
    kept = train_job.Job(fleet, pod(2), asked, None, [0], args).recovered().kept
    assert (kept.max_preemptions, kept.max_failures, kept.code, kept.force) == (3, 0, False, False)
    assert (kept.options["env"], kept.options["lease"]) == ({"A": "1"}, 20.0)
    assert kept.env_files == (str(Path("e").absolute()),)
    assert kept.secret_words == (f"S={Path.home() / 's'}",)
    assert not list(tmp_path.iterdir()), "nothing stands anywhere before the run is started"


def test_attach_takes_over_what_is_kept(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, job = run(World(DONE))
    keep(job.driver, pending=True)
    taken: list[Any] = []

    def to_the_end(self: recovering.Recovering, work: object) -> int:
        taken.append((self.kept.run_id, self.kept.plan, self.kept.pending, work))
        return 7

    monkeypatch.setattr(recovering.Recovering, "to_the_end", to_the_end)
    monkeypatch.setattr("tpu_ops.cli.attach.config.load", lambda _: stand_in(tmp_path))
    parser = argparse.ArgumentParser()
    attach.add_arguments(parser)
    assert attach.run(parser.parse_args(["r1", "--recover"])) == 7
    assert taken == [("r1", job.kept.plan, True, None)]
    with pytest.raises(UsageError, match="leave out --since"):
        attach.run(parser.parse_args(["r1", "--recover", "--since", "10m"]))


@pytest.mark.parametrize("as_json", [False, True])
def test_a_takeover_reports_the_faults_of_all_workers(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, as_json: bool
) -> None:
    _, world, job = run(World(DONE))
    world.endings[1] = FAILED
    capsys.readouterr()
    keep(job.driver, pending=True, preemptions=1)
    world.refusals = [("probe", Reply("", {}, "failed", what)) for what in ("no launcher", "no python")]
    monkeypatch.setattr(recovering, "FleetServices", lambda *_, **__: world)
    monkeypatch.setattr("tpu_ops.cli.attach.config.load", lambda _: stand_in(tmp_path))
    parser = argparse.ArgumentParser()
    attach.add_arguments(parser)
    with pytest.raises(preflight.PreflightError) as caught:
        attach.run(parser.parse_args(["r1", "--recover", *(["--json"] if as_json else [])]))
    out = capsys.readouterr().out
    if not as_json:
        assert [line.split()[:3] for line in out.splitlines()[1:]] == [
            ["pod-w0", "no", "launcher"],
            ["pod-w1", "no", "python"],
        ]
        return
    told = caught.value.to_json()
    assert {key: told[key] for key in ("state", "attempt", "preemptions")} == {
        "state": "refused",
        "attempt": 1,
        "preemptions": 1,
    }
    assert [fault["problem"] for fault in told["faults"]] == ["no launcher", "no python"]
