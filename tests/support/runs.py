"""Workers with the launcher on them, made without Ansible, and two people: ada and bob."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.desk import lab_name
from tpu_ops import config
from tpu_ops.cloud.node import Node, workers_of
from tpu_ops.fleet import view
from tpu_ops.fleet.state import Files, Snapshot, question_of
from tpu_ops.host import build
from tpu_ops.lab import removal, shared
from tpu_ops.lab.backend import WorkerSpec
from tpu_ops.lab.containers import container_name
from tpu_ops.lab.workers import ContainerBackend
from tpu_ops.protocol import wire
from tpu_ops.ssh import known_hosts

#: The API's id of the first node; the others' follow.
NODE_ID = 4242
CHIPS = ("/dev/accel0", "/dev/accel1", "/dev/accel2", "/dev/accel3")
#: Seconds that setting a worker up may take: packages come over the network.
PATIENCE = 900

#: What the roles users and launcher do, as far as these tests need it.
SETUP = r"""
set -eu
groupadd --system tpu-run
for person in ada bob; do
    useradd --create-home --shell /bin/bash --groups tpu-run "$person"
    usermod --password '*' "$person"
    install -d -m 0700 -o "$person" "/home/$person/.ssh"
    install -m 0600 -o "$person" /root/key.pub "/home/$person/.ssh/authorized_keys"
done
# Shells print what they like before a command: to both outputs, and without a line end.
noise='echo "noise of an rc file"; printf "more noise" >&2; printf "and no line end"'
if [ -n "$3" ]; then
    (apt-get update -qq && apt-get install -y -qq --no-install-recommends $3) >/root/apt.log 2>&1
fi
if [ "$3" = zsh ]; then
    usermod --shell /usr/bin/zsh ada
    printf '%s\n' "$noise" >/home/ada/.zshenv
else
    printf '%s\n' "$noise" >/home/ada/.bashrc
fi
install -D -m 0755 /root/tpu-host "/usr/local/lib/tpu_ops/$1/tpu-host"
ln -sf "/usr/local/lib/tpu_ops/$1/tpu-host" /usr/local/sbin/tpu-host
/usr/local/sbin/tpu-host compile
mkdir -p /etc/tpu_ops
echo '{"environment_files": ["/etc/tpu-lab/environment"], "venv": "/opt/venv"}' >/etc/tpu_ops/launcher.json
echo '%tpu-run ALL=(root) NOPASSWD: /usr/local/sbin/tpu-host ""' >/etc/sudoers.d/tpu_ops
chmod 0440 /etc/sudoers.d/tpu_ops
visudo -cq
# RemoveIPC as the role launcher has it; a person's sessions are over at once, and not after 10 s.
install -d /etc/systemd/logind.conf.d
printf '[Login]\nRemoveIPC=no\nUserStopDelaySec=0\n' >/etc/systemd/logind.conf.d/tpu_ops.conf
systemctl restart systemd-logind
if [ -n "$4" ]; then
    ln -s "$4" /opt/venv
    exit
fi
mkdir -p /opt/venv/bin /opt/venv/lib/python3.11/site-packages/jax-0.0.1.dist-info
ln -s /usr/bin/python3 /opt/venv/bin/python
echo 'version = 3.11.2' >/opt/venv/pyvenv.cfg
"""


#: Makes an environment with JAX in the directory that all workers of all labs share; whoever comes later finds it.
JAX = """
set -eu
exec 9>>/var/cache/tpu-lab/runs-jax.lock
flock 9
if [ ! -e "$1/complete" ]; then
    rm -rf "$1"
    python3 -m venv "$1"
    export PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1
    "$1/bin/pip" install --quiet "jax==$2"
    touch "$1/complete"
