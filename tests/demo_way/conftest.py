"""A lab of this test's own, driven by the commands a user types."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tpu_ops.lab.engine import find as find_engine

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv" / "bin"


@dataclass
class Desk:
    """A user's shell in a clone: runs commands with the lab's variables set."""

    environ: dict[str, str]

    def try_(
        self, *argv: str, timeout: float = 600, stdin: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and return how it ended."""
        return subprocess.run(
            argv,
            cwd=ROOT,
            env=self.environ | variables,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )

    def do(self, *argv: str, timeout: float = 600, **variables: str) -> str:
        """Run a command that must succeed and return its standard output."""
        done = self.try_(*argv, timeout=timeout, **variables)
        assert done.returncode == 0, (
            f"{argv} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done.stdout

    def json(self, *argv: str) -> Any:
        """Run a command that must succeed and return the JSON it printed."""
        return json.loads(self.do(*argv))

    def workers(self, node: str | None = None) -> list[dict[str, Any]]:
        """Return the workers that `tpu_ops list` shows, of one node or of all."""
        return [row for row in self.json("tpu_ops", "list", "--json") if node in {None, row["node"]}]

    def engine(self, *argv: str) -> str:
        """Run the container engine's own command, which knows nothing of tpu_ops."""
        return self.do(*find_engine(self.environ).command, *argv)

    def inside(self, container: str, *argv: str) -> str:
        """Run a command inside a worker's container, past ssh and tpu_ops."""
        return self.engine("exec", container, *argv)

    def containers(self) -> dict[str, str]:
        """Return the container name of each worker by its host name, as the lab itself reports it."""
        rows = self.json("tpu_ops", "lab", "status", "--json")["workers"]
        return {f"{row['node']}-w{row['index']}": row["container"] for row in rows}

    def playbook(self, tmp_path: Path, *argv: str) -> dict[str, dict[str, int]]:
        """Run ansible-playbook and return Ansible's own statistics by host."""
        stats = tmp_path / "stats.json"
        self.do(
            "ansible-playbook",
            *argv,
            timeout=1200,
            ANSIBLE_CALLBACK_PLUGINS=str(ROOT / "tools" / "callback_plugins"),
            ANSIBLE_CALLBACKS_ENABLED="stats_file",
            STATS_FILE=str(stats),
        )
        found: dict[str, dict[str, int]] = json.loads(stats.read_text())
        return found


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A shell whose lab is up with a four-worker pod and a single host; taken down at the end whatever happened."""
    folder = tmp_path_factory.mktemp("demo_way")
    # Of a shell that talks to a fleet already, only the choice of the container engine holds.
    engine = os.environ.get("TPU_OPS_ENGINE")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("TPU_OPS_", "ANSIBLE_"))}
    environ |= {"TPU_OPS_ENGINE": engine} if engine else {}
    shell = Desk(environ | {"PATH": f"{BIN}:{environ['PATH']}", "TPU_OPS_LAB": "way", "TPU_OPS_STATE": str(folder)})
    try:
        shell.do("tpu_ops", "lab", "up")
        shell.environ |= shell.json("tpu_ops", "lab", "env", "--json")
        yield shell
    finally:
        shell.try_("tpu_ops", "lab", "down")
