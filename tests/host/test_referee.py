"""The referee's decisions on start, end and first failure, without sockets and clocks."""

from __future__ import annotations

from typing import Any

import pytest

from tpu_ops.host import rank_record
from tpu_ops.host.referee import (
    DECIDED,
    QUIET,
    QUIET_PART,
    RUNNING,
    SAME,
    SETTLE,
    Failure,
    Referee,
    first_of,
    weight_of,
)

KILL, ABORT, SEGV = {"signal": 9}, {"signal": 6}, {"signal": 11}
WORKERS = ["w0", "w1", "w2", "w3"]


def running(size: int = 4, skew: float = 60) -> Referee:
    referee = Referee(WORKERS[:size], 10, skew, now=0.0)
    for rank in range(size):
        referee.ready(rank)
    assert referee.take() == [{"do": "go"}]
    return referee


def fail(referee: Referee, rank: int, at: float, ending: dict[str, int]) -> None:
    referee.ended(rank, at, at, ending, oom=False, cause=f"{ending}")


def last(referee: Referee) -> dict[str, Any]:
    """Return the one order that decides."""
    orders = [order for order in referee.take() if order["do"] != "note"]
    assert len(orders) == 1, orders
    return orders[0]


# --- the barrier --------------------------------------------------------------------------------------------


def test_all_go_when_the_last_one_is_ready_and_never_before() -> None:
    referee = Referee(WORKERS, 10, 60, now=0.0)
    for rank in (3, 0, 2, 2):
        referee.ready(rank)
    referee.tick(9.9)
    assert referee.take() == []
    referee.ready(1)
    assert (referee.take(), referee.phase) == ([{"do": "go"}], RUNNING)


def test_ranks_missing_at_the_deadline_are_named_and_blamed() -> None:
    referee = Referee(WORKERS, 10, 60, now=5.0)
    referee.ready(0)
    referee.ready(2)
    assert referee.deadline == 15
    referee.tick(15.0)
    order = last(referee)
    reason, _, fix = order.pop("reason").partition("; ")
    assert (reason, order) == ("not ready within 10 s: rank 1 (w1), rank 3 (w3)", {"do": "abort", "ranks": [1, 3]})
    assert fix == "`tpu_ops doctor` shows what is wrong on these workers, --barrier gives more time"
    referee.ready(1)
    referee.ready(3)
    assert referee.take() == [], "who comes later changes nothing"


def test_a_refusal_by_one_rank_aborts_the_start_at_once() -> None:
    referee = Referee(WORKERS, 10, 60, now=0.0)
    referee.refused(2, "no such program")
    assert last(referee) == {"do": "abort", "reason": "rank 2 (w2): no such program", "ranks": [2]}
    assert referee.deadline == float("inf")


def test_a_rank_lost_at_the_barrier_is_blamed_and_a_stop_blames_nobody() -> None:
    referee = Referee(WORKERS, 10, 60, now=0.0)
    referee.lost(3, 1.0, 1.0, "lost contact")
    assert last(referee)["ranks"] == [3]
    referee = Referee(WORKERS, 10, 60, now=0.0)
    referee.stopped(0, 1.0, 1.0, {"kind": "stop", "reason": "not started: x"})
    assert last(referee) == {"do": "abort", "reason": "not started: x", "ranks": []}


# --- the end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endings", "first"),
    [
        # The earliest, whatever it is, where there is time between.
        ([(2, 1.0, KILL), (0, 1.8, {"code": 1})], 2),
        ([(0, 1.0, {"code": 1}), (2, 1.0 + SAME + 0.1, KILL)], 0),
        # Of the same moment: a kill before its consequences, in whatever order they are noticed.
        ([(0, 1.0, {"code": 1}), (2, 1.0 + SAME - 0.1, KILL)], 2),
        ([(3, 1.0, ABORT), (0, 1.1, {"code": 1}), (1, 1.3, SEGV)], 1),
        # JAX aborts a process because another one has failed: no more telling than an exit code.
        ([(1, 1.0, {"code": 3}), (0, 1.2, ABORT)], 1),
        ([(2, 1.0, {"code": 1}), (1, 1.0, {"code": 1})], 1),
    ],
)
def test_the_first_failure_is_the_one_that_the_others_follow_from(
    endings: list[tuple[int, float, dict[str, int]]], first: int
) -> None:
    referee = running()
    for rank, at, ending in endings:
        referee.ended(rank, at, 1.9, ending, oom=False, cause=f"{ending}")
    referee.tick(1.9 + SETTLE)
    order = last(referee)
    assert (order["kind"], order["first"]["rank"]) == ("failed", first)
    assert order["first"]["worker"] == WORKERS[first]


