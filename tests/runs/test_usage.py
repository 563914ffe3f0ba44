"""Rows of chips from the workers' answers, their folding, sorting, filtering and words."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import chips
from tests.support.chips import GIB, NOW, answer, busy, core, launched, process, service, use
from tpu_ops.errors import OpsError
from tpu_ops.runs import usage, usage_lines
from tpu_ops.runs.usage_poll import Place, Poll
from tpu_ops.ssh.replies import Reply

LOST = Reply("", {}, "unreachable", "no route to host", "wait")


def shown(*uses: usage.Use, now: float = NOW, **how: Any) -> list[dict[str, str]]:
    return [usage_lines.cells(line, now) for line in usage_lines.lines(uses, **how)]


# --- rows -----------------------------------------------------------------------------------------------------


def test_a_row_for_each_core_has_its_values_its_process_and_its_run() -> None:
    rows = use("pod-w1", busy(96.5, 12, silent=840, stall="no output for 14 min")).rows
    assert [row.core for row in rows] == [0, 1, 2, 3]
    assert dataclasses.asdict(rows[0]) == {
        "node": "pod",
        "worker": "pod-w1",
        "state": "ok",
        "core": 0,
        "chip": None,
        "chips": 4,
        "hbm_used": 12 * GIB,
        "hbm_total": 32 * GIB,
        "duty": 96.5,
        "bandwidth": None,
        "idle": None,
        "error": "",
        "program": None,
        "launch": None,
        "queued": None,
        "why": "",
        "pid": 100,
        "command": "python train.py",
        "run": "exp",
        "person": "ada",
        "since": NOW - 7200,
        "last_output": NOW - 840,
        "stall": "no output for 14 min",
        "notice": "",
        "answered": NOW,
    }


def test_two_cores_of_a_chip_are_two_rows_whose_ids_need_not_begin_at_zero() -> None:
    cores = [core(number, total=8, chip=number // 2 - 4) for number in range(8, 16)]
    rows = use("pod-w1", answer("exp", services=[service(100, cores)])).rows
    assert [(row.core, row.chip) for row in rows[:3]] == [(8, 0), (9, 0), (10, 1)]
    cells = shown(use("pod-w1", answer("exp", services=[service(100, cores)])), depth=2)
    assert [line["chips"] for line in cells[:3]] == ["8 cores", "id 8, chip 0", "id 9, chip 0"]


@pytest.mark.parametrize(
    ("value", "state", "words"),
    [
        (answer(), usage.FREE, "free"),
        (
            answer("exp", services=[service(100, [], "warming", "lists differ")]),
            usage.WARMING,
            "warming up: lists differ",
        ),
        (answer("exp", services=[service(100, [], "none")]), usage.NONE, "no metrics"),
        (answer("exp", services=[], processes=[]), usage.NONE, "no metrics"),
        (answer("exp", services=[service(100, [], "silent")]), usage.SILENT, "metrics silent"),
        (answer("exp", services=[service(100, [], "broken", "too long")]), usage.BROKEN, "metrics broken: too long"),
        (answer("exp", services=[service(100, [], "new")]), usage.BROKEN, "metrics broken"),
        (LOST, usage.LOST, "no answer yet: no route to host"),
    ],
)
def test_states_without_values_are_told_apart(value: Any, state: str, words: str) -> None:
    (row,) = use("pod-w1", value).rows
    assert (row.state, row.core) == (state, None)
    assert [line["state"] for line in shown(use("pod-w1", value))] == [words]


def test_a_process_of_root_that_publishes_the_port_has_the_run_of_the_worker() -> None:
    rows = use("pod-w1", answer("exp", services=[service(1, [core(0)])])).rows
    assert [(row.run, row.person, row.core) for row in rows] == [("exp", "ada", 0)]


def test_children_that_share_the_chips_of_a_run_add_no_rows() -> None:
    processes = [process(100 + number, run="exp") for number in range(4)]
    services = [service(100, [core(0)]), *(service(101 + number, [], "none") for number in range(3))]
    assert len(use("pod-w1", answer("exp", services=services, processes=processes)).rows) == 1


def test_a_process_without_a_run_beside_a_run_has_a_row() -> None:
    both = answer("exp", processes=[process(100, run="exp"), process(7, "eve", command="python x.py")])
    assert {(row.run, row.person, row.state) for row in use("pod-w1", both).rows} == {
        ("exp", "ada", usage.OK),
        ("", "eve", usage.NONE),
    }


def test_a_silent_worker_keeps_its_run_and_the_time_of_its_last_answer() -> None:
    lost = use("pod-w1", LOST, use("pod-w1", busy(96)), now=NOW + 60)
    lost = use("pod-w1", LOST, lost, now=NOW + 120)
    (line,) = shown(lost, now=NOW + 120)
    assert (line["run"], line["person"], line["chips"]) == ("exp", "ada", "4")
    assert (line["hbm"], line["state"]) == ("", "no answer for 2 min: no route to host")


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "12", True, [], None])
def test_values_that_are_no_numbers_are_unknown(value: Any) -> None:
    wrong = core(0) | dict.fromkeys(("hbm_used", "hbm_total", "duty"), value)
    (row,) = use("pod-w1", answer("exp", services=[service(100, [wrong])])).rows
    assert (row.hbm_used, row.hbm_total, row.duty) == (None, None, None)


def test_a_core_has_its_program_and_the_errors_that_libtpu_reports() -> None:
    rows = use("pod-w1", busy(96, states=launched(7, errors={2: "Core halted"}))).rows
    assert [(row.program, row.launch, row.queued) for row in rows] == [("5eed", 7, 2)] * 4
    assert [row.error for row in rows] == ["", "", "core 2: Core halted", ""]


def test_an_error_of_a_core_comes_first_and_has_its_own_line() -> None:
    stall = "no output for 14 min"
    uses = [use(f"pod-w{at}", busy(96, states=launched(7))) for at in range(3)]
    uses.append(use("pod-w3", busy(96, states=launched(7, errors={1: "Core halted", 2: "Core halted"}))))
    assert [(line["worker"], line["state"]) for line in shown(*uses, by="state")] == [
        ("pod-w3", "core 1: Core halted (and 1 other)"),
        ("pod-w[0-2]", "ok"),
    ]
    assert [line["worker"] for line in shown(*uses, words="halted")] == ["pod-w3"]
    (line,) = shown(use("pod-w3", busy(96, states=launched(7, errors={1: "Core halted"}), stall=stall)))
    assert line["state"] == "core 1: Core halted; stalled: no output for 14 min"


def test_an_error_is_shown_before_there_are_metrics() -> None:
    warming = service(100, [], "warming", "lists differ", states=launched(7, errors={0: "Core halted"}))
    (line,) = shown(use("pod-w3", answer("exp", services=[warming])))
    assert line["state"] == "core 0: Core halted; warming up: lists differ"


@pytest.mark.parametrize(
    ("launches", "words"),
    [
        ([launched(7)] * 4, ""),
        ([launched(7), launched(7), launched(6), launched(7)], "; out of step: pod-w2"),
        ([launched(7), launched(7), launched(7), launched(7, "0ff5")], "; out of step: pod-w3"),
        ([launched(7), launched(7), launched(7, ""), launched(8)], "; out of step: pod-w[2-3]"),
        ([launched(7), launched(8)], "; out of step: pod-w[0-1]"),
        ([launched(7), None], ""),
        ([None, None], ""),
    ],
    ids=["equal", "launch", "program", "two", "halves", "unknown", "all unknown"],
)
def test_workers_of_a_stalled_run_with_another_program_are_named(launches: list[Any], words: str) -> None:
    stall = "no output for 14 min"
    uses = [use(f"pod-w{at}", busy(100, states=states, stall=stall)) for at, states in enumerate(launches)]
    assert [line["state"] for line in shown(*uses)] == [f"stalled: {stall}{words}"]
    moving = [use(f"pod-w{at}", busy(100, states=states)) for at, states in enumerate(launches)]
    assert [line["state"] for line in shown(*moving)] == ["ok"], "a run that computes is in step a moment later"


# --- folding, sorting, filtering --------------------------------------------------------------------------------


def test_256_workers_fold_into_a_line_for_each_run_and_state() -> None:
    lines = [(line["worker"], line["chips"], line["run"]) for line in shown(*chips.fleet())]
    assert lines == [
        ("box-w0", "4", ""),
        ("gone-w[0-2]", "", ""),
        ("idle-w[0-59]", "240", ""),
        ("mid-w[0-63]", "256", "small"),
        ("pod-w[0-127]", "512", "big"),
    ]
    (big,) = shown(*chips.fleet(), words="big")
    assert (big["hbm"], big["duty"], big["output"]) == ("11..12/32 GiB", "90..97 %", "5 s")
    (small,) = shown(*chips.fleet(), words="STALLED bob")
    assert small["state"] == "stalled: no output for 14 min, chips idle for 11 min"
    words = "256 workers: 193 in use, 60 free, 3 no answer, 1 run stalled"
    assert usage_lines.summary(chips.fleet()) == words


def test_a_single_idle_worker_does_not_hide_in_the_range_of_its_run() -> None:
    uses = [use(f"pod-w{number}", busy(0 if number == 5 else 90 + number)) for number in range(8)]
    lines = [(line["worker"], line["duty"]) for line in shown(*uses, by="duty")]
    assert lines == [("pod-w[0-4,6-7]", "90..97 %"), ("pod-w5", "0 %")]


def test_a_waiting_worker_with_a_full_duty_cycle_has_its_own_line() -> None:
    used = [core(0) | {"hbm_bandwidth": 9.0}], [core(0, duty=100) | {"hbm_bandwidth": 0.0}]
    uses = [use(f"pod-w{at}", answer("exp", services=[service(100, cores)])) for at, cores in enumerate(used)]
    lines = [(line["worker"], line["duty"], line["bandwidth"]) for line in shown(*uses)]
    assert lines == [("pod-w0", "96 %", "9 %"), ("pod-w1", "100 %", "0 %")]


def test_lines_unfold_into_workers_and_cores() -> None:
    uses = [use(f"pod-w{number}", busy(90 + number)) for number in range(3)]
    assert [line["worker"] for line in shown(*uses, depth=1)] == ["pod-w[0-2]", "pod-w0", "pod-w1", "pod-w2"]
    assert len(shown(*uses, depth=2)) == 1 + 3 * 5
    group, first, *_ = usage_lines.lines(uses, depth=1)
    opened = usage_lines.lines(uses, toggled=[group.key, first.key])
    assert [line.depth for line in opened] == [0, 1, 2, 2, 2, 2, 1, 1]
    assert [line.depth for line in usage_lines.lines(uses, depth=1, toggled=[group.key])] == [0]


@pytest.mark.parametrize(
    ("by", "backwards", "first"),
    [
        ("worker", False, ["box", "gone", "idle", "mid", "pod"]),
        ("worker", True, ["pod", "mid", "idle", "gone", "box"]),
        ("hbm", False, ["mid", "pod"]),
        ("hbm", True, ["pod", "mid"]),
        ("duty", False, ["pod", "mid"]),
        ("run", False, ["pod", "mid"]),
        ("person", False, ["pod", "mid", "box"]),
        ("output", False, ["mid", "pod"]),
        ("chips", False, ["pod", "mid", "idle"]),
        ("state", False, ["mid", "gone", "box", "pod", "idle"]),
    ],
)
def test_lines_are_sorted_and_those_without_a_value_come_last(by: str, backwards: bool, first: list[str]) -> None:
    found = [line["worker"].partition("-")[0] for line in shown(*chips.fleet(), by=by, backwards=backwards)]
    assert found[: len(first)] == first
    assert len(found) == 5


def test_workers_lost_for_the_same_reason_fold_in_spite_of_their_addresses() -> None:
    (line,) = shown(*chips.fleet(), words="gone")
    assert line["state"] == "no answer yet: connect to 10.0.0.0: timed out (and 2 others)"


def test_the_use_of_a_run_is_said_in_a_few_words() -> None:
    assert usage_lines.use_words(use("pod-w1", busy(96)).rows) == "HBM 12/32 GiB, duty 96 %"
    assert usage_lines.use_words(use("pod-w1", answer("exp", services=[])).rows) == "no metrics"


# --- asking -----------------------------------------------------------------------------------------------------


class Workers:
    """Workers of which one is old, one hangs, and the others answer; counts the questions that wait."""

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        self.most = 0
        self.asked: list[tuple[str, str]] = []
        self.changed = asyncio.Condition()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Return once a condition is true, which is tested with each question."""
        async with self.changed:
            await self.changed.wait_for(is_so)

    async def call(self, requests: Any, action: str, *, limit: float) -> dict[str, Reply]:
        found = {}
        async with self.changed:
            self.changed.notify_all()
        for host in requests:
            self.asked.append((host, action))
            self.waiting[host] = self.waiting.get(host, 0) + 1
            self.most = max(self.most, self.waiting[host])
            if host == "pod-w2":
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            self.waiting[host] -= 1
            if host == "pod-w3":
                raise OpsError("the API did not answer", fix="wait")
            if host == "pod-w1" and action == "usage":
                found[host] = Reply(host, {}, "old", "its launcher is too old")
            else:
                value = answer("exp")
                found[host] = Reply(host, {key: value[key] for key in ("holders", "holder", "argv", "chips")})
                if action == "usage":
                    found[host] = Reply(host, value)
        return found


