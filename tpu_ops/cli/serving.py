"""Keeps a person's server on a worker reachable on this machine, for `tpu_ops jupyter` and `tpu_ops tensorboard`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from tpu_ops import config
from tpu_ops.cli import interrupts, options, output, ssh, tunnel
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import ExitCode, HostError
from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet
from tpu_ops.protocol.servers import socket_of
from tpu_ops.runs import servers
from tpu_ops.runs.servers import Server
from tpu_ops.ssh import tunnels
from tpu_ops.ssh.fanout import Fanout

#: Seconds between two checks of a tunnel that another process opens.
_POLL = 0.1
#: Seconds after which a tunnel in the background gives up to open itself again.
_PATIENCE = 3600.0


def add_arguments(parser: argparse.ArgumentParser, what: str, port: int) -> None:
    """Declare the options that the commands of all servers have.

    Args:
        parser: The parser of the command.
        what: The server, in words.
        port: The default of the port on this machine.
    """
    options.add_fleet(parser)
    parser.add_argument("target", help="a worker (pod-w2) or a node (pod: its worker 0)")
    parser.add_argument(
        "local", type=tunnel.port, nargs="?", default=port, metavar="LOCAL", help=f"the port here (default: {port})"
    )
    parser.add_argument(
        "--with",
        dest="more",
        action="append",
        default=[],
        metavar="PACKAGE",
        help=f"also install this package for {what}; can be repeated",
    )
    parser.add_argument(
        "--venv", default="", metavar="PATH", help="a virtual environment on the worker (default: that of runs)"
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--detach", action="store_true", help="return once it runs, and leave it and its tunnel running")
    end.add_argument("--stop", action="store_true", help=f"end {what} on the worker, and the tunnels to it")
    # Only for the process that --detach starts.
    parser.add_argument("--in-background", action="store_true", help=argparse.SUPPRESS)


@interrupts.ended_by_signals()
def run(args: argparse.Namespace, name: str, make: Callable[[str], Server], page: str = "", warning: str = "") -> int:
    """Start a server on a worker and keep it reachable until the user ends it; or end it, with --stop.

    Args:
        args: The options of the command.
        name: The server's name.
        make: Returns the server, given the environment of runs on the worker.
        page: The path of the server's page; ``{}`` is replaced by the token.
        warning: A warning that is printed before the server starts; empty if none.
    """
    config.load(args.fleet)  # a missing fleet is the first error
    if args.stop:
        fleet, worker = _found(args)
        stopped = asyncio.run(servers.stop(contact.fanout(fleet), worker.host, name))
        output.info(f"{worker.host}: {name} {'has ended' if stopped else 'is not running'}")
        return ExitCode.OK
    tunnels.require_free(args.local)
    serving = _Serving(args, make, page, warning)
    if args.in_background:
        tunnel.keep(args, args.local, serving.far, _PATIENCE)
    elif args.detach:
        serving.detach()
    else:
        try:
            with contextlib.suppress(KeyboardInterrupt):
                tunnel.keep(args, args.local, serving.far)
        finally:
            serving.end()
    return ExitCode.OK


def _found(args: argparse.Namespace) -> tuple[Fleet, Worker]:
    """Return the fleet and the worker of the target, once the worker answers."""
    fleet, _ = contact.find(config.load(args.fleet), args.target)
    worker = ssh.named(fleet, args.target)
    ssh.check_serves(fleet, worker)
    asyncio.run(ssh.reach(fleet, worker))
    return fleet, worker


class _Serving:
    """A server that this command starts, and starts again after a reboot of the worker."""

    def __init__(self, args: argparse.Namespace, make: Callable[[str], Server], page: str, warning: str) -> None:
        self.args, self._make, self._page, self._warning = args, make, page, warning
        self._running: tuple[Fleet, str, str] | None = None

    def far(self, fleet: Fleet, worker: Worker) -> tunnel.Far:
        """Start the server on a worker unless it is running; return the far end of the tunnel to it."""
        user, again = fleet.settings.user, self._running is not None
        server, started = asyncio.run(self._start(contact.fanout(fleet), worker, user))
        self._running = (fleet, worker.host, server.name)
        if again and started.anew:
            output.info(f"{worker.host}: {server.name} was started again; what it had in memory is lost")
        url = f"http://localhost:{self.args.local}/{self._page.format(started.token)}"
        until = f"until `tpu_ops {server.name} {worker.host} --stop`" if self.args.detach else "until Ctrl-C"
        said = f"{url} is {server.name} on {worker.host}, {until}"
        return tunnel.Far(socket_of(server.name, user), said, servers.watch(server.name, user))

    async def _start(self, fanout: Fanout, worker: Worker, user: str) -> tuple[Server, servers.Started]:
        facts = await servers.facts(fanout, worker.host, self.args.venv)
        server = self._make(facts["venv"]["path"])
        if self._running is None:
            self._say_start(facts, worker, server)
        return server, await servers.start(fanout, worker.host, user, server, facts["venv"]["path"])

    def _say_start(self, facts: Mapping[str, Any], worker: Worker, server: Server) -> None:
        if self._warning:
            output.warning(f"{worker.host}: {self._warning}")
            if worker.node.worker_count > 1:
                text = "JAX uses a pod's chips only from all workers at once: set JAX_PLATFORMS=cpu in the notebook"
                output.warning(f"{worker.host}: {text}, or use a node of one worker")
            for fault in facts["faults"]:
                if fault["check"] == "free":
                    output.warning(f"{worker.host}: JAX cannot use the chips now: {fault['problem']}")
        output.info(
            f"{worker.host}: starting {server.name}; the first time, this installs {', '.join(server.packages)}"
        )

    def detach(self) -> None:
        """Start the server, and a process that keeps the tunnel to it open."""
        fleet, worker = _found(self.args)
        said = self.far(fleet, worker).said
        try:
            self._leave_tunnel(worker)
        except BaseException:  # also after Ctrl-C
            self.end()
            raise
        output.info(said)

    def _leave_tunnel(self, worker: Worker) -> None:
        """Start a process that opens the tunnel and outlives this one; return once the tunnel is open."""
        with tempfile.TemporaryFile() as messages:
            process = subprocess.Popen(
                [sys.executable, "-m", "tpu_ops.cli.main", *sys.argv[1:], "--in-background"],
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
                start_new_session=True,
            )
            while not tunnels.listens(self.args.local):
                if process.poll() is not None:
                    messages.seek(0)
                    text = messages.read().decode(errors="replace").strip()
                    raise HostError(f"the tunnel could not be opened: {text}", where=worker.host)
                time.sleep(_POLL)

    def end(self) -> None:
        """End the server, if it was reached."""
        if self._running:
            fleet, host, name = self._running
            stopped = asyncio.run(servers.stop(contact.fanout(fleet), host, name))
            told = "" if stopped else f" by itself, or by --stop; its last messages are in ~/{servers.log(name)} there"
            output.info(f"{host}: {name} has ended{told}")
