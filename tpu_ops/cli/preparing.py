"""Workers that have no launcher yet since a recovery of this machine is just configuring them: nobody else has to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tpu_ops.errors import OpsError
from tpu_ops.remote.replies import Reply
from tpu_ops.runs import control, records


class Work(NamedTuple):
    """What a recovery of this machine does with workers: that in words, and what to do in place of the same."""

    note: str
    fix: str


def at_work(state_dir: Path, hosts: Collection[str], but: str = "") -> Work | None:
    """Return the work of a run's recovery here that prepares some of these workers; None where none does.

    Args:
        state_dir: What this machine remembers of the fleet.
        hosts: The workers.
        but: A run that is nobody else's: that of this process.
    """
    return next(iter(each_at_work(state_dir, hosts, but).values()), None)


def each_at_work(state_dir: Path, hosts: Collection[str], but: str = "") -> dict[str, Work]:
    """Return for each of these workers that a recovery here prepares its work; the arguments are as of `at_work`."""
    if not hosts:
        return {}
    from tpu_ops.runs import recovery  # most workers have a launcher

    found: dict[str, Work] = {}
    for run_id in records.names(state_dir):
        known = records.read(state_dir, run_id)
        if run_id == but or known is None or set(hosts).isdisjoint(known.hosts):
            continue
        if note := recovery.under_way(state_dir, run_id):
            fix = f"wait until run {run_id} has started, or end it: `tpu_ops stop {run_id}`"
            work = Work(f"{note}; it configures new workers itself", fix)
            found.update({host: work for host in hosts if host in known.hosts})
    return found


def problem_of(silent: Sequence[Reply], state_dir: Path) -> OpsError | None:
    """Return the error that silent workers are, as `control.Found` has it; None where all have answered."""
    problem = control.Found([], tuple(silent)).problem()
    if problem and not any(map(control.is_lost, silent)) and (work := at_work(state_dir, bare(silent))):
        problem.what, problem.fix = f"{problem.what}; {work.note}", work.fix
    return problem


def bare(silent: Iterable[Reply]) -> list[str]:
    """Return the workers without a launcher."""
    return [reply.host for reply in silent if reply.kind == "no-launcher"]
