"""Run site.yml on workers of a separate lab: the first time, again without changes, and in check mode."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import example
from tools.bench.lab import CORES, Lab
from tools.bench.measure import BIN, ROOT, ZONE, Command, clock
from tools.bench.samples import PartSeries
from tpu_ops import texts
from tpu_ops.errors import OpsError

#: Kind of run -> its description, in the order of the runs.
KINDS = {
    "first": "first run, on bare workers",
    "second": "second run, without changes",
    "check": "`--check` after it",
}
#: Kinds of runs that change nothing.
UNCHANGING = ("second", "check")
#: Actions without a module on the worker: Ansible's own, and the check of the fleet's variables.
ON_CONTROLLER = frozenset(
    f"ansible.builtin.{name}"
    for name in (
        *("assert", "debug", "fail", "set_fact", "meta", "validate_argument_spec"),
        *("include_role", "import_role", "include_tasks", "import_tasks", "include_vars"),
    )
) | {"check_variables"}
#: Timeout of one run of site.yml, in seconds.
LONGEST = 3600.0


@dataclass(frozen=True)
class SiteSample:
    """One run of site.yml.

    Attributes:
        round: Number of the round, from 1.
        workers: Number of configured workers.
        kind: Key of `KINDS`.
        wall: Duration in seconds.
        cpu: Processor time on the controller, in seconds.
        peak: Largest resident size of one process on the controller, in bytes.
        modules: Number of modules executed on all workers together.
        tasks: Number of tasks that ran, including those without a module, on all workers together.
        skipped: Number of skipped tasks, on all workers together.
        changed: Number of changed tasks, on all workers together.
    """

    round: int
    workers: int
    kind: str
    wall: float
    cpu: float
    peak: int
    modules: int
    tasks: int
    skipped: int
    changed: int


#: All samples of fleets of one size.
SiteSeries = PartSeries[SiteSample]


def workers(series: SiteSeries) -> int:
    """Return the number of workers in the fleets of a series."""
    return series.samples[0].workers


def counts(tasks: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the numbers of a sample from the file of the callback tasks_file."""
    return {
        "modules": sum(row["ran"] for row in tasks if row["action"] not in ON_CONTROLLER),
        "tasks": sum(row["ran"] for row in tasks),
        "skipped": sum(row["skipped"] for row in tasks),
        "changed": sum(row["changed"] for row in tasks),
    }


def pods(workers: int) -> list[int]:
    """Return sizes of nodes for a number of workers, largest first: each node has a power of two of them."""
    return [1 << bit for bit in reversed(range(workers.bit_length())) if workers >> bit & 1]


class Site(Lab):
    """A lab for runs of site.yml."""

    @contextlib.contextmanager
    def fleet(self, workers: int) -> Iterator[None]:
        """Keep the nodes of examples/fleet, with bare workers, for the duration of the block.

        Args:
            workers: Number of workers, at least one: one node is `store`, with a data disk, the others are as large as
                possible.

        Raises:
            OpsError: The nodes cannot be created.
        """
        lab = dict(self.environ)
        keys = self.root / "keys"
        keys.mkdir(exist_ok=True)
        try:
            # The playbook that creates `store` does nothing without any worker. For a single worker, another one is
            # needed first.
            for size in pods(workers - 1) or [1]:
                self.do("tpu_ops", "create", f"pod{size}", "--type", f"v4-{size * CORES}", "--zone", ZONE)
            self.environ |= example.environment(lab, keys)
            self.do("ansible-playbook", example.PREPARE)
            if workers == 1:
                self.do("tpu_ops", "delete", "pod1", "--yes")
            yield
        finally:
            self.environ = lab
            for row in {row["node"] for row in json.loads(self.do("tpu_ops", "list", "--json"))}:
                self.do("tpu_ops", "delete", row, "--yes")

    def sample(self, number: int, workers: int, kind: str) -> SiteSample:
        """Run site.yml once on the workers of the lab; return the sample.

        Raises:
            OpsError: The run failed, or changed something although it must not.
        """
        tasks = self.root / "tasks.json"
        counting = {
            "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "tools" / "callback_plugins"),
            "ANSIBLE_CALLBACKS_ENABLED": "tasks_file",
            "TASKS_FILE": str(tasks),
        }
        argv = (str(BIN / "ansible-playbook"), "site.yml", *(["--check"] if kind == "check" else []))
        where = f"site.yml on {texts.count(workers, 'worker')}, {kind}"
        # Ansible prints its errors to standard output.
        output = self.root / "output"
        took = clock(Command(argv, self.environ | counting), output, output, where, LONGEST)
        found = counts(json.loads(tasks.read_text()))
        if kind != "first" and found["changed"]:
            raise OpsError(f"{found['changed']} tasks changed something again", where=where)
        return SiteSample(number, workers, kind, round(took.wall, 2), round(took.cpu, 2), took.peak, **found)


def run(
    sizes: Sequence[int], rounds: int, root: Path, say: Callable[[str], None], *, anew: bool = True
) -> Iterator[tuple[int, list[SiteSample]]]:
    """Measure site.yml on fleets of these sizes; yield each size with its samples once they are complete.

    Args:
        sizes: Numbers of workers, at least one each.
        rounds: Number of runs for each fleet.
        root: A directory for the lab's state.
        say: Called with lines of progress.
        anew: Whether each round has its own new fleet. Otherwise, one fleet is configured once, and all rounds are
            runs that change nothing.

    Raises:
        OpsError: A run failed.
    """
    site = Site(root)

    def taken(number: int, workers: int, kinds: Iterable[str]) -> list[SiteSample]:
        samples = [site.sample(number, workers, kind) for kind in kinds]
        walls = ", ".join(f"{sample.kind} {sample.wall:.1f}" for sample in samples)
        say(f"site.yml on {texts.count(workers, 'worker')}, round {number} of {rounds}, s: {walls}")
        return samples

    with site.up():
        if anew:
            say("site.yml: filling the workers' shared cache of packages, once, unmeasured")
            with site.fleet(2):
                site.sample(0, 2, "first")
        for workers in sizes:
            samples = []
            with contextlib.ExitStack() as kept:
                if not anew:
                    kept.enter_context(site.fleet(workers))
                    first = site.sample(0, workers, "first").wall
                    say(f"site.yml on {texts.count(workers, 'worker')}: configured in {first:.1f} s, not counted")
                for number in range(1, rounds + 1):
                    with site.fleet(workers) if anew else contextlib.nullcontext():
                        samples += taken(number, workers, KINDS if anew else UNCHANGING)
            yield workers, samples
