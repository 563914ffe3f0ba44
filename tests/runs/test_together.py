"""How four workers that train with JAX end together, whatever happens to one of them and with nobody watching.

Every fault comes after a step was logged; what is left is read from the workers' processes and control groups.
"""

from __future__ import annotations

import json
import re
import signal
import time
from typing import Any

import pytest

from tests.support.runs import Bench, rounds
from tpu_ops.host.referee import SETTLE
from tpu_ops.host.unit import WATCHDOG
from tpu_ops.runs.spec import GRACE_FAILURE, GRACE_STOP

pytestmark = pytest.mark.lab

LEASE = 8.0
RANKS = range(4)
#: From SIGKILL to the final record, the supervisors' own waits included, in seconds.
MARGIN = 2.0

#: All processes meet in every step; rank 2 comes late, so that the others wait for it inside the collective.
TRAIN = """
import os
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
    if os.path.exists("/run/greed"):
        print(len(b"x" * 2**31))
    step += 1
    print("step", step, "total", float(total(rows)), flush=True)
"""


#: Stands for the training where only the supervisors matter: no JAX to import, and it goes on after SIGTERM as well.
STAND_IN = "trap '' TERM; step=0; while sleep 0.2; do step=$((step + 1)); echo step $step total 4.0; done"

#: Ranks meet at a barrier over TCP. Rank 3 never gets there: its loader was forked while a thread of the rank held a
#: lock, and waits for this lock for ever. The loaders of the others wait until their rank takes the next batch.
DEADLOCK = """
import multiprocessing, os, socket, threading, time
rank, address = int(os.environ["TPU_OPS_RANK"]), (os.environ["COORDINATOR"], 7077)
lock, held = threading.Lock(), threading.Event()
processes = multiprocessing.get_context("fork")
def write_log():
    with lock:
        held.set()
        time.sleep(900)
def decode():
    with lock: return 1
def load(batches):
    while True:
        batches.put(decode())
class Loader:
    def __init__(self):
        self.batches = processes.Queue(1)
        processes.Process(target=load, args=(self.batches,), daemon=True).start()
    def __iter__(self):
        return self
    def __next__(self):
        return self.batches.get()
def meet():
    ranks = [server.accept()[0] for _ in range(4)]
    for each in ranks:
        each.recv(1)
    for each in ranks:
        each.send(b"x")
def all_reduce():
    while True:
        try:
            link = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    link.send(b"x")
    link.recv(1)
if rank == 0:
    server = socket.create_server(address)
    threading.Thread(target=meet, daemon=True).start()
if rank == 3:
    threading.Thread(target=write_log, daemon=True).start()
    held.wait()
loader = Loader()
next(loader)
all_reduce()
"""


def line_of(text: str) -> str:
    """Return a pattern for how stacks name the first line of `DEADLOCK` with this text."""
    return rf"\(<string>:{DEADLOCK.partition(text)[0].count(chr(10)) + 1}\)"


def training(pod: Bench, name: str, *command: str) -> None:
    """Start the training, or a command in its place; kill the controller once all ranks have taken a step."""
    words = command or ("python", "-c", TRAIN)
    starter = pod.popen("train", "pod", "--name", name, "--lease", f"{LEASE}", "--", *words)
    try:
        for index in RANKS:
            # Four imports of JAX on one machine.
            pod.await_log(index, name, "step 3 total 4.0", 180)
        assert starter.poll() is None
    finally:
        starter.kill()
        starter.communicate(timeout=20)


def done_at(pod: Bench, index: int, script: str) -> float:
    """Do something inside a worker and return when it was done, by the clock that all workers here have."""
    return float(pod.inside(index, f"{script} && date +%s.%N"))


def ended(pod: Bench, index: int, name: str, seconds: float) -> dict[str, Any]:
    """Wait until nothing of a run is left on a worker and return its record."""
    pod.await_clean(index, seconds + 30)
    return pod.record(index, name)


@rounds(1, 20)
def test_a_rank_killed_in_a_collective_ends_all_and_every_worker_names_it(pod: Bench, number: int) -> None:
    name = f"killed-{number}"
    training(pod, name)
    # Whoever started it is dead; somebody else follows it from here.
    attached = pod.popen("attach", name, "--rank", "all", person="bob")
    assert attached.stdout is not None
    assert any(re.match(r"\[[0-9,-]+\] step \d+ total 4.0", line) for line in iter(attached.stdout.readline, ""))
    at = done_at(pod, 2, f"kill -KILL {pod.record(2, name)['pid']}")
    for index in RANKS:
        record = ended(pod, index, name, GRACE_FAILURE)
        assert record["ended"] - at < GRACE_FAILURE + MARGIN
        assert record["first"] == {"rank": 2, "worker": "pod-w2", "cause": "killed by SIGKILL"}
        # The others hang, or end by themselves where their collective notices.
        assert record["state"] in ({"failed"} if index == 2 else {"failed", "stopped"})
    _, said = attached.communicate(timeout=60)
    assert attached.returncode == 1
    assert "rank 2 (pod-w2) failed first: killed by SIGKILL" in said


