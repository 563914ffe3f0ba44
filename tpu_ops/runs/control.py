"""Find a run and its workers, report its state, and stop it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tpu_ops import texts
from tpu_ops.cloud.node import SERVING_STATES, TAKEN_STATES, Worker, label_of
from tpu_ops.errors import HostError, OpsError, UnreachableError, UsageError, within
from tpu_ops.fleet import contact, targets
from tpu_ops.fleet.view import Fleet
from tpu_ops.protocol.record import ON, grace
from tpu_ops.protocol.spec import is_run_id
from tpu_ops.runs import advice, preflight, records, refusals, shells
from tpu_ops.runs.follow import STOP_MARGIN
from tpu_ops.runs.outcomes import Outcome, outcome_of, watched, without_record
from tpu_ops.runs.spec import GRACE_STOP
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

#: Seconds for each worker to answer.
LIMIT = 45.0
#: Seconds for each worker to answer if the command can continue without the answer.
SHORT_LIMIT = 10.0
#: Number of runs in a list of recent runs.
RECENT = 10
#: Rank 0 is asked to stop this many seconds before the other ranks. The supervisor of rank 0 then tells the other
#: supervisors sooner than the controller can. Without this head start, the controller's request to rank 0 would wait
#: behind the requests of the other supervisors. With 32 workers on one machine and a grace of 2 s, a stop took 3.3 to
#: 3.5 s without the head start, and takes 2.8 s with it. If rank 0 is not among the asked workers, another worker gets
#: the head start.
_HEAD_START = 0.15
#: Seconds after which a worker's answer that a rank is active is out of date: the worker is asked again.
_STALE = 3.0
#: Fix for workers that do not answer, if the cause is not known.
_ONCE_THEY_ANSWER = "run the same command again once the workers answer; `tpu_ops list` shows the state of their nodes"
#: Characters that occur in targets (names of workers), but not in run ids.
_OF_TARGETS = re.compile(r"[@,\[\]!&^]")


@dataclass(frozen=True)
class RunRef:
    """The id of a run, and the names of its workers in the order of the ranks."""

    run_id: str
    hosts: tuple[str, ...]


class Last(NamedTuple):
    """The newest finished run on a worker, and this worker: run ids are unique only on each worker."""

    run_id: str
    host: str


class Found(NamedTuple):
    """The runs that a word names, and the workers that could not answer, on which a run might be active as well.

    Attributes:
        runs: The runs, possibly none.
        silent: Answers of the workers that could not say whether they have a run.
        last: The newest finished run on the workers, if the word names workers and no run is active on them.
    """

    runs: list[RunRef]
    silent: tuple[Reply, ...] = ()
    last: Last | None = None

    def problem(self) -> OpsError | None:
        """Return an error about the silent workers, or None if all workers answered."""
        if not self.silent:
            return None
        lost = [reply for reply in self.silent if is_lost(reply)]
        who, why = texts.count(len(self.silent), "worker"), (lost or self.silent)[0].problem
        what = f"{who} could not tell whether a run is active there: {why}"
        where = texts.folded([reply.host for reply in self.silent])
        if not lost:
            fixes = [(reply.fix, reply.host) for reply in self.silent]
            return HostError(what, where=where, fix=preflight.first_fix(fixes))
        # A worker's own fix comes first: to run the command again does not help if a worker refuses the user's key.
        return UnreachableError(what, where=where, fix=lost[0].fix or _ONCE_THEY_ANSWER)


def is_lost(reply: Reply) -> bool:
    """Return whether a worker did not answer at all, or not in time."""
    return reply.kind in {"unreachable", "timeout"}


def by_rank(workers: Sequence[Worker], target: str) -> list[Worker]:
    """Return the workers of a target in the order of their ranks: by node id, then by worker index.

    Raises:
        UsageError: The target is not a set of whole nodes of one accelerator type.
    """
    slices: dict[str, list[Worker]] = {}
    for worker in sorted(workers, key=lambda worker: (worker.node.node_id, worker.label, worker.index)):
        slices.setdefault(worker.label, []).append(worker)
    for label, found in slices.items():
        count = found[0].node.worker_count
        if len(found) != count:
            raise UsageError(
                f"a run needs whole nodes, but the target names only {len(found)} of the {count} workers of {label}",
                where=f"target {target!r}",
                fix=f"use {','.join(sorted(slices))}",
            )
    types = {found[0].node.accelerator_type: label for label, found in slices.items()}
    if len(types) > 1:
        said = ", ".join(f"{label} is {kind}" for kind, label in sorted(types.items()))
        what = f"all slices of a run must be of one accelerator type, but the target has {len(types)}: {said}"
        raise UsageError(what, where=f"target {target!r}", fix="name nodes of one type")
    return [worker for found in slices.values() for worker in found]


def is_target(fleet: Fleet, word: str) -> bool:
    """Return whether a word names workers of the fleet."""
    try:
        return bool(targets.select(fleet.workers, word, listed=fleet.listed))
    except UsageError:
        return False


async def find(fleet: Fleet, fanout: Fanout, word: str) -> Found:
    """Return the runs that a word names: the run with this id, or the active runs on a target (possibly none).

    The result also contains the workers of the target that did not answer and that are not workers of a found run.

    Raises:
        UsageError: The word names a run and workers, or neither.
        UnreachableError: No worker that answered knows the run, and some workers did not answer.
    """
    known = records.read(fleet.settings.state_dir, word)
    target = is_target(fleet, word)
    if known and target:
        raise UsageError(f"{word!r} is both a run and workers", where=f"{word!r}", fix="name the workers as a node set")
    if known:
        return Found([RunRef(known.run_id, records.hosts_now(known, fleet.workers))])
    if target:
        return await running(fleet, fanout, targets.select(fleet.workers, word, listed=fleet.listed))
    if _OF_TARGETS.search(word):
        # This raises an error that names the invalid part of the target.
        targets.select(fleet.workers, word, listed=fleet.listed)
    if not is_run_id(word):
        # Raise the error here: the workers would refuse the invalid id with an error that names the workers as the
        # cause.
        raise _nothing(fleet, word)
    try:
        return Found([await _ask_for(fleet, fanout, word)])
    except OpsError as exc:
        exc.fix = "; ".join(filter(None, (shells.shown_by(fleet.settings, word), within(exc.fix))))
        raise


async def running(fleet: Fleet, fanout: Fanout, workers: Sequence[Worker]) -> Found:
    """Return the active runs on the nodes of these workers, and the workers that gave no answer."""
    labels = {worker.label for worker in workers}
    if any(worker.node.state in TAKEN_STATES for worker in workers):
        fleet = contact.serving(fleet, workers)
    its = [worker for worker in fleet.workers if worker.label in labels]
    # Only nodes in these states certainly have no run. In other states in which a node does not serve, a run might be
    # active on it.
    taken = [worker.host for worker in its if worker.node.state in TAKEN_STATES]
    replies = contact.away(fleet, taken) if taken else {}
    # The newest record on a worker can be that of a refused start. RECENT records reach back to a run that began.
    requests = {worker.host: {"count": RECENT} for worker in its if worker.host not in replies}
    replies |= await fanout.call(requests, "status", limit=LIMIT)
    # Run ids are unique on one worker only: other workers may have another run with the same id.
    runs = list(dict.fromkeys(held(fleet, reply) for reply in replies.values() if holder_of(reply)))
    covered = {host for run in runs for host in run.hosts}
    asked = [replies[worker.host] for worker in workers if worker.host in replies]
    mute = (reply for reply in asked if not reply.ok and reply.host not in covered)
    silent = contact.with_hint(fleet.settings, mute)
    # Every worker of a node knows the node's run. If no worker of a node answers, a run might be active on the node.
    node_of = {worker.host: worker.label for worker in its}
    unheard = {node_of[reply.host] for reply in silent} - {node_of[reply.host] for reply in asked if reply.ok}
    return Found(runs, silent, None if runs or unheard else _last(asked))


def _last(replies: Sequence[Reply]) -> Last | None:
    """Return the newest run that began and has ended, given the answers of workers with their newest runs."""
    known = [(float(record["since"]), record, reply.host) for reply in replies for record in records_of(reply)]
    over = [one for one in known if one[1]["state"] not in (*ON, "refused")]
    newest = max(over, key=lambda one: one[0], default=None)
    return Last(newest[1]["run_id"], newest[2]) if newest else None


def records_of(reply: Reply) -> Sequence[Mapping[str, Any]]:
    """Return the records of a worker's newest runs, given the worker's answer."""
    return reply.value.get("records", ()) if reply.ok else ()


async def last(fleet: Fleet, fanout: Fanout, found: Last) -> RunRef:
    """Return a run that was found on one worker, with all its workers in the order of the ranks."""
    known = records.read(fleet.settings.state_dir, found.run_id)
    if known and found.host in (hosts := records.hosts_now(known, fleet.workers)):
        return RunRef(known.run_id, hosts)
    # A worker's list of runs omits the names of the other workers.
    labels = {worker.host: worker.label for worker in fleet.workers}
    hosts = tuple(host for host, label in labels.items() if label == labels[found.host])
    replies = await fanout.call({host: {"run_id": found.run_id} for host in hosts}, "status", limit=LIMIT)
    seen = {host: reply.value["record"] for host, reply in replies.items() if reply.ok and reply.value.get("record")}
    return RunRef(found.run_id, _all_of(seen) if seen else hosts)


def holder_of(reply: Reply) -> Mapping[str, Any] | None:
    """Return the record of the run that holds a worker, given its answer; None if no run does or it is an error."""
    return reply.value.get("holder") if reply.ok else None


def held(fleet: Fleet, reply: Reply) -> RunRef:
    """Return the run that holds a worker, with its workers, given an answer of the worker that names this run."""
    run_id = reply.value["holder"]["run_id"]
    known = records.read(fleet.settings.state_dir, run_id)
    if known and reply.host in (hosts := records.hosts_now(known, fleet.workers)):
        return RunRef(run_id, hosts)
    return RunRef(run_id, tuple(_hosts_of(fleet, reply, run_id)))


def _hosts_of(fleet: Fleet, reply: Reply, run_id: str) -> list[str]:
    """Return a run's workers in the order of the ranks, by their names in this fleet, given one worker's answer."""
    record = next((record for record in records_of(reply) if record["run_id"] == run_id), None)
    label = {worker.host: worker.label for worker in fleet.workers}
    # The fleet of the user who started the run can have other names for the workers. Only the record of the active run
    # lists all names.
    if record and all(host in label for host in record["workers"]) and reply.host in record["workers"]:
        return list(record["workers"])
    return [host for host in label if label[host] == label[reply.host]]


async def _ask_for(fleet: Fleet, fanout: Fanout, run_id: str) -> RunRef:
    """Ask every serving worker for a run of which this machine has no record; return the run."""
    hosts = [worker.host for worker in fleet.workers if worker.node.state in SERVING_STATES]
    replies = await fanout.call({host: {"run_id": run_id} for host in hosts}, "status", limit=LIMIT)
    found: dict[object, dict[str, Mapping[str, Any]]] = {}
    for host, reply in replies.items():
        if record := reply.value.get("record") if reply.ok else None:
            # The user's name distinguishes runs, not the uid: the same user can have another uid on each worker.
            found.setdefault((*sorted(record["workers"]), record["person"]["name"]), {})[host] = record
    if found:
        return RunRef(run_id, _all_of(_one_of(run_id, list(found.values()))))
    # A worker without a launcher has no runs.
    mute = (reply for reply in replies.values() if not reply.ok and reply.kind != "no-launcher")
    silent = contact.with_hint(fleet.settings, mute)
    if lost := [reply for reply in silent if is_lost(reply)]:
        raise UnreachableError(
            f"no worker that answered knows a run {run_id!r}",
            where=f"silent: {texts.folded([reply.host for reply in lost])}",
            fix=lost[0].fix or _ONCE_THEY_ANSWER,
        )
    if silent:
        raise HostError(
            f"no worker that can tell knows a run {run_id!r}; the other workers cannot tell: {silent[0].problem}",
            where=texts.folded([reply.host for reply in silent]),
            fix=preflight.first_fix([(reply.fix, reply.host) for reply in silent]),
        )
    raise _nothing(fleet, run_id)


def _nothing(fleet: Fleet, word: str) -> UsageError:
    """Return the error for a word that names neither a run nor workers."""
    known = [label_of(worker.host) for worker in fleet.workers] + records.names(fleet.settings.state_dir)
    close = targets.alike(word, dict.fromkeys(known))
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    recent = records.recent(fleet.settings.state_dir, records.KEPT)
    if before := next((run.run_id for run in recent if word in run.nodes), ""):
        hint = f"a node of this name existed: `tpu_ops status {before}` shows the last run that was started on it; "
    return UsageError(
        f"{word!r} is neither a run nor a node or worker",
        where="this fleet",
        fix=hint + "`tpu_ops list` shows the workers, `tpu_ops runs` the runs",
    )


def _one_of(run_id: str, found: Sequence[Mapping[str, Mapping[str, Any]]]) -> Mapping[str, Mapping[str, Any]]:
    """Choose among several runs with the same id, each given as records by worker: the active run, else the newest.

    Raises:
        UsageError: Several of these runs are active.
    """
    on = [one for one in found if any(record["state"] in ON for record in one.values())]
    if len(on) > 1:
        where = "; ".join(texts.folded(list(one)) for one in on)
        raise UsageError(f"{len(on)} runs are called {run_id}", where=where, fix="name a worker of the run instead")
    return on[0] if on else max(found, key=lambda one: max(float(record["since"]) for record in one.values()))


def _all_of(seen: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return all workers of a run in the order of the ranks, given the records of the workers that answered.

    The fleet of the user who started the run can have other names for the nodes. The workers that answered show which
    name belongs to which node of this fleet.
    """
    newest = max(seen.values(), key=lambda record: int(record["attempt"]))
    called = {int(rec["rank"]): host for host, rec in seen.items() if rec["attempt"] == newest["attempt"]}
    workers: Sequence[str] = newest["workers"]
    labels = {label_of(workers[rank]): label_of(host) for rank, host in called.items()}
    now = (labels.get(label_of(name), label_of(name)) + name.removeprefix(label_of(name)) for name in workers)
    return tuple(called.get(rank, name) for rank, name in enumerate(now))


