"""`tpu_ops tunnel`: reach a port of a worker on this machine, also after the worker's address has changed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

from tpu_ops import config
from tpu_ops.cli import interrupts, options, output, ssh
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import ExitCode, OpsError, UnreachableError, UsageError
from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet
from tpu_ops.ssh import openssh

_HERE = "127.0.0.1"
#: Seconds between two looks at the tunnel, for its beginning, and before a lost connection is tried again.
_POLL, _LIMIT, _PAUSE = 0.1, 30.0, 5.0
#: Largest number of a port.
_PORTS = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops tunnel`."""
    options.add_fleet(parser)
    parser.add_argument("target", help="a worker (pod-w2) or a node (pod: its worker 0)")
    parser.add_argument("port", type=_port, metavar="PORT", help="the port on the worker, where a program listens")
    parser.add_argument("local", type=_port, nargs="?", metavar="LOCAL", help="the port here (default: the same)")
    parser.epilog = "The tunnel stays until Ctrl-C. A connection that is lost is opened again, with the new address."


def _port(text: str) -> int:
    if text.isascii() and text.isdecimal() and 0 < int(text) <= _PORTS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port: use 1 to {_PORTS}")


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Keep the tunnel open until the user ends it."""
    local = args.local or args.port
    _require_free(local)
    settings, was_open = config.load(args.fleet), False
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            fleet, _ = contact.find(settings, args.target)
            worker = ssh.named(fleet, args.target)
            try:
                ssh.check_serves(fleet, worker)
                asyncio.run(ssh.reach(fleet, worker))
                with _opened(fleet, worker, args.port, local) as end:
                    output.info(f"http://localhost:{local} is port {args.port} of {worker.host}, until Ctrl-C")
                    was_open = True
                    said = end()
            except OpsError as exc:
                if not was_open:
                    raise
                said = exc.what
            output.info(f"{worker.host}: {said}; trying again")
            time.sleep(_PAUSE)  # between two attempts, until the user ends the command
    return ExitCode.OK


def _require_free(local: int) -> None:
    """Refuse a local port that a program uses, or that this user may not use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HERE, local))
        except OSError as exc:
            reason = os.strerror(exc.errno) if exc.errno else str(exc)
            fix = f"name another one as LOCAL, as in {local % 10000 + 10000}"
            raise UsageError(f"port {local} cannot be used here: {reason}", where="LOCAL", fix=fix) from exc


@contextlib.contextmanager
def _opened(fleet: Fleet, worker: Worker, port: int, local: int) -> Iterator[Callable[[], str]]:
    """Run ssh with the tunnel for the length of a `with` block, once the tunnel is open.

    The block gets a function that waits for the end of ssh, and returns why it ended.

    Raises:
        UnreachableError: ssh ended before.
    """
    argv = [
        *("ssh", "-F", str(fleet.ssh_config), "-N", "-o", "ControlPath=none", "-o", "BatchMode=yes"),
        *("-o", "ExitOnForwardFailure=yes", "-L", f"{_HERE}:{local}:localhost:{port}", worker.host),
    ]
    # A file, since nobody reads a pipe while the tunnel is open.
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=errors)
        except OSError as exc:
            raise openssh.absent(exc) from exc

        def end() -> str:
            code = process.wait()
            errors.seek(0)
            return openssh.reason(errors.read().decode(errors="replace"), code)

        try:
            limit = time.monotonic() + _LIMIT
            while not _listens(local):
                if process.poll() is not None or time.monotonic() > limit:
                    process.kill()
                    raise UnreachableError(end(), where=f"{worker.host}, port {port}")
                time.sleep(_POLL)
            yield end
        finally:
            process.kill()
            process.wait()


def _listens(local: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((_HERE, local), timeout=_POLL):
        return True
    return False