def test_a_rank_that_runs_out_of_memory_ends_all_and_is_named(pod: Bench) -> None:
    training(pod, "greedy")
    try:
        pod.inside(1, "systemctl set-property --runtime tpu-run.service MemoryMax=1G && touch /run/greed")
        records = [ended(pod, index, "greedy", GRACE_FAILURE) for index in RANKS]
    finally:
        pod.inside(1, "rm -f /run/greed")
    at = records[1]["ended"]
    for record in records:
        assert record["first"] == {"rank": 1, "worker": "pod-w1", "cause": "killed by SIGKILL: out of memory"}
        assert record["ended"] - at < SETTLE + GRACE_FAILURE + MARGIN
    assert records[1]["exit"] == {"signal": signal.SIGKILL}


def test_a_host_that_vanishes_is_named_by_the_others(pod: Bench) -> None:
    training(pod, "vanished")
    pod.backend.engine.call("kill", pod.container(3))
    at = time.time()
    try:
        for index in (0, 1, 2):
            record = ended(pod, index, "vanished", LEASE + GRACE_FAILURE)
            assert record["ended"] - at < LEASE + SETTLE + GRACE_FAILURE + MARGIN
            assert record["first"]["rank"] == 3
            assert record["first"]["cause"].startswith("lost contact")
    finally:
        pod.backend.engine.call("start", pod.container(3))
    pod.await_sshd(3)


def test_a_host_that_reboots_tells_the_others(pod: Bench) -> None:
    training(pod, "rebooted")
    booted = "cut -d ' ' -f 22 /proc/1/stat"
    before = pod.inside(3, booted)
    at = time.time()
    pod.inside(3, "systemctl reboot", check=False)
    for index in (0, 1, 2):
        record = ended(pod, index, "rebooted", GRACE_FAILURE)
        assert record["first"] == {"rank": 3, "worker": "pod-w3", "cause": "host shuts down"}
        assert record["ended"] - at < SETTLE + GRACE_FAILURE + MARGIN
    pod.await_(lambda: pod.inside(3, booted, check=False) not in ("", before), "another boot", 90)
    pod.await_sshd(3)
    record = ended(pod, 3, "rebooted", GRACE_STOP)
    assert record["ended"] - at < GRACE_STOP + MARGIN
    assert (record["state"], record["reason"]) == ("stopped", "host shuts down")
    done = pod.tpu_ops("status", "rebooted")
    assert done.stdout.count("rank 3 (pod-w3) failed: host shuts down") == 3
    assert done.returncode == 1


def test_a_deadlock_in_a_loader_is_told_from_ranks_that_wait_for_it(pod: Bench) -> None:
    options = ("--env", f"COORDINATOR={pod.specs[0].peers[0]}")
    pod.started("python", "-c", DEADLOCK, name="deadlock", options=options)
    places = [
        f"ranks 0-2: all_reduce {line_of('link.recv(1)')}",
        rf"rank 3: Loader\.__next__ {line_of('self.batches.get()')}, in Connection\._recv \(connection\.py:\d+\)",
        rf"ranks 0-2, 1 child process each: load {line_of('batches.put(decode())')}, in Queue\.put \(queues\.py:\d+\)",
        f"rank 3, 1 child process: decode {line_of('with lock: return 1')}",
    ]
    shown = ""

    def settled() -> bool:
        nonlocal shown
        shown = pod.tpu_ops("stacks", "deadlock", "--full").stdout
        lines = shown.splitlines()[: len(places)]
        return len(lines) == len(places) and all(map(re.fullmatch, places, lines))

    pod.await_(settled, "all ranks are where they stay")
    # The thread that holds the lock is among the others of its process.
    holder = rf"^rank 3, 1 thread: .*\n    write_log {line_of('time.sleep(900)')}\n"
    assert re.search(holder, shown, re.MULTILINE), shown
    assert pod.tpu_ops("stop", "deadlock", "--grace", "2").returncode == 0
    pod.clean()


