"""`tpu_ops stop`: end a run on all its workers."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from tpu_ops import config
from tpu_ops.cli import options, output, runs_output
from tpu_ops.errors import ExitCode
from tpu_ops.fleet import view
from tpu_ops.remote.fanout import Fanout
from tpu_ops.runs import control
from tpu_ops.runs.follow import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops stop`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("--force", action="store_true", help="stop another person's run (administrators only)")
    parser.add_argument("--grace", type=options.seconds, metavar="SECONDS", help="a shorter time until SIGKILL")
    parser.add_argument("run", help="a run, or a node or worker whose run is meant")


def run(args: argparse.Namespace) -> int:
    """Stop it."""
    fleet = view.current(config.load(args.fleet))
    ended = asyncio.run(_stop(fleet, args))
    if args.json:
        output.as_json([runs_output.summary(run.run_id, outcomes) for run, outcomes in ended])
    elif not ended:
        output.info(f"no run is on {args.run}")
    for run_, outcomes in ended:
        if not args.json:
            output.info(f"run {run_.run_id}:")
            runs_output.table(outcomes)
        runs_output.leftovers(outcomes)
    return exit_code([outcome for _, outcomes in ended for outcome in outcomes])


async def _stop(fleet: view.Fleet, args: argparse.Namespace) -> list[tuple[control.RunRef, list[Outcome]]]:
    fanout = Fanout(fleet.ssh_config)
    runs = await control.find(fleet, fanout, args.run)
    done = [control.stop(fanout, run, force=args.force, grace=args.grace) for run in runs]
    return list(zip(runs, await asyncio.gather(*done), strict=True))


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return the exit code: 0 once no rank is left, whatever became of it."""
    states = {outcome.state for outcome in outcomes}
    if "unreachable" in states:
        return ExitCode.UNREACHABLE
    stuck = any((outcome.record or {}).get("stuck") for outcome in outcomes)
    return ExitCode.FAILED if stuck or states & {"unknown", "starting", "running", "ending"} else ExitCode.OK
