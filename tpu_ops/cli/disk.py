"""`tpu_ops disk`: create, list and delete disks, attach them to nodes and detach them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from tpu_ops import config, texts
from tpu_ops.ansible import disk_mounts
from tpu_ops.ansible.disk_mounts import Mount
from tpu_ops.cli import interrupts, options, output, refresh
from tpu_ops.cli.configure import Progress
from tpu_ops.cloud import disks as cloud
from tpu_ops.cloud import operations
from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.compute import Compute
from tpu_ops.cloud.data_disks import READ_ONLY, READ_WRITE, WORDS
from tpu_ops.cloud.disks import Disk, DiskPlace, disk_place
from tpu_ops.cloud.listing import list_nodes
from tpu_ops.cloud.names import check_chosen
from tpu_ops.cloud.node import SERVING_STATES, Node, node_labels
from tpu_ops.cloud.remedies import until_ready
from tpu_ops.cloud.wish import DISK_MODES
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, ExitCode, UnreachableError, UsageError
from tpu_ops.fleet import disks, lookup, origin, view
from tpu_ops.fleet.disks import Held
from tpu_ops.fleet.view import Fleet

COLUMNS = ("disk", "zone", "type", "size", "used_by")
#: The cell of a disk that nothing uses.
UNUSED = "nothing: costs money without a node"
#: What a refresh that fails after a change leaves, as words for a warning.
_STALE = "the snapshot still has the node's former disks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands of `tpu_ops disk`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        options.add_fleet(command)
        options.add_json(command)
        return command

    def add_change(name: str, text: str, what: str) -> argparse.ArgumentParser:
        command = add(name, text)
        command.add_argument("name", help="name of the disk")
        if name in ("attach", "detach"):
            command.add_argument("node", help="name of the node")
        whose = "node" if name in ("attach", "detach") else "disk"
        default = "the fleet's, if it has only one" if name == "create" else f"that of the {whose} with this name"
        command.add_argument("--zone", help=f"zone of the {whose} (default: {default})")
        default = default if name in ("attach", "detach") else "the fleet's, if it has only one"
        command.add_argument("--project", help=f"project of the {whose} (default: {default})")
        if name in ("create", "delete"):
            options.add_waiting(command, 600)
        else:
            limit = 600
            command.add_argument(
                "--timeout",
                type=options.seconds,
                default=limit,
                metavar="SECONDS",
                help=f"wait at most this long for the API (default: {limit})",
            )
        command.add_argument("--dry-run", action="store_true", help=f"show what would be {what}; change nothing")
        return command

    create = add_change("create", "create a blank disk", "created")
    create.add_argument("--size", type=_size, required=True, metavar="GB", help="size in GB")
    create.add_argument(
        "--type",
        default=cloud.DEFAULT_TYPE,
        help=f"as in pd-ssd or hyperdisk-balanced (default: {cloud.DEFAULT_TYPE})",
    )
    add("list", "list the disks of the fleet's projects, and the nodes that have them")
    attach = add_change("attach", "attach a disk to all workers of a node", "attached")
    attach.add_argument(
        "--mode", choices=tuple(DISK_MODES), help="read-only or writable (default: rw for one worker, ro for several)"
    )
    attach.add_argument("--mount", type=_path, metavar="PATH", help="mount it there on all workers, by the role disks")
    attach.add_argument("--format", action="store_true", help="with --mount: make a file system if the disk is blank")
    detach = add_change("detach", "unmount a disk on the workers, and detach it from the node", "detached")
    detach.add_argument(
        "--unmount", type=_path, action="append", default=[], metavar="PATH", help="where it is mounted (repeatable)"
    )
    detach.add_argument("--no-unmount", action="store_true", help="do not ask the workers: the disk is not mounted")
    delete = add_change("delete", "delete a disk that nothing uses, with its data", "deleted")
    delete.add_argument("--yes", action="store_true", help="do not ask for confirmation")


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Run one of the subcommands."""
    settings = config.load(args.fleet)
    if args.action == "list":
        return _list(settings, as_json=args.json)
    actions = {"create": _create, "attach": _attach, "detach": _detach, "delete": _delete}
    return actions[args.action](settings, args)


def _size(text: str) -> int:
    """Return a size in GB, for argparse."""
    if not text.isdecimal() or not 0 < int(text) <= 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GB from 1 to 65536")
    return int(text)


