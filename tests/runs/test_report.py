"""The report of a run, computed from what workers tell."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import reports
from tests.support.nodes import node
from tests.support.published import Member, document
from tpu_ops.cli import report as command
from tpu_ops.cloud.node import workers_of
from tpu_ops.fleet import view
from tpu_ops.runs import records, recovery, report, report_curves, report_data, report_page, report_stacks
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.outcomes import Outcome, outcome_of
from tpu_ops.runs.report_curves import Measured
from tpu_ops.ssh.replies import Reply


def test_a_run_of_two_attempts() -> None:
    found = report_data.compute(reports.of_run())
    assert (found.run_id, found.state, found.attempt, found.person) == ("lm-7b", "failed", 2, "ada")
    assert (found.since, found.ended) == (reports.BEGIN, reports.BEGIN + 2 * 86400)
    assert found.first == "rank 2 (pod-w2): exit code 1"
    assert (found.code, found.directory) == (f"commit {reports.COMMIT}", "/srv/projects/lm")
    assert [(one.ranks, reports.DIGEST in one.text) for one in found.environments] == [("0-3", True)]
    assert [(one.number, one.state, one.why) for one in found.attempts] == [
        (1, "failed", "rank 0 (pod-w0): the host was restarted"),
        (2, "failed", "rank 2 (pod-w2): exit code 1"),
    ]
    assert [[span.state for span in one.spans] for one in found.ranks][1:3] == [["lost", "stopped"], ["lost", "failed"]]
    assert [(one.kind, one.ranks, one.text) for one in found.events] == [
        ("stall", "0-3", "no output for 15 min, chips idle for 15 min")
    ] * 2, "of each attempt"
    [first, second] = found.events
    assert found.attempts[0].ended is not None
    assert found.attempts[1].since is not None
    assert first.at < found.attempts[0].ended < found.attempts[1].since < second.at
    page = report_page.of_run(found)
    assert page.count("<title>stall: ranks 0-3: no output for 15 min") == 2
    assert [one.ranks for one in found.tails] == ["2", "0-1,3"]
    assert found.hangs == ("ranks 0-1,3: all_reduce (train.py:88)", "rank 2: next (data.py:41)")
    assert [one.text.splitlines()[0] for one in found.stacks] == ["all_reduce (train.py:88)", "next (data.py:41)"]
    assert found.use_of == "duty cycle"
    assert 70 < (found.ranks[0].use or 0) < 95
    json.dumps(found.to_json(), allow_nan=False)


def test_an_attempt_that_goes_on_has_no_end_although_its_log_is_copied() -> None:
    given = reports.of_run()
    going = {"state": "running", "exited": None, "ended": None, "exit": None, "first": None, "intent": None}
    outcomes = [outcome_of(one.rank, one.host, {**(one.record or {}), **going}) for one in given.outcomes]
    found = report_data.compute(replace(given, outcomes=outcomes, copied={2: reports.BEGIN + 86400}))
    assert [(one.number, one.state, one.ended is None) for one in found.attempts] == [
        (1, "failed", False),
        (2, "running", True),
    ]


def test_nothing_but_a_record_here_is_still_a_report() -> None:
    lost = tuple(Outcome(rank, f"pod-w{rank}", "gone", reason="its node was preempted") for rank in range(2))
    known = {
        "argv": ["python", "x.py"],
        "since": 100.0,
        "person": "ada",
        "started_by": "",
        "attempt": 3,
        "ended": 150.0,
    }
    given = report_data.Sources("r1", lost, {}, copied={1: 120.0}, tails={1: "last words"}, known=known, now=200.0)
    found = report_data.compute(given)
    assert (found.state, found.attempt, found.person, found.since, found.ended) == ("gone", 3, "ada", 100.0, 150.0)
    assert [(one.number, one.since, one.ended) for one in found.attempts] == [(1, None, 120.0)]
    assert [(one.ranks, one.text) for one in found.tails] == [("1", "last words")]
    assert [(one.ranks, one.text) for one in found.silent] == [("0-1", "its node was preempted")]
    assert report_page.of_run(found)


def test_an_active_run_has_no_end() -> None:
    outcome = outcome_of(0, "w0", reports.record(0, 1))
    found = report_data.compute(report_data.Sources("r1", (outcome,), {}, now=reports.BEGIN + 60))
    assert (found.state, found.ended, found.ranks[0].spans[0].end) == ("running", None, None)
    assert 'class="on pale"' in report_page.of_run(found)


def test_a_recovery_and_its_project_are_named() -> None:
    given = replace(reports.of_run(), state="recovering", recovery="a process prepares attempt 3", project="lm@abc")
    found = report_data.compute(given)
    assert (found.state, found.recovery, found.code) == ("recovering", "a process prepares attempt 3", "commit lm@abc")


@pytest.mark.parametrize(
    "answer",
    [
        {"history": "x", "watch": "x", "stacks": "x", "tail": None, "attempts": None, "environment": "x"},
        {"history": [1, {"t": "x"}, {"t": float("nan")}, {"t": 5, "cores": 1, "out": "x"}], "watch": {"stall": 1}},
        {"watch": {"stall": {"at": "x"}, "maintenance": {"at": 1}, "last_output": "x", "chips": ["x"]}},
        {"stacks": {"processes": [1, {"threads": [2, {"frames": [3, [1, 2, 3], []]}]}], "omitted": "x"}},
        {"environment": {}, "history": [{"t": 5, "cores": [[0, 1, 0, None, None, None], [1]]}]},
    ],
)
def test_answers_of_another_form_are_no_error(answer: dict[str, Any]) -> None:
    outcome = outcome_of(0, "w0", reports.record(0, 1))
    given = report_data.Sources("r1", (outcome,), {0: {"record": outcome.record, **answer}}, now=reports.BEGIN + 60)
    assert report_page.of_run(report_data.compute(given))


def test_different_texts_and_long_ones_are_limited() -> None:
    outcomes = tuple(outcome_of(rank, f"w{rank}", reports.record(rank, 50)) for rank in range(50))
    told = {rank: {"record": outcomes[rank].record, "tail": "x" * 40_000 + f" {rank}"} for rank in range(50)}
    found = report_data.compute(report_data.Sources("r1", outcomes, told, now=reports.BEGIN + 60))
    assert [one.ranks for one in found.tails][-2:] == ["11", "12-49"]
    assert max(len(one.text) for one in found.tails) < report_data.LONGEST + 10


def test_damaged_stacks_leave_those_of_other_ranks() -> None:
    damaged = reports.stacks("data.py:41")
    damaged["processes"][0]["threads"] = [{"name": 1, "active": True, "frames": [[1, 2, 3]]}]
    found = report_stacks.of_ranks({0: damaged, 1: {"processes": "x"}, 2: None, 3: reports.stacks("train.py:88")})
    assert [one.rank for one in found] == [3]


def test_many_different_stacks_are_limited() -> None:
    found = report_stacks.of_ranks({rank: reports.stacks(f"data.py:{rank}") for rank in range(100)})
    assert report_stacks.folded(found)[-1].title == "70 more"
    assert report_stacks.places(found)[-1] == "(80 more lines)"


# --- curves ---------------------------------------------------------------------------------------------------


def measured(*samples: tuple[float, float, Any]) -> Measured:
    """Return a rank's measurements, given time, bytes of output and the rows of cores."""
    return Measured.of([{"t": at, "out": out, "cores": cores} for at, out, cores in samples])