def test_reports_are_collected_until_the_window_closes() -> None:
    referee = running()
    fail(referee, 0, 5.0, {"code": 1})
    assert referee.take() == []
    assert referee.deadline == 5 + SETTLE
    # Its clock was corrected: it was earlier, though it is heard later.
    referee.ended(2, 4.0, 5.9, KILL, oom=True, cause="out of memory")
    referee.tick(5.9)
    assert referee.take() == []
    referee.tick(6.0)
    assert last(referee)["first"] == {"rank": 2, "worker": "w2", "cause": "out of memory"}
    fail(referee, 1, 3.0, KILL)
    referee.tick(99)
    assert referee.take() == [], "decided is decided"


def test_a_rank_silent_during_a_failure_is_noted_and_not_blamed() -> None:
    referee = running()
    fail(referee, 3, 8.0, {"code": 1})
    referee.tick(8.0 + SETTLE, {2: 9.0, 3: 7.0})
    notes = [order["text"] for order in referee._orders if order["do"] == "note"]
    assert notes == [
        "rank 3 (w3) failed: {'code': 1}; ending all ranks",
        "rank 2 (w2) has not been heard from for 9 s: if the rank's host is gone, it was lost before the failure",
    ]
    assert last(referee)["first"]["rank"] == 3


def test_many_silent_ranks_are_reported_in_one_note() -> None:
    """Each note is written to the disk before anything is ended."""
    referee = Referee([f"w{rank}" for rank in range(512)], 10, 60, now=0.0)
    for rank in range(512):
        referee.ready(rank)
    fail(referee, 3, 8.0, {"code": 1})
    referee.tick(8.0 + SETTLE, {rank: 7.0 + rank for rank in range(4, 512)})
    notes = [order["text"] for order in referee._orders if order["do"] == "note"]
    assert len(notes) == 2
    named = ", ".join(f"rank {rank} (w{rank})" for rank in range(4, 12))
    assert notes[1].startswith(f"not heard from for at least 11 s: {named} and more; ")


def test_no_window_is_waited_for_when_all_ranks_are_known() -> None:
    referee = running(2)
    fail(referee, 0, 5.0, {"code": 1})
    referee.ended(1, 5.0, 5.0, {"code": 0}, oom=False, cause="")
    assert last(referee)["first"]["rank"] == 0


@pytest.mark.parametrize(
    ("ending", "oom", "weight"),
    [(KILL, False, 1), (SEGV, False, 1), ({"code": 1}, True, 1), ({"code": 1}, False, 2), (ABORT, False, 2)],
)
def test_a_failure_that_no_other_rank_can_cause_has_the_smaller_weight(
    ending: dict[str, int], oom: bool, weight: int
) -> None:
    assert weight_of(ending, oom) == weight


def test_a_lost_host_of_the_same_moment_comes_before_a_kill() -> None:
    assert first_of([Failure(1, 2.0, 1, "kill"), Failure(2, 2.3, 0, "gone")]).rank == 2


def test_a_hub_that_loses_all_others_is_itself_the_one_that_is_cut_off() -> None:
    referee = running()
    for rank in (1, 2, 3):
        referee.lost(rank, 10.0, 25.0, "lost contact")
    referee.tick(25.0 + SETTLE)
    assert last(referee)["first"]["rank"] == 0
    referee = running(2)
    referee.lost(1, 10.0, 25.0, "lost contact")
    referee.tick(25.0 + SETTLE)
    assert last(referee)["first"]["rank"] == 1, "of two, the hub names the other"


def test_hosts_that_shut_down_have_said_so_and_are_not_cut_off() -> None:
    """A preemption takes all hosts at once; rank 0 may be the last to hear of it."""
    referee = running()
    for rank in (2, 1, 3):
        referee.stopped(rank, 10.0 + rank / 10, 10.5, {"kind": "shutdown", "reason": "host shuts down"})
    referee.tick(10.5 + SETTLE)
    assert last(referee)["first"] == {"rank": 1, "worker": "w1", "cause": "host shuts down"}
    referee = running()
    referee.lost(1, 10.0, 10.0, "lost contact")
    referee.lost(2, 10.0, 10.0, "lost contact")
    referee.stopped(3, 9.0, 10.0, {"kind": "shutdown", "reason": "host shuts down"})
    referee.tick(10.0 + SETTLE)
    assert last(referee)["first"]["rank"] == 3


