"""A lab of this test's own, driven by the commands a user types."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.desk import Desk, lab_up
from tests.support.fleet import ROOT
from tpu_ops.lab.engine import find as find_engine


@dataclass
class Clone(Desk):
    """A user's shell in a clone, with the lab's variables set."""

    def workers(self, node: str | None = None) -> list[dict[str, Any]]:
        """Return the workers that `tpu_ops list` shows, of one node or of all."""
        return [row for row in self.json("tpu_ops", "list", "--json") if node in {None, row["node"]}]

    def ssh_config(self) -> Path:
        """Return the file of this shell's fleet for plain ssh; another fleet of the same user has a file of its own."""
        return Path(self.json("tpu_ops", "ssh-config", "--json")["ssh_config"])

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

    @contextlib.contextmanager
    def begun(self, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command in a process group of its own, which is killed at the end of the block."""
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=self.environ,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

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
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """A shell whose lab is up; taken down at the end whatever happened."""
    with lab_up("way", tmp_path_factory.mktemp("demo_way")) as shell:
        yield Clone(shell.environ, patience=600)