async def test_an_old_launcher_tells_its_holders_and_says_what_updates_it() -> None:
    replies = await usage.ask(Workers(), ["pod-w0", "pod-w1"])
    rows = [usage.of_reply("pod", reply, NOW).rows[0] for reply in replies.values()]
    assert [(row.worker, row.state, row.run) for row in rows] == [
        ("pod-w0", usage.OK, "exp"),
        ("pod-w1", usage.OLD, "exp"),
    ]
    assert "`tpu_ops configure pod-w1` updates it" in rows[1].why


async def test_a_hanging_worker_has_one_question_and_delays_no_other_worker() -> None:
    workers = Workers()
    nodes = {f"pod-w{number}": "pod" for number in range(5)}
    poll = Poll(lambda: Place(workers, nodes, {"pod-w4": LOST._replace(host="pod-w4")}), 0.001)
    task = asyncio.create_task(poll.run())
    await workers.until(lambda: workers.asked.count(("pod-w0", "usage")) == 5)
    assert (workers.most, poll.waiting) == (1, ["pod-w2"])
    assert [poll.uses[f"pod-w{number}"].rows[0].state for number in (0, 1, 3, 4)] == ["ok", "old", "lost", "lost"]
    assert poll.uses["pod-w3"].reply.problem == "the API did not answer"
    # A worker that fails is asked at growing intervals, one that is known to be away is not asked.
    assert workers.asked.count(("pod-w3", "usage")) == 1
    assert not [host for host, _ in workers.asked if host == "pod-w4"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(asyncio.all_tasks()) == 1


async def test_new_workers_are_asked_and_deleted_ones_vanish() -> None:
    workers, places = Workers(), [{"pod-w0": "pod"}, {"box-w0": "box"}]
    looks: list[int] = []

    def look() -> Place:
        looks.append(1)
        return Place(workers, places[0 if len(looks) == 1 else 1], {}, float(min(len(looks), 2)))

    poll = Poll(look, 0.001, anew=0.001)
    task = asyncio.create_task(poll.run())
    await workers.until(lambda: list(poll.uses) == ["box-w0"])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
