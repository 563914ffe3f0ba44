"""Measures the inventory beside its rivals and writes docs/benchmarks.md.

    python -m tools.bench           measure, write the samples and the page
    python -m tools.bench --docs    write the page anew from the samples

Exit codes: those of tpu_ops.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.bench import machine, measure, report, samples
from tools.bench.samples import Fleet, Series
from tpu_ops.cloud.accelerators import accelerator_type
from tpu_ops.errors import OpsError, UsageError

POD, SINGLE = "v4-128", "v4-8"
#: Fewer rounds than these make no page of the project.
ROUNDS = 5
#: Processes that run besides, from which on the figures are not worth keeping.
BUSY = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or render, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--docs", action="store_true", help="measure nothing, write the page anew from the samples")
    parser.add_argument("--sizes", default="16,1024,10000", help="workers of the fleets of pods (default %(default)s)")
    parser.add_argument("--single", default="1024", help="workers of the fleets of single hosts (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default %(default)s")
    parser.add_argument("--out", type=Path, default=measure.ROOT / "docs", help="where the page goes (default docs)")
    options = parser.parse_args(argv)
    try:
        if not options.docs:
            fleets = [fleet(size, POD) for size in numbers(options.sizes, "--sizes")]
            fleets += [fleet(size, SINGLE) for size in numbers(options.single, "--single")]
            if options.rounds < 1 or not fleets:
                raise UsageError("nothing is to be measured", where="--rounds, --sizes", fix="name one at least")
            series = take(sorted(fleets, key=lambda fleet: fleet.workers), options.rounds)
            store(series, options.out)
        render(options.out)
    except OpsError as failure:
        say(f"error: {failure}")
        return int(failure.exit_code)
    except KeyboardInterrupt:
        say("interrupted, nothing was written")
        return 130
    return 0


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def numbers(text: str, option: str) -> list[int]:
    """Return the numbers of a comma-separated list.

    Raises:
        UsageError: They are none.
    """
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError as exc:
        raise UsageError(f"{text!r} is no list of numbers", where=option, fix="as in 16,1024") from exc


def fleet(workers: int, kind: str) -> Fleet:
    """Return the fleet of so many workers in nodes of a type.

    Raises:
        UsageError: They make no whole number of nodes.
    """
    each = accelerator_type(kind).workers
    if workers < 1 or workers % each:
        raise UsageError(f"{workers} workers are no whole nodes of {kind}", fix=f"choose a multiple of {each}")
    return Fleet(workers // each, kind, workers)


def take(fleets: Sequence[Fleet], rounds: int) -> Series:
    """Measure, and return the series.

    Raises:
        OpsError: Something that is measured failed.
    """
    commit, described = machine.commit(measure.ROOT), machine.describe()
    if commit.endswith("-dirty"):
        say("warning: files differ from the commit: these samples cannot be committed")
    if float(described["load before"]) > BUSY:
        say(f"warning: other processes are running (load {described['load before']})")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    with tempfile.TemporaryDirectory(prefix="tpu_ops-bench-") as directory:
        found = measure.run(fleets, rounds, Path(directory), say)
    return Series(commit, date, described, tuple(fleets), tuple(found))


def store(series: Series, out: Path) -> None:
    """Write the samples."""
    path = samples_file(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(series.text())
    say(f"wrote {path}")


def render(out: Path) -> None:
    """Write the page from the samples.

    Raises:
        UsageError: There are none.
    """
    path, page = samples_file(out), out / "benchmarks.md"
    try:
        series = samples.read(path)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise UsageError(f"no samples: {exc}", where=str(path), fix="make bench") from exc
    page.write_text(report.document(series))
    say(f"wrote {page}")


def samples_file(out: Path) -> Path:
    """Return the file of the samples that belong to a page."""
    return out / "benchmarks" / "inventory.json"


if __name__ == "__main__":
    sys.exit(main())
