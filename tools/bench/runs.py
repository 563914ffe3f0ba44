"""Run commands on all workers of a node in a separate lab: tpu_ops beside other tools for many hosts."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.bench.lab import CORES, Lab
from tools.bench.measure import ZONE, Command, Took, clock, rotated
from tools.bench.samples import PartSeries
from tpu_ops.errors import OpsError

NODE = "pod"
#: Grace of `stop`, in seconds.
GRACE = 2
#: Number of bytes that each rank prints before the benchmark measures `logs` and `fetch`.
LOG = 8 * 2**20

#: Measured command -> its description, in the order of the page.
KINDS = {
    "floor": "the floor: `ssh HOST true` over the same connections, by `xargs -P`",
    "run": "`tpu_ops run -- true`",
    "clush": "`clush true`",
    "ansible": "`ansible -m raw -a true`",
    "gcloud": "`gcloud compute tpus tpu-vm ssh --worker=all --command=true`",
    "top": "`tpu_ops top --once`",
    "start": "`tpu_ops train --detach`, until the last rank executes the command",
    "stacks": "`tpu_ops stacks`, a Python program on each rank",
    "stop": f"`tpu_ops stop --grace {GRACE}`, the command ignores SIGTERM",
    "doctor": "`tpu_ops doctor`",
    "logs": "`tpu_ops logs`, one rank's lines",
    "fetch": "`tpu_ops logs --fetch`, all ranks' logs as files",
    "python": "`python -c pass`",
    "help": "`tpu_ops --help`",
}
#: A Python program that ends only by SIGKILL.
_STUBBORN = ("python3", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)")
_LINE = "step 1000 of 90000, loss 0.1234, learning rate 0.0003, 0.25 s, 512 examples"


@dataclass(frozen=True)
class RunSample:
    """One run of one command.

    Attributes:
        round: Number of the round, from 1, in which each command ran once.
        workers: Number of workers of the node.
        kind: Key of `KINDS`.
        wall: Duration in seconds; for `start` until the last rank's command was executed.
        cpu: Processor time on the controller, in seconds.
        peak: Largest resident size of one process on the controller, in bytes.
        size: Bytes of logs that were received.
        busy: Seconds for which the machine's processors, shared with the workers, were busy during the command, in
            total; None if unknown.
    """

    round: int
    workers: int
    kind: str
    wall: float
    cpu: float
    peak: int
    size: int = 0
    busy: float | None = None


#: All samples of one measurement.
RunSeries = PartSeries[RunSample]


def last_start(rows: Sequence[dict[str, str]]) -> float:
    """Return when the last rank began, from the output of `tpu_ops run --json -- cat` for a run's records.

    Raises:
        OpsError: A rank did not begin.
    """
    began = {}
    for row in rows:
        try:
            began[row["host"]] = float(json.loads(row["stdout"])["began"])
        except (KeyError, TypeError, ValueError) as exc:
            raise OpsError(f"the record has no start: {row['stdout'] or row['stderr']}", where=row["host"]) from exc
    return max(began.values())


class Pod(Lab):
    """A lab with one node whose workers have the launcher.

    Attributes:
        workers: Number of workers of the current node.
    """

    workers = 0

    @contextlib.contextmanager
    def node(self, workers: int) -> Iterator[None]:
        """Keep a node with this number of workers for the duration of the block.

        Raises:
            OpsError: The node cannot be created.
        """
        self.do("tpu_ops", "create", NODE, "--type", f"v4-{workers * CORES}", "--zone", ZONE)
        self.do("ansible-playbook", "tools/bench/launcher.yml")
        self.workers = workers
        # A MiB a second: the launcher drops output that the disk of a busy machine does not store in time.
        parts = " ".join(map(str, range(LOG // 2**20)))
        part = "dd bs=1M count=1 iflag=fullblock status=none; sleep 1"
        words = f"yes '{_LINE}' | head -c {LOG} | for part in {parts}; do {part}; done"
        self.do("tpu_ops", "train", NODE, "--name", self.written, "--shell", "--", words)
        yield
        self.do("tpu_ops", "delete", NODE, "--yes")

    @property
    def written(self) -> str:
        """The run whose logs are read."""
        return f"written-{self.workers}"

    def commands(self) -> dict[str, Command]:
        """Return the measured commands, except start, stacks and stop, which share a run.

        All compared commands reach all workers at once over connections that stay open, with the same key exchange. All
        except gcloud, which has its own, use the same connections. Ansible gets the host names instead of an inventory.
        """
        config = self.do("tpu_ops", "ssh-config").strip()
        hosts = [f"{NODE}-w{index}" for index in range(self.workers)]
        names, listed, at_once = self.root / "hosts", ",".join(hosts), str(self.workers)
        names.write_text("\n".join(hosts) + "\n")
        argvs = {
            "floor": ("xargs", "-a", str(names), "-P", at_once, "-I{}", "ssh", "-F", config, "{}", "true"),
            "run": ("tpu_ops", "run", NODE, "--", "true"),
            "clush": ("clush", "-S", "-f", at_once, "-o", f"-F {config}", "-w", listed, "true"),
            "ansible": (
                *("ansible", "all", "-i", f"{listed},", "-f", at_once, f"--ssh-common-args=-F {config}"),
                *("-m", "ansible.builtin.raw", "-a", "true"),
            ),
            "gcloud": (
                *("gcloud", "compute", "tpus", "tpu-vm", "ssh", f"{self.environ['TPU_OPS_USER']}@{NODE}"),
                *(f"--zone={ZONE}", "--worker=all", "--command=true", f"--ssh-key-file={self.root / 'gcloud.key'}"),
                *(f"--ssh-flag=-o{option}" for option in self._shared()),
            ),
            "top": ("tpu_ops", "top", NODE, "--once"),
            "doctor": ("tpu_ops", "doctor", NODE),
            "logs": ("tpu_ops", "logs", self.written),
            "fetch": ("tpu_ops", "logs", self.written, "--fetch", str(self.root / "fetched")),
            "python": ("python", "-c", "pass"),
            "help": ("tpu_ops", "--help"),
        }
        more = {
            "ansible": {"ANSIBLE_INVENTORY_ENABLED": "host_list"},
            # gcloud keeps its keys in the home directory.
            "gcloud": {"HOME": str(self.root), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"},
        }
        if not shutil.which("gcloud"):
            del argvs["gcloud"]
        return {kind: self._command(argv, **more.get(kind, {})) for kind, argv in argvs.items()}

    def _command(self, argv: Sequence[str], **variables: str) -> Command:
        program = shutil.which(argv[0], path=self.environ["PATH"])
        if program is None:
            raise OpsError(f"{argv[0]} is not installed", where="PATH", fix="make engine")
        return Command((program, *argv[1:]), self.environ | variables)

    def _shared(self) -> tuple[str, ...]:
        """Return the options with which gcloud's ssh keeps its connections, as in `tpu_ops.ssh.client_config`."""
        return (
            "ControlMaster=auto",
            f"ControlPath={self.root}/%C",
            "ControlPersist=10m",
            "ServerAliveInterval=5",
            "ServerAliveCountMax=3",
            "KexAlgorithms=^curve25519-sha256",
        )

    def time(self, command: Command, where: str) -> Took:
        """Run a command and return the measured resources; its output is in the file `output`.

        Raises:
            OpsError: The command failed.
        """
        # Ansible prints its errors to standard output.
        return clock(command, self.root / "output", self.root / "output", where)

    def open_connections(self) -> None:
        """Open the connections to all workers: gcloud's, and those that all other compared commands share.

        Raises:
            OpsError: A command failed.
        """
        for kind, command in self.commands().items():
            if kind in ("run", "gcloud"):
                self.time(command, f"{kind} on {self.workers} workers")

    def round(self, number: int) -> list[RunSample]:
        """Measure each command once.

        Raises:
            OpsError: A command failed, or gave a wrong result.
        """
        commands = self.commands()
        samples = []
        for kind in rotated([*commands, "start"], number):
            if kind == "start":
                samples += self._run(number)
            else:
                took = self.time(commands[kind], f"{kind} on {self.workers} workers")
                samples.append(self._sample(number, kind, took, self._came(kind)))
        return samples

    def _sample(self, number: int, kind: str, took: Took, size: int = 0) -> RunSample:
        seconds = (round(took.wall, 3), round(took.cpu, 3))
        busy = None if took.busy is None else round(took.busy, 2)
        return RunSample(number, self.workers, kind, *seconds, took.peak, size, busy)

    def _came(self, kind: str) -> int:
        """Return the bytes of logs that a command received, and remove the files.

        Raises:
            OpsError: The logs are incomplete.
        """
        if kind == "logs":
            size, expected = (self.root / "output").read_bytes().count(_LINE.encode()) * (len(_LINE) + 1), LOG
        elif kind == "fetch":
            size = sum(path.stat().st_size for path in (self.root / "fetched").rglob("*.log"))
            expected = LOG * self.workers
            shutil.rmtree(self.root / "fetched")
        else:
            return 0
        # The last line may have been cut off.
        if not expected - len(_LINE) <= size <= expected:
            raise OpsError(
                f"{size} bytes of logs came instead of {expected}", where=f"{kind} on {self.workers} workers"
            )
        return expected

    def _run(self, number: int) -> list[RunSample]:
        """Start a run, take its stacks and stop it; measure all three."""
        name = f"stubborn-{self.workers}-{number}"
        start = self._command(("tpu_ops", "train", NODE, "--detach", "--name", name, "--", *_STUBBORN))
        stacks = self._command(("tpu_ops", "stacks", name))
        stop = self._command(("tpu_ops", "stop", name, "--grace", str(GRACE)))
        started = self.time(start, f"start on {self.workers} workers")
        record = f"/var/lib/tpu_ops/runs/{name}/record.json"
        rows = json.loads(self.do("tpu_ops", "run", NODE, "--json", "--", "sudo", "cat", record))
        started = started._replace(wall=last_start(rows) - started.began)
        took = {"start": started}
        took["stacks"] = self.time(stacks, f"stacks on {self.workers} workers")
        took["stop"] = self.time(stop, f"stop on {self.workers} workers")
        return [self._sample(number, kind, taken) for kind, taken in took.items()]


def run(sizes: Sequence[int], rounds: int, root: Path, say: Callable[[str], None]) -> list[RunSample]:
    """Measure the commands on nodes of these sizes; return the samples.

    Args:
        sizes: Numbers of workers.
        rounds: Number of rounds for each size.
        root: A directory for the lab's state.
        say: Called with lines of progress.

    Raises:
        OpsError: A command failed.
    """
    pod, samples = Pod(root), []
    with pod.up():
        for workers in sizes:
            say(f"runs: making {workers} workers ready")
            with pod.node(workers):
                pod.open_connections()
                for number in range(1, rounds + 1):
                    taken = pod.round(number)
                    samples += taken
                    walls = ", ".join(f"{sample.kind} {sample.wall:.2f}" for sample in taken)
                    say(f"round {number} of {rounds}, {workers} workers, s: {walls}")
    return samples
