"""Nodes of one worker each: one name on two of them, starts that are interrupted, and stops that a recovery hears."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tests.runs.conftest import BOTH
from tests.support.lab_api import LOCATION, LabApi
from tests.support.recovery import lines_until
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


def test_delete_names_the_run_that_another_machine_has_started(bench: Bench, desk: Callable[[], Bench]) -> None:
    here, elsewhere = desk(), desk()
    begun = elsewhere.tpu_ops("train", "a", "--detach", "--name", "busy", "--", "sleep", "600", person="bob")
    assert begun.returncode == 0, begun.stderr
    looked = here.tpu_ops("delete", "a", "--dry-run", "--json")
    assert json.loads(looked.stdout)["runs"] == [{"run_id": "busy", "person": "bob"}]
    assert looked.stderr == "warning: run busy of bob is active on this node: `tpu_ops who a` shows more\n"
    both = here.tpu_ops("delete", "a,b", "--dry-run", "--json")
    on_each = [row["runs"] for row in json.loads(both.stdout)["nodes"]]
    assert on_each == [[{"run_id": "busy", "person": "bob"}], []]
    assert both.stderr == "warning: run busy of bob is active on these nodes: `tpu_ops who a` shows more\n"
    halted = here.tpu_ops("node", "stop", "a", "--dry-run", "--json")
    assert json.loads(halted.stdout)["runs"] == [{"run_id": "busy", "person": "bob"}]
    assert halted.stderr == looked.stderr
    terminal, stdin = os.openpty()
    os.write(terminal, b"n\n")
    command = [sys.executable, "-m", "tpu_ops.cli.main", "delete", "a"]
    asked = subprocess.run(
        command, env=here.environ(), stdin=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    os.close(terminal)
    os.close(stdin)
    assert asked.stderr.startswith("run busy of bob is active on this node; delete node a, zone")
    assert asked.stderr.endswith("[y/N]\nnothing was deleted\n")
    assert elsewhere.tpu_ops("stop", "busy", person="bob").returncode == 0
    free = here.tpu_ops("delete", "a", "--dry-run", "--json")
    assert (json.loads(free.stdout)["runs"], free.stderr) == ([], "")


def test_a_run_that_is_stopped_between_two_attempts_is_started_no_more(
    bench: Bench, desk: Callable[[], Bench], lab_api: LabApi
) -> None:
    here = desk()
    lab_api.fault(method="CreateNode", code="RESOURCE_EXHAUSTED", message="no capacity")
    train = here.popen("train", "a", "--recover", "--name", "between", "--", "sleep", "600")
    patience = threading.Timer(PATIENCE, train.kill)
    patience.start()
    try:
        lines_until(train, "logs of all ranks go to")
        lab_api.done("DELETE", f"v2/{LOCATION}/nodes/a")
        bench.inside(0, "pkill -u ada -x sleep")
        lines_until(train, "no capacity (RESOURCE_EXHAUSTED); next try in")
        stopped = here.tpu_ops("stop", "between")
        assert stopped.returncode == 0, stopped.stderr
        assert "run between: its nodes were being brought back; it will not be started again" in stopped.stderr
        _, said = train.communicate()
    finally:
        patience.cancel()
        train.kill()
        train.wait()
    assert (train.returncode, "run between: stopped; it will not be started again" in said) == (ExitCode.FAILED, True)
    record = bench.record(0, "between")
    assert (record["attempt"], record["state"], record["reason"]) == (1, "failed", "killed by SIGTERM")
    assert lab_api.call("GET", f"v2/{LOCATION}/nodes/a")[0] == 404
    again = here.tpu_ops("attach", "between", "--recover")
    assert (again.returncode, "this machine has no recovery state" in again.stderr) == (ExitCode.USAGE, True)
    bench.clean()


def test_a_start_on_one_worker_that_is_interrupted_is_on_or_not_as_it_says(
    bench: Bench, desk: Callable[[], Bench]
) -> None:
    """Between the request and the first record nothing on the worker tells of the run but who asks for it."""
    here, said = desk(), set[str]()
    for number, moment in enumerate((0.0, 0.08, 0.16, 0.3, 0.6, 1.2, 2.4, 4.8)):
        if moment > 0.6 and "on" in said:
            break  # the later ones are for a busy machine
        name = f"moment-{number}"
        train = here.popen("train", "a", "--name", name, "--", "sleep", "600")
        lines_until(train, "1 worker ready in")
        time.sleep(moment)  # not for anything: these are the moments at which it is interrupted
        train.send_signal(signal.SIGINT)
        _, told = train.communicate(timeout=60)
        assert train.returncode == ExitCode.INTERRUPTED, told
        bench.await_(lambda: not bench.helpers(0), "nobody asks the worker for anything any more")
        if "interrupted before the run was started" in told:
            said.add("not on")
            bench.clean()
        else:
            said.add("on")
            assert f"tpu_ops stop {name}" in told
            stopped = here.tpu_ops("stop", name)
            assert stopped.returncode == 0, stopped.stderr
            bench.clean()
    assert said == {"on", "not on"}


def test_a_stop_from_another_machine_while_a_failed_run_is_ending_is_heard_by_whoever_recovers_it(
    bench: Bench, desk: Callable[[], Bench]
) -> None:
    here, there = desk(), desk()
    line = "trap '' TERM; sleep 600 & sleep 2; exit 3"
    train = here.popen("train", "a", "--recover", "--max-failures", "3", "--name", "enough", "--shell", "--", line)
    patience = threading.Timer(PATIENCE, train.kill)
    patience.start()
    try:
        lines_until(train, "logs of all ranks go to")
        bench.await_state(0, "enough", "ending")
        stopped = there.tpu_ops("stop", "enough")
        assert stopped.returncode == 0, stopped.stderr
        _, said = train.communicate()
    finally:
        patience.cancel()
        train.kill()
        train.wait()
    assert train.returncode == ExitCode.FAILED
    assert "attempt 1: stopped by ada; not started again" in said
    record = bench.record(0, "enough")
    assert (record["attempt"], record["state"], record["stop_requested_by"]) == (1, "failed", "ada")
    bench.clean()


def test_recovery_deletes_no_node_on_which_another_run_is_active(
    bench: Bench, lab_api: LabApi, tmp_path_factory: pytest.TempPathFactory
) -> None:
    node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}
    body = {
        "tpu": {"nodeSpec": [{"parent": LOCATION, "nodeId": name, "node": node} for name in ("a", "b")]},
        "spot": {},
    }
    lab_api.done("POST", f"v2/{LOCATION}/queuedResources?queuedResourceId=spring", body)
    queue = f"v2/{LOCATION}/queuedResources/spring"
    bench.await_(lambda: lab_api.call("GET", queue)[1]["state"]["state"] == "ACTIVE", "the queued resource is ACTIVE")
    ids = {name: lab_api.node(name)["id"] for name in ("a", "b")}
    here = apart(bench, tmp_path_factory.mktemp("desk"), ids, lab_api.grpc)
    train = here.popen("train", "a,b", "--recover", "--max-failures", "3", "--name", "own", "--", "sleep", "600")
    patience = threading.Timer(PATIENCE, train.kill)
    patience.start()
    try:
        lines_until(train, "logs of all ranks go to")
        os.killpg(train.pid, signal.SIGINT)
        train.communicate()
    finally:
        patience.cancel()
        train.kill()
        train.wait()
    bench.inside(0, "pkill -u ada -x sleep")
    for index in BOTH:
        bench.await_clean(index)
    begun = here.tpu_ops("train", "b", "--detach", "--name", "colleague", "--", "sleep", "600", person="bob")
    assert begun.returncode == 0, begun.stderr
    assert lab_api.call("POST", "lab/preempt", {"node": f"{LOCATION}/nodes/a"})[0] == 200
    resumed = here.tpu_ops("attach", "own", "--recover")
    assert resumed.returncode != 0
    assert "recovery would delete all of its nodes, and run colleague of bob is active" in resumed.stderr
    assert lab_api.node("b")["id"] == ids["b"]
    bench.await_state(1, "colleague", "running")
    assert here.tpu_ops("stop", "colleague", person="bob").returncode == 0
    bench.await_clean(1)
