"""`tpu_ops node`: stop, start or restart nodes, or show all facts of a node."""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tpu_ops import config, texts
from tpu_ops.cli import node_uses, options, output, refresh
from tpu_ops.cli.node_uses import Uses
from tpu_ops.cloud import bodies, deletion, operations, power
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.nodes import node_in_words
from tpu_ops.cloud.power import DONE, RESTART, START, STOP
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, ExitCode, OpsError
from tpu_ops.fleet import holdings, lookup, origin, view
from tpu_ops.fleet.hostvars import facts
from tpu_ops.fleet.lookup import NamedPlace
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import holders

DESCRIBE = "describe"
#: The actions that need confirmation, each as the beginning of a sentence.
_DOING = {STOP: "stopping", RESTART: "restarting"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops node`."""
    parser.add_argument("action", choices=(START, STOP, RESTART, DESCRIBE), help="what to do")
    parser.add_argument("target", nargs="+", metavar="TARGET", help="a node, or a node set such as 'tpu-[1-4]'")
    parser.add_argument("--zone", help="zone of the node, if several nodes share the name")
    parser.add_argument("--project", help="project of the node, if several nodes share name and zone")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation before a stop")
    options.add_waiting(parser, 900)
    parser.add_argument("--dry-run", action="store_true", help="show what would be done")
    options.add_fleet(parser)
    options.add_json(parser)
    parser.epilog = (
        "Only nodes with one worker that are neither spot nodes nor made by a queued resource can be stopped and "
        "started."
    )


def run(args: argparse.Namespace) -> int:
    """Stop, start, restart or describe nodes."""
    settings = config.load(args.fleet)
    fleet, _ = view.look(settings)
    for text in fleet.warnings:
        output.warning(text)
    nodes = _nodes(fleet, args)
    if args.action == DESCRIBE:
        return _describe(fleet, nodes, as_json=args.json)
    _refuse(nodes, args.action)
    wanted = [node for node in nodes if not power.is_done(node, args.action)]
    ended = [] if args.action == START else wanted
    uses = node_uses.look(fleet, ended)
    if uses.in_words and (args.yes or args.dry_run):
        target = texts.target([fleet.labels[name] for name in uses.runs])
        output.warning(f"{uses.in_words}: `tpu_ops who {target}` shows more")
    for text in node_uses.recoveries(settings.state_dir, ended, "starts"):
        output.warning(text)
    if args.dry_run:
        return _say(args, nodes, _Done({node.full_name: f"would {args.action}" for node in wanted}, {}, uses))
    holdings.remind(settings, dt.datetime.now(dt.UTC))
    if ended and not args.yes and not _confirmed(ended, uses, args.action):
        output.info(f"nothing was {DONE[args.action]}")
        return ExitCode.FAILED
    return _say(args, nodes, _act(settings, nodes, uses, args))


def _nodes(fleet: Fleet, args: argparse.Namespace) -> list[Node]:
    """Return the nodes that the targets name.

    Raises:
        UsageError: A name is unknown or ambiguous.
    """
    place = NamedPlace(args.zone, args.project)
    found = {node.full_name: node for node in (lookup.node(fleet, name, place) for name in lookup.names(args.target))}
    return list(found.values())


def _describe(fleet: Fleet, nodes: Sequence[Node], *, as_json: bool) -> int:
    """Print all facts of nodes."""
    sources = _sources(fleet.settings, nodes)
    found = [
        {
            **node.to_json(),
            "full_name": node.full_name,
            "label": fleet.labels[node.full_name],
            "region": node.region,
            "worker_count": node.worker_count,
            "workers": [facts(worker) for worker in fleet.workers if worker.node.full_name == node.full_name],
            "queued": sources.get(deletion.source_of(node)),
        }
        for node in nodes
    ]
    if as_json:
        output.as_json(found[0] if len(found) == 1 else {"nodes": found})
        return ExitCode.OK
    for number, described in enumerate(found):
        if number:
            output.line()
        lines = _lines(described)
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            output.line(f"{name.ljust(width)}  {text or '-'}")
    if fleet.source:
        output.info(f"as {fleet.age}")
    return ExitCode.OK


def _sources(settings: Settings, nodes: Sequence[Node]) -> dict[str, dict[str, Any]]:
    """Return the queued resources of nodes, by resource name; those that the API does not describe are left out."""
    names = sorted({source for node in nodes if (source := deletion.source_of(node))})
    if not names:
        return {}
    try:
        with origin.api(settings) as tpu:
            answers = [(name, bodies.queued(tpu, name)) for name in names]
    except CloudError as exc:
        output.warning(f"the queued resource is not described: {exc}")
        return {}
    return {
        name: {
            "name": name,
            "state": one.state,
            "create_time": one.created,
            "error": one.error,
            "nodes": [member.rpartition("/")[2] for member in one.nodes],
        }
        for name, one in answers
        if one
    }


#: Facts in lines of their own form, and facts that only programs need.
_APART = ("labels", "symptoms", "data_disks", "metadata_keys", "workers", "queued", "queued_resource")
_FOR_PROGRAMS = ("internal_ips", "external_ips", "instance_names", "full_name")


def _lines(described: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all facts of a node as names and texts."""
    lines = [
        (key.replace("_", " "), _text(value))
        for key, value in described.items()
        if key not in (*_APART, *_FOR_PROGRAMS)
    ]
    lines.append(("labels", ", ".join(f"{key}={value}" for key, value in described["labels"].items())))
    # The values can be secret.
    lines.append(("metadata keys", ", ".join(described["metadata_keys"])))
    lines += [("data disk", f"{disk['source']} ({disk['mode']})") for disk in described["data_disks"]]
    queued = described["queued"]
    more = f" ({queued['state']}, for {texts.some(queued['nodes'])})" if queued else ""
    lines.append(("queued resource", f"{described['queued_resource']}{more}"))
    for symptom in described["symptoms"]:
        where = f" of worker {symptom['worker_id']}" if symptom["worker_id"] else ""
        lines.append(("symptom", f"{symptom['type']}{where} at {symptom['create_time']}: {symptom['details']}"))
    for worker in described["workers"]:
        addresses = f"{worker['internal_ip'] or '-'}  {worker['external_ip'] or '-'}  {worker['instance_name']}"
        lines.append((f"worker {worker['worker_index']}", f"{worker['host']}  {addresses.rstrip()}"))
    return lines


def _text(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _refuse(nodes: Sequence[Node], action: str) -> None:
    """Refuse what the API cannot do, before anything is changed.

    Raises:
        CloudError: A node cannot be stopped or started; the error has the reason and the fix of each.
    """
    problems = [problem for node in nodes if (problem := power.refusal(node, action))]
    if len(problems) == 1:
        raise problems[0]
    if problems:
        others = len(problems) < len(nodes)
        raise CloudError(
            f"{texts.count(len(problems), 'node')} cannot be {DONE[action]}, and nothing was changed",
            where=texts.some([node.name for node in nodes if power.refusal(node, action)]),
            fix="name only the other nodes" if others else "delete these nodes to end their cost, as each line says",
            details=[str(problem) for problem in problems],
        )


def _confirmed(nodes: Sequence[Node], uses: Uses, action: str) -> bool:
    runs = f"{uses.in_words}; " if uses.in_words else ""
    what = node_in_words(nodes[0].full_name) if len(nodes) == 1 else texts.count(len(nodes), "node")
    if len(nodes) > 1 and options.can_ask():
        for node in nodes:
            its = holders.named(uses.runs.get(node.full_name, {}))
            output.info(f"  {node_in_words(node.full_name)}{f': {its}' if its else ''}")
    lost = "which ends all processes there and keeps the disks"
    return options.confirmed(f"{runs}{action} {what}, {lost}?", _DOING[action])


class _Done(NamedTuple):
    """What became of the nodes, each by its resource name.

    Attributes:
        outcomes: The outcomes.
        failures: The errors.
        uses: The runs that were active on the nodes before.
        fleet: The fleet after it; None if nothing was changed, or if it is unknown.
    """

    outcomes: Mapping[str, str]
    failures: Mapping[str, OpsError]
    uses: Uses
    fleet: Fleet | None = None


def _act(settings: Settings, nodes: Sequence[Node], uses: Uses, args: argparse.Namespace) -> _Done:
    """Stop or start all nodes at once, and refresh the fleet."""
    told = options.waiting_for([node.name for node in nodes])
    with origin.api(settings) as tpu:
        try:
            ended = operations.each(
                tpu,
                lambda node: power.act(
                    tpu, node, args.action, wait=not args.no_wait, timeout=args.timeout, progress=told(node.name)
                ),
                nodes,
            )
        except KeyboardInterrupt:
            output.info("the API continues what has begun; run the same command again for the rest")
            raise
    pairs = [(node.full_name, *result) for node, result in zip(nodes, ended, strict=True)]
    outcomes = {name: outcome for name, outcome, _ in pairs if outcome}
    failures = {name: failure for name, _, failure in pairs if failure}
    stale = "the new states and addresses are not stored"
    return _Done(outcomes, failures, uses, refresh.after_change(settings, stale) if outcomes else None)


def _say(args: argparse.Namespace, nodes: Sequence[Node], done: _Done) -> int:
    """Print the result of each node, and raise the first error."""
    errors = list(done.failures.values())
    rows = [_row(args, node, done) for node in nodes]
    if args.json and (len(rows) > 1 or not errors):
        output.as_json(rows[0] if len(rows) == 1 else {"nodes": rows})
    elif not args.json:
        for node, row in zip(nodes, rows, strict=True):
            if row["outcome"] != "failed":
                output.line(f"{row['outcome']}: {node_in_words(node.full_name)}")
            for worker in row["workers"] if args.action != STOP else ():
                output.line(f"  {worker['host']}  {worker['internal_ip'] or '-'}  {worker['external_ip'] or '-'}")
    for failure in errors[1:]:
        output.warning(str(failure))
    if errors:
        raise errors[0]
    return ExitCode.OK


def _row(args: argparse.Namespace, node: Node, done: _Done) -> dict[str, Any]:
    failure = done.failures.get(node.full_name)
    outcome = done.outcomes.get(node.full_name, f"already {DONE[args.action]}")
    listed = done.fleet.workers if done.fleet else ()
    runs = done.uses.runs.get(node.full_name, {})
    return {
        "node": node.full_name,
        "outcome": "failed" if failure else outcome,
        "dry_run": args.dry_run,
        "waited": not args.no_wait,
        "runs": [{"run_id": run_id, "person": person} for run_id, person in runs.items()],
        "workers": [facts(worker) for worker in listed if worker.node.full_name == node.full_name],
        **({"error": failure.to_json()["error"]} if failure else {}),
    }