async def require_free_name(fleet: Fleet, fanout: Fanout, run_id: str, hosts: Sequence[str]) -> None:
    """Check that no run of this name, started from this machine, is active on workers other than the given ones.

    The given workers themselves refuse a name in use. On other workers, a run of this name would be a fault too: the
    new run would replace this machine's record of it.

    Raises:
        UsageError: The run is active.
        UnreachableError: A serving worker of the run does not answer.
    """
    known = records.read(fleet.settings.state_dir, run_id)
    serving = {worker.host for worker in fleet.workers if worker.node.state in SERVING_STATES}
    its = records.hosts_now(known, fleet.workers) if known else ()
    others = [host for host in its if host in serving and host not in hosts]
    replies = await fanout.call({host: {"run_id": run_id} for host in others}, "status", limit=LIMIT)
    on = [host for host, reply in replies.items() if ((reply.ok and reply.value["record"]) or {}).get("state") in ON]
    if on:
        what = f"a run {run_id} that was started here is active"
        raise UsageError(what, where=texts.folded(on), fix=advice.name_taken(run_id))
    if silent := [reply for reply in replies.values() if not reply.ok]:
        what = f"a run {run_id} was started here on other workers, and these workers cannot tell whether it is active"
        where = texts.folded([reply.host for reply in silent])
        raise UnreachableError(f"{what}: {silent[0].problem}", where=where, fix=advice.OTHER_NAME)


