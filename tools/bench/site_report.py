"""The part of the page about site.yml: pure functions from numbers to text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tools.bench.report import digits, megabytes, spread
from tools.bench.site import KINDS, SiteSample, SiteSeries, workers
from tpu_ops import texts

#: Targets: the duration of a run without changes on TARGET_WORKERS, and the modules executed on each worker.
TARGET_WORKERS, WALL_LIMIT, MODULES_LIMIT = 8, 60.0, 15

#: The numbers that are shown per worker.
COUNTS = ("modules", "tasks", "skipped", "changed")


def of(series: SiteSeries, kind: str) -> list[SiteSample]:
    """Return the samples of one kind of run."""
    return [sample for sample in series.samples if sample.kind == kind]


def table(series: SiteSeries) -> list[str]:
    """Return the lines of the table for one size of fleet, one for each kind of run."""
    heads = ("", "wall, s", "controller's CPU, s", "peak, MB", *(f"{name} per worker" for name in COUNTS))
    heads += ("CPU per worker and task, s",)
    lines = [f"| {' | '.join(heads)} |".replace("|  |", "| |"), "|---" * len(heads) + "|"]
    for kind, title in KINDS.items():
        taken = of(series, kind)
        if not taken:
            continue
        cells = (
            title,
            spread(sample.wall for sample in taken).text(digits),
            spread(sample.cpu for sample in taken).text(digits),
            spread(sample.peak for sample in taken).text(megabytes),
            *(spread(getattr(sample, name) / workers(series) for sample in taken).text(digits) for name in COUNTS),
            spread(sample.cpu / sample.tasks for sample in taken).text(thousandths),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def thousandths(number: float) -> str:
    """Return a number with three decimal places."""
    return f"{number:.3f}"


def targets(measured: Sequence[SiteSeries]) -> list[str]:
    """Return the lines of the targets' table, for the sizes that were measured."""
    rows = []
    for series in measured:
        taken = of(series, "second")
        if taken and workers(series) == TARGET_WORKERS:
            walls = spread(sample.wall for sample in taken)
            what = f"second run on {TARGET_WORKERS} workers: under {WALL_LIMIT:.0f} s"
            rows.append((what, walls.text(digits), walls.median < WALL_LIMIT))
        if taken:
            modules = spread(sample.modules / workers(series) for sample in taken)
            fleet = texts.count(workers(series), "worker")
            what = f"second run on {fleet}: at most {MODULES_LIMIT} modules executed on each"
            rows.append((what, modules.text(digits), modules.median <= MODULES_LIMIT))
    return [
        "| target | measured | met |",
        "|---|---|---|",
        *(f"| {target} | {found} | {'yes' if met else '**no**'} |" for target, found, met in rows),
    ]


def of_one_size(series: SiteSeries) -> list[str]:
    """Return the page's lines for fleets of one size: heading, circumstances and table."""
    machine = ", ".join(f"{name} {value}" for name, value in series.machine.items())
    rounds = f"{len({sample.round for sample in series.samples})} rounds"
    if not of(series, "first"):
        rounds += " on one fleet, which an unmeasured run had configured"
    return [
        f"### site.yml on {texts.count(workers(series), 'worker')}",
        "",
        *textwrap.wrap(f"Commit {series.commit}, {series.date}, {rounds}. Machine: {machine}.", 118),
        "",
        *table(series),
        "",
    ]


def section(measured: Sequence[SiteSeries]) -> list[str]:
    """Return the lines of this section of the page, from the series, smallest fleet first."""
    method = (
        "Workers are containers of this machine, so that their work and the controller's share its cores. In each "
        "round, unless it is said otherwise, the nodes of [examples/fleet](../examples/fleet), where every role has "
        "something to do, are made with bare workers, configured, and deleted. One worker exports a data disk "
        "and serves git; the others are in as few nodes as possible. With one worker, nothing is mounted. "
        "Python packages come from a cache that an unmeasured run has filled. Numbers are medians, with the "
        "smallest and largest in brackets. The CPU is the controller's, without the ssh processes that keep "
        "connections open. Modules are what is executed on workers; tasks include those that Ansible does itself, such "
        "as checks of variables."
    )
    lines = ["## site.yml", "", *textwrap.wrap(method, 118), ""]
    for series in measured:
        lines += of_one_size(series)
    return [*lines, "### Targets of site.yml", "", "The median decides.", "", *targets(measured)]
