"""A run of two slices that loses one goes on from its checkpoint, on a node made anew, as attempt 2."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.desk import Desk, Lab
from tests.support.recovery import begun, launcher_lab, lines_until
from tests.support.runs import JAX

pytestmark = pytest.mark.lab

#: Workers of both nodes.
RANKS = 4
STEPS = 100
#: What the other lab tests of runs share: the version, and where it is kept for all labs.
JAX_VERSION = "0.10.2"
VENV = f"/var/cache/tpu-lab/runs-jax-{JAX_VERSION}"
#: Fits a weight to the mean of all processes' numbers. Process 0 writes step and weight to a bucket. Where it is
#: killed, a step is logged well before it is kept: whoever follows has heard of all that the next attempt builds on.
TRAINING = f"""
import json, os, time, urllib.request
import jax
from jax.experimental import multihost_utils
host, attempt = os.environ["STORAGE_EMULATOR_HOST"], os.environ["TPU_OPS_ATTEMPT"]
with urllib.request.urlopen(host + "/storage/v1/b/checkpoints/o/state?alt=media", timeout=60) as answer:
    step, weight = json.load(answer)
jax.distributed.initialize()
me, coordinator = jax.process_index(), os.environ["MEGASCALE_COORDINATOR_ADDRESS"]
print("process", me, "of", jax.process_count(), "begins behind step", step, "at", coordinator, flush=True)
loss_and_slope = jax.jit(jax.value_and_grad(lambda weight: (weight - me) ** 2))
while step < {STEPS}:
    time.sleep(0.1)
    here = jax.numpy.stack(loss_and_slope(weight))
    loss, slope = multihost_utils.process_allgather(here).mean(axis=0).tolist()
    step, weight = step + 1, weight - 0.01 * slope
    if me == 0:
        print("step", step, "loss", loss, flush=True)
    if me == 0 and step % 5 == 0:
        if attempt == "1" and step > 40:
            time.sleep(1)
        url = host + "/upload/storage/v1/b/checkpoints/o?uploadType=media&name=state"
        body = json.dumps([step, weight]).encode()
        urllib.request.urlopen(urllib.request.Request(url, data=body, method="POST"), timeout=60).close()
        print("attempt", attempt, "saved step", step, flush=True)
"""


def loss_of(step: int) -> float:
    """Return the loss that a step of the training finds where four processes take part in all steps from the first."""
    return 1.5**2 * 0.98 ** (2 * (step - 1)) + 1.25


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A shell whose lab has two nodes of two workers, `a` and `b`."""
    with launcher_lab("recover", tmp_path_factory.mktemp("recover")) as shell:
        # The lab gives the lowest free addresses: a node that is made anew finds some that neither had.
        shell.do("tpu_ops", "create", "low", "--type", "v4-8", "--zone", "us-central2-b", "--no-wait")
        for name in ("a", "b"):
            shell.do("tpu_ops", "create", name, "--type", "v4-16", "--zone", "us-central2-b", "--spot")
        shell.do("tpu_ops", "delete", "low", "--yes")
        shell.do("tpu_ops", "configure", "a,b")
        Lab(shell).inside("a-w0", "sh", "-c", JAX, "sh", VENV, JAX_VERSION)
        yield shell


def workers(desk: Desk) -> list[dict[str, Any]]:
    """Return the workers in the order of a run's ranks."""
    found: list[dict[str, Any]] = desk.json("tpu_ops", "list", "--json")
    return sorted(found, key=lambda worker: (worker["node_id"], worker["worker_index"]))


def logs(kept: Path, attempt: int) -> list[str]:
    """Return the logs of an attempt as they are kept on this machine, by rank."""
    return [(kept / f"attempt-{attempt}" / f"rank-{rank}.log").read_text() for rank in range(RANKS)]


def check_processes(found: list[str], known: list[dict[str, Any]]) -> int:
    """Check that all processes of an attempt have met at the first worker; return behind which step they begin."""
    met = [re.findall(r"process (\d) of (\d) begins behind step (\d+) at (\S+)", log) for log in found]
    step = met[0][0][2]
    assert met == [[(str(rank), str(RANKS), step, known[0]["internal_ip"])] for rank in range(RANKS)]
    return int(step)


