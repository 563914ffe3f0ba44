"""When a run counts as standing still: the chips of one rank, the samples of all ranks, and the referee's orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.star import Star, team
from tpu_ops.host.link import Alone
from tpu_ops.host.referee import DECIDED, RUNNING, Referee
from tpu_ops.host.stalls import DUMP_LIMIT, REPEAT, Chips, Rules, Stalls, sample

RULES = Rules(after=900, grace=1800)


def core(**values: Any) -> dict[str, Any]:
    made = {"id": 0, "hbm_used": 1, "hbm_total": 2, "duty": 100.0, "hbm_bandwidth": None, "idle": None}
    return {**made, **values}


def service(*cores: dict[str, Any], state: str = "ok") -> list[dict[str, Any]]:
    return [{"pid": 1, "port": 8431, "state": state, "why": "", "cores": list(cores)}]


BUSY = service(core(idle=0.0, hbm_bandwidth=40.0))


@pytest.mark.parametrize(
    ("services", "used", "state", "rests", "sign"),
    [
        (BUSY, False, "busy", None, ""),
        (service(core(idle=600.0, hbm_bandwidth=0.0), core(idle=700.0)), False, "idle", 600, "chips idle"),
        (service(core(idle=600.0), core(idle=0.0, hbm_bandwidth=30.0)), False, "busy", None, ""),
        # A wedged collective: a program is loaded and waits.
        (
            service(core(duty=100.0, idle=0.0, hbm_bandwidth=0.0)),
            False,
            "idle",
            0,
            "chips wait without using their memory",
        ),
        # Older libtpu: the duty cycle only.
        (service(core(duty=0.0)), False, "idle", 0, "chips wait without using their memory"),
        (service(core(duty=7.0)), False, "busy", None, ""),
        (service(state="warming"), True, "warming", None, ""),
        (service(state="silent"), False, "unreadable", 0, "chips unreadable"),
        (service(state="broken"), False, "unreadable", 0, "chips unreadable"),
        (service(core(idle=600.0)) + service(state="silent"), False, "unreadable", 0, "chips unreadable"),
        (BUSY + service(state="silent"), False, "busy", None, ""),
        (service(state="none"), False, "none", None, ""),
        (service(state="none"), True, "unreadable", 0, "chips unreadable"),
        ([], False, "none", None, ""),
        ([], True, "unreadable", 0, "chips unreadable"),
    ],
)
def test_the_state_of_a_ranks_chips(
    services: list[dict[str, Any]], used: bool, state: str, rests: float | None, sign: str
) -> None:
    chips = Chips()
    if used:
        chips.see(BUSY, 500.0)
    chips.see(services, 1000.0)
    assert (chips.state, chips.sign) == (state, sign)
    assert (None if chips.since is None else 1000.0 - chips.since) == rests
    assert (chips.used is not None) == (used or state == "busy")


def test_the_time_without_memory_traffic_begins_anew_after_a_use() -> None:
    chips, wedged = Chips(), service(core(idle=0.0, hbm_bandwidth=0.0))
    for now, services, since in ((0.0, wedged, 0.0), (30.0, wedged, 0.0), (60.0, BUSY, None), (90.0, wedged, 90.0)):
        chips.see(services, now)
        assert chips.since == since


def test_a_late_answer_of_the_metrics_does_not_begin_the_time_anew() -> None:
    chips, wedged = Chips(), service(core(idle=0.0, hbm_bandwidth=0.0))
    for now, services in ((0.0, BUSY), (30.0, wedged), (60.0, service(state="silent")), (90.0, wedged)):
        chips.see(services, now)
    assert (chips.state, chips.since) == ("idle", 30.0)


def still(**changes: Any) -> dict[str, Any]:
    made = {"silent": 960.0, "began": 4000.0, "used": True, "chips": "idle", "rests": 900.0, "sign": "chips idle"}
    return {**made, **changes}


UNUSED = {"used": False, "chips": "none", "rests": 0.0, "sign": ""}


@pytest.mark.parametrize(
    ("ranks", "rules", "sign"),
    [
        ([still(), still(silent=1000.0)], RULES, "no output for 16 min, chips idle for 15 min"),
        (
            [still(), still(sign="chips unreadable", chips="unreadable", rests=1200.0)],
            RULES,
            "no output for 16 min, chips idle for 15 min on 1 of 2 ranks, chips unreadable for 20 min on 1 of 2 ranks",
        ),
        ([still(), still(silent=890.0)], RULES, ""),
        ([still(), None], RULES, ""),
        ([still(), still(rests=890.0)], RULES, ""),
        ([still(), still(chips="busy", rests=0.0, sign="")], RULES, ""),
        ([still(), still(chips="warming", rests=0.0, sign="")], RULES, ""),
        # Before the first output and the first use of chips, and until the grace for compilation is over.
        ([still(began=None), still(began=None)], RULES, ""),
        ([still(began=1700.0), still(began=None)], RULES, ""),
        ([still(began=1900.0), still(began=None)], RULES, "no output for 16 min, chips idle for 15 min"),
        # A run without chips.
        ([still(**UNUSED), still(**UNUSED)], RULES, ""),
        ([still(**UNUSED), still(**UNUSED)], RULES._replace(chosen=True), "no output for 16 min, no chips in use"),
        ([still(), still(**UNUSED)], RULES, ""),
        ([still(), still()], RULES._replace(after=0.0), ""),
    ],
)
def test_which_samples_show_that_a_run_stands_still(
    ranks: list[dict[str, Any] | None], rules: Rules, sign: str
) -> None:
    stalls = Stalls(len(ranks), rules)
    for rank, found in enumerate(ranks):
        stalls.heard(rank, sample(found), 100.0)
    stall = stalls.found(100.0)
    assert (stall.sign if stall else "") == sign
    assert stall is None or stall.rank == max(range(len(ranks)), key=lambda rank: (ranks[rank] or {})["silent"])


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "x",
        {},
        still(silent=float("nan")),
        still(silent=-1),
        still(silent=True),
        still(rests="1"),
        still(began=[]),
    ],
)
def test_a_message_that_is_no_sample_counts_as_none(value: Any) -> None:
    assert sample(value) is None


def test_a_stall_is_told_once_then_rarely_and_ends_with_output() -> None:
    stalls = Stalls(1, RULES)

    def hear(now: float, found: dict[str, Any] | None) -> tuple[bool, bool]:
        stalls.heard(0, sample(found), now)
        return stalls.resumed(now), stalls.found(now) is not None

    assert hear(0.0, still()) == (False, True)
    assert hear(30.0, still()) == (False, False)
    assert hear(REPEAT, still()) == (False, True)
    assert hear(REPEAT + 30, None) == (True, False)
    assert hear(REPEAT + 60, None) == (False, False)
    assert hear(REPEAT + 90, still()) == (False, True)
    assert hear(REPEAT + 120, still(chips="busy", rests=0.0, sign="")) == (True, False)
    assert hear(REPEAT + 150, still()) == (False, False)
    assert hear(2 * REPEAT + 90, still()) == (False, True)


def test_an_old_sample_of_a_rank_is_no_sign() -> None:
    stalls = Stalls(2, RULES)
    stalls.heard(0, sample(still()), 0.0)
    stalls.heard(1, sample(still()), 3 * RULES.period + DUMP_LIMIT + 1)
    assert stalls.found(3 * RULES.period + DUMP_LIMIT + 1) is None


# --- the referee ----------------------------------------------------------------------------------------------------


def referee(on: str = "tell") -> Referee:
    made = Referee(["w0", "w1"], 10, 60, 0.0, RULES._replace(on=on))
    made.ready(0)
    made.ready(1)
    assert made.take() == [{"do": "go"}]
    return made


SIGN = "no output for 16 min, chips idle for 15 min"


def test_a_stall_is_ordered_to_all_ranks_and_taken_back() -> None:
    made = referee()
    made.quiet(0, still(), 100.0)
    assert made.take() == []
    made.quiet(1, still(), 101.0)
    assert made.take() == [{"do": "stall", "sign": SIGN}]
    made.dumped(0)
    made.dumped(1)
    made.tick(200.0)
    assert (made.take(), made.phase, made.deadline) == ([], RUNNING, float("inf"))
    made.quiet(1, None, 201.0)
    assert made.take() == [{"do": "stall", "sign": ""}]


@pytest.mark.parametrize("on", ["stop", "restart"])
@pytest.mark.parametrize("dumps", [True, False])
def test_a_stalled_run_ends_as_failed_once_the_stacks_are_written(on: str, dumps: bool) -> None:
    made = referee(on)
    made.quiet(0, still(), 100.0)
    made.quiet(1, still(silent=970.0), 100.0)
    assert [order["do"] for order in made.take()] == ["stall"]
    made.dumped(0)
    made.tick(101.0)
    assert made.take() == []
    if dumps:
        made.dumped(1)
    else:
        made.tick(100.0 + DUMP_LIMIT)
    (order,) = made.take()
    first = {"rank": 1, "worker": "w1", "cause": f"stalled: {SIGN}"}
    assert (order["do"], order["kind"], order["reason"], order["first"]) == ("end", "failed", f"stalled: {SIGN}", first)
    assert made.phase == DECIDED


def test_output_or_an_end_before_the_stacks_are_written_cancels_the_end() -> None:
    made = referee("stop")
    for rank in (0, 1):
        made.quiet(rank, still(), 100.0)
    made.quiet(0, None, 101.0)
    assert [order["do"] for order in made.take()] == ["stall", "stall"]
    made.dumped(0)
    made.dumped(1)
    made.tick(100.0 + DUMP_LIMIT)
    assert (made.take(), made.phase) == ([], RUNNING)

    made = referee("stop")
    for rank in (0, 1):
        made.quiet(rank, still(), 100.0)
    made.ended(0, 101.0, 101.0, {"code": 0}, oom=False, cause="")
    made.dumped(0)
    made.dumped(1)
    assert ([order["do"] for order in made.take()], made.phase) == (["stall"], RUNNING)


QUICK = Rules(after=1.0, grace=0.0, on="stop", chosen=True)
SILENT = {"say": "quiet", "sample": still(**UNUSED)}


def test_a_run_of_one_worker_is_ended_too() -> None:
    alone = Alone(team(0, 1, stall=QUICK), lambda: None)
    alone.start()
    alone.say(**SILENT)
    alone.say(say="dumped")
    orders = [alone.take() or {} for _ in range(3)]
    assert [order["do"] for order in orders] == ["go", "stall", "end"]
    assert orders[2]["reason"] == "stalled: no output for 16 min, no chips in use"
    assert alone.take() is None


def test_the_hub_hears_all_ranks_and_its_orders_reach_them(star: Callable[..., Star]) -> None:
    made = star(3, stall=QUICK).running()
    for each in made.links:
        each.say(**SILENT)
    signs = {made.await_(each, "stall")["sign"] for each in made.links}
    assert signs == {"no output for 16 min, no chips in use"}
    for each in made.links:
        each.say(say="dumped")
    assert {made.await_(each, "end")["kind"] for each in made.links} == {"failed"}


def test_equal_notices_of_hosts_are_noted_once() -> None:
    made = referee()
    for rank in (1, 0):
        made.announced(rank, "this worker is being preempted")
    assert made.take() == [{"do": "note", "text": "rank 1 (w1): this worker is being preempted"}]


def test_no_stall_while_a_rank_has_ended() -> None:
    made = referee()
    made.ended(0, 1.0, 1.0, {"code": 0}, oom=False, cause="")
    for rank in (0, 1):
        made.quiet(rank, still(), 10.0)
    assert made.take() == []
