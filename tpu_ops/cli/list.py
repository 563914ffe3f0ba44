"""`tpu_ops list`: the workers of the fleet."""

from __future__ import annotations

import argparse
from collections.abc import Collection

from tpu_ops import config
from tpu_ops.cli import options, output
from tpu_ops.errors import ExitCode
from tpu_ops.fleet import view
from tpu_ops.fleet.hostvars import facts
from tpu_ops.fleet.model import Node, Worker
from tpu_ops.fleet.view import Fleet

COLUMNS = ("host", "zone", "type", "state", "health", "internal", "external")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops list`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument(
        "--state",
        action="append",
        type=str.upper,
        choices=config.STATES,
        metavar="STATE",
        help="only nodes in this state, as in READY (repeatable; default: all)",
    )
    parser.add_argument("--cached", action="store_true", help="do not ask the API; show what the last refresh saw")


def run(args: argparse.Namespace) -> int:
    """List the workers."""
    settings = config.load(args.fleet)
    if args.cached:
        fleet, changes = view.current(settings), None
    else:
        fleet, changes = view.look(settings)
    for text in fleet.warnings:
        output.warning(text)
    if args.json:
        shown = [worker for worker in fleet.workers if wanted(worker.node, args.state)]
        output.as_json([facts(worker) for worker in shown])
        return ExitCode.OK
    rows = table_rows(fleet, args.state)
    if rows:
        output.table(rows, COLUMNS)
    else:
        states = f" in state {' or '.join(args.state)}" if args.state else ""
        output.info(f"no node{states}; `tpu_ops create` makes one")
    if changes and not changes.first:
        output.info("changed since the last refresh: `tpu_ops refresh` shows what, and rewrites ssh_config")
    return ExitCode.OK


def wanted(node: Node, states: Collection[str] | None) -> bool:
    """Return whether a node passes the filter; none lets all pass."""
    return not states or node.state in states


def table_rows(fleet: Fleet, states: Collection[str] | None) -> list[dict[str, str]]:
    """Return one row per worker, and one for each node that has no worker yet."""
    labels = fleet.labels
    workers: dict[str, list[Worker]] = {}
    for worker in fleet.workers:
        workers.setdefault(worker.label, []).append(worker)
    rows = []
    for node in sorted(fleet.nodes, key=lambda node: labels[node.full_name]):
        if not wanted(node, states):
            continue
        label = labels[node.full_name]
        common = {
            "zone": node.zone,
            "type": node.accelerator_type,
            "state": node.state,
            "health": "" if node.health == "HEALTH_UNSPECIFIED" else node.health,
        }
        rows += [
            {
                "host": worker.host,
                **common,
                "internal": worker.internal_ip or "-",
                "external": worker.external_ip or "-",
            }
            for worker in workers.get(label, ())
        ] or [{"host": label, **common, "internal": "-", "external": "-"}]
    return rows
