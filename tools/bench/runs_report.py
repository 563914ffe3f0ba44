"""The part of the page about runs: pure functions from numbers to text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from tools.bench.report import digits, megabytes, origin, spread
from tools.bench.runs import GRACE, KINDS, LOG, RunSample, RunSeries

#: Commands with the same task as the floor: `tpu_ops run`, and the tools that it is compared with.
COMPARED = ("run", "clush", "ansible", "gcloud")
#: Commands that reach every worker.
FANNED_OUT = ("floor", *COMPARED, "top", "start", "stacks", "stop", "doctor", "fetch")


@dataclass(frozen=True)
class Target:
    """A target for a number.

    Attributes:
        title: Its description, with the limit.
        kinds: The kinds of samples that the number is computed from.
        number: Computes the number from these samples.
        limit: The maximum, or the minimum if `least` is set.
        least: Whether the limit is a minimum.
        workers: The number of workers for which the target is judged; 0 means any.
    """

    title: str
    kinds: tuple[str, ...]
    number: Callable[..., float]
    limit: float
    least: bool = False
    workers: int = 0

    def met(self, number: float) -> bool:
        """Return whether a number meets the target."""
        return number >= self.limit if self.least else number <= self.limit


def _more(kind: str, times: float, what: str, name: str) -> Target:
    return Target(
        f"{what} of {KINDS[kind]}: at least {times:.0f} times that of `tpu_ops run`",
        (kind, "run"),
        lambda compared, run: getattr(compared, name) / getattr(run, name),
        times,
        least=True,
    )


TARGETS = (
    Target(
        f"{KINDS['run']}, less {KINDS['python']}: at most 2 of the floor",
        ("run", "python", "floor"),
        lambda run, python, floor: (run.wall - python.wall) / floor.wall,
        2.0,
    ),
    Target(f"{KINDS['start']}: at most 3 s with 32", ("start",), lambda start: start.wall, 3.0, workers=32),
    Target(f"{KINDS['top']}: at most 2 times `tpu_ops run`", ("top", "run"), lambda top, run: top.wall / run.wall, 2.0),
    Target(f"{KINDS['stacks']}: at most 3 s with 32", ("stacks",), lambda stacks: stacks.wall, 3.0, workers=32),
    Target(f"{KINDS['stop']}: at most {GRACE + 1} s", ("stop",), lambda stop: stop.wall, GRACE + 1.0),
    _more("ansible", 10.0, "CPU", "cpu"),
    _more("ansible", 8.0, "wall time", "wall"),
    _more("gcloud", 10.0, "CPU", "cpu"),
    _more("gcloud", 8.0, "wall time", "wall"),
    Target(f"{KINDS['help']}: at most 0.15 s of CPU", ("help",), lambda help_: help_.cpu, 0.15),
)


def of(series: RunSeries, workers: int, kind: str) -> dict[int, RunSample]:
    """Return the samples of one kind for a number of workers, by round."""
    return {sample.round: sample for sample in series.samples if (sample.workers, sample.kind) == (workers, kind)}


def sizes(series: RunSeries) -> list[int]:
    """Return the measured numbers of workers, smallest first."""
    return sorted({sample.workers for sample in series.samples})


def numbers(series: RunSeries, workers: int, kinds: tuple[str, ...], number: Callable[..., float]) -> list[float]:
    """Return one number for each round in which all these kinds were measured, computed from their samples."""
    parts = [of(series, workers, kind) for kind in kinds]
    rounds = sorted(set.intersection(*(set(part) for part in parts)))
    return [number(*(part[each] for part in parts)) for each in rounds]


def table(series: RunSeries, workers: int) -> list[str]:
    """Return the lines of the table for a number of workers, one for each kind."""
    heads: tuple[str, ...] = ("", "wall, s", "wall, of the floor's", "CPU, s", "CPU per worker, ms")
    heads += ("all processors busy, s", "peak, MB", "logs, MB/s")
    lines = [f"| {' | '.join(heads)} |".replace("|  |", "| |"), "|---" * len(heads) + "|"]
    for kind, title in KINDS.items():
        taken = list(of(series, workers, kind).values())
        if not taken:
            continue
        floors = numbers(series, workers, (kind, "floor"), lambda one, floor: one.wall / floor.wall)
        busy = [sample.busy for sample in taken if sample.busy is not None]
        cells = (
            title,
            spread(sample.wall for sample in taken).text(digits),
            spread(floors).text(digits) if floors and kind in COMPARED else "",
            spread(sample.cpu for sample in taken).text(digits),
            spread(sample.cpu / workers * 1000 for sample in taken).text(digits) if kind in FANNED_OUT else "",
            spread(busy).text(digits) if busy and kind in FANNED_OUT else "",
            spread(sample.peak for sample in taken).text(megabytes),
            spread(sample.size / sample.wall / 1e6 for sample in taken).text(digits) if taken[0].size else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def target_table(series: RunSeries) -> list[str]:
    """Return the lines of the targets' table, with a column for each number of workers."""
    measured = sizes(series)
    lines = [
        f"| target | {' | '.join(f'{workers} workers' for workers in measured)} | met |",
        "|---" * (len(measured) + 2) + "|",
    ]
    for target in TARGETS:
        cells, met = [], []
        for workers in measured:
            found = numbers(series, workers, target.kinds, target.number)
            cells.append(spread(found).text(digits) if found else "")
            if found and target.workers in (0, workers):
                met.append(target.met(spread(found).median))
        answer = "" if not met else "yes" if all(met) else "**no**"
        if any(cells):
            lines.append(f"| {' | '.join((target.title, *cells, answer))} |")
    return lines


def section(series: RunSeries) -> list[str]:
    """Return the lines of this section of the page."""
    rounds = len({sample.round for sample in series.samples})
    method = (
        "Workers are containers of this machine, so that their work and the controller's share its cores. They are of "
        "one node, have the launcher and an environment without packages, and connections to them are open. In each "
        "round everything runs once, in an order that rotates; there are "
        f"{rounds} rounds. Numbers are medians, with the smallest and largest in brackets; ratios are taken within a "
        "round. All reach all workers at once, with the same key exchange, and all but gcloud, which keeps its own, "
        "over the same connections; Ansible is given the names of the hosts and reads no inventory. "
        "CPU is user and system time of the command and its children on the controller, without the ssh processes that "
        "keep connections open. The time for which all processors were busy includes what workers did: where it, "
        "divided by the number of cores, comes near to the wall time, the result is limited by cores that the workers "
        "share here, which those of a pod would not. The workers' records say when the last rank executed the command. "
        f"For the rows of logs, each rank has written {LOG // 2**20} MiB."
    )
    lines = [
        "## Runs",
        "",
        *origin(series.commit, series.date, series.machine),
        "",
        *textwrap.wrap(method, 118),
        "",
    ]
    for workers in sizes(series):
        lines += [f"### Runs on {workers} workers", "", *table(series, workers), ""]
    return [*lines, "### Targets of runs", "", "The median decides.", "", *target_table(series)]