def cuts(pod: Bench, *chains: str) -> list[str]:
    """Return the rules that drop what comes in, or goes out, on the network on which workers reach each other."""
    network = f"{pod.specs[0].peers[0].rsplit('.', 2)[0]}.0.0/16"
    return [f"{chain} {'-s' if chain == 'INPUT' else '-d'} {network} -j DROP" for chain in chains]


@pytest.mark.parametrize(
    ("cut", "way"), [(2, "both"), (2, "INPUT"), (2, "OUTPUT"), (0, "both"), (0, "INPUT"), (0, "OUTPUT")]
)
def test_a_cut_network_ends_both_sides_for_good(pod: Bench, cut: int, way: str) -> None:
    name = f"cut-{cut}-{way.lower()}"
    training(pod, name, *(() if way == "both" else ("sh", "-c", STAND_IN)))
    rules = cuts(pod, "INPUT", "OUTPUT") if way == "both" else cuts(pod, way)
    at = done_at(pod, cut, " && ".join(f"iptables -A {rule}" for rule in rules))
    try:
        pod.await_(
            lambda: all(pod.record(index, name)["state"] != "running" for index in RANKS), "both know", LEASE + 10
        )
    finally:
        pod.inside(cut, " ; ".join(f"iptables -D {rule}" for rule in rules))
    # They reach each other again while their ranks are being ended, and none goes on.
    limit = LEASE + SETTLE + GRACE_FAILURE
    records = {index: ended(pod, index, name, limit) for index in RANKS}
    for record in records.values():
        assert record["ended"] - at < limit + MARGIN
        assert record["state"] == "stopped"
    others = [index for index in RANKS if index != cut]
    assert {records[index]["first"]["rank"] for index in others} == {cut}
    assert all("lost contact" in records[index]["reason"] for index in RANKS)


def test_a_stop_of_ranks_that_do_not_reach_each_other_is_no_failure(pod: Bench) -> None:
    """Who recovers a run on another machine would start one that has failed again."""
    name, rules = "stopped-apart", cuts(pod, "INPUT", "OUTPUT")
    pod.started("sleep", "600", name=name, options=("--lease", f"{LEASE}"))
    pod.inside(0, " && ".join(f"iptables -A {rule}" for rule in rules))
    try:
        stopped = pod.tpu_ops("stop", name, "--grace", "1", "--json")
    finally:
        pod.inside(0, " ; ".join(f"iptables -D {rule}" for rule in rules))
    run = json.loads(stopped.stdout)[0]
    assert (stopped.returncode, run["state"], run["first_failure"]) == (0, "stopped", None)
    for index in RANKS:
        record = ended(pod, index, name, LEASE + SETTLE)
        assert (record["state"], record["intent"]["kind"], record["first"]) == ("stopped", "stop", None)


#: Rank 0, which is JAX's coordinator, with the training; another one with what stands for it.
@pytest.mark.parametrize(("victim", "command"), [(2, ("sh", "-c", STAND_IN)), (0, ())], ids=["2", "0"])
def test_a_killed_supervisor_ends_all(pod: Bench, victim: int, command: tuple[str, ...]) -> None:
    name = f"unwatched-{victim}"
    training(pod, name, *command)
    at = done_at(pod, victim, f"kill -KILL {pod.record(victim, name)['supervisor']['pid']}")
    for index in RANKS:
        record = ended(pod, index, name, GRACE_FAILURE)
        assert record["ended"] - at < SETTLE + GRACE_FAILURE + MARGIN
        assert record["first"]["rank"] == victim


#: Rank 0, which is JAX's coordinator, with the training; another one with what stands for it.
@pytest.mark.parametrize(("victim", "command"), [(2, ("sh", "-c", STAND_IN)), (0, ())], ids=["2", "0"])
def test_a_supervisor_that_hangs_is_given_up_and_ended(pod: Bench, victim: int, command: tuple[str, ...]) -> None:
    name = f"frozen-{victim}"
    training(pod, name, *command)
    at = done_at(pod, victim, f"kill -STOP {pod.record(victim, name)['supervisor']['pid']}")
    for index in RANKS:
        # systemd's watchdog ends the frozen one, and what it left.
        limit = (WATCHDOG if index == victim else LEASE + SETTLE) + GRACE_FAILURE
        record = ended(pod, index, name, limit)
        assert record["ended"] - at < limit + MARGIN
        assert (record["stuck"], record["chips"]["holders"]) == ([], [])
        assert record["first"]["rank"] == victim