def check_losses(log: str, first: int, last: int) -> None:
    """Check that a log has the losses of some steps, each once."""
    found = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", log, re.MULTILINE)}
    assert list(found)[: last - first + 1] == list(range(first, last + 1))
    assert found == pytest.approx({step: loss_of(step) for step in found}, rel=1e-3)


def test_a_preempted_slice_is_made_anew_and_training_goes_on_from_its_checkpoint(desk: Desk) -> None:
    lab = Lab(desk)
    before = workers(desk)
    lost, left = before[0]["node"], before[-1]["node"]
    assert lab.call("POST", "storage/v1/b?project=lab", {"name": "checkpoints"})[0] == 200
    assert lab.call("POST", "upload/storage/v1/b/checkpoints/o?uploadType=media&name=state", [0, 0.0])[0] == 200
    train = ("tpu_ops", "train", "a,b", "--recover", "--json", "--name", "loop", "--max-preemptions", "1")
    env = ("--venv", VENV)
    with begun(desk, *train, *env, "--", "python", "-c", TRAINING) as first:
        lines_until(first, "attempt 1 saved step 20")
        # The shell that started the run ends; another shell takes the run over.
        first.send_signal(signal.SIGINT)
        lines_until(first, "recover: tpu_ops attach loop --recover")
        assert first.wait(60) == 130
    with begun(desk, "tpu_ops", "attach", "loop", "--recover", "--json") as second:
        lines_until(second, "attempt 1 saved step 40")
        desk.do("tpu_ops", "lab", "preempt", lost)
        said = lines_until(second, f"attempt 2 saved step {STEPS}")
        out, rest = second.communicate(timeout=120)
        assert second.returncode == 0, rest
    told = json.loads(out)
    assert (told["state"], told["attempt"], told["preemptions"], told["failures"]) == ("succeeded", 2, 1, 0)
    what = f"node {lost} is PREEMPTED"
    # Besides, what did not answer at first on a busy machine was tried again.
    ends = [event for event in told["events"] if not event["then"].startswith("trying again")]
    assert ends == [{"attempt": 1, "what": what, "then": "bringing its nodes back"}]
    # A node of its own, that site.yml was run on, and not on the other one.
    after = workers(desk)
    ids = {worker["node"]: worker["node_id"] for worker in before}
    assert {worker["node"]: worker["node_id"] == ids[worker["node"]] for worker in after} == {lost: False, left: True}
    assert f"run loop: configuring {', '.join(f'{lost}-w{index}' for index in range(2))} (site.yml)" in said
    for rank, worker in enumerate(after):
        record = json.loads(lab.inside(worker["host"], "cat", "/var/lib/tpu_ops/runs/loop/record.json"))
        assert (record["attempt"], record["state"], record["rank"]) == (2, "succeeded", rank)
        earlier = lab.inside(worker["host"], "find", "/var/lib/tpu_ops/runs/loop/", "-path", "*/attempts/1/record.json")
        assert bool(earlier) == (worker["node"] == left)
    # The logs of the first attempt outlived its disks.
    kept = next(Path(desk.environ["TPU_OPS_STATE"]).glob("fleets/*/runs/loop"))
    assert not (kept / "recovery.json").exists()
    assert check_processes(logs(kept, 1), before) == 0
    step = check_processes(logs(kept, 2), after)
    assert before[0]["internal_ip"] != after[0]["internal_ip"]
    assert 40 <= step < STEPS
    check_losses(logs(kept, 1)[0], 1, step)
    check_losses(logs(kept, 2)[0], step + 1, STEPS)
    status = desk.succeed("tpu_ops", "status", "loop")
    assert "run loop, attempt 2: succeeded" in status.stderr


def test_a_failing_command_is_started_again_on_the_same_workers_as_often_as_is_allowed(desk: Desk) -> None:
    command = """
        cd "$TPU_OPS_RUN_DIR"
        echo "of attempt $TPU_OPS_ATTEMPT" >>kept
        [ "$TPU_OPS_ATTEMPT" = 2 ] || exit 3
        cat kept
    """
    done = desk.succeed("tpu_ops", "train", "a", "--recover", "--max-failures", "1", "--shell", "--", command)
    assert done.stdout.splitlines() == ["[0] of attempt 1", "[0] of attempt 2"]
    assert "exit code 3; starting the run again" in done.stderr
