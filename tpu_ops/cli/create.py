"""`tpu_ops create`: create TPU nodes and wait until they are ready."""

from __future__ import annotations

import argparse
import datetime as dt
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpu_ops import config, texts
from tpu_ops.ansible import boot_bundles
from tpu_ops.cli import options, output
from tpu_ops.cli.terminal import Meaning
from tpu_ops.cloud import bodies, buckets, creation, lifecycle
from tpu_ops.cloud.accelerators import default_runtime, generations, spelled
from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.creation import Created, CreationTerms, Order
from tpu_ops.cloud.node import tier, without_workers
from tpu_ops.cloud.remedies import until_ready
from tpu_ops.cloud.wish import DISK_MODES, Wish, check, check_name, entry_of, must_match, queued_request, request
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, ExitCode, OpsError, UsageError
from tpu_ops.fleet import holdings, origin, targets, view
from tpu_ops.fleet.hostvars import facts
from tpu_ops.fleet.view import Fleet
from tpu_ops.options import shown
from tpu_ops.ssh import host_keys, identities


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops create`."""
    parser.usage = "%(prog)s NAME --type TYPE [OPTION...]"
    parser.add_argument("name", metavar="NAME", help="name of the node, or a node set such as 'tpu-[1-4]'")
    parser.add_argument("--type", required=True, help="accelerator type, as in v4-32")
    place = "(default: the fleet's, if it has only one)"
    parser.add_argument("--zone", help=f"zone, or several to try in order, as in a,b {place[:-1]}, or the grant's)")
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true", help="create a spot node: cheaper, but it may be preempted")
    tier.add_argument("--on-demand", action="store_true", help="create no spot node, also if the grant prefers one")
    tier.add_argument("--reserved", action="store_true", help="use the project's reservation")
    parser.add_argument("--runtime", help="runtime version (default: the usual one for this TPU generation)")
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="a label (repeatable)")
    parser.add_argument("--project", help=f"project of the node {place}")
    parser.add_argument("--dry-run", action="store_true", help="check the request and show it; create nothing")
    _add_room(parser.add_argument_group("if there is no capacity, or no room in the grant"))
    _add_contents(parser.add_argument_group("network, rights, metadata and disks"))
    command = parser.add_argument_group("waiting, fleet and output")
    options.add_waiting(command, 1800)
    options.add_fleet(command)
    options.add_json(command)


def _add_room(parser: options.Options) -> None:
    parser.add_argument(
        "--until-capacity",
        type=options.duration,
        nargs="?",
        const=math.inf,
        metavar="DURATION",
        help="if no zone has capacity, keep trying for so long, as in 90m or 12h (default: until Ctrl-C)",
    )
    parser.add_argument("--queued", action="store_true", help="request the node by a queued resource of its name")
    parser.add_argument(
        "--valid-until", type=options.duration, default=0, metavar="DURATION", help="with --queued: give up after this"
    )
    parser.add_argument(
        "--outside-grant", action="store_true", help="create it also if grant.yml does not cover it: it is billed"
    )


def _add_contents(parser: options.Options) -> None:
    parser.add_argument("--internal-only", action="store_true", help="give the workers no external addresses")
    parser.add_argument("--network", default="", help="network (default: the project's)")
    parser.add_argument("--subnetwork", default="", help="subnetwork (default: the network's)")
    parser.add_argument("--service-account", default="", metavar="EMAIL", help="service account of the workers")
    parser.add_argument("--scope", action="append", default=[], help="scope of the service account (repeatable)")
    parser.add_argument(
        "--metadata", action="append", default=[], metavar="KEY=VALUE", help="an entry of the metadata (repeatable)"
    )
    parser.add_argument(
        "--metadata-from-file", action="append", default=[], metavar="KEY=FILE", help="the same, from a file"
    )
    parser.add_argument(
        "--configure-at-boot",
        default="",
        metavar="gs://BUCKET/PREFIX",
        help="have the node run site.yml on itself when it boots, with what is published here now, without secrets",
    )
    parser.add_argument("--startup-script", metavar="FILE", help="a script that every worker runs at each boot")
    parser.add_argument(
        "--disk", action="append", default=[], metavar="NAME:ro|rw", help="attach an existing disk (repeatable)"
    )


def run(args: argparse.Namespace) -> int:
    """Create the nodes."""
    if args.no_wait and args.until_capacity is not None:
        raise UsageError(
            "whether a zone has capacity is only known after waiting",
            where="--until-capacity and --no-wait",
            fix="leave out one of them, or let the service wait: --queued --no-wait",
        )
    settings, now = config.load(args.fleet), dt.datetime.now(dt.UTC)
    names = node_names(args.name)
    granted = None if args.outside_grant else holdings.read(settings, now)
    zones = _zones(args, settings, has_grant=granted is not None)
    wish = wished(args, settings)
    with origin.api(settings) as tpu:
        # Read the ssh keys after the credentials: without credentials, a missing key is not the first problem.
        terms = CreationTerms(identities.ssh_keys(settings), not args.no_wait, args.timeout, args.until_capacity)
        if not wish.runtime_version:
            _refuse_unknown_generation(tpu, replace(wish, zone=zones[0] if zones else ""))
        guard = holdings.guard(tpu, settings, granted, now, projects=[wish.project])
        rehearsal = guard.copy()
        spot = True if args.spot else False if args.on_demand or args.reserved or granted is None else None
        orders = [_order(rehearsal, replace(wish, name=name), zones, spot=spot) for name in names]
        orders = boot_bundles.ordered(settings, orders, dry=args.dry_run)
        if args.dry_run:
            return _dry_run(tpu, [order.wishes[0] for order in orders], terms.keys, args)
        done = creation.create_all(
            tpu,
            orders,
            terms,
            claims=guard,
            say=output.info,
            progress=options.waiting_for([f"node {name}" for name in names]),
        )
    return _end(args, settings, done)


def node_names(text: str) -> list[str]:
    """Return the names of a node set.

    Raises:
        UsageError: The text is no node set, or the API would reject a name.
    """
    return [check_name(name) for name in (targets.names_of(text) if "[" in text or "," in text else [text])]


def _zones(args: argparse.Namespace, settings: Settings, *, has_grant: bool) -> list[str]:
    """Return the zones that the user accepts, in the order of preference; empty leaves them to the grant."""
    if args.zone is not None:
        return [config.check_zone(zone.strip(), "--zone") for zone in args.zone.split(",")]
    return [] if has_grant else [config.check_zone(options.only("zone", None, settings.zones), "--zone")]


def _order(rehearsal: holdings.Guard, wish: Wish, zones: Sequence[str], *, spot: bool | None) -> Order:
    """Return the order of one node, and count the node in its first place.

    Raises:
        UsageError: The grant has no place for it beside the nodes before it, or its properties exclude each other.
    """
    places = rehearsal.places(wish, zones, spot=spot)
    wishes = [replace(wish, zone=zone, spot=is_spot) for zone, is_spot in places]
    for one in wishes:
        check(one)
    next(filter(rehearsal.take, wishes), None)
    return Order(wish.name, tuple(wishes))


def wished(args: argparse.Namespace, settings: Settings) -> Wish:
    """Return the node that the arguments ask for, without its name and place.

    Raises:
        UsageError: An argument is malformed, or the project is not given and the fleet has not exactly one.
    """
    printed = [("--type", args.type), ("--runtime", args.runtime or ""), *(("--label", at) for at in args.label)]
    printed += [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in ("network", "subnetwork")]
    for option, text in printed:
        if not text.isprintable():
            raise UsageError(
                f"{shown(text)} contains characters that cannot be printed",
                where=option,
                fix="leave these characters out",
            )
    at_boot = "--configure-at-boot"
    return Wish(
        name="",
        project=config.check_project(options.only("project", args.project, settings.projects), "--project"),
        zone="",
        accelerator_type=_type(args.type),
        runtime_version=args.runtime or default_runtime(args.type),
        reserved=args.reserved,
        labels=dict(_pair(text, "--label", "a label") for text in args.label),
        internal_only=args.internal_only,
        network=args.network,
        subnetwork=args.subnetwork,
        service_account=args.service_account,
        scopes=tuple(args.scope),
        metadata=_metadata(args),
        disks=dict(map(_disk, args.disk)),
        queued=args.queued,
        valid_until=int(args.valid_until),
        configure_at_boot=buckets.folder(args.configure_at_boot, at_boot) if args.configure_at_boot else "",
    )


def _type(text: str) -> str:
    """Return the accelerator type.

    Raises:
        UsageError: It is a known generation in another spelling, such as ``v5e-16``, ``V4-16`` or ``v4``.
    """
    generation, _, size = text.strip().lower().replace(" ", "-").partition("-")
    name = f"{spelled(generation)}-{size or 8}"
    if spelled(generation) in generations() and name != text:
        raise UsageError(f"no accelerator type is called {text!r}", where="--type", fix=f"did you mean {name}?")
    return text


def _metadata(args: argparse.Namespace) -> dict[str, str]:
    found = dict(_pair(text, "--metadata", "an entry of the metadata") for text in args.metadata)
    named = [_pair(text, "--metadata-from-file", "an entry with its file") for text in args.metadata_from_file]
    if args.startup_script:
        named.append(("startup-script", args.startup_script))
    for key, path in named:
        if key in found:
            raise UsageError(f"the entry {key} is given twice", where="--metadata", fix="leave out one of them")
        found[key] = _content(Path(path))
    for key, text in found.items():
        if not _is_text(key + text):
            raise UsageError("an entry is not UTF-8 text", where=f"--metadata {shown(key)}", fix="use UTF-8 text")
    if "ssh-keys" in found:
        what = "tpu_ops writes the entry ssh-keys itself"
        raise UsageError(what, where="--metadata", fix="set `private_key` in inventory/tpu_vm.yml, or users_people")
    return found


def _is_text(text: str) -> bool:
    """Return whether a text from the command line can be encoded: bytes that are not UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _content(path: Path) -> str:
    try:
        return entry_of(path.expanduser())
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise UsageError(f"the file cannot be read: {reason}", where=str(path), fix="name a text file") from exc


def _pair(text: str, option: str, words: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        form = "KEY=FILE" if option.endswith("file") else "KEY=VALUE"
        # The text of an entry of the metadata may be secret.
        what = f"{text!r} is not {words}" if option == "--label" else f"this is not {words}"
        raise UsageError(what, where=option, fix=f"write {words.partition(' with')[0]} as {form}")
    return key, value


def _disk(text: str) -> tuple[str, str]:
    name, _, mode = text.partition(":")
    if not name or mode not in DISK_MODES:
        raise UsageError(f"{text!r} is not a disk with its mode", where="--disk", fix="write NAME:ro or NAME:rw")
    return name, mode


def _refuse_unknown_generation(tpu: Tpu, wish: Wish) -> None:
    """Raise an error that says whether the accelerator type is unknown, or only its default runtime version."""
    if wish.accelerator_type.startswith("tpu7x"):
        raise UsageError(
            "the Cloud TPU API has no TPU7x (Ironwood): these are made with Google Kubernetes Engine",
            where="--type",
            fix="use another accelerator type, as in v6e-8",
        )
    if wish.zone and (unknown := lifecycle.unknown(tpu, wish)):
        raise CloudError("the API would refuse this node", where=wish.where, fix=unknown)
    raise UsageError(
        f"there is no default runtime version for accelerator type {wish.accelerator_type!r}",
        where="--type",
        fix="give the runtime version with --runtime",
    )


def _dry_run(tpu: Tpu, wishes: Sequence[Wish], keys: str, args: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    for wish in wishes:
        body: dict[str, Any] = request(wish, keys)
        existing = lifecycle.find(tpu, wish)
        if existing is not None:
            must_match(wish, existing)
        elif unknown := lifecycle.unknown(tpu, wish):
            raise CloudError("the API would refuse this node", where=wish.where, fix=unknown)
        body["metadata"] = _without_secrets(body["metadata"])
        if not args.json:
            _show_request(wish, queued_request(wish, body) if wish.queued else body, existing.state if existing else "")
        row = {
            "parent": wish.parent,
            "node_id": wish.name,
            "node": body,
            "exists": existing.state if existing else None,
        }
        found.append(row | ({"queued_resource": queued_request(wish, body)} if wish.queued else {}))
    if args.json:
        output.as_json(found[0] if len(found) == 1 else found)
    return ExitCode.OK


def _show_request(wish: Wish, body: dict[str, Any], state: str) -> None:
    if state:
        output.line(f"the node exists already, state {state}: nothing would be created")
        return
    output.line(f"would create {wish.queue_name if wish.queued else wish.full_name}")
    for key, value in body.items():
        output.line(f"  {key}: {value}")


def _without_secrets(metadata: dict[str, str]) -> dict[str, str]:
    return {name: text if name == "ssh-keys" else f"({len(text)} bytes)" for name, text in metadata.items()}


def _end(args: argparse.Namespace, settings: Settings, done: Sequence[Created]) -> int:
    """Learn the host keys of the new nodes, and print the result of each node."""
    there = [one for one in done if one.error is None and one.outcome != "begun"]
    for one in there:
        place = f"{one.wish.zone}, {tier(spot=one.wish.spot, reserved=one.wish.reserved)}"
        output.info(f"node {one.wish.name}: {one.outcome} in {place}, {one.seconds:.0f} s", Meaning.OK)
    fleet = None
    if there:
        try:
            fleet = _refresh(settings, [one.wish for one in there])
        except OpsError as exc:
            nodes = "the node is READY" if len(there) == 1 else "the nodes are READY"
            then = "run the same command again: it gets the nodes' addresses and host keys"
            exc.what, exc.fix = f"{exc.what}; {nodes}", f"{exc.fix}; then {then}" if exc.fix else then
            for one in done:
                if one.error:
                    output.warning(str(one.error))
            raise
    failures = [one for one in done if one.error]
    if args.json and (len(done) > 1 or not failures):
        found = [_row(one, fleet) for one in done]
        output.as_json(found[0] if len(found) == 1 else {"nodes": found})
    elif not args.json:
        _say(done, fleet)
    for one in failures[1:]:
        output.warning(str(one.error))
    if failures and failures[0].error:
        raise failures[0].error
    return ExitCode.OK


def _row(one: Created, fleet: Fleet | None) -> dict[str, Any]:
    listed = [facts(worker) | {"host": worker.host} for worker in _workers(one.wish, fleet)]
    row = {"node": one.wish.full_name, "outcome": one.outcome, "workers": listed}
    return row | ({"error": one.error.to_json()["error"]} if one.error else {})


def _workers(wish: Wish, fleet: Fleet | None) -> list[Any]:
    return [worker for worker in (fleet.workers if fleet else ()) if worker.node.full_name == wish.full_name]


def _refresh(settings: Settings, wishes: Sequence[Wish]) -> Fleet:
    """Refresh the fleet until the new nodes' host keys are known, or the time limit is over."""
    names = {wish.full_name: wish for wish in wishes}
    words = f"node {wishes[0].name}" if len(wishes) == 1 else texts.count(len(wishes), "node")
    fleet, workers = view.with_host_keys(settings, names.keys(), options.Waiting(words))
    for text in fleet.warnings:
        output.warning(text)
    known = {worker.node.full_name for worker in workers}
    bare = {node.full_name: node for node in fleet.nodes if not node.worker_count}
    for name, wish in names.items():
        if name in known:
            continue
        if fleet.source:
            asks = "`tpu_ops refresh --from api` switches to the API"
            output.warning(f"this fleet was {fleet.age}, without the new node: {asks}")
        elif name in bare:
            output.warning(f"the new node {without_workers(bare[name])}: {until_ready(bare[name])}")
        else:
            lacks = f"does not list project {wish.project}, zone {wish.zone}"
            if any(node.full_name == name for node in fleet.listed):
                lacks = "has filters that exclude the node"
            output.warning(f"the new node is not part of this fleet: {settings.file} {lacks}")
    return fleet


def _say(done: Sequence[Created], fleet: Fleet | None) -> None:
    first = ""
    for one in done:
        if one.outcome == "begun":
            what = f"its queued resource is {_queued(one.wish)}" if one.wish.queued else "the API is creating it"
            output.line(f"{one.wish.name}: {what}; {output.on_fleet('`tpu_ops list`')} shows its state")
        for worker in _workers(one.wish, fleet):
            output.line(f"{worker.host}  {worker.internal_ip or '-'}  {worker.external_ip or '-'}")
            first = first or one.wish.full_name
    if themselves := [one.wish.name for one in done if one.outcome == "created" and one.wish.configure_at_boot]:
        command = output.on_fleet(f"`tpu_ops configure {shlex.quote(texts.target(themselves))}`")
        output.info(f"site.yml runs on {texts.some(themselves)} now; {command} waits for it, and adds the secrets")
    workers = [worker for worker in (fleet.workers if fleet else ()) if worker.node.full_name == first]
    if workers and fleet:
        label = shlex.quote(workers[0].label)
        ready = host_keys.has_keys(fleet.settings, workers)
        log_in, trust = f"tpu_ops ssh {label}", f"tpu_ops refresh --trust-first {label}"
        output.info(f"log in: {output.on_fleet(log_in)}" if ready else f"next: {output.on_fleet(trust)}")


def _queued(wish: Wish) -> str:
    return f"requested ({bodies.queued_in_words(wish.queue_name)})"
