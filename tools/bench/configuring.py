"""Run site.yml on fleets that it has configured: from the controller, and by the workers themselves; and `drift`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.bench.measure import BIN, Command, clock
from tools.bench.report import Spread, digits, origin, spread
from tools.bench.samples import PartSeries
from tools.bench.site import LONGEST, Site
from tpu_ops.errors import OpsError

#: Kind of run -> its description.
KINDS = {
    "playbook": "`ansible-playbook site.yml`",
    "controller": "`configure --no-on-workers`",
    "workers": "`configure --on-workers`",
    "drift": "`drift`",
}
_ARGV = {
    "playbook": ("ansible-playbook", "site.yml"),
    "controller": ("tpu_ops", "configure", "--no-on-workers", "--json"),
    "workers": ("tpu_ops", "configure", "--on-workers", "--json"),
    "drift": ("tpu_ops", "drift", "--json"),
}
#: Numbers of real workers for which the controller's time is derived.
DERIVED = (64, 512, 2048)
#: Targets: seconds of the controller's processor time for each further worker.
CPU_LIMIT = 0.15


@dataclass(frozen=True)
class ConfiguringSample:
    """One run that changes nothing.

    Attributes:
        round: Number of the round, from 1.
        workers: Number of workers.
        kind: Key of `KINDS`.
        wall: Duration in seconds.
        cpu: Processor time on the controller, in seconds, without the ssh processes that keep connections open.
        busy: Seconds for which this machine's processors were busy; None if unknown.
    """

    round: int
    workers: int
    kind: str
    wall: float
    cpu: float
    busy: float | None


#: All samples of this part.
ConfiguringSeries = PartSeries[ConfiguringSample]


def run(sizes: Sequence[int], rounds: int, root: Path, say: Callable[[str], None]) -> list[ConfiguringSample]:
    """Configure a fleet of each size once, unmeasured; then measure runs that change nothing, in turn.

    Args:
        sizes: Numbers of workers, at least one each.
        rounds: Number of rounds.
        root: A directory for the lab's state.
        say: Called with lines of progress.

    Raises:
        OpsError: A run failed, or changed something.
    """
    site, found = Site(root), []
    with site.up():
        for workers in sizes:
            with site.fleet(workers):
                site.do("ansible-playbook", "site.yml")
                # The workers receive Ansible once.
                site.do("tpu_ops", "configure", "--on-workers")
                for number in range(1, rounds + 1):
                    for kind in KINDS:
                        found.append(_sample(site, number, workers, kind))
                        say(f"site.yml on {workers}, round {number} of {rounds}, {kind}: {found[-1].wall:.1f} s")
    return found


def _sample(site: Site, number: int, workers: int, kind: str) -> ConfiguringSample:
    program, *rest = _ARGV[kind]
    result = site.root / "result"
    where = f"{' '.join(_ARGV[kind])} on {workers}"
    took = clock(Command((str(BIN / program), *rest), site.environ), result, site.root / "errors", where, LONGEST)
    if kind in ("controller", "workers"):
        hosts = json.loads(result.read_text())["hosts"]
        if len(hosts) != workers or any(row["changed"] for row in hosts.values()):
            raise OpsError("not every worker was configured without a change", where=where)
    return ConfiguringSample(number, workers, kind, round(took.wall, 2), round(took.cpu, 2), took.busy)


def sizes_of(series: ConfiguringSeries) -> list[int]:
    """Return the numbers of workers, smallest first."""
    return sorted({sample.workers for sample in series.samples})


def numbers(series: ConfiguringSeries, workers: int, kind: str, name: str) -> Spread:
    """Return the spread of a number of the samples of one kind and size: ``wall``, ``cpu`` or ``busy``."""
    taken = [sample for sample in series.samples if (sample.workers, sample.kind) == (workers, kind)]
    return spread(getattr(sample, name) or 0 for sample in taken)


def growth(series: ConfiguringSeries, kind: str) -> tuple[float, float]:
    """Return the controller's processor time without workers, and for each worker, in seconds.

    They are of the line through the medians of the smallest and the largest fleet.
    """
    first, *_, last = sizes_of(series)
    few, many = (numbers(series, workers, kind, "cpu").median for workers in (first, last))
    each = (many - few) / (last - first)
    return few - each * first, each


def section(series: ConfiguringSeries) -> list[str]:
    """Return the lines of this section of the page."""
    method = (
        "The nodes are those of site.yml above, configured before; nothing is changed. In each round every kind runs "
        "once, over open connections. Workers are containers of this machine and share its cores: what workers do "
        "themselves would take no longer with more of them if they were machines. So the wall time says little "
        "here, and the controller's processor time decides. Numbers are medians, with the smallest and largest in "
        "brackets."
    )
    lines = ["## site.yml by the workers themselves", ""]
    lines += [*origin(series.commit, series.date, series.machine), "", *textwrap.wrap(method, 118), ""]
    lines += ["| workers | | wall, s | controller's CPU, s | all processors busy, s |", "|---|---|---|---|---|"]
    for workers in sizes_of(series):
        for kind, title in KINDS.items():
            cells = [numbers(series, workers, kind, name).text(digits) for name in ("wall", "cpu", "busy")]
            lines.append(f"| {workers} | {title} | {' | '.join(cells)} |")
    return [*lines, *_derived(series)] if len(sizes_of(series)) > 1 else lines


def _derived(series: ConfiguringSeries) -> list[str]:
    """Return the lines about numbers of workers that this machine cannot have, and about the target."""
    first, *_, last = sizes_of(series)
    own = numbers(series, first, "workers", "wall").median
    text = (
        f"A line through the medians of {first} and {last} workers gives the controller's processor time for other "
        f"numbers. On one core, that is also the shortest time in which it can be done. On workers that are machines, "
        f"it is added to the time of a single one, {digits(own)} s here with {first}."
    )
    lines = ["", *textwrap.wrap(text, 118), ""]
    lines += [f"| | each worker, s | {' | '.join(f'{number} workers, s' for number in DERIVED)} |"]
    lines += [f"|---|---|{'---|' * len(DERIVED)}"]
    for kind, title in KINDS.items():
        base, each = growth(series, kind)
        cells = " | ".join(digits(base + each * number) for number in DERIVED)
        lines.append(f"| {title} | {each:.3f} | {cells} |")
    each = growth(series, "workers")[1]
    met = "yes" if each < CPU_LIMIT else "**no**"
    lines += ["", "| target | measured | met |", "|---|---|---|"]
    what = f"`configure --on-workers`: under {CPU_LIMIT} s of the controller's CPU for each worker"
    return [*lines, f"| {what} | {each:.3f} | {met} |"]
