"""Ten operations that change nothing, on all workers of a node in a separate lab: tpu_ops beside other tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools.bench.configuring import CELLS, ConfiguringSample, ConfiguringSeries, configured
from tools.bench.lab import CORES, Lab
from tools.bench.measure import BIN, ZONE, Command, Took, clock, rotated
from tools.bench.report import digits, origin, spread
from tools.bench.traffic import Counter, read
from tools.bench.worked import worked
from tpu_ops.errors import OpsError

NODE, WORKERS = "pod", 8
#: Directory of the ten operations: site.yml for Ansible and tpu_ops, deploy.py for pyinfra, and the pinned packages of
#: tools that are not in requirements.lock.
TEN = Path(__file__).with_name("ten")
#: Number of hosts at once: Ansible's default, and that of all other measurements.
FEW, MANY = 5, 64
#: Number of operations in deploy.py. The tenth of site.yml only reads, which is no operation for pyinfra.
OPERATIONS = 9


def pinned(package: str) -> str:
    """Return package and version, as in mitogen 0.3.1, from the file of pinned packages of that name."""
    (version,) = re.findall(rf"^{package}==(\S+)$", (TEN / f"{package}.txt").read_text(), re.MULTILINE)
    return f"{package} {version}"


#: Kind of run -> its description, in the order of the page.
KINDS = {
    "workers": "tpu_ops, by the workers themselves",
    "controller": "tpu_ops, from the controller",
    "few": f"`ansible-playbook`, {FEW} forks, pipelining off",
    "few-pipelining": f"`ansible-playbook`, {FEW} forks, pipelining on",
    "many": f"`ansible-playbook`, {MANY} forks, pipelining off",
    "many-pipelining": f"`ansible-playbook`, {MANY} forks, pipelining on",
    "mitogen": f"`ansible-playbook`, {MANY} forks, strategy mitogen_linear of {pinned('mitogen')}",
    "pyinfra": f"`pyinfra --parallel {MANY}`, {pinned('pyinfra')}",
}
#: The kind whose time the others are compared with.
OWN = "workers"


class Rivals(Lab):
    """A lab with one node, and the other tools in their own virtual environments."""

    def install(self, package: str) -> Path:
        """Make a virtual environment with the pinned packages of a file; return its directory.

        Raises:
            OpsError: The packages could not be installed.
        """
        place = self.root / package
        environ = {"PIP_CERT": os.environ["SSL_CERT_FILE"]} if "SSL_CERT_FILE" in os.environ else {}
        for argv in (
            (sys.executable, "-m", "venv", str(place)),
            (str(place / "bin" / "pip"), "install", "-q", "--no-deps", "-r", str(TEN / f"{package}.txt")),
        ):
            done = subprocess.run(argv, env=os.environ | environ, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OpsError(f"{package} could not be installed\n{done.stderr[-1000:]}", fix="check the network")
        return place

    def commands(self) -> dict[str, Command]:
        """Return the measured commands. Call this once, after the node was made.

        All but pyinfra, which has its own, use the same connections. Ansible gets the names of the hosts instead of an
        inventory.
        """
        config = self.do("tpu_ops", "ssh-config").strip()
        workers = json.loads(self.do("tpu_ops", "list", "--json"))
        hosts = ",".join(worker["host"] for worker in workers)
        site = (
            str(BIN / "ansible-playbook"),
            "-i",
            f"{hosts},",
            f"--ssh-common-args=-F {config}",
            str(TEN / "site.yml"),
        )
        play = (str(BIN / "python"), str(TEN / "play.py"))
        (strategies,) = self.install("mitogen").glob("lib/python*/site-packages/ansible_mitogen/plugins/strategy")
        pyinfra, inventory = self.install("pyinfra") / "bin" / "pyinfra", self.root / "inventory.py"
        inventory.write_text(self._inventory(workers))

        def ansible(forks: int, *, pipelining: bool, **more: str) -> Command:
            variables = {
                "ANSIBLE_INVENTORY_ENABLED": "host_list",
                "ANSIBLE_FORKS": str(forks),
                "ANSIBLE_PIPELINING": str(pipelining),
                "ANSIBLE_SSH_PIPELINING": str(pipelining),
            }
            return Command(site, self.environ | variables | more)

        mitogen = {"ANSIBLE_STRATEGY": "mitogen_linear", "ANSIBLE_STRATEGY_PLUGINS": str(strategies)}
        python = (str(pyinfra), "--yes", "--sudo", "--parallel", str(MANY), "--chdir", str(TEN), str(inventory))
        return {
            "workers": Command((*play, "workers"), self.environ),
            "controller": Command((*play, "controller"), self.environ),
            "few": ansible(FEW, pipelining=False),
            "few-pipelining": ansible(FEW, pipelining=True),
            "many": ansible(MANY, pipelining=False),
            "many-pipelining": ansible(MANY, pipelining=True),
            "mitogen": ansible(MANY, pipelining=True, **mitogen),
            "pyinfra": Command((*python, str(TEN / "deploy.py")), self.environ),
        }

    def _inventory(self, workers: Sequence[Mapping[str, str]]) -> str:
        """Return pyinfra's inventory: addresses, user and key. It learns the host keys at its first connection."""
        hosts = [(worker["host"], {"ssh_hostname": worker["external_ip"]}) for worker in workers]
        shared = {
            "ssh_user": self.environ["TPU_OPS_USER"],
            "ssh_key": self.environ["TPU_OPS_PRIVATE_KEY"],
            "ssh_known_hosts_file": str(self.root / "known_hosts"),
            "ssh_allow_agent": False,
            "ssh_look_for_keys": False,
        }
        return f"workers = ({hosts!r}, {shared!r})\n"


