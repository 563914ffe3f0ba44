"""Run site.yml on fleets: from the controller, and by the workers themselves; and compare workers with it.

Bare workers are configured in both ways. Then runs that change nothing are measured in turn.
"""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import example
from tools.bench.measure import BIN, Command, clock
from tools.bench.report import Spread, digits, origin, spread
from tools.bench.samples import PartSeries
from tools.bench.site import LONGEST, Site
from tools.bench.traffic import Counter, read
from tools.bench.worked import worked
from tpu_ops import texts
from tpu_ops.ansible.playing import MANY
from tpu_ops.errors import OpsError

#: Kind of run -> its command.
KINDS = {
    "first-workers": ("tpu_ops", "configure", "--on-workers"),
    "first-controller": ("tpu_ops", "configure", "--no-on-workers"),
    "playbook": ("ansible-playbook", "site.yml"),
    "controller": ("tpu_ops", "configure", "--no-on-workers"),
    "workers": ("tpu_ops", "configure", "--on-workers"),
    "check": ("ansible-playbook", "--check", "site.yml"),
    "drift": ("tpu_ops", "drift", "--on-workers"),
}
#: Kinds of first runs, on bare workers. The other kinds change nothing.
FIRST = ("first-workers", "first-controller")
UNCHANGING = tuple(kind for kind in KINDS if kind not in FIRST)
#: Numbers of real workers for which the controller's time is derived.
DERIVED = (64, 512, 2048)
#: Number of workers for which the targets are meant.
WANTED = 32
#: Targets: seconds of the controller's processor time for each further worker, and of `drift` on the most workers.
CPU_LIMIT, DRIFT_LIMIT = 0.15, 3.0
#: Target: the controller's share of the wall time on the most workers may be this much of that on the fewest.
SHARE_LIMIT = 1.25


@dataclass(frozen=True)
class ConfiguringSample:
    """The measurement of one run of site.yml or of `drift`.

    Attributes:
        round: Number of the round, from 1.
        workers: Number of workers.
        kind: Key of `KINDS`.
        wall: Duration in seconds.
        cpu: Processor time on the controller, in seconds, without the ssh processes that keep connections open.
        busy: Seconds for which this machine's processors were busy, for any process; None if unknown.
        sent: Bytes from the controller to all workers together.
        received: Bytes from all workers together to the controller.
        worked: Processor time of all workers together, in seconds; None if it was not measured.
    """

    round: int
    workers: int
    kind: str
    wall: float
    cpu: float
    busy: float | None
    sent: int
    received: int
    worked: float | None = None


#: All samples of fleets of one size.
ConfiguringSeries = PartSeries[ConfiguringSample]


def run(
    sizes: Sequence[int], rounds: int, root: Path, say: Callable[[str], None], *, anew: bool = True
) -> Iterator[tuple[int, list[ConfiguringSample]]]:
    """Measure both ways on fleets of these sizes; yield each size with its samples once they are complete.

    Args:
        sizes: Numbers of workers, at least one each.
        rounds: Number of rounds of runs that change nothing.
        root: A directory for the lab's state.
        say: Called with lines of progress.
        anew: Whether the first run in each way is measured, on a new fleet. Otherwise, one fleet is configured,
            unmeasured.

    Raises:
        OpsError: A run failed, or changed something although it must not.
    """
    site = Site(root)

    def taken(number: int, workers: int, kind: str) -> ConfiguringSample:
        sample = _sample(site, number, workers, kind)
        where = f"{kind} on {texts.count(workers, 'worker')}, round {number}"
        say(f"{where}: {sample.wall:.1f} s, CPU {sample.cpu:.1f} s, {(sample.sent + sample.received) / 1e6:.2f} MB")
        return sample

    with site.up():
        if anew:
            say("configure: filling the workers' shared cache of packages, once, unmeasured")
            with _fleet(site, 2):
                site.do("ansible-playbook", "site.yml")
        for workers in sizes:
            samples = []
            if anew:
                with _fleet(site, workers):
                    samples.append(taken(1, workers, "first-workers"))
            with _fleet(site, workers):
                if anew:
                    samples.append(taken(1, workers, "first-controller"))
                else:
                    site.do("ansible-playbook", "site.yml")
                # The workers receive Ansible once.
                site.do("tpu_ops", "configure", "--on-workers")
                samples += [taken(number, workers, kind) for number in range(1, rounds + 1) for kind in UNCHANGING]
            yield workers, samples


@contextlib.contextmanager
def _fleet(site: Site, workers: int) -> Iterator[None]:
    """Keep nodes with bare workers whose configuration does not need the controller's files."""
    with site.fleet(workers):
        site.do("ansible-playbook", "tools/bench/resolve.yml")
        inventory = f"{site.environ['ANSIBLE_INVENTORY']},{site.root / 'keys' / 'resolved.yml'}"
        site.environ |= {"ANSIBLE_INVENTORY": inventory, "TPU_OPS_FLEET": str(example.FLEET)}
        yield


