"""Serve the lab's Cloud TPU API: ``python -m tpu_ops.lab.api --state FILE``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import signal
import socket
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_ops.errors import OpsError, UsageError
from tpu_ops.lab import shared
from tpu_ops.lab.api.errors import ApiError
from tpu_ops.lab.api.store import Store
from tpu_ops.lab.backend import Backend, BackendError, NoWorkers
from tpu_ops.lab.instance import DEFAULT_PORTS, PROJECT

if TYPE_CHECKING:
    from tpu_ops.lab.api.service import Service

_ROOM = "free some disk space, or make the state file writable"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tpu_ops.lab.api", description="Serve a local Cloud TPU API over gRPC and REST."
    )
    parser.add_argument(
        "--state", type=Path, required=True, metavar="FILE", help="file in which the API stores its state"
    )
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument(
        "--grpc-port", type=int, default=DEFAULT_PORTS[0], help="gRPC port; 0 means any free port (default %(default)s)"
    )
    parser.add_argument(
        "--rest-port", type=int, default=DEFAULT_PORTS[1], help="REST port; 0 means any free port (default %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="minimum seconds of a long-running operation (default %(default)s)"
    )
    parser.add_argument(
        "--projects", default=PROJECT, help="comma-separated ids of existing projects (default %(default)s)"
    )
    parser.add_argument("--containers", metavar="INSTANCE", help="run each worker as a container of this lab instance")
    options = parser.parse_args(argv)
    options.projects = [project for project in options.projects.split(",") if project]
    if not options.projects:
        parser.error("--projects contains no project")
    if not 0 <= options.seconds < math.inf:
        parser.error("--seconds must be a finite number, 0 or more")
    return options


def _backend(instance: str | None) -> Backend:
    if instance is None:
        return NoWorkers()
    from tpu_ops.lab.workers import ContainerBackend

    return ContainerBackend(instance=instance)


async def _service(options: argparse.Namespace, stack: contextlib.AsyncExitStack) -> Service:
    """Load the state file and create the API's service.

    Workers that are not in the state are removed first, and data disks that no worker uses are detached.
    """
    store = Store(options.state)
    stack.callback(store.close)
    data = store.read()
    # Imported only after the checks above: importing google-cloud-tpu takes most of a second.
    from tpu_ops.lab.api.service import Service
    from tpu_ops.lab.api.state import State

    backend = _backend(options.containers)
    try:
        state = State(backend.networks, data)
    except ValueError as failure:
        raise store.damaged(str(failure)) from failure
    if options.containers:
        state.renumber(backend.networks)
    store.bind(state.text)
    await backend.prune([worker for node in state.nodes for worker in node.workers()])
    service = Service(state, store, backend, seconds=options.seconds, projects=options.projects)
    stack.push_async_callback(service.close)
    return service


async def _serve(options: argparse.Namespace) -> None:
    """Serve the API until the process receives SIGTERM or SIGINT."""
    bind, ports = options.bind, (options.grpc_port, options.rest_port)
    _check_free(bind, ports[0], "--grpc-port")
    _check_free(bind, ports[1], "--rest-port")
    async with contextlib.AsyncExitStack() as stack:
        service = await _service(options, stack)
        from tpu_ops.lab.api import (
            compute,
            compute_projects_routes,
            extras,
            grpc_server,
            lifecycle,
            operations,
            preemptions,
            queued_walk,
            rest,
            storage_routes,
        )

        grpc_api, grpc_port = await _listen(grpc_server.serve(service, bind, ports[0]), bind, ports[0], "--grpc-port")
        stack.push_async_callback(grpc_api.stop, grace=1)
        app = rest.application(service)
        extras.add_routes(app, service)
        compute.add_routes(app, service)
        compute_projects_routes.add_routes(app, service)
        for_workers = rest.empty_application()
        storage_routes.add_routes([app, for_workers], service)
        rest_api, rest_port = await _listen(rest.serve(app, bind, ports[1]), bind, ports[1], "--rest-port")
        stack.push_async_callback(rest_api.cleanup)
        if options.containers:
            listening = shared.storage_socket(options.containers, rest_port)
            storage = await rest.serve_socket(for_workers, listening)
            stack.push_async_callback(storage.cleanup)
        operations.resume(service)
        queued_walk.resume(service)
        preemptions.resume(service)
        lifecycle.resume(service)
        service.store.changed()
        await service.store.flush()
        host = f"[{bind}]" if ":" in bind else bind
        where = {"grpc": f"{host}:{grpc_port}", "rest": f"http://{host}:{rest_port}"}
        # Handle signals before printing the endpoints: the reader of the endpoints might send SIGTERM at once.
        asked = _asked_to_end()
        sys.stdout.write(json.dumps(where) + "\n")
        sys.stdout.flush()
        await asked.wait()


async def _listen(starting: Awaitable[tuple[Any, int]], bind: str, port: int, option: str) -> tuple[Any, int]:
    """Await the start of a server; return the server and its port.

    Raises:
        UsageError: The port or the address cannot be used.
    """
    try:
        return await starting
    except OSError as failure:
        raise _cannot_listen(failure, bind, port, option) from failure


def _check_free(bind: str, port: int, option: str) -> None:
    """Check that a server can listen on an address and port, before the state file is loaded.

    Raises:
        UsageError: The address or the port cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as failure:
        raise _cannot_listen(failure, bind, port, option) from failure


def _cannot_listen(failure: OSError, bind: str, port: int, option: str) -> UsageError:
    return UsageError(
        f"cannot listen on {bind} port {port}: {failure.strerror or failure}",
        where=f"{option} {port}",
        fix=f"end the process that uses port {port}, or choose another port with {option}",
    )


def _asked_to_end() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set; from now on, these signals do not end the process."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the API until SIGTERM or SIGINT; return the exit code."""
    options = _arguments(argv)
    try:
        asyncio.run(_serve(options))
    except BackendError as failure:
        return _say(
            OpsError(
                f"the lab cannot manage the containers of its workers: {failure}",
                where="the container engine",
                fix="check that the container engine runs and has disk space, then run `tpu_ops lab up` again",
            )
        )
    except ApiError as failure:
        return _say(UsageError(failure.message, where=str(options.state), fix=_ROOM))
    except OpsError as failure:
        return _say(failure)
    except OSError as failure:
        return _say(UsageError(f"cannot write the state: {failure.strerror}", where=str(options.state), fix=_ROOM))
    return 0


def _say(failure: OpsError) -> int:
    lines = [f"error: {failure.what}"]
    lines += [f"  at:  {failure.where}"] if failure.where else []
    lines += [f"  fix: {failure.fix}"] if failure.fix else []
    sys.stderr.write("\n".join(lines) + "\n")
    return int(failure.exit_code)


if __name__ == "__main__":
    sys.exit(main())
