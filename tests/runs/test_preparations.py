"""Messages about workers without a launcher while a local recovery is configuring them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import stand_in
from tpu_ops.cli import doctor, faults, runs
from tpu_ops.cloud.remaking import Plan
from tpu_ops.errors import HostError, OpsError
from tpu_ops.runs import control, launch, overview, preflight, records, recovery, spec
from tpu_ops.runs.doctor import Finding, unconfigured
from tpu_ops.runs.preparations import each_at_work, problem_of, way_back
from tpu_ops.ssh.replies import Reply

BARE = Reply("pod-w0", {}, "no-launcher", "the launcher is not installed", "tpu_ops configure pod-w0")
LOST = Reply("pod-w1", {}, "unreachable", "no route to host")
NOTE = "run r1: a process on this machine is preparing attempt 2"
WAIT = "wait until run r1 has started again, or end it: `tpu_ops stop r1`"


@pytest.fixture
def at_work(tmp_path: Path) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """Return what a recovery of a run on `pod` holds while it brings it back."""
    return lambda: recovering(tmp_path, "r1", "pod")


def recovering(state_dir: Path, run_id: str, node: str) -> contextlib.AbstractContextManager[Any]:
    """Write a recovery of a run on a node; return what the process of the recovery holds."""
    hosts = (f"{node}-w0", f"{node}-w1")
    records.write(state_dir, records.RunRecord(run_id, (node,), ("1",), hosts, ("x",), since=1.0))
    options = recovery.options_of(spec.RunSpec(run_id, ("x",)), {})
    recovery.write(state_dir, recovery.Recovery(run_id, 1, Plan(()), options, pending=True))
    return recovery.alone(state_dir, run_id)


def test_nothing_advises_to_configure_workers_in_recovery(tmp_path: Path, at_work: Any) -> None:
    def said(*silent: Reply) -> OpsError:
        problem = problem_of(silent, tmp_path)
        assert problem is not None
        return problem

    with at_work():
        assert NOTE in said(BARE).what
        assert said(BARE).what.endswith("; this process configures new workers itself")
        assert said(BARE).fix == WAIT
        assert said(BARE._replace(host="else-w0")).fix == "tpu_ops configure pod-w0"
        assert said(BARE, LOST).fix == WAIT, "its node is being brought back"
        assert "run the same command again" in said(BARE, LOST._replace(host="else-w1")).fix
        with pytest.raises(HostError) as caught:
            runs.show(overview.Overview((), control.Found([], (BARE,))), stand_in(tmp_path), as_json=False)
        assert (NOTE in caught.value.what, caught.value.fix) == (True, WAIT)
    assert said(BARE).fix == "tpu_ops configure pod-w0", "it has ended"
    assert problem_of([], tmp_path) is None


def test_each_of_several_recoveries_is_named_for_its_own_workers(tmp_path: Path) -> None:
    hosts = ["pod-w0", "pod-w1", "duo-w0", "else-w0"]
    with recovering(tmp_path, "r1", "pod"), recovering(tmp_path, "r2", "duo"):
        fixes = {host: work.fix for host, work in each_at_work(tmp_path, hosts).items()}
        second = WAIT.replace("r1", "r2")
        assert fixes == {"pod-w0": WAIT, "pod-w1": WAIT, "duo-w0": second}
        problem = problem_of([BARE, LOST, BARE._replace(host="duo-w0")], tmp_path)
        assert problem is not None
        assert all(note in problem.what for note in (NOTE, NOTE.replace("r1", "r2")))
        assert problem.fix == f"{WAIT}; {second}"
        other = BARE._replace(host="else-w0", fix="tpu_ops configure else-w0")
        problem = problem_of([BARE, other], tmp_path)
        assert problem is not None
        assert problem.fix == f"tpu_ops configure else-w0; {WAIT}"
        fleet: Any = SimpleNamespace(settings=stand_in(tmp_path), workers=())
        assert way_back(fleet, ["duo-w0", "pod-w1"]) == f"{second}; {WAIT}"
        assert way_back(fleet, hosts).startswith(f"{WAIT}; {second}; `tpu_ops list` shows")


AWAY = preflight.Fault("pod-w0", "its node is PREEMPTED", "it does not come back: `tpu_ops delete pod`", True)


@pytest.mark.parametrize("fault", [preflight.fault_of_reply(BARE), AWAY], ids=["not configured", "taken away"])
@pytest.mark.parametrize("own", ["r2", "r1"])
def test_a_start_on_such_workers_is_told_so_and_the_recovery_itself_is_not(
    tmp_path: Path, at_work: Any, capsys: pytest.CaptureFixture[str], own: str, fault: preflight.Fault
) -> None:
    found, said = [fault], own == "r2"
    with (
        at_work(),
        pytest.raises(preflight.PreflightError) as caught,
        faults.told(own, stand_in(tmp_path), as_json=False),
    ):
        raise preflight.PreflightError(found, 2)
    told = capsys.readouterr()
    assert (NOTE in told.err) is said
    assert caught.value.fix == (WAIT if said else fault.fix)
    assert told.out == "", "the error has all of it"


def test_advice_to_configure_leaves_out_workers_that_a_recovery_configures(
    tmp_path: Path, at_work: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [preflight.fault_of_reply(BARE._replace(host="pod-w1", fix="tpu_ops configure pod-w1"))]
    found.append(preflight.fault_of_reply(BARE._replace(host="else-w0", fix="tpu_ops configure else-w0")))
    with (
        at_work(),
        pytest.raises(preflight.PreflightError) as caught,
        faults.told("r2", stand_in(tmp_path), as_json=True),
    ):
        raise preflight.PreflightError(found, 2)
    assert [fault.fix for fault in caught.value.faults] == [WAIT, "tpu_ops configure else-w0"]
    told, facts = capsys.readouterr(), caught.value.to_json()
    assert (told.err.count(NOTE), told.out) == (1, "")
    assert [row["fix"] for row in facts["faults"]] == [WAIT, "tpu_ops configure else-w0"]
    assert (facts["run_id"], facts["state"], facts["error"]["code"]) == ("r2", "refused", 1)


@pytest.mark.parametrize("may_be_on", [True, False])
def test_a_start_that_workers_refuse_at_last_tells_programs_the_same_of_them(tmp_path: Path, may_be_on: bool) -> None:
    """A start that may be active anyway does not count as refused."""
    refused = [Reply("pod-w1", {}, "failed", "no foo", "see `tpu_ops status r2`")]
    with pytest.raises(launch.NotStarted) as caught, faults.told("r2", stand_in(tmp_path), as_json=True):
        raise launch.NotStarted(refused, may_be_on=may_be_on)
    facts = caught.value.to_json()
    error = facts.pop("error")
    assert (error["problem"], error["where"]) == ("the run was not started: no foo", "pod-w1")
    rows = [{"worker": "pod-w1", "problem": "no foo", "fix": "see `tpu_ops status r2`"}]
    assert facts == ({} if may_be_on else {"run_id": "r2", "state": "refused", "faults": rows})


def test_doctor_does_not_advise_to_configure_workers_in_recovery(tmp_path: Path, at_work: Any) -> None:
    configure, other = preflight.configure("pod-w0"), preflight.configure("else-w0")
    wrong = (
        preflight.fault_of_reply(BARE),
        preflight.Fault("pod-w0", "TCMalloc is there", f"{configure} (role tcmalloc)"),
        preflight.Fault("pod-w0", "a chip is held", "tpu_ops who pod-w0"),
        preflight.Fault("else-w0", "the launcher is not installed", other),
    )

    def fixes() -> list[str]:
        (finding,) = unconfigured([Finding("answers", wrong, ("pod-w0", "else-w0"))], tmp_path)
        return [fault.fix for fault in finding.faults]

    with at_work():
        assert fixes() == [WAIT, WAIT, "tpu_ops who pod-w0", other]
    assert fixes() == [configure, f"{configure} (role tcmalloc)", "tpu_ops who pod-w0", other], "it has ended"


@pytest.mark.parametrize(
    ("asked", "faults_", "passed"),
    [
        (("pod-w0",), (), True),
        (("pod-w0",), (preflight.fault_of_reply(BARE),), False),
        ((), (preflight.fault_of_reply(BARE),), False),
        ((), (), None),
    ],
)
def test_a_check_without_any_answer_has_neither_passed_nor_failed(
    asked: tuple[str, ...], faults_: Any, passed: bool | None
) -> None:
    assert doctor.row(Finding("disk", faults_, asked))["passed"] is passed