def test_what_is_measured() -> None:
    rows = [[0, 25, 100, 50.0, 10.0, 0], [1, 75, 100, None, 30.0, 0]]
    one = measured((10.0, 0, rows), (20.0, 500, []), (30.0, 100, [[0, 5, 0, None, None, 0]]))
    assert one.use("duty cycle") == [(10.0, 50.0)]
    assert one.use("HBM bandwidth") == [(10.0, 20.0)]
    assert one.hbm() == [(10.0, 50.0)]
    # An attempt begins with an output of its own.
    assert one.output() == [(20.0, 50.0), (30.0, 10.0)]


def test_duty_is_shown_unless_only_the_bandwidth_is_known() -> None:
    duty, bandwidth = measured((1.0, 0, [[0, 0, 0, 5.0, 6.0, 0]])), measured((1.0, 0, [[0, 0, 0, None, 6.0, 0]]))
    assert report_curves.kind_of([bandwidth, duty]) == "duty cycle"
    assert report_curves.kind_of([bandwidth]) == "HBM bandwidth"
    assert report_curves.kind_of([measured()]) == ""


def test_a_curve_has_the_least_mean_and_largest_of_ranks_and_gaps() -> None:
    ranks = [[(float(at), 10.0) for at in range(50)], [(float(at), 30.0) for at in (*range(50), *range(90, 101))]]
    found = report_curves.curve(ranks, (0.0, 100.0), cells=10)
    assert found.times == tuple(5.0 + 10 * index for index in range(10))
    assert found.low == (*[10.0] * 5, 10.0, None, None, 30.0, 30.0)
    assert found.mean == (*[20.0] * 5, 20.0, None, None, 30.0, 30.0)
    assert found.high == (*[30.0] * 5, 30.0, None, None, 30.0, 30.0)
    assert not report_curves.curve([[]], (0.0, 100.0)).is_known
    assert not report_curves.curve(ranks, (5.0, 5.0)).is_known


