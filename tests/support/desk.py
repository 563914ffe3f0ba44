"""People's shells, and labs that the command line starts for them, for tests of real workers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fleet import ROOT
from tests.support.lab_api import PATIENCE, LabApi
from tpu_ops.lab.engine import find as find_engine

BIN = Path(sys.executable).parent
ZONE = "projects/lab/locations/us-central2-b"


def lab_name(purpose: str) -> str:
    """Return the name of a lab instance that only this process of this clone's tests uses on this machine.

    Args:
        purpose: At most ten lower-case letters and digits.
    """
    # pytest-xdist's name of the process, which is the same in each run.
    process = os.environ.get("PYTEST_XDIST_WORKER", "")
    return purpose + hashlib.sha256(f"{ROOT}{process}".encode()).hexdigest()[:6]


def environment() -> dict[str, str]:
    """Return this shell's environment without what points it to a fleet or a lab, with the project's commands.

    The choice of the container engine holds for tests as well.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_OPS_", "ANSIBLE_"))}
    kept |= {name: os.environ[name] for name in ("TPU_OPS_ENGINE",) if name in os.environ}
    return kept | {"PATH": f"{BIN}:{kept['PATH']}"}


@dataclass
class Desk:
    """A person's shell in a clone.

    Attributes:
        environ: Its environment.
        entry: What every command begins with.
        patience: Seconds that a command may take.
    """

    environ: dict[str, str]
    entry: tuple[str, ...] = ()
    patience: float = 180

    def try_(
        self, *argv: str, stdin: str = "", timeout: float | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and return how it ended."""
        return subprocess.run(
            [*self.entry, *argv],
            cwd=ROOT,
            env=self.environ | variables,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout or self.patience,
            check=False,
        )

    def succeed(
        self, *argv: str, stdin: str = "", timeout: float | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that must succeed and return all that it said."""
        done = self.try_(*argv, stdin=stdin, timeout=timeout, **variables)
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, f"{argv} ended with {done.returncode}\n{said}"
        return done

    def do(self, *argv: str, stdin: str = "", timeout: float | None = None, **variables: str) -> str:
        """Run a command that must succeed and return what it printed."""
        return self.succeed(*argv, stdin=stdin, timeout=timeout, **variables).stdout

    def json(self, *argv: str) -> Any:
        """Run a command that must succeed and return the JSON that it printed."""
        return json.loads(self.do(*argv))

    def hang_up(self) -> None:
        """End the connections that are kept open."""
        mux = Path(self.environ["XDG_RUNTIME_DIR"], "tpu_ops", "mux")
        for socket in mux.glob("*"):
            self.try_("ssh", "-F", "none", "-o", f"ControlPath={socket}", "-O", "exit", "any")
        await_no_masters(mux)


def await_no_masters(mux: Path) -> None:
    """Wait until masters that were told to end have done so: each answers before it removes its socket."""
    until = time.monotonic() + 5
    while left := [*mux.glob("*")]:
        assert time.monotonic() < until, left
        time.sleep(0.01)  # polls until the deadline


class Lab(LabApi):
    """A lab that the command line has started.

    Args:
        desk: A shell that is pointed to it.

    Attributes:
        engine: The words that every command of the container engine begins with.
    """

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.rest = desk.environ["TPU_OPS_REST_ENDPOINT"].rstrip("/")
        self.engine = find_engine(desk.environ).command

    def done(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request that begins an operation, wait for its end however long it boots, and return the operation."""
        status, operation = self.call(method, path, body)
        while status == 200 and not operation.get("done"):
            status, operation = self.call("POST", f"v2/{operation['name']}:wait", {"timeout": f"{PATIENCE / 2}s"})
        assert status == 200, operation
        assert "error" not in operation, operation
        return operation

    def restart_node(self, name: str) -> None:
        """Stop a node and start it, as through any other client of the API: all its external addresses are new."""
        for verb in ("stop", "start"):
            self.done("POST", f"v2/{ZONE}/nodes/{name}:{verb}", {})

    def attach_disk(self, name: str) -> None:
        """Attach the data disk `data` to a node. It is blank at first, and stays when the node is deleted."""
        disk = {"sourceDisk": "projects/lab/zones/us-central2-b/disks/data", "mode": "READ_WRITE"}
        self.done("PATCH", f"v2alpha1/{ZONE}/nodes/{name}?updateMask=dataDisks", {"dataDisks": [disk]})

    @functools.cached_property
    def containers(self) -> dict[str, str]:
        """The container of each worker by its host name, as the lab itself reports it when that is first asked."""
        rows = self.desk.json("tpu_ops", "lab", "status", "--json")["workers"]
        return {f"{row['node']}-w{row['index']}": row["container"] for row in rows}

    def inside(self, host: str, *argv: str) -> str:
        """Run a command as root in a worker, past ssh and tpu_ops."""
        return self.desk.do(*self.engine, "exec", self.containers[host], *argv)

    def give(self, file: Path, host: str, path: str) -> None:
        """Put a file into a worker."""
        self.desk.do(*self.engine, "cp", str(file), f"{self.containers[host]}:{path}")


@contextlib.contextmanager
def lab_up(purpose: str, state: Path, *, patience: float = 600, **variables: str) -> Iterator[Desk]:
    """Start a lab for as long as the block lasts, whatever happens in it; yield a shell that is pointed to it.

    Args:
        purpose: What its name begins with (`lab_name`).
        state: Its directory.
        patience: Seconds that a command in the shell may take.
        variables: Further variables of the shell.
    """
    own = {"TPU_OPS_LAB": lab_name(purpose), "TPU_OPS_STATE": str(state)}
    desk = Desk(environment() | own | variables, patience=patience)
    try:
        desk.do("tpu_ops", "lab", "up")
        desk.environ |= desk.json("tpu_ops", "lab", "env", "--json")
        yield desk
    finally:
        desk.try_("tpu_ops", "lab", "down")
