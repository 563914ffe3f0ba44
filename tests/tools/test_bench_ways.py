"""The benchmark's section on the ways of people."""

from __future__ import annotations

from tools.bench import ways
from tools.bench.ways import WaySample, WaySeries


def test_each_step_has_a_row_and_each_person_a_sum() -> None:
    keys = [key for steps in ways.WAYS.values() for key in steps]
    taken = tuple(WaySample(number, key, 10.0 * number, None) for number in (1, 2) for key in keys)
    lines = ways.section(WaySeries("abc1234", "2026-11-28", {"cores": "2"}, taken))
    rows = [line.split(" | ")[1:4] for line in lines if line.startswith("| A") and "---" not in line]
    assert [step for step, *_ in rows if step != "**all**"] == keys
    (first, *_) = (row for row in rows if row[0] == "**all**")
    assert first == ["**all**", "2", "75.0 (50.0..100)"]
