"""`tpu_ops refresh`: ask the API, show what changed, rewrite ssh config and known_hosts."""

from __future__ import annotations

import argparse

from tpu_ops import config
from tpu_ops.cli import options, output
from tpu_ops.errors import ExitCode
from tpu_ops.fleet import view
from tpu_ops.fleet.diff import Changes
from tpu_ops.fleet.view import Fleet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops refresh`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what changed; write nothing")
    parser.add_argument(
        "--verify-keys",
        action="store_true",
        help="compare the host keys of all nodes, not only learn those of new ones",
    )


def run(args: argparse.Namespace) -> int:
    """Refresh the view of the fleet."""
    settings = config.load(args.fleet)
    if args.dry_run:
        fleet, changes = view.look(settings)
    else:
        fleet, changes = view.refresh(settings, verify_keys=args.verify_keys)
    for text in fleet.warnings:
        output.warning(text)
    if args.json:
        written = {} if args.dry_run else {"ssh_config": str(fleet.ssh_config), "known_hosts": str(fleet.known_hosts)}
        output.as_json({**changes.to_json(), "warnings": fleet.warnings, "workers": len(fleet.workers), **written})
        return ExitCode.OK
    for text in changes.news():
        output.line(text)
    output.line(summary(fleet, changes))
    if not args.dry_run:
        output.line(f"ssh -F {fleet.ssh_config} HOST")
    return ExitCode.OK


def summary(fleet: Fleet, changes: Changes) -> str:
    """Return the last line: how large the fleet is, and whether anything changed."""
    counts = (("node", len(fleet.nodes)), ("worker", len(fleet.workers)))
    size = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts)
    if changes.first:
        return f"first look: {size}"
    return size if changes else f"{size}, no change"
