"""`tpu_ops lab`: start and remove the lab, show its state, limit its capacity, and simulate events of nodes."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_ops import config, files, texts
from tpu_ops.ansible import playbook
from tpu_ops.cli import options, output
from tpu_ops.errors import CloudError, ExitCode, OpsError, UsageError
from tpu_ops.lab import environment, events, instance, shared
from tpu_ops.lab.instance import Instance

#: Upper limit of --seconds, the shortest duration of an operation: one day.
_MAX_SECONDS = 86400.0
#: Announced duration of a maintenance event in seconds.
_MAINTENANCE_TAKES = 3600.0
_QUOTA = re.compile(r"(?P<zone>[^:=]+):(?P<generation>[^:=]+)(?P<spot>:spot)?=(?P<chips>\d+)")
_STOCKOUT = re.compile(r"(?P<zone>[^:=]+)(?::(?P<type>[^:=]+))?(?:=(?P<duration>.+))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands of `tpu_ops lab`."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, more: str = "", *, as_json: bool = True) -> argparse.ArgumentParser:
        description = f"{text[0].upper()}{text[1:]}.{more and ' '}{more}"
        command = commands.add_parser(name, help=text, description=description)
        if as_json:
            command.add_argument("--json", action="store_true", help="print the result as JSON")
        return command

    grpc, rest = instance.DEFAULT_PORTS
    up = add(
        "up",
        "start the lab's API (nodes are created through it)",
        f"The instance `default` serves gRPC on port {grpc} and REST on {rest}; a taken port is an error. Other "
        "instances (set TPU_OPS_LAB to the name) use free ports, and keep them if possible. An instance that is up is "
        "left unchanged; an instance that does not answer is restarted and keeps its nodes.",
    )
    up.add_argument("--port", type=_port, help="gRPC port; REST takes the next port (default: see above)")
    up.add_argument("--seconds", type=_seconds, default=1.0, help="shortest duration of an operation (default: 1)")
    down = add(
        "down",
        "remove the lab's workers, networks and processes",
        "The lab's files are removed too; images and downloads, which all labs share, stay unless --cache is given.",
    )
    down.add_argument("--all", action="store_true", help="remove every lab below TPU_OPS_STATE, not only this lab")
    down.add_argument("--cache", action="store_true", help="also remove the images and downloads that all labs share")
    add(
        "env",
        'print variables for a shell: eval "$(tpu_ops lab env)"',
        "The variables make tpu_ops, ansible and gcloud use this lab, without any credentials.",
    )
    add("status", "show the lab's nodes, workers and the images behind them")
    for name, text, more in (
        (
            "maintenance",
            "simulate a maintenance event: all workers of a node reboot with new external addresses",
            "Returns when the workers serve again. The node must be READY.",
        ),
        (
            "preempt",
            "preempt a node: its workers are killed",
            "The node stays listed as PREEMPTED until it is deleted. The node must be READY.",
        ),
    ):
        event = add(name, text, more, as_json=False)
        event.add_argument("node", help="name of the node")
        event.add_argument("--zone", help="zone of the node, if several nodes share the name")
        event.add_argument(
            "--notice",
            type=options.duration,
            default=0.0,
            metavar="TIME",
            help="announce the event by the workers' metadata servers this long before it, as in 30s (default: 0)",
        )
    chips = add(
        "chips",
        "set what the chips of workers do, as the metrics service there reports it",
        "Each worker serves libtpu's metrics on port 8431 while a process holds a chip. Chips are busy until this "
        "command says otherwise; the setting stays until the node is deleted.",
    )
    chips.add_argument("target", help="name of a node or of a worker, as in pod or pod-w0")
    chips.add_argument(
        "state",
        choices=shared.CHIP_STATES,
        help="busy, idle, hung (a program waits on the chip) and halted (a core reports an error) have values; warming "
        "has lists of unequal length, not-found lacks the newer metrics, silent answers nothing, broken answers "
        "nonsense, refused closes the port",
    )
    chips.add_argument("--first-id", type=int, default=0, metavar="N", help="id of the first core (default 0)")
    chips.add_argument("--two-cores", action="store_true", help="two cores in each chip, as v2 and v3 have them")
    chips.add_argument("--zone", help="zone of the node, if several nodes share the name")
    capacity = add(
        "capacity",
        "show or limit the capacity of the lab's cloud: quotas, stockouts, preemptions",
        "An option replaces all earlier limits of its kind; the other kinds stay. Without options, nothing changes.",
    )
    capacity.add_argument(
        "--quota",
        type=_quota,
        action="append",
        metavar="ZONE:GENERATION[:spot]=CHIPS",
        help="chips that each project can have, as in us-central2-b:v4=32; can be repeated",
    )
    capacity.add_argument(
        "--stockout",
        type=_stockout,
        action="append",
        metavar="ZONE[:TYPE][=DURATION]",
        help="create and start no nodes there, as in us-central2-b:v4=5m; without DURATION until the next --stockout "
        "or --unlimited; can be repeated",
    )
    capacity.add_argument(
        "--preempt-per-hour", type=float, metavar="N", help="mean number of preemptions of each spot node; 0 ends them"
    )
    capacity.add_argument(
        "--seed", type=int, default=0, help="another seed gives other times of preemption (default 0)"
    )
    capacity.add_argument("--unlimited", action="store_true", help="lift all earlier limits first")
    api = add(
        "api",
        "serve a fleet without containers, in the foreground",
        "Prints one JSON line with both endpoints when it serves; SIGTERM or Ctrl-C ends the command.",
        as_json=False,
    )
    api.add_argument("--state", required=True, metavar="FILE", help="the file that holds the fleet; created if missing")
    api.add_argument("--port", type=_port, help="gRPC port; REST takes the next port (default: free ports)")
    api.add_argument("--bind", default="127.0.0.1", help="address to serve on (default 127.0.0.1)")
    api.add_argument("--seconds", type=_seconds, default=1.0, help="shortest duration of an operation (default: 1)")
    api.add_argument("--projects", default=instance.PROJECT, help="projects that exist, comma-separated")


def _port(text: str) -> int:
    """Return the gRPC port, for argparse; the next port is for REST."""
    if not text.isdecimal() or not 0 < int(text) < 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65534")
    return int(text)


def _seconds(text: str) -> float:
    """Return the shortest duration of an operation, for argparse.

    Raises:
        UsageError: The text is not a valid duration.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= _MAX_SECONDS:
        raise UsageError(
            f"{text!r} is not a valid duration of an operation",
            where="--seconds",
            fix=f"use seconds from 0 to {_MAX_SECONDS:.0f}, for example 0.5",
        )
    return seconds


