"""`tpu_ops lab`: bring the lab up and down, look at it, and let happen to it what happens to real pods."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpu_ops import config, files, texts
from tpu_ops.ansible import playbook
from tpu_ops.cli import output
from tpu_ops.errors import CloudError, ExitCode, OpsError, UsageError
from tpu_ops.lab import environment, events, instance
from tpu_ops.lab.instance import Instance

#: Longest time that an operation may be made to take: a day.
_MAX_SECONDS = 86400.0


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
        "instances (TPU_OPS_LAB names one) use free ports, the same ones again if they can. An instance that is up is "
        "left alone; one that does not answer is restarted and keeps its nodes.",
    )
    up.add_argument("--port", type=_port, help="gRPC port; REST takes the next one (default: see above)")
    up.add_argument("--seconds", type=_seconds, default=1.0, help="shortest duration of an operation (default: 1)")
    down = add(
        "down",
        "remove the lab's workers, networks and processes",
        "Its files are removed too; images and downloads, which all labs share, stay unless --cache is given.",
    )
    down.add_argument("--all", action="store_true", help="every lab below TPU_OPS_STATE, not only this one")
    down.add_argument("--cache", action="store_true", help="also the workers' images and downloads, which labs share")
    add(
        "env",
        'print variables for a shell: eval "$(tpu_ops lab env)"',
        "They point tpu_ops, ansible and gcloud to this lab, and away from any credentials.",
    )
    add("status", "show the lab's nodes, workers and the images behind them")
    for name, text, more in (
        (
            "maintenance",
            "simulate a maintenance event: all workers of a node reboot with new external addresses",
            "Returns when they serve again. The node must be READY.",
        ),
        (
            "preempt",
            "preempt a node: its workers are killed",
            "It stays listed as PREEMPTED until it is deleted. The node must be READY.",
        ),
    ):
        event = add(name, text, more, as_json=False)
        event.add_argument("node", help="name of the node")
        event.add_argument("--zone", help="its zone, if several nodes share the name")
    api = add(
        "api",
        "serve a fleet without containers, in the foreground",
        "Prints one JSON line with both endpoints when it serves; SIGTERM or Ctrl-C ends it.",
        as_json=False,
    )
    api.add_argument("--state", required=True, metavar="FILE", help="the file that holds the fleet; created if missing")
    api.add_argument("--port", type=_port, help="gRPC port; REST takes the next one (default: free ports)")
    api.add_argument("--bind", default="127.0.0.1", help="address to serve on (default 127.0.0.1)")
    api.add_argument("--seconds", type=_seconds, default=1.0, help="shortest duration of an operation (default: 1)")
    api.add_argument("--projects", default=instance.PROJECT, help="projects that exist, comma-separated")


def _port(text: str) -> int:
    """Return the gRPC port, for argparse; the next one is REST's."""
    if not text.isdecimal() or not 0 < int(text) < 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65534")
    return int(text)


def _seconds(text: str) -> float:
    """Return the least duration of an operation, for argparse.

    Raises:
        UsageError: It is none.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= _MAX_SECONDS:
        raise UsageError(
            f"{text!r} is not a duration of an operation",
            where="--seconds",
            fix=f"use seconds from 0 to {_MAX_SECONDS:.0f}, for example 0.5",
        )
    return seconds


def run(args: argparse.Namespace) -> int:
    """Run one subcommand."""
    lab = instance.instance()
    if args.command == "up":
        return _up(lab, args)
    if args.command == "down":
        return _down(lab, args)
    if args.command == "env":
        return _env(lab, args)
    if args.command == "status":
        return _status(lab, args)
    if args.command == "api":
        return _api(args)
    return _event(lab, args)


def _up(lab: Instance, args: argparse.Namespace) -> int:
    from tpu_ops.lab import engine

    found = engine.find()
    with instance.locked(lab), instance.writing(lab):
        endpoints = lab.endpoints()
        if endpoints is not None and not instance.answers(lab):
            output.warning(f"lab {lab.name}: the API runs but does not answer on {endpoints.rest}; ending it")
            instance.stop_api(lab, timeout=10)
            endpoints = None
        if endpoints is None:
            # One that an interrupted command left before it served still has the ports and the state file.
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
    """Say what went, and which labs of other state directories still have containers."""
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
    """Take one lab down and return what was there."""
    from tpu_ops.lab import removal

    with instance.locked(lab):
        stopped = instance.stop_api(lab)
        removed = removal.teardown(lab.name)
        left = removal.leftovers(lab.name)
        if left:
            raise OpsError(
                f"lab {lab.name!r} could not be removed completely: {', '.join(left)} still there",
                fix="run `tpu_ops lab down` again; if it stays, remove it with the container engine's own command",
            )
        # Under the lock, so that no other command's new lab is taken along; the lock's own file goes as well.
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
    # For a person alone: a shell evaluates what is printed above.
    if file:
        _say_fleet(file, named=named, around=around, before=before)
    else:
        output.warning(
            f"no fleet directory here: this shell gets the lab's own fleet, {lab.directory}, which has no people and "
            "settings of yours; for a fleet of yours, change to its directory or set TPU_OPS_FLEET, and repeat this"
        )
    return ExitCode.OK


def _named_fleet(lab: Instance) -> Path | None:
    """Return the file of the fleet that TPU_OPS_FLEET names; None where that is the lab's own, as of an earlier env."""
    if not os.environ.get("TPU_OPS_FLEET"):
        return None
    file = config.find_file(None, os.environ, config.here())
    return None if file.parent == lab.inventory_file.parent.resolve() else file


def _say_fleet(file: Path, *, named: Path | None, around: Path | None, before: Path | None) -> None:
    """Say which fleet a shell gets, and why where that is not plain: whoever configures from it should know."""

    def name(path: Path) -> str:
        return str(config.folder_of(path))

    if named:
        why = " (TPU_OPS_FLEET)"
    else:
        why = "" if around else ", as when this lab was used last: there is no fleet directory here"
    output.info(f"this shell's fleet, in every directory: {name(file)}{why}")
    if named and around and around != named:
        output.info(f"for the fleet of this directory, {name(around)}: `unset TPU_OPS_FLEET`, and repeat this")
    if before and before != file:
        output.info(
            f"this lab was used with {name(before)} before: if you configure its workers from here, they get the "
            "people and settings of this fleet instead"
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


def _event(lab: Instance, args: argparse.Namespace) -> int:
    name = events.node_name(lab, args.node, args.zone)
    if args.command == "preempt":
        events.preempt(lab, name)
        output.line(f"{args.node} was preempted")
    else:
        events.maintain(lab, name)
        output.line(f"{args.node} went through a maintenance event: its external addresses are new")
    return ExitCode.OK


def _api(args: argparse.Namespace) -> int:
    ports = (args.port, args.port + 1) if args.port else (0, 0)
    command = [sys.executable, "-m", "tpu_ops.lab.api", "--state", args.state, "--bind", args.bind]
    command += ["--grpc-port", str(ports[0]), "--rest-port", str(ports[1])]
    command += ["--seconds", str(args.seconds), "--projects", args.projects]
    os.execv(sys.executable, command)  # noqa: S606 - an argument list, no shell
