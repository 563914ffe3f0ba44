"""Measure `tpu_ops apply` on a fleet that is as declared, and how long many nodes take that are created at once."""

from __future__ import annotations

import contextlib
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.bench.lab import Lab
from tools.bench.measure import BIN, ZONE, Command, Served, clock
from tools.bench.report import digits, origin, requests_text, spread
from tools.bench.samples import Fleet, PartSeries, Sample

KIND = "v4-8"
#: Nodes that are declared.
DECLARED = 50
#: Nodes that are created at once.
FEW, MANY = 2, 8
#: Targets: list calls for each project, seconds in all, and the time of many nodes as a multiple of that of few.
LISTS, SECONDS, RATIO = 2, 1.0, 1.5
#: Key of a measured command -> description, in the order of the page.
MEASURED = {
    "apply": f"`tpu_ops apply --yes`, {DECLARED} declared nodes, nothing to do",
    "few": f"`tpu_ops create 'few-[1-{FEW}]'`, workers are containers",
    "many": f"`tpu_ops create 'many-[1-{MANY}]'`, workers are containers",
    "few-api": f"`tpu_ops create 'few-[1-{FEW}]'`, without workers",
    "many-api": f"`tpu_ops create 'many-[1-{MANY}]'`, without workers",
}


@dataclass(frozen=True)
class NodesSample:
    """The measurement of one command in one round.

    Attributes:
        round: Number of the round, from 1.
        key: Key of the command in `MEASURED`.
        wall: Duration in seconds.
        busy: Seconds for which the machine's processors were busy, for any process; None if unknown.
        requests: Number of calls by API method.
    """

    round: int
    key: str
    wall: float
    busy: float | None
    requests: dict[str, int] = field(default_factory=dict)


#: All samples of one measurement.
NodesSeries = PartSeries[NodesSample]


def run(rounds: int, root: Path, say: Callable[[str], None]) -> list[NodesSample]:
    """Measure all commands.

    Args:
        rounds: Number of runs of each command.
        root: A directory for temporary files.
        say: Called with lines of progress.

    Raises:
        OpsError: A command failed.
    """
    found = []
    with _served(root / "apply", DECLARED) as served:
        names = ",".join(f"n{number:05}" for number in range(DECLARED))
        file = served.root / "known" / "fleet" / "nodes.yml"
        file.write_text(f"nodes:\n- {{name: '{names}', type: {KIND}, zones: [{ZONE}]}}\n")
        found += _rounds(rounds, [("apply", ("apply", "--yes"))], served, say)
    creations = [("few", _create("few", FEW)), ("many", _create("many", MANY))]
    with _served(root / "create", 1) as served:
        found += _rounds(rounds, [(f"{key}-api", argv) for key, argv in creations], served, say)
    return found + _on_containers(rounds, root, say, creations)


def _create(name: str, count: int) -> tuple[str, ...]:
    return ("create", f"{name}-[1-{count}]", "--type", KIND, "--zone", ZONE)


def _delete(argv: Sequence[str]) -> tuple[str, ...]:
    return ("delete", argv[1], "--yes")


@contextlib.contextmanager
def _served(root: Path, nodes: int) -> Iterator[Served]:
    """Serve nodes without workers, for one user."""
    served = Served(Fleet(nodes, KIND, nodes), root)
    with served.api():
        served.inventory_file("known")
        key = root / "known" / ".ssh" / "id_ed25519"
        key.parent.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        yield served


def _rounds(
    rounds: int, commands: Sequence[tuple[str, tuple[str, ...]]], served: Served, say: Callable[[str], None]
) -> list[NodesSample]:
    """Measure commands on a fleet without workers; nodes that they create are deleted in between."""
    found = []
    for number in range(1, rounds + 1):
        for key, argv in commands:
            served.lab("DELETE", "lab/requests")
            took = served.time(_command(argv, served.environ("known")))
            requests = served.lab("GET", "lab/requests")["methods"]
            found.append(NodesSample(number, key, round(took.wall, 3), took.busy, requests))
            say(f"round {number} of {rounds}, {key}: {took.wall:.2f} s")
            if argv[0] == "create":
                served.time(_command(_delete(argv), served.environ("known")))
    return found


