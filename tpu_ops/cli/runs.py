"""`tpu_ops runs`: list all active runs of the fleet, and the last runs that this machine started."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from collections.abc import Sequence

from tpu_ops import config, texts
from tpu_ops.cli import options, output, runs_output
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode
from tpu_ops.fleet import contact, view
from tpu_ops.protocol.record import ON
from tpu_ops.recovery import open_requests
from tpu_ops.runs import advice, control, overview, preflight, preparations, recovery, spec, watched
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.ssh.replies import Reply

#: Columns of the table, which has one row for each run.
COLUMNS = ("run", "person", "workers", "state", "exit", "started", "lasted", "command")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops runs`."""
    options.add_fleet(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Ask all workers and list the runs."""
    fleet = view.current(config.load(args.fleet))
    seen = asyncio.run(overview.overview(fleet, contact.fanout(fleet)))
    return show(seen, fleet.settings, as_json=args.json)


def show(seen: overview.Overview, settings: Settings, *, as_json: bool) -> int:
    """Print the runs of a fleet.

    Args:
        seen: The runs.
        settings: The settings of the fleet.
        as_json: Whether to print JSON.

    Raises:
        UnreachableError, HostError: Workers could not be asked for their runs.
    """
    silent = seen.silent.silent
    new = preparations.without_runs(silent, settings.state_dir)
    problem = preparations.problem_of([reply for reply in silent if reply not in new], settings.state_dir)
    found = {run_.run_id: recovery.recoverer(settings.state_dir, run_.run_id) for run_, *_ in seen.rows}
    if as_json and (seen.rows or not problem):
        told = [runs_output.summary(run_.run_id, outcomes, found[run_.run_id]) for run_, outcomes, _ in seen.rows]
        ends = [runs_output.end_of(outcomes, one) for (_, outcomes, _), one in zip(seen.rows, told, strict=True)]
        output.as_json([one | end.facts() for one, end in zip(told, ends, strict=True)])
    elif seen.rows and not as_json:
        rows = [_row(*row, found[row[0].run_id]) for row in seen.rows]
        output.table(rows, COLUMNS)
        for (run_, outcomes, _), row in zip(seen.rows, rows, strict=True):
            note = advice.recovery(found[run_.run_id]) or advice.other_machine(run_.run_id, outcomes, spec.here())
            if note and row["state"] not in ON:
                output.info(note)
            for text in filter(None, (watched.told(outcomes), *watched.notices(outcomes))):
                output.info(f"run {run_.run_id}: {text}")
    elif not problem:
        output.info("no run is active, and this machine has no record of a run; `tpu_ops train` starts a run")
    tell_of_new(new)
    for path in sorted((settings.state_dir / "runs").glob("*/requests.json")):
        open_requests.tell(path.parent.name, open_requests.kept(settings.state_dir, path.parent.name))
    for text in seen.damaged:
        output.warning(text)
    if problem:
        raise problem
    return ExitCode.OK


def tell_of_new(silent: Sequence[Reply]) -> None:
    """Print which workers have no launcher yet, given their answers, and what installs it."""
    if silent:
        hosts, have = [reply.host for reply in silent], "has" if len(silent) == 1 else "have"
        what = f"{texts.folded(hosts)} {have} no launcher yet, so no run"
        output.info(f"{what}: `{preflight.configure(texts.target(hosts))}` installs it")


def _row(
    run_: control.RunRef, outcomes: Sequence[Outcome], since: float, found: advice.Recoverer | None
) -> dict[str, str]:
    told = runs_output.summary(run_.run_id, outcomes, found)
    end = runs_output.end_of(outcomes, told)
    return {
        "run": run_.run_id,
        "person": runs_output.people(outcomes),
        "workers": texts.folded(run_.hosts),
        "state": told["state"],
        "exit": end.words,
        "started": output.at(since),
        "lasted": "" if end.duration is None else texts.lasting(end.duration),
        "command": shlex.join(told["argv"]),
    }
