"""The options of `tpu_ops train`, as far as they need no worker."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import pod, probe
from tests.support.specs import myself
from tpu_ops import config
from tpu_ops.cli import run as run_command
from tpu_ops.cli import runs_output
from tpu_ops.errors import UsageError
from tpu_ops.fleet import contact
from tpu_ops.runs import preflight, spec
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.ssh.replies import Reply, Result

VALUE = "hush-hush-hush"


def test_secrets_come_from_exported_variables_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"two\nlines\xff\r\n")
    found = spec.read_secrets(["A", f"B={tmp_path / 'token'}"], {"A": VALUE})
    assert found == {"A": VALUE, "B": "two\nlines\udcff"}
    run = spec.RunSpec("r1", ("true",), secrets=found)
    assert run.for_rank(pod(), 0)["secrets"] == found
    assert VALUE not in repr(run)


@pytest.mark.parametrize(
    ("word", "environ", "said"),
    [
        ("A", {}, "the variable A is not set here"),
        ("A", {"A": ""}, "the variable A is not set here"),
        (f"A={VALUE}", {}, "cannot read the file after `=`: No such file"),
        (f"A=~{VALUE}/x", {}, "there is no such home directory"),
        ("A=/dev/null", {}, "the file after `=` is empty"),
        (f"{VALUE}", {}, "not of the form NAME"),
        ("A", {"A": "x" * 65537}, "longer than 64 KiB"),
    ],
)
def test_a_secret_that_is_none_is_refused_and_never_shown(word: str, environ: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as wrong:
        spec.read_secrets([word], environ)
    assert said in str(wrong.value)
    assert VALUE not in str(wrong.value)


@pytest.mark.parametrize(
    ("env", "secrets"), [({"A": "1"}, {"A": VALUE}), ({"A_FILE": "1"}, {"A": VALUE}), ({}, {"A": VALUE, "A_FILE": "1"})]
)
def test_a_variable_set_by_a_secret_and_otherwise_is_refused(env: dict[str, str], secrets: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="leave out one of the two") as wrong:
        spec.RunSpec("r1", ("true",), env, secrets)
    assert VALUE not in str(wrong.value)


def ended(rank: int, state: str, exit_: dict[str, int] | None = None, first: int | None = None) -> Outcome:
    named = None if first is None else {"rank": first, "worker": f"pod-w{first}", "cause": "its own"}
    return Outcome(rank, f"pod-w{rank}", state, exit_, intent="stop", record={"first": named})


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([ended(0, "succeeded", {"code": 0}), ended(1, "succeeded", {"code": 0})], 0),
        ([ended(0, "stopped", {"code": 3}, 1), ended(1, "failed", {"code": 7}, 1)], 7),
        ([ended(0, "failed", {"signal": 9}, 0), ended(1, "stopped", {"signal": 15}, 0)], 137),
        # Nobody failed: a person stopped it.
        ([ended(0, "stopped", {"signal": 15}), ended(1, "stopped", {"code": 0})], 1),
        # A worker that was cut off ended its rank itself: that is no code of the command's.
        ([ended(0, "stopped", {"signal": 15}, 1), ended(1, "stopped", {"signal": 15}, 0)], 1),
        # Rank 1 ended with 0 and the others went on for too long.
        ([ended(0, "stopped", {"signal": 15}, 1), ended(1, "succeeded", {"code": 0}, 1)], 1),
        ([ended(0, "stopped", {"signal": 15}, 1), Outcome(1, "pod-w1", "unknown")], 1),
        ([ended(0, "running"), Outcome(1, "pod-w1", "unreachable")], 4),
    ],
)
def test_the_exit_code_may_be_that_of_the_rank_that_failed_first(outcomes: list[Outcome], code: int) -> None:
    assert runs_output.exit_code(outcomes, of_rank=True) == code
    assert runs_output.exit_code(outcomes) == (code if code in {0, 4} else 1)


def test_exit_code_rank_is_that_of_the_first_failed_worker() -> None:
    results = [Result("a", 0), Result("b", 9), Result("c", 3)]
    assert run_command.exit_code(results, of_rank=True) == 9
    assert run_command.exit_code([*results, Result("d", None, problem="down", reached=False)], of_rank=True) == 9
    assert run_command.exit_code([Result("a", None, problem="late")], of_rank=True) == 1
    assert run_command.exit_code([Result("a", 0)], of_rank=True) == 0


MUTE = Result("b", None, problem="did not answer within 5 s", reached=False)
LATE = Result("a", None, b"step 1\n", problem="did not end within 5 s")
LEAVE = "to leave something running, redirect its output: `... >/tmp/log 2>&1 &`"


@pytest.mark.parametrize(
    ("results", "code", "fix"),
    [
        ([Result("a", 0), MUTE], 4, "  fix: give the command more time with --timeout"),
        (
            [LATE, MUTE],
            1,
            f"  fix: give the command more time with --timeout; {LEAVE}",
        ),
        ([Result("a", 0)], 0, ""),
    ],
)
def test_the_fix_for_a_command_that_takes_too_long_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: list[Result], code: int, fix: str
) -> None:
    workers = [SimpleNamespace(host=result.host) for result in results]
    fleet = SimpleNamespace(settings=SimpleNamespace())
    monkeypatch.setattr(config, "load", lambda _: None)
    for name, told in (("find", (fleet, workers)), ("serving", fleet), ("out_of_reach", {})):
        monkeypatch.setattr(contact, name, lambda *_, told=told: told)
    monkeypatch.setattr(contact, "run", lambda *_: {result.host: result for result in results})
    parser = argparse.ArgumentParser()
    run_command.add_arguments(parser)
    args = parser.parse_args(["a,b", "--timeout", "5"])
    args.command = ["true"]
    assert run_command.run(args) == code
    assert capsys.readouterr().err.splitlines() == [fix] * bool(fix)


class Probes:
    """Stands for two workers that describe themselves."""

    def __init__(self, **changes: Any) -> None:
        self._probes = {"pod-w0": probe(), "pod-w1": probe(**changes)}

    async def call(self, requests: Any, *_: Any, **__: Any) -> dict[str, Reply]:
        return {host: Reply(host, {"probe": self._probes[host]}) for host in requests}


FULL = {"/": {"free": 1, "total": 2}}
OTHER = {"path": "/v", "exists": True, "asked": False, "python": "3.12", "packages": {}, "digest": "d2"}


async def test_a_name_that_a_worker_knows_is_refused_before_anything_is_brought() -> None:
    class Knows(Probes):
        async def call(self, requests: Any, *_: Any, **__: Any) -> dict[str, Reply]:
            replies = await super().call(requests)
            known = requests["pod-w1"].get("run_id") == "r1"
            return replies | {"pod-w1": Reply("pod-w1", {**replies["pod-w1"].value, "known": known})}

    fanout: Any = Knows()
    with pytest.raises(preflight.PreflightError) as caught:
        await preflight.check(fanout, pod(2), run_id="r1", forced=lambda fault: pytest.fail(str(fault)))
    assert [(fault.worker, fault.problem, fault.fix) for fault in caught.value.faults] == [
        ("pod-w1", "run r1 has been on this worker before", "choose another --name")
    ]
    for run_id in ("r2", ""):
        assert await preflight.check(fanout, pod(2), run_id=run_id)


async def test_a_name_whose_run_is_on_the_worker_offers_to_follow_it() -> None:
    class On(Probes):
        async def call(self, requests: Any, *_: Any, **__: Any) -> dict[str, Reply]:
            found = await super().call(requests)
            return found | {"pod-w1": Reply("pod-w1", {**found["pod-w1"].value, "known": True})}

    me = myself()
    holder = {"run_id": "r1", "person": me.name, "uid": me.uid, "since": 0.0}
    fanout: Any = On(holder=holder)
    with pytest.raises(preflight.PreflightError) as caught:
        await preflight.check(fanout, pod(2), run_id="r1")
    (fault,) = caught.value.faults
    assert fault.problem == f"run r1 of {me.name} has held this worker since 1970-01-01 00:00 UTC"
    assert (
        fault.fix == "wait for the run (`tpu_ops attach r1` follows it), or `tpu_ops stop r1`; or choose another --name"
    )


@pytest.mark.parametrize(
    ("changes", "overridden", "left"),
    [
        ({"space": FULL}, ["space"], []),
        ({"clock": 2000.0}, ["clock"], []),
        ({"venv": OTHER}, ["same"], []),
        ({"holder": {"run_id": "r1", "person": "bob", "since": 0}, "space": FULL}, ["space"], ["free"]),
        ({"holders": [{"pid": 7, "user": "bob", "command": "x"}]}, [], ["free"]),
        ({"chips": []}, [], ["chips"]),
        ({"venv": OTHER | {"exists": False}}, [], ["environment"]),
    ],
)
async def test_force_overrides_what_may_be_well_and_never_what_others_hold(
    changes: dict[str, Any], overridden: list[str], left: list[str]
) -> None:
    fanout: Any = Probes(**changes)
    with pytest.raises(preflight.PreflightError) as without:
        await preflight.check(fanout, pod(2))
    assert sorted(fault.check for fault in without.value.faults) == sorted(overridden + left)
    told: list[preflight.Fault] = []
    if left:
        with pytest.raises(preflight.PreflightError) as wrong:
            await preflight.check(fanout, pod(2), forced=told.append)
        assert [fault.check for fault in wrong.value.faults] == left
    else:
        assert set(await preflight.check(fanout, pod(2), forced=told.append)) == {"pod-w0", "pod-w1"}
    assert [fault.check for fault in told] == overridden


def test_forcible_checks_are_a_part_of_all_checks() -> None:
    assert set(preflight.FORCIBLE) < set(preflight.CHECKS)
