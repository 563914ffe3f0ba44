"""`tpu_ops tunnel`: reach a port of a worker on this machine, also after the worker's address has changed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tpu_ops import config
from tpu_ops.cli import interrupts, options, output, ssh
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import ExitCode, OpsError, UsageError
from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet
from tpu_ops.ssh import tunnels

#: Seconds between two attempts to open a lost tunnel again.
_PAUSE = 5.0
#: Ends with its input. If this process is killed, ssh does not stay with the port: it ends with its remote command.
_WATCH = ("cat",)
#: Largest number of a port.
_PORTS = 65535


class Far(NamedTuple):
    """The far end of a tunnel.

    Attributes:
        remote: A port as ``localhost:PORT``, or the path of a socket.
        said: The message once the tunnel is open.
        watch: A command for the worker that ends with exit code 0 once the tunnel is no longer needed.
    """

    remote: str
    said: str
    watch: Sequence[str] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops tunnel`."""
    options.add_fleet(parser)
    parser.add_argument("target", help="a worker (pod-w2) or a node (pod: its worker 0)")
    parser.add_argument("port", type=port, metavar="PORT", help="the port on the worker, where a program listens")
    parser.add_argument("local", type=port, nargs="?", metavar="LOCAL", help="the port here (default: the same)")
    parser.epilog = "The tunnel stays until Ctrl-C. A connection that is lost is opened again, with the new address."


def port(text: str) -> int:
    """Return the number of a port, given an argument."""
    if text.isascii() and text.isdecimal() and 0 < int(text) <= _PORTS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port: use 1 to {_PORTS}")


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Keep the tunnel open until the user ends it."""
    local = args.local or args.port
    tunnels.require_free(local)

    def far(fleet: Fleet, worker: Worker) -> Far:
        said = f"http://localhost:{local} is port {args.port} of {worker.host}, until Ctrl-C"
        return Far(f"localhost:{args.port}", said, _WATCH)

    with contextlib.suppress(KeyboardInterrupt):
        keep(args, local, far)
    return ExitCode.OK


def keep(
    args: argparse.Namespace, local: int, far: Callable[[Fleet, Worker], Far], patience: float = float("inf")
) -> None:
    """Keep a tunnel to a worker open until the user interrupts it or the watch of its far end has ended.

    Args:
        args: The options of the command, with the fleet and the target.
        local: The port on this machine.
        far: Returns the far end, once the worker answers; called again before a lost tunnel is opened again.
        patience: Seconds after which an error ends the command, if a lost tunnel is not open again.

    Raises:
        OpsError: The tunnel could not be opened, or not again.
    """
    settings, was_open = config.load(args.fleet), False
    lost_at = time.monotonic()
    while True:
        fleet, _ = contact.find(settings, args.target)
        worker = ssh.named(fleet, args.target)
        try:
            ssh.check_serves(fleet, worker)
            asyncio.run(ssh.reach(fleet, worker))
            there = far(fleet, worker)
            with tunnels.opened(fleet.ssh_config, worker.host, there.remote, local, there.watch) as end:
                output.info(there.said)
                was_open = True
                ended = end()
            if there.watch and ended.code == 0:
                return
            said, lost_at = ended.reason, time.monotonic()
        except OpsError as exc:
            if not was_open or isinstance(exc, UsageError) or time.monotonic() > lost_at + patience:
                raise
            said = exc.what
        output.info(f"{worker.host}: {said}; trying again")
        time.sleep(_PAUSE)  # between two attempts, until the user ends the command
