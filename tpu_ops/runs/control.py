"""Finds a run and its workers, tells how it is, and stops it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tpu_ops import texts
from tpu_ops.errors import HostError, OpsError, UnreachableError, UsageError
from tpu_ops.fleet import targets
from tpu_ops.fleet.model import SERVING_STATES, Worker
from tpu_ops.fleet.view import Fleet
from tpu_ops.remote.fanout import Fanout
from tpu_ops.remote.replies import Reply
from tpu_ops.runs import records
from tpu_ops.runs.follow import STOP_MARGIN, Outcome, outcome_of
from tpu_ops.runs.spec import GRACE_STOP

#: Seconds for each worker to tell what it knows.
LIMIT = 45.0
#: Runs that a list of runs remembers.
RECENT = 10


@dataclass(frozen=True)
class RunRef:
    """A run and its workers by rank."""

    run_id: str
    hosts: tuple[str, ...]


class Found(NamedTuple):
    """The runs that a word means, and what could not be asked: a run may be on a silent worker too."""

    runs: list[RunRef]
    silent: tuple[Reply, ...] = ()

    def problem(self) -> OpsError | None:
        """Return the error that silent workers are, None where all have answered."""
        if not self.silent:
            return None
        first = self.silent[0]
        lost = [reply for reply in self.silent if is_lost(reply)]
        who, why = texts.count(len(self.silent), "worker"), (lost or self.silent)[0].problem
        what = f"{who} could not say whether a run is there: {why}"
        where = ", ".join(reply.host for reply in self.silent)
        fix = "run the same command again once they answer; `tpu_ops list` shows their node's state"
        return UnreachableError(what, where=where, fix=fix) if lost else HostError(what, where=where, fix=first.fix)


def is_lost(reply: Reply) -> bool:
    """Return whether a worker did not answer at all, or not in time."""
    return reply.kind in {"unreachable", "timeout"}


def whole_node(workers: Sequence[Worker], target: str) -> list[Worker]:
    """Given the workers that a target means, return them in the order of their ranks.

    Raises:
        UsageError: They are not all workers of exactly one node.
    """
    labels = sorted({worker.label for worker in workers})
    if len(labels) > 1:
        raise UsageError(
            f"a run takes one node, the target means {len(labels)}: {', '.join(labels)}",
            where=f"target {target!r}",
            fix=f"name one of them, as in `{labels[0]}`",
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


async def find(fleet: Fleet, fanout: Fanout, word: str) -> Found:
    """Return the runs that a word means: a run id, or a target whose running ones are meant (none: an empty list).

    Workers of a target that did not answer, and are not among those of a run that was found, are named in the result.

    Raises:
        UsageError: The word means a run and workers both, or nothing.
        UnreachableError: Nothing is known of it, and some workers could not be asked.
    """
    known = records.read(fleet.settings.state_dir, word)
    target = is_target(fleet, word)
    if known and target:
        raise UsageError(f"{word!r} is a run and a name of workers", where=f"{word!r}", fix="use the node set form")
    if known:
        return Found([RunRef(known.run_id, known.hosts)])
    if target:
        return await _running(fleet, fanout, targets.select(fleet.workers, word))
    return Found([await _ask_for(fleet, fanout, word)])


async def _running(fleet: Fleet, fanout: Fanout, workers: Sequence[Worker]) -> Found:
    """Return the runs that are on the nodes of these workers, and those of the workers that cannot tell."""
    labels = {worker.label for worker in workers}
    hosts = [worker.host for worker in fleet.workers if worker.label in labels]
    replies = await fanout.call({host: {"count": 1} for host in hosts}, "status", limit=LIMIT)
    found: dict[str, list[str]] = {}
    for worker in fleet.workers:
        reply = replies.get(worker.host)
        holder = reply.value.get("holder") if reply and reply.ok else None
        if holder:
            known = records.read(fleet.settings.state_dir, holder["run_id"])
            same_node = [other.host for other in fleet.workers if other.label == worker.label]
            found.setdefault(holder["run_id"], list(known.hosts if known else same_node))
    runs = [RunRef(run_id, tuple(hosts)) for run_id, hosts in found.items()]
    covered = {host for run in runs for host in run.hosts}
    asked = [replies[worker.host] for worker in workers]
    return Found(runs, tuple(reply for reply in asked if not reply.ok and reply.host not in covered))


@dataclass(frozen=True)
class Overview:
    """The runs of a fleet.

    Attributes:
        rows: The runs that are on and those that this machine started lately, the newest first: the run, its
            outcomes by rank, and when it started (seconds since 1970).
        silent: Workers that could not tell.
    """

    rows: tuple[tuple[RunRef, tuple[Outcome, ...], float], ...]
    silent: Found


async def overview(fleet: Fleet, fanout: Fanout) -> Overview:
    """Ask every worker that serves for its runs."""
    serving = [worker for worker in fleet.workers if worker.node.state in SERVING_STATES]
    replies = await fanout.call({worker.host: {"count": RECENT} for worker in serving}, "status", limit=LIMIT)
    label = {worker.host: worker.label for worker in fleet.workers}
    runs = {known.run_id: known for known in records.recent(fleet.settings.state_dir, RECENT)}
    wanted: dict[str, tuple[RunRef, float]] = {
        run_id: (RunRef(run_id, known.hosts), known.since) for run_id, known in runs.items()
    }
    for host, reply in replies.items():
        holder = reply.value.get("holder") if reply.ok else None
        if holder and holder["run_id"] not in wanted:
            same_node = tuple(worker.host for worker in serving if worker.label == label[host])
            wanted[holder["run_id"]] = (RunRef(holder["run_id"], same_node), float(holder["since"]))
    rows = [
        (run, tuple(_seen(rank, host, run.run_id, replies.get(host)) for rank, host in enumerate(run.hosts)), since)
        for run, since in wanted.values()
    ]
    rows.sort(key=lambda row: -row[2])
    return Overview(tuple(rows), Found([], tuple(reply for reply in replies.values() if not reply.ok)))


def _seen(rank: int, host: str, run_id: str, reply: Reply | None) -> Outcome:
    """Given what a worker says of its newest runs, return the outcome of one rank."""
    if reply is None:
        return Outcome(rank, host, "gone", reason="its node no longer serves")
    if not reply.ok:
        return _outcome(rank, reply)
    record = next((record for record in reply.value.get("records", ()) if record["run_id"] == run_id), None)
    return outcome_of(rank, host, record)


async def _ask_for(fleet: Fleet, fanout: Fanout, run_id: str) -> RunRef:
    """Ask every worker that serves for a run that this machine knows nothing of."""
    hosts = [worker.host for worker in fleet.workers if worker.node.state in SERVING_STATES]
    replies = await fanout.call({host: {"run_id": run_id} for host in hosts}, "status", limit=LIMIT)
    found = {host: reply.value["record"] for host, reply in replies.items() if reply.ok and reply.value.get("record")}
    if found:
        return RunRef(run_id, tuple(sorted(found, key=lambda host: found[host]["rank"])))
    silent = [reply.host for reply in replies.values() if is_lost(reply)]
    if silent:
        raise UnreachableError(
            f"no worker that answers knows a run {run_id!r}",
            where=f"silent: {', '.join(silent)}",
            fix="run the same command again once they answer; `tpu_ops list` shows their node's state",
        )
    raise UsageError(
        f"{run_id!r} is neither a run nor a node or worker",
        where="this fleet",
        fix="`tpu_ops list` shows workers, `tpu_ops status` runs",
    )


async def outcomes(fanout: Fanout, run: RunRef) -> list[Outcome]:
    """Return how every rank of a run is now."""
    replies = await fanout.call({host: {"run_id": run.run_id} for host in run.hosts}, "status", limit=LIMIT)
    return [_outcome(rank, replies[host]) for rank, host in enumerate(run.hosts)]


class Stopped(NamedTuple):
    """How every rank ended, and whether all of them had before anybody asked."""

    outcomes: tuple[Outcome, ...]
    already: bool


async def stop(
    fanout: Fanout, run: RunRef, *, force: bool = False, grace: float | None = None, reason: str = ""
) -> Stopped:
    """Stop a run on all its workers at once and return how every rank ended; one that had ended before stays so."""
    request: dict[str, Any] = {"run_id": run.run_id, "force": force, "reason": reason}
    if grace is not None:
        request["grace"] = grace
    limit = max(GRACE_STOP, grace or 0) + STOP_MARGIN
    replies = await fanout.call(dict.fromkeys(run.hosts, request), "stop", limit=limit)
    ended = tuple(_outcome(rank, replies[host]) for rank, host in enumerate(run.hosts))
    return Stopped(ended, all(reply.ok and reply.value.get("already") for reply in replies.values()))


def _outcome(rank: int, reply: Reply) -> Outcome:
    if reply.ok:
        return outcome_of(rank, reply.host, reply.value.get("record"))
    return Outcome(rank, reply.host, "unreachable" if is_lost(reply) else "unknown", reason=reply.problem)
