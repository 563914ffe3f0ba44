"""Measurements of a run over time: those of each rank, and the curves of all ranks together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from tpu_ops.protocol.values import is_number

#: Number of points of a curve.
CELLS = 240
#: Positions in a row of a sample's ``cores``.
_HBM_USED, _HBM_TOTAL, _DUTY, _BANDWIDTH = 1, 2, 3, 4
#: What can be measured of the use of chips -> its position in a row. The first that is known is shown.
KINDS = {"duty cycle": _DUTY, "HBM bandwidth": _BANDWIDTH}

#: Time and value of a measurement.
Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A measurement of all ranks over time.

    Attributes:
        times: The times, at equal distances.
        low: The smallest value of a rank at each time; None where no rank has one.
        mean: The mean of all ranks.
        high: The largest value of a rank.
    """

    times: tuple[float, ...] = ()
    low: tuple[float | None, ...] = ()
    mean: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether there is any value."""
        return any(value is not None for value in self.mean)


class Measured(NamedTuple):
    """The samples of one rank, oldest first; see the launcher's action ``report``."""

    samples: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, history: object) -> Measured:
        """Return the samples in a worker's answer; those of another form are left out."""
        found = history if isinstance(history, list) else []
        samples = [one for one in found if isinstance(one, Mapping) and is_number(one.get("t"))]
        return cls(tuple(sorted(samples, key=lambda one: float(one["t"]))))

    def use(self, kind: str) -> list[Point]:
        """Return the mean use of the rank's cores over time, in percent; ``kind`` is one of `KINDS`."""
        return self._points(lambda rows: _mean(_column(rows, KINDS[kind]))) if kind else []

    def hbm(self) -> list[Point]:
        """Return the part of the HBM in use over time, in percent."""

        def part(rows: Sequence[Sequence[Any]]) -> float | None:
            known = [row for row in rows if is_number(row[_HBM_USED]) and is_number(row[_HBM_TOTAL])]
            total = sum(row[_HBM_TOTAL] for row in known)
            return 100 * float(sum(row[_HBM_USED] for row in known)) / total if total > 0 else None

        return self._points(part)

    def output(self) -> list[Point]:
        """Return the rate of the rank's output over time, in bytes per second; it begins at 0 with each attempt."""
        found, before = [], None
        for sample in self.samples:
            if not is_number(sample.get("out")):
                continue
            at, size = float(sample["t"]), float(sample["out"])
            if before is not None and at > before[0]:
                came = size - before[1] if size >= before[1] else size
                found.append((at, came / (at - before[0])))
            before = (at, size)
        return found

    def _points(self, value: Any) -> list[Point]:
        points = []
        for sample in self.samples:
            cores = sample.get("cores")
            rows = [row for row in cores if isinstance(row, list) and len(row) == 6] if isinstance(cores, list) else []
            if (one := value(rows)) is not None:
                points.append((float(sample["t"]), one))
        return points


def _column(rows: Iterable[Sequence[Any]], position: int) -> list[float]:
    return [float(row[position]) for row in rows if is_number(row[position])]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def mean_of(points: Iterable[Point]) -> float | None:
    """Return the mean of measurements; None if there is none."""
    return _mean([value for _, value in points])


def kind_of(measured: Iterable[Measured]) -> str:
    """Return which of `KINDS` is known of any rank; empty if none is."""
    found = list(measured)
    return next((kind for kind in KINDS if any(one.use(kind) for one in found)), "")


def curve(ranks: Iterable[Sequence[Point]], window: tuple[float, float], cells: int = CELLS) -> Curve:
    """Return the curve of several ranks.

    At each time, the measurement of a rank is the nearest one. If that is farther away than the rank's measurements
    usually are from each other, the rank has none at this time.

    Args:
        ranks: The measurements of each rank, oldest first.
        window: The first and last time.
        cells: Number of times.
    """
    begin, end = window
    known = [points for points in ranks if points]
    if not known or end <= begin:
        return Curve()
    step = (end - begin) / cells
    times = tuple(begin + (index + 0.5) * step for index in range(cells))
    columns: list[list[float]] = [[] for _ in times]
    for points in known:
        at = [moment for moment, _ in points]
        usual = median(later - before for before, later in pairwise(at)) if len(at) > 1 else step
        reach = max(step, 1.5 * usual)
        for index, moment in enumerate(times):
            place = bisect_left(at, moment)
            near = min((one for one in (place - 1, place) if 0 <= one < len(at)), key=lambda one: abs(at[one] - moment))
            if abs(at[near] - moment) <= reach:
                columns[index].append(points[near][1])

    def each(summary: Any) -> tuple[float | None, ...]:
        return tuple(round(summary(values), 2) if values else None for values in columns)

    return Curve(tuple(round(moment, 1) for moment in times), each(min), each(fmean), each(max))
