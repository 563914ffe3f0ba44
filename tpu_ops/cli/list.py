"""`tpu_ops list`: list the workers of the fleet, its queued resources and unused disks, the cost, and idle nodes."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from tpu_ops import config, texts
from tpu_ops.cli import list_cost, list_disks, list_idle, list_queued, list_use, options, output
from tpu_ops.cloud import queued_resources
from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.disks import Disk
from tpu_ops.cloud.node import Node, Worker
from tpu_ops.cloud.queued_resources import QueuedResource
from tpu_ops.config import Filters, Settings
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import disks, queue, selection, view
from tpu_ops.fleet.diff import Changes
from tpu_ops.fleet.disks import Listed
from tpu_ops.fleet.hostvars import facts, facts_without_worker
from tpu_ops.fleet.queue import Queue
from tpu_ops.fleet.view import Fleet

#: If no node has the value of an option, at most this many existing values are named.
MOST = 12

COLUMNS = ("host", "zone", "type", "state", "health", "tier", "age", "internal", "external")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops list`."""
    only = parser.add_argument_group(
        "list only nodes and queued resources that have (for an option given several times: one of its values)"
    )

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
        choices=tuple(dict.fromkeys((*config.STATES, *queued_resources.STATES))),
        metavar="STATE",
        help="this state, as in READY or, for queued resources, SUSPENDED",
    )
    parser.add_argument("target", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--cached", action="store_true", help="do not ask the API; show the last known view")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--queued", action="store_true", help="list only queued resources without nodes, also with --json"
    )
    instead.add_argument(
        "--idle",
        type=options.duration,
        metavar="DURATION",
        help="list only nodes that have had no run, no process on a chip and no login for so long, as in 12h",
    )
    instead.add_argument(
        "--use",
        action="store_true",
        help="ask the workers, and show who holds the chips of each and what they do: memory in use and duty cycle",
    )
    instead.add_argument(
        "--cost",
        action="store_true",
        help="estimate by list prices what each node costs, and each queued resource will cost; the grant's TPUs cost "
        "nothing",
    )
    shows = parser.add_argument_group("output and fleet")
    options.add_json(shows)
    options.add_fleet(shows)
    parser.epilog = (
        "A node that has no workers yet has a row too; with --json its host and worker_index are null. "
        "A second table has the queued resources that are not, or not wholly, nodes, a third the disks of these zones "
        "that no node uses. Both are left out with --json, --use, --cached and published snapshots, so that the JSON "
        "is always a list of workers: `list --queued --json` and `disk list --json` have them. Options that describe "
        "nodes leave out the disks. "
        "With --use, --json has a text `use` for each worker; `top --json` has the numbers. "
        "--idle asks the workers. A younger node is not idle; whether a node is idle is unknown if a worker of it does "
        "not answer. The exit code is 0 whether or not nodes are idle."
    )


def run(args: argparse.Namespace) -> int:
    """List the workers of the nodes that match the options."""
    if args.target is not None:
        name = shlex.quote(args.target)
        raise UsageError("list does not take a target", where=args.target, fix=f"tpu_ops list --name {name}")
    settings = config.load(args.fleet)
    wanted, now = Wanted(args), time.time()
    fleet, changes, found, listed = _look(settings, args)
    if not args.cached:
        for text in (*fleet.warnings, *list_queued.warnings(found, fleet.warnings), *list_disks.warnings(listed)):
            output.warning(text)
    for text in selection.unreachable(settings, fleet.listed, asked=False):
        output.warning(text)
    waiting = [one for one in queue.unfulfilled(found.queued, fleet.listed) if queue.belongs(one, settings.filters)]
    unknown = wanted.unknown(fleet, waiting) if fleet.nodes or waiting else []
    for text in unknown:
        output.info(text)
    shown, queued = wanted.of(fleet), wanted.queued(waiting)
    use = list_use.ask(fleet, shown) if args.use else None
    if args.queued:
        list_queued.show(queued, fleet.listed, now, as_json=args.json, unanswered=found.unanswered)
    elif args.idle:
        list_idle.show(fleet, shown, args.idle, now, as_json=args.json)
    elif args.cost and (shown or queued or args.json):
        known = None if args.cached or fleet.source or found.failure else found
        list_cost.show(fleet, shown, queued, known, now, as_json=args.json)
    elif args.json:
        output.as_json(_json_rows(fleet, shown, use))
    else:
        _show(fleet, shown, queued, now, unmatched=not unknown, use=use)
        unused = disks.unused(listed.disks, fleet.listed, fleet.unanswered, settings.zones)
        list_disks.show(wanted.disks(unused), now, first=not shown and not queued)
    if fleet.source or args.cached:
        output.info(f"as {fleet.age}")
    if changes and not changes.first:
        output.info("the fleet has changed since the last refresh: `tpu_ops refresh` shows the changes")
    return ExitCode.OK


