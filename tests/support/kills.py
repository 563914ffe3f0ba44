"""Commands that end with SIGKILL at one of their requests to an API.

`python -m tests.support.kills` imports what commands need and then forks a process for each command, since these
imports take longer than most commands.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tpu_ops.cli.commands import COMMANDS

#: The file to which a command writes the name of each request.
STEPS = "TPU_OPS_TEST_STEPS"
KILLED = "killed"


class Ended(NamedTuple):
    """How a command ended.

    Attributes:
        code: Its exit code; negative after a signal.
        output: Standard output and errors.
        steps: The names of its requests, in order.
        killed: The request at which SIGKILL ended it, if any.
    """

    code: int
    output: str
    steps: tuple[str, ...]
    killed: str


class Commands:
    """Runs commands in processes of their own.

    Args:
        folder: A directory for output.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        pipe = subprocess.PIPE
        argv = (sys.executable, "-m", "tests.support.kills")
        self._server = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True)

    def run(self, argv: Sequence[str], environ: Mapping[str, str], *, at: int = 0, sent: bool = False) -> Ended:
        """Run a command of tpu_ops in this directory.

        Args:
            argv: Its arguments.
            environ: Its environment.
            at: Number of the request, from 1, at which SIGKILL ends it; 0 for none.
            sent: Whether SIGKILL comes after the API's answer instead of before the request. Only requests that change
                something are then counted.
        """
        assert self._server.stdin
        assert self._server.stdout
        output, steps = self._folder / "output", self._folder / "steps"
        steps.write_text("")
        order = {"argv": argv, "environ": {**environ, STEPS: str(steps)}, "at": at, "sent": sent}
        print(json.dumps({**order, "folder": str(Path.cwd()), "output": str(output)}), file=self._server.stdin)
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        words = steps.read_text().split()
        # The request at which the command was killed is written once more, after this word.
        killed = words[words.index(KILLED) + 1] if KILLED in words else ""
        return Ended(code, output.read_text(), tuple(words), killed)

    def close(self) -> None:
        """End the process that runs the commands."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.close()
        self._server.wait(10)
        self._server.stdout.close()


def changing(step: str) -> bool:
    """Return whether a request changes something."""
    return not step.startswith(("Get", "List"))


def _watch(at: int, *, sent: bool) -> None:
    """Write down each request of this process to an API, and kill the process at one of them."""
    from google.cloud.storage._http import Connection

    from tpu_ops.cloud.client import Tpu
    from tpu_ops.cloud.compute import Compute

    lock, count = threading.Lock(), 0
    file = os.open(os.environ[STEPS], os.O_WRONLY | os.O_APPEND)

    def end(name: str) -> None:
        os.write(file, f"{KILLED} {name}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def step(name: str, call: Callable[[], Any]) -> Any:
        nonlocal count
        with lock:
            count += changing(name) or not sent
            here = count == at and (changing(name) or not sent)
            os.write(file, f"{name}\n".encode())
            if here and not sent:
                end(name)
        answer = call()
        if here:
            end(name)
        return answer

    tpu, compute, storage = Tpu.call, Compute.call, Connection.api_request

    def tpu_call(self: Tpu, method: str, *args: Any, **options: Any) -> Any:
        name = "".join(word.title() for word in method.split("_"))
        return step(name, lambda: tpu(self, method, *args, **options))

    def compute_call(self: Compute, verb: str, path: str, *args: Any, **options: Any) -> Any:
        words = [word for word in path.split("/") if word.islower() and word.isalpha()]
        what = next((word for word in reversed(words) if word in ("disks", "firewalls", "operations")), "projects")
        return step(f"{verb.title()}:{what}", lambda: compute(self, verb, path, *args, **options))

    def storage_request(self: Connection, *args: Any, **options: Any) -> Any:
        verb = str(options.get("method", args[0] if args else "GET")).title()
        return step(f"{verb}:buckets", lambda: storage(self, *args, **options))

    Tpu.call = tpu_call  # type: ignore[method-assign]
    Compute.call = compute_call  # type: ignore[method-assign]
    Connection.api_request = storage_request


def _command(order: Mapping[str, Any]) -> int:
    """Be the command in this process."""
    from tpu_ops.cli.main import main

    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["folder"])
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    _watch(order["at"], sent=order["sent"])
    return main(order["argv"])


def _serve() -> None:
    """Run the commands that standard input names, and print their exit codes."""
    for module in ("google.cloud.storage", "google.cloud.tpu_v2"):
        importlib.import_module(module)
    for module, _ in COMMANDS.values():
        importlib.import_module(f"tpu_ops.cli.{module}")
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if not child:
            code = 70
            try:
                code = _command(json.loads(line))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
