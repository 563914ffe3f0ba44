"""Measure inventory, runs, site.yml, nodes and many workers, repeat tests, kill commands; write docs/benchmarks.md.

    python -m tools.bench                measure, write the samples and the page
    python -m tools.bench --part site    measure one part again; the page keeps the other parts
    python -m tools.bench --part site --workers 8    measure site.yml again for fleets of one size
    python -m tools.bench --docs         write the page again from the samples

The exit codes are the same as those of `tpu_ops`.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.bench import (
    configuring,
    faults,
    kills,
    machine,
    measure,
    nodes,
    report,
    rivals,
    runs,
    runs_report,
    samples,
    site,
    site_report,
    swarm,
    ways,
)
from tools.bench.configuring import ConfiguringSample, ConfiguringSeries
from tools.bench.faults import FaultSample, FaultSeries
from tools.bench.kills import KillSample, KillSeries
from tools.bench.nodes import NodesSample, NodesSeries
from tools.bench.runs import RunSample, RunSeries
from tools.bench.samples import Fleet, Series, read_part
from tools.bench.site import SiteSample, SiteSeries
from tools.bench.swarm import SwarmSample, SwarmSeries
from tools.bench.ways import WaySample, WaySeries
from tpu_ops.cloud.accelerators import accelerator_type
from tpu_ops.errors import OpsError, UsageError

POD, SINGLE = "v4-128", "v4-8"
#: Minimum number of rounds for the project's page.
ROUNDS = 5
#: Prefixes of the names of samples of one size of fleet; the number of workers follows.
SITE, CONFIGURE = "site-", "configure-"
#: Load average above which the results are not usable.
BUSY = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or render, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--docs", action="store_true", help="measure nothing; rewrite the page from the samples")
    parser.add_argument("--part", choices=PARTS, action="append", help="measure this part only (default all)")
    parser.add_argument("--sizes", default="16,1024,10000", help="workers of the fleets of pods (default %(default)s)")
    parser.add_argument("--single", default="1024", help="workers of the fleets of single hosts (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default %(default)s")
    parser.add_argument("--workers", default="1,8,16", help="workers of the fleets for site.yml (default %(default)s)")
    parser.add_argument(
        "--one-fleet",
        action="store_true",
        help="for site.yml and configure, measure only runs that change nothing, on one fleet",
    )
    parser.add_argument(
        "--fleets", default="1,4,8,16,32", help="workers of the fleets for configure (default %(default)s)"
    )
    parser.add_argument("--pods", default="4,8,16,32", help="workers of the nodes for runs (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=measure.ROOT / "docs", help="the directory of the page (default docs)"
    )
    options = parser.parse_args(argv)
    # SIGTERM works like Ctrl-C: measurements remove their workers.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for part in [] if options.docs else options.part or PARTS:
            for name, series in PARTS[part](options):
                store(series, name, options.out)
        render(options.out)
    except OpsError as failure:
        say(f"error: {failure}")
        return int(failure.exit_code)
    except KeyboardInterrupt:
        say("interrupted: the samples of the unfinished measurement were not written")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def inventory_part(options: argparse.Namespace) -> Iterator[tuple[str, Series]]:
    """Measure the inventory; yield the name of its samples and the series."""
    fleets = [fleet(size, POD) for size in numbers(options.sizes, "--sizes")]
    fleets += [fleet(size, SINGLE) for size in numbers(options.single, "--single")]
    if options.rounds < 1 or not fleets:
        raise UsageError("there is nothing to measure", where="--rounds, --sizes", fix="name at least one")
    yield "inventory", take(sorted(fleets, key=lambda fleet: fleet.workers), options.rounds)


def site_part(options: argparse.Namespace) -> Iterator[tuple[str, SiteSeries]]:
    """Measure site.yml; yield name and series of each size of fleet once it has been measured.

    Raises:
        OpsError: There is nothing to measure, or a run failed.
    """
    sizes = numbers(options.workers, "--workers")
    if options.rounds < 1 or not sizes or min(sizes) < 1:
        raise UsageError(
            "there is nothing to measure", where="--rounds, --workers", fix="use at least one round and one worker"
        )
    commit, date, described = circumstances()
    with tempfile.TemporaryDirectory(prefix="tpu_ops-bench-") as directory:
        for workers, found in site.run(sorted(sizes), options.rounds, Path(directory), say, anew=not options.one_fleet):
            yield f"{SITE}{workers}", SiteSeries(commit, date, described, tuple(found))


def configure_part(options: argparse.Namespace) -> Iterator[tuple[str, ConfiguringSeries]]:
    """Measure site.yml by controller and workers; yield name and series of each size once it has been measured.

    Raises:
        OpsError: There is nothing to measure, or a run failed.
    """
    sizes = numbers(options.fleets, "--fleets")
    if options.rounds < 1 or not sizes or min(sizes) < 1:
        raise UsageError(
            "there is nothing to measure", where="--rounds, --fleets", fix="use at least one round and one worker"
        )
    commit, date, described = circumstances()
    with tempfile.TemporaryDirectory(prefix="tpu_ops-bench-") as directory:
        anew = not options.one_fleet
        for workers, found in configuring.run(sorted(sizes), options.rounds, Path(directory), say, anew=anew):
            yield f"{CONFIGURE}{workers}", ConfiguringSeries(commit, date, described, tuple(found))


def runs_part(options: argparse.Namespace) -> Iterator[tuple[str, RunSeries]]:
    """Measure runs; yield the name of their samples and the series."""
    sizes = numbers(options.pods, "--pods")
    if options.rounds < 1 or not sizes or min(sizes) < 1:
        raise UsageError(
            "there is nothing to measure", where="--rounds, --pods", fix="use at least one round and one worker"
        )
    commit, date, described = circumstances()
    with tempfile.TemporaryDirectory(prefix="tpu_ops-bench-") as directory:
        found = runs.run(sorted(sizes), options.rounds, Path(directory), say)
    yield "runs", RunSeries(commit, date, described, tuple(found))


def rounds_part(
    name: str, make: Callable[..., AnySeries], measured: Callable[..., Iterable[Any]]
) -> Callable[[argparse.Namespace], Iterator[tuple[str, AnySeries]]]:
    """Return the function of a part that depends on the number of rounds only; `name` is that of its samples."""

    def part(options: argparse.Namespace) -> Iterator[tuple[str, AnySeries]]:
        if options.rounds < 1:
            raise UsageError("there is nothing to measure", where="--rounds", fix="use at least one round")
        commit, date, described = circumstances()
        with tempfile.TemporaryDirectory(prefix="tpu_ops-bench-") as directory:
            found = tuple(measured(options.rounds, Path(directory), say))
        yield name, make(commit, date, described, found)

    return part


def faults_part(_: argparse.Namespace) -> Iterator[tuple[str, FaultSeries]]:
    """Repeat the tests that depend on a race; yield "faults" and one series with all rounds."""
    commit, date, described = circumstances()
    yield "faults", FaultSeries(commit, date, described, tuple(faults.run(measure.ROOT, say)))


def kills_part(_: argparse.Namespace) -> Iterator[tuple[str, KillSeries]]:
    """Kill commands at each of their requests; yield "kills" and one series with all of them."""
    commit, date, described = circumstances()
    yield "kills", KillSeries(commit, date, described, tuple(kills.run(measure.ROOT, say)))


#: The types of series that the parts of the measurement yield.
AnySeries = (
    Series
    | SiteSeries
    | ConfiguringSeries
    | RunSeries
    | FaultSeries
    | KillSeries
    | NodesSeries
    | SwarmSeries
    | WaySeries
)

#: Part -> the function that measures it.
PARTS: dict[str, Callable[[argparse.Namespace], Iterator[tuple[str, AnySeries]]]] = {
    "inventory": inventory_part,
    "site": site_part,
    "configure": configure_part,
    "rivals": rounds_part("rivals", ConfiguringSeries, rivals.run),
    "runs": runs_part,
    "faults": faults_part,
    "nodes": rounds_part("nodes", NodesSeries, nodes.run),
    "kills": kills_part,
    "swarm": rounds_part("swarm", SwarmSeries, swarm.run),
    "ways": rounds_part("ways", WaySeries, ways.run),
}


#: Samples in one file -> the type of one of them, and the function that makes their section; in the page's order.
SECTIONS: dict[str, tuple[Callable[..., Any], Callable[[Any], list[str]]]] = {
    "rivals": (ConfiguringSample, rivals.section),
    "runs": (RunSample, runs_report.section),
    "faults": (FaultSample, faults.section),
    "nodes": (NodesSample, nodes.section),
    "kills": (KillSample, kills.section),
    "swarm": (SwarmSample, swarm.section),
    "ways": (WaySample, ways.section),
}


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def numbers(text: str, option: str) -> list[int]:
    """Return the numbers of a comma-separated list.

    Raises:
        UsageError: The text is not a comma-separated list of numbers.
    """
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError as exc:
        raise UsageError(f"{text!r} is not a list of numbers", where=option, fix="as in 16,1024") from exc


def fleet(workers: int, kind: str) -> Fleet:
    """Return the fleet with this number of workers in nodes of a type.

    Raises:
        UsageError: The workers are not a whole number of nodes.
    """
    each = accelerator_type(kind).workers
    if workers < 1 or workers % each:
        raise UsageError(f"{workers} workers are not whole nodes of {kind}", fix=f"choose a multiple of {each}")
    return Fleet(workers // each, kind, workers)


def circumstances() -> tuple[str, str, dict[str, str]]:
    """Return commit, date and machine of a measurement that begins now; warn if its results are not usable."""
    commit, described = machine.commit(measure.ROOT), machine.describe()
    if commit.endswith("-dirty"):
        say("warning: files differ from the commit: these samples cannot be committed")
    if float(described["load before"]) > BUSY:
        say(f"warning: other processes are running (load {described['load before']})")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return commit, date, described


def take(fleets: Sequence[Fleet], rounds: int) -> Series:
    """Measure the inventory on these fleets, and return the series.

    Raises:
        OpsError: A measured command failed.
    """
    commit, date, described = circumstances()
    with tempfile.TemporaryDirectory(prefix="tpu_ops-bench-") as directory:
        found = measure.run(fleets, rounds, Path(directory), say)
    return Series(commit, date, described, tuple(fleets), tuple(found))


def store(series: AnySeries, name: str, out: Path) -> None:
    """Write a series of samples to the file with this name."""
    path = samples_file(out, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(series.text())
    say(f"wrote {path}")


def render(out: Path) -> None:
    """Write the page from the samples; only the samples of the inventory are required.

    Raises:
        UsageError: The samples of the inventory are missing, or some samples are invalid.
    """
    folder, page = out / "benchmarks", out / "benchmarks.md"
    try:
        text = document(out)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise UsageError(f"no samples: {exc}", where=str(folder), fix="make bench") from exc
    page.write_text(text)
    say(f"wrote {page}")


def document(out: Path) -> str:
    """Return the page made from the samples.

    Raises:
        OSError, ValueError, KeyError, TypeError: The samples of the inventory are missing, or some are invalid.
    """
    parts = []
    if sizes := [read_part(path, SiteSample) for path in (out / "benchmarks").glob(f"{SITE}*.json")]:
        parts.append(site_report.section(sorted(sizes, key=site.workers)))
    if found := [read_part(path, ConfiguringSample) for path in (out / "benchmarks").glob(f"{CONFIGURE}*.json")]:
        parts.append(configuring.section(sorted(found, key=lambda series: series.samples[0].workers)))
    for name, (sample, section) in SECTIONS.items():
        if (more := samples_file(out, name)).exists():
            parts.append(section(read_part(more, sample)))
    return report.document(samples.read(samples_file(out, "inventory")), *parts)


def samples_file(out: Path, name: str) -> Path:
    """Return the file of the samples with this name."""
    return out / "benchmarks" / f"{name}.json"


if __name__ == "__main__":
    sys.exit(main())