# --- speed and size -------------------------------------------------------------------------------------------


def test_a_week_of_32_ranks_takes_less_than_2_s_and_2_mb() -> None:
    given = reports.of_run(32, points=312, seconds=7 * 86400)
    begun = time.process_time()
    page = report_page.of_run(report_data.compute(given))
    assert time.process_time() - begun < 2
    assert len(page.encode()) < 2_000_000


# --- what is gathered -----------------------------------------------------------------------------------------


class Workers:
    """Stands for workers that answer; those in ``older`` do not know the action."""

    def __init__(self, answers: dict[str, dict[str, Any]], older: tuple[str, ...] = ()) -> None:
        self.answers, self.older = answers, older
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    async def call(self, requests: Any, action: str, **_: Any) -> dict[str, Reply]:
        self.asked.append((action, tuple(requests)))
        return {host: self._reply(host, action) for host in requests}

    def _reply(self, host: str, action: str) -> Reply:
        if host not in self.answers:
            return Reply(host, {}, kind="timeout", problem="no answer within 45 s")
        if action == "report" and host in self.older:
            return Reply(host, {}, kind="old", problem="its launcher is too old")
        return Reply(host, self.answers[host])


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Member:
    """A person whose fleet is the node pod of two workers."""
    found = Member(tmp_path, snapshot=str(tmp_path / "published.json"))
    (tmp_path / "published.json").write_text(document([node()]).text())
    for name in [name for name in os.environ if name.startswith("TPU_OPS_")]:
        monkeypatch.delenv(name)
    for name, value in found.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return found


async def test_all_ranks_are_asked_at_once_and_older_launchers_for_their_records(member: Member) -> None:
    fleet = view.newest(member.settings())[0]
    told = {f"pod-w{rank}": {"record": reports.record(rank, 2), "history": []} for rank in range(2)}
    workers: Any = Workers(told, older=("pod-w1",))
    given = await report.gather(fleet, workers, RunRef("lm-7b", ("pod-w0", "pod-w1")))
    assert workers.asked == [("report", ("pod-w0", "pod-w1")), ("status", ("pod-w1",))]
    assert [outcome.state for outcome in given.outcomes] == ["running", "running"]
    assert [(place.node, place.kind, place.zone, place.workers) for place in given.places] == [
        ("pod", "v4-16", "us-central2-b", 2)
    ]


async def test_a_silent_rank_is_known_by_what_was_kept_here(member: Member) -> None:
    settings = member.settings()
    fleet = view.newest(settings)[0]
    workers_ = workers_of(fleet.nodes)
    records.write(settings.state_dir, records.started_on("lm-7b", workers_, ("python", "train.py")))
    place = recovery.folder(settings.state_dir, "lm-7b") / "attempt-1"
    place.mkdir(parents=True)
    (place / "rank-1.log").write_text("step 1\nstep 2\n")
    workers: Any = Workers({"pod-w0": {"record": reports.record(0, 2)}})
    found = report_data.compute(await report.gather(fleet, workers, RunRef("lm-7b", ("pod-w0", "pod-w1"))))
    assert [(one.ranks, one.text) for one in found.tails] == [("1", "step 1\nstep 2")]
    assert [(one.ranks, one.text) for one in found.silent] == [("1", "no answer within 45 s")]
    assert found.state == "unreachable"


# --- what is printed ------------------------------------------------------------------------------------------


def test_the_report_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    command.show(report_data.compute(reports.of_run()))
    shown = capsys.readouterr().out
    assert shown.startswith("run lm-7b: failed, 2026-11-20 08:00:00 UTC to 2026-11-22 08:00:00 UTC (2 d)\n")
    for text in (
        "failed first: rank 2 (pod-w2): exit code 1",
        "command:      python train.py --config",
        "stall of ranks 0-3 at 2026-11-22",
        "last lines, rank 2:\n  step 1710",
        "ranks 0-1,3: all_reduce (train.py:88)",
    ):
        assert text in shown


def test_hostile_text_gives_no_orders_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    given = reports.of_run(1)
    given.told[0]["tail"] = "\x1b]0;owned\x07\x1b[31mred\x1b[0m\r\x1b[2Jend\u202e"  # type: ignore[index]
    command.show(report_data.compute(given))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
