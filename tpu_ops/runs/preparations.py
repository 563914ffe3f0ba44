"""Finds workers that a recovery on this machine is bringing back or configuring: the user only has to wait."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tpu_ops.errors import OpsError
from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import advice, control, records
from tpu_ops.ssh.replies import Reply


class Work(NamedTuple):
    """The work of a recovery on some workers, in words (`note`), and what the user has to do (`fix`)."""

    note: str
    fix: str


def each_at_work(state_dir: Path, hosts: Collection[str], but: str = "") -> dict[str, Work]:
    """Return, for each worker that a process on this machine recovers, the work of this process.

    The process checks its nodes at intervals, so it may not have noticed a loss yet.

    Args:
        state_dir: The fleet's state directory.
        hosts: The workers.
        but: The run of this process, whose own recovery is ignored.
    """
    if not hosts:
        return {}
    from tpu_ops.runs import recovery  # imported here because it is rarely needed: usually all workers answer

    found: dict[str, Work] = {}
    for run_id in records.names(state_dir):
        known = records.read(state_dir, run_id)
        if run_id == but or known is None or set(hosts).isdisjoint(known.hosts):
            continue
        recoverer = recovery.recoverer(state_dir, run_id)
        if recoverer and recoverer.held:
            note = advice.recovery(recoverer)
            fix = f"wait until run {run_id} has started again, or end it: `tpu_ops stop {run_id}`"
            work = Work(f"{note}; this process configures new workers itself", fix)
            found.update({host: work for host in hosts if host in known.hosts})
    return found


def way_back(fleet: Fleet, hosts: Collection[str]) -> str:
    """Return the fix for workers that cannot be reached: to wait, if this machine recovers a run on one of them."""
    works = each_at_work(fleet.settings.state_dir, hosts)
    return next((work.fix for work in works.values()), "") or contact.way_back(fleet, hosts)


def problem_of(silent: Sequence[Reply], state_dir: Path) -> OpsError | None:
    """Return the error for workers that could not answer, with a fix that respects recoveries; None if all answered."""
    problem = control.Found([], tuple(silent)).problem()
    works = each_at_work(state_dir, [*bare(silent), *(reply.host for reply in silent if control.is_lost(reply))])
    left = [reply for reply in silent if control.is_lost(reply) and reply.host not in works]
    if problem and left:
        problem.fix = (control.Found([], tuple(left)).problem() or problem).fix
    elif problem and works:
        work = next(iter(works.values()))
        problem.what, problem.fix = f"{problem.what}; {work.note}", work.fix
    return problem


def without_runs(silent: Sequence[Reply], state_dir: Path) -> list[Reply]:
    """Return the answers of workers without a launcher, which have no run, unless a recovery is preparing them."""
    works = each_at_work(state_dir, bare(silent))
    return [reply for reply in silent if reply.kind == "no-launcher" and reply.host not in works]


def bare(silent: Iterable[Reply]) -> list[str]:
    """Return the workers without a launcher, given the error answers of workers."""
    return [reply.host for reply in silent if reply.kind == "no-launcher"]
