"""Serve the lab's Cloud TPU API: ``python -m tpu_ops.lab.api --state FILE``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from tpu_ops.errors import OpsError, UsageError
from tpu_ops.lab.backend import Backend, BackendError, NoWorkers

GRPC_PORT, REST_PORT = 18470, 18471


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tpu_ops.lab.api", description="Serve a local Cloud TPU API over gRPC and REST."
    )
    parser.add_argument("--state", type=Path, required=True, metavar="FILE", help="where the API keeps its state")
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--grpc-port", type=int, default=GRPC_PORT, help="0 takes any free one (default %(default)s)")
    parser.add_argument("--rest-port", type=int, default=REST_PORT, help="0 takes any free one (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="shortest time of an operation (default %(default)s)"
    )
    parser.add_argument("--projects", default="lab", help="comma-separated projects that exist (default %(default)s)")
    parser.add_argument("--containers", metavar="INSTANCE", help="play the workers as containers of this lab instance")
    options = parser.parse_args(argv)
    options.projects = [project for project in options.projects.split(",") if project]
    if not options.projects:
        parser.error("--projects names none")
    if options.seconds < 0:
        parser.error("--seconds must not be negative")
    return options


def _backend(instance: str | None) -> Backend:
    if instance is None:
        return NoWorkers()
    from tpu_ops.lab.workers import ContainerBackend

    return ContainerBackend(instance=instance)


async def _serve(options: argparse.Namespace) -> None:
    # The wire definitions take most of a second to import: after the arguments are known to be right.
    from tpu_ops.lab.api import extras, grpc_server, operations, queued, rest
    from tpu_ops.lab.api.service import Service
    from tpu_ops.lab.api.state import State
    from tpu_ops.lab.api.store import Store

    store = Store(options.state)
    try:
        data = store.read()
        backend = _backend(options.containers)
        try:
            state = State(backend.networks, data)
        except ValueError as failure:
            raise store.damaged(str(failure)) from failure
        store.bind(state.text)
        service = Service(state, store, backend, seconds=options.seconds, projects=options.projects)
        await backend.prune([worker for node in state.nodes for worker in node.workers()])
        app = rest.application(service)
        extras.add_routes(app, service)
        grpc_api, grpc_port = await _listen(
            grpc_server.serve(service, options.bind, options.grpc_port), options.bind, options.grpc_port, "--grpc-port"
        )
        try:
            rest_api, rest_port = await _listen(
                rest.serve(app, options.bind, options.rest_port), options.bind, options.rest_port, "--rest-port"
            )
            try:
                operations.resume(service)
                queued.resume(service)
                store.changed()
                await store.flush()
                host = f"[{options.bind}]" if ":" in options.bind else options.bind
                where = {"grpc": f"{host}:{grpc_port}", "rest": f"http://{host}:{rest_port}"}
                sys.stdout.write(json.dumps(where) + "\n")
                sys.stdout.flush()
                await _signalled()
            finally:
                await rest_api.cleanup()
        finally:
            await grpc_api.stop(grace=1)
            await service.close()
    finally:
        store.close()


async def _listen(starting: Awaitable[tuple[Any, int]], bind: str, port: int, option: str) -> tuple[Any, int]:
    """Return a server and its port once it listens.

    Raises:
        UsageError: The port or the address cannot be had.
    """
    try:
        return await starting
    except OSError as failure:
        raise UsageError(
            f"cannot listen on {bind} port {port}: {os.strerror(failure.errno) if failure.errno else failure}",
            where=f"{option} {port}",
            fix=f"end what uses port {port}, or choose another with {option}",
        ) from failure


async def _signalled() -> None:
    """Return when the process is asked to end."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    await asked.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code."""
    options = _arguments(argv)
    try:
        asyncio.run(_serve(options))
    except BackendError as failure:
        return _say(OpsError("the lab's workers cannot be served", where=str(failure)))
    except OpsError as failure:
        return _say(failure)
    return 0


def _say(failure: OpsError) -> int:
    lines = [f"error: {failure.what}"]
    lines += [f"  at:  {failure.where}"] if failure.where else []
    lines += [f"  fix: {failure.fix}"] if failure.fix else []
    sys.stderr.write("\n".join(lines) + "\n")
    return int(failure.exit_code)


if __name__ == "__main__":
    sys.exit(main())
