"""The report of a fleet, computed from what its workers tell."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.nodes import node
from tests.support.published import Member, document
from tpu_ops.cli import report_fleet
from tpu_ops.fleet import view
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import fleet_report, report_page
from tpu_ops.runs.fleet_report import Answers
from tpu_ops.ssh.replies import Reply

HOUR, DAY = 3600.0, 86400.0
#: 2026-11-27 18:00:00 UTC.
NOW = 1_795_802_400.0
BEGINS = fleet_report.begins_of(NOW, 3)
SILENT = Reply("pod-w1", {}, "timeout", "no answer within 45 s")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Two nodes: pod has 8 chips on two workers, and box is stopped."""
    member = Member(tmp_path, snapshot=str(tmp_path / "published.json"))
    nodes = [node(chips=8), node("box", node_id="2", count=1, state="STOPPED", chips=4, accelerator_type="v4-8")]
    (tmp_path / "published.json").write_text(document(nodes).text())
    for name in [name for name in os.environ if name.startswith("TPU_OPS_")]:
        monkeypatch.delenv(name)
    for name, value in member.environ().items():
        monkeypatch.setenv(name, value)
    return view.newest(member.settings())[0]


def use(person: str, run_id: str, since: float, until: float | None, **more: Any) -> dict[str, Any]:
    return {"person": person, "run_id": run_id, "since": since, "began": since, "until": until, **more}


def compute(fleet: Fleet, uses: dict[str, Any], signs: list[dict[str, Any]] | None = None) -> Any:
    """Return the report, given the uses of each worker and the signs of activity of all."""
    told = {
        host: one if isinstance(one, Reply) else Reply(host, {"uses": one, "whole": True}) for host, one in uses.items()
    }
    activity = {host: Reply(host, {"clock": NOW, "signs": signs or [], "unknown": []}) for host in uses}
    activity |= {host: reply for host, reply in told.items() if not reply.ok}
    return fleet_report.compute(fleet, Answers(told, activity), BEGINS, NOW, idle_for=12 * HOUR)


def test_days_are_those_of_utc_and_today_is_the_last() -> None:
    assert [begin % DAY for begin in BEGINS] == [0, 0, 0]
    assert BEGINS[-1] == NOW - 18 * HOUR


def test_chip_hours_by_person_and_day(fleet: Fleet) -> None:
    every = [
        use("ada", "a1", BEGINS[0] - 5 * HOUR, BEGINS[0] + 2 * HOUR),
        use("ada", "a2", BEGINS[1] + 22 * HOUR, BEGINS[2] + 1 * HOUR),
        use("bob", "b1", NOW - 3 * HOUR, None, began=None),
        use("bob", "b0", BEGINS[0] - 9 * HOUR, BEGINS[0] - 8 * HOUR),
        use("root", "r1", BEGINS[0], BEGINS[0] + 1 * HOUR, asker="ada"),
    ]
    found = compute(fleet, {"pod-w0": every, "pod-w1": every})
    assert [(one.person, one.chip_hours, one.runs, one.days) for one in found.people] == [
        ("ada", 40.0, 2, (16.0, 16.0, 8.0)),
        ("bob", 24.0, 1, (0.0, 0.0, 24.0)),
        ("root (started by ada)", 8.0, 1, (8.0, 0.0, 0.0)),
    ]
    assert [(one.node, one.state, one.chip_hours, one.use) for one in found.nodes] == [
        ("box", "STOPPED", 0.0, ""),
        ("pod", "READY", 72.0, "unknown"),
    ]
    json.dumps(found.to_json(), allow_nan=False)


def test_idle_nodes_and_costs(fleet: Fleet) -> None:
    signs = [{"kind": "run", "who": "ada", "what": "a1", "at": NOW - 40 * HOUR, "now": False}]
    found = compute(fleet, {"pod-w0": [], "pod-w1": []}, signs)
    pod = found.nodes[1]
    assert (pod.use, pod.since, pod.sign) == ("idle", NOW - 40 * HOUR, "run a1 of ada")
    # A node that is stopped costs nothing, whatever its price.
    assert found.nodes[0].per_hour == 0.0
    assert (pod.per_hour is None) == (found.unknown_prices == 1)
    assert found.per_hour == (pod.per_hour or 0.0)


@pytest.mark.parametrize(
    ("age", "silent", "use", "words"),
    [
        (2 * HOUR, False, "new", "never used, created 2 h ago"),
        (3 * DAY, False, "idle", "never used, created 3 days ago"),
        (2 * HOUR, True, "unknown", "created 2 h ago; pod-w1: no answer within 45 s"),
        (3 * DAY, True, "unknown", "created 3 days ago; pod-w1: no answer within 45 s"),
        (None, False, "unknown", "the API does not tell when it was created, and nobody has used it"),
    ],
)
def test_a_node_that_was_never_used_is_not_called_used(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], *, age: float | None, silent: bool, use: str, words: str
) -> None:
    made = "" if age is None else dt.datetime.fromtimestamp(NOW - age, dt.UTC).isoformat()
    fleet = fleet._replace(nodes=tuple(one._replace(create_time=made) for one in fleet.nodes))
    found = compute(fleet, {"pod-w0": [], "pod-w1": SILENT if silent else []})
    pod = found.nodes[1]
    assert (pod.use, pod.since, pod.sign) == (use, None, words)
    report_fleet.show(found)
    assert words in capsys.readouterr().out
    assert words in report_page.of_fleet(found, 12 * HOUR)


def test_what_is_not_counted_is_said(fleet: Fleet) -> None:
    forgetful = Reply("pod-w0", {"uses": [], "whole": False})
    found = compute(fleet, {"pod-w0": forgetful, "pod-w1": SILENT})
    assert found.gaps[1:] == (
        "pod-w1 did not tell who used them: no answer within 45 s",
        "pod-w0 no longer know all runs of these days",
    )
    older = Reply("pod-w1", {}, "invalid", "unknown action 'report'")
    assert "launcher there is too old" in compute(fleet, {"pod-w0": forgetful, "pod-w1": older}).gaps[1]


def test_text_and_page(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "</table><script>alert(1)</script>\x1b[31m"
    found = compute(fleet, {"pod-w0": [use(hostile, "a1", NOW - 2 * HOUR, None)], "pod-w1": []})
    report_fleet.show(found)
    shown = capsys.readouterr().out
    assert "use of chips by runs in the last 3 days: 8.0 chip-hours" in shown
    assert "\x1b" not in shown
    page = report_page.of_fleet(found, 12 * HOUR)
    assert "<script" not in page
    assert "&lt;/table&gt;&lt;script&gt;alert(1)&lt;/script&gt;, 27 Nov: 8.0 chip-hours" in page
    assert report_page.of_fleet(compute(fleet, {}), 12 * HOUR)


async def test_all_serving_workers_are_asked_both_questions_at_once(fleet: Fleet) -> None:
    class Workers:
        asked: list[tuple[str, list[str]]] = []  # noqa: RUF012 - one test

        async def call(self, requests: Any, action: str, **_: Any) -> dict[str, Reply]:
            self.asked.append((action, list(requests)))
            return {host: Reply(host, {}) for host in requests}

    workers: Any = Workers()
    found = await fleet_report.ask(fleet, workers, BEGINS[0])
    assert sorted(workers.asked) == [("activity", ["pod-w0", "pod-w1"]), ("report", ["pod-w0", "pod-w1"])]
    assert list(found.uses) == ["pod-w0", "pod-w1"]
