"""Measure inventories: serve fleets from the lab's API, and run each measured command once per round."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench.samples import MEASURED, Fleet, Sample
from tpu_ops.errors import OpsError
from tpu_ops.lab.api.fleet_file import write_fleet
from tpu_ops.lab.backend import Networks, NoWorkers
from tpu_ops.lab.instance import PROJECT

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv" / "bin"
STOPWATCH = Path(__file__).with_name("stopwatch.py")
ZONE = "us-central2-b"
#: Timeout of a measured command, in seconds.
LONGEST = 600.0


@dataclass(frozen=True)
class Command:
    """A measured command on one fleet.

    Attributes:
        argv: The command.
        environ: Its environment.
        before: Called before each run.
        cwd: The directory in which it runs.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    before: Callable[[], None] = lambda: None
    cwd: Path = ROOT


class Took(NamedTuple):
    """The measured resources of a command.

    Attributes:
        wall: Duration in seconds.
        cpu: Seconds of processor time, user and system, of the command and its children.
        peak: Largest resident size of the command or one of its children, in bytes.
        began: When it started, in seconds since 1970.
        busy: Seconds for which this machine's processors were busy during the command, for any process; None if
            unknown.
    """

    wall: float
    cpu: float
    peak: int
    began: float
    busy: float | None


