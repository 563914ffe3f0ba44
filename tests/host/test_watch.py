"""The thread that watches a rank: its files, its samples for the hub, a stall's stacks, and its faults."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host.test_stalls import BUSY, core, service
from tpu_ops.host.notices import Notices
from tpu_ops.host.stalls import Rules
from tpu_ops.host.store import HISTORY, WATCH
from tpu_ops.host.watch import Facts, Watch, thinned

RULES = Rules(after=0.5, grace=0.0)


class Rank:
    """A rank whose output and chips a test sets."""

    def __init__(self, place: Path, rules: Rules = RULES) -> None:
        self.place = place
        self.heard: tuple[float, float] | None = time.monotonic(), time.time()
        self.services: Any = BUSY
        self.dumps = 0
        self.entries = {"preempted": "FALSE"}
        facts = Facts(lambda: (7, self.heard), list, self._seen, self._dump, Notices(self.entries.get))
        self.watch = Watch(str(place), facts, rules, first=True)
        self.found: list[tuple[str, Any]] = []

    def _seen(self, _holders: list[Any]) -> Any:
        if isinstance(self.services, Exception):
            raise self.services
        return self.services

    def _dump(self) -> str:
        self.dumps += 1
        return ""

    def noted(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.place / WATCH).read_text())
        return found

    def await_(self, holds: Callable[[], object], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, (self.found, list(self.place.glob("*")))
            self.found += self.watch.take()
            time.sleep(0.01)  # polls until the deadline

    def said(self) -> list[dict[str, Any]]:
        return [value for kind, value in self.found if kind == "say"]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.watch.stop()
    if made.watch.is_alive():
        made.watch.join(10)


def test_a_silent_rank_sends_samples_and_reports_its_next_output(rank: Rank) -> None:
    rank.watch.start()
    rank.await_((rank.place / WATCH).exists)
    assert rank.noted()["chips"] == "busy"
    rank.services = service(core(idle=60.0))
    rank.await_(rank.said)
    (sample,) = (event["sample"] for event in rank.said()[:1])
    assert sample["silent"] >= RULES.after
    assert sample["began"] >= sample["silent"]
    rank.await_(lambda: rank.said()[-1]["sample"]["chips"] == "idle")
    assert rank.said()[-1]["sample"] | {"silent": 0, "began": 0} == {
        "silent": 0,
        "began": 0,
        "used": True,
        "chips": "idle",
        "rests": 60.0,
        "sign": "chips idle",
    }
    rank.watch.order({"do": "stall", "sign": "no output"})
    rank.await_(lambda: {"say": "dumped"} in rank.said())
    assert rank.dumps == 1
    note = "the run stands still: no output; the stacks of all ranks are kept"
    assert [value for kind, value in rank.found if kind == "note"] == [note]
    rank.await_(lambda: rank.noted()["stall"])
    assert rank.noted()["stall"]["sign"] == "no output"
    assert rank.noted()["idle_since"] < time.time() - 59
    rank.heard = time.monotonic() + 3600, time.time()
    rank.await_(lambda: rank.said()[-1] == {"say": "quiet", "sample": None})
    rank.watch.order({"do": "stall", "sign": ""})
    rank.await_(lambda: not rank.noted()["stall"])


def test_a_notice_is_noted_and_can_be_asked_for_at_once(rank: Rank) -> None:
    rank.watch.start()
    rank.await_((rank.place / WATCH).exists)
    rank.entries["preempted"] = "TRUE"
    rank.watch.look()
    notice = rank.watch.notice(5.0)
    assert notice
    assert notice["kind"] == "preempted"
    rank.await_(lambda: rank.noted()["maintenance"] == notice)


def test_a_fault_is_noted_once_and_the_watch_goes_on(rank: Rank) -> None:
    rank.services = ValueError("a metrics service lies")
    rank.watch.start()
    rank.await_(lambda: rank.found)
    rank.services = BUSY
    rank.await_((rank.place / WATCH).exists)
    (note,) = (value for kind, value in rank.found if kind == "note")
    assert note.startswith("this rank cannot be watched: ")
    assert note.strip().endswith("ValueError: a metrics service lies")


def test_the_last_output_is_noted_at_the_end_of_a_run_that_was_shorter_than_the_time_between_samples(
    tmp_path: Path,
) -> None:
    made = Rank(tmp_path, Rules())
    made.heard = None
    made.watch.start()
    made.await_((tmp_path / WATCH).exists)
    made.heard = time.monotonic(), 1234.5
    made.watch.stop()
    made.await_(lambda: made.noted()["last_output"] == 1234.5)


def test_a_missing_directory_is_harmless(tmp_path: Path) -> None:
    made = Rank(tmp_path / "gone")
    made.watch.start()
    (tmp_path / "gone").mkdir()
    made.await_(made.said)
    assert made.watch.is_alive()
    made.watch.stop()
    made.watch.join(10)
    assert not [value for kind, value in made.found if kind == "note"]


def test_the_history_has_a_line_a_minute(rank: Rank) -> None:
    rank.services = service(core(id=4, idle=0.12345, hbm_bandwidth=40.04), core(id=5, idle=0.0, hbm_bandwidth=9.0))
    rank.watch.start()
    rank.await_((rank.place / HISTORY).exists)
    (line,) = (json.loads(text) for text in (rank.place / HISTORY).read_text().splitlines())
    assert line.pop("t") == pytest.approx(time.time(), abs=10)
    assert line == {
        "out": 7,
        "cores": [[4, 1, 2, 100.0, 40.0, 0.1], [5, 1, 2, 100.0, 9.0, 0.0]],
        "state": "ok",
    }


def test_a_history_is_thinned_except_for_the_last_hour() -> None:
    lines = [json.dumps({"t": float(number), "x": "y" * 100}).encode() + b"\n" for number in range(1000)]
    found = thinned([*lines, b'{"t": 1'], 600.0)
    assert found == [*lines[1:600:2], *lines[600:]]
