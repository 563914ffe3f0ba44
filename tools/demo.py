"""Run the main job once on the local lab: from bare workers to a trained model and a change of addresses.

Each line of the closing summary is a value that this program has checked itself: Ansible's statistics, an accuracy that
another process computes from the checkpoint, the answer of an address. The first failing step ends the demo with exit
code 1, and prints how to inspect the lab and continue.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tpu_ops.lab.engine import find as find_engine
from tpu_ops.lab.networks import LABEL

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
#: The demo's own fleet, independent of the settings in inventory/.
FLEET = Path("tools/demo_fleet")
POD_WORKERS = 4
#: Seconds for one command; a first run of site.yml on a slow network takes longest.
LIMIT = 1800


class StepFailed(Exception):
    """A step failed; the text has the expected and the actual result."""


def require(condition: bool, text: str) -> None:
    """Fail the step with this text if the condition is false."""
    if not condition:
        raise StepFailed(text)


def answers(address: str, port: int = 22, timeout: float = 3) -> bool:
    """Return whether an ssh server sends its banner at this address."""
    try:
        with socket.create_connection((address, port), timeout=timeout) as connection:
            connection.settimeout(timeout)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


@dataclass
class Shell:
    """Runs commands, prints them with their output, and keeps the output for checks and the record."""

    environ: dict[str, str]
    transcript: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print a line and add it to the record."""
        self.transcript.append(text)
        print(text, flush=True)

    def show(self, *argv: str, **variables: str) -> str:
        """Run a command, print its output, and return its standard output."""
        self.say(f"$ {shlex.join(argv)}")
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=self.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        lines: list[str] = []

        def pump(stream: Any, kept: list[str] | None) -> None:
            for text in stream:
                if kept is not None:
                    kept.append(text)
                self.say(f"  {text.rstrip()}")

        pumps = [
            threading.Thread(target=pump, args=(process.stdout, lines)),
            threading.Thread(target=pump, args=(process.stderr, None)),
        ]
        for thread in pumps:
            thread.start()
        try:
            code = process.wait(timeout=LIMIT)
        except KeyboardInterrupt:
            process.wait()
            raise
        except subprocess.TimeoutExpired as exc:
            process.kill()
            raise StepFailed(f"`{shlex.join(argv)}` did not end within {LIMIT} s") from exc
        finally:
            for thread in pumps:
                thread.join()
        require(code == 0, f"`{shlex.join(argv)}` ended with exit code {code}")
        return "".join(lines)

    def ask(self, *argv: str) -> str:
        """Run a command without printing it, and return its standard output."""
        try:
            done = subprocess.run(
                argv,
                cwd=ROOT,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired as exc:
            raise StepFailed(f"`{shlex.join(argv)}` did not end within {LIMIT} s") from exc
        require(done.returncode == 0, f"`{shlex.join(argv)}` ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def workers(self) -> list[dict[str, Any]]:
        """Return the workers that the API lists."""
        rows: list[dict[str, Any]] = json.loads(self.ask("tpu_ops", "list", "--json"))
        return rows


def lab_up(shell: Shell) -> str:
    """Start the lab and set the environment variables for it."""
    shell.show("tpu_ops", "lab", "up")
    shell.say(f"$ export TPU_OPS_FLEET={FLEET}")
    shell.environ |= json.loads(shell.ask("tpu_ops", "lab", "env", "--json"))
    shell.say('$ eval "$(tpu_ops lab env)"')
    for wire in (shell.environ["TPU_OPS_ENDPOINT"], shell.environ["TPU_OPS_REST_ENDPOINT"].removeprefix("http://")):
        host, port = wire.rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=5).close()
    return f"the API answers: gRPC {shell.environ['TPU_OPS_ENDPOINT']}, REST {shell.environ['TPU_OPS_REST_ENDPOINT']}"


def create_nodes(shell: Shell) -> str:
    """Create the pod and the single host through the API."""
    shell.show(
        *("tpu_ops", "create", "pod", "--type", "v4-32", "--zone", "us-central2-b"),
        *("--runtime", "tpu-ubuntu2204-base"),
    )
    shell.show("tpu_ops", "create", "solo", "--type", "v2-8", "--zone", "us-central1-f")
    rows = shell.workers()
    serving = [row["host"] for row in rows if row["state"] == "READY" and answers(row["external_ip"])]
    expected = [*(f"pod-w{index}" for index in range(POD_WORKERS)), "solo-w0"]
    require(sorted(serving) == expected, f"expected {expected} to be READY and to answer, got {serving}")
    return f"{len(serving)} workers are READY and their sshd answers"


def inventory(shell: Shell) -> str:
    """List the fleet with Ansible."""
    shell.show("ansible-inventory", "--graph")
    listing = json.loads(shell.ask("ansible-inventory", "--list"))
    hosts = listing["_meta"]["hostvars"]
    require(len(hosts) == POD_WORKERS + 1, f"expected five hosts, got {sorted(hosts)}")
    groups = {
        "node_pod": POD_WORKERS,
        "node_solo": 1,
        "zone_us_central2_b": POD_WORKERS,
        "type_v4_32": POD_WORKERS,
        "state_ready": POD_WORKERS + 1,
    }
    for name, size in groups.items():
        found = listing.get(name, {}).get("hosts", [])
        require(len(found) == size, f"expected {size} hosts in group {name}, got {found}")
    return f"{len(hosts)} hosts, grouped by node, zone, accelerator type and state"


def configure(shell: Shell) -> str:
    """Configure the fleet twice; the second run must not change anything."""
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        for number in ("first", "second"):
            stats = Path(folder) / number
            shell.show(
                "ansible-playbook",
                "site.yml",
                ANSIBLE_CALLBACK_PLUGINS=str(ROOT / "tools" / "callback_plugins"),
                ANSIBLE_CALLBACKS_ENABLED="stats_file",
                ANSIBLE_DISPLAY_OK_HOSTS="false",
                STATS_FILE=str(stats),
            )
            counts.append(json.loads(stats.read_text()))
    first, second = counts
    require(len(second) == POD_WORKERS + 1, f"expected five hosts in Ansible's statistics, got {sorted(second)}")
    changed = {host: row["changed"] for host, row in second.items() if row["changed"]}
    require(not changed, f"the second run still changed {changed}")
    tasks = max(row["ok"] for row in second.values())
    most = max(row["changed"] for row in first.values())
    return f"first run changed up to {most} tasks on a host; second run of {tasks} tasks: changed=0 on all five"


def train(shell: Shell) -> str:
    """Train on the whole pod, then compute the accuracy from the checkpoint."""
    log = shell.show(
        *("tpu_ops", "train", "pod", "--sync", "examples/digits"),
        *("--", "python", "train.py", "--epochs", "5"),
    )
    losses = [float(value) for value in re.findall(r"^\[0\] epoch \d+ loss ([0-9.]+)", log, re.MULTILINE)]
    require(len(losses) == 5, f"expected five epochs of rank 0 in the log, got {len(losses)}")
    require(losses[-1] < losses[0] / 2, f"the loss did not fall: {losses}")
    require(f"process 0 of {POD_WORKERS}," in log, "the ranks did not form one group of four processes")
    again = shell.show(
        *("tpu_ops", "run", "pod-w0", "--"),
        *("sh", "-c", "cd ~/tpu_ops/digits && exec python evaluate.py"),
    )
    found = re.search(r"\{.*\}", again)
    require(found is not None, "the evaluation printed no result")
    result = json.loads(found[0]) if found else {}
    right = float(result["test_accuracy"])
    require(result["epoch"] == 5 and right > 0.9, f"expected accuracy over 0.9 after epoch 5, got {result}")
    fall = f"{losses[0]:.2f} -> {losses[-1]:.2f}"
    return f"loss {fall} on four workers; accuracy of the checkpoint, loaded again: {right:.3f}"


def host_keys(shell: Shell) -> str:
    """Return the pod's lines of known_hosts; fail if ssh does not check host keys."""
    listing = json.loads(shell.ask("ansible-inventory", "--list"))
    options = listing["_meta"]["hostvars"]["pod-w0"]["ansible_ssh_common_args"]
    effective = shell.ask("ssh", *shlex.split(options), "-G", "pod-w0")
    require("stricthostkeychecking true" in effective, f"host-key checking is not on: {options}")
    files = re.findall(r"^userknownhostsfile (\S+)$", effective, re.MULTILINE)
    require(len(files) == 1, f"expected one known_hosts file, got {files}")
    lines = Path(files[0]).read_text().splitlines()
    kept = sorted(
        line for line in lines if line.startswith(f"tpu-{listing['_meta']['hostvars']['pod-w0']['tpu_node_id']}-")
    )
    require(len({line.split()[0] for line in kept}) == POD_WORKERS, f"expected keys of four workers, got {kept}")
    return "\n".join(kept)


def change_addresses(shell: Shell) -> str:
    """Change the pod's external addresses, and reach it again with host-key checking on."""
    before = {row["host"]: row["external_ip"] for row in shell.workers() if row["node"] == "pod"}
    keys = host_keys(shell)
    shell.show("tpu_ops", "lab", "maintenance", "pod")
    shell.show("tpu_ops", "refresh")
    after = {row["host"]: row["external_ip"] for row in shell.workers() if row["node"] == "pod"}
    kept = [host for host in before if before[host] == after[host]]
    require(not kept, f"addresses that did not change: {kept}")
    alive = [address for address in before.values() if answers(address, timeout=1)]
    require(not alive, f"old addresses that still answer: {alive}")
    dead = [address for address in after.values() if not answers(address)]
    require(not dead, f"new addresses that do not answer: {dead}")
    shell.show("tpu_ops", "run", "pod", "--", "hostname")
    names = json.loads(shell.ask("tpu_ops", "run", "pod", "--json", "--", "hostname"))
    hostnames = {row["stdout"].strip() for row in names}
    require(len(hostnames) == POD_WORKERS, f"expected four host names, got {sorted(hostnames)}")
    require(host_keys(shell) == keys, "the known host keys are not the ones from before")
    return "four old addresses refuse, four new ones answer, same host keys, checking on throughout"


def lab_down(shell: Shell) -> str:
    """Remove the lab, and check that nothing of it is left."""
    name = shell.environ["TPU_OPS_LAB"]
    folder = Path(shell.environ["TPU_OPS_PRIVATE_KEY"]).parent
    shell.show("tpu_ops", "lab", "down")
    engine = find_engine().command
    containers = shell.ask(*engine, "ps", "-aq", "--filter", f"label={LABEL}={name}").split()
    networks = shell.ask(*engine, "network", "ls", "-q", "--filter", f"label={LABEL}={name}").split()
    mounts = [entry for entry in Path("/proc/mounts").read_text().splitlines() if str(folder) in entry]
    processes = [
        path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if str(folder) in _command_line(path)
    ]
    left = [*containers, *networks, *mounts, *processes]
    require(not left and not folder.exists(), f"still there: {left or folder}")
    return "no container, network, process or mount is left"


def _command_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


STEPS: tuple[tuple[str, Callable[[Shell], str]], ...] = (
    ("bring the lab up", lab_up),
    ("create two nodes", create_nodes),
    ("list the fleet", inventory),
    ("configure the fleet, twice", configure),
    ("train on four workers", train),
    ("change the addresses", change_addresses),
    ("take the lab down", lab_down),
)


def fail(step: str, text: str) -> NoReturn:
    """End the demo with a message on what failed and how to continue."""
    print(f"\ndemo: step {step!r} failed: {text}", file=sys.stderr)
    print('  look:  eval "$(.venv/bin/tpu_ops lab env)"; .venv/bin/tpu_ops lab status', file=sys.stderr)
    print("  again: make demo continues from what is there; .venv/bin/tpu_ops lab down removes it", file=sys.stderr)
    sys.exit(1)


def duration(seconds: float) -> str:
    """Return a duration as text for users."""
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s" if seconds >= 60 else f"{seconds:.1f} s"


def summary(rows: list[tuple[str, str, float]]) -> list[str]:
    """Return the closing lines: each step with the checked value and its duration, and what to try next."""
    lines = ["", "What ran, and what was checked:"]
    lines += [f"  {name:<27}{duration(seconds):>13}  {value}" for name, value, seconds in rows]
    lines += [
        f"  {'all':<27}{duration(sum(row[2] for row in rows)):>13}",
        "",
        "Try next:",
        '  .venv/bin/tpu_ops lab up && eval "$(.venv/bin/tpu_ops lab env)"   the lab again, by hand',
        "  docs/setup.md                                                 the same on real TPUs",
    ]
    return lines


def write_record(path: Path, shell: Shell) -> None:
    """Write the transcript as a page, without this machine's paths."""
    text = "\n".join(shell.transcript)
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    for place, name in ((str(ROOT), "."), (str(Path.home()), "~")):
        text = text.replace(place, name)
    text = "\n".join(line.rstrip() for line in text.splitlines())
    cores, memory = os.cpu_count(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    path.write_text(
        "# The demo, recorded\n\n"
        "`make demo-record` wrote this page from what `make demo` printed on a machine with "
        f"{cores} cores, {memory:.0f} GB of memory, {system}, Python {platform.python_version()}.\n\n"
        f"```text\n{text.strip()}\n```\n"
    )


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the demo's environment variables, made from the user's; the demo's first step adds those of the lab."""
    # Of the user's settings, keep only those that select the lab.
    kept = ("TPU_OPS_LAB", "TPU_OPS_STATE", "TPU_OPS_ENGINE")
    clean = {
        key: value for key, value in environ.items() if key in kept or not key.startswith(("TPU_OPS_", "ANSIBLE_"))
    }
    return clean | {
        "PATH": f"{BIN}:{clean['PATH']}",
        "PYTHONUNBUFFERED": "1",
        "TPU_OPS_FLEET": str(FLEET),
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_FORCE_COLOR": "false",
    }


def main() -> None:
    """Run all steps and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="write the transcript to this file")
    arguments = parser.parse_args()
    shell = Shell(environment(os.environ))
    rows = []
    for number, (name, step) in enumerate(STEPS, 1):
        shell.say(f"\n=== {number}/{len(STEPS)} {name} ===")
        start = time.monotonic()
        try:
            value = step(shell)
        except StepFailed as exc:
            fail(name, str(exc))
        except KeyboardInterrupt:
            print("\ndemo: interrupted; make demo continues from what is there", file=sys.stderr)
            sys.exit(130)
        rows.append((name, value, time.monotonic() - start))
        shell.say(f"ok: {value} ({duration(rows[-1][2])})")
    for text in summary(rows):
        shell.say(text)
    if arguments.record:
        write_record(arguments.record, shell)
        print(f"\nwrote {arguments.record}")


if __name__ == "__main__":
    main()
