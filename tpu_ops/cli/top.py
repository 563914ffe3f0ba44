"""`tpu_ops top`: show the use of the fleet's chips, the runs and people that use them, and runs that stand still."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence

from tpu_ops import config
from tpu_ops.cli import faults, interrupts, options, output
from tpu_ops.cli.terminal import is_terminal
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode, OpsError, UsageError
from tpu_ops.fleet import contact, targets, view
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import preparations, usage, usage_lines, usage_poll
from tpu_ops.runs.usage import Use
from tpu_ops.runs.usage_poll import Place, Poll

#: Default seconds between two questions to a worker.
EVERY = 5.0
#: Default address of --serve.
ADDRESS = "127.0.0.1:9418"
_LOOPBACK = ("127.", "localhost", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops top`."""
    options.add_fleet(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--once", action="store_true", help="print one table, also into a pipe, and end")
    instead.add_argument("--json", action="store_true", help="print one JSON object with a row for each core, and end")
    instead.add_argument(
        "--serve",
        type=_address,
        nargs="?",
        const=_address(ADDRESS),
        metavar="[HOST:]PORT",
        help=f"serve the numbers to Prometheus until Ctrl-C, at this address (default: {ADDRESS})",
    )
    parser.add_argument(
        "--interval",
        type=options.seconds,
        default=EVERY,
        metavar="SECONDS",
        help=f"ask each worker so often (default: {EVERY:g})",
    )
    parser.add_argument("target", nargs="?", help="a node, a worker, a node set or a group (default: all READY nodes)")
    parser.epilog = (
        "Memory is that of each chip, or of each core on v2 and v3. Similar workers of a run are one line, with the "
        "smallest and largest value. Keys: space or Enter unfolds a line, f all lines; < and > choose the column to "
        "sort by, R reverses; / filters; l and s show logs and stacks of the line's run; q quits."
    )


def _address(text: str) -> tuple[str, int]:
    """Return host and port, given the value of --serve."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not [HOST:]PORT: write a port from 1 to 65535")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def run(args: argparse.Namespace) -> int:
    """Show the use of the chips in one of four forms."""
    settings = config.load(args.fleet)
    if args.once or args.json:
        return _once(settings, args.target, as_json=args.json)
    if args.serve:
        return serve(Poll(looking(settings, args.target), args.interval), *args.serve)
    if not (is_terminal(sys.stdout) and is_terminal(sys.stdin)):
        raise UsageError("top needs a terminal", where="standard input and output", fix="`tpu_ops top --once`")
    from tpu_ops.cli import top_screen

    poll = Poll(looking(settings, args.target), args.interval)
    fleet = ["--fleet", args.fleet] if args.fleet else []
    return top_screen.show(poll, args.target or "all READY nodes", args.interval, fleet)


def looking(settings: Settings, target: str | None) -> Callable[[], Place]:
    """Return a function that returns the workers to ask, by the newest snapshot; it never asks the API.

    A worker whose node is no longer READY stays in the result until the node is deleted.
    """
    fleet, workers = contact.chosen(settings, target)
    shown = {worker.host for worker in workers}
    place = _place(fleet, workers)

    def look() -> Place:
        nonlocal place
        now = view.known(settings)
        if now is None or now.asked_at == place.version:
            return place
        try:
            found = targets.select(now.workers, target, settings.states, now.listed) if target else now.workers
        except UsageError:
            found = ()  # all nodes of the target were deleted
        workers = [worker for worker in found if target or worker.host in shown or worker.node.state in SERVING_STATES]
        shown.update(worker.host for worker in workers)
        place = _place(now, workers)
        return place

    return look


def _place(fleet: Fleet, workers: Sequence[Worker]) -> Place:
    nodes = {worker.host: worker.label for worker in workers}
    return Place(contact.fanout(fleet), nodes, contact.away(fleet, nodes), fleet.asked_at)


def _once(settings: Settings, target: str | None, *, as_json: bool) -> int:
    """Ask all workers once, and print their rows."""
    fleet, workers = contact.chosen(settings, target)
    labels = {worker.host: worker.label for worker in workers}
    replies = usage.of_fleet(fleet, list(labels), limit=usage_poll.LIMIT)
    now = time.time()
    uses = [usage.of_reply(labels[host], reply, now) for host, reply in replies.items()]
    problem = preparations.problem_of([reply for reply in replies.values() if not reply.ok], settings.state_dir)
    return show(uses, now, problem, as_json=as_json)


def show(uses: Sequence[Use], now: float, problem: OpsError | None, *, as_json: bool) -> int:
    """Print the uses of workers as a table or as JSON.

    Args:
        uses: The uses.
        now: When the workers answered, in seconds since 1970.
        problem: The error about the workers that did not answer; None if all did.
        as_json: Whether to print JSON.

    Raises:
        OpsError: Not all workers have answered: ``problem``.
    """
    silent = [use.reply for use in uses if not use.reply.ok]
    if as_json and (len(silent) < len(uses) or not problem):
        rows = [dataclasses.asdict(row) for use in uses for row in use.rows]
        output.as_json({"at": now, "rows": rows, "faults": faults.of_silent(silent)})
    elif uses and not as_json:
        found = usage_lines.lines(uses)
        output.table([usage_lines.cells(line, now) for line in found], usage_lines.COLUMNS)
        output.info(usage_lines.summary(uses))
    elif not as_json:
        output.info("no worker is READY: `tpu_ops list` shows the nodes")
    if problem:
        raise problem
    return ExitCode.OK


@interrupts.ended_by_signals()
def serve(poll: Poll, host: str, port: int) -> int:
    """Serve the numbers until Ctrl-C.

    Raises:
        OpsError: The address cannot be listened on.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    from tpu_ops.runs.usage_metrics import Collector

    def uses() -> list[Use]:
        return list(poll.uses.values())

    registry = CollectorRegistry()
    registry.register(Collector(uses))
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as exc:
        what = f"cannot listen: {exc.strerror or exc}"
        raise OpsError(what, where=f"--serve {host}:{port}", fix="choose another address or port") from exc
    try:
        if not host.startswith(_LOOPBACK):
            output.warning(f"everybody who reaches {host}:{port} can read the names of runs and people")
        output.info(f"http://{host}:{port}/metrics until Ctrl-C")
        asyncio.run(poll.run())
    except KeyboardInterrupt:
        pass
    finally:
        server.shutdown()
        server.server_close()
    return ExitCode.OK
