"""Who gets the workers when several people start at once, and what a starter leaves that dies in the midst of it."""

from __future__ import annotations

import re
import time

import pytest

from tests.runs.conftest import BOTH
from tests.support.gate import gate
from tests.support.runs import Bench, rounds

pytestmark = pytest.mark.lab

PEOPLE = ("ada", "bob")
BARRIER = 15.0
#: Of the start that is killed: the test waits until it has passed.
SHORT_BARRIER = 10.0
#: From the first record to the barrier's begin, and from its end to the final record, in seconds.
MARGIN = 2.0
#: After which no helper of a killed controller may be left, in seconds.
HELPERS_GONE = 30.0


def race(workers: Bench, target: str, names: dict[str, str], odd: str = "") -> dict[str, tuple[int, str]]:
    """Let all start at the same moment; return how each start has ended.

    Args:
        workers: The workers.
        target: What they start on.
        names: The name of each person's run; whoever comes first begins.
        odd: Who asks the workers from the last to the first.
    """
    options = ("--detach", "--barrier", f"{BARRIER}", "--name")
    starters = {
        person: workers.popen(
            *("train", target, *options, name, "--", "sleep", "600"),
            person=person,
            module="tests.support.backwards" if person == odd else "tpu_ops.cli.main",
        )
        for person, name in names.items()
    }
    said = {person: starter.communicate(timeout=120)[1] for person, starter in starters.items()}
    return {person: (starter.returncode, said[person]) for person, starter in starters.items()}


def in_turn(word: str, number: int) -> dict[str, str]:
    """Return the runs of a round: another person begins each time."""
    return {person: f"{person}-{word}-{number}" for person in sorted(PEOPLE, reverse=number % 2 > 0)}


@rounds(2, 50)
def test_of_two_who_start_at_once_one_wins_and_the_other_is_told_who(pod: Bench, number: int) -> None:
    names = in_turn("plain", number)
    ends = race(pod, "pod", names)
    won = [person for person, (code, _) in ends.items() if code == 0]
    assert len(won) == 1, ends
    (lost,) = set(PEOPLE) - set(won)
    assert f"run {names[won[0]]} of {won[0]} has held" in ends[lost][1]
    for index in pod.indices:
        pod.await_state(index, names[won[0]], "running")
        assert "No such file" in pod.inside(index, f"ls /var/lib/tpu_ops/runs/{names[lost]} 2>&1", check=False)
        assert not any(line.startswith(lost) for line in pod.left(index))
    assert pod.tpu_ops("stop", names[won[0]], person=won[0]).returncode == 0
    for index in pod.indices:
        pod.await_clean(index)


@rounds(1, 50)
def test_a_start_that_asks_the_last_worker_first_never_runs_beside_another(pod: Bench, number: int) -> None:
    names = in_turn("odd", number)
    ends = race(pod, "pod", names, odd="bob")
    won = [person for person, (code, _) in ends.items() if code == 0]
    # He may have the last workers while she has the first: then nobody wins, and each is told of the other. Or some of
    # his ranks come before his rank 0 listens: they are turned away, and he is told of that. Or he comes so late that
    # her run is seen before he asks for anything.
    if "ada" not in won:
        assert f"run {names['bob']} of bob has held" in ends["ada"][1]
    if "bob" not in won:
        assert f"run {names['ada']} of ada has held" in ends["bob"][1] or "the run was not started" in ends["bob"][1]
    for person in won:
        assert pod.tpu_ops("stop", names[person], person=person).returncode == 0
    for index in pod.indices:
        pod.await_clean(index, BARRIER + MARGIN)
    done = pod.tpu_ops("train", "pod", "--", "true")
    assert done.returncode == 0, done.stderr


def test_a_starter_killed_behind_worker_0_leaves_nothing_and_the_next_start_works(bench: Bench) -> None:
    train = ("train", "pod", "--name", "halfway", "--barrier", f"{SHORT_BARRIER}", "--", "sleep", "600")
    with gate(bench, 1) as reached:
        starter = bench.popen(*train)
        bench.await_(reached, "a start that waits for worker 1")
        waiting = bench.record(0, "halfway")
        assert (waiting["state"], waiting["port"]) == ("starting", 8500)
        starter.kill()
        starter.communicate(timeout=20)
        told = bench.tpu_ops("train", "pod", "--", "true", person="bob")
        assert "run halfway of ada has held" in told.stderr, "it holds the pod as long as it waits"
        shown = bench.tpu_ops("status", "halfway", person="bob").stderr
        assert "run halfway: starting since " in shown
        assert "1 of 2 ranks ready; the start is given up at " in shown
    bench.await_clean(0, SHORT_BARRIER + MARGIN)
    record = bench.record(0, "halfway")
    assert (record["state"], record["began"], record["blamed"]) == ("refused", None, [1])
    assert record["reason"].partition(";")[0] == f"not ready within {SHORT_BARRIER:g} s: rank 1 (pod-w1)"
    assert SHORT_BARRIER <= record["ended"] - record["since"] < SHORT_BARRIER + MARGIN
    assert bench.inside(1, "ls /var/lib/tpu_ops/runs | grep -x halfway || true") == ""
    for index in BOTH:
        assert bench.left(index) == []
    done = bench.tpu_ops("train", "pod", "--", "true")
    assert done.returncode == 0, done.stderr


def test_a_killed_start_leaves_no_helper_on_workers_that_wait_for_the_others(pod: Bench) -> None:
    with gate(pod, 3) as reached:
        starter = pod.popen("train", "pod", "--name", "torn", "--barrier", "120", "--", "sleep", "600")
        pod.await_(lambda: reached() and all(map(pod.helpers, (1, 2))), "a start that waits for worker 3", 60)
        starter.kill()
        at = time.monotonic()
        starter.communicate(timeout=20)
        pod.await_(lambda: not any(map(pod.helpers, (1, 2))), "no helper", HELPERS_GONE)
        assert time.monotonic() - at < HELPERS_GONE
        assert pod.record(0, "torn")["began"] is None
    done = pod.tpu_ops("stop", "pod")
    assert done.returncode == 0, done.stderr
    # It began nowhere, and the worker that never heard of it says so.
    assert re.search("3 +pod-w3 +refused +the rank was not started on this worker", done.stdout), done.stdout
    for index in pod.indices:
        pod.await_clean(index)