fi
"""


#: Set to ``full``, it makes tests of races and of much output as long as `make bench` has them.
ROUNDS = "TPU_OPS_ROUNDS"
FULL = os.environ.get(ROUNDS) == "full"


def rounds(few: int, full: int) -> Callable[[Any], Any]:
    """Return what repeats a test, each time with the `number` of its round: a few times, or as often as `ROUNDS` says.

    Args:
        few: How often by default.
        full: How often in `make bench`, which keeps the outcome of each round.
    """
    each = pytest.mark.parametrize("number", range(1, (full if FULL else few) + 1))
    return lambda test: pytest.mark.rounds(each(test))


@dataclass
class Bench:
    """The workers, node by node, a fleet directory that knows them, and a person's shell on the controller."""

    instance: str
    backend: ContainerBackend
    specs: list[WorkerSpec]
    folder: Path

    def environ(self, person: str = "ada") -> dict[str, str]:
        """Return the environment of a person's shell."""
        own = {key: value for key, value in os.environ.items() if not key.startswith("TPU_OPS_")}
        return own | {
            "TPU_OPS_FLEET": str(self.folder / "fleet"),
            "TPU_OPS_STATE": str(self.folder / f"state-{person}"),
            "TPU_OPS_USER": person,
            "TPU_OPS_PRIVATE_KEY": str(self.folder / "key"),
            "XDG_RUNTIME_DIR": str(self.folder / "mux"),
        }

    def command(self, *argv: str) -> list[str]:
        """Return the command line of tpu_ops."""
        return [sys.executable, "-m", "tpu_ops.cli.main", *argv]

    def tpu_ops(
        self, *argv: str, person: str = "ada", cwd: Path | None = None, timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        """Run tpu_ops as a person and return how it ended."""
        return subprocess.run(
            self.command(*argv),
            env=self.environ(person),
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )

    def popen(self, *argv: str, person: str = "ada", module: str = "tpu_ops.cli.main") -> subprocess.Popen[str]:
        """Start tpu_ops, or what stands for it, as a person, as the leader of a process group of its own."""
        command = [sys.executable, "-m", module, *argv]
        pipe = subprocess.PIPE
        # As at a terminal, even where these tests themselves run in the background of a shell, which ignores Ctrl-C.
        return subprocess.Popen(
            command,
            env=self.environ(person),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            process_group=0,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
        )

    def ssh_config(self, person: str = "ada") -> Path:
        """Return a person's ssh configuration of the fleet."""
        # The one for the login that only her shell has.
        return next((self.folder / f"state-{person}").glob("fleets/*/ssh_config-*"))

    def inside(self, index: int, script: str, check: bool = True) -> str:
        """Run a shell line as root in a worker, past ssh and tpu_ops."""
        done = self.backend.engine.call("exec", self.container(index), "sh", "-c", script, check=check)
        return done.stdout

    def container(self, index: int) -> str:
        """Return the name of a worker's container."""
        return container_name(self.instance, self.specs[index])

    @property
    def indices(self) -> range:
        """The workers' indices here; of one node they are the ranks of a run on it."""
        return range(len(self.specs))

    def record(self, index: int, run_id: str) -> dict[str, Any]:
        """Return the record of a run as it stands on a worker."""
        found: dict[str, Any] = json.loads(self.inside(index, f"cat /var/lib/tpu_ops/runs/{run_id}/record.json"))
        return found

    def await_state(self, index: int, run_id: str, state: str) -> None:
        """Wait until a run's record on a worker says that it is in a state: a start waits for the ranks, not for it."""
        self.await_(lambda: self.record(index, run_id)["state"] == state, f"{run_id} is {state} on worker {index}")

    def left(self, index: int) -> list[str]:
        """Return what a run may have left: people's processes but a login's own, held chips, the unit, its files."""
        own = "grep -vE 'sshd|systemd --user|[(]sd-pam[)]'"
        shown = self.inside(index, f"ps -eo user:20,pid,args --no-headers | grep -E '^(ada|bob) ' | {own} || true")
        shown += self.inside(index, "systemctl list-units --all --no-legend 'tpu-run*'")
        shown += self.inside(index, "find /proc/[0-9]*/fd -lname '/dev/accel*' 2>/dev/null || true")
        shown += self.inside(index, "find /run/tpu_ops/specs /run/tpu_ops/intents -type f 2>/dev/null || true")
        return [line for line in shown.splitlines() if line.strip()]

    def await_clean(self, index: int, seconds: float = 60) -> None:
        """Wait until nothing of a run is left on a worker."""
        self.await_(lambda: self.left(index) == [], f"worker {index} is clean", seconds)

    def await_log(self, index: int, run_id: str, text: str, seconds: float = 20) -> None:
        """Wait until a run has written something."""
        script = f"cat /var/lib/tpu_ops/runs/{run_id}/log/*.log"
        self.await_(
            lambda: text in self.inside(index, script, check=False), f"{text!r} in the log of {run_id}", seconds
        )

    def started(self, *argv: str, name: str, person: str = "ada", options: Sequence[str] = ()) -> None:
        """Start a run that goes on by itself."""
        done = self.tpu_ops("train", "pod", "--detach", "--name", name, *options, "--", *argv, person=person)
        assert done.returncode == 0, done.stderr

    def hold(self, index: int, person: str, *, ignoring: str = "") -> int:
        """Have a person hold a worker's first chip outside of any run; return the process."""
        script = f"{ignoring} exec 3<{CHIPS[0]}; exec sleep 600"
        self.inside(index, f"setsid su -s /bin/sh {person} -c '{script}' >/dev/null 2>&1 </dev/null &")

        def pids() -> str:
            return self.inside(index, f"pgrep -u {person} -x sleep || true").strip()

        self.await_(pids, f"{person} holds a chip")
        return int(pids().split()[0])

    def set_chips(self, index: int, state: str, **options: object) -> None:
        """Set what a worker's chips do while a process holds them, as `tpu_ops lab chips` does."""
        shared.set_chips(self.backend.directory(self.specs[index]), state, options)

    def usage(self, index: int) -> dict[str, Any]:
        """Return what the launcher of a worker of `pod` tells ada of its chips, through ssh."""
        if not list((self.folder / "state-ada").glob("fleets/*/ssh_config-*")):
            self.tpu_ops("who", "pod")
        marker = wire.new_marker()
        command = ["ssh", "-F", str(self.ssh_config()), f"pod-w{index}", wire.COMMAND]
        request = wire.request(marker, "usage", {})
        done = subprocess.run(command, input=request, capture_output=True, timeout=60, check=False)
        answer = wire.find_answer(done.stdout, marker)
        assert answer is not None, done.stderr.decode()
        return dict(answer)

    @contextlib.contextmanager
    def paused(self, index: int) -> Iterator[None]:
        """Freeze a worker for as long as the block lasts."""
        # The kernel may refuse to freeze a container that is just starting processes.
        pause = ("pause", self.container(index))
        self.await_(lambda: self.backend.engine.call(*pause, check=False).code == 0, "the worker is paused")
        try:
            yield
        finally:
            self.backend.engine.call("unpause", self.container(index))

    def helpers(self, index: int) -> str:
        """Return the processes that serve requests of controllers on a worker."""
        return self.inside(index, "pgrep -u root -f 'python3 -IS /usr/local/sbin/tpu-host$' || true").strip()

    def await_sshd(self, index: int) -> None:
        """Wait until a worker that was restarted lets people in."""
        # Before the end of the boot, sshd turns people away.
        ready = "systemctl is-active ssh && test ! -e /run/nologin && echo open"
        self.await_(lambda: self.inside(index, ready, check=False).split() == ["active", "open"], "sshd", 120)

    def clean(self) -> None:
        """Check that nothing of a run is left on any worker."""
        assert [self.left(index) for index in self.indices] == [[] for _ in self.indices]

    def sweep(self) -> None:
        """End whatever a failed test left running, so that the next one has its own chance."""
        for index in self.indices:
            if self.left(index):
                self.inside(index, "systemctl kill --signal=KILL tpu-run.service; pkill -KILL -u bob,ada sleep", False)
                self.await_clean(index)

    def await_(self, condition: Callable[[], object], what: str, seconds: float = 20) -> None:
        """Wait until a condition holds."""
        began = time.monotonic()
        while not condition():
            waited = time.monotonic() - began
            assert waited < seconds, f"not within {seconds} s: {what}"
            # Most conditions call the container engine: what takes long is asked for less often.
            time.sleep(min(max(waited / 20, 0.05), 0.25))  # polls until the deadline


@contextlib.contextmanager
def made(
    purpose: str, folder: Path, *, packages: Sequence[str], jax: str = "", nodes: Sequence[str] = ("pod",)
) -> Iterator[Bench]:
    """Make the workers of some nodes for as long as the block lasts.

    Args:
        purpose: What the lab's name begins with.
        folder: A directory for all that is made.
        packages: For each worker of a node the Debian packages that it gets, separated by spaces; with zsh, ada's shell
            is zsh.
        jax: Version of JAX in the workers' environment; without it the environment is a name only.
        nodes: Their names.
    """
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    instance = lab_name(purpose)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_OPS_STATE", str(folder / "lab"))
        removal.teardown(instance)
        try:
            yield asyncio.run(_made(instance, folder, packages, jax, nodes))
        finally:
            removal.teardown(instance)


async def _made(instance: str, folder: Path, packages: Sequence[str], jax: str, nodes: Sequence[str]) -> Bench:
    backend = ContainerBackend(instance)
    size = len(packages)
    specs = [
        WorkerSpec(
            project="lab",
            zone="us-central2-b",
            node=node,
            node_id=str(NODE_ID + number),
            index=index,
            peers=tuple(str(backend.networks.internal[20 + number * size + peer]) for peer in range(size)),
            external_ip=str(backend.networks.external[20 + number * size + index]),
            runtime_version="tpu-ubuntu2204-base",
            accelerator_type=f"v4-{8 * size}",
            chip_devices=CHIPS,
            metadata={"ssh-keys": f"tpu:{(folder / 'key.pub').read_text().strip()}"},
        )
        for number, node in enumerate(nodes)
        for index in range(size)
    ]
    await backend.boot(specs)
    program, digest = build.build(folder / "cache")
    venv = f"/var/cache/tpu-lab/runs-jax-{jax}" if jax else ""
    engine = backend.engine

    async def install(spec: WorkerSpec) -> None:
        name = container_name(instance, spec)
        await engine.run("cp", str(program), f"{name}:/root/tpu-host")
        await engine.run("cp", str(folder / "key.pub"), f"{name}:/root/key.pub")
        words = (digest, str(spec.index), packages[spec.index], venv)
        await engine.run("exec", name, "sh", "-c", SETUP, "sh", *words, timeout=PATIENCE)
        if jax and spec is specs[0]:
            await engine.run("exec", name, "sh", "-c", JAX, "sh", venv, jax, timeout=PATIENCE)

    await asyncio.gather(*map(install, specs))
    keys = {}
    for spec in specs:
        keys[f"tpu-{spec.node_id}-w{spec.index}"] = (await backend.guest_attributes(spec))["hostkeys"]
    bench = Bench(instance, backend, specs, folder)
    _write_fleet(bench, keys)
    return bench


def apart(bench: Bench, folder: Path, nodes: Mapping[str, str], endpoint: str) -> Bench:
    """Return a machine of its own of the same people's, which knows each worker of a node as a node of one worker.

    It is good for commands; what is inside the workers is `bench`'s to say.

    Args:
        bench: The workers.
        folder: A directory for all that is made.
        nodes: What they are called there -> the API's ids.
        endpoint: That API.
    """
    (folder / "key").symlink_to(bench.folder / "key")
    specs = [
        replace(old, node=name, node_id=node_id, index=0, peers=(old.peers[old.index],), accelerator_type="v4-8")
        for old, (name, node_id) in zip(bench.specs, nodes.items(), strict=True)
    ]
    keys = {
        f"tpu-{new.node_id}-w0": asyncio.run(bench.backend.guest_attributes(old))["hostkeys"]
        for old, new in zip(bench.specs, specs, strict=True)
    }
    desk = Bench(bench.instance, bench.backend, specs, folder)
    _write_fleet(desk, keys, endpoint)
    return desk


def second_desk(bench: Bench, folder: Path) -> Bench:
    """Return another machine of the same people's, with a fleet directory and a state of its own.

    Args:
        bench: The workers.
        folder: A directory for all that is made.
    """
    (folder / "key").symlink_to(bench.folder / "key")
    keys = {
        f"tpu-{spec.node_id}-w{spec.index}": asyncio.run(bench.backend.guest_attributes(spec))["hostkeys"]
        for spec in bench.specs
    }
    desk = replace(bench, folder=folder)
    _write_fleet(desk, keys)
    return desk


def _write_fleet(bench: Bench, keys: dict[str, dict[str, str]], endpoint: str = "") -> None:
    """Write what a refresh would have written: these tests have workers, and no API that knows their addresses."""
    options = f"endpoint: {endpoint}\n" if endpoint else ""
    (bench.folder / "fleet" / "inventory").mkdir(parents=True)
    (bench.folder / "fleet" / "inventory" / "tpu_vm.yml").write_text(f"plugin: tpu_vm\nprojects: [lab]\n{options}")
    nodes = [
        Node(
            name=first.node,
            project="lab",
            zone="us-central2-b",
            node_id=first.node_id,
            accelerator_type=first.accelerator_type,
            state="READY",
            internal_ips=first.peers,
            external_ips=tuple(spec.external_ip for spec in bench.specs if spec.node == first.node),
            chips=len(CHIPS) * len(first.peers),
            chips_per_worker=len(CHIPS),
        )
        for first in bench.specs
        if first.index == 0
    ]
    assert [worker.host for worker in workers_of(nodes)] == [f"{spec.node}-w{spec.index}" for spec in bench.specs]
    for person in ("ada", "bob", "tpu"):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in bench.environ(person).items():
                patch.setenv(name, value)
            settings = config.load()
            files = Files(settings.state_dir)
            files.directory.mkdir(parents=True)
            files.write_snapshot(question_of(settings), Snapshot(time.time(), tuple(nodes)))
            files.known_hosts.write_text(known_hosts.text_of(keys))
            view.current(settings)
