"""`tpu_ops inventory`: print the workers of nodes that are ready, in a format for clush, pdsh or scripts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence

from ClusterShell.NodeSet import NodeSet

from tpu_ops import config
from tpu_ops.cli import options, output
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import hostvars, targets, view
from tpu_ops.fleet.view import Fleet

FORMATS = ("nodeset", "list", "groups", "json")

#: Name of the group source in the file for ClusterShell, as in `@tpu:node_pod`.
SOURCE = "tpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops inventory`."""
    options.add_fleet(parser)
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="nodeset",
        help="nodeset: one folded set for clush -w and pdsh -w (default); list: one host per line; "
        "groups: a ClusterShell file for groups.d; json: group -> hosts",
    )
    parser.add_argument("--json", action="store_const", dest="format", const="json", help="the same as --format json")
    parser.add_argument(
        "target", nargs="?", help="a node, a worker, a node set or a group (@node_pod); default: the whole fleet"
    )
    parser.epilog = (
        "Lists only nodes in the configured states (default: READY). Uses the last known view of the fleet; "
        f"`tpu_ops refresh` updates the view. The groups are those of the inventory, as in: clush -w @{SOURCE}:node_pod"
    )


def run(args: argparse.Namespace) -> int:
    """Print the chosen workers in the chosen format."""
    fleet = view.current(config.load(args.fleet))
    workers = chosen(fleet, args.target)
    hosts = [worker.host for worker in workers]
    match args.format:
        case "nodeset":
            output.line(folded(workers))
        case "list":
            for host in hosts:
                output.line(host)
        case "groups":
            # ClusterShell reads YAML. JSON is valid YAML, and its quotes mark every string as a string.
            sets = {name: folded(members) for name, members in groups(fleet, workers).items()}
            output.as_it_is(json.dumps({SOURCE: sets}, indent=2))
        case _:
            output.as_json({name: [w.host for w in members] for name, members in groups(fleet, workers).items()})
    return ExitCode.OK


def chosen(fleet: Fleet, target: str | None) -> list[Worker]:
    """Return the workers of a target, or of the fleet, whose nodes are in the configured states.

    Raises:
        UsageError: The target is unknown, or none of its nodes is in a configured state.
    """
    states = fleet.settings.states
    workers = targets.select(fleet.workers, target, listed=fleet.listed) if target else list(fleet.workers)
    serving = [worker for worker in workers if worker.node.state in states]
    if not serving:
        found = sorted({worker.node.state for worker in workers})
        raise UsageError(
            f"no worker{' of the target' if target else ''} is in state {' or '.join(states)}"
            + (f", only in {' and '.join(found)}" if found else ""),
            where=f"target {target!r}" if target else str(fleet.settings.path),
            fix="`tpu_ops refresh` asks the API again; `states` in inventory/tpu_vm.yml sets the listed states",
        )
    return serving


def groups(fleet: Fleet, workers: Iterable[Worker]) -> dict[str, list[Worker]]:
    """Return the workers of each group of the inventory, and of the group `all`."""
    names = hostvars.groups(fleet.listed)
    found: dict[str, list[Worker]] = {"all": []}
    for worker in workers:
        for name in ("all", *names[worker.node.full_name]):
            found.setdefault(name, []).append(worker)
    return found


def folded(workers: Sequence[Worker]) -> str:
    """Return workers as one node set, for example ``pod-w[0-3],solo-w0``; only the workers' indices are folded.

    Numbers in the names of nodes are not folded: pdsh accepts only one range per name, and folding thousands of hosts
    takes ClusterShell seconds.
    """
    nodes: dict[str, list[int]] = {}
    for worker in workers:
        nodes.setdefault(worker.label, []).append(worker.index)
    return ",".join(str(NodeSet.fromlist([f"{label}-w{index}" for index in found])) for label, found in nodes.items())
