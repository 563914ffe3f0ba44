"""One instance of the lab on this machine: its files, and the start and end of its API process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from tpu_ops import files
from tpu_ops.errors import CloudError, OpsError, UsageError
from tpu_ops.files import state_root
from tpu_ops.lab import process

#: gRPC and REST port of the instance ``default``.
DEFAULT_PORTS = (18470, 18471)
#: Maximum number of seconds to wait until another command has started or stopped the same lab.
LOCK_TIMEOUT = 120.0
PROJECT = "lab"
USER = "tpu"
_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")


@dataclass(frozen=True)
class Endpoints:
    """The endpoints of a lab's running API: gRPC as host:port, REST as URL."""

    grpc: str
    rest: str


@dataclass(frozen=True)
class Instance:
    """One lab on this machine.

    Attributes:
        name: At most 16 lower-case letters and digits; part of the names of the lab's containers and networks.
        directory: The directory of the lab's files.
    """

    name: str
    directory: Path

    @property
    def state_file(self) -> Path:
        """The file with the API's state, which is kept when the API is restarted."""
        return self.directory / "api.json"

    @property
    def log_file(self) -> Path:
        """The log of the API process."""
        return self.directory / "api.log"

    @property
    def process_file(self) -> Path:
        """The file with the process id and the endpoints of the API process."""
        return self.directory / "process.json"

    @property
    def private_key(self) -> Path:
        """The private ssh key for logging in to the lab's workers."""
        return self.directory / "ssh_key"

    @property
    def inventory_file(self) -> Path:
        """The static inventory whose group_vars have the settings for the lab's workers."""
        return self.directory / "inventory" / "lab.yml"

    @property
    def fleet_file(self) -> Path:
        """The file that stores the path of the fleet's file that was last used with the lab."""
        return self.directory / "fleet"

    def endpoints(self) -> Endpoints | None:
        """Return the endpoints of the API process, or None if no API process serves."""
        record = process.read(self.process_file)
        return Endpoints(record.grpc, record.rest) if record and record.serves and record.runs() else None

    def process(self) -> process.Record | None:
        """Return the running API process, even if it does not serve yet or has no record; None if no process runs."""
        record = process.read(self.process_file)
        return record if record and record.runs() else process.unrecorded(self.state_file, self.name)


def instance(environ: Mapping[str, str] = os.environ) -> Instance:
    """Return the lab that TPU_OPS_LAB names; if this variable is not set, the lab ``default``.

    Raises:
        UsageError: The name cannot be part of container and network names.
    """
    name = environ.get("TPU_OPS_LAB") or "default"
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a name for a lab",
            where="TPU_OPS_LAB",
            fix="use up to 16 lower-case letters and digits, beginning with a letter",
        )
    return Instance(name, state_root(environ) / "lab" / name)


def known(environ: Mapping[str, str] = os.environ) -> list[Instance]:
    """Return every lab that has a directory on this machine, running or not."""
    folder = state_root(environ) / "lab"
    found = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [Instance(name, folder / name) for name in found if _NAME.fullmatch(name)]