def _path(text: str) -> str:
    """Return a mount point, for argparse."""
    if not text.startswith("/") or str(PurePosixPath(text)) != text or text == "/" or ".." in text.split("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mount point: write a whole path, as in /mnt/data")
    return text


def _list(settings: Settings, *, as_json: bool) -> int:
    """List the disks of all projects in all zones, since a disk costs money wherever it is."""
    with origin.compute_api(settings) as client:
        held, labels = _held(settings, client, settings.projects)
    if as_json:
        output.as_json([_row(one) for one in held])
        return ExitCode.OK
    if held:
        output.table([_cells(one, labels) for one in held], COLUMNS)
    else:
        output.info("no disk exists; `tpu_ops disk create` creates one")
    if unused := [f"{one.disk.name} ({one.disk.size} GB, {one.disk.zone})" for one in held if one.is_unused]:
        count = texts.count(len(unused), "disk")
        output.info(f"{count} without a node: {texts.some(unused)}; `tpu_ops disk delete NAME` deletes one")
    return ExitCode.OK


def _held(settings: Settings, client: Compute, projects: Sequence[str]) -> tuple[list[Held], dict[str, str]]:
    """Return the disks of projects with the nodes that have them, and the label of each node; print warnings."""
    with origin.api(settings) as tpu:
        nodes = list_nodes(tpu, projects)
    held, warnings = disks.look(client, projects, nodes.nodes, nodes.unanswered)
    for text in dict.fromkeys((*nodes.warnings, *warnings)):
        output.warning(text)
    return held, node_labels(nodes.nodes)


def _row(one: Held) -> dict[str, Any]:
    disk = one.disk
    return {
        "name": disk.name,
        "project": disk.project,
        "zone": disk.zone,
        "regional": disk.regional,
        "size_gb": disk.size,
        "type": disk.kind,
        "status": disk.status,
        "created": disk.created,
        "nodes": [{"node": use.node.full_name, "mode": _mode(use.mode)} for use in one.uses],
        "instances": list(disk.users),
        "unused": one.is_unused,
    }


def _cells(one: Held, labels: Mapping[str, str]) -> dict[str, str]:
    disk = one.disk
    users = [disks.in_words(use, labels) for use in one.uses]
    users = users or [user.rpartition("/")[2] for user in disk.users]
    used = texts.some(users, 4) or (UNUSED if one.certain else "unknown: not all nodes could be listed")
    return {"disk": disk.name, "zone": disk.zone, "type": disk.kind, "size": f"{disk.size} GB", "used_by": used}


def _mode(mode: str) -> str:
    return "ro" if mode == READ_ONLY else "rw"


def _look(settings: Settings, *, dry: bool) -> Fleet:
    """Return the fleet as the API lists it now, and print its warnings; a dry run writes no snapshot."""
    fleet, _ = view.look(settings) if dry else view.newest(settings)
    for text in fleet.warnings:
        output.warning(text)
    return fleet


def _create(settings: Settings, args: argparse.Namespace) -> int:
    """Create a disk, or wait for one that an earlier command began to create."""
    project = config.check_project(options.only("project", args.project, settings.projects), "--project")
    zone = config.check_zone(options.only("zone", args.zone, settings.zones), "--zone")
    place, kind = DiskPlace(project, zone, check_chosen(args.name, "disk", "NAME")), cloud.check_type(args.type)
    what = f"{place.where} ({args.size} GB, {kind})"
    with origin.compute_api(settings) as client:
        there = cloud.find(client, place)
        if args.dry_run:
            if there:
                _must_match(there, args.size, kind)
            text = "the disk exists already: nothing would be created" if there else f"would create {what}"
            return _say(args, place, "already there" if there else "created", text)
        outcome, operation = "already there", None
        if there is None:
            try:
                operation = cloud.create(client, place, size=args.size, kind=kind)
                outcome = "created"
            except ApiError as exc:
                # A colleague was faster.
                if exc.status != "ALREADY_EXISTS" or (there := cloud.find(client, place)) is None:
                    raise
        if there:
            _must_match(there, args.size, kind)
        progress = options.Waiting(f"disk {place.name}")
        if operation and not args.no_wait:
            client.wait(operation, cloud.zone_of(place), place.where, timeout=args.timeout, progress=progress)
        elif there and there.status == "CREATING" and not args.no_wait:

            def is_made() -> bool:
                found = cloud.find(client, place)
                return found is None or found.status != "CREATING"

            operations.until(
                is_made, what=place.where, timeout=args.timeout, progress=lambda elapsed: progress(elapsed, "CREATING")
            )
    if outcome == "created":
        output.info(f"the disk costs money until `tpu_ops disk delete {place.name} --zone {place.zone}`")
    done = "creating" if operation and args.no_wait else outcome
    text = f"{done} {what}" if operation else f"{what} exists already: nothing was created"
    return _say(args, place, outcome, text)