def _sample(site: Site, number: int, workers: int, kind: str) -> ConfiguringSample:
    program, *rest = KINDS[kind]
    rest += ["--json"] if program == "tpu_ops" else []
    result = site.root / "result"
    where = f"{program} {' '.join(rest)} on {workers}"
    addresses = [worker["external_ip"] for worker in json.loads(site.do("tpu_ops", "list", "--json"))]
    before = worked(site.environ["TPU_OPS_LAB"])
    with Counter(lambda: read(addresses)) as counter:
        took = clock(Command((str(BIN / program), *rest), site.environ), result, site.root / "errors", where, LONGEST)
    done = configured(KINDS[kind], result.read_text())
    if len(done) != workers or (kind in UNCHANGING and any(done.values())):
        raise OpsError("not every worker was configured without a change", where=where)
    seconds = (round(took.wall, 2), round(took.cpu, 2), took.busy and round(took.busy, 2))
    theirs = round(worked(site.environ["TPU_OPS_LAB"]) - before, 2)
    return ConfiguringSample(number, workers, kind, *seconds, *counter.total, theirs)


def configured(command: Sequence[str], output: str) -> dict[str, bool]:
    """Return worker -> whether something was changed, from the output of a command of `KINDS`, with `--json`."""
    if command[0] == "ansible-playbook":
        found = re.findall(r"^(\S+) +: ok=.*\bchanged=(\d+)", output, re.MULTILINE)
        return {host: changed != "0" for host, changed in found}
    said = json.loads(output)
    if command[1] == "drift":
        return dict.fromkeys(said["clean"], False)
    return {host: bool(counts["changed"]) for host, counts in said["hosts"].items()}


def sizes_of(measured: Sequence[ConfiguringSeries]) -> list[int]:
    """Return the numbers of workers, smallest first."""
    return sorted({sample.workers for series in measured for sample in series.samples})


def _of(measured: Sequence[ConfiguringSeries], workers: int) -> list[ConfiguringSample]:
    return [sample for series in measured for sample in series.samples if sample.workers == workers]


def numbers(measured: Sequence[ConfiguringSeries], workers: int, kind: str, number: Number) -> Spread | None:
    """Return the spread of a number of the samples of one kind and size; None if there are none."""
    found = [number(sample) for sample in _of(measured, workers) if sample.kind == kind]
    known = [one for one in found if one is not None]
    return spread(known) if known else None


def growth(measured: Sequence[ConfiguringSeries], kind: str) -> tuple[float, float] | None:
    """Return the controller's processor time without workers, and for each worker, in seconds.

    They are of the line through the medians of the smallest and the largest fleet with which workers run site.yml on
    themselves by default. None without two such fleets.
    """
    points = [
        (workers, found.median)
        for workers in sizes_of(measured)
        if workers >= MANY and (found := numbers(measured, workers, kind, lambda sample: sample.cpu))
    ]
    if len(points) < 2:
        return None
    (first, few), *_, (last, many) = points
    each = (many - few) / (last - first)
    return few - each * first, each


def title(kind: str) -> str:
    """Return the description of a kind of run."""
    return f"`{' '.join(KINDS[kind]).removeprefix('tpu_ops ')}`{', bare workers' if kind in FIRST else ''}"


#: Returns a number of a sample; None if it was not measured.
Number = Callable[[ConfiguringSample], float | None]
#: Column of the table -> what it is of a sample.
CELLS: tuple[tuple[str, Number], ...] = (
    ("wall, s", lambda sample: sample.wall),
    ("controller's CPU, s", lambda sample: sample.cpu),
    ("CPU per worker, s", lambda sample: sample.cpu / sample.workers),
    ("CPU, of the wall time", lambda sample: sample.cpu / sample.wall),
    ("a worker's own CPU, s", lambda sample: sample.worked and sample.worked / sample.workers),
    ("sent per worker, kB", lambda sample: sample.sent / sample.workers / 1000),
    ("received per worker, kB", lambda sample: sample.received / sample.workers / 1000),
)