def _quota(text: str) -> dict[str, Any]:
    """Return a quota as the lab's API takes it, for argparse."""
    match = _QUOTA.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a quota: write it as in us-central2-b:v4:spot=32")
    return {
        "zone": match["zone"],
        "generation": match["generation"],
        "spot": bool(match["spot"]),
        "chips": int(match["chips"]),
    }


def _stockout(text: str) -> dict[str, Any]:
    """Return a stockout as the lab's API takes it, for argparse."""
    match = _STOCKOUT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a stockout: write it as in us-central2-b:v4-8=5m")
    found = {"zone": match["zone"], "type": match["type"] or ""}
    return {**found, "seconds": options.duration(match["duration"])} if match["duration"] else found


def run(args: argparse.Namespace) -> int:
    """Run one subcommand of `tpu_ops lab`."""
    lab = instance.instance()
    commands = {"up": _up, "down": _down, "env": _env, "status": _status, "capacity": _capacity, "api": _api}
    commands |= {"chips": _chips}
    return commands.get(args.command, _event)(lab, args)


def _up(lab: Instance, args: argparse.Namespace) -> int:
    from tpu_ops.lab import engine

    found = engine.find()
    with instance.locked(lab), instance.writing(lab):
        endpoints = lab.endpoints()
        if endpoints is not None and not instance.answers(lab):
            output.warning(f"lab {lab.name}: the API runs but does not answer on {endpoints.rest}; ending the API")
            instance.stop_api(lab, timeout=10)
            endpoints = None
        if endpoints is None:
            # An interrupted command may have left an API process that does not serve but holds the ports.
            instance.stop_api(lab)
            output.info(f"lab {lab.name}: starting the API ({found.name} plays the workers)")
            instance.ensure_key(lab)
            environment.write_inventory(lab)
            ports = instance.ports_of(lab, args.port)
            endpoints = instance.start_api(lab, ports, seconds=args.seconds)
        elif args.port and not endpoints.grpc.endswith(f":{args.port}"):
            raise UsageError(
                f"lab {lab.name!r} already serves on {endpoints.grpc}",
                where="--port",
                fix="leave --port out, or take the lab down first: `tpu_ops lab down`",
            )
    if args.json:
        output.as_json({"instance": lab.name, "grpc": endpoints.grpc, "rest": endpoints.rest})
    else:
        output.line(f"lab {lab.name} is up: gRPC {endpoints.grpc}, REST {endpoints.rest}")
        output.line('next: eval "$(tpu_ops lab env)"')
    return ExitCode.OK


