"""Tunnels that processes in the background of this machine keep open: what each of them leads to, and how it is ended.

Each process holds the lock of a file that is named after the port, and has written into it what the tunnel leads to. A
process that was killed holds no lock, so its file counts for nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tpu_ops import files
from tpu_ops.errors import OpsError

#: Seconds that a process has to end after SIGTERM, and to get the lock while another process only looks at it.
_ENDING, _LOOKING = 15.0, 5.0


class Tunnel(NamedTuple):
    """A tunnel that a process in the background keeps open: the port here, the server, its worker, and the process."""

    port: int
    name: str
    host: str
    pid: int


def at(state_dir: Path, port: int) -> Tunnel | None:
    """Return the tunnel in the background at a port; None if there is none."""
    try:
        handle = os.open(_path(state_dir, port), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(handle) as file, contextlib.suppress(ValueError, KeyError, TypeError):
        if not files.take(handle):
            found = json.load(file)
            return Tunnel(port, str(found["name"]), str(found["host"]), int(found["pid"]))
    return None


def leading_to(state_dir: Path, name: str, host: str) -> list[Tunnel]:
    """Return the tunnels in the background that lead to a server on a worker."""
    ports = sorted(int(path.name) for path in _path(state_dir, 0).parent.glob("*") if path.name.isdecimal())
    found = [at(state_dir, port) for port in ports]
    return [one for one in found if one and (one.name, one.host) == (name, host)]


@contextlib.contextmanager
def kept(state_dir: Path, port: int, name: str, host: str) -> Iterator[None]:
    """Record, for the length of a `with` block, that this process keeps a tunnel to a server on a worker open.

    Raises:
        OpsError: The record cannot be written, or another process has a tunnel at the port.
    """
    path = _path(state_dir, port)
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(files.locked(path, _LOOKING))
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps({"name": name, "host": host, "pid": os.getpid()}).encode(), 0)
        except TimeoutError as exc:
            what = "another process of this fleet has a tunnel there"
            raise OpsError(what, where=f"port {port}", fix="name another port as LOCAL") from exc
        except OSError as exc:
            raise files.unwritable(path, exc) from exc
        stack.callback(path.unlink, missing_ok=True)
        yield


def end(state_dir: Path, tunnel: Tunnel) -> None:
    """End the process of a tunnel; return once it has ended.

    Raises:
        OpsError: The process does not end.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(tunnel.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(FileNotFoundError), files.locked(_path(state_dir, tunnel.port), _ENDING):
            pass
    except TimeoutError as exc:
        what = f"the process of the tunnel to {tunnel.name} on {tunnel.host} does not end"
        raise OpsError(what, where=f"port {tunnel.port}", fix=f"end it with `kill -9 {tunnel.pid}`") from exc


def _path(state_dir: Path, port: int) -> Path:
    return state_dir / "tunnels" / str(port)