async def outcomes(fanout: Fanout, run: RunRef) -> list[Outcome]:
    """Return the current outcome of every rank of a run."""
    begun = time.monotonic()
    replies = await fanout.call({host: {"run_id": run.run_id} for host in run.hosts}, "status", limit=LIMIT)
    on = [host for host, reply in replies.items() if reply.ok and (reply.value["record"] or {}).get("state") in ON]
    if on and time.monotonic() - begun > _STALE:
        # Ranks that were active might have ended while the call waited for other workers.
        again = await fanout.call({host: {"run_id": run.run_id} for host in on}, "status", limit=SHORT_LIMIT)
        replies |= {host: reply for host, reply in again.items() if reply.ok}
    return [asked_outcome(rank, replies[host]) for rank, host in enumerate(run.hosts)]


async def newest_attempt(fanout: Fanout, run: RunRef) -> int:
    """Return the number of the newest attempt that a run's workers report within SHORT_LIMIT seconds; 0 if none."""
    requests = {host: {"run_id": run.run_id} for host in run.hosts}
    replies = await fanout.call(requests, "status", limit=SHORT_LIMIT, quiet=SHORT_LIMIT)
    found = [(reply.ok and reply.value["record"]) or {} for reply in replies.values()]
    return max((int(record["attempt"]) for record in found if record), default=0)


