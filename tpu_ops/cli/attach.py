"""`tpu_ops attach`: follow an active run to its end, as `tpu_ops train` does; recent output is shown first."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from tpu_ops import config, texts
from tpu_ops.cli import (
    faults,
    foreground,
    interrupts,
    logs,
    options,
    output,
    recover_options,
    recovering,
    run_end,
    runs_output,
)
from tpu_ops.config import Settings
from tpu_ops.errors import OpsError, UsageError
from tpu_ops.fleet import view
from tpu_ops.recovery import decide
from tpu_ops.runs import attempts, endings, nodes, ranks, records, recovery
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.outcomes import Outcome, run_state
from tpu_ops.ssh.fanout import Fanout

#: Without --since, the output of this many last seconds is shown first.
PAST = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops attach`."""
    options.add_fleet(parser)
    options.add_json(parser)
    options.add_exit_code(parser)
    parser.add_argument("--rank", metavar="all|LIST", help=runs_output.RANKS_OR_OWN)
    parser.add_argument("--since", type=logs.moment, metavar="TIME", help="show output since this time (default: 60s)")
    recover_options.add_arguments(parser)
    run_end.add_arguments(parser)
    parser.add_argument("run", help=runs_output.RUN)


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Follow the run; with --recover, also start the run again when its nodes are taken away."""
    run_end.check(args)
    settings = config.load(args.fleet)
    if args.recover:
        args.rank = args.rank or "0"
        return _take_over(settings, args)
    recover_options.only_with_recover(args)
    fleet = view.current(settings)
    since = args.since or time.time() - PAST
    found: list[tuple[Fanout, RunRef]] = []
    said: list[RunRef] = []
    runs: list[RunRef] = []
    ends: list[tuple[str, Sequence[Outcome]]] = []

    def begun(fanout: Fanout, run_: RunRef) -> None:
        found.append((fanout, run_))
        runs.append(run_)

    def on() -> None:
        run_ = found[0][1]
        if run_ not in said:
            said.append(run_)
            output.info(f"run {run_.run_id} on {texts.count(len(run_.hosts), 'worker')}; Ctrl-C detaches")

    async def follow() -> int:
        terminal = runs_output.terminal(aside=args.json)
        run_, outcomes, shown = await attempts.to_the_last(
            fleet, args.run, args.rank, terminal, since=since, begun=begun, on=on, over=found.clear
        )
        ends.append((run_state(outcomes), outcomes))
        if records.is_of(settings.state_dir, run_.run_id, run_.hosts, fleet.workers):
            records.close(settings.state_dir, run_.run_id, run_state(outcomes), outcomes=outcomes)
        of_rank = args.exit_code == "rank"
        code = runs_output.finish(
            run_.run_id,
            outcomes,
            shown,
            as_json=args.json,
            of_rank=of_rank,
            kept=recovery.is_kept(settings.state_dir, run_.run_id),
            states=lambda: nodes.states(fleet),
        )
        is_over = endings.ending(outcomes, {})[0] in (endings.SUCCEEDED, endings.STOPPED)
        # After success or a stop, the process that recovers the run is about to end: print no note on recovery.
        if not is_over and (note := recovery.note_of(settings.state_dir, run_.run_id)):
            output.info(note)
        return code

    def left() -> None:
        run_id = found[0][1].run_id if found else args.run
        output.info(f"detached: run {run_id} continues" if found else "detached: the run continues")
        runs_output.hints(run_id)

    def stopped(outcomes: Sequence[Outcome]) -> None:
        run_, state = found[0][1], run_state(outcomes)
        ends.append((state, outcomes))
        if records.is_of(settings.state_dir, run_.run_id, run_.hosts, fleet.workers):
            records.close(settings.state_dir, run_.run_id, state, endings.STOPPED, outcomes)
            # If this fails, a process that recovers the run still learns of the stop from the workers.
            with contextlib.suppress(TimeoutError, OpsError):
                recovery.stop(settings.state_dir, run_.run_id, 0.0)

    def running() -> tuple[Fanout, RunRef] | None:
        return found[0] if found else None

    return run_end.RunEnd(args, lambda: view.known(settings) or fleet).after(
        lambda: foreground.to_its_end(follow(), running, left, stopped, as_json=args.json),
        lambda: runs[-1] if runs else None,
        lambda: ends[-1] if ends else None,
    )


def _take_over(settings: Settings, args: argparse.Namespace) -> int:
    """Resume the recovery of a run whose recovering process has ended."""
    if args.since:
        what = "with --recover, output is shown from where the copy of the logs on this machine ends"
        raise UsageError(
            what, where="--since and --recover", fix="leave out --since; `tpu_ops logs` shows older output"
        )
    # Fail for an unknown run before `alone` creates a lock file for it.
    recovery.read(settings.state_dir, args.run)
    with recovery.alone(settings.state_dir, args.run):
        # Read again under the lock: until now, another process may have ended the recovery for good.
        kept = recovery.read(settings.state_dir, args.run)
        if kept.pending and (over := decide.over_budget(kept)):
            recovery.forget(settings.state_dir, args.run)
            raise UsageError(f"not started again: {over} is used up", where=f"run {args.run}", fix=decide.MORE)
        if args.outside_grant:
            kept = replace(kept, outside_grant=True)
        if known := records.read(settings.state_dir, args.run):
            ranks.parse(args.rank, len(known.hosts))
        job = recovering.Recovering(settings, kept, kept.spec(os.environ), args, begun=True)
        job.tell_requested()
        with faults.told(args.run, settings, as_json=args.json, more=job.facts):
            after = run_end.RunEnd(args, lambda: view.current(settings))
            return after.after(
                lambda: job.to_the_end(None if kept.pending else job.driver.attached()),
                job.begun_run,
                lambda: job.ended,
            )
