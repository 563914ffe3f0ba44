"""`tpu_ops unlock`: free the chips of a target: end what holds them and may be ended, remove stale lockfiles."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict

from tpu_ops import config
from tpu_ops.cli import options, output, who
from tpu_ops.cli.run import folded
from tpu_ops.errors import ExitCode, HostError, UsageError
from tpu_ops.fleet import contact
from tpu_ops.fleet.model import Worker
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import control, holders
from tpu_ops.runs.holders import Holder, Unlocked

#: Seconds between SIGTERM and SIGKILL.
GRACE = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops unlock`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("--user", default="", metavar="NAME", help="whose processes (with --force; default: your own)")
    parser.add_argument("--force", action="store_true", help="end what belongs to --user (administrators only)")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--grace",
        type=options.seconds,
        default=GRACE,
        metavar="SECONDS",
        help=f"seconds from SIGTERM until SIGKILL (default: {GRACE:.0f})",
    )
    parser.add_argument("target", help="a node, a worker, a node set or a group")
    parser.epilog = (
        "Ends your own runs there and your own processes that hold a chip, and nobody else's: theirs only with "
        "--force --user NAME. A process is meant by its open chip, never by its name."
    )


def run(args: argparse.Namespace) -> int:
    """Look, ask, end, look again."""
    if bool(args.user) != args.force:
        what = "--force needs the name of whose processes are meant" if args.force else "--user needs --force"
        raise UsageError(what, where="--force" if args.force else "--user", fix="add --force --user NAME, or neither")
    fleet, workers = contact.find(config.load(args.fleet), args.target)
    fleet = contact.serving(fleet, workers)
    hosts = [worker.host for worker in workers]
    user = args.user or fleet.settings.user
    seen = asyncio.run(holders.look(contact.fanout(fleet), hosts))
    doomed = [holder for holder in seen.holders if holder.user == user]
    if doomed:
        if not args.json:
            output.table(who.rows(doomed), who.COLUMNS)
        if not args.yes and not options.confirmed(f"end these on {args.target}?", "ending processes"):
            output.info("nothing was ended")
            return ExitCode.FAILED
    stopped, unlocked = asyncio.run(_free(fleet, workers, doomed, args))
    if args.json:
        output.as_json({"runs": stopped, "workers": [asdict(result) for result in unlocked]})
    else:
        _show(stopped, unlocked)
    if problem := control.Found([], seen.silent).problem():
        raise problem
    return exit_code(unlocked, user)


async def _free(
    fleet: Fleet, workers: Sequence[Worker], doomed: Sequence[Holder], args: argparse.Namespace
) -> tuple[list[str], list[Unlocked]]:
    """Stop the runs and end the processes; return the runs and what became of each worker."""
    fanout = contact.fanout(fleet)
    runs = sorted({holder.run for holder in doomed if holder.run})
    for reference in (await control.running(fleet, fanout, workers)).runs if runs else ():
        if reference.run_id in runs:
            await control.stop(fanout, reference, force=args.force, grace=args.grace, reason="unlocked")
    return runs, await holders.unlock(fanout, [worker.host for worker in workers], args.user, args.grace)


def _show(runs: Sequence[str], unlocked: Sequence[Unlocked]) -> None:
    for run_id in runs:
        output.info(f"run {run_id} was stopped")
    for result in unlocked:
        for holder in result.ended:
            output.info(f"{result.host}: ended pid {holder.pid} of {holder.user}: {holder.command}")
        for path in result.lockfiles:
            output.info(f"{result.host}: removed {path}, which nobody held")
        for holder in result.left:
            output.warning(f"{result.host}: still held by pid {holder.pid} of {holder.user}: {holder.command}")
        if result.problem:
            output.warning(f"{result.host}: {result.problem}{f'; {result.fix}' if result.fix else ''}")
    if free := [result.host for result in unlocked if not result.left and not result.problem]:
        output.line(f"free: {folded(free)}")


def exit_code(unlocked: Sequence[Unlocked], user: str) -> int:
    """Return the command's exit code.

    Raises:
        HostError: Chips are still held, or a worker refused.
    """
    if any(not result.reached for result in unlocked):
        return ExitCode.UNREACHABLE
    held = [holder for result in unlocked for holder in result.left]
    if held:
        others = sorted({holder.user for holder in held if holder.user != user})
        names = f"ask {', '.join(others)}, or an administrator: --force --user {others[0]}" if others else ""
        raise HostError(
            "chips are still held",
            where=folded(sorted({holder.host for holder in held})),
            fix=names or "a process in state D waits inside the kernel: reboot the worker (ps -o stat,pid,cmd)",
        )
    return ExitCode.FAILED if any(result.problem for result in unlocked) else ExitCode.OK
