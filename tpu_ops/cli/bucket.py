"""`tpu_ops bucket`: create a bucket in the fleet's region, and check whether a bucket is near the fleet's nodes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tpu_ops import config, texts
from tpu_ops.cli import options, output
from tpu_ops.cloud import bucket_places
from tpu_ops.cloud.bucket_places import Level, Verdict
from tpu_ops.cloud.node import region_of
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode
from tpu_ops.fleet import contact, view

COLUMNS = ("region", "nodes", "verdict", "reading")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands of `tpu_ops bucket`."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, more: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}")
        command.add_argument("bucket", metavar="NAME", help="name of the bucket")
        options.add_fleet(command)
        options.add_json(command)
        return command

    create = add(
        "create",
        "create a bucket in the region of the fleet's nodes",
        "The bucket has uniform bucket-level access and no public access. A bucket that the project has already, in "
        "the same region, is left unchanged.",
    )
    create.add_argument("--region", help="region of the bucket (default: the only region of the fleet)")
    create.add_argument("--project", help="project that owns the bucket (default: the only project of the fleet)")
    create.add_argument("--dry-run", action="store_true", help="show what would be created")
    check = add(
        "check",
        "show where a bucket is, and what reading it costs in each region of the fleet",
        "Exits with 1 if it is refused for a region. `tpu_ops doctor TARGET --bucket NAME` also tries the access.",
    )
    check.add_argument("target", nargs="?", help="a node, a node set or a group (default: the whole fleet)")


def run(args: argparse.Namespace) -> int:
    """Run one subcommand of `tpu_ops bucket`."""
    settings = config.load(args.fleet)
    name = bucket_places.name_of(args.bucket, "NAME")
    return _create(settings, name, args) if args.command == "create" else _check(settings, name, args)


def _create(settings: Settings, name: str, args: argparse.Namespace) -> int:
    project = options.only("project", args.project or None, settings.projects)
    region = args.region or options.only("region", None, list(_regions(settings, "")))
    region = bucket_places.region_of(region, "--region")
    new = not args.dry_run and bucket_places.create(name, region, project, settings.auth, settings.request_timeout)
    if args.json:
        told = {"bucket": name, "region": region, "project": project, "created": new, "dry_run": args.dry_run}
        output.as_json(told)
    elif args.dry_run or new:
        what = "would create" if args.dry_run else "created"
        access = "uniform bucket-level access, no public access"
        output.line(f"{what} gs://{name} in {region}, project {project}: {access}")
    else:
        output.line(f"gs://{name} exists already in {region}, project {project}: nothing was changed")
    return ExitCode.OK


def _check(settings: Settings, name: str, args: argparse.Namespace) -> int:
    regions = _regions(settings, args.target or "")
    place = bucket_places.find(name, settings.auth, settings.request_timeout)
    verdicts = {region: bucket_places.verdict(place, region) for region in regions}
    if args.json:
        rows = [
            {
                "region": region,
                "nodes": regions[region],
                "verdict": found.level,
                "reason": found.reason,
                "price": found.price,
            }
            for region, found in verdicts.items()
        ]
        told = {"location": place.location, "location_type": place.kind, "regions": list(place.regions)}
        output.as_json({"bucket": name, **told, "verdicts": rows})
    else:
        output.line(f"gs://{name} is in {place}")
        output.table([_row(region, regions[region], found) for region, found in verdicts.items()], COLUMNS)
    if not regions:
        output.warning("the fleet has no nodes and names no zones: there is no region to compare the bucket with")
    return ExitCode.FAILED if any(found.level is Level.REFUSED for found in verdicts.values()) else ExitCode.OK


def _row(region: str, nodes: Sequence[str], found: Verdict) -> dict[str, str]:
    reading = found.price or "free"
    return {"region": region, "nodes": texts.some(nodes, 4), "verdict": found.level, "reading": reading}


def _regions(settings: Settings, target: str) -> dict[str, list[str]]:
    """Return the regions of a target's nodes, or of the whole fleet, with the nodes' names.

    A fleet without nodes has the regions of its zones.
    """
    if target:
        fleet, workers = contact.find(settings, target)
        nodes = list({worker.node.full_name: worker.node for worker in workers}.values())
    else:
        fleet = view.current(settings)
        nodes = list(fleet.nodes)
    found: dict[str, list[str]] = {}
    for node in nodes:
        found.setdefault(node.region, []).append(fleet.labels[node.full_name])
    return dict(sorted(found.items())) or {region_of(zone): [] for zone in settings.zones}
