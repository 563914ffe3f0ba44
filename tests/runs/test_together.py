"""How four workers that train with JAX end together, whatever happens to one of them and with nobody watching.

Every fault comes after a step was logged; what is left is read from the workers' processes and control groups.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.runs import Bench
from tpu_ops.host.referee import SETTLE
from tpu_ops.host.unit import WATCHDOG
from tpu_ops.runs.spec import GRACE_FAILURE

pytestmark = pytest.mark.lab

LEASE = 8.0
RANKS = range(4)
#: From SIGKILL to the final record, the supervisors' own waits included, in seconds.
MARGIN = 2.0

#: All processes meet in every step; rank 2 comes late, so that the others wait for it inside the collective.
TRAIN = """
import time
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.distributed.initialize()
mesh = Mesh(np.array(jax.devices()), ("rows",))
rows = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("rows")), np.ones(1, np.float32))
total = jax.jit(lambda rows: rows.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
step = 0
while True:
    if jax.process_index() == 2:
        time.sleep(0.2)
    step += 1
    print("step", step, "total", float(total(rows)), flush=True)
"""


def training(pod: Bench, name: str) -> None:
    """Start a training with a controller that is killed once all ranks have taken a step."""
    starter = pod.popen("train", "pod", "--name", name, "--lease", f"{LEASE}", "--", "python", "-c", TRAIN)
    try:
        for index in RANKS:
            # Four imports of JAX on one machine.
            pod.await_log(index, name, "step 3 total 4.0", 180)
        assert starter.poll() is None
    finally:
        starter.kill()
        starter.communicate(timeout=20)


def ended(pod: Bench, index: int, name: str, seconds: float) -> dict[str, Any]:
    """Wait until nothing of a run is left on a worker and return its record."""
    pod.await_clean(index, seconds + 30)
    return pod.record(index, name)


def test_a_killed_rank_ends_all_and_every_worker_names_it(pod: Bench) -> None:
    training(pod, "killed")
    pid = pod.record(2, "killed")["pid"]
    at = time.time()
    pod.inside(2, f"kill -KILL {pid}")
    for index in RANKS:
        record = ended(pod, index, "killed", GRACE_FAILURE)
        assert record["ended"] - at < GRACE_FAILURE + MARGIN
        assert record["first"] == {"rank": 2, "worker": "pod-w2", "cause": "killed by SIGKILL"}
        # The others hang, or end by themselves where their collective notices.
        assert record["state"] in ({"failed"} if index == 2 else {"failed", "stopped"})
    done = pod.tpu_ops("logs", "killed", "--follow")
    assert done.returncode == 1
    assert "rank 2 (pod-w2) failed first: killed by SIGKILL" in done.stderr


def test_a_host_that_vanishes_is_named_by_the_others(pod: Bench) -> None:
    training(pod, "vanished")
    at = time.time()
    pod.backend.engine.call("kill", pod.container(3))
    try:
        for index in (0, 1, 2):
            record = ended(pod, index, "vanished", LEASE + GRACE_FAILURE)
            assert record["ended"] - at < LEASE + SETTLE + GRACE_FAILURE + MARGIN
            assert record["first"]["rank"] == 3
            assert record["first"]["cause"].startswith("lost contact")
    finally:
        pod.backend.engine.call("start", pod.container(3))
    pod.await_(lambda: pod.inside(3, "systemctl is-active ssh", check=False).strip() == "active", "sshd", 120)


def test_a_host_that_shuts_down_tells_the_others(pod: Bench) -> None:
    training(pod, "shut-down")
    at = time.time()
    pod.inside(3, "systemctl stop tpu-run.service")
    for index in RANKS:
        record = ended(pod, index, "shut-down", GRACE_FAILURE)
        assert record["first"] == {"rank": 3, "worker": "pod-w3", "cause": "host shuts down"}
    assert pod.record(0, "shut-down")["ended"] - at < SETTLE + GRACE_FAILURE + MARGIN


@pytest.mark.parametrize(("cut", "way"), [(2, "both"), (2, "INPUT"), (2, "OUTPUT"), (0, "both")])
def test_a_cut_network_ends_both_sides(pod: Bench, cut: int, way: str) -> None:
    name = f"cut-{cut}-{way.lower()}"
    training(pod, name)
    chains = ["INPUT", "OUTPUT"] if way == "both" else [way]
    network = f"{pod.specs[0].peers[0].rsplit('.', 2)[0]}.0.0/16"
    rules = [f"{chain} {'-s' if chain == 'INPUT' else '-d'} {network} -j DROP" for chain in chains]
    at = time.time()
    pod.inside(cut, " && ".join(f"iptables -A {rule}" for rule in rules))
    try:
        limit = LEASE + SETTLE + GRACE_FAILURE
        records = {index: ended(pod, index, name, limit) for index in RANKS}
    finally:
        pod.inside(cut, " ; ".join(f"iptables -D {rule}" for rule in rules))
    for record in records.values():
        assert record["ended"] - at < limit + MARGIN
        assert record["state"] == "stopped"
    others = [index for index in RANKS if index != cut]
    assert {records[index]["first"]["rank"] for index in others} == {cut}
    assert all("lost contact" in records[index]["reason"] for index in RANKS)


@pytest.mark.parametrize("victim", [2, 0])
def test_a_killed_supervisor_ends_all(pod: Bench, victim: int) -> None:
    name = f"unwatched-{victim}"
    training(pod, name)
    at = time.time()
    pod.inside(victim, f"kill -KILL {pod.record(victim, name)['supervisor']['pid']}")
    for index in RANKS:
        record = ended(pod, index, name, GRACE_FAILURE)
        assert record["ended"] - at < SETTLE + GRACE_FAILURE + MARGIN
        assert record["first"]["rank"] == victim


@pytest.mark.parametrize("victim", [2, 0])
def test_a_supervisor_that_hangs_is_given_up_and_ended(pod: Bench, victim: int) -> None:
    name = f"frozen-{victim}"
    training(pod, name)
    at = time.time()
    pod.inside(victim, f"kill -STOP {pod.record(victim, name)['supervisor']['pid']}")
    for index in RANKS:
        # systemd's watchdog ends the frozen one, and what it left.
        limit = (WATCHDOG if index == victim else LEASE + SETTLE) + GRACE_FAILURE
        record = ended(pod, index, name, limit)
        assert record["ended"] - at < limit + MARGIN
        assert record["first"]["rank"] == victim
