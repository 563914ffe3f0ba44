"""`tpu_ops attach`: follow a run that is on, from its last lines to its end, as `train` would have."""

from __future__ import annotations

import argparse
import time

from tpu_ops import config
from tpu_ops.cli import logs, options, output, runs_output
from tpu_ops.errors import ExitCode
from tpu_ops.fleet import view

#: Seconds of the past whose lines are shown first.
PAST = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops attach`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument(
        "--rank", default="0", metavar="all|LIST", help="whose lines to show, as in all, 0,3 or 0-2 (default: 0)"
    )
    parser.add_argument("--since", type=logs.moment, metavar="TIME", help="show lines from then on (default: 60s)")
    parser.add_argument("run", help="a run, or a node or worker whose run is meant")


def run(args: argparse.Namespace) -> int:
    """Follow it."""
    fleet = view.current(config.load(args.fleet))
    since = args.since or time.time() - PAST
    try:
        run_, outcomes, shown = logs.followed(
            fleet, args.run, args.rank, live=True, since=since, aside=args.json, begun=_say
        )
    except KeyboardInterrupt:
        output.info("")
        output.info("detached: the run goes on")
        output.info(f"  follow: tpu_ops attach {args.run}")
        output.info(f"  stop:   tpu_ops stop {args.run}")
        return ExitCode.INTERRUPTED
    return runs_output.finish(run_.run_id, outcomes, shown, as_json=args.json)


def _say(run_id: str, count: int) -> None:
    output.info(f"run {run_id} on {count} workers; Ctrl-C detaches")
