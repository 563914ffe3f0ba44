"""`tpu_ops list`: list the workers of the fleet."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from tpu_ops import config, texts
from tpu_ops.cli import options, output
from tpu_ops.cloud.node import Node, Worker
from tpu_ops.config import Filters
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import selection, view
from tpu_ops.fleet.hostvars import facts, facts_without_worker
from tpu_ops.fleet.view import Fleet

#: If no node has the value of an option, at most this many existing values are named.
MOST = 12

COLUMNS = ("host", "zone", "type", "state", "health", "internal", "external")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops list`."""
    options.add_fleet(parser)
    options.add_json(parser)
    only = parser.add_argument_group("list only nodes that have (for an option given several times: one of its values)")

    def add(name: str, metavar: str, text: str) -> None:
        only.add_argument(f"--{name}", action="append", default=[], metavar=metavar, help=text)

    add("name", "PATTERN", "this name, as in 'pod*'")
    add("type", "PATTERN", "this accelerator type, as in 'v4-*'")
    add("zone", "ZONE", "this zone, as in us-central2-b or 'us-*'")
    add("project", "PROJECT", "this project")
    add("label", "KEY[=VALUE]", "this label; for several keys: all of these labels")
    only.add_argument(
        "--state",
        action="append",
        default=[],
        type=str.upper,
        choices=config.STATES,
        metavar="STATE",
        help="this state",
    )
    parser.add_argument("target", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--cached", action="store_true", help="do not ask the API; show the last known view")
    parser.epilog = "A node that has no workers yet has a row too; with --json its host and worker_index are null."


def run(args: argparse.Namespace) -> int:
    """List the workers of the nodes that match the options."""
    if args.target is not None:
        name = shlex.quote(args.target)
        raise UsageError("list does not take a target", where=args.target, fix=f"tpu_ops list --name {name}")
    settings = config.load(args.fleet)
    if args.cached:
        fleet, changes = view.cached(settings), None
    else:
        fleet, changes = view.look(settings)
        for text in fleet.warnings:
            output.warning(text)
    for text in selection.unreachable(settings, fleet.listed, asked=False):
        output.warning(text)
    wanted = Wanted(args)
    unknown = wanted.unknown(fleet) if fleet.nodes else []
    for text in unknown:
        output.info(text)
    shown = wanted.of(fleet)
    if args.json:
        output.as_json(_json_rows(fleet, shown))
    elif rows := table_rows(fleet, shown):
        output.table(rows, COLUMNS)
    elif not fleet.listed:
        output.info(_nothing(fleet))
    elif fleet.nodes and not unknown:
        output.info("no node matches all of these options")
    if fleet.source or args.cached:
        output.info(f"as {fleet.age}")
    if changes and not changes.first:
        output.info("the fleet has changed since the last refresh: `tpu_ops refresh` shows the changes")
    return ExitCode.OK


def _nothing(fleet: Fleet) -> str:
    """Return the message for a fleet without nodes."""
    if fleet.unanswered:
        return "no node is known, but some nodes could not be listed: see the warnings"
    if fleet.source:
        return "the published snapshot has no nodes; ask the snapshot's publisher about this"
    return "no node exists; `tpu_ops create` creates one"


class Wanted:
    """Selects the nodes that the options ask for.

    Args:
        args: The arguments of the command.

    Raises:
        UsageError: A value of --label has no key.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        pairs = [text.partition("=") for text in args.label]
        for key, _, _ in pairs:
            if not key:
                raise UsageError("a label without a name", where="--label", fix="write the label as KEY or KEY=VALUE")
        labels = {
            # A key without a value matches any value, even if the same key is also given with values.
            key: () if (key, "", "") in pairs else tuple(value for name, _, value in pairs if name == key)
            for key, _, _ in pairs
        }
        self._filters = Filters(tuple(args.name), tuple(labels.items()), tuple(args.type))

    def of(self, fleet: Fleet) -> list[Node]:
        """Return the selected nodes of a fleet, sorted by their unique labels."""
        args = self._args
        found = [
            node
            for node in fleet.nodes
            if self._filters.match(node.name, fleet.labels[node.full_name], node.accelerator_type, node.labels)
            and _one_of(node.zone, args.zone)
            and _one_of(node.project, args.project)
            and (not args.state or node.state in args.state)
        ]
        return sorted(found, key=lambda node: texts.natural(fleet.labels[node.full_name]))

    def unknown(self, fleet: Fleet) -> list[str]:
        """Return a message for each value of an option that no node of the fleet has; it lists the existing values."""
        args = self._args
        found = []
        for kind, values, of in (
            ("name", args.name, lambda node: (node.name, fleet.labels[node.full_name])),
            ("accelerator type", args.type, lambda node: (node.accelerator_type,)),
            ("zone", args.zone, lambda node: (node.zone,)),
            ("project", args.project, lambda node: (node.project,)),
            ("state", args.state, lambda node: (node.state,)),
        ):
            found += _unknown(kind, values, [of(node) for node in fleet.nodes], fnmatchcase)
        labels = [
            (key, f"{key}={value}") if value else (f"{key}=", key)
            for node in fleet.nodes
            for key, value in node.labels.items()
        ]
        return found + _unknown("label", args.label, labels, str.__eq__)


def _one_of(text: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(text, pattern) for pattern in patterns)


def _unknown(
    kind: str, values: Sequence[str], there: Sequence[tuple[str, ...]], match: Callable[[str, str], bool]
) -> list[str]:
    lacking = [value for value in values if not any(match(text, value) for texts in there for text in texts)]
    if not lacking:
        return []
    known = sorted({texts[-1] for texts in there})
    return [f"no node has the {kind} {value!r}; there are: {texts.some(known, MOST) or 'none'}" for value in lacking]


def _workers(fleet: Fleet) -> dict[str, list[Worker]]:
    """Return the workers of each node, by the node's label; nodes without workers are left out."""
    workers: dict[str, list[Worker]] = {}
    for worker in fleet.workers:
        workers.setdefault(worker.label, []).append(worker)
    return workers


def _json_rows(fleet: Fleet, nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Return the facts of each worker of these nodes for --json; a node without workers has a row of its own."""
    labels, workers = fleet.labels, _workers(fleet)
    rows = []
    for node in nodes:
        label = labels[node.full_name]
        rows += [facts(worker) for worker in workers.get(label, ())] or [facts_without_worker(node, label)]
    return rows


def table_rows(fleet: Fleet, nodes: Sequence[Node]) -> list[dict[str, str]]:
    """Return one table row for each worker of these nodes, and one row for each node without workers."""
    labels, workers = fleet.labels, _workers(fleet)
    rows = []
    for node in nodes:
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