@contextlib.contextmanager
def locked(lab: Instance) -> Iterator[None]:
    """Lock the lab against other commands that start or stop the lab.

    Raises:
        OpsError: Another command held the lock for too long, or the directory cannot be created.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT
    while (handle := _take_lock(lab)) is None:
        if time.monotonic() > deadline:
            raise OpsError(
                f"another command has been working on lab {lab.name!r} for {LOCK_TIMEOUT:.0f} s",
                where=str(lab.directory / "lock"),
                fix="wait until the other command has ended, or end it, then run this command again",
            )
        time.sleep(0.1)  # polls the lock until the deadline
    with handle:
        yield


def _take_lock(lab: Instance) -> TextIO | None:
    """Return the locked lock file, or None if another command has the lock or has just removed the whole lab."""
    path = lab.directory / "lock"
    try:
        lab.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = path.open("w")
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) and lab.directory.parent.is_dir():
            return None
        raise OpsError(
            f"cannot write the lab's files: {exc.strerror}",
            where=str(lab.directory),
            fix="make the directory writable, or set TPU_OPS_STATE to a writable directory",
        ) from exc
    try:
        if files.take(handle.fileno()) and os.path.samestat(os.fstat(handle.fileno()), path.stat()):
            return handle
    except FileNotFoundError:
        pass
    handle.close()
    return None


def ensure_key(lab: Instance) -> None:
    """Create the lab's ssh key pair if it does not exist.

    Raises:
        OpsError: ssh-keygen is missing or failed.
    """
    if lab.private_key.exists() and lab.private_key.with_suffix(".pub").exists():
        return
    lab.private_key.unlink(missing_ok=True)
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab-{lab.name}", "-f", str(lab.private_key)]
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.SubprocessError) as exc:
        raise OpsError(
            f"the lab's ssh key could not be made: {exc}",
            where=str(lab.private_key),
            fix="install an OpenSSH client with `tools/setup.sh tools`, then run this command again",
        ) from exc


def ports_of(lab: Instance, asked: int | None) -> tuple[int, int]:
    """Return the ports for gRPC and REST; 0 means any free port.

    The lab ``default`` always has the same ports, so that the environment of open shells stays valid. Another lab uses
    its last ports again if they are free.

    Args:
        lab: The lab.
        asked: The gRPC port that the user asked for, or None; the REST port is the next port.

    Raises:
        UsageError: The port that the user asked for, or a port of the lab ``default``, is in use.
    """
    wanted = (asked, asked + 1) if asked else _ports_before(lab)
    for port in wanted:
        if port and not _free(port):
            raise UsageError(
                f"port {port} is in use by another process",
                where=f"127.0.0.1:{port}",
                fix=f"end that process (`ss -ltnp 'sport = :{port}'` shows it), or choose other ports: "
                "`tpu_ops lab up --port N`",
            )
    return wanted


def _ports_before(lab: Instance) -> tuple[int, int]:
    record = process.read(lab.process_file)
    if record and all(record.ports) and (lab.name == "default" or all(map(_free, record.ports))):
        return record.ports
    return DEFAULT_PORTS if lab.name == "default" else (0, 0)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def writing(lab: Instance) -> Iterator[None]:
    """Turn an OSError in the block into an OpsError that names the file or the lab's directory."""
    try:
        yield
    except BrokenPipeError:  # no file of the lab is involved: the reader of this command's output has closed the pipe
        raise
    except OSError as exc:
        raise OpsError(
            f"cannot write the lab's files: {exc.strerror or exc}",
            where=str(exc.filename or lab.directory),
            fix="free disk space, make the file writable, or set TPU_OPS_STATE to another directory; run it again",
        ) from exc


def start_api(lab: Instance, ports: tuple[int, int], *, seconds: float, timeout: float = 180) -> Endpoints:
    """Start the lab's API process in the background; return the endpoints once the process serves.

    After an error or an interrupt, the process is ended.

    Args:
        lab: The lab; the caller holds its lock.
        ports: The gRPC port and the REST port; 0 means any free port.
        seconds: Minimum duration of a long-running operation.
        timeout: Seconds to wait until the process serves. The process boots workers only after that.

    Raises:
        OpsError: The process ended or did not serve in time (the error quotes its log), or a file cannot be written.
    """
    # The shell waits for a line on its input before it executes the API. The line is sent once the process is recorded.
    # If this command is killed earlier, the shell reads EOF and ends.
    command = ["/bin/sh", "-c", 'read -r go && exec "$@" </dev/null', "sh", sys.executable, "-m", process.MODULE]
    command += ["--state", str(lab.state_file), "--seconds", str(seconds), "--containers", lab.name]
    command += ["--grpc-port", str(ports[0]), "--rest-port", str(ports[1])]
    ready = lab.directory / "ready.json"
    with writing(lab):
        with ready.open("w") as stdout, lab.log_file.open("a") as stderr:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, start_new_session=True, cwd="/"
            )
        try:
            return _serving(lab, child, ready, ports, timeout)
        except BaseException:
            _end(lab, process.Record(child.pid, process.start_time(child.pid), "", ""), timeout=30)
            child.wait()
            raise