def test_all_that_end_with_0_are_over_together() -> None:
    referee = running(2)
    referee.ended(1, 5.0, 5.0, {"code": 0}, oom=False, cause="")
    referee.tick(5.0 + QUIET - 0.1)
    assert referee.take() == [], "most end at about the same time"
    referee.ended(0, 9.9, 9.9, {"code": 0}, oom=False, cause="")
    assert (last(referee)["kind"], referee.phase) == ("over", DECIDED)


@pytest.mark.parametrize(("skew", "quiet"), [(300, QUIET), (3, 3 * QUIET_PART)])
def test_ranks_active_after_another_exited_with_0_are_noted_once(skew: int, quiet: float) -> None:
    referee = running(2, skew=skew)
    referee.ended(1, 5.0, 5.0, {"code": 0}, oom=False, cause="")
    assert referee.deadline == 5.0 + quiet
    referee.tick(referee.deadline)
    text = f"rank 1 (w1) has exited with code 0; 1 still running, to be ended {skew} s after it"
    assert referee.take() == [{"do": "note", "text": text}]
    assert referee.deadline == 5.0 + skew
    referee.tick(5.0 + skew - 0.1)
    assert referee.take() == []
    referee.ended(0, 6.0, 6.0, {"code": 0}, oom=False, cause="")
    assert (last(referee)["kind"], referee.phase) == ("over", DECIDED)


def test_the_rank_that_exited_first_is_named_if_others_run_too_long() -> None:
    referee = running(skew=60)
    for rank, at in ((2, 5.0), (1, 30.0)):
        referee.ended(rank, at, at, {"code": 0}, oom=False, cause="")
    referee.tick(64.9)
    assert "rank 2 (w2) has exited with code 0; 2 still running" in referee.take()[0]["text"]
    referee.tick(65.0)
    order = last(referee)
    assert (order["kind"], order["first"]["rank"]) == ("skew", 2)


def test_a_failure_after_an_early_end_is_a_failure() -> None:
    referee = running(2, skew=60)
    referee.ended(0, 5.0, 5.0, {"code": 0}, oom=False, cause="")
    referee.take()
    fail(referee, 1, 50.0, {"code": 1})
    assert last(referee)["kind"] == "failed"


STOP = {"kind": "stop", "reason": "stopped by ada", "grace": 3, "by": "ada"}


def test_a_stop_ends_all_at_once_and_what_fails_of_it_is_no_failure() -> None:
    referee = running()
    fail(referee, 2, 5.1, {"code": 1})  # it heard of the stop's first victim before the hub heard of the stop
    referee.stopped(1, 5.0, 5.2, STOP)
    order = last(referee)
    assert (order["kind"], order["grace"], order["by"], order["first"]) == ("stop", 3, "ada", None)


@pytest.mark.parametrize("grace", [1e12, -1, float("nan"), float("inf"), "3", [3]])
def test_no_supervisor_has_another_wait_longer_than_any_stop(grace: Any) -> None:
    """The user who started a run knows its key, and may let any program act as a rank."""
    referee = running()
    referee.stopped(1, 5.0, 5.2, STOP | {"grace": grace})
    order = last(referee)
    assert (order["kind"], order["grace"]) == ("stop", None)
    assert rank_record.intent_of(order | {"grace": grace})["grace"] is None
    assert rank_record.intent_of(order | {"grace": 3})["grace"] == 3


def test_a_stop_after_a_failure_is_still_a_failure() -> None:
    referee = running()
    fail(referee, 2, 5.0, {"code": 1})
    referee.stopped(1, 5.9, 5.9, STOP)
    assert (last(referee)["kind"]) == "failed"


def test_a_host_that_shuts_down_fails_the_run() -> None:
    referee = running()
    referee.stopped(2, 5.0, 5.0, {"kind": "shutdown", "reason": "host shuts down"})
    referee.tick(5.0 + SETTLE)
    assert last(referee)["first"] == {"rank": 2, "worker": "w2", "cause": "host shuts down"}