def clock(command: Command, stdout: Path, stderr: Path, where: str, limit: float = LONGEST) -> Took:
    """Run a command and return the measured resources.

    Args:
        command: The command; its `before` is called first.
        stdout: The file for its output.
        stderr: The file for its errors.
        where: The place that an error names.
        limit: Timeout in seconds.

    Raises:
        OpsError: The command failed.
    """
    command.before()
    stopwatch = (sys.executable, "-I", "-S", str(STOPWATCH), str(stdout), str(stderr), *command.argv)
    with subprocess.Popen(
        stopwatch, env=command.environ, cwd=command.cwd, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            answer, _ = process.communicate(timeout=limit)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    wall, user, system, peak, code, began, busy = map(float, answer.split())
    if code:
        said = stderr.read_text(errors="replace").splitlines()
        # Ansible's last lines count the tasks; the lines of failed tasks come long before them.
        last = "\n".join([*(line[:500] for line in said[:-5] if line.startswith("fatal: "))][-3:] + said[-5:])
        raise OpsError(f"{Path(command.argv[0]).name} ended with {code:.0f}\n{last}", where=where)
    return Took(wall, user + system, int(peak) * 1024, began, None if math.isnan(busy) else busy)


class Served:
    """A fleet that the lab's API serves, with home directories for the users of the measured commands.

    Args:
        fleet: The fleet.
        root: The directory of the home directories.
        networks: The networks of the workers' addresses.
    """

    def __init__(self, fleet: Fleet, root: Path, networks: Networks = NoWorkers.networks) -> None:
        self.fleet = fleet
        self.networks = networks
        self.root = root
        self.rest = self.grpc = ""

    @contextlib.contextmanager
    def api(self) -> Iterator[None]:
        """Serve the fleet for the duration of the block.

        Raises:
            OpsError: The API does not start.
        """
        prefix = f"projects/{PROJECT}/locations/{ZONE}/nodes"
        body = {"acceleratorType": self.fleet.accelerator_type}
        nodes = {f"{prefix}/n{number:05}": body for number in range(self.fleet.nodes)}
        write_fleet(self.root / "state.json", nodes, self.networks)
        argv = (str(BIN / "tpu_ops"), "lab", "api", "--state", str(self.root / "state.json"))
        with subprocess.Popen(argv, env=self.environ("api"), stdout=subprocess.PIPE, text=True) as process:
            try:
                line = process.stdout.readline() if process.stdout else ""
                if not line:
                    raise OpsError(f"the lab's API ended with {process.wait()}", where=self.fleet.name)
                where = json.loads(line)
                self.grpc, self.rest = where["grpc"], where["rest"]
                yield
            finally:
                process.terminate()

    def environ(self, person: str) -> dict[str, str]:
        """Return the environment of a user's shell, without variables of the current shell."""
        return {
            "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": str(self.root / person),
            "TPU_OPS_STATE": str(self.root / person / "state"),
            "TPU_OPS_FLEET": str(self.root / person / "fleet"),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "GOOGLE_APPLICATION_CREDENTIALS": str(self.root / "void.json"),
        }

    def inventory_file(self, person: str, *options: str) -> Path:
        """Write a user's fleet file and return its path."""
        path = self.root / person / "fleet" / "inventory" / "tpu_vm.yml"
        path.parent.mkdir(parents=True)
        usual = ("plugin: tpu_vm", f"projects: [{PROJECT}]", f"endpoint: {self.grpc}", "user: ada")
        path.write_text("\n".join([*usual, *options]) + "\n")
        return path

    def commands(self) -> dict[str, Command]:
        """Prepare the fleet, run the commands that are needed before, and return the measured commands by key.

        Raises:
            OpsError: A command failed, or does not list the fleet.
        """
        tpu_ops, inventory = str(BIN / "tpu_ops"), str(BIN / "ansible-inventory")
        new = self.inventory_file("new")
        known = self.inventory_file("known")
        cache = (
            "cache: true",
            "cache_plugin: jsonfile",
            f"cache_connection: {self.root / 'cache'}",
            "cache_timeout: 0",
        )
        cached = self.inventory_file("cached", *cache)
        listing, script = self.root / "listing.json", self.root / "floor.sh"
        script.write_text(f"#!/bin/sh\nexec cat {listing}\n")
        script.chmod(0o755)
        found = {
            "floor": Command(
                (inventory, "-i", str(script), "--list"),
                self.environ("floor") | {"ANSIBLE_INVENTORY_ENABLED": "script"},
            ),
            "first": Command(
                (inventory, "-i", str(new), "--list"),
                self.environ("new"),
                lambda: shutil.rmtree(self.root / "new" / "state", ignore_errors=True),
            ),
            "again": Command((inventory, "-i", str(known), "--list"), self.environ("known")),
            "cached": Command((inventory, "-i", str(cached), "--list"), self.environ("cached")),
            "list": Command((tpu_ops, "list"), self.environ("known")),
            "refresh": Command((tpu_ops, "refresh"), self.environ("known")),
            "help": Command((tpu_ops, "--help"), self.environ("known")),
        }
        self.time(found["cached"], listing)
        hosts = len(json.loads(listing.read_text())["_meta"]["hostvars"])
        if hosts != self.fleet.workers:
            raise OpsError(f"{hosts} hosts were listed instead of {self.fleet.workers}", where=self.fleet.name)
        self.time(found["refresh"])
        return found

    def check_floor(self, commands: Mapping[str, Command]) -> None:
        """Check that the floor (a script that prints a file) prints the same inventory as the plugin.

        Raises:
            OpsError: The outputs differ, or a command failed.
        """
        texts = []
        # The floor's file is the plugin's output for `cached`; the output for `again` has another known_hosts.
        for key in ("cached", "floor"):
            output = self.root / f"{key}.json"
            self.time(commands[key], output)
            texts.append(json.loads(output.read_text()))
        if texts[0] != texts[1]:
            raise OpsError("the floor's inventory differs from the plugin's", where=self.fleet.name)

    def time(self, command: Command, stdout: Path = Path(os.devnull)) -> Took:
        """Run a command and return the measured resources.

        Raises:
            OpsError: The command failed.
        """
        return clock(command, stdout, self.root / "stderr", self.fleet.name)

    def sample(self, number: int, key: str, command: Command) -> Sample:
        """Run a measured command once; return the measured resources and the API requests.

        Raises:
            OpsError: The command failed.
        """
        self.lab("DELETE", "lab/requests")
        took = self.time(command)
        requests = self.lab("GET", "lab/requests")["methods"]
        return Sample(number, self.fleet.name, key, round(took.wall, 3), round(took.cpu, 3), took.peak, requests)

    def lab(self, method: str, path: str) -> Any:
        """Return the API's answer to one of the lab's own requests."""
        request = urllib.request.Request(f"{self.rest}/{path}", method=method)  # noqa: S310 - http on loopback
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - likewise
            return json.load(answer)


def measured_on(fleet: Fleet, *, smallest: bool) -> list[str]:
    """Return the keys of the commands to measure on a fleet.

    `help` does not depend on the fleet. Fleets of single hosts differ from pods only in requests per node.
    """
    if fleet.nodes > 1 and fleet.nodes == fleet.workers:
        return ["floor", "first", "again"]
    return [key for key in MEASURED if smallest or key != "help"]


def rotated(keys: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: it begins with the key that was second in the previous round."""
    first = number % len(keys)
    return [*keys[first:], *keys[:first]]


def run(fleets: Sequence[Fleet], rounds: int, root: Path, say: Callable[[str], None]) -> list[Sample]:
    """Measure all commands on all fleets.

    Args:
        fleets: The fleets, smallest first.
        rounds: Number of runs of each command.
        root: A directory for temporary files.
        say: Called with lines of progress.

    Raises:
        OpsError: A command failed, or gave a wrong result.
    """
    samples: list[Sample] = []
    with contextlib.ExitStack() as stack:
        ready = []
        for index, fleet in enumerate(fleets):
            served = Served(fleet, root / str(index))
            stack.enter_context(served.api())
            say(f"{fleet.name}: making ready")
            commands = served.commands()
            if index == 0:
                # Check only the floor of the smallest fleet: reading a large inventory twice takes half a minute.
                served.check_floor(commands)
            ready.append((served, {key: commands[key] for key in measured_on(fleet, smallest=index == 0)}))
        for number in range(1, rounds + 1):
            for served, commands in ready:
                order = rotated(list(commands), number)
                taken = [served.sample(number, key, commands[key]) for key in order]
                samples += taken
                walls = ", ".join(f"{sample.rival} {sample.wall:.2f}" for sample in taken)
                say(f"round {number} of {rounds}, {served.fleet.name}, s: {walls}")
    return samples
