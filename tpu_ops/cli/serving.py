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
from tpu_ops.errors import ExitCode, HostError, OpsError, UsageError
from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet
from tpu_ops.protocol.servers import socket_of
from tpu_ops.runs import servers
from tpu_ops.runs.servers import Server
from tpu_ops.ssh import background, tunnels
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
    settings = config.load(args.fleet)  # a missing fleet is the first error
    if args.stop:
        return _stop(args, name)
    before = background.at(settings.state_dir, args.local)
    if before is None:
        tunnels.require_free(args.local)
    serving = _Serving(args, make, page, warning)
    if args.in_background:
        with background.kept(settings.state_dir, args.local, name, _named(args)[1].host):
            tunnel.keep(args, args.local, serving.far, _PATIENCE)
        return ExitCode.OK
    if before:
        _check_same(args.local, before, name, _named(args)[1].host)
    if args.detach:
        serving.detach(is_open=before is not None)
        return ExitCode.OK
    if before:
        background.end(settings.state_dir, before)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            tunnel.keep(args, args.local, serving.far)
    except OpsError:
        serving.abandon()
        raise
    except BaseException:
        serving.end()
        raise
    serving.end()
    return ExitCode.OK


def _stop(args: argparse.Namespace, name: str) -> int:
    """End the tunnels to a server in the background, and the server."""
    fleet, worker = _named(args)
    # First the tunnels: their processes would wait for a worker that does not answer.
    for one in background.leading_to(fleet.settings.state_dir, name, worker.host):
        background.end(fleet.settings.state_dir, one)
        output.info(f"the tunnel at port {one.port} has ended")
    _reach(fleet, worker)
    stopped = asyncio.run(servers.stop(contact.fanout(fleet), worker.host, name))
    output.info(f"{worker.host}: {name} {'has ended' if stopped else 'is not running'}")
    return ExitCode.OK


def _check_same(port: int, before: background.Tunnel, name: str, host: str) -> None:
    """Refuse a port with a tunnel in the background that leads to another server.

    Raises:
        UsageError: It does.
    """
    if (before.name, before.host) != (name, host):
        what = f"port {port} leads to {before.name} on {before.host}, which --detach left running"
        fix = f"name another port as LOCAL, or end it with `tpu_ops {before.name} {before.host} --stop`"
        raise UsageError(what, where="LOCAL", fix=fix)


def _named(args: argparse.Namespace) -> tuple[Fleet, Worker]:
    """Return the fleet and the worker of the target."""
    fleet, _ = contact.find(config.load(args.fleet), args.target)
    return fleet, ssh.named(fleet, args.target)


def _reach(fleet: Fleet, worker: Worker) -> None:
    """Return once a worker answers."""
    ssh.check_serves(fleet, worker)
    asyncio.run(ssh.reach(fleet, worker))


class _Serving:
    """A server that this command starts, and starts again after a reboot of the worker."""

    def __init__(self, args: argparse.Namespace, make: Callable[[str], Server], page: str, warning: str) -> None:
        self.args, self._make, self._page, self._warning = args, make, page, warning
        self._running: tuple[Fleet, str, str, str] | None = None
        self._is_new = False

    def far(self, fleet: Fleet, worker: Worker) -> tunnel.Far:
        """Start the server on a worker unless it is running; return the far end of the tunnel to it."""
        user, again = fleet.settings.user, self._running is not None
        server, started, log = asyncio.run(self._start(contact.fanout(fleet), worker, user))
        self._running, self._is_new = (fleet, worker.host, server.name, log), self._is_new or started.anew
        if again and started.anew:
            output.info(f"{worker.host}: {server.name} was started again; what it had in memory is lost")
        url = f"http://localhost:{self.args.local}/{self._page.format(started.token)}"
        until = f"until `tpu_ops {server.name} {worker.host} --stop`" if self.args.detach else "until Ctrl-C"
        said = f"{url} is {server.name} on {worker.host}, {until}"
        return tunnel.Far(socket_of(server.name, user), said, servers.watch(server.name, user))

    async def _start(self, fanout: Fanout, worker: Worker, user: str) -> tuple[Server, servers.Started, str]:
        facts = await servers.facts(fanout, worker.host, self.args.venv)
        server = self._make(facts["venv"]["path"])
        first = self._running is None
        if first:
            self._warn(facts, worker)
            if not await servers.is_running(fanout, worker.host, user, server.name):
                packages = ", ".join(server.packages)
                output.info(f"{worker.host}: starting {server.name}; the first time, this installs {packages}")
        started = await servers.start(fanout, worker.host, user, server, facts)
        if first and not started.anew:
            output.info(f"{worker.host}: {server.name} is running there already")
        return server, started, servers.log(server.name, facts)

    def _warn(self, facts: Mapping[str, Any], worker: Worker) -> None:
        if self._warning:
            output.warning(f"{worker.host}: {self._warning}")
            if worker.node.worker_count > 1:
                text = "JAX uses a pod's chips only from all workers at once: set JAX_PLATFORMS=cpu in the notebook"
                output.warning(f"{worker.host}: {text}, or use a node of one worker")
            for fault in facts["faults"]:
                if fault["check"] == "free":
                    output.warning(f"{worker.host}: JAX cannot use the chips now: {fault['problem']}")

    def detach(self, *, is_open: bool) -> None:
        """Start the server, and a process that keeps the tunnel to it open, unless the tunnel is open already."""
        fleet, worker = _named(self.args)
        _reach(fleet, worker)
        said = self.far(fleet, worker).said
        try:
            if not is_open:
                self._leave_tunnel(worker)
        except BaseException:  # also after Ctrl-C
            self.abandon()
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
            try:
                while not tunnels.listens(self.args.local) and process.poll() is None:
                    time.sleep(_POLL)
            except BaseException:  # also after Ctrl-C: the process would start the server again
                process.terminate()
                process.wait()
                raise
            if process.poll() is not None:
                messages.seek(0)
                text = messages.read().decode(errors="replace").strip()
                raise HostError(f"the tunnel could not be opened: {text}", where=worker.host)

    def abandon(self) -> None:
        """End the server if this command has started it: one that was running before may hold somebody's work."""
        if self._is_new:
            self.end()
        elif self._running:
            _, host, name, _ = self._running
            output.info(f"{host}: {name} was running before and goes on; `tpu_ops {name} {host} --stop` ends it")

    def end(self) -> None:
        """End the server, if it was reached."""
        if self._running:
            fleet, host, name, log = self._running
            stopped = asyncio.run(servers.stop(contact.fanout(fleet), host, name))
            told = "" if stopped else f" by itself, or by --stop; its last messages are in ~/{log} there"
            output.info(f"{host}: {name} has ended{told}")