def _down(lab: Instance, args: argparse.Namespace) -> int:
    from tpu_ops.lab import removal

    labs = instance.known() if args.all else [lab]
    results = [_down_one(each) for each in labs]
    others = removal.instances() if args.all else []
    if not args.json:
        _say_down(results, others, all_of=args.all)
        if os.environ.get("TPU_OPS_PRIVATE_KEY") in {str(each.private_key) for each in labs}:
            output.line("this shell still points to the lab: open a new one for another fleet")
    dropped = removal.remove_shared() if args.cache else []
    if args.json:
        output.as_json({"labs": results, "others": others, "shared": dropped})
        return ExitCode.OK
    if args.cache:
        output.line(f"removed {', '.join(dropped)}" if dropped else "there were no images or caches to remove")
    return ExitCode.OK


def _say_down(results: Sequence[Mapping[str, object]], others: Sequence[str], *, all_of: bool) -> None:
    """Print which labs were removed, and which labs of other state directories still have containers."""
    for result in results:
        was_up = result["api_stopped"] or result["removed"]
        output.line(
            f"lab {result['instance']} is down: nothing of it is left"
            if was_up
            else f"lab {result['instance']} was not up"
        )
    if all_of and not results:
        output.line(f"no lab has files below {files.state_root()}")
    for name in others:
        output.warning(
            f"lab {name} has containers, but no files below {files.state_root()}; "
            f"`TPU_OPS_LAB={shlex.quote(name)} tpu_ops lab down` removes them"
        )


def _down_one(lab: Instance) -> dict[str, object]:
    """Remove one lab; return its name and what was removed."""
    from tpu_ops.lab import removal

    with instance.locked(lab):
        stopped = instance.stop_api(lab)
        removed = removal.teardown(lab.name)
        left = removal.leftovers(lab.name)
        if left:
            raise OpsError(
                f"lab {lab.name!r} could not be removed completely: {', '.join(left)} still there",
                fix="run `tpu_ops lab down` again; if parts stay, remove them with the container engine's own command",
            )
        # Remove the files while holding the lock: another command may be about to create this lab anew.
        shutil.rmtree(lab.directory, ignore_errors=True)
        if lab.directory.exists():
            raise OpsError("the lab's files could not be removed", where=str(lab.directory), fix="remove them as root")
    return {"instance": lab.name, "api_stopped": stopped, "removed": removed}


def _env(lab: Instance, args: argparse.Namespace) -> int:
    endpoints = lab.endpoints()
    if endpoints is None:
        raise CloudError(f"lab {lab.name!r} is not up", where=str(lab.directory), fix="start it: `tpu_ops lab up`")
    before = environment.last_fleet(lab)
    named, around = _named_fleet(lab), config.nearest_file(config.here())
    file = named or around or before
    keys = [key for key, value in config.read_file(file).items() if value] if file else []
    found = environment.variables(lab, endpoints, file, playbook.tool_root() / "ansible.cfg", keys)
    if file:
        environment.remember_fleet(lab, file)
    if args.json:
        output.as_json(found)
    else:
        for name, value in found.items():
            output.as_it_is(f"export {name}={shlex.quote(value)}")
    # The shell evaluates standard output, so messages for the user go to standard error.
    if file:
        _say_fleet(file, named=named, around=around, before=before)
    else:
        output.warning(
            f"no fleet directory here: this shell uses the lab's own fleet, {lab.directory}, without your people and "
            "settings; to use your own fleet, change to its directory or set TPU_OPS_FLEET, and repeat this command"
        )
    return ExitCode.OK


def _named_fleet(lab: Instance) -> Path | None:
    """Return the file of the fleet in TPU_OPS_FLEET; None for the lab's own fleet, which an earlier `lab env` set."""
    if not os.environ.get("TPU_OPS_FLEET"):
        return None
    file = config.find_file(None, os.environ, config.here())
    return None if file.parent == lab.inventory_file.parent.resolve() else file


