"""Measure one controller with up to 512 workers, which are addresses of this machine with real sshd processes.

The sshd processes listen on port 22 of addresses 127.x.y.z: this needs openssh-server, and usually root.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import json
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.bench import processes
from tools.bench.measure import BIN, ROOT, Command, Served, clock
from tools.bench.report import GROWTH_LIMIT, digits, megabytes, origin, spread
from tools.bench.samples import Fleet, PartSeries
from tpu_ops.errors import OpsError
from tpu_ops.host import probe
from tpu_ops.lab.backend import Networks, NoWorkers
from tpu_ops.protocol import wire

#: Workers of the fleets, smallest first. Each fleet is one node.
SIZES = (32, 128, 512)
NODE = "n00000"
#: Addresses of the workers. On Linux, all addresses of 127.0.0.0/8 belong to this machine.
NETWORK = ipaddress.IPv4Network("127.64.0.0/12")
#: Largest number of addresses on which one sshd listens (MAX_LISTEN_SOCKS in sshd.c).
ADDRESSES = 16
#: Soft limit of open files for the commands: the default of Linux distributions.
FILES = 1024
#: Target for the memory of the controller's processes, in bytes.
MEMORY = 500_000_000
#: Seconds until every sshd has to accept connections, and seconds between two attempts.
_PATIENCE, _POLL = 20.0, 0.1
#: Seconds between two readings of a command's memory and open files.
_READING = 0.025
#: Key of a measured command -> description, in the order of the page and of a round.
MEASURED = {
    "list": "`tpu_ops list`",
    "refresh": "`tpu_ops refresh`",
    "connect": "`tpu_ops run -- true`, opens all connections",
    "run": "`tpu_ops run -- true`, connections are open",
    "doctor": "`tpu_ops doctor`, connections are open",
}
#: The commands that contact every worker.
_CONTACTS = ("connect", "run", "doctor")


@dataclass(frozen=True)
class SwarmSample:
    """The measurement of one command in one round.

    Attributes:
        round: Number of the round, from 1.
        workers: Number of workers of the fleet.
        key: Key of the command in `MEASURED`.
        wall: Duration in seconds.
        cpu: Seconds of processor time of the controller: the command, its children and the ssh connections.
        sshd: Seconds of processor time of the workers: all sshd processes and what they started.
        peak: Largest sum of the resident sizes of the command and its children, in bytes.
        connections: Number of open ssh connections after the command.
        held: Memory of these connections after the command, in bytes; shared pages count once (PSS).
        files: Largest number of open files of one process of the command.
    """

    round: int
    workers: int
    key: str
    wall: float
    cpu: float
    sshd: float
    peak: int
    connections: int
    held: int
    files: int


#: All samples of one measurement.
SwarmSeries = PartSeries[SwarmSample]


def run(rounds: int, root: Path, say: Callable[[str], None]) -> list[SwarmSample]:
    """Measure all commands.

    Args:
        rounds: Number of runs of each command with each fleet.
        root: A directory for temporary files.
        say: Called with lines of progress.

    Raises:
        OpsError: There is no sshd, or a command failed.
    """
    found = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    try:
        for number in range(1, rounds + 1):
            for workers in SIZES:
                with _swarm(root / f"{number}-{workers}", workers) as swarm:
                    for key, argv in _commands().items():
                        sample = swarm.sample(number, key, argv)
                        found.append(sample)
                        say(f"round {number} of {rounds}, {workers} workers, {key}: {sample.wall:.2f} s")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return found


def _commands() -> dict[str, tuple[str, ...]]:
    command = ("run", NODE, "--", "true")
    return {"list": ("list",), "refresh": ("refresh",), "connect": command, "run": command, "doctor": ("doctor", NODE)}


class Swarm:
    """A node whose workers are addresses of this machine, and its controller.

    Args:
        served: The node, as the API serves it.
        environ: The environment of the controller's commands.
        sshds: The sshd processes.
    """

    def __init__(self, served: Served, environ: Mapping[str, str], sshds: Sequence[subprocess.Popen[bytes]]) -> None:
        self._served, self._environ, self._sshds = served, environ, sshds

    def sample(self, number: int, key: str, argv: Sequence[str]) -> SwarmSample:
        """Run a command once and return what it used.

        Raises:
            OpsError: The command failed.
        """
        command = Command((str(BIN / "tpu_ops"), *argv), self._environ)
        before, workers = processes.busy(self.masters()), self._sshd_time()
        with _Watch() as watch:
            took = clock(command, Path(os.devnull), self._served.root / "stderr", f"{self._served.fleet.name}: {key}")
        masters = self.masters()
        return SwarmSample(
            number,
            self._served.fleet.workers,
            key,
            round(took.wall, 3),
            round(took.cpu + processes.busy(masters) - before, 3),
            round(max(0.0, self._sshd_time() - workers), 3),
            watch.peak,
            len(masters),
            sum(map(processes.proportional, masters)),
            watch.files,
        )

    def masters(self) -> list[int]:
        """Return the process ids of the open ssh connections, which have the fleet's ssh config as an argument."""
        state = os.fsencode(self._environ["TPU_OPS_STATE"])
        return [pid for pid in processes.pids() if state in processes.read(pid, "cmdline")]

    def _sshd_time(self) -> float:
        pids = [process.pid for process in self._sshds]
        return processes.busy([*pids, *processes.descendants(pids)], ended=True)


