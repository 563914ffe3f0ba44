"""`tpu_ops firewall`: let ssh or mosh reach the workers from given address ranges."""

from __future__ import annotations

import argparse
import sys

from tpu_ops import config
from tpu_ops.cli import options, output
from tpu_ops.cloud import firewalls
from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.compute import Compute
from tpu_ops.cloud.node import Json
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import origin

#: Seconds to wait for the change.
_LIMIT = 300.0
#: Fields of a rule in the order in which they are shown.
_SHOWN = ("network", "direction", "allowed", "sourceRanges")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops firewall`."""
    parser.add_argument("service", choices=tuple(firewalls.SERVICES), help="ssh: TCP port 22; mosh: UDP 60000-61000")
    parser.add_argument(
        "--source",
        action="append",
        required=True,
        metavar="CIDR",
        help="addresses to let in, as in 203.0.113.7/32 (repeatable)",
    )
    parser.add_argument("--network", default="default", help="network of the nodes (default: default)")
    parser.add_argument("--project", help="project of the network (default: the fleet's, if it has only one)")
    parser.add_argument("--replace", action="store_true", help="replace a rule of the same name that differs")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation of a narrow rule")
    parser.add_argument("--dry-run", action="store_true", help="show the rule; change nothing")
    options.add_fleet(parser)
    options.add_json(parser)
    parser.epilog = "One rule is made for each network and service, for all machines of the network."


def run(args: argparse.Namespace) -> int:
    """Show and make the rule."""
    settings = config.load(args.fleet)
    ranges = firewalls.sources(args.source, "--source")
    project = config.check_project(options.only("project", args.project, settings.projects), "--project")
    wanted = firewalls.rule(args.service, project, _network(args.network), ranges)
    with origin.compute_api(settings) as compute:
        existing = firewalls.find(compute, wanted)
        outcome = _planned(existing, wanted, replace=args.replace)
        if not args.json:
            _show(existing, wanted, outcome)
        if outcome == "unchanged":
            return _say(args, wanted, outcome)
        if args.dry_run:
            return _say(args, wanted, outcome)
        if not _confirmed(args, wanted, ranges, outcome):
            output.info("nothing was changed")
            return ExitCode.FAILED
        outcome = _make(compute, existing, wanted, outcome)
    return _say(args, wanted, outcome)


def _network(text: str) -> str:
    if not text or not text.isascii() or not text.replace("-", "").isalnum():
        raise UsageError(f"{text!r} is not the name of a network", where="--network", fix="name it as in `default`")
    return text


def _planned(existing: Json | None, wanted: Json, *, replace: bool) -> str:
    """Return what has to be done to the rule, as a participle.

    Raises:
        UsageError: A rule of this name exists that differs, and must not be replaced.
    """
    if existing is None:
        return "created"
    found = firewalls.differences(existing, wanted)
    if found and not replace:
        raise UsageError(
            "a rule of this name exists and differs; nothing was changed",
            where=f"firewall rule {wanted['name']}",
            fix="add --replace, with every --source that the rule has to have",
            details=[f"{key}: it has {old}, you asked for {new}" for key, (old, new) in found.items()],
        )
    return "replaced" if found else "unchanged"


def _show(existing: Json | None, wanted: Json, outcome: str) -> None:
    output.line(f"firewall rule {wanted['name']}")
    for key in _SHOWN:
        value = wanted[key]
        if key == "allowed":
            value = ", ".join(f"{entry['IPProtocol']}:{','.join(entry['ports'])}" for entry in value)
        output.line(f"  {key}: {', '.join(value) if isinstance(value, list) else value}")
    if existing and outcome == "replaced":
        for key, (old, new) in firewalls.differences(existing, wanted).items():
            output.line(f"  changes {key}: {old} -> {new}")


def _confirmed(args: argparse.Namespace, wanted: Json, ranges: list[str], outcome: str) -> bool:
    doing = "creating" if outcome == "created" else "replacing"
    reach = f"{args.service} from {', '.join(ranges)} reach all machines of network {args.network}"
    if not args.yes and not options.confirmed(f"let {reach}, by rule {wanted['name']}?", f"{doing} the rule"):
        return False
    wide = next((text for text in ranges if text in firewalls.EVERYWHERE), None)
    return wide is None or _typed_again(wide, args.service)


def _typed_again(wide: str, service: str) -> bool:
    """Have the user type a range of all addresses once more; --yes does not replace this.

    Raises:
        UsageError: Standard input is not a terminal.
    """
    output.warning(f"{wide} lets everybody on the internet try to reach {service} on every machine of the network")
    if not options.can_ask():
        raise UsageError(
            f"{wide} has to be confirmed at a terminal, also with --yes",
            where="standard input, which is not a terminal",
            fix="name a narrower range, as in 203.0.113.7/32",
        )
    output.info(f"type {wide} once more to go on:")
    return sys.stdin.readline().strip() == wide


def _make(compute: Compute, existing: Json | None, wanted: Json, outcome: str) -> str:
    progress = options.Waiting(f"firewall rule {wanted['name']}")
    if existing is not None:
        firewalls.replace(compute, existing, wanted, timeout=_LIMIT, progress=progress)
        return outcome
    try:
        firewalls.create(compute, wanted, timeout=_LIMIT, progress=progress)
    except ApiError as exc:
        existing = firewalls.find(compute, wanted) if exc.status == "ALREADY_EXISTS" else None
        if existing is None:
            raise
        # Somebody else has created a rule of this name since it was looked up.
        return _planned(existing, wanted, replace=False)
    return outcome


def _say(args: argparse.Namespace, wanted: Json, outcome: str) -> int:
    if args.json:
        output.as_json({"rule": wanted, "outcome": outcome, "dry_run": args.dry_run})
    elif outcome == "unchanged":
        output.line("the rule exists already, with the same content")
    else:
        output.line(f"the rule {'would be' if args.dry_run else 'was'} {outcome}")
    return ExitCode.OK
