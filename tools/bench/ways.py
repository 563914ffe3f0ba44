"""Measure the ways of three people, command by command: a researcher with one VM, an administrator, a pod's user."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools.bench.lab import Lab
from tools.bench.measure import BIN, ROOT, ZONE, Command, clock
from tools.bench.report import digits, origin, spread
from tools.bench.samples import PartSeries

DIGITS = str(ROOT / "examples" / "digits")
#: Number of people that the administrator adds to the fleet.
PEOPLE = 6
_TRAIN = ("--sync", DIGITS, "--install", "--fetch", "checkpoints", "--", "python", "train.py", "--epochs", "5")
#: Person -> key of each step -> the command and its arguments, in their order. FLEET is the fleet's directory.
WAYS: dict[str, dict[str, tuple[str, ...]]] = {
    "A researcher with one VM": {
        "init": ("init", "FLEET", "--project", "lab", "--zone", ZONE, "--packages", "optax"),
        "create one": ("create", "one", "--type", "v4-8", "--zone", ZONE),
        "configure one": ("configure", "one"),
        "first training": ("train", "one", *_TRAIN),
        "second training": ("train", "one", *_TRAIN),
    },
    f"An administrator who adds {PEOPLE} people": {
        "users": ("configure", "--playbook", "users"),
        "invite": ("invite", "person1", "--no-configure"),
        "drift": ("drift",),
    },
    "A pod of four workers": {
        "create pod": ("create", "pod", "--type", "v4-32", "--zone", ZONE),
        "configure pod": ("configure", "pod"),
        "first training on the pod": ("train", "pod", *_TRAIN),
        "second training on the pod": ("train", "pod", *_TRAIN),
        "delete": ("delete", "pod,one", "--yes"),
    },
}


@dataclass(frozen=True)
class WaySample:
    """The measurement of one step in one round.

    Attributes:
        round: Number of the round, from 1.
        key: Key of the step in `WAYS`.
        wall: Duration in seconds.
        busy: Seconds for which the machine's processors were busy, for any process; None if unknown.
    """

    round: int
    key: str
    wall: float
    busy: float | None


#: All samples of one measurement.
WaySeries = PartSeries[WaySample]


def run(rounds: int, root: Path, say: Callable[[str], None]) -> Iterator[WaySample]:
    """Measure all steps, each round with a fleet of its own.

    Args:
        rounds: Number of rounds.
        root: A directory for temporary files.
        say: Called with lines of progress.

    Raises:
        OpsError: A command failed.
    """
    lab = Lab(root / "lab")
    lab.root.mkdir()
    with lab.up():
        for number in range(1, rounds + 1):
            fleet = root / f"fleet{number}"
            for key, argv in (step for steps in WAYS.values() for step in steps.items()):
                if key == "users":
                    _add_people(fleet)
                words = tuple(str(fleet) if word == "FLEET" else word for word in argv)
                command = Command((str(BIN / "tpu_ops"), *words), lab.environ, cwd=root)
                took = clock(command, root / "out", root / "err", key)
                if key == "init":
                    lab.environ["TPU_OPS_FLEET"] = str(fleet)
                    lab.environ |= json.loads(lab.do("tpu_ops", "lab", "env", "--json"))
                say(f"round {number} of {rounds}, {key}: {took.wall:.1f} s")
                yield WaySample(number, key, round(took.wall, 3), took.busy)


def _add_people(fleet: Path) -> None:
    """Add people with keys of their own to the fleet's variables."""
    path = fleet / "inventory/group_vars/all/main.yml"
    variables = yaml.safe_load(path.read_text())
    people = variables.setdefault("users_people", [])
    for number in range(1, PEOPLE + 1):
        key = fleet / f"key{number}"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        people.append({"name": f"person{number}", "keys": [key.with_suffix(".pub").read_text().strip()]})
    path.write_text(yaml.safe_dump(variables))


def section(series: WaySeries) -> list[str]:
    """Return the lines of this section of the page."""
    method = (
        "Commands that people type, one after the other, in a lab whose images and packages are cached. The lab's "
        "workers share the cores of this machine; a TPU VM boots for a minute or more and downloads its packages. "
        "Numbers are medians, with the smallest and largest in brackets."
    )
    lines = ["## Ways of people", "", *origin(series.commit, series.date, series.machine), ""]
    lines += [*textwrap.wrap(method, 118), "", "| who | step | rounds | wall, s | all processors busy, s |"]
    lines += ["|---|---|---|---|---|"]
    for person, steps in WAYS.items():
        sums: dict[int, float] = {}
        for key in steps:
            taken = [sample for sample in series.samples if sample.key == key]
            for sample in taken:
                sums[sample.round] = sums.get(sample.round, 0.0) + sample.wall
            busy = [sample.busy for sample in taken if sample.busy is not None]
            shown = spread(busy).text(digits) if busy else ""
            walls = spread(sample.wall for sample in taken).text(digits)
            lines.append(f"| {person} | {key} | {len(taken)} | {walls} | {shown} |")
        lines.append(f"| {person} | **all** | {len(sums)} | {spread(sums.values()).text(digits)} | |")
    return lines
