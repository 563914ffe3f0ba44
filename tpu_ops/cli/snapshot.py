"""`tpu_ops snapshot`: publish a snapshot of the fleet, or show the source and age of the current snapshot."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tpu_ops import config, texts
from tpu_ops.cli import options, output
from tpu_ops.cloud.node import workers_of
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import origin, view
from tpu_ops.fleet.publishing import documents, sources
from tpu_ops.fleet.state import Files
from tpu_ops.fleet.view import Fleet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops snapshot`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument(
        "--publish",
        metavar="PATH|gs://BUCKET/OBJECT|-",
        help="ask the API and write a snapshot to this destination, for people without credentials (`-`: print it)",
    )
    parser.add_argument("--cached", action="store_true", help="publish the last known view; do not ask the API")
    parser.add_argument("--dry-run", action="store_true", help="show what would be published; write nothing")
    parser.epilog = (
        "Without --publish: show the source and the age of the current snapshot. Others read a published snapshot "
        "with `tpu_ops refresh --from`. A snapshot contains names, addresses and labels of nodes, but no secrets: see "
        "docs/members.md."
    )


def run(args: argparse.Namespace) -> int:
    """Publish a snapshot, or describe the current one."""
    settings = config.load(args.fleet)
    if args.publish is None:
        if args.cached or args.dry_run:
            raise UsageError("this option goes with --publish only", where="--cached or --dry-run", fix="add --publish")
        return _show(_known(settings), as_json=args.json)
    printed = args.publish == "-"
    if printed and args.json:
        raise UsageError("the snapshot is JSON already", where="--publish -", fix="leave --json out")
    destination = "" if printed else sources.destination(args.publish, Path.cwd(), "--publish")
    fleet = _known(settings) if args.cached else _asked(settings)
    # Publish all nodes, even those that filters exclude: workers' names depend on which nodes are known.
    projects = settings.projects or tuple(sorted({node.project for node in fleet.listed}))
    known, first = Files(settings.state_dir).host_keys()
    places = (projects, settings.zones)
    document = documents.document(
        fleet.asked_at, *places, fleet.listed, known, trusted_first=first, unlisted=fleet.unanswered
    )
    text = documents.publishable(document, time.time())
    if printed:
        output.as_it_is(text.rstrip("\n"))
        return ExitCode.OK
    if not args.dry_run:
        sources.write(destination, text, settings)
    counts = {
        "nodes": len(fleet.listed),
        "workers": len(workers_of(fleet.listed)),
        "host_keys": len(document.host_keys),
    }
    if args.json:
        output.as_json({"destination": destination, "asked_at": fleet.asked_at, "bytes": len(text), **counts})
        return ExitCode.OK
    done = "would publish" if args.dry_run else "published"
    keys = f"host keys of {texts.count(len(document.host_keys), 'worker')}"
    size = f"{texts.count(counts['nodes'], 'node')}, {texts.count(counts['workers'], 'worker')}"
    output.line(f"{done} {size}, {keys}, {len(text) / 1000:.1f} kB: {destination}")
    return ExitCode.OK


def _known(settings: Settings) -> Fleet:
    fleet = view.known(settings)
    if fleet is None:
        raise UsageError("nothing is known of this fleet yet", where=str(settings.path), fix="tpu_ops refresh")
    for text in fleet.warnings:
        output.warning(text)
    return fleet


def _asked(settings: Settings) -> Fleet:
    """Ask the API for the fleet; refuse if the fleet is read from a snapshot, which is not to be published as new."""
    if source := origin.source_of(settings):
        raise UsageError(
            f"this fleet is itself read from a published snapshot, {sources.shown(source)}",
            where="--publish",
            fix="with credentials, use the API again: `tpu_ops refresh --from api`; or publish this view: --cached",
        )
    fleet, _ = view.refresh(settings)
    for text in fleet.warnings:
        output.warning(text)
    return fleet


def _show(fleet: Fleet, *, as_json: bool) -> int:
    file = Files(fleet.settings.state_dir).snapshot
    when = output.at(fleet.asked_at)
    if as_json:
        output.as_json(
            {
                "source": sources.shown(fleet.source) if fleet.source else "api",
                "asked_at": fleet.asked_at,
                "age": max(0.0, time.time() - fleet.asked_at),
                "nodes": len(fleet.nodes),
                "workers": len(fleet.workers),
                "file": str(file),
            }
        )
        return ExitCode.OK
    output.line(f"{_size(fleet)}, {fleet.age}")
    output.line(f"the API was asked at {when}; the snapshot is in {file}")
    return ExitCode.OK


def _size(fleet: Fleet) -> str:
    return f"{texts.count(len(fleet.nodes), 'node')}, {texts.count(len(fleet.workers), 'worker')}"
