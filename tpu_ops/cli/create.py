"""`tpu_ops create`: create a TPU node and wait until it is ready."""

from __future__ import annotations

import argparse
import shlex
import time

from tpu_ops import config
from tpu_ops.cli import options, output
from tpu_ops.cloud import lifecycle
from tpu_ops.cloud.accelerators import default_runtime
from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.lifecycle import Wish
from tpu_ops.cloud.node import without_workers
from tpu_ops.cloud.remedies import until_ready
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, ExitCode, OpsError, UsageError
from tpu_ops.fleet import origin, view
from tpu_ops.fleet.hostvars import facts
from tpu_ops.fleet.view import Fleet
from tpu_ops.options import shown
from tpu_ops.ssh import host_keys, identities


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops create`."""
    parser.add_argument("name", help="name of the node")
    parser.add_argument("--type", required=True, help="accelerator type, as in v4-32")
    parser.add_argument("--zone", help="zone of the node (default: the fleet's, if it has only one)")
    parser.add_argument("--project", help="project of the node (default: the fleet's, if it has only one)")
    parser.add_argument("--runtime", help="runtime version (default: the usual one for this TPU generation)")
    parser.add_argument("--spot", action="store_true", help="create a spot node: cheaper, but it may be preempted")
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="a label (repeatable)")
    options.add_waiting(parser, 1800)
    parser.add_argument("--dry-run", action="store_true", help="check the request and show it; create nothing")
    options.add_fleet(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Create a node."""
    settings = config.load(args.fleet)
    wish = wished(args, settings)
    with origin.api(settings) as tpu:
        # Read the ssh keys after the credentials: without credentials, a missing key is not the first problem.
        body = lifecycle.request(wish, identities.ssh_keys(settings))
        if not wish.runtime_version:
            _refuse_unknown_generation(tpu, wish)
        if args.dry_run:
            return _dry_run(tpu, wish, body, as_json=args.json)
        start = time.monotonic()
        progress = options.Waiting(f"node {wish.name}")
        outcome = lifecycle.create(tpu, wish, body, wait=not args.no_wait, timeout=args.timeout, progress=progress)
    if outcome == "begun":
        return _say(args, settings, wish, outcome, None)
    try:
        fleet = _refresh(settings, wish)
    except OpsError as exc:
        then = "run the same command again: it gets the node's addresses and host keys"
        exc.what, exc.fix = f"{exc.what}; the node is READY", f"{exc.fix}; then {then}" if exc.fix else then
        raise
    output.info(f"node {wish.name}: {outcome}, {time.monotonic() - start:.0f} s")
    return _say(args, settings, wish, outcome, fleet)


def wished(args: argparse.Namespace, settings: Settings) -> Wish:
    """Return the node that the arguments ask for.

    Raises:
        UsageError: A name or label is malformed, or the zone or project is not given and the fleet has not exactly one.
    """
    for option, text in (
        ("--type", args.type),
        ("--runtime", args.runtime or ""),
        *(("--label", at) for at in args.label),
    ):
        if not text.isprintable():
            raise UsageError(
                f"{shown(text)} contains characters that cannot be printed",
                where=option,
                fix="leave these characters out",
            )
    return Wish(
        name=lifecycle.check_name(args.name),
        project=config.check_project(_only("project", args.project, settings.projects), "--project"),
        zone=config.check_zone(_only("zone", args.zone, settings.zones), "--zone"),
        accelerator_type=args.type,
        runtime_version=args.runtime or default_runtime(args.type),
        spot=args.spot,
        labels=dict(_label(text) for text in args.label),
    )


def _only(name: str, given: str | None, known: tuple[str, ...]) -> str:
    if given is not None:
        return given
    if len(known) == 1:
        return known[0]
    choice = (
        f"one of {', '.join(known)}" if known else f"for example {'us-central2-b' if name == 'zone' else 'my-project'}"
    )
    raise UsageError(f"no {name} is given", where=f"--{name}", fix=f"add --{name}, {choice}")


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"{text!r} is not a label", where="--label", fix="write the label as KEY=VALUE")
    return key, value


def _refuse_unknown_generation(tpu: Tpu, wish: Wish) -> None:
    """Raise an error that says whether the accelerator type is unknown, or only its default runtime version."""
    if wish.accelerator_type.startswith("tpu7x"):
        raise UsageError(
            "the Cloud TPU API has no TPU7x (Ironwood): these are made with Google Kubernetes Engine",
            where="--type",
            fix="use another accelerator type, as in v6e-8",
        )
    if unknown := lifecycle.unknown(tpu, wish):
        raise CloudError("the API would refuse this node", where=wish.where, fix=unknown)
    raise UsageError(
        f"there is no default runtime version for accelerator type {wish.accelerator_type!r}",
        where="--type",
        fix="give the runtime version with --runtime",
    )


def _dry_run(tpu: Tpu, wish: Wish, body: dict[str, object], *, as_json: bool) -> int:
    existing = lifecycle.find(tpu, wish)
    if existing is not None:
        lifecycle.must_match(wish, existing)
    elif unknown := lifecycle.unknown(tpu, wish):
        raise CloudError("the API would refuse this node", where=wish.where, fix=unknown)
    if as_json:
        state = existing.state if existing else None
        output.as_json({"parent": wish.parent, "node_id": wish.name, "node": body, "exists": state})
        return ExitCode.OK
    if existing is not None:
        output.line(f"the node exists already, state {existing.state}: nothing would be created")
        return ExitCode.OK
    output.line(f"would create {wish.full_name}")
    for key, value in body.items():
        output.line(f"  {key}: {value}")
    return ExitCode.OK


def _refresh(settings: Settings, wish: Wish) -> Fleet:
    """Refresh the fleet until the new node's host keys are known, or the time limit is over."""
    fleet, workers = view.with_host_keys(settings, {wish.full_name}, options.Waiting(f"node {wish.name}"))
    for text in fleet.warnings:
        output.warning(text)
    if not workers and fleet.source:
        asks = "`tpu_ops refresh --from api` switches to the API"
        output.warning(f"this fleet was {fleet.age}, without the new node: {asks}")
    elif bare := [node for node in fleet.nodes if node.full_name == wish.full_name and not node.worker_count]:
        output.warning(f"the new node {without_workers(bare[0])}: {until_ready(bare[0])}")
    elif not workers:
        lacks = f"does not list project {wish.project}, zone {wish.zone}"
        if any(node.full_name == wish.full_name for node in fleet.listed):
            lacks = "has filters that exclude the node"
        output.warning(f"the new node is not part of this fleet: {settings.file} {lacks}")
    return fleet


def _say(args: argparse.Namespace, settings: Settings, wish: Wish, outcome: str, fleet: Fleet | None) -> int:
    workers = [worker for worker in (fleet.workers if fleet else ()) if worker.node.full_name == wish.full_name]
    if args.json:
        listed = [facts(worker) | {"host": worker.host} for worker in workers]
        output.as_json({"node": wish.full_name, "outcome": outcome, "workers": listed})
        return ExitCode.OK
    if fleet is None:
        output.line(f"{wish.name}: the API is creating it; {output.on_fleet('`tpu_ops list`')} shows its state")
        return ExitCode.OK
    for worker in workers:
        output.line(f"{worker.host}  {worker.internal_ip or '-'}  {worker.external_ip or '-'}")
    if workers:
        label = shlex.quote(workers[0].label)
        ready = host_keys.has_keys(fleet.settings, workers)
        log_in, trust = f"tpu_ops ssh {label}", f"tpu_ops refresh --trust-first {label}"
        output.info(f"log in: {output.on_fleet(log_in)}" if ready else f"next: {output.on_fleet(trust)}")
    return ExitCode.OK
