"""`tpu_ops logs`: the lines of a run's ranks, those there are or all that come."""

from __future__ import annotations

import argparse
import asyncio

from tpu_ops import config
from tpu_ops.cli import options, output, runs_output
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import contact, view
from tpu_ops.runs import control
from tpu_ops.runs.follow import Follower, Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops logs`."""
    options.add_fleet(parser)
    parser.add_argument(
        "--rank", default="0", metavar="all|LIST", help="whose lines to show, as in all, 0,3 or 0-2 (default: 0)"
    )
    parser.add_argument("--follow", action="store_true", help="go on until the run has ended, and end as it does")
    parser.add_argument("run", help="a run, or a node or worker whose run is meant")


def run(args: argparse.Namespace) -> int:
    """Show the lines."""
    fleet = view.current(config.load(args.fleet))
    try:
        outcomes, shown = asyncio.run(_follow(fleet, args))
    except KeyboardInterrupt:
        output.info("")
        output.info("no longer following; the run goes on")
        return ExitCode.INTERRUPTED
    if not args.follow:
        lost = any(outcomes[rank].state == "unknown" for rank in shown)
        return ExitCode.UNREACHABLE if lost else ExitCode.OK
    if runs_output.run_state(outcomes) != "succeeded":
        runs_output.failure(outcomes, shown)
        output.info(f"the run {runs_output.run_state(outcomes)}")
    return runs_output.exit_code(outcomes)


async def _follow(fleet: view.Fleet, args: argparse.Namespace) -> tuple[list[Outcome], list[int]]:
    fanout = contact.fanout(fleet)
    runs, _ = found = await control.find(fleet, fanout, args.run)
    if not runs and (problem := found.problem()):
        raise problem
    if len(runs) != 1:
        names = ", ".join(run_.run_id for run_ in runs)
        raise UsageError(f"{args.run} has {names or 'no run on it'}", where=f"RUN {args.run!r}", fix="name the run")
    shown = runs_output.ranks(args.rank, len(runs[0].hosts))
    follower = Follower(
        fanout,
        runs[0].run_id,
        runs[0].hosts,
        shown=shown,
        line=runs_output.line,
        say=output.info,
        live=args.follow,
    )
    return await follower.run(), shown
