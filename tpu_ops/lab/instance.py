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
#: Seconds to wait for another command that starts or stops the same lab.
LOCK_TIMEOUT = 120.0
PROJECT = "lab"
USER = "tpu"
_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")


@dataclass(frozen=True)
class Endpoints:
    """The endpoints of a running API: gRPC as host:port, REST as URL."""

    grpc: str
    rest: str


@dataclass(frozen=True)
class Instance:
    """One lab on this machine.

    Attributes:
        name: Lower-case letters and digits, at most 16; part of all names of the lab's containers and networks.
        directory: The directory of the instance's files.
    """

    name: str
    directory: Path

    @property
    def state_file(self) -> Path:
        """The API's state, which survives its restart."""
        return self.directory / "api.json"

    @property
    def log_file(self) -> Path:
        """The log of the API process."""
        return self.directory / "api.log"

    @property
    def process_file(self) -> Path:
        """Process id and endpoints of the API process."""
        return self.directory / "process.json"

    @property
    def private_key(self) -> Path:
        """The ssh key for the lab's workers."""
        return self.directory / "ssh_key"

    @property
    def inventory_file(self) -> Path:
        """The static inventory whose group_vars have the settings for workers in containers."""
        return self.directory / "inventory" / "lab.yml"

    @property
    def fleet_file(self) -> Path:
        """A file with the path of the fleet file that was last used with the lab."""
        return self.directory / "fleet"

    def endpoints(self) -> Endpoints | None:
        """Return the endpoints of the running API process, or None if there is none."""
        record = process.read(self.process_file)
        return Endpoints(record.grpc, record.rest) if record and record.serves and record.runs() else None

    def process(self) -> process.Record | None:
        """Return the running API process, even if it does not serve yet or has no record, or None."""
        record = process.read(self.process_file)
        return record if record and record.runs() else process.unrecorded(self.state_file, self.name)


def instance(environ: Mapping[str, str] = os.environ) -> Instance:
    """Return the instance that TPU_OPS_LAB names, by default ``default``.

    Raises:
        UsageError: The name cannot be part of container and network names.
    """
    name = environ.get("TPU_OPS_LAB") or "default"
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a name for a lab",
            where="TPU_OPS_LAB",
            fix="use up to 16 lower-case letters and digits",
        )
    return Instance(name, state_root(environ) / "lab" / name)


def known(environ: Mapping[str, str] = os.environ) -> list[Instance]:
    """Return every instance that has a directory, running or not."""
    folder = state_root(environ) / "lab"
    found = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [Instance(name, folder / name) for name in found if _NAME.fullmatch(name)]


@contextlib.contextmanager
def locked(lab: Instance) -> Iterator[None]:
    """Lock the instance against other commands that start or stop it.

    Raises:
        OpsError: Another command held the lock for too long, or the directory cannot be created.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT
    while (handle := _take_lock(lab)) is None:
        if time.monotonic() > deadline:
            raise OpsError(
                f"another command has been working on lab {lab.name!r} for {LOCK_TIMEOUT:.0f} s",
                where=str(lab.directory / "lock"),
                fix="wait for it, or end it, then run this again",
            )
        time.sleep(0.1)  # polls the lock until the deadline
    with handle:
        yield


def _take_lock(lab: Instance) -> TextIO | None:
    """Return the locked file, or None if another command has the lock or has just removed the whole lab."""
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
            fix="make it writable, or set TPU_OPS_STATE to a directory that is",
        ) from exc
    try:
        if files.take(handle.fileno()) and os.path.samestat(os.fstat(handle.fileno()), path.stat()):
            return handle
    except FileNotFoundError:
        pass
    handle.close()
    return None


def ensure_key(lab: Instance) -> None:
    """Create the instance's ssh key pair if it does not exist.

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
            fix="install an OpenSSH client (`tools/setup.sh tools` does), then run this again",
        ) from exc


