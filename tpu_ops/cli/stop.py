"""`tpu_ops stop`: stop a run on all its workers."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_ops import config
from tpu_ops.cli import leftovers, options, output, runs_output
from tpu_ops.errors import ExitCode, OpsError
from tpu_ops.fleet import view
from tpu_ops.protocol.spec import MAX_GRACE
from tpu_ops.recovery import open_requests, termination
from tpu_ops.recovery.termination import is_ended
from tpu_ops.runs import control, recovery
from tpu_ops.runs.outcomes import Outcome, run_state
from tpu_ops.runs.spec import GRACE_STOP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops stop`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("--force", action="store_true", help="stop another person's run (administrators only)")
    parser.add_argument(
        "--grace",
        type=options.grace(MAX_GRACE),
        metavar="SECONDS",
        help=f"seconds from SIGTERM until SIGKILL (default: {GRACE_STOP:.0f}, at most {MAX_GRACE})",
    )
    parser.add_argument(
        open_requests.DELETE,
        action="store_true",
        help="delete nodes and queued resources that the run's recovery has requested and no run uses, without asking",
    )
    parser.add_argument("run", help=runs_output.RUN)


def run(args: argparse.Namespace) -> int:
    """Stop the run or runs that the argument stands for."""
    fleet = view.current(config.load(args.fleet))
    settings = fleet.settings
    # After an earlier stop, the open requests may be all that is left of a run: then finding no run is no error.
    only = recovery.requests_file(settings.state_dir, args.run).exists() and not control.is_target(fleet, args.run)
    try:
        ended, problem = asyncio.run(termination.end_named(fleet, args.run, force=args.force, grace=args.grace))
    except OpsError:
        if not only:
            raise
        ended, problem = [], None
    if not args.json and (ended or not problem):
        report(ended, as_json=False)
    if not ended and not problem and not args.json and not only:
        output.info(f"no run is active on {args.run}")
    left: dict[str, list[dict[str, Any]]] = {}
    for run_id in {run_.run_id for run_, _ in ended} or ({args.run} if only else set()):
        left[run_id], failure = open_requests.settle(
            settings,
            run_id,
            delete=args.delete_requested,
            confirmed=_confirmed if options.can_ask() and not args.json else None,
            waiting=options.Waiting,
        )
        problem = problem or failure
    if args.json and (ended or not problem):
        report(ended, as_json=True, left=left)
    if problem:
        raise problem
    return exit_code([outcome for _, stopped in ended for outcome in stopped.outcomes])


def _confirmed(question: str) -> bool:
    return options.confirmed(question, "deleting")


def report(
    ended: Sequence[tuple[control.RunRef, control.Stopped]],
    *,
    as_json: bool,
    left: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> None:
    """Print the outcomes of runs that were stopped.

    Args:
        ended: The runs.
        as_json: Whether to print JSON.
        left: Run id -> open requests as `open_requests.settle` returns them; also for runs that are not in ``ended``.
    """
    if as_json:
        left = left or {}
        of = {run.run_id: stopped.outcomes for run, stopped in ended}
        runs = [runs_output.summary(run_id, of[run_id]) for run_id in of]
        runs += [{"run_id": run_id} for run_id in left if run_id not in of and left[run_id]]
        with output.read_or_not():
            output.as_json([one | {"requested": list(left.get(one["run_id"], ()))} for one in runs])
    for run_, stopped in ended:
        if not as_json:
            output.info(f"run {run_.run_id}{_how(stopped)}")
            with output.read_or_not():
                runs_output.table(stopped.outcomes)
        leftovers.warn(stopped.outcomes)


def _how(stopped: control.Stopped) -> str:
    """Return the state of a run after the stop, or how it had ended before, as words to put after its id."""
    records_ = [outcome.record for outcome in stopped.outcomes if outcome.record]
    if not stopped.already:
        state = run_state(stopped.outcomes)
        # A run that is partly gone is not active any more, so it counts as stopped. A run of which no worker has a
        # record was not stopped by this command.
        is_stopped = state == "gone" and any(out.record or out.reason == termination.NOT_ON for out in stopped.outcomes)
        return f": {'stopped' if is_stopped and is_ended(stopped.outcomes) else state}"
    if not records_:
        return " is not running: none of its workers knows it (if it is only just being started, run this again):"
    began = any(record["began"] or record["attempt"] > 1 for record in records_)
    return " had already ended:" if began else " was given up before it began:"


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return the exit code: 0 if no rank is left, however the ranks have ended."""
    if any(outcome.state == "unreachable" for outcome in outcomes):
        return ExitCode.UNREACHABLE
    return ExitCode.OK if is_ended(outcomes) else ExitCode.FAILED
