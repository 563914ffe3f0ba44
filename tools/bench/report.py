"""Make the page of the benchmarks from samples: pure functions from numbers to text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tools.bench.samples import MEASURED, Fleet, Sample, Series

#: Nodes per page of the API's lists.
PAGE_SIZE = 1000
#: The sizes of the fleets in the targets, in workers.
SMALL, MIDDLE, LARGE = 16, 1024, 10_000
#: Targets. The first two are the maximum ratios of the plugin's time, and of the time of `tpu_ops list`, to the floor's
#: time. The third is the maximum ratio of the cost of a worker in the large fleet to the cost in the middle fleet; with
#: quadratic growth, this ratio would be 11.
PLUGIN_LIMIT, LIST_LIMIT, GROWTH_LIMIT = 1.15, 0.25, 1.5


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some numbers."""

    median: float
    low: float
    high: float

    def text(self, number: Callable[[float], str]) -> str:
        """Return the median; the smallest and largest number follow in brackets if they differ."""
        middle, low, high = number(self.median), number(self.low), number(self.high)
        return middle if low == high else f"{middle} ({low}..{high})"


def spread(numbers: Iterable[float]) -> Spread:
    """Return the spread of one or more numbers."""
    found = sorted(numbers)
    return Spread(median(found), found[0], found[-1])


def digits(number: float) -> str:
    """Return a number with a precision that suits its size."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def megabytes(number: float) -> str:
    """Return a number of bytes in megabytes."""
    return f"{number / 1e6:.0f}"


def of(samples: Iterable[Sample], fleet: Fleet, key: str) -> dict[int, Sample]:
    """Return the samples of one measured command on one fleet by round."""
    return {sample.round: sample for sample in samples if (sample.fleet, sample.rival) == (fleet.name, key)}


def ratios(samples: Sequence[Sample], fleet: Fleet, key: str, base: str = "floor") -> list[float]:
    """Return the ratios of a command's wall time to that of the command `base`, one for each round."""
    bases = of(samples, fleet, base)
    return [sample.wall / bases[number].wall for number, sample in of(samples, fleet, key).items() if number in bases]


def growth(samples: Sequence[Sample], fleets: tuple[Fleet, Fleet, Fleet], key: str) -> list[float]:
    """Return the ratio of CPU time per worker between middle and large fleet to that between small and middle.

    1 is linear. Only differences are used, so that constant costs cancel out. The differences are so small that wall
    time, which other processes lengthen, would say little.
    """
    small, middle, large = (of(samples, fleet, key) for fleet in fleets)
    sizes = [fleet.workers for fleet in fleets]
    found = []
    for number in small.keys() & middle.keys() & large.keys():
        times = [part[number].cpu for part in (small, middle, large)]
        slopes = [(times[i + 1] - times[i]) / (sizes[i + 1] - sizes[i]) for i in (0, 1)]
        found.append(slopes[1] / slopes[0] if slopes[0] > 0 else math.inf)
    return found


def requests_text(samples: Iterable[Sample]) -> str:
    """Return the counts of API requests by method; ranges if the rounds differ."""
    counts: dict[str, list[int]] = {}
    taken = list(samples)
    for method in sorted({method for sample in taken for method in sample.requests}):
        counts[method] = [sample.requests.get(method, 0) for sample in taken]
    shown = (
        f"{method} {min(found):,}" + (f"..{max(found):,}" if min(found) != max(found) else "")
        for method, found in counts.items()
    )
    return ", ".join(shown) or "none"


def fleet_title(fleet: Fleet) -> str:
    """Return the heading of a fleet's table."""
    nodes = "1 node" if fleet.nodes == 1 else f"{fleet.nodes:,} nodes"
    return f"{fleet.workers:,} workers: {nodes} {fleet.accelerator_type}"


