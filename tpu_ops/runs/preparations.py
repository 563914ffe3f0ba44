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
    return {host: found[host] for host in hosts if host in found}


def way_back(fleet: Fleet, hosts: Collection[str]) -> str:
    """Return the fixes for workers that cannot be reached: to wait for each recovery of a run on them, and others."""
    works = each_at_work(fleet.settings.state_dir, hosts)
    fixes = [work.fix for work in dict.fromkeys(works.values())]
    left = [host for host in hosts if host not in works]
    return "; ".join([*fixes, *([contact.way_back(fleet, left)] if left or not fixes else [])])


def problem_of(silent: Sequence[Reply], state_dir: Path) -> OpsError | None:
    """Return the error for workers that could not answer, with each recovery's fix; None if all answered."""
    problem = control.Found([], tuple(silent)).problem()
    works = each_at_work(state_dir, [*bare(silent), *(reply.host for reply in silent if control.is_lost(reply))])
    others = control.Found([], tuple(reply for reply in silent if reply.host not in works)).problem()
    if problem and works:
        each = tuple(dict.fromkeys(works.values()))
        problem.what = "; ".join([problem.what, *(work.note for work in each)])
        problem.fix = "; ".join([*filter(None, [others.fix if others else ""]), *(work.fix for work in each)])
    return problem


def without_runs(silent: Sequence[Reply], state_dir: Path) -> list[Reply]:
    """Return the answers of workers without a launcher, which have no run, unless a recovery is preparing them."""
    works = each_at_work(state_dir, bare(silent))
    return [reply for reply in silent if reply.kind == "no-launcher" and reply.host not in works]


def bare(silent: Iterable[Reply]) -> list[str]:
    """Return the workers without a launcher, given the error answers of workers."""
    return [reply.host for reply in silent if reply.kind == "no-launcher"]