def _on_containers(
    rounds: int, root: Path, say: Callable[[str], None], creations: Sequence[tuple[str, tuple[str, ...]]]
) -> list[NodesSample]:
    """Measure the creation of nodes whose workers are containers."""
    lab, found = Lab(root / "lab"), []
    lab.root.mkdir()
    with lab.up():
        # The first node may have to build the image of the workers.
        for argv in (_create("first", 1), _delete(_create("first", 1))):
            lab.do("tpu_ops", *argv)
        for number in range(1, rounds + 1):
            for key, argv in creations:
                took = clock(_command(argv, lab.environ), root / "stdout", root / "stderr", key)
                found.append(NodesSample(number, key, round(took.wall, 3), took.busy))
                say(f"round {number} of {rounds}, {key}: {took.wall:.2f} s")
                lab.do("tpu_ops", *_delete(argv))
    return found


def _command(argv: Sequence[str], environ: dict[str, str]) -> Command:
    return Command((str(BIN / "tpu_ops"), *argv), environ)


def section(series: NodesSeries) -> list[str]:
    """Return the lines of this section of the page."""
    method = (
        "`tpu_ops apply` finds a fleet that is as nodes.yml declares it. `tpu_ops create` makes nodes of one worker at "
        "once; it ends when they are READY and their host keys are known. Containers share the cores of this machine, "
        "which the workers of a cloud do not; therefore creation is also measured against the API without workers, "
        "where an operation takes one second. The time for which all processors were busy includes the containers' "
        "boots. Numbers are medians, with the smallest and largest in brackets; ratios are taken within a round."
    )
    lines = ["## Nodes", "", *origin(series.commit, series.date, series.machine), "", *textwrap.wrap(method, 118), ""]
    lines += ["| | rounds | wall, s | all processors busy, s | requests to the API |", "|---|---|---|---|---|"]
    for key, title in MEASURED.items():
        if taken := _of(series, key):
            walls = spread(one.wall for one in taken).text(digits)
            busy = [one.busy for one in taken if one.busy is not None]
            shown = spread(busy).text(digits) if busy else ""
            requests = requests_text(Sample(one.round, "", key, 0, 0, 0, one.requests) for one in taken)
            cells = (title, str(len(taken)), walls, shown, requests if taken[0].requests else "")
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", "### Targets of nodes", "", "The median decides.", "", *_targets(series)]


def _of(series: NodesSeries, key: str) -> list[NodesSample]:
    return [sample for sample in series.samples if sample.key == key]


def _targets(series: NodesSeries) -> list[str]:
    """Return the table of the targets."""
    lines = ["| target | measured | met |", "|---|---|---|"]
    applied = _of(series, "apply")
    lists = max(sum(count for name, count in one.requests.items() if name.startswith("List")) for one in applied)
    lines.append(_row(f"apply: at most {LISTS} list calls for the one project", str(lists), lists <= LISTS))
    wall = spread(one.wall for one in applied)
    lines.append(_row(f"apply: at most {SECONDS:g} s, with these calls", wall.text(digits), wall.median <= SECONDS))
    for end, title in (("", "workers are containers"), ("-api", "without workers")):
        few = {one.round: one.wall for one in _of(series, f"few{end}")}
        ratio = spread(one.wall / few[one.round] for one in _of(series, f"many{end}"))
        target = f"creating {MANY} nodes takes at most {RATIO} times as long as {FEW}: {title}"
        lines.append(_row(target, ratio.text(digits), ratio.median <= RATIO))
    return lines


def _row(target: str, measured: str, met: bool) -> str:
    return f"| {target} | {measured} | {'yes' if met else '**no**'} |"
