"""A lab with a worker that the controller reaches and two that it reaches through something else only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.fleet import ROOT
from tests.support.lab_api import PATIENCE, LabApi
from tpu_ops.host import build
from tpu_ops.lab.engine import find as find_engine

BIN = Path(sys.executable).parent
ZONE = "projects/lab/locations/us-central2-b"

#: What the roles launcher and users do, as far as a run needs it. $1 is the program's digest.
SETUP = r"""
set -eu
install -D -m 0755 /root/tpu-host "/usr/local/lib/tpu_ops/$1/tpu-host"
ln -sf "/usr/local/lib/tpu_ops/$1/tpu-host" /usr/local/sbin/tpu-host
mkdir -p /etc/tpu_ops
echo '{"environment_files": ["/etc/tpu-lab/environment"]}' >/etc/tpu_ops/launcher.json
groupadd --system tpu-run
gpasswd --add tpu tpu-run
"""


class Lab(LabApi):
    """A lab that the command line has started.

    Attributes:
        containers: Worker -> its container.
        environ: What points a shell to it.
        engine: The words that every command of the container engine begins with.
    """

    def __init__(self, rest: str) -> None:
        self.rest = rest
        self.containers: dict[str, str] = {}
        self.environ: dict[str, str] = {}
        self.engine = find_engine(os.environ).command

    def inside(self, host: str, *argv: str) -> str:
        """Run a command as root in a worker, past ssh and tpu_ops."""
        command = [*self.engine, "exec", self.containers[host], *argv]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=180).stdout

    def give(self, file: Path, host: str, path: str) -> None:
        """Put a file into a worker."""
        subprocess.run([*self.engine, "cp", str(file), f"{self.containers[host]}:{path}"], check=True, timeout=60)


@dataclass(frozen=True)
class Desk:
    """A person's shell, with a fleet directory and a home of its own.

    Attributes:
        folder: Of all that is the person's own.
        environ: The environment.
        entry: What a command begins with so that this home is the person's by the password file, too: that is where
            ssh looks for its configuration. Empty where this machine does not let a test have a view of its own.
    """

    folder: Path
    environ: dict[str, str]
    entry: tuple[str, ...]

    @property
    def home(self) -> Path:
        """The person's home."""
        return self.folder / "home"

    @property
    def own_config(self) -> Path:
        """The person's own ssh config."""
        return self.home / ".ssh" / "config"

    def file_option(self, word: str = "-F") -> list[str]:
        """Return the option that names the person's own ssh config, where it is not found by itself."""
        return [] if self.entry else [word, str(self.own_config)]

    def try_(self, *argv: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command and return how it ended."""
        return subprocess.run(
            [*self.entry, *argv],
            cwd=ROOT,
            env=self.environ | variables,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def do(self, *argv: str, stdin: str = "", **variables: str) -> str:
        """Run a command that must succeed and return what it printed."""
        done = self.try_(*argv, stdin=stdin, **variables)
        assert done.returncode == 0, f"{argv} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *argv: str) -> Any:
        """Run a command that must succeed and return the JSON that it printed."""
        return json.loads(self.do(*argv))

    def hang_up(self) -> None:
        """End the connections that are kept open."""
        for socket in Path(self.environ["XDG_RUNTIME_DIR"], "tpu_ops", "mux").glob("*"):
            self.try_("ssh", "-F", "none", "-o", f"ControlPath={socket}", "-O", "exit", "any")


def _entry(folder: Path, home: Path) -> tuple[str, ...]:
    """Return what a command begins with to see a password file in which this user's home is this one."""
    text = Path("/etc/passwd").read_text().splitlines()
    lines = [line.split(":") for line in text]
    changed = [":".join([*line[:5], str(home), *line[6:]]) if line[2:3] == ["0"] else ":".join(line) for line in lines]
    file = folder / "passwd"
    file.write_text("\n".join(changed) + "\n")
    file.chmod(0o644)
    script = 'mount --bind "$0" /etc/passwd && exec "$@"'
    for options in (["-m"], ["-r", "-m"]):
        entry = ("unshare", *options, "sh", "-c", script, str(file))
        try:
            if subprocess.run([*entry, "true"], capture_output=True, check=False, timeout=PATIENCE).returncode == 0:
                return entry
        except OSError:
            break
    return ()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab with `gate`, which has an external address, and `inner`, two workers without any."""
    folder = tmp_path_factory.mktemp("ways")
    environ = _kept() | {"TPU_OPS_LAB": "ways", "TPU_OPS_STATE": str(folder)}

    def tpu_ops(*argv: str) -> str:
        command = [str(BIN / "tpu_ops"), *argv]
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    try:
        tpu_ops("lab", "up")
        environ |= json.loads(tpu_ops("lab", "env", "--json"))
        made = Lab(environ["TPU_OPS_REST_ENDPOINT"])
        made.environ = environ
        kind, blob = Path(environ["TPU_OPS_PRIVATE_KEY"]).with_suffix(".pub").read_text().split()[:2]
        body = {"runtimeVersion": "tpu-ubuntu2204-base", "metadata": {"ssh-keys": f"tpu:{kind} {blob} tpu"}}
        inside = body | {"acceleratorType": "v4-16", "networkConfig": {"enableExternalIps": False}}
        for name, node in (("gate", body | {"acceleratorType": "v4-8"}), ("inner", inside)):
            operation = made.call("POST", f"v2/{ZONE}/nodes?nodeId={name}", node)[1]
            while not operation.get("done"):
                operation = made.call("POST", f"v2/{operation['name']}:wait", {"timeout": "10s"})[1]
            assert "error" not in operation, operation
        rows = json.loads(tpu_ops("lab", "status", "--json"))["workers"]
        made.containers = {f"{row['node']}-w{row['index']}": row["container"] for row in rows}
        yield made
    finally:
        subprocess.run([str(BIN / "tpu_ops"), "lab", "down"], env=environ, cwd=ROOT, check=False, timeout=600)


def _kept() -> dict[str, str]:
    """Return this shell's environment without what points it to a fleet or a lab."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_OPS_", "ANSIBLE_"))}
    kept |= {name: os.environ[name] for name in ("TPU_OPS_ENGINE",) if name in os.environ}
    return kept | {"PATH": f"{BIN}:{kept['PATH']}"}


@pytest.fixture(scope="module")
def desk_with(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Desk]]:
    """Sits a person down at a fleet whose file has these options."""
    desks: list[Desk] = []

    def sit(**options: Any) -> Desk:
        folder = tmp_path_factory.mktemp("desk")
        (folder / "fleet" / "inventory").mkdir(parents=True)
        file = folder / "fleet" / "inventory" / "tpu_vm.yml"
        file.write_text(yaml.safe_dump({"plugin": "tpu_vm"} | options))
        home = folder / "home"
        home.mkdir()
        # Sockets have short names; one of its own, so that no connection of another desk is used.
        run = Path("/tmp") / f"tpu-ops-ways-{os.getpid()}-{len(desks)}"
        own = {
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(run),
            "TPU_OPS_FLEET": str(folder / "fleet"),
            "TPU_OPS_STATE": str(folder / "state"),
            "ANSIBLE_INVENTORY": str(file),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        }
        made = Desk(folder, lab.environ | own, _entry(folder, home))
        desks.append(made)
        return made

    yield sit
    for desk in desks:
        desk.hang_up()
        shutil.rmtree(desk.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


@pytest.fixture(scope="module")
def launcher(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The launcher on the two inner workers, made without Ansible."""
    program, digest = build.build(tmp_path_factory.mktemp("program"))
    for host in ("inner-w0", "inner-w1"):
        lab.give(program, host, "/root/tpu-host")
        lab.inside(host, "sh", "-c", SETUP, "sh", digest)
