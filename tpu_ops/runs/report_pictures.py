"""The pictures of a report as numbers, which its templates draw: bars per rank, curves over time, bars per day."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tpu_ops import texts
from tpu_ops.protocol.record import ON
from tpu_ops.runs import ranks
from tpu_ops.runs.report_curves import Curve
from tpu_ops.runs.report_data import Report

#: Width of all pictures, and the part of it on the left that has the labels.
WIDTH, LEFT = 920.0, 112.0
#: Height of a curve's picture without its labels, and of the labels of the time below each picture.
HEIGHT, BELOW = 120.0, 22.0
#: Height of all bars together, and of one bar at least and at most.
_BARS, _THIN, _THICK = 640.0, 3.0, 16.0
#: Width of the end of a bar, which has the full colour of the state.
_CAP = 5.0
#: Height that the label of a bar needs.
_LABEL = 13.0
_STEPS = (60, 300, 900, 1800, 3600, 7200, 3 * 3600, 6 * 3600, 12 * 3600, *(86400 * days for days in (1, 2, 7, 14, 30)))
_TICKS = 8


class Tick(NamedTuple):
    """A position on an axis, and its label."""

    at: float
    label: str


class Bar(NamedTuple):
    """A bar: position, size, class of its colour, and text."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str


class Mark(NamedTuple):
    """A line at a time, with its class and text."""

    x: float
    kind: str
    title: str


class Timeline(NamedTuple):
    """The attempts of all ranks. ``height`` is that of the bars."""

    height: float
    bars: list[Bar]
    labels: list[Tick]
    marks: list[Mark]
    ticks: list[Tick]


class Chart(NamedTuple):
    """A curve: points of the lines of the means, and of the areas between the smallest and largest values."""

    lines: list[str]
    areas: list[str]
    rows: list[Tick]
    ticks: list[Tick]


class Axis:
    """The axis of time, from the left to the right.

    Args:
        begin: The first time, in seconds since 1970.
        end: The last time.
    """

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, max(end, begin + 1)

    def x(self, moment: float) -> float:
        """Return the position of a time."""
        inside = min(max(moment, self.begin), self.end)
        return round(LEFT + (inside - self.begin) / (self.end - self.begin) * (WIDTH - LEFT), 1)

    def ticks(self) -> list[Tick]:
        """Return at most about `_TICKS` round times."""
        span = self.end - self.begin
        step = next((step for step in _STEPS if span / step <= _TICKS), _STEPS[-1] * math.ceil(span / _STEPS[-1] / 8))
        form = "%d %b" if step >= 86400 else "%H:%M" if span <= 86400 else "%d %b %H:%M"
        first = math.ceil(self.begin / step) * step
        return [
            Tick(self.x(moment), time.strftime(form, time.gmtime(moment)))
            for moment in range(int(first), int(self.end) + 1, int(step))
        ]


def axis(report: Report) -> Axis:
    """Return the axis of a report's pictures."""
    begin = report.since if report.since is not None else report.made
    return Axis(begin, report.ended or report.made)


def timeline(report: Report) -> Timeline:
    """Return the attempts of all ranks as bars, one row for each rank."""
    along = axis(report)
    thick = min(_THICK, max(_THIN, _BARS / max(1, len(report.ranks))))
    bars, labels, free = [], [], -_LABEL
    for row, rank in enumerate(report.ranks):
        top = row * thick
        if top - free >= _LABEL:
            labels.append(Tick(top + thick / 2, f"{rank.rank} {rank.host}"))
            free = top
        for span in rank.spans:
            end = report.made if span.end is None else span.end
            begun = span.began or end
            which = f"rank {rank.rank}, attempt {span.attempt}"
            kind = colour(span.state)
            for start, stop, shade, words in (
                (span.since, begun, "starting", "waited for all ranks"),
                (begun, end, f"{kind} pale", span.state),
            ):
                if stop > start:
                    title = f"{which}: {words}, {texts.at(start)} to {texts.at(stop)}"
                    width = max(1.5, along.x(stop) - along.x(start))
                    bars.append(Bar(along.x(start), top + 0.5, round(width, 1), thick - 1, shade, title))
            if span.end is not None:
                title = f"{which}: {span.state}, {texts.at(end)}"
                bars.append(Bar(max(LEFT, along.x(end) - _CAP), top + 0.5, _CAP, thick - 1, kind, title))
    marks = [
        Mark(along.x(one.at), one.kind, f"{one.kind}: {ranks.titled(one.ranks)}: {one.text}") for one in report.events
    ]
    return Timeline(max(thick * len(report.ranks), _LABEL), bars, labels, marks, along.ticks())


