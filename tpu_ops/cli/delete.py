"""`tpu_ops delete`: delete TPU nodes and queued resources."""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_ops import config, texts
from tpu_ops.cli import node_uses, options, output, refresh
from tpu_ops.cli.node_uses import Uses
from tpu_ops.cloud import deletion
from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.deletion import Deletion
from tpu_ops.cloud.listing import QueuedListing, list_nodes, list_queued
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.remedies import queued_deletion
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, ExitCode, OpsError, UsageError
from tpu_ops.fleet import holdings, lookup, origin, view
from tpu_ops.fleet.lookup import Found, NamedPlace
from tpu_ops.fleet.state import Files, question_of
from tpu_ops.runs import holders, recovery

#: Most lines of a question's list.
_MOST = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops delete`."""
    parser.add_argument(
        "target", nargs="*", metavar="TARGET", help="a node, a node set such as 'tpu-[1-4]', or a queued resource"
    )
    parser.add_argument(
        "--failed",
        action="store_true",
        help="instead of targets: delete the queued resources that are FAILED or SUSPENDED and have no node",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--dry-run", action="store_true", help="show what would be deleted")
    shared = parser.add_argument_group("if names are shared")
    shared.add_argument("--zone", help="zone of the targets, if several nodes share a name")
    shared.add_argument("--project", help="project of the targets, if several nodes share name and zone")
    waits = parser.add_argument_group("waiting, output and fleet")
    options.add_waiting(waits, 900)
    options.add_json(waits)
    options.add_fleet(waits)
    parser.epilog = "A queued resource is deleted together with its last nodes."


def run(args: argparse.Namespace) -> int:
    """Delete nodes and queued resources."""
    settings = config.load(args.fleet)
    _check(args)
    if not args.dry_run:
        holdings.remind(settings, dt.datetime.now(dt.UTC))
    if args.failed:
        return _husks(settings, args)
    names = lookup.names(args.target)
    fleet, _ = view.look(settings)
    for text in fleet.warnings:
        output.warning(text)
    found = lookup.find(
        fleet,
        names,
        NamedPlace(args.zone, args.project),
        queued=lambda needed: _queued(settings, needed=needed, dry_run=args.dry_run),
        last=lambda: _last(settings),
    )
    for text in found.unknown:
        output.warning(f"{text}: skipped")
    plan = deletion.plan(found.nodes, found.queued, listed=fleet.listed, queued=found.known)
    nodes = [node for one in plan.deletions for node in one.nodes]
    uses = node_uses.look(fleet, nodes)
    if uses.in_words and (args.yes or args.dry_run):
        target = texts.target([fleet.labels[name] for name in uses.runs])
        output.warning(f"{uses.in_words}: `tpu_ops who {target}` shows more")
    for text in node_uses.recoveries(settings.state_dir, nodes, "recreates"):
        output.warning(text)
    for node in plan.stays:
        whose = "the node" if found.single else f"node {node.name}"
        stays = f"queued resource {node.queued_resource}, which created {whose}, stays and may use quota"
        output.warning(f"{stays}; to delete it with all its nodes: `{queued_deletion(node)}`")
    for node in found.gone:
        output.info(f"node {node.name}, zone {node.zone}, project {node.project}: it is gone already")
    rows = _single if found.single else _rows
    if args.dry_run:
        return _say(args, plan.deletions, {}, rows(args, found, plan.deletions, uses, {}))
    if plan.deletions and not args.yes and not _confirmed(plan.deletions, uses):
        output.info("nothing was deleted")
        return ExitCode.FAILED
    failures = _delete(settings, plan.deletions, args)
    done = [one for one in plan.deletions if one.name not in failures]
    _requested_no_more(settings.state_dir, [*_deleted(done), *_alone(found.gone)])
    if found.gone or any(one.nodes for one in done):
        what = "the nodes were deleted, but the snapshot still lists them"
        if len(done) <= 1:
            what = "the node was deleted, but the snapshot still lists it"
        refresh.after_change(settings, what)
    # The error of a single node is the whole result.
    result = {} if found.single and failures else rows(args, found, plan.deletions, uses, failures)
    return _say(args, plan.deletions, failures, result)


def _check(args: argparse.Namespace) -> None:
    if args.failed and args.target:
        raise UsageError("--failed takes no targets", where=args.target[0], fix="leave out the target, or --failed")
    if not args.failed and not args.target:
        fix = "name a node, as in `tpu_ops delete pod`, or use --failed"
        raise UsageError("no target is given", where="tpu_ops delete", fix=fix)


def _queued(settings: Settings, *, needed: bool, dry_run: bool) -> QueuedListing:
    """Return the queued resources of the fleet's projects and zones.

    If they cannot be listed, nothing is deleted: a queued resource would be left without its nodes. It is only a
    warning if the user must not list them, or has no credentials and only looks. Places in which this is only a warning
    are not in the result's ``unanswered``.

    Args:
        settings: The settings of the fleet.
        needed: Whether a target may be a queued resource.
        dry_run: Whether nothing will be deleted.

    Raises:
        CloudError: The API refused or did not answer.
    """
    try:
        with origin.api(settings) as tpu:
            found = list_queued(tpu, settings.projects, settings.zones)
    except CloudError as exc:
        is_denied = isinstance(exc, ApiError) and exc.status == "PERMISSION_DENIED"
        if needed or not (dry_run or is_denied):
            raise
        output.warning(f"the queued resources are unknown: {exc}")
        return QueuedListing()
    for text in found.warnings:
        output.warning(text)
    unanswered = () if dry_run else tuple(place for place in found.unanswered if place not in found.denied)
    return found._replace(unanswered=unanswered)


def _last(settings: Settings) -> Sequence[Node]:
    """Return the nodes in the stored snapshot."""
    stored = Files(settings.state_dir).read()
    answer = stored.answer(question_of(settings)) if stored else None
    return answer.nodes if answer else ()


def _confirmed(deletions: Sequence[Deletion], uses: Uses) -> bool:
    """Ask once whether all deletions are wanted; the question says what runs there and what is lost."""
    runs = f"{uses.in_words}; " if uses.in_words else ""
    if len(deletions) == 1:
        one = deletions[0]
        return options.confirmed(f"{runs}delete {one.whole} ({one.size}){_lost(deletions)}?", "deleting")
    if options.can_ask():
        for one in deletions[:_MOST]:
            its = dict(run for node in one.nodes for run in uses.runs.get(node.full_name, {}).items())
            output.info(f"  {one.whole} ({one.size}){f': {holders.named(its)}' if its else ''}")
        if len(deletions) > _MOST:
            output.info(f"  and {len(deletions) - _MOST} more")
    return options.confirmed(f"{runs}delete {_count(deletions)}{_lost(deletions)}?", "deleting")


def _lost(deletions: Sequence[Deletion]) -> str:
    lost = " and ".join(text for text in dict.fromkeys(one.lost for one in deletions) if text)
    return f" with {lost}" if lost else ""


def _count(deletions: Sequence[Deletion]) -> str:
    alone = sum(1 for one in deletions if not one.queued)
    queued = len(deletions) - alone
    parts = [texts.count(number, noun) for number, noun in ((alone, "node"), (queued, "queued resource")) if number]
    return " and ".join(parts)


def _delete(settings: Settings, deletions: Sequence[Deletion], args: argparse.Namespace) -> dict[str, OpsError]:
    """Delete all at once; return the resource name of each deletion that failed, with its error, in order."""
    if not deletions:
        return {}
    words = {one.name: one.in_words if len(deletions) > 1 else one.in_words.partition(",")[0] for one in deletions}
    waiting = options.waiting_for(list(words.values()), "deletion")
    with origin.api(settings) as tpu:
        try:
            ended = deletion.delete_all(
                tpu,
                deletions,
                wait=not args.no_wait,
                timeout=args.timeout,
                progress=lambda one: waiting(words[one.name]),
            )
        except KeyboardInterrupt:
            if len(deletions) > 1:
                output.info("the API continues each deletion that has begun; run the same command again for the rest")
            raise
    return {one.name: failure for one, failure in zip(deletions, ended, strict=True) if failure}


def _deleted(done: Iterable[Deletion]) -> list[Node]:
    """Return the deleted nodes, without their queued resource unless that was deleted too."""
    return [node for one in done for node in (one.nodes if one.queued else _alone(one.nodes))]


def _alone(nodes: Iterable[Node]) -> list[Node]:
    return [node._replace(queued_resource="") for node in nodes]


def _requested_no_more(state_dir: Path, nodes: Sequence[Node]) -> None:
    if any((state_dir / "runs").glob("*/requests.json")):
        recovery.taken_up(state_dir, nodes)


def _say(
    args: argparse.Namespace, deletions: Sequence[Deletion], failures: Mapping[str, OpsError], result: dict[str, Any]
) -> int:
    """Print what was deleted, and raise the first error.

    Args:
        args: The arguments of the command.
        deletions: What should be deleted.
        failures: Resource name of each deletion that failed -> the error.
        result: The result for --json; empty prints none.
    """
    if args.json and result:
        output.as_json(result)
    for one in () if args.json else deletions:
        if args.dry_run:
            output.line(f"would delete {one.whole} ({one.size})")
        elif one.name not in failures:
            output.line(f"{'deleting' if args.no_wait else 'deleted'} {one.whole}")
    errors = list(failures.values())
    for failure in errors[1:]:
        output.warning(str(failure))
    if errors:
        raise errors[0]
    return ExitCode.OK


def _single(
    args: argparse.Namespace, found: Found, deletions: Sequence[Deletion], uses: Uses, _: Mapping[str, OpsError]
) -> dict[str, Any]:
    """Return the result for one node."""
    source = [one.name for one in deletions if one.queued]
    return _row(args, (*found.nodes, *found.gone)[0], uses) | ({"queued_resource": source[0]} if source else {})


def _row(args: argparse.Namespace, node: Node, uses: Uses) -> dict[str, Any]:
    runs = uses.runs.get(node.full_name, {})
    return {
        "node": node.full_name,
        "dry_run": args.dry_run,
        "waited": not args.no_wait,
        "runs": [{"run_id": run_id, "person": person} for run_id, person in runs.items()],
    }


def _rows(
    args: argparse.Namespace,
    found: Found,
    deletions: Sequence[Deletion],
    uses: Uses,
    failures: Mapping[str, OpsError],
) -> dict[str, Any]:
    """Return the result for several targets, or for a queued resource."""
    nodes, queued = list[dict[str, Any]](), list[dict[str, Any]]()
    for one in deletions:
        failure = failures.get(one.name)
        error = {"error": failure.to_json()["error"]} if failure else {}
        source = {"queued_resource": one.name if one.queued else None}
        nodes += [_row(args, node, uses) | source | error for node in one.nodes]
        if one.queued:
            members = [node.full_name for node in one.nodes]
            facts = {"queued_resource": one.name, "state": one.queued.state, "nodes": members}
            queued.append(facts | {"dry_run": args.dry_run, "waited": not args.no_wait} | error)
    gone = [node.full_name for node in found.gone]
    return {"nodes": nodes, "queued_resources": queued, "gone": gone}


def _husks(settings: Settings, args: argparse.Namespace) -> int:
    """Delete the queued resources that only use quota."""
    if args.project not in (None, *settings.projects):
        fix = f"use one of {', '.join(settings.projects)}, or see `projects` in {settings.file}"
        raise UsageError(f"the fleet has no project {args.project!r}", where="--project", fix=fix)
    projects = [args.project] if args.project else settings.projects
    zones = [args.zone] if args.zone else []
    with origin.api(settings) as tpu:
        listing = list_nodes(tpu, projects, zones)
        queue = list_queued(tpu, projects, zones)
    for text in dict.fromkeys((*listing.warnings, *queue.warnings)):
        output.warning(text)
    found = deletion.husks(queue.queued, listing.nodes, listing.unanswered)
    for one, reason in found.left:
        output.info(f"{Deletion((), one).in_words} ({one.state}) stays: {reason}")
    nobody = Uses({}, "")
    failures: dict[str, OpsError] = {}
    if not found.deletions:
        place = NamedPlace(args.zone, args.project).in_words
        known = "known " if queue.unanswered else ""
        output.info(f"this fleet{place}: no {known}queued resource without nodes is FAILED or SUSPENDED")
    elif not args.dry_run:
        if not args.yes and not _confirmed(found.deletions, nobody):
            output.info("nothing was deleted")
            return ExitCode.FAILED
        failures = _delete(settings, found.deletions, args)
    left = {"left": [one.full_name for one, _ in found.left]}
    return _say(
        args, found.deletions, failures, _rows(args, Found((), (), (), ()), found.deletions, nobody, failures) | left
    )
