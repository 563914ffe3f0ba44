"""`tpu_ops keys push`: add your ssh key to the metadata of a node, or of a whole project."""

from __future__ import annotations

import argparse

from tpu_ops import config, texts
from tpu_ops.cli import options, output
from tpu_ops.cloud import nodes
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import login_keys, lookup, origin, view
from tpu_ops.fleet.view import Fleet
from tpu_ops.ssh import identities

#: Seconds to wait for the change.
_LIMIT = 900


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops keys`."""
    parser.add_argument("action", choices=("push",), help="push: add the public half of your key, if it is not there")
    parser.add_argument("owner", metavar="NODE|PROJECT", help="a node of the fleet, or one of the fleet's projects")
    parser.add_argument("--zone", help="zone of the node, if several nodes share the name")
    parser.add_argument("--project", help="project of the node, if several nodes share name and zone")
    parser.add_argument(
        "--timeout", type=options.seconds, default=_LIMIT, metavar="SECONDS", help=f"wait so long (default: {_LIMIT})"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the line that would be added; change nothing")
    options.add_fleet(parser)
    options.add_json(parser)
    parser.epilog = "All other lines and entries of the metadata stay as they are. No other value is shown."


def run(args: argparse.Namespace) -> int:
    """Push the key."""
    settings = config.load(args.fleet)
    line = identities.ssh_keys(settings)
    fleet, _ = view.look(settings)
    for text in fleet.warnings:
        output.warning(text)
    if _is_project(settings, fleet, args):
        return _to_project(settings, fleet, args.owner, line, args)
    return _to_node(settings, fleet, line, args)


def _is_project(settings: Settings, fleet: Fleet, args: argparse.Namespace) -> bool:
    if args.owner not in settings.projects or args.zone or args.project:
        return False
    if any(node.name == args.owner for node in fleet.nodes):
        what = f"{args.owner} is a project and the name of a node"
        raise UsageError(what, where="NODE|PROJECT", fix="add --zone for the node; rename the node for the project")
    return True


def _to_node(settings: Settings, fleet: Fleet, line: str, args: argparse.Namespace) -> int:
    node = lookup.node(fleet, args.owner, lookup.NamedPlace(args.zone, args.project))
    words = nodes.node_in_words(node.full_name)
    with origin.api(settings) as tpu:
        metadata = nodes.node_metadata(tpu, node.full_name)
        if login_keys.says_yes(metadata, login_keys.OS_LOGIN):
            _warn_of_os_login(words)
        if args.dry_run:
            is_new = _is_new(metadata.get(login_keys.ENTRY, ""), line)
        else:
            progress = options.Waiting(f"node {node.name}")
            is_new = login_keys.push_to_node(
                tpu, settings, node.full_name, line, timeout=args.timeout, progress=progress
            )
    return _say(args, node.full_name, words, line, is_new=is_new, ignored=[])


def _to_project(settings: Settings, fleet: Fleet, project: str, line: str, args: argparse.Namespace) -> int:
    words = f"project {project}"
    with origin.compute_api(settings) as compute, origin.api(settings) as tpu:
        metadata = login_keys.items_of(compute.call("GET", f"projects/{project}", words))
        if login_keys.says_yes(metadata, login_keys.OS_LOGIN):
            _warn_of_os_login(words)
        ignored = _ignoring(tpu, fleet, project)
        if args.dry_run:
            is_new = _is_new(metadata.get(login_keys.ENTRY, ""), line)
        else:
            progress = options.Waiting(words)
            is_new = login_keys.push_to_project(compute, project, line, timeout=args.timeout, progress=progress)
    if ignored:
        verb = "ignores" if len(ignored) == 1 else "ignore"
        output.warning(
            f"{texts.some(ignored)} {verb} the project's keys ({login_keys.BLOCKED} in the node's metadata): "
            f"`tpu_ops keys push {ignored[0]}` pushes the key to the node"
        )
    return _say(args, f"projects/{project}", words, line, is_new=is_new, ignored=ignored)


def _is_new(old: str, line: str) -> bool:
    return login_keys.merged(old, line) != old


def _ignoring(tpu: Tpu, fleet: Fleet, project: str) -> list[str]:
    """Return the labels of a project's nodes that ignore the keys in the project's metadata."""

    def ignores(name: str) -> bool:
        try:
            return login_keys.says_yes(nodes.node_metadata(tpu, name), login_keys.BLOCKED)
        except ApiError as exc:
            if exc.status != "NOT_FOUND":
                raise
            # The node was deleted after it was listed.
            return False

    names = [node.full_name for node in fleet.nodes if node.project == project]
    found = tpu.concurrently(ignores, names)
    return [fleet.labels[name] for name, is_ignoring in zip(names, found, strict=True) if is_ignoring]


def _warn_of_os_login(where: str) -> None:
    output.warning(f"{where}: with {login_keys.OS_LOGIN}, workers ignore all keys in the metadata (docs/ssh.md)")


def _say(args: argparse.Namespace, target: str, words: str, line: str, *, is_new: bool, ignored: list[str]) -> int:
    if args.json:
        facts = {"target": target, "line": line, "outcome": "added" if is_new else "unchanged"}
        output.as_json(facts | {"dry_run": args.dry_run, "ignored_by": ignored})
    elif not is_new:
        output.line(f"the key is there already: {words}")
    else:
        output.line(f"{'would add' if args.dry_run else 'added'} to {login_keys.ENTRY} of {words}:")
        output.line(f"  {line}")
    return ExitCode.OK