def ports_of(lab: Instance, asked: int | None) -> tuple[int, int]:
    """Return the ports for gRPC and REST.

    The default instance has fixed ports, so that a shell's environment stays valid. Other instances use their last
    ports if these are free, else free ones (0).

    Raises:
        UsageError: A fixed port is in use by another process.
    """
    wanted = (asked, asked + 1) if asked else _ports_before(lab)
    for port in wanted:
        if port and not _free(port):
            raise UsageError(
                f"port {port} is in use by another process",
                where=f"127.0.0.1:{port}",
                fix=f"end it (`ss -ltnp 'sport = :{port}'` names it), or choose others: `tpu_ops lab up --port N`",
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
    """Turn write errors into an error that names the instance's directory."""
    try:
        yield
    except BrokenPipeError:  # not an error of the disk: the reader of this command's output has gone
        raise
    except OSError as exc:
        raise OpsError(
            f"cannot write the lab's files: {exc.strerror or exc}",
            where=str(exc.filename or lab.directory),
            fix="free some space or make it writable, then run this again; or set TPU_OPS_STATE to another directory",
        ) from exc


def start_api(lab: Instance, ports: tuple[int, int], *, seconds: float, timeout: float = 180) -> Endpoints:
    """Start the instance's API process in the background; return its endpoints once it serves.

    After an error or an interrupt, no unrecorded process is left.

    Args:
        lab: The instance; the caller holds its lock.
        ports: gRPC and REST port; 0 means a free one.
        seconds: Minimum duration of a long-running operation.
        timeout: Seconds to wait until the process serves; workers are booted after that.

    Raises:
        OpsError: The process ended or did not serve in time (the error quotes its log), or a file cannot be written.
    """
    # The process waits for a line until its record is written. If this command is killed before that, it reads EOF and
    # ends.
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
    """Record the waiting process, let it continue, and return its endpoints once it serves."""
    started = process.start_time(child.pid)
    where = (f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
    process.Record(child.pid, started, *where, serves=False).write(lab.process_file)
    with contextlib.suppress(BrokenPipeError), cast(BinaryIO, child.stdin) as gate:  # its exit code is checked below
        gate.write(b"go\n")
    deadline = time.monotonic() + timeout
    while not (text := ready.read_text()).endswith("\n"):
        code = child.poll()
        if code is not None or time.monotonic() > deadline:
            reason = f"ended with code {code}" if code is not None else f"did not serve within {timeout:.0f} s"
            raise OpsError(
                f"the lab's API {reason}: {_tail(lab.log_file)}",
                where=str(lab.log_file),
                fix="correct what the log names, then run `tpu_ops lab up` again",
            )
        time.sleep(0.05)  # polls for the process's first line until the deadline
    endpoints = Endpoints(**json.loads(text))
    process.Record(child.pid, started, endpoints.grpc, endpoints.rest).write(lab.process_file)
    ready.unlink()
    return endpoints


def answers(lab: Instance, timeout: float = 3) -> bool:
    """Return whether the instance's API answers a request that uses neither the disk nor the container engine."""
    try:
        call(lab, "GET", f"/compute/v1/projects/{PROJECT}", timeout=timeout)
    except CloudError:
        return False
    return True


def stop_api(lab: Instance, timeout: float = 30) -> bool:
    """End the instance's API process, even if it does not serve yet; return whether there was one.

    Raises:
        OpsError: The process did not end, not even after SIGKILL.
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
            # A process that was stopped by a signal handles SIGTERM only after SIGCONT.
            os.kill(found.pid, signal.SIGCONT)
        except ProcessLookupError:
            pass
        except PermissionError as exc:
            raise _cannot_end(lab, found, "it belongs to another user: run this as that user") from exc
        while found.runs():
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)  # polls for the process's end until the deadline
        else:
            return
    raise _cannot_end(lab, found, "see what it waits for in its log, end it, then run this again")


def _cannot_end(lab: Instance, found: process.Record, fix: str) -> OpsError:
    return OpsError(f"the API of lab {lab.name!r} cannot be ended", where=f"process {found.pid}", fix=fix)


def _tail(path: Path, lines: int = 3) -> str:
    try:
        return " / ".join(path.read_text(errors="replace").strip().splitlines()[-lines:]) or "its log is empty"
    except OSError:
        return "it left no log"


def call(lab: Instance, method: str, path: str, body: object = None, timeout: float = 30) -> dict[str, object]:
    """Send a REST request to the instance's API and return the answer.

    Raises:
        CloudError: The API does not run, does not answer, or refuses the request.
    """
    endpoints = lab.endpoints()
    if endpoints is None:
        raise CloudError(f"lab {lab.name!r} is not up", where=str(lab.directory), fix="start it: `tpu_ops lab up`")
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
        where, fix = f"lab {lab.name!r}, {method} {path}", "`tpu_ops lab status` shows its nodes and their states"
        raise CloudError(detail, where=where, fix=fix) from exc
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise CloudError(
            f"the lab's API does not answer: {exc}",
            where=endpoints.rest,
            fix="start it again: `tpu_ops lab up`",
        ) from exc
