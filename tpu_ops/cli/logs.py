"""`tpu_ops logs`: the lines of a run's ranks, those there are or all that come; or the whole logs as files."""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from datetime import datetime
from pathlib import Path

from tpu_ops import config
from tpu_ops.cli import options, output, runs_output
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import contact, view
from tpu_ops.runs import control, fetch
from tpu_ops.runs.follow import Follower, Outcome

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops logs`."""
    options.add_fleet(parser)
    parser.add_argument(
        "--rank", default="0", metavar="all|LIST", help="whose lines to show, as in all, 0,3 or 0-2 (default: 0)"
    )
    parser.add_argument("--follow", action="store_true", help="go on until the run has ended, and end as it does")
    parser.add_argument(
        "--since", type=moment, metavar="TIME", help="lines from then on: 90s, 10m, 2h, 1d, or 2026-01-31T12:00"
    )
    parser.add_argument("--fetch", metavar="DIR", help="copy the logs as they are to DIR/RUN/rank-N.log, all ranks")
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
    if args.fetch:
        output.info(f"logs of {len(outcomes)} ranks are in {args.fetch}")
    if not args.follow:
        lost = any(outcomes[rank].state == "unknown" for rank in shown)
        return ExitCode.UNREACHABLE if lost else ExitCode.OK
    if runs_output.run_state(outcomes) != "succeeded":
        runs_output.failure(outcomes, shown)
        output.info(f"the run {runs_output.run_state(outcomes)}")
    return runs_output.exit_code(outcomes)


def moment(text: str) -> float:
    """Return the time (seconds since 1970) that a person means, for argparse."""
    if found := _AGO.fullmatch(text):
        return time.time() - float(found[1]) * _UNITS[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        what = f"{text!r} is no time: write 10m for ten minutes ago (s, m, h, d), or 2026-01-31T12:00"
        raise argparse.ArgumentTypeError(what) from None


async def _follow(fleet: view.Fleet, args: argparse.Namespace) -> tuple[list[Outcome], list[int]]:
    fanout = contact.fanout(fleet)
    runs, _ = found = await control.find(fleet, fanout, args.run)
    if not runs and (problem := found.problem()):
        raise problem
    if len(runs) != 1:
        names = ", ".join(run_.run_id for run_ in runs)
        raise UsageError(f"{args.run} has {names or 'no run on it'}", where=f"RUN {args.run!r}", fix="name the run")
    count = len(runs[0].hosts)
    if args.fetch:
        return await fetch.logs(fanout, runs[0], Path(args.fetch), live=args.follow), list(range(count))
    shown = runs_output.ranks(args.rank, count)
    follower = Follower(
        fanout,
        runs[0].run_id,
        runs[0].hosts,
        shown=shown,
        line=runs_output.line,
        say=output.info,
        live=args.follow,
        since=args.since or 0.0,
    )
    return await follower.run(), shown
