"""`tpu_ops ssh`: log in to a worker."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence

from tpu_ops import config
from tpu_ops.cli import options, output
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.errors import UnreachableError, UsageError
from tpu_ops.fleet import contact, selection, targets
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import preparations
from tpu_ops.ssh import envelope, openssh
from tpu_ops.ssh.masters import Unreachable

#: Seconds in which the shared connection to the worker must open; after that, ssh is started in the foreground, where
#: it shows what it waits for.
LIMIT = 45.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops ssh`."""
    options.add_fleet(parser)
    parser.add_argument("target", help="a worker (pod-w2) or a node (pod: its worker 0)")
    command = parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="run this command instead of a login shell; a single word is a line for the remote shell",
    )
    # Otherwise the error of argparse for a missing TARGET would also name COMMAND, which is optional.
    command.required = False
    parser.usage = "%(prog)s [OPTION...] TARGET [-- COMMAND...]"


def run(args: argparse.Namespace) -> int:
    """Replace this process with ssh to the worker."""
    fleet, _ = contact.find(config.load(args.fleet), args.target)
    fleet = contact.serving(fleet, [named(fleet, args.target)])
    worker = named(fleet, args.target)
    if len(targets.select(fleet.workers, args.target, listed=fleet.listed)) > 1:
        output.info(f"{args.target} means several workers: logging in to {worker.host}")
    check_serves(fleet, worker)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    argv = ssh_argv(fleet, worker, command)
    try:
        asyncio.run(reach(fleet, worker))
        os.execvp(argv[0], argv)  # noqa: S606 - ssh is to take this process's place
    except OSError as exc:
        raise openssh.absent(exc) from exc


async def reach(fleet: Fleet, worker: Worker) -> None:
    """Open the connection that ssh then shares; this also finds a worker whose address has changed.

    Raises:
        UnreachableError: The worker does not answer.
    """
    try:
        await contact.fanout(fleet).answer(worker.host, limit=LIMIT)
    except Unreachable as exc:
        # ssh may be waiting for input that only the user can give, such as a passphrase: start it in the foreground.
        if exc.late:
            output.info(f"{worker.host}: {exc}: ssh continues, and shows what it is waiting for")
        elif not exc.answered:
            port = "`tpu_ops list` shows its node's state; check that port 22 is open to you there"
            fix = "" if openssh.of_host_key(str(exc)) else port
            raise UnreachableError(str(exc), where=worker.host, fix=fix) from exc


def named(fleet: Fleet, target: str) -> Worker:
    """Return the worker to log in to: the target itself, or worker 0 if the target is a node.

    Raises:
        UsageError: The target is unknown or means workers of several nodes.
    """
    workers = targets.select(fleet.workers, target, listed=fleet.listed)
    if len(workers) > 1 and (len({worker.label for worker in workers}) > 1 or workers[0].index != 0):
        raise UsageError("the target means several workers", where=f"target {target!r}", fix="name one, as in pod-w2")
    return workers[0]


def check_serves(fleet: Fleet, worker: Worker) -> None:
    """Refuse a worker that is known to be unreachable.

    Raises:
        UnreachableError: The worker has no usable address, or its node is not running.
    """
    if worker.node.state not in SERVING_STATES:
        fix = preparations.way_back(fleet, [worker.host])
        raise UnreachableError(f"its node is {worker.node.state}", where=worker.host, fix=fix)
    if problem := selection.ways_of(fleet.settings, fleet.listed).of(worker).problem:
        raise UnreachableError(
            f"the worker {problem}", where=worker.host, fix="see connect_with and proxy_jump in tpu_vm.yml"
        )


def ssh_argv(fleet: Fleet, worker: Worker, command: Sequence[str]) -> list[str]:
    """Return the command line of ssh.

    A command of one word is a line for the remote shell; several words are quoted, so that they arrive unchanged.
    """
    remote = list(command) if len(command) < 2 else [envelope.joined(command)]
    return ["ssh", "-F", str(fleet.ssh_config), worker.host, *(["--", *remote] if remote else [])]
