"""Gathers what the workers and this machine know of a run, for its report."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_ops.cloud.node import label_of
from tpu_ops.errors import OpsError
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import advice, control, copies, nodes, records, recovery
from tpu_ops.runs.control import LIMIT, RunRef
from tpu_ops.runs.known_ends import remembered
from tpu_ops.runs.outcomes import run_state
from tpu_ops.runs.report_data import Place, Sources
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

#: Number of samples that all ranks together send at most, and that each rank sends at least.
_SAMPLES, _FEWEST = 10_000, 60
_MOST = 300
#: Bytes and lines at the end of a copy of a log that are shown.
_TAIL_BYTES, _TAIL_LINES = 32 * 1024, 50


async def gather(fleet: Fleet, fanout: Fanout, run: RunRef) -> Sources:
    """Ask all workers of a run at once; return what the report of the run is made of."""
    begun = time.time()
    points = max(_FEWEST, min(_MOST, _SAMPLES // len(run.hosts)))
    request: Mapping[str, Any] = {"run_id": run.run_id, "points": points}
    replies = await fanout.call(dict.fromkeys(run.hosts, request), "report", limit=LIMIT)
    # Launchers of older versions know the run, but nothing more.
    older = {host: {"run_id": run.run_id} for host, reply in replies.items() if reply.is_old}
    if older:
        replies |= await fanout.call(older, "status", limit=LIMIT)
    return sources(fleet, run, replies, begun)


def sources(fleet: Fleet, run: RunRef, replies: Mapping[str, Reply], begun: float) -> Sources:
    """Return what a report is made of, given the answers of all workers; ``begun`` is when they were asked."""
    state_dir, run_id = fleet.settings.state_dir, run.run_id
    asked = [control.asked_outcome(rank, replies[host]) for rank, host in enumerate(run.hosts)]
    outcomes = remembered(fleet, run_id, run.hosts, nodes.without_nodes(fleet, run_id, asked, begun))
    told = {
        rank: replies[host].value
        for rank, host in enumerate(run.hosts)
        if replies[host].ok and replies[host].value.get("record")
    }
    is_ours = records.is_of(state_dir, run_id, run.hosts, fleet.workers)
    known = records.read(state_dir, run_id) if is_ours else None
    found = recovery.recoverer(state_dir, run_id) if is_ours else None
    folder = recovery.folder(state_dir, run_id)
    return Sources(
        run_id=run_id,
        outcomes=outcomes,
        told=told,
        places=_places(fleet, run.hosts),
        copied=_copied(folder, len(run.hosts)) if is_ours else {},
        tails=_tails(folder, [rank for rank in range(len(run.hosts)) if rank not in told]) if is_ours else {},
        known=known.facts() if known else {},
        project=_project(state_dir, run_id) if found else "",
        recovery=advice.recovery(found),
        state=advice.state(run_state(outcomes), found),
        now=time.time(),
    )


def _places(fleet: Fleet, hosts: tuple[str, ...]) -> tuple[Place, ...]:
    kinds = {worker.label: (worker.node.accelerator_type, worker.node.zone) for worker in fleet.workers}
    counts = Counter(map(label_of, hosts))
    return tuple(Place(node, *kinds.get(node, ("", "")), workers=count) for node, count in counts.items())


def _project(state_dir: Path, run_id: str) -> str:
    with contextlib.suppress(OpsError):
        return recovery.read(state_dir, run_id).git
    return ""


def _copied(folder: Path, count: int) -> dict[int, float]:
    """Return the attempts of whose logs this machine has copies, and when these were written last."""
    names = (path.name.removeprefix("attempt-") for path in folder.glob("attempt-*"))
    numbers = sorted(int(name) for name in names if name.isdecimal() and name.isascii())
    found = (copies.kept(folder, range(count), number) for number in numbers if number)
    return {one.attempt: one.written_at for one in found if one}


def _tails(folder: Path, ranks: list[int]) -> dict[int, str]:
    """Return the last lines of the copies of these ranks' logs."""
    found = {}
    kept = copies.kept(folder, ranks) if ranks else None
    for rank, path in kept.paths.items() if kept else ():
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).replace(b"\0", b"").decode(errors="replace").splitlines()
            found[rank] = "\n".join(lines[-_TAIL_LINES:])
    return found
