"""`tpu_ops status`: show the state of a run, rank by rank; without RUN, list the runs."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from tpu_ops import config
from tpu_ops.cli import leftovers, options, output, runs, runs_output
from tpu_ops.errors import ExitCode, OpsError
from tpu_ops.fleet import contact, view
from tpu_ops.protocol.record import ON
from tpu_ops.recovery import open_requests
from tpu_ops.runs import advice, control, holders, nodes, overview, preparations, recovery, spec
from tpu_ops.runs.known_ends import remembered
from tpu_ops.runs.outcomes import Outcome, run_state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops status`."""
    options.add_fleet(parser)
    options.add_json(parser)
    options.add_exit_code(parser)
    parser.add_argument(
        "run",
        nargs="?",
        help=f"{runs_output.RUN} (default: list the active runs, and the last ones started here)",
    )


def run(args: argparse.Namespace) -> int:
    """Ask the workers for the state of the run, or of all runs, and print the answers."""
    fleet = view.current(config.load(args.fleet))
    if not args.run:
        every_run = asyncio.run(overview.overview(fleet, contact.fanout(fleet)))
        return runs.show(every_run, fleet.settings, as_json=args.json)
    seen, found, problem = asyncio.run(_ask(fleet, args.run))
    new = preparations.without_runs(found.silent, fleet.settings.state_dir)
    if args.json and (seen or not problem):
        with output.read_or_not():
            known = [(run_.run_id, outcomes) for run_, outcomes in seen]
            state_dir = fleet.settings.state_dir
            output.as_json([runs_output.summary(*one, recovery.recoverer(state_dir, one[0])) for one in known])
    elif not args.json and not seen and (found.last or not problem):
        last = found.last.run_id if found.last else ""
        ended = f"; the last one there was {last}: `tpu_ops status {last}` shows its end" if last else ""
        output.info(f"no run is active on {args.run}{ended}")
    runs.tell_of_new(new)
    for run_, outcomes in seen if not args.json else ():
        _show(run_, outcomes, fleet)
    every = [outcome for _, outcomes in seen for outcome in outcomes]
    if any(map(holders.held_after, every)):
        held = asyncio.run(holders.still_held(contact.fanout(fleet), every))
        leftovers.warn_of_held(held)
    of_rank = args.exit_code == "rank"
    code = runs_output.worst(runs_output.exit_code(outcomes, of_rank=of_rank) for _, outcomes in seen)
    if problem and code in {ExitCode.OK, ExitCode.UNREACHABLE}:
        raise problem
    if problem:
        output.error(problem)
    return code


def _show(run_: control.RunRef, outcomes: Sequence[Outcome], fleet: view.Fleet) -> None:
    """Print the state of one run, and advice if no process recovers it."""
    settings = fleet.settings
    attempt = runs_output.attempt(outcomes)
    which = f", attempt {attempt}" if attempt > 1 else ""
    found = recovery.recoverer(settings.state_dir, run_.run_id)
    state = advice.state(run_state(outcomes), found)
    more = f" {advice.starting(outcomes)}" if state == "starting" else ""
    output.info(f"run {run_.run_id}{which}: {state}{more}")
    with output.read_or_not():
        runs_output.table(outcomes)
    if state in ON:
        runs_output.notes(outcomes)
    leftovers.warn_of_lost_output(outcomes)
    leftovers.warn_of_processes(outcomes)
    if (rank := runs_output.failed_first(outcomes, ())) is not None:
        failed = next((outcome for outcome in outcomes if outcome.rank == rank), None)
        if failed and failed.record and failed.state != "refused":
            shows = f"tpu_ops logs {run_.run_id} --rank {rank}"
            output.info(f"  output: {output.on_fleet(shows)}")
    open_requests.tell(run_.run_id, open_requests.kept(settings.state_dir, run_.run_id))
    if note := advice.recovery(found):
        output.info(note)
    else:
        if machine := advice.other_machine(run_.run_id, outcomes, spec.here()):
            output.info(machine)
        runs_output.steps(advice.again(outcomes, lambda: nodes.states(fleet)))


async def _ask(
    fleet: view.Fleet, word: str
) -> tuple[list[tuple[control.RunRef, tuple[Outcome, ...]]], control.Found, OpsError | None]:
    """Return the runs that a word stands for with their outcomes, what was found, and the error, if any."""
    fanout, begun = contact.fanout(fleet), time.time()
    found = await control.find(fleet, fanout, word)
    seen = [(run_, await control.outcomes(fanout, run_)) for run_ in found.runs]
    known = [(run_, nodes.without_nodes(fleet, run_.run_id, outcomes, begun)) for run_, outcomes in seen]
    as_seen = [(run_, remembered(fleet, run_.run_id, run_.hosts, outcomes)) for run_, outcomes in known]
    new = preparations.without_runs(found.silent, fleet.settings.state_dir)
    problem = preparations.problem_of([reply for reply in found.silent if reply not in new], fleet.settings.state_dir)
    if problem and not found.runs:
        problem.fix = "; ".join(filter(None, (problem.fix, nodes.last_started(fleet, word))))
    return as_seen, found, problem
