"""`tpu_ops delete`: delete a TPU node."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tpu_ops import config, texts
from tpu_ops.cli import options, output
from tpu_ops.cloud import lifecycle
from tpu_ops.cloud.node import SERVING_STATES, Node
from tpu_ops.cloud.remedies import queued_deletion
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, ExitCode, OpsError, UsageError
from tpu_ops.files import UnwritableError
from tpu_ops.fleet import origin, targets, view
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import holders, records, recovery


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops delete`."""
    parser.add_argument("name", help="name of the node")
    parser.add_argument("--zone", help="zone of the node, if several nodes share the name")
    parser.add_argument("--project", help="project of the node, if several nodes share name and zone")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    options.add_waiting(parser, 900)
    parser.add_argument("--dry-run", action="store_true", help="show what would be deleted")
    options.add_fleet(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Delete a node."""
    settings = config.load(args.fleet)
    fleet, _ = view.look(settings)
    for text in fleet.warnings:
        output.warning(text)
    node = chosen(fleet, args.name, zone=args.zone, project=args.project)
    what = f"node {node.name}, zone {node.zone}, project {node.project}"
    size = f"{node.accelerator_type}, {texts.count(node.worker_count, 'worker')}"
    runs, silent = holders.active(fleet, [node.full_name] if node.state in SERVING_STATES else [])
    if silent:
        output.warning(
            f"{texts.folded(list(silent))} cannot tell whether a run is active: {next(iter(silent.values()))}"
        )
        _warn_of_remembered(settings, node)
    active = f"{holders.named(runs)} on this node" if runs else ""
    if active and (args.yes or args.dry_run):
        output.warning(f"{active}: `tpu_ops who {fleet.labels[node.full_name]}` shows more")
    for text in _recoveries(settings.state_dir, node):
        output.warning(text)
    if node.queued_resource:
        stays = f"queued resource {node.queued_resource}, which created the node, stays and may use quota"
        output.warning(f"{stays}; to delete it with all its nodes: `{queued_deletion(node)}`")
    if args.dry_run:
        return _say(args, node, runs, f"would delete {what} ({size})")
    if not args.yes and not options.confirmed(f"{active}; " * bool(active) + f"delete {what} ({size})?", "deleting"):
        output.info("nothing was deleted")
        return ExitCode.FAILED
    with origin.api(settings) as tpu:
        progress = options.Waiting(f"node {node.name}")
        lifecycle.delete(
            tpu,
            node.full_name,
            node.node_id,
            what=what,
            wait=not args.no_wait,
            timeout=args.timeout,
            progress=progress,
        )
    _requested_no_more(settings.state_dir, node)
    try:
        view.refresh(settings)
    except (CloudError, UnwritableError) as exc:
        # The node was deleted, so a failed refresh is only a warning.
        output.warning(
            f"the node was deleted, but the snapshot still lists it, since the refresh failed: {exc}; "
            "`tpu_ops refresh` updates the snapshot"
        )
    return _say(args, node, runs, f"{'deleting' if args.no_wait else 'deleted'} {what}")


def _warn_of_remembered(settings: Settings, node: Node) -> None:
    recent = records.recent(settings.state_dir, records.KEPT)
    last = next((known for known in recent if node.node_id in known.node_ids), None)
    if last and not last.ended:
        look = f"`tpu_ops status {last.run_id}`"
        output.warning(f"run {last.run_id}, which was started on this machine, may be running on the node: {look}")


def _recoveries(state_dir: Path, node: Node) -> Iterator[str]:
    """Yield a warning for each run that uses the node and that is, or could be, recovered on this machine.

    Nodes are compared by name: a recovery may have recreated the node with another id.
    """
    for path in sorted((state_dir / "runs").glob("*/recovery.json")):
        run_id = path.parent.name
        with contextlib.suppress(OpsError):
            if node.full_name in {made.name for made in recovery.read(state_dir, run_id).plan.nodes}:
                what = recovery.note_of(state_dir, run_id) or f"run {run_id}: a process on this machine recovers it"
                yield f"{what}; recovery recreates this node unless `tpu_ops stop {run_id}` ends the recovery"


def _requested_no_more(state_dir: Path, node: Node) -> None:
    if any((state_dir / "runs").glob("*/requests.json")):
        # The node's queued resource was not deleted.
        recovery.taken_up(state_dir, [node._replace(queued_resource="")])


def chosen(fleet: Fleet, name: str, *, zone: str | None, project: str | None) -> Node:
    """Return the node with this name, or with this label if several nodes share the name.

    Raises:
        UsageError: No node or more than one node matches.
    """
    labels = {node.full_name: fleet.labels[node.full_name] for node in fleet.nodes}
    found = [
        node
        for node in fleet.nodes
        if name in (node.name, labels[node.full_name]) and zone in (None, node.zone) and project in (None, node.project)
    ]
    if not found:
        known = texts.some(sorted(labels.values(), key=texts.natural)) or "none"
        place = "".join(f", {kind} {value}" for kind, value in (("zone", zone), ("project", project)) if value)
        fix = f"known nodes: {known}"
        if any(name in (node.name, fleet.labels[node.full_name]) for node in fleet.listed if node not in fleet.nodes):
            fix = f"the node exists, but the fleet's filters exclude it: {targets.FILTERS}"
        raise UsageError(f"no node is called {name!r}", where=f"this fleet{place}", fix=fix)
    if len(found) > 1:
        names = " or ".join(sorted(labels[node.full_name] for node in found))
        fix = f"use {names}, or add --zone or --project"
        raise UsageError(f"several nodes are called {name!r}", where="this fleet", fix=fix)
    return found[0]


def _say(args: argparse.Namespace, node: Node, runs: Mapping[str, str], text: str) -> int:
    if args.json:
        facts = {"node": node.full_name, "dry_run": args.dry_run, "waited": not args.no_wait}
        output.as_json(facts | {"runs": [{"run_id": run_id, "person": person} for run_id, person in runs.items()]})
    else:
        output.line(text)
    return ExitCode.OK