class Stopped(NamedTuple):
    """The outcomes of all ranks after a stop, and whether all had already ended, or never existed, before the stop.

    ``refusal`` is a worker's answer that the user is not allowed to stop the run, if this is the only reason why the
    run is still active.
    """

    outcomes: tuple[Outcome, ...]
    already: bool
    refusal: Reply | None = None


async def stop(
    fanout: Fanout,
    run: RunRef,
    *,
    force: bool = False,
    grace: float | None = None,
    reason: str = "",
    requested: bool = False,
) -> Stopped:
    """Stop a run on all its workers and return the outcome of every rank. Finished ranks keep their outcome.

    Args:
        fanout: Reaches the workers.
        run: The run.
        force: Whether an administrator stops another user's run.
        grace: Seconds between SIGTERM and SIGKILL; None means the run's own value.
        reason: The reason for the stop; empty if the user has requested the stop.
        requested: Whether the user wants the run to stay stopped even though there is a reason.
    """
    request: dict[str, Any] = {"run_id": run.run_id, "force": force, "reason": reason, "requested": requested}
    if grace is not None:
        request["grace"] = grace
    given = max(GRACE_STOP, grace or 0)
    requests, limit = dict.fromkeys(run.hosts, request), given + STOP_MARGIN
    replies = await fanout.call(requests, "stop", limit=limit, head_start=_HEAD_START, quiet=given)
    late = [host for host, reply in replies.items() if reply.kind == "timeout"]
    if late and (longer := await longest_grace(fanout, run.run_id, late)) > given:
        replies |= await fanout.call(dict.fromkeys(late, request), "stop", limit=longer + STOP_MARGIN, quiet=longer)
    told = await refusals.looked_at(fanout, run.run_id, replies)
    found = [asked_outcome(rank, told[host]) for rank, host in enumerate(run.hosts)]
    ended = refusals.with_reasons(found, replies)
    over = (reply.kind == "missing" or (reply.ok and reply.value.get("already")) for reply in replies.values())
    return Stopped(ended, all(over), refusals.refusal(ended, replies))


async def longest_grace(fanout: Fanout, run_id: str, hosts: Sequence[str], limit: float = LIMIT) -> float:
    """Return the longest grace, in seconds, of a run's stops in progress; a later stop has to wait for it.

    Args:
        fanout: Reaches the workers.
        run_id: The run.
        hosts: Workers of the run.
        limit: Seconds for each worker to answer.
    """
    replies = await fanout.call({host: {"run_id": run_id} for host in hosts}, "status", limit=limit)
    found = [(reply.ok and reply.value["record"]) or {} for reply in replies.values()]
    return max((_grace(record) for record in found if record.get("state") in ON), default=0.0)


def _grace(record: Mapping[str, Any]) -> float:
    """Return the grace, in seconds, of the stop that is in progress on a rank; 0 if the rank is not being stopped."""
    intent = record.get("intent") or {}
    return grace(record["grace"], intent) if intent.get("kind") == "stop" else 0.0


def asked_outcome(rank: int, reply: Reply) -> Outcome:
    """Return the outcome of a rank, given its worker's answer to a status request."""
    if reply.ok:
        return watched(outcome_of(rank, reply.host, reply.value.get("record")), reply.value)
    return without_record(rank, reply)