def section(measured: Sequence[ConfiguringSeries]) -> list[str]:
    """Return the lines of this section of the page, from the series, smallest fleet first."""
    method = (
        "The nodes are those of site.yml above. Two fleets of each size are made with bare workers, and each is "
        "configured in one of the two ways. Where these rows are missing, one fleet is made, and configured without "
        "being measured. On the last fleet, runs follow that change nothing: in each round every kind runs once, over "
        "open connections, which compress. Workers are containers of this machine and share its cores: what "
        "workers do themselves would take no longer with more of them if they were machines. So the wall time says "
        "little here, and the processor time decides. The controller's leaves out the ssh processes that keep "
        "connections open. Bytes are those of the ssh connections between the controller and the workers, as the "
        "kernel counts them. Numbers are medians, with the smallest and largest in brackets. A load before of more "
        "than 1 means that other processes ran as well: they lengthen the wall times most."
    )
    lines = ["## site.yml by the workers themselves", "", *textwrap.wrap(method, 118), ""]
    most = sizes_of(measured)[-1]
    if most < WANTED:
        few = (
            f"{WANTED} workers were not measured, since all share the same cores: the runs with {most} took "
            f"{digits(sum(sample.wall for sample in _of(measured, most)) / 60)} minutes."
        )
        lines += [*textwrap.wrap(few, 118), ""]
    for series in measured:
        (workers,) = sizes_of([series])
        rounds = len({sample.round for sample in series.samples if sample.kind in UNCHANGING})
        lines += [f"### Configuring {texts.count(workers, 'worker')}", ""]
        lines += [*origin(series.commit, series.date, {**series.machine, "rounds": str(rounds)}), ""]
        lines += [f"| | {' | '.join(name for name, _ in CELLS)} |", f"|---|{'---|' * len(CELLS)}"]
        for kind in KINDS:
            found = [numbers([series], workers, kind, number) for _, number in CELLS]
            if cells := [one.text(digits) if one else "" for one in found] if any(found) else []:
                lines.append(f"| {title(kind)} | {' | '.join(cells)} |")
        lines.append("")
    return [*lines, *_derived(measured), *_targets(measured)]


def _derived(measured: Sequence[ConfiguringSeries]) -> list[str]:
    """Return the lines about numbers of workers that this machine cannot have; none without two sizes."""
    if not (line := growth(measured, "workers")):
        return []
    fewest, middle = sizes_of(measured)[0], DERIVED[1]
    alone = numbers(measured, fewest, "workers", lambda sample: sample.wall)
    text = (
        f"A line through the medians of the smallest fleet from {MANY} workers on and the largest one gives the "
        "controller's processor time for other numbers. On one core, that is also the shortest time in which it can "
        "be done. "
    )
    if alone:
        text += (
            "Workers that are machines work side by side. An estimate is the time of the smallest fleet and the "
            f"controller's time for each further worker: for {title('workers')}, {digits(alone.median)} s with "
            f"{texts.count(fewest, 'worker')} here, about "
            f"{digits(alone.median + line[1] * (middle - fewest))} s with {middle}."
        )
    lines = ["### Configuring hundreds of workers, derived", "", *textwrap.wrap(text.strip(), 118), ""]
    lines += [f"| | without workers, s | each worker, s | {' | '.join(f'{number} workers, s' for number in DERIVED)} |"]
    lines += [f"|---|---|---|{'---|' * len(DERIVED)}"]
    for kind in KINDS:
        if line := growth(measured, kind):
            base, each = line
            cells = " | ".join(digits(base + each * number) for number in DERIVED)
            lines.append(f"| {title(kind)} | {base:.2f} | {each:.3f} | {cells} |")
    return [*lines, ""]


def _targets(measured: Sequence[ConfiguringSeries]) -> list[str]:
    """Return the table of the targets; none without two sizes."""
    if not (line := growth(measured, "workers")):
        return []
    rows = [(f"{title('workers')}: under {CPU_LIMIT} s of the controller's CPU for each worker", line[1], CPU_LIMIT)]
    few, *_, many = [workers for workers in sizes_of(measured) if workers >= MANY]
    shares = [numbers(measured, workers, "workers", lambda one: one.cpu / one.wall) for workers in (few, many)]
    if shares[0] and shares[1]:
        what = f"{title('workers')}: the controller's CPU, of the wall time, with {many} workers of that with {few}"
        rows.append((f"{what}: at most {SHARE_LIMIT}", shares[1].median / shares[0].median, SHARE_LIMIT))
    if drift := numbers(measured, many, "drift", lambda one: one.wall):
        rows.append((f"{title('drift')} on {many} workers: under {DRIFT_LIMIT:.0f} s", drift.median, DRIFT_LIMIT))
    lines = [
        *("### Targets of configuring", "", "The median decides.", "", "| target | measured | met |", "|---|---|---|"),
        *(f"| {what} | {found:.3f} | {'yes' if found < limit else '**no**'} |" for what, found, limit in rows),
    ]
    share = (
        "The wall time grows with the number of containers as the controller's time does. With workers that are "
        "machines, only the controller's grows, and its share with it."
    )
    lines += ["", *textwrap.wrap(share, 118)]
    theirs = numbers(measured, many, "drift", lambda one: one.worked and one.worked / one.workers)
    if drift and theirs and drift.median >= DRIFT_LIMIT:
        why = (
            f"{title('drift')} is site.yml in check mode, all of its tasks. They take {digits(theirs.median)} s of "
            f"processor time on each of {many} workers, {digits(theirs.median * many)} s together, on cores that the "
            "containers share. Workers that are machines would need only their own part. Fewer or shorter tasks on a "
            "worker would shorten it; a faster controller would not."
        )
        lines += ["", *textwrap.wrap(why, 118)]
    return lines