def _must_match(disk: Disk, size: int, kind: str) -> None:
    """Check that an existing disk has the requested properties.

    Raises:
        CloudError: The disk has another size or type.
    """
    if (disk.size, disk.kind) != (size, kind):
        raise CloudError(
            f"a disk of this name exists with {disk.size} GB and type {disk.kind}, not {size} GB and {kind}",
            where=disk.place.where,
            fix="use another name, or the existing disk",
        )


def _attach(settings: Settings, args: argparse.Namespace) -> int:
    """Attach a disk to a node, and mount it if this is requested."""
    fleet = _look(settings, dry=args.dry_run)
    node = lookup.node(fleet, args.node, lookup.NamedPlace(args.zone, args.project))
    with origin.compute_api(settings) as client:
        listed, warnings = cloud.list_disks(client, node.project)
    for text in warnings:
        output.warning(text)
    place = disks.for_node(listed, args.name, node).place
    mode = DISK_MODES[args.mode] if args.mode else READ_ONLY if node.worker_count > 1 else READ_WRITE
    disks.check_mode(place, mode, node, fleet.listed)
    _check_mount(args, node, mode)
    what = f"disk {place.name} to node {fleet.labels[node.full_name]}, {WORDS[mode]}"
    has = any(use.node.full_name == node.full_name for use in disks.uses(place, fleet.listed))
    if args.dry_run:
        text = "the node has the disk already: nothing would change" if has else f"would attach {what}"
        text += f"; would mount it at {args.mount}" if args.mount else ""
        return _say(args, place, "already there" if has else "attached", text, node=node.full_name, mode=_mode(mode))
    before = disk_mounts.seen(fleet, node) if args.mount and not has else {}
    progress = options.Waiting(f"node {node.name}")
    with origin.api(settings) as tpu:
        changed = disks.attach(tpu, settings, node.full_name, place, mode, timeout=args.timeout, progress=progress)
    fleet = refresh.after_change(settings, _STALE) or fleet
    if args.mount:
        now = next((one for one in fleet.nodes if one.full_name == node.full_name), node)
        how = Mount(args.mount, read_only=mode == READ_ONLY, blank=args.format)
        entry = disk_mounts.mount(fleet, now, how, before, display=Progress, progress=progress)
        output.info(f"add it to disks_mounts in inventory/group_vars to keep it there: {json.dumps(entry)}")
    text = f"attached {what}" if changed else "the node had the disk already"
    text += f"; mounted at {args.mount}" if args.mount else ""
    facts = {"node": node.full_name, "mode": _mode(mode), "mounted": args.mount}
    return _say(args, place, "attached" if changed else "already there", text, **facts)


def _check_mount(args: argparse.Namespace, node: Node, mode: str) -> None:
    """Refuse options that do not fit together, and a node whose workers cannot mount a disk now.

    Raises:
        UsageError: --format without --mount, or with a disk that is attached read-only.
        UnreachableError: The node is not READY.
    """
    if args.format and not args.mount:
        raise UsageError("only a disk that is mounted is formatted", where="--format", fix="add --mount PATH")
    if args.format and mode == READ_ONLY:
        fix = "attach the disk to a node with one worker first, with --mode rw"
        raise UsageError("a disk that is attached read-only cannot be formatted", where="--format", fix=fix)
    if args.mount and node.state not in SERVING_STATES:
        raise UnreachableError(f"the node is {node.state}", where=f"node {node.name}", fix=until_ready(node))