def fleet_table(samples: Sequence[Sample], fleet: Fleet) -> list[str]:
    """Return the Markdown table of a fleet's measurements: a header, then a line for each measured command."""
    lines = [
        "| | wall, s | CPU, s | peak, MB | wall, of the floor's | requests to the API |",
        "|---|---|---|---|---|---|",
    ]
    for key, title in MEASURED.items():
        taken = of(samples, fleet, key).values()
        if not taken:
            continue
        part = ratios(samples, fleet, key) if key not in {"floor", "help"} else []
        cells = (
            title,
            spread(sample.wall for sample in taken).text(digits),
            spread(sample.cpu for sample in taken).text(digits),
            spread(sample.peak for sample in taken).text(megabytes),
            spread(part).text(digits) if part else "",
            requests_text(taken),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def target_table(series: Series) -> list[str]:
    """Return the lines of the targets' table, for the fleets that were measured."""
    pods = {fleet.workers: fleet for fleet in series.fleets if fleet.workers > fleet.nodes}
    rows: list[tuple[str, str, bool]] = []

    def add(target: str, found: list[float], met: Callable[[float], bool]) -> None:
        if found:
            measured = spread(found)
            rows.append((target, measured.text(digits), met(measured.median)))

    if large := pods.get(LARGE):
        add(
            f"{MEASURED['again']}, {LARGE:,} workers: at most {PLUGIN_LIMIT} of the floor",
            ratios(series.samples, large, "again"),
            lambda found: found <= PLUGIN_LIMIT,
        )
        add(
            f"{MEASURED['list']}, {LARGE:,} workers: under {LIST_LIMIT} of the floor",
            ratios(series.samples, large, "list"),
            lambda found: found < LIST_LIMIT,
        )
    if SMALL in pods and MIDDLE in pods and LARGE in pods:
        sizes = pods[SMALL], pods[MIDDLE], pods[LARGE]
        floor = spread(growth(series.samples, sizes, "floor")).text(digits)
        add(
            f"{MEASURED['again']}: CPU of one more worker between {MIDDLE:,} and {LARGE:,}, of that between {SMALL} "
            f"and {MIDDLE:,}: at most {GROWTH_LIMIT} (1 is linear, 11 quadratic; the floor's own: {floor})",
            growth(series.samples, sizes, "again"),
            lambda found: found <= GROWTH_LIMIT,
        )
    for key, more in (("again", "and nothing else"), ("first", "and GetGuestAttributes once per node")):
        wrong = unexpected_requests(series, key)
        pages = "ListNodes once per page, all zones of the one project at once,"
        rows.append((f"{MEASURED[key]}: {pages} {more}", wrong or "so in all runs", not wrong))
    return [
        "| target | measured | met |",
        "|---|---|---|",
        *(f"| {target} | {measured} | {'yes' if met else '**no**'} |" for target, measured, met in rows),
    ]


def unexpected_requests(series: Series, key: str) -> str:
    """Return fleet and requests of the first measurement whose API requests were not the expected ones, else ""."""
    for fleet in series.fleets:
        expected = {"ListNodes": math.ceil(fleet.nodes / PAGE_SIZE)}
        if key == "first":
            expected["GetGuestAttributes"] = fleet.nodes
        for sample in of(series.samples, fleet, key).values():
            if dict(sample.requests) != expected:
                return f"{fleet_title(fleet)}: {requests_text([sample])}"
    return ""


def origin(commit: str, date: str, machine: Mapping[str, str]) -> list[str]:
    """Return the lines with commit, date and machine of samples."""
    described = ", ".join(f"{name} {value}" for name, value in machine.items())
    return textwrap.wrap(f"Commit {commit}, {date}. Machine: {described}.", 118)


def document(series: Series, *more: Sequence[str]) -> str:
    """Return the page: the inventory's results, then the lines of other parts."""
    rounds = len({sample.round for sample in series.samples})
    method = (
        "The lab's API serves fleets without containers, on the same machine. In each round every command runs once, "
        f"in an order that rotates; there are {rounds} rounds. Numbers are medians, with the smallest and largest in "
        "brackets; ratios are taken within a round. CPU is user and system time of the command and its children, not "
        "of the API."
    )
    lines = [
        "# Benchmarks",
        "",
        "`make bench` measures and writes this page; `make bench-docs` rewrites it from the samples in",
        "`docs/benchmarks/`. It is not edited by hand.",
        "",
        "## Inventory",
        "",
        *origin(series.commit, series.date, series.machine),
        "",
        *textwrap.wrap(method, 118),
        "",
    ]
    for fleet in series.fleets:
        lines += [f"### {fleet_title(fleet)}", "", *fleet_table(series.samples, fleet), ""]
    lines += ["### Targets", "", "The median decides.", "", *target_table(series)]
    for part in more:
        lines += ["", *part]
    return "\n".join(lines) + "\n"
