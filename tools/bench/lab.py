"""A lab for one benchmark only, and the environment of a shell that uses it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tools.bench.measure import BIN, ROOT
from tpu_ops.errors import OpsError

#: Each worker of v4 has four chips with two cores each (tpu_ops.cloud.accelerators).
CORES = 8


class Lab:
    """A lab for one benchmark, and the environment of a shell that uses the lab.

    Args:
        root: A directory for its state.

    Attributes:
        environ: The shell's environment.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        kept = ("PATH", "HOME", "LANG", "DOCKER_HOST", "TPU_OPS_ENGINE", "SSL_CERT_FILE")
        self.environ = {name: os.environ[name] for name in kept if name in os.environ}
        self.environ["PATH"] = f"{BIN}:{self.environ['PATH']}"
        self.environ |= {"TPU_OPS_LAB": f"bench{os.getpid() % 100000}", "TPU_OPS_STATE": str(root / "state")}

    def do(self, *argv: str) -> str:
        """Run a command and return its output.

        Raises:
            OpsError: The command failed.
        """
        done = subprocess.run(argv, cwd=ROOT, env=self.environ, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stdout + done.stderr)[-1000:]  # Ansible prints its errors to standard output.
            raise OpsError(f"{' '.join(argv)} ended with {done.returncode}\n{said}")
        return done.stdout

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Keep the lab running for the duration of the block.

        Raises:
            OpsError: The lab does not start.
        """
        try:
            self.do("tpu_ops", "lab", "up")
            self.environ |= json.loads(self.do("tpu_ops", "lab", "env", "--json"))
            yield
        finally:
            self.do("tpu_ops", "lab", "down")
