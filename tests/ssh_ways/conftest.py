"""A lab with a worker that the controller reaches and two that it reaches through something else only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.desk import Desk, Lab, lab_up
from tests.support.fleet import ROOT
from tests.support.lab_api import PATIENCE
from tpu_ops.host import build

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


@dataclass
class Person(Desk):
    """The shell of a person with a fleet directory and a home of their own.

    What a command begins with (`entry`) makes this home the person's by the password file, too: that is where ssh
    looks for its configuration. It is empty where this machine does not let a test have a view of its own.

    Attributes:
        folder: Of all that is the person's own.
    """

    folder: Path = Path()

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
    with lab_up("ways", tmp_path_factory.mktemp("ways")) as desk:
        made = Lab(desk)
        kind, blob = Path(desk.environ["TPU_OPS_PRIVATE_KEY"]).with_suffix(".pub").read_text().split()[:2]
        keys = {"ssh-keys": f"tpu:{kind} {blob} tpu"}
        made.create("gate", "v4-8", metadata=keys)
        made.create("inner", "v4-16", metadata=keys, networkConfig={"enableExternalIps": False})
        yield made


@pytest.fixture(scope="module")
def desk_with(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Person]]:
    """Sits a person down at a fleet whose file has these options."""
    desks: list[Person] = []

    def sit(**options: Any) -> Person:
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
        made = Person(lab.desk.environ | own, _entry(folder, home), folder=folder)
        desks.append(made)
        return made

    yield sit
    with contextlib.ExitStack() as left:
        for desk in desks:
            left.callback(shutil.rmtree, desk.environ["XDG_RUNTIME_DIR"], ignore_errors=True)
            left.callback(desk.hang_up)


@pytest.fixture(scope="module")
def launcher(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The launcher on the two inner workers, made without Ansible."""
    program, digest = build.build(tmp_path_factory.mktemp("program"))
    for host in ("inner-w0", "inner-w1"):
        lab.give(program, host, "/root/tpu-host")
        lab.inside(host, "sh", "-c", SETUP, "sh", digest)