def _detach(settings: Settings, args: argparse.Namespace) -> int:
    """Unmount a disk on the workers, and detach it from the node."""
    if args.unmount and args.no_unmount:
        raise UsageError("these options exclude each other", where="--unmount, --no-unmount", fix="leave out one")
    fleet = _look(settings, dry=args.dry_run)
    node = lookup.node(fleet, args.node, lookup.NamedPlace(args.zone, args.project))
    places = [disk_place(disk["source"]) for disk in node.data_disks]
    place = next((at for at in places if at and at.name == args.name), None)
    own = place or DiskPlace(node.project, node.zone, args.name)
    what = f"disk {own.name} from node {fleet.labels[node.full_name]}"
    if place is None or args.dry_run:
        names = texts.some([at.name for at in places if at]) or "none"
        text = f"would detach {what}" if place else f"the node does not have the disk {args.name} (it has: {names})"
        return _say(args, own, "detached" if place else "not attached", text, node=node.full_name)
    points: list[str] = []
    if node.state in SERVING_STATES and not args.no_unmount:
        points = disk_mounts.unmount(fleet, node, args.unmount, Progress)
    if points:
        listed = "if disks_mounts in inventory/group_vars has it, remove it there"
        output.info(f"unmounted {', '.join(points)}; {listed}")
    progress = options.Waiting(f"node {node.name}")
    with origin.api(settings) as tpu:
        changed = disks.detach(tpu, settings, node.full_name, own, timeout=args.timeout, progress=progress)
    refresh.after_change(settings, _STALE)
    text = f"detached {what}" if changed else f"the node does not have the disk {own.name} any more"
    return _say(args, own, "detached" if changed else "not attached", text, node=node.full_name, unmounted=points)


def _delete(settings: Settings, args: argparse.Namespace) -> int:
    """Delete a disk that nothing uses."""
    project = config.check_project(options.only("project", args.project, settings.projects), "--project")
    with origin.compute_api(settings) as client:
        held, labels = _held(settings, client, [project])
        disk = disks.chosen([one.disk for one in held], args.name, zone=args.zone)
        _check_unused(next(one for one in held if one.disk is disk), labels)
        what = f"{disk.place.where} ({disk.size} GB, {disk.kind})"
        if args.dry_run:
            return _say(args, disk.place, "deleted", f"would delete {what} with its data")
        if not args.yes and not options.confirmed(f"delete {what} with its data?", "deleting"):
            output.info("nothing was deleted")
            return ExitCode.FAILED
        try:
            operation = cloud.delete(client, disk.place)
        except ApiError as exc:
            # A colleague was faster.
            if exc.status != "NOT_FOUND":
                raise
            operation = None
        if operation and not args.no_wait:
            progress = options.Waiting(f"disk {disk.name}")
            zone = cloud.zone_of(disk.place)
            client.wait(operation, zone, disk.place.where, timeout=args.timeout, progress=progress)
    return _say(args, disk.place, "deleted", f"{'deleting' if args.no_wait else 'deleted'} {what}")


def _check_unused(one: Held, labels: Mapping[str, str]) -> None:
    """Refuse to delete a disk that something uses.

    Raises:
        UsageError: A node or an instance uses the disk, or the disk is a regional one.
        CloudError: Not all nodes could be listed.
    """
    disk = one.disk
    if disk.regional:
        fix = f"`gcloud compute disks delete {disk.name} --region {disk.zone} --project {disk.project}`"
        raise UsageError("this is a regional disk", where=disk.place.where, fix=fix)
    if one.uses:
        names = texts.some([disks.in_words(use, labels) for use in one.uses])
        first = one.uses[0].node
        fix = f"`tpu_ops disk detach {disk.name} {labels.get(first.full_name, first.name)}` first"
        raise UsageError(f"the disk is attached to {names}", where=disk.place.where, fix=fix)
    if not one.certain:
        what, fix = "it is unknown whether a node has the disk: not all nodes could be listed", "try again later"
        raise CloudError(what, where=disk.place.where, fix=fix)
    if disk.users:
        names = texts.some([user.rpartition("/")[2] for user in disk.users])
        fix = "detach it first: gcloud compute instances detach-disk"
        raise UsageError(f"the disk is attached to the instance {names}", where=disk.place.where, fix=fix)


def _say(args: argparse.Namespace, place: DiskPlace, outcome: str, text: str, **facts: object) -> int:
    """Print the result of a command: the text, or with --json the outcome and further facts."""
    if args.json:
        common = {"disk": place.source, "outcome": outcome, "dry_run": args.dry_run}
        output.as_json({**common, **facts})
    else:
        output.line(text)
    return ExitCode.OK
