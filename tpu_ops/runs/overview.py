"""The runs of a fleet: all active runs, and the last runs that this machine started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from tpu_ops.cloud.node import SERVING_STATES
from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import control, nodes, records
from tpu_ops.runs.known_ends import remembered
from tpu_ops.runs.outcomes import Outcome, outcome_of, watched
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply


@dataclass(frozen=True)
class Overview:
    """The runs of a fleet.

    Attributes:
        rows: The active runs and the last runs that this machine started, newest first. Each row has the run, its
            outcomes by rank, and the time of its start (seconds since 1970).
        silent: The workers that could not report their runs.
        damaged: Unreadable records on workers, each as a text with the worker, the problem and the fix.
    """

    rows: tuple[tuple[control.RunRef, tuple[Outcome, ...], float], ...]
    silent: control.Found
    damaged: tuple[str, ...] = ()


async def overview(fleet: Fleet, fanout: Fanout) -> Overview:
    """Ask every serving worker for its runs; return the runs of the fleet."""
    serving = [worker for worker in fleet.workers if worker.node.state in SERVING_STATES]
    replies = await fanout.call(
        {worker.host: {"count": control.RECENT} for worker in serving}, "status", limit=control.LIMIT
    )
    recent = records.recent(fleet.settings.state_dir, control.RECENT)
    wanted = {control.RunRef(known.run_id, records.hosts_now(known, fleet.workers)): known.since for known in recent}
    for reply in replies.values():
        if holder := control.holder_of(reply):
            wanted.setdefault(control.held(fleet, reply), float(holder["since"]))
    newest = sorted(wanted.items(), key=lambda item: -item[1])
    seen = await asyncio.gather(*(_seen_of(fanout, run, replies) for run, _ in newest))
    rows = tuple(
        (run, remembered(fleet, run.run_id, run.hosts, nodes.without_nodes(fleet, run.run_id, outcomes)), since)
        for (run, since), outcomes in zip(newest, seen, strict=True)
    )
    silent = contact.with_hint(fleet.settings, (reply for reply in replies.values() if not reply.ok))
    damaged = tuple(
        f"{reply.host}: {record['message']}; {record['fix']}"
        for reply in replies.values()
        for record in (reply.value.get("damaged", ()) if reply.ok else ())
    )
    return Overview(rows, control.Found([], silent), damaged)


async def _seen_of(fanout: Fanout, run: control.RunRef, replies: Mapping[str, Reply]) -> tuple[Outcome, ...]:
    """Return a run's outcomes by rank. Ask workers again whose list of newest runs does not contain the run.

    Args:
        fanout: Reaches the workers.
        run: The run.
        replies: The answers of the serving workers, with their lists of newest runs.
    """
    seen = [_seen(rank, host, run.run_id, replies.get(host)) for rank, host in enumerate(run.hosts)]
    older = [one.host for one in seen if one.record is None and one.host in replies and replies[one.host].ok]
    asked = (
        await fanout.call({host: {"run_id": run.run_id} for host in older}, "status", limit=control.LIMIT)
        if older
        else {}
    )
    return tuple(control.asked_outcome(one.rank, asked[one.host]) if one.host in asked else one for one in seen)


def _seen(rank: int, host: str, run_id: str, reply: Reply | None) -> Outcome:
    """Return the outcome of one rank, given its worker's answer with the list of newest runs."""
    if reply is None:
        return Outcome(rank, host, "unreachable", reason="its node is not READY")
    if not reply.ok:
        return control.asked_outcome(rank, reply)
    record = next((record for record in control.records_of(reply) if record["run_id"] == run_id), None)
    found = outcome_of(rank, host, record)
    holds = (control.holder_of(reply) or {}).get("run_id") == run_id
    return watched(found, reply.value) if holds else found