class _Watch:
    """Reads the memory and open files of a command and its children while a `with` block runs.

    The command is a child of the stopwatch, which is the only new child of this process.

    Attributes:
        peak: Largest sum of resident sizes, in bytes.
        files: Largest number of open files of one process.
    """

    def __init__(self) -> None:
        self._before = set(processes.children(os.getpid()))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.peak = self.files = 0

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_READING):
            new = [child for child in processes.children(os.getpid()) if child not in self._before]
            pids = processes.descendants(new)
            self.peak = max(self.peak, sum(map(processes.resident, pids)))
            self.files = max([self.files, *map(processes.open_files, pids)])


@contextlib.contextmanager
def _swarm(root: Path, workers: int) -> Iterator[Swarm]:
    """Serve one node with workers that answer; end everything afterwards, the controller's connections too."""
    # A worker of v4 has four chips of two cores.
    networks = Networks(NoWorkers.networks.internal, NETWORK)
    served = Served(Fleet(1, f"v4-{8 * workers}", workers), root, networks)
    root.mkdir(parents=True)
    # OpenSSH limits the length of a control socket's path, so its directory needs a short name.
    with served.api(), tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as short:
        key = root / "known" / "key"
        served.inventory_file("known", f"private_key: {key}")
        for file in (key, root / "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)
        environ = served.environ("known") | {"TPU_OPS_USER": getpass.getuser(), "XDG_RUNTIME_DIR": short}
        refresh = Command((str(BIN / "tpu_ops"), "refresh"), environ)
        clock(refresh, Path(os.devnull), root / "stderr", served.fleet.name)
        _know(root / "known" / "state", (root / "host_key.pub").read_text())
        with _sshds(root, key, [NETWORK[8 + index] for index in range(workers)]) as sshds:
            yield Swarm(served, environ, sshds)


def _know(state: Path, public: str) -> None:
    """Replace the invented host keys of the API's workers by that of the sshd processes."""
    (known,) = state.glob("fleets/*/known_hosts")
    kind, blob = public.split()[:2]
    lines = [line.split() for line in known.read_text().splitlines()]
    known.write_text("".join(f"{words[0]} {kind} {blob}\n" for words in lines))


@contextlib.contextmanager
def _sshds(
    root: Path, key: Path, addresses: Sequence[ipaddress.IPv4Address]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Serve ssh at addresses of this machine for the length of a `with` block.

    Raises:
        OpsError: There is no sshd, or it does not start.
    """
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        raise OpsError("there is no sshd", where="this machine", fix="install openssh-server")
    worker = root / "worker"
    worker.write_text(_worker())
    worker.chmod(0o755)
    common = [
        f"HostKey {root / 'host_key'}",
        f"AuthorizedKeysFile {key}.pub",
        f"ForceCommand {worker}",
        "StrictModes no",
        "PidFile none",
        # Each sshd stands for several workers, which would have this limit each.
        "MaxStartups 1000",
        # Bash then does not read this user's start-up files, which workers do not have.
        "SetEnv SHLVL=1",
    ]
    with contextlib.ExitStack() as stack:
        found = []
        for first in range(0, len(addresses), ADDRESSES):
            config = root / f"sshd-{first}"
            own = [f"ListenAddress {address}" for address in addresses[first : first + ADDRESSES]]
            config.write_text("\n".join([*own, *common]) + "\n")
            errors = stack.enter_context((root / f"sshd-{first}.log").open("wb"))
            process = subprocess.Popen([program, "-D", "-e", "-f", str(config)], stderr=errors)
            stack.callback(_end, process)
            found.append(process)
        for process, address in zip(found, addresses[::ADDRESSES], strict=True):
            _await(process, str(address), root)
        yield found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End an sshd with its connections; the controller's side of each connection then ends too."""
    below = processes.descendants([process.pid])
    process.terminate()
    process.wait()
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 15)


def _await(process: subprocess.Popen[bytes], address: str, root: Path) -> None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection((address, 22), timeout=_PATIENCE).close()
            # If another program had the port, sshd has ended.
            if process.poll() is None:
                return
        time.sleep(_POLL)
    said = "".join(path.read_text(errors="replace") for path in sorted(root.glob("sshd-*.log")))
    raise OpsError(f"sshd does not listen: {said.strip()[-500:]}", where=address, fix="run as root, with port 22 free")


def _worker() -> str:
    """Return the program of all sessions: it runs a command, and gives the answer of a ready worker's launcher."""
    facts = {
        "protocol": wire.PROTOCOL,
        "program": "/usr/local/lib/tpu_ops/launcher/tpu-host",
        "faults": [],
        "boot_id": "$boot",
        "clock": "$now",
        "venv": probe.venv_facts(str(ROOT / ".venv")),
        "chips": [f"/dev/accel{chip}" for chip in range(4)],
        "holders": [],
        "holder": None,
        "lockfiles": [],
        "preloads": [],
    }
    answer = json.dumps({"ok": True, "probe": facts})
    return f"""#!/bin/sh
case $SSH_ORIGINAL_COMMAND in
"{wire.COMMAND}") ;;
*) exec /bin/sh -c "$SSH_ORIGINAL_COMMAND" ;;
esac
read -r request
marker=${{request#*\\"marker\\": \\"}}
read -r boot </proc/sys/kernel/random/uuid
now=$(date +%s)
cat <<END

${{marker%%\\"*}}
{answer}
END
"""


def section(series: SwarmSeries) -> list[str]:
    """Return the lines of this section of the page."""
    method = (
        "One controller, and one node of the lab's API whose workers are addresses 127.x.y.z of this machine: a real "
        "ssh client and a real sshd for each connection, no containers. The launcher's answer to `doctor` is fixed "
        "text. The controller's CPU is that of the command, its children and the ssh connections that it opens; the "
        "workers' CPU is that of sshd. Peak is the sum of the resident sizes of the command and its children; "
        "connections remain open between commands, and their memory counts shared pages once. Files are those of the "
        f"process with most; the commands start with a soft limit of {FILES}. The numbers do not show a network's "
        "latency, nor how fast workers with processors of their own answer: all workers share the cores of this "
        "machine with the controller. Therefore the wall time of a command that contacts workers is an upper bound, "
        "and most of it is the workers' CPU. With 512 workers here, the first answer takes longer than the 1.5 s after "
        "which the controller tests the addresses and asks the API; this adds to its CPU and to its growth. Numbers "
        "are medians, with the smallest and largest in brackets; ratios are taken within a round."
    )
    lines = ["## Hundreds of workers", "", *origin(series.commit, series.date, series.machine), ""]
    lines += [*textwrap.wrap(method, 118), ""]
    head = ("", "workers", "rounds", "wall, s", "controller's CPU, s", "workers' CPU, s", "peak, MB")
    lines += [f"| {' | '.join((*head, 'connections', 'their memory, MB', 'files'))} |", "|---" * 10 + "|"]
    for key, title in MEASURED.items():
        for workers in _sizes(series):
            taken = _of(series, key, workers)
            cells = (
                title,
                str(workers),
                str(len(taken)),
                spread(one.wall for one in taken).text(digits),
                spread(one.cpu for one in taken).text(digits),
                spread(one.sshd for one in taken).text(digits),
                spread(one.peak for one in taken).text(megabytes),
                spread(one.connections for one in taken).text(digits),
                spread(one.held for one in taken).text(megabytes),
                spread(one.files for one in taken).text(digits),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", "### Targets of hundreds of workers", "", "The median decides.", "", *_targets(series)]


def _sizes(series: SwarmSeries) -> list[int]:
    return sorted({sample.workers for sample in series.samples})


def _of(series: SwarmSeries, key: str, workers: int) -> list[SwarmSample]:
    return [sample for sample in series.samples if (sample.key, sample.workers) == (key, workers)]


def growth(series: SwarmSeries, key: str) -> list[float]:
    """Return the ratio of the CPU of one more worker between the two larger fleets to that between the two smaller.

    There is one ratio for each round; 1 is linear. Constant costs cancel out.
    """
    sizes = _sizes(series)
    parts = [{one.round: one.cpu for one in _of(series, key, workers)} for workers in sizes]
    found = []
    for number in parts[0]:
        small, middle, large = (part[number] for part in parts)
        slopes = [(middle - small) / (sizes[1] - sizes[0]), (large - middle) / (sizes[2] - sizes[1])]
        found.append(slopes[1] / slopes[0] if slopes[0] > 0 else float("inf"))
    return found


def _targets(series: SwarmSeries) -> list[str]:
    """Return the table of the targets."""
    small, *_, large = _sizes(series)
    lines = ["| target | measured | met |", "|---|---|---|"]
    for key, title in MEASURED.items():
        if key in _CONTACTS:
            found = spread(growth(series, key))
            target = f"{title}: CPU of one more worker, at most {GROWTH_LIMIT} times as much with many (1 is linear)"
            lines.append(_row(target, found.text(digits), found.median <= GROWTH_LIMIT))
        else:
            few = {one.round: one.cpu for one in _of(series, key, small)}
            found = spread(one.cpu / few[one.round] for one in _of(series, key, large))
            target = f"{title}: CPU with {large} workers, at most {large // small} times that with {small}"
            lines.append(_row(target, found.text(digits), found.median <= large / small))
    limit = f"{MEMORY / 1e6:.0f} MB"
    for key, title in MEASURED.items():
        most = spread(one.peak for one in _of(series, key, large))
        target = f"{title}: memory with {large} workers, under {limit}"
        lines.append(_row(target, f"{most.text(megabytes)} MB", most.median < MEMORY))
    for key in _CONTACTS:
        held = spread(one.held for one in _of(series, key, large))
        each = spread(one.held / one.connections for one in _of(series, key, large))
        target = f"{MEASURED[key]}: memory of {large} open connections, under {limit}"
        measured = f"{held.text(megabytes)} MB, {each.median / 1e6:.2f} MB each"
        lines.append(_row(target, measured, held.median < MEMORY))
    return lines


def _row(target: str, measured: str, met: bool) -> str:
    return f"| {target} | {measured} | {'yes' if met else '**no**'} |"