def unchanged(kind: str, output: str, workers: int) -> bool:
    """Return whether a command changed nothing on any of its workers, from its output."""
    if kind == "pyinfra":
        total = str(workers * OPERATIONS)
        return re.search(rf"Grand total +{total} +- +- +{total}\b", output) is not None
    found = configured(("tpu_ops", "play") if kind in ("workers", "controller") else ("ansible-playbook",), output)
    return len(found) == workers and not any(found.values())


def run(rounds: int, root: Path, say: Callable[[str], None]) -> list[ConfiguringSample]:
    """Run every command once, unmeasured, which makes the ten things so; then measure runs that change nothing.

    Args:
        rounds: Number of rounds.
        root: A directory for the lab's state and the virtual environments.
        say: Called with lines of progress.

    Raises:
        OpsError: A run failed, or changed something.
    """
    lab, samples = Rivals(root), []
    output, errors = root / "output", root / "errors"
    with lab.up():
        lab.do("tpu_ops", "create", NODE, "--type", f"v4-{WORKERS * CORES}", "--zone", ZONE)
        addresses = [worker["external_ip"] for worker in json.loads(lab.do("tpu_ops", "list", "--json"))]
        commands = lab.commands()

        def took(kind: str) -> Took:
            return clock(commands[kind], output, errors, f"{kind} on {WORKERS} workers")

        for kind in commands:
            say(f"rivals: {kind}, {took(kind).wall:.2f} s, not counted")
        for number in range(1, rounds + 1):
            for kind in rotated(list(commands), number):
                before = worked(lab.environ["TPU_OPS_LAB"])
                with Counter(lambda: read(addresses)) as counter:
                    found = took(kind)
                # pyinfra prints everything to standard error.
                said = (errors if kind == "pyinfra" else output).read_text()
                if not unchanged(kind, said, WORKERS):
                    raise OpsError(f"{kind} changed something, or left workers out", where=f"round {number}")
                theirs = round(worked(lab.environ["TPU_OPS_LAB"]) - before, 2)
                busy = None if found.busy is None else round(found.busy, 2)
                seconds = (round(found.wall, 3), round(found.cpu, 3), busy)
                samples.append(ConfiguringSample(number, WORKERS, kind, *seconds, *counter.total, theirs))
                say(f"rivals, round {number} of {rounds}, {kind}: {found.wall:.2f} s")
        lab.do("tpu_ops", "delete", NODE, "--yes")
    return samples


def of(series: ConfiguringSeries, kind: str) -> dict[int, ConfiguringSample]:
    """Return the samples of a kind by round."""
    return {sample.round: sample for sample in series.samples if sample.kind == kind}


def ratios(series: ConfiguringSeries, kind: str, number: Callable[[ConfiguringSample], float]) -> list[float]:
    """Return the ratios of a number of a kind to that of tpu_ops by the workers, one for each round."""
    own = of(series, OWN)
    return [number(sample) / number(own[which]) for which, sample in of(series, kind).items() if which in own]


def section(series: ConfiguringSeries) -> list[str]:
    """Return the lines of this section of the page."""
    rounds = len({sample.round for sample in series.samples})
    method = (
        "A package that is there, a file from a template, a directory, a group, a user, a line in a file, a copied "
        "file, a service that is enabled and runs, a symbolic link, and a command that only reads "
        "([tools/bench/ten](../tools/bench/ten)), after an unmeasured run by each tool. "
        f"{WORKERS} containers of this machine are the workers, and share its cores. In each round everything runs "
        f"once, in an order that rotates; there are {rounds} rounds. Numbers are medians, with the smallest and "
        "largest in brackets; ratios are taken within a round. All use the same key exchange. All but pyinfra, which "
        "opens its own each time, use the same open connections. Ansible is that of tpu_ops, "
        "with the settings of its ansible.cfg except for forks and pipelining, and is given the names of the hosts; "
        "tpu_ops asks the API for them each time. Its own commands let workers run only its own playbooks, so that "
        "`play.py` there calls the function that they call. The CPU is the controller's, without the ssh processes "
        "that keep connections open. Machines would work side by side: each would need its own CPU time, and the "
        "controller's. A load before of more than 1 means that other processes ran as well: they "
        "lengthen the wall times most."
    )
    names = [name for name, _ in CELLS]
    head = [names[0], "wall, of the first row's", names[1], "CPU, of the first row's", *names[2:]]
    lines = ["## Ten operations with other tools", "", *origin(series.commit, series.date, series.machine), ""]
    lines += [*textwrap.wrap(method, 118), "", f"| | {' | '.join(head)} |", f"|---|{'---|' * len(head)}"]
    for kind, title in KINDS.items():
        if taken := of(series, kind).values():
            found = [[number(sample) or 0.0 for sample in taken] for _, number in CELLS]
            cells = [spread(each).text(digits) for each in found]
            cells.insert(1, spread(ratios(series, kind, lambda sample: sample.wall)).text(digits))
            cells.insert(3, spread(ratios(series, kind, lambda sample: sample.cpu)).text(digits))
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines
