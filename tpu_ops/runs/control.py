"""Finds a run and its workers, tells how it is, and stops it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_ops.errors import UnreachableError, UsageError
from tpu_ops.fleet import targets
from tpu_ops.fleet.model import SERVING_STATES, Worker
from tpu_ops.fleet.view import Fleet
from tpu_ops.remote.fanout import Fanout, Reply
from tpu_ops.runs import records
from tpu_ops.runs.follow import STOP_MARGIN, Outcome, outcome_of
from tpu_ops.runs.spec import GRACE_STOP

#: Seconds for each worker to tell what it knows.
LIMIT = 45.0


@dataclass(frozen=True)
class RunRef:
    """A run and its workers by rank."""

    run_id: str
    hosts: tuple[str, ...]


def whole_node(workers: Sequence[Worker], target: str) -> list[Worker]:
    """Given the workers that a target means, return them in the order of their ranks.

    Raises:
        UsageError: They are not all workers of exactly one node.
    """
    labels = sorted({worker.label for worker in workers})
    if len(labels) > 1:
        raise UsageError(
            f"a run takes one node, the target means {len(labels)}: {', '.join(labels)}", where=f"target {target!r}"
        )
    count = workers[0].node.worker_count
    if len(workers) != count:
        raise UsageError(
            f"a run takes a whole node, the target means {len(workers)} of its {count} workers",
            where=f"target {target!r}",
            fix=f"use {labels[0]}",
        )
    return sorted(workers, key=lambda worker: worker.index)


def is_target(fleet: Fleet, word: str) -> bool:
    """Return whether a word means workers of the fleet."""
    try:
        return bool(targets.select(fleet.workers, word))
    except UsageError:
        return False


async def find(fleet: Fleet, fanout: Fanout, word: str) -> list[RunRef]:
    """Return the runs that a word means: a run id, or a target whose running ones are meant (none: an empty list).

    Raises:
        UsageError: The word means a run and workers both, or nothing.
        UnreachableError: Nothing is known of it, and some workers could not be asked.
    """
    known = records.read(fleet.settings.state_dir, word)
    target = is_target(fleet, word)
    if known and target:
        raise UsageError(f"{word!r} is a run and a name of workers", where=f"{word!r}", fix="use the node set form")
    if known:
        return [RunRef(known.run_id, known.hosts)]
    if target:
        return await _running(fleet, fanout, targets.select(fleet.workers, word))
    return [await _ask_for(fleet, fanout, word)]


async def _running(fleet: Fleet, fanout: Fanout, workers: Sequence[Worker]) -> list[RunRef]:
    """Return the runs that are on the nodes of these workers."""
    labels = {worker.label for worker in workers}
    hosts = [worker.host for worker in fleet.workers if worker.label in labels]
    replies = await fanout.call({host: {"count": 1} for host in hosts}, "status", limit=LIMIT)
    _require(replies, {worker.host for worker in workers})
    found: dict[str, list[str]] = {}
    for worker in fleet.workers:
        reply = replies.get(worker.host)
        holder = reply.value.get("holder") if reply and reply.ok else None
        if holder:
            known = records.read(fleet.settings.state_dir, holder["run_id"])
            same_node = [other.host for other in fleet.workers if other.label == worker.label]
            found.setdefault(holder["run_id"], list(known.hosts if known else same_node))
    return [RunRef(run_id, tuple(hosts)) for run_id, hosts in found.items()]


async def _ask_for(fleet: Fleet, fanout: Fanout, run_id: str) -> RunRef:
    """Ask every worker that serves for a run that this machine knows nothing of."""
    hosts = [worker.host for worker in fleet.workers if worker.node.state in SERVING_STATES]
    replies = await fanout.call({host: {"run_id": run_id} for host in hosts}, "status", limit=LIMIT)
    found = {host: reply.value["record"] for host, reply in replies.items() if reply.ok and reply.value.get("record")}
    if found:
        return RunRef(run_id, tuple(sorted(found, key=lambda host: found[host]["rank"])))
    silent = [reply.host for reply in replies.values() if not reply.reached]
    if silent:
        raise UnreachableError(f"no worker that answers knows a run {run_id!r}", where=f"silent: {', '.join(silent)}")
    raise UsageError(
        f"{run_id!r} is neither a run nor a node or worker", fix="`tpu_ops list` shows workers, `tpu_ops status` runs"
    )


def _require(replies: Mapping[str, Reply], hosts: set[str]) -> None:
    silent = [reply for host, reply in replies.items() if host in hosts and not reply.ok]
    if silent and len(silent) == len(hosts):
        first = silent[0]
        error = UsageError if first.reached else UnreachableError
        raise error(first.problem, where=", ".join(reply.host for reply in silent), fix=first.fix)


async def outcomes(fanout: Fanout, run: RunRef) -> list[Outcome]:
    """Return how every rank of a run is now."""
    replies = await fanout.call({host: {"run_id": run.run_id} for host in run.hosts}, "status", limit=LIMIT)
    return [_outcome(rank, replies[host]) for rank, host in enumerate(run.hosts)]


async def stop(
    fanout: Fanout, run: RunRef, *, force: bool = False, grace: float | None = None, reason: str = ""
) -> list[Outcome]:
    """Stop a run on all its workers at once and return how every rank ended; one that had ended before stays so."""
    request: dict[str, Any] = {"run_id": run.run_id, "kind": "stop", "force": force, "reason": reason}
    if grace is not None:
        request["grace"] = grace
    limit = GRACE_STOP + STOP_MARGIN
    replies = await fanout.call(dict.fromkeys(run.hosts, request), "stop", limit=limit)
    return [_outcome(rank, replies[host]) for rank, host in enumerate(run.hosts)]


def _outcome(rank: int, reply: Reply) -> Outcome:
    if reply.ok:
        return outcome_of(rank, reply.host, reply.value.get("record"))
    return Outcome(rank, reply.host, "unreachable" if not reply.reached else "unknown", reason=reply.problem)