def colour(state: str) -> str:
    """Return the class of the colour of a state."""
    if state in ON:
        return "on"
    if state in ("succeeded", "stopped", "failed"):
        return state
    return "failed" if state in ("lost", "refused") else "unknown"


def percent(curve: Curve, along: Axis) -> Chart:
    """Return a curve of percents."""
    return _chart(curve, along, 100.0, [(float(value), f"{value} %") for value in (0, 50, 100)])


def rate(curve: Curve, along: Axis) -> Chart:
    """Return a curve of bytes per second."""
    most = _round(max((value for value in curve.high if value is not None), default=1.0) or 1.0)
    return _chart(curve, along, most, [(value, f"{texts.size(value)}/s") for value in (0.0, most / 2, most)])


def _round(value: float) -> float:
    """Return the next small number times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 3, 4, 5, 6, 8, 10) if factor * power >= value)


def _chart(curve: Curve, along: Axis, most: float, rows: Iterable[tuple[float, str]]) -> Chart:
    def y(value: float) -> float:
        return round(HEIGHT * (1 - min(max(value / most, 0.0), 1.0)), 1)

    lines, areas = [], []
    for part in _parts(curve.mean):
        # A single point is a short line.
        indices = part if len(part) > 1 else [*part, *part]
        xs = [along.x(curve.times[index]) for index in indices]
        xs = xs if len(part) > 1 else [xs[0] - 0.5, xs[0] + 0.5]
        low, mean, high = ([y(column[i] or 0.0) for i in indices] for column in (curve.low, curve.mean, curve.high))
        lines.append(_points(xs, mean))
        if low != high:
            areas.append(f"{_points(xs, high)} {_points(xs[::-1], low[::-1])}")
    return Chart(lines, areas, [Tick(y(value), label) for value, label in rows], along.ticks())


def _parts(values: Sequence[float | None]) -> list[list[int]]:
    """Return the indices of the values that are known, in parts without a gap."""
    parts: list[list[int]] = []
    for index, value in enumerate(values):
        if value is None:
            continue
        if parts and parts[-1][-1] == index - 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def _points(xs: Sequence[float], ys: Sequence[float]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in zip(xs, ys, strict=True))


class Days(NamedTuple):
    """The use of each day by person: stacked bars, and labels of the days and of the height."""

    bars: list[Bar]
    ticks: list[Tick]
    rows: list[Tick]


def days(begins: Sequence[float], people: Mapping[str, Sequence[float]], unit: str) -> Days:
    """Return stacked bars for each day.

    Args:
        begins: When each day begins.
        people: Person -> use of each day; the first persons get colours of their own.
        unit: What is counted.
    """
    sums = [sum(values[index] for values in people.values()) for index in range(len(begins))]
    most = _round(max(sums, default=0.0) or 1.0)
    wide = (WIDTH - LEFT) / max(1, len(begins))
    bars, ticks = [], []
    for index, begin in enumerate(begins):
        day = time.strftime("%d %b", time.gmtime(begin))
        if index % math.ceil(len(begins) / 14) == 0:
            ticks.append(Tick(round(LEFT + (index + 0.5) * wide, 1), day))
        top = HEIGHT
        for number, (person, values) in enumerate(people.items()):
            high = values[index] / most * HEIGHT
            if high > 0:
                top -= high
                title = f"{person}, {day}: {values[index]:.1f} {unit}"
                x = round(LEFT + (index + 0.15) * wide, 1)
                bars.append(Bar(x, round(top, 2), round(wide * 0.7, 1), round(high, 2), person_class(number), title))
    return Days(bars, ticks, [Tick(HEIGHT * (1 - part), f"{part * most:g}") for part in (0, 0.5, 1)])


def person_class(number: int) -> str:
    """Return the class of the colour of a person, given the person's position."""
    return f"person{min(number, 7)}"
