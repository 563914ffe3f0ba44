"""A fleet directory whose API is a lab API process, shared by many tests: each has projects of its own."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.lab_api import LabApi
from tests.support.nodes import key
from tpu_ops import config
from tpu_ops.cloud.node import Worker
from tpu_ops.config import Settings

ROOT = Path(__file__).resolve().parents[2]
ZONE = "us-central2-b"

#: Projects that the API serves; a test takes a pair of them, and one process may run all tests.
PAIRS = 2000
PROJECTS = ",".join(f"lab{pair},other{pair}" for pair in range(PAIRS))
_pairs = itertools.count()


@functools.cache
def _key() -> dict[str, bytes]:
    """Return a person's key and its public half, as files by their names; made once for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/id_ed25519"], check=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


class FleetDir:
    """A fleet directory, and the two projects of its API that belong to it.

    Attributes:
        api: Its API.
        path: The directory.
        project: The project that its file names.
        second: Another project.
        private_key: The person's key; its public half lies beside it.
    """

    def __init__(self, api: LabApi, root: Path) -> None:
        pair = next(_pairs)
        assert pair < PAIRS, "more tests than projects"
        self.api = api
        self.project, self.second = f"lab{pair}", f"other{pair}"
        self.path = root / "fleet"
        self.private_key = root / "home" / ".ssh" / "id_ed25519"
        self.private_key.parent.mkdir(parents=True)
        for name, content in _key().items():
            (self.private_key.parent / name).write_bytes(content)
            (self.private_key.parent / name).chmod(0o600)
        (self.path / "inventory").mkdir(parents=True)
        self.write()

    @property
    def file(self) -> Path:
        """The fleet's file."""
        return self.path / "inventory" / "tpu_vm.yml"

    def write(self, **options: Any) -> None:
        """Write the fleet's file; options replace the usual ones."""
        usual = {"plugin": "tpu_vm", "projects": [self.project], "user": "ada", "endpoint": self.api.grpc}
        self.file.write_text(yaml.safe_dump(usual | options))

    def settings(self) -> Settings:
        """Return the fleet's settings, as in its directory."""
        return config.load_file(self.file)

    def location(self, zone: str = ZONE, project: str = "") -> str:
        """Return the resource name of a zone of the fleet's project or another."""
        return f"projects/{project or self.project}/locations/{zone}"

    def create(
        self, name: str, accelerator_type: str = "v4-8", *, zone: str = ZONE, project: str = "", **fields: Any
    ) -> Any:
        """Create a node and return it when it is READY."""
        return self.api.create(name, accelerator_type, location=self.location(zone, project), **fields)

    def act(self, verb: str, name: str, zone: str = ZONE) -> None:
        """Stop, start or delete a node and wait until that is done."""
        path = f"v2/{self.location(zone)}/nodes/{name}"
        done = self.api.done("DELETE", path) if verb == "delete" else self.api.done("POST", f"{path}:{verb}", {})
        assert "error" not in done, done

    def ansible(self, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run one of Ansible's commands on the fleet, with the project's own ansible.cfg."""
        command = [str(Path(sys.executable).parent / argv[0]), "-i", str(self.file), *argv[1:]]
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture(scope="session")
def fleet_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabApi]:
    """One lab API process for all tests that have projects of their own."""
    api = LabApi(tmp_path_factory.mktemp("api") / "state.json", seconds=0, projects=PROJECTS)
    api.start()
    yield api
    api.close()


def fleet_dir(api: LabApi, root: Path, monkeypatch: pytest.MonkeyPatch) -> FleetDir:
    """Return a fleet directory over an API, below a directory that is the home as well, and work in it."""
    made = FleetDir(api, root)
    monkeypatch.setenv("HOME", str(root / "home"))
    for name in ("TPU_OPS_USER", "TPU_OPS_PRIVATE_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(made.path)
    return made


@pytest.fixture
def fleet(fleet_api: LabApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetDir:
    """A fleet directory over projects without nodes, with a home of its own."""
    return fleet_dir(fleet_api, tmp_path, monkeypatch)


@pytest.fixture
def slow_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetDir]:
    """The same over an API of its own, whose operations take longer than a command does on a busy machine."""
    api = LabApi(tmp_path / "api" / "state.json", seconds=2.5, projects=PROJECTS)
    api.start()
    yield fleet_dir(api, tmp_path, monkeypatch)
    api.close()


#: Plays ssh: says which options it got, and notes the host key `$PLAY/ALIAS` of the asked worker as ssh does.
STAND_IN = r"""#!/bin/sh
echo "$*" >>"$PLAY/calls"
alias= file=
for word; do
    case "$word" in
    HostKeyAlias=*) alias="${word#*=}" ;;
    UserKnownHostsFile=*) [ -n "$file" ] || file="${word#*=}" ;;
    esac
done
if [ -e "$PLAY/$alias" ]; then
    echo "$alias $(cat "$PLAY/$alias")" >"$file"
    echo "ada@host: Permission denied (publickey)." >&2
else
    echo "ssh: connect to host $alias port 22: Connection refused" >&2
fi
exit 255
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the host keys of the workers that answer, by alias."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(STAND_IN)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "play").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAY", str(tmp_path / "play"))
    return tmp_path / "play"


def answering(play: Path, worker: Worker, blob: str = "") -> None:
    """Have a worker answer with a host key."""
    (play / worker.host_key_alias).write_text(f"ssh-ed25519 {blob or key(worker.host)}")


def answering_as_known(play: Path, known_hosts: Path) -> None:
    """Have all workers answer with the ed25519 keys that are known of them."""
    for line in known_hosts.read_text().splitlines():
        alias, kind, blob, *_ = [*line.split(), "", "", ""]
        if kind == "ssh-ed25519":
            (play / alias).write_text(f"{kind} {blob}")
