"""Runs of several nodes: who gets them, and that JAX finds all their processes."""

from __future__ import annotations

import re

import pytest

from tests.support.runs import NODE_ID, Bench, rounds

pytestmark = pytest.mark.lab

#: Prints what JAX knows of the run, once each process has heard of all others.
WHO = """
import jax
import os
from jax.experimental import multihost_utils
jax.distributed.initialize()
ids = multihost_utils.process_allgather(jax.numpy.array([jax.process_index()])).ravel().tolist()
where = os.environ["TPU_OPS_NODE"], os.environ["TPU_OPS_SLICE"], os.environ["TPU_WORKER_ID"]
print("process", jax.process_index(), "of", jax.process_count(), "sees", ids, *where, flush=True)
print("coordinator", os.environ["MEGASCALE_COORDINATOR_ADDRESS"], flush=True)
"""


def test_two_nodes_are_one_run_of_all_their_workers(slices: Bench) -> None:
    assert [spec.node_id for spec in slices.specs if spec.index == 0] == [str(NODE_ID + number) for number in range(3)]
    done = slices.tpu_ops("train", "b,a", "--rank", "all", "--name", "both", "--", "python", "-c", WHO, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = {}
    for rank, size, ids, where in re.findall(r"process (\d) of (\d) sees (\[.*?\]) (\w+ \d \d)", done.stdout):
        seen[int(rank)] = (size, ids, where)
    everybody = str(list(range(4)))
    # The order of the API's ids, whatever the target's: a is slice 0.
    assert seen == {
        2 * number + index: ("4", everybody, f"{node} {number} {index}")
        for number, node in enumerate("ab")
        for index in range(2)
    }
    assert set(re.findall(r"coordinator (\S+)", done.stdout)) == {slices.specs[0].peers[0]}
    record = slices.record(3, "both")
    assert (record["node"], record["slice"], record["slices"], record["rank"]) == ("b", 1, 2, 3)


@rounds(2, 50)
def test_of_two_who_share_a_slice_one_wins_and_the_other_leaves_nothing(slices: Bench, number: int) -> None:
    asked = {"ada": "a,b", "bob": "b,c"}
    names = {person: f"{person}-{number}" for person in asked}
    starters = {
        person: slices.popen(
            *("train", asked[person], "--detach", "--name", names[person], "--", "sleep", "600"), person=person
        )
        for person in sorted(asked, reverse=number % 2 > 0)
    }
    said = {person: starter.communicate(timeout=180)[1] for person, starter in starters.items()}
    won = [person for person, starter in starters.items() if starter.returncode == 0]
    assert len(won) == 1, said
    (lost,) = set(asked) - set(won)
    assert f"run {names[won[0]]} of {won[0]} has held" in said[lost]
    # What was not started here is found whole as well.
    found = slices.tpu_ops("status", "b", person=lost)
    assert f"run {names[won[0]]}: running" in found.stderr
    assert found.stdout.count("running") == 4
    done = slices.tpu_ops("stop", names[won[0]], person=won[0])
    assert done.returncode == 0, done.stderr
    for index in slices.indices:
        slices.await_clean(index)


def test_a_slice_whose_first_worker_cannot_start_is_named_and_nobody_waits_for_it(slices: Bench) -> None:
    culprit = next(index for index, spec in enumerate(slices.specs) if (spec.node, spec.index) == ("b", 0))
    for index in slices.indices:
        if index != culprit:
            slices.inside(index, "install -m 0755 /bin/true /usr/local/bin/elsewhere")
    done = slices.tpu_ops("train", "a,b", "--name", "lacking", "--barrier", "600", "--", "elsewhere")
    assert done.returncode == 1
    assert re.search(r"not started: .*elsewhere is not on PATH", done.stderr)
    assert re.search(r"at: +b-w0$", done.stderr, re.MULTILINE)
    for index in slices.indices:
        slices.await_clean(index)
