"""Nodes of one worker each: one name on two of them, and a stop while a node that was taken away is brought back."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable

import pytest

from tests.runs.conftest import BOTH
from tests.support.lab_api import LOCATION, LabApi
from tests.support.runs import PATIENCE, Bench, apart
from tpu_ops.errors import ExitCode

pytestmark = pytest.mark.lab


@pytest.fixture
def desk(bench: Bench, lab_api: LabApi, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Bench]:
    """What makes another machine, which knows the two workers as the nodes `a` and `b` of an API."""
    ids = {name: lab_api.create(name)["id"] for name in ("a", "b")}
    return lambda: apart(bench, tmp_path_factory.mktemp("desk"), ids, lab_api.grpc)


def states(bench: Bench, run_id: str) -> list[str]:
    """Return the states of a run of each worker's."""
    return [bench.record(index, run_id)["state"] for index in BOTH]


def test_a_stop_of_a_name_that_is_on_two_nodes_ends_one_run(bench: Bench, desk: Callable[[], Bench]) -> None:
    desks = {"a": desk(), "b": desk()}
    starts = [
        one.popen("train", node, "--detach", "--name", "twin", "--", "sleep", "600") for node, one in desks.items()
    ]
    for start in starts:
        _, said = start.communicate(timeout=60)
        assert start.returncode == 0, said
    for word, how in (("a", "run twin:"), ("twin", "run twin had already ended:")):
        stopped = desks["a"].tpu_ops("stop", word)
        assert stopped.returncode == 0, stopped.stderr
        assert how in stopped.stderr
        assert states(bench, "twin") == ["stopped", "running"]
    stopped = desks["b"].tpu_ops("stop", "twin")
    assert stopped.returncode == 0, stopped.stderr
    assert states(bench, "twin") == ["stopped", "stopped"]
    bench.clean()


def await_said(process: subprocess.Popen[str], text: str) -> None:
    """Wait until a command says something, or has ended."""
    assert process.stderr is not None
    found = ""
    for line in process.stderr:
        found += line
        if text in line:
            return
    raise AssertionError(f"{text!r} was never said: {found}")


def test_a_run_that_is_stopped_between_two_attempts_is_started_no_more(
    bench: Bench, desk: Callable[[], Bench], lab_api: LabApi
) -> None:
    here = desk()
    lab_api.fault(method="CreateNode", code="RESOURCE_EXHAUSTED", message="no capacity")
    train = here.popen("train", "a", "--recover", "--name", "between", "--", "sleep", "600")
    patience = threading.Timer(PATIENCE, train.kill)
    patience.start()
    try:
        await_said(train, "logs of all ranks go to")
        lab_api.done("DELETE", f"v2/{LOCATION}/nodes/a")
        bench.inside(0, "pkill -u ada -x sleep")
        await_said(train, "no capacity (RESOURCE_EXHAUSTED); next try in")
        stopped = here.tpu_ops("stop", "between")
        assert stopped.returncode == 0, stopped.stderr
        assert "run between: its nodes were being brought back; it is not started again" in stopped.stderr
        _, said = train.communicate()
    finally:
        patience.cancel()
        train.kill()
        train.wait()
    assert (train.returncode, "run between: stopped; it is not started again" in said) == (ExitCode.FAILED, True)
    record = bench.record(0, "between")
    assert (record["attempt"], record["state"], record["reason"]) == (1, "failed", "killed by SIGTERM")
    assert lab_api.call("GET", f"v2/{LOCATION}/nodes/a")[0] == 404
    again = here.tpu_ops("attach", "between", "--recover")
    assert (again.returncode, "nothing is kept here" in again.stderr) == (ExitCode.USAGE, True)
    bench.clean()
