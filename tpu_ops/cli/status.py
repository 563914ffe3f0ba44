"""`tpu_ops status`: how a run is, rank by rank."""

from __future__ import annotations

import argparse
import asyncio

from tpu_ops import config
from tpu_ops.cli import options, output, runs_output
from tpu_ops.errors import ExitCode
from tpu_ops.fleet import view
from tpu_ops.remote.fanout import Fanout
from tpu_ops.runs import control
from tpu_ops.runs.follow import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops status`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("run", help="a run, or a node or worker whose run is meant")


def run(args: argparse.Namespace) -> int:
    """Ask the workers and show what they say."""
    fleet = view.current(config.load(args.fleet))
    seen = asyncio.run(_ask(fleet, args.run))
    if args.json:
        output.as_json([runs_output.summary(run_.run_id, outcomes) for run_, outcomes in seen])
    elif not seen:
        output.info(f"no run is on {args.run}")
    for run_, outcomes in seen:
        if not args.json:
            output.info(f"run {run_.run_id}: {runs_output.run_state(outcomes)}")
            runs_output.table(outcomes)
    return max((runs_output.exit_code(outcomes) for _, outcomes in seen), default=ExitCode.OK)


async def _ask(fleet: view.Fleet, word: str) -> list[tuple[control.RunRef, list[Outcome]]]:
    fanout = Fanout(fleet.ssh_config)
    runs = await control.find(fleet, fanout, word)
    return [(run_, await control.outcomes(fanout, run_)) for run_ in runs]
