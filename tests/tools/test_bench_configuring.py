"""The benchmark of workers that configure themselves: the part of the page that the samples make."""

from __future__ import annotations

import pytest

from tools.bench import configuring
from tools.bench.configuring import KINDS, ConfiguringSample, ConfiguringSeries


def series(each: float, sizes: tuple[int, ...] = (4, 32)) -> ConfiguringSeries:
    """Return samples in which workers that configure themselves cost the controller 2 s, and so much for each."""
    samples = [
        ConfiguringSample(1, workers, kind, 10.0, 2.0 + each * workers * (20 if kind == "controller" else 1), 15.0)
        for workers in sizes
        for kind in KINDS
    ]
    return ConfiguringSeries("abc1234", "2026-11-28", {"cores": "2"}, tuple(samples))


@pytest.mark.parametrize(("each", "met"), [(0.1, "yes"), (0.2, "**no**")])
def test_the_controller_s_time_for_each_worker_is_the_slope_between_the_sizes(each, met):
    assert list(configuring.growth(series(each), "workers")) == pytest.approx([2.0, each])
    assert configuring.section(series(each))[-1].endswith(f"| {each:.3f} | {met} |")


def test_times_of_more_workers_than_were_measured_are_on_the_line():
    (row,) = [line for line in configuring.section(series(0.1)) if line.startswith(f"| {KINDS['controller']} | 2.0")]
    assert row == f"| {KINDS['controller']} | 2.000 | 130 | 1026 | 4098 |"


def test_nothing_is_derived_from_one_size():
    lines = configuring.section(series(0.1, (4,)))
    assert len([line for line in lines if line.startswith("| 4 |")]) == len(KINDS)
    assert not any("target" in line for line in lines)
    assert max(map(len, lines)) <= 120