def _look(settings: Settings, args: argparse.Namespace) -> tuple[Fleet, Changes | None, Queue, Listed]:
    """Return the fleet, its changes since the last refresh, and its queued resources and disks if they are to be shown.

    Raises:
        UsageError: --queued was given, and the API is not asked.
        CloudError: --queued was given, and the API does not list queued resources.
    """
    if args.cached:
        list_queued.require(args.queued, "--cached")
        return view.cached(settings), None, Queue(), Listed()
    if args.idle or args.use:
        # Asking workers needs their host keys and the fleet's ssh config, which a refresh writes.
        return view.newest(settings)[0], None, Queue(), Listed()
    found, listed = Queue(), Listed()

    def ask_for_queued(tpu: Tpu) -> None:
        nonlocal found
        found = queue.ask(tpu, settings)

    def ask_for_disks(tpu: Tpu) -> None:
        nonlocal listed
        listed = disks.ask(tpu, settings)

    plain = not (args.json or args.cost or args.queued)
    beside = [ask_for_queued] if args.queued or args.cost or plain else []
    beside += [ask_for_disks] if plain and Wanted(args).any_disk else []
    fleet, changes = view.look(settings, beside=beside)
    if fleet.source:
        list_queued.require(args.queued, "a published snapshot")
    if args.queued and found.failure:
        raise found.failure
    return fleet, changes, found, listed


def _show(
    fleet: Fleet,
    nodes: Sequence[Node],
    queued: Sequence[QueuedResource],
    now: float,
    *,
    unmatched: bool,
    use: Mapping[str, str] | None,
) -> None:
    """Print the table of workers and the table of queued resources.

    Args:
        fleet: The fleet.
        nodes: The nodes to show.
        queued: The queued resources to show.
        now: The present time.
        unmatched: Whether to say that no node matches all options, if none does.
        use: Worker -> the use of its chips; None if it is not to be shown.
    """
    if rows := table_rows(fleet, nodes, now):
        if use is not None:
            rows = [row | {"use": use.get(row["host"], "")} for row in rows]
        output.table(rows, COLUMNS if use is None else (*COLUMNS, "use"))
    elif not fleet.listed and not queued:
        output.info(_nothing(fleet))
    elif fleet.nodes and unmatched and not queued:
        output.info("no node matches all of these options")
    if queued:
        if rows:
            output.line()
        list_queued.show(queued, fleet.listed, now)


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

    def queued(self, queued: Sequence[QueuedResource]) -> list[QueuedResource]:
        """Return the selected queued resources. A queued resource has no labels, so none is selected by --label."""
        args = self._args
        return [
            one
            for one in queued
            if not args.label
            and any(_one_of(name, args.name) for name in list_queued.names(one))
            and (not args.type or any(_one_of(asked.accelerator_type, args.type) for asked in one.nodes))
            and _one_of(one.zone, args.zone)
            and _one_of(one.project, args.project)
            and (not args.state or one.state in args.state)
        ]

    @property
    def any_disk(self) -> bool:
        """Whether the options select disks: not if they describe nodes."""
        args = self._args
        return not (args.name or args.type or args.label or args.state)

    def disks(self, found: Sequence[Disk]) -> list[Disk]:
        """Return the selected disks."""
        args = self._args
        return [disk for disk in found if _one_of(disk.zone, args.zone) and _one_of(disk.project, args.project)]

    def unknown(self, fleet: Fleet, queued: Sequence[QueuedResource]) -> list[str]:
        """Return a message for each value of an option that nothing in the fleet has; it lists the existing values."""
        args, nodes = self._args, fleet.nodes
        everything: list[Node | QueuedResource] = [*nodes, *queued]
        names = [(node.name, fleet.labels[node.full_name]) for node in nodes]
        types = [node.accelerator_type for node in nodes]
        types += [asked.accelerator_type for one in queued for asked in one.nodes]
        found = []
        for kind, values, there in (
            ("name", args.name, [*names, *map(list_queued.names, queued)]),
            ("accelerator type", args.type, [(text,) for text in types]),
            ("zone", args.zone, [(one.zone,) for one in everything]),
            ("project", args.project, [(one.project,) for one in everything]),
            ("state", args.state, [(one.state,) for one in everything]),
        ):
            found += _unknown(kind, values, there, fnmatchcase)
        pairs = [
            (key, f"{key}={value}") if value else (f"{key}=", key)
            for node in nodes
            for key, value in node.labels.items()
        ]
        return found + _unknown("label", args.label, pairs, str.__eq__)


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


def _json_rows(fleet: Fleet, nodes: Sequence[Node], use: Mapping[str, str] | None) -> list[dict[str, Any]]:
    """Return the facts of each worker of these nodes for --json; a node without workers has a row of its own."""
    labels, workers = fleet.labels, _workers(fleet)
    rows = []
    for node in nodes:
        label = labels[node.full_name]
        rows += [facts(worker) for worker in workers.get(label, ())] or [facts_without_worker(node, label)]
    return rows if use is None else [row | {"use": use.get(row["host"])} for row in rows]


def table_rows(fleet: Fleet, nodes: Sequence[Node], now: float) -> list[dict[str, str]]:
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
            "tier": node.tier,
            "age": texts.age(node.age(now)),
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