def _say_fleet(file: Path, *, named: Path | None, around: Path | None, before: Path | None) -> None:
    """Print which fleet a shell uses, and why if it is not obvious: a user who configures workers has to know it."""

    def name(path: Path) -> str:
        return str(config.folder_of(path))

    if named:
        why = " (TPU_OPS_FLEET)"
    else:
        why = "" if around else ", the fleet that was last used with this lab: there is no fleet directory here"
    output.info(f"this shell's fleet, in every directory: {name(file)}{why}")
    if named and around and around != named:
        output.info(f"for the fleet of this directory, {name(around)}: `unset TPU_OPS_FLEET`, and repeat this command")
    if before and before != file:
        output.info(
            f"this lab was used with {name(before)} before: if you configure its workers from this shell, they get the "
            "people and settings of this shell's fleet instead"
        )


def _status(lab: Instance, args: argparse.Namespace) -> int:
    rows = events.workers(lab)
    if args.json:
        output.as_json({"instance": lab.name, "workers": rows})
        return ExitCode.OK
    endpoints = lab.endpoints()
    output.line(
        f"lab {lab.name}: {endpoints.grpc if endpoints else 'API not running'}, {texts.count(len(rows), 'worker')}"
    )
    output.table(rows, ["node", "zone", "index", "state", "internal_ip", "external_ip", "container", "image"])
    return ExitCode.OK


def _chips(lab: Instance, args: argparse.Namespace) -> int:
    options = {"first_id": args.first_id, "two_cores": args.two_cores}
    hosts = events.set_chips(lab, args.target, args.zone, args.state, options)
    if args.json:
        output.as_json({"hosts": hosts, "state": args.state, **options})
    else:
        output.line(f"chips of {texts.target(hosts)}: {args.state}")
    return ExitCode.OK


def _capacity(lab: Instance, args: argparse.Namespace) -> int:
    parts: dict[str, Any] = {"quotas": [], "stockouts": [], "preemption": {}} if args.unlimited else {}
    parts |= {"quotas": args.quota} if args.quota else {}
    parts |= {"stockouts": args.stockout} if args.stockout else {}
    if args.preempt_per_hour is not None:
        parts["preemption"] = {"per_hour": args.preempt_per_hour, "seed": args.seed}
    found = events.capacity(lab, parts)
    if args.json:
        output.as_json(found)
        return ExitCode.OK
    for quota in found["quotas"]:
        used = ", ".join(f"{project} uses {chips}" for project, chips in quota["used"].items())
        tier = "spot" if quota["spot"] else "on-demand"
        chips = f"{quota['chips']} {tier} {quota['generation']} chips for each project"
        output.line(f"{quota['zone']}: {chips}{f' ({used})' if used else ''}")
    for one in found["stockouts"]:
        end = "until it is lifted" if one["seconds"] is None else f"for another {one['seconds']:.0f} s"
        output.line(f"{one['zone']}: no capacity for {one['type'] or 'any type'} {end}")
    if rate := found["preemption"]["per_hour"]:
        output.line(f"every spot node is preempted {rate:g} times per hour on average")
    output.line("everything else is unlimited")
    return ExitCode.OK


def _event(lab: Instance, args: argparse.Namespace) -> int:
    name = events.node_name(lab, args.node, args.zone)
    places = events.directories(lab, name)
    events.write_notice(places, events.notice(args.command, time.time() + args.notice, _MAINTENANCE_TAKES))
    try:
        time.sleep(args.notice)
        if args.command == "preempt":
            events.preempt(lab, name)
            output.line(f"{args.node} was preempted")
        else:
            events.maintain(lab, name)
            output.line(f"{args.node} went through a maintenance event: its external addresses are new")
    finally:
        events.write_notice(places, {})
    return ExitCode.OK


def _api(_: Instance, args: argparse.Namespace) -> int:
    ports = (args.port, args.port + 1) if args.port else (0, 0)
    command = [sys.executable, "-m", "tpu_ops.lab.api", "--state", args.state, "--bind", args.bind]
    command += ["--grpc-port", str(ports[0]), "--rest-port", str(ports[1])]
    command += ["--seconds", str(args.seconds), "--projects", args.projects]
    os.execv(sys.executable, command)  # noqa: S606 - an argument list, no shell