def _serving(
    lab: Instance, child: subprocess.Popen[bytes], ready: Path, ports: tuple[int, int], timeout: float
) -> Endpoints:
    """Record the waiting API process, let it continue, and return its endpoints once it serves."""
    started = process.start_time(child.pid)
    where = (f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
    process.Record(child.pid, started, *where, serves=False).write(lab.process_file)
    # If the process has already ended, the loop below reports its exit code.
    with contextlib.suppress(BrokenPipeError), cast(BinaryIO, child.stdin) as gate:
        gate.write(b"go\n")
    deadline = time.monotonic() + timeout
    while not (text := ready.read_text()).endswith("\n"):
        code = child.poll()
        if code is not None or time.monotonic() > deadline:
            reason = f"ended with code {code}" if code is not None else f"did not serve within {timeout:.0f} s"
            raise OpsError(
                f"the lab's API {reason}: {_tail(lab.log_file)}",
                where=str(lab.log_file),
                fix="correct the error in the log, then run `tpu_ops lab up` again",
            )
        time.sleep(0.05)  # polls for the process's first line until the deadline
    endpoints = Endpoints(**json.loads(text))
    process.Record(child.pid, started, endpoints.grpc, endpoints.rest).write(lab.process_file)
    ready.unlink()
    return endpoints


def answers(lab: Instance, timeout: float = 3) -> bool:
    """Return whether the lab's API answers a request that uses neither the disk nor the container engine."""
    try:
        call(lab, "GET", f"/compute/v1/projects/{PROJECT}", timeout=timeout)
    except CloudError:
        return False
    return True


def stop_api(lab: Instance, timeout: float = 30) -> bool:
    """End the lab's API process, even if it does not serve yet; return whether a process was running.

    Raises:
        OpsError: The process did not end, even after SIGKILL.
    """
    ended = False
    while (found := lab.process()) is not None:
        _end(lab, found, timeout)
        ended = True
    return ended


def _end(lab: Instance, found: process.Record, timeout: float) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + timeout
        try:
            os.kill(found.pid, number)
            # A process that a signal such as SIGSTOP has stopped handles SIGTERM only after SIGCONT.
            os.kill(found.pid, signal.SIGCONT)
        except ProcessLookupError:
            pass
        except PermissionError as exc:
            raise _cannot_end(lab, found, "the process belongs to another user: run this command as that user") from exc
        while found.runs():
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)  # polls for the process's end until the deadline
        else:
            return
    raise _cannot_end(lab, found, "find the reason in the API's log, end the process, then run this command again")


def _cannot_end(lab: Instance, found: process.Record, fix: str) -> OpsError:
    return OpsError(f"the API of lab {lab.name!r} cannot be ended", where=f"process {found.pid}", fix=fix)


def _tail(path: Path, lines: int = 3) -> str:
    try:
        return " / ".join(path.read_text(errors="replace").strip().splitlines()[-lines:]) or "the log is empty"
    except OSError:
        return "there is no log"


def call(lab: Instance, method: str, path: str, body: object = None, timeout: float = 30) -> dict[str, object]:
    """Send a REST request to the lab's API and return the JSON of the answer.

    Raises:
        CloudError: The API does not run, does not answer, or refuses the request.
    """
    endpoints = lab.endpoints()
    if endpoints is None:
        raise CloudError(f"lab {lab.name!r} is not up", where=str(lab.directory), fix="start the lab: `tpu_ops lab up`")
    request = urllib.request.Request(  # noqa: S310 - the URL is this machine's own, http on loopback
        endpoints.rest + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as exc:
        detail = exc.read().decode(errors="replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            detail = json.loads(detail)["error"]["message"]
        where, fix = f"lab {lab.name!r}, {method} {path}", "`tpu_ops lab status` shows the lab's nodes and their states"
        raise CloudError(detail, where=where, fix=fix) from exc
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise CloudError(
            f"the lab's API does not answer: {exc}",
            where=endpoints.rest,
            fix="start the API again: `tpu_ops lab up`",
        ) from exc
