"""Tunnels: a port on this machine that an ssh process forwards to a port or a socket of a worker."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tpu_ops.errors import UnreachableError, UsageError
from tpu_ops.ssh import envelope, openssh

_HERE = "127.0.0.1"
#: Seconds between two checks of a tunnel, and until it has to be open.
_POLL, _LIMIT = 0.1, 30.0
#: Linux's tables of connections, and the addresses in them at which ``localhost`` leads to a program.
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCALHOST = ("00000000", "0100007F", "0" * 32, "0" * 24 + "01000000", "0000000000000000FFFF00000100007F")
#: The state of a socket that accepts connections, in these tables.
_LISTENING = "0A"


class End(NamedTuple):
    """The end of a tunnel: ssh's exit code, which is 0 only if the watch exited with 0, and ssh's reason in words."""

    code: int
    reason: str


def require_free(port: int, tables: Sequence[Path] = _TABLES) -> None:
    """Refuse a port of this machine that is in use, or that this user may not use.

    Raises:
        UsageError: The port cannot be used, or ``localhost`` would lead to another user's program there.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HERE, port))
        except OSError as exc:
            raise _unusable(port, os.strerror(exc.errno) if exc.errno else str(exc)) from exc
    if _is_others(port, tables):
        raise _unusable(port, "another user of this machine listens there")


def _unusable(port: int, reason: str) -> UsageError:
    fix = f"name another one as LOCAL, as in {port + 10000 if port < 50000 else port - 10000}"
    return UsageError(f"port {port} cannot be used here: {reason}", where="LOCAL", fix=fix)


def listens(port: int, tables: Sequence[Path] = _TABLES) -> bool:
    """Return whether a program of this user accepts connections at a port of this machine.

    Another user's program there would get what is meant for the worker, such as the token of a notebook server.
    """
    with contextlib.suppress(OSError), socket.create_connection((_HERE, port), timeout=_POLL):
        return not _is_others(port, tables)
    return False


def _is_others(port: int, tables: Sequence[Path] = _TABLES) -> bool:
    """Return whether another user's program listens at a port of ``localhost``; false where Linux's tables are not."""
    for table in tables:
        with contextlib.suppress(OSError):
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, _, _, _, uid, *_ = line.split()
                address, _, number = local.rpartition(":")
                if (
                    state == _LISTENING
                    and int(number, 16) == port
                    and address in _LOCALHOST
                    and int(uid) != os.getuid()
                ):
                    return True
    return False


@contextlib.contextmanager
def opened(
    ssh_config: Path, host: str, remote: str, local: int, watch: Sequence[str] = ()
) -> Iterator[Callable[[], End]]:
    """Run ssh with a tunnel for the length of a `with` block, once the tunnel is open.

    The block gets a function that waits for the end of ssh.

    Args:
        ssh_config: The fleet's ssh configuration.
        host: The worker.
        remote: ``host:port`` as the worker resolves it, or the path of a socket on the worker.
        local: The port on this machine.
        watch: A command for the worker. The tunnel ends when the command ends; its input ends when the tunnel does.

    Raises:
        UnreachableError: ssh ended before the tunnel was open.
        UsageError: Another user's program listens at the port here.
    """
    argv = [
        *("ssh", "-F", str(ssh_config), "-o", "ControlPath=none", "-o", "BatchMode=yes"),
        *("-o", "ExitOnForwardFailure=yes", "-L", f"{_HERE}:{local}:{remote}"),
        *((host, "--", envelope.joined(watch)) if watch else ("-N", host)),
    ]
    # A file, since nobody reads a pipe while the tunnel is open.
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if watch else subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if watch else None,
                stderr=errors,
            )
        except OSError as exc:
            raise openssh.absent(exc) from exc

        def end() -> End:
            code = process.wait()
            errors.seek(0)
            return End(code, openssh.reason(errors.read().decode(errors="replace"), code))

        try:
            limit = time.monotonic() + _LIMIT
            while not listens(local):
                if process.poll() is not None or time.monotonic() > limit:
                    process.kill()
                    if _is_others(local):
                        raise _unusable(local, "another user of this machine listens there")
                    raise UnreachableError(end().reason, where=f"{host}, {remote.replace('localhost:', 'port ')}")
                time.sleep(_POLL)
            yield end
        finally:
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()
