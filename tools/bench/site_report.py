"""The part of the page that is about site.yml: pure functions from numbers to text."""

from __future__ import annotations

import textwrap

from tools.bench.report import digits, megabytes, origin, spread
from tools.bench.site import KINDS, SiteSample, SiteSeries

#: Targets: seconds of a run without changes on so many workers, and modules it may execute on each.
TARGET_WORKERS, WALL_LIMIT, MODULES_LIMIT = 8, 60.0, 15

#: What is counted of each worker.
COUNTS = ("modules", "tasks", "skipped", "changed")


def of(series: SiteSeries, workers: int, kind: str) -> list[SiteSample]:
    """Return the samples of one kind of run on so many workers."""
    return [sample for sample in series.samples if (sample.workers, sample.kind) == (workers, kind)]


def sizes(series: SiteSeries) -> list[int]:
    """Return the numbers of workers that were measured, smallest first."""
    return sorted({sample.workers for sample in series.samples})


def table(series: SiteSeries, workers: int) -> list[str]:
    """Return the lines of the table of so many workers, one per kind of run."""
    heads = ("", "wall, s", "controller's CPU, s", "peak, MB", *(f"{name} per worker" for name in COUNTS))
    heads += ("CPU per worker and task, s",)
    lines = [f"| {' | '.join(heads)} |".replace("|  |", "| |"), "|---" * len(heads) + "|"]
    for kind, title in KINDS.items():
        taken = of(series, workers, kind)
        if not taken:
            continue
        cells = (
            title,
            spread(sample.wall for sample in taken).text(digits),
            spread(sample.cpu for sample in taken).text(digits),
            spread(sample.peak for sample in taken).text(megabytes),
            *(spread(getattr(sample, name) / workers for sample in taken).text(digits) for name in COUNTS),
            spread(sample.cpu / sample.tasks for sample in taken).text(thousandths),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def thousandths(number: float) -> str:
    """Return a number with three digits behind the point."""
    return f"{number:.3f}"


def targets(series: SiteSeries) -> list[str]:
    """Return the lines of the targets' table: those whose workers were measured."""
    rows = []
    if taken := of(series, TARGET_WORKERS, "second"):
        walls = spread(sample.wall for sample in taken)
        rows.append(
            (
                f"second run on {TARGET_WORKERS} workers: under {WALL_LIMIT:.0f} s",
                walls.text(digits),
                walls.median < WALL_LIMIT,
            )
        )
    for workers in sizes(series):
        if taken := of(series, workers, "second"):
            modules = spread(sample.modules / workers for sample in taken)
            rows.append(
                (
                    f"second run on {workers} workers: at most {MODULES_LIMIT} modules executed on each",
                    modules.text(digits),
                    modules.median <= MODULES_LIMIT,
                )
            )
    return [
        "| target | measured | met |",
        "|---|---|---|",
        *(f"| {target} | {measured} | {'yes' if met else '**no**'} |" for target, measured, met in rows),
    ]


def section(series: SiteSeries) -> list[str]:
    """Return the lines of the page."""
    rounds = len({sample.round for sample in series.samples})
    method = (
        "Workers are containers of this machine, so that their work and the controller's share its cores. In each "
        "round the nodes of [examples/fleet](../examples/fleet), where every role has something to do, are made with "
        f"bare workers, configured, and deleted; there are {rounds} rounds. One worker exports a data disk "
        "and serves git; the others are in nodes as large as they can be. Python packages "
        "come from a cache that an unmeasured run has filled. Numbers are medians, with the smallest and largest in "
        "brackets. The CPU is the controller's, without the ssh processes that keep connections open. Modules are what "
        "is executed on workers; tasks include those that Ansible does itself, such as checks of variables."
    )
    lines = [
        "## site.yml",
        "",
        *origin(series.commit, series.date, series.machine),
        "",
        *textwrap.wrap(method, 118),
        "",
    ]
    for workers in sizes(series):
        lines += [f"### site.yml on {workers} {'worker' if workers == 1 else 'workers'}", "", *table(series, workers)]
        lines += [""]
    return [*lines, "### Targets of site.yml", "", "The median decides.", "", *targets(series)]
