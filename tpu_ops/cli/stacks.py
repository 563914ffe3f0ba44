"""`tpu_ops stacks`: show where the processes of a run are, equal stacks of ranks and threads as one."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Sequence

from tpu_ops import config
from tpu_ops.cli import options, output, runs_output
from tpu_ops.errors import ExitCode
from tpu_ops.fleet import contact, view
from tpu_ops.runs import attempts, control, ranks, stacks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops stacks`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument(
        "--rank",
        metavar="all|LIST",
        help="ranks that are shown: all, or a list such as 0,3 or 0-2 (default: that of the worker, if RUN is one, "
        "else all)",
    )
    parser.add_argument("--full", action="store_true", help="also show the whole stacks of all threads")
    parser.add_argument(
        "--signal",
        action="store_true",
        help="send SIGUSR1 to Python processes that handle it if their stacks cannot be read otherwise; faulthandler, "
        "if they have registered it, then writes their stacks into the run's log",
    )
    parser.add_argument(
        "--attempt",
        type=int,
        metavar="N",
        help="an earlier attempt of a recovered run: show the stacks that were kept of it",
    )
    parser.add_argument("run", help=f"{runs_output.RUN}; if no run is active on it, its last run")


def run(args: argparse.Namespace) -> int:
    """Ask the ranks for their stacks, and print them."""
    ranks.spans(args.rank or "all")
    fleet = view.current(config.load(args.fleet))
    run_, found = asyncio.run(_asked(fleet, args))
    if args.json:
        output.as_json(stacks.to_json(run_, found))
    else:
        show(found, full=args.full)
    code = _warn_of_errors(fleet, found)
    _print_ended(found)
    return code


async def _asked(fleet: view.Fleet, args: argparse.Namespace) -> tuple[control.RunRef, list[stacks.RankStacks]]:
    fanout = contact.fanout(fleet)
    run_ = await attempts.the_run(fleet, fanout, args.run, output.info, live=False)
    own = str(run_.hosts.index(args.run)) if args.run in run_.hosts else "all"
    shown = ranks.parse(args.rank or own, len(run_.hosts))
    return run_, await stacks.ask(fanout, run_, shown, signal=args.signal, attempt=args.attempt)


def show(found: Sequence[stacks.RankStacks], *, full: bool) -> None:
    """Print the places of all ranks, then the stacks if they are wanted, and warn of processes without them."""
    with output.read_or_not():
        for text in stacks.short(found):
            output.line(text)
        for group in stacks.full(found) if full else ():
            output.line()
            output.line(group.title)
            for frame in group.frames:
                output.line(f"    {frame}")
    for text in stacks.problems(found):
        output.warning(text)


def _warn_of_errors(fleet: view.Fleet, found: Iterable[stacks.RankStacks]) -> ExitCode:
    """Warn of ranks whose workers gave no answer or an error; return the exit code."""
    ranks_of = {one.host: one.rank for one in found}
    silent = contact.with_hint(fleet.settings, (one.reply for one in found if one.reply))
    for reply in silent:
        fix = f" ({reply.fix})" if reply.fix else ""
        output.warning(f"rank {ranks_of[reply.host]} ({reply.host}): {reply.problem}{fix}")
    if any(map(control.is_lost, silent)):
        return ExitCode.UNREACHABLE
    return ExitCode.FAILED if silent else ExitCode.OK


def _print_ended(found: Iterable[stacks.RankStacks]) -> None:
    """Print when the stacks of ended ranks were taken, and which ranks have no stacks or no process."""
    taken: dict[tuple[str, int], list[int]] = {}
    without: list[int] = []
    empty: list[int] = []
    for one in found:
        if one.kept and one.at:
            # Ranks whose stacks were taken in the same seconds were ended together.
            taken.setdefault((one.state, int(one.at // 10)), []).append(one.rank)
        elif one.kept:
            without.append(one.rank)
        elif not one.reply and not one.processes:
            empty.append(one.rank)
    first = {one.rank: one.at for one in found}
    for (state, _), numbers in taken.items():
        output.info(
            f"{ranks.named(numbers)} {state}; these stacks were taken at {output.at(first[numbers[0]])}, before that"
        )
    if without:
        why = "stacks are kept of processes that still exist some seconds after SIGTERM, or when a run stands still"
        output.info(f"no stacks of {ranks.named(without)}: ended, and none were kept ({why})")
    if empty:
        output.info(f"no process on {ranks.named(empty)}: not started yet, or ended already")
