"""Finds a run and its workers, tells how it is, and stops it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tpu_ops import texts
from tpu_ops.cloud.node import SERVING_STATES, TAKEN_STATES, Worker, label_of
from tpu_ops.errors import HostError, OpsError, UnreachableError, UsageError
from tpu_ops.fleet import contact, targets
from tpu_ops.fleet.view import Fleet
from tpu_ops.protocol.record import ON, grace
from tpu_ops.protocol.spec import is_run_id
from tpu_ops.runs import advice, denied, elsewhere, preflight, records
from tpu_ops.runs.follow import STOP_MARGIN
from tpu_ops.runs.outcomes import Outcome, outcome_of, without_record
from tpu_ops.runs.spec import GRACE_STOP
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

#: Seconds for each worker to tell what it knows.
LIMIT = 45.0
#: The same where one that does not answer is no matter.
SHORT_LIMIT = 10.0
#: Runs that a list of runs remembers.
RECENT = 10
#: Seconds by which rank 0 is asked to stop before the others: its supervisor tells them sooner than the controller,
#: whose request to it would have to wait behind theirs. With 32 workers on one machine and a grace of 2 s a stop took
#: 3.3 to 3.5 s without, and takes 2.8 s. Where rank 0 is not among the workers that are left, another one has it.
_HEAD_START = 0.15
#: Seconds after which what a worker said of a rank that is on is asked for anew.
_STALE = 3.0
#: What to do about workers that do not answer, where nothing more is known of them.
_ONCE_THEY_ANSWER = "run the same command again once they answer; `tpu_ops list` shows their node's state"
#: What only targets have.
_OF_TARGETS = re.compile(r"[@,\[\]!&^]")


@dataclass(frozen=True)
class RunRef:
    """A run and its workers by rank."""

    run_id: str
    hosts: tuple[str, ...]


class Last(NamedTuple):
    """The newest run that a worker tells of, which is over: its id, which is its own on each worker only."""

    run_id: str
    host: str


class Found(NamedTuple):
    """The runs that a word means, and what could not be asked: a run may be on a silent worker too.

    Attributes:
        runs: The runs.
        silent: Answers of the workers that cannot tell.
        last: Where the word means workers and no run is on their nodes, the newest that one of them tells of.
    """

    runs: list[RunRef]
    silent: tuple[Reply, ...] = ()
    last: Last | None = None

    def problem(self) -> OpsError | None:
        """Return the error that silent workers are, None where all have answered."""
        if not self.silent:
            return None
        lost = [reply for reply in self.silent if is_lost(reply)]
        who, why = texts.count(len(self.silent), "worker"), (lost or self.silent)[0].problem
        what = f"{who} could not tell whether a run is active there: {why}"
        where = texts.folded([reply.host for reply in self.silent])
        if not lost:
            fixes = [(reply.fix, reply.host) for reply in self.silent]
            return HostError(what, where=where, fix=preflight.first_fix(fixes))
        # The same again helps none that is known to be out of reach, or refuses the person.
        return UnreachableError(what, where=where, fix=lost[0].fix or _ONCE_THEY_ANSWER)


def is_lost(reply: Reply) -> bool:
    """Return whether a worker did not answer at all, or not in time."""
    return reply.kind in {"unreachable", "timeout"}


def by_rank(workers: Sequence[Worker], target: str) -> list[Worker]:
    """Given the workers that a target means, return them in the order of their ranks: slice by slice, by node id.

    Raises:
        UsageError: They are not all workers of one node or of several of one type.
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
    """Return whether a word means workers of the fleet."""
    try:
        return bool(targets.select(fleet.workers, word, listed=fleet.listed))
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
        raise UsageError(f"{word!r} is both a run and workers", where=f"{word!r}", fix="name the workers as a node set")
    if known:
        return Found([RunRef(known.run_id, records.hosts_now(known, fleet.workers))])
    if target:
        return await running(fleet, fanout, targets.select(fleet.workers, word, listed=fleet.listed))
    if _OF_TARGETS.search(word):
        # It says which part means nothing.
        targets.select(fleet.workers, word, listed=fleet.listed)
    if not is_run_id(word):
        # Workers would refuse it, as if they were at fault.
        raise _nothing(fleet, word)
    try:
        return Found([await _ask_for(fleet, fanout, word)])
    except OpsError as exc:
        exc.fix = "; ".join(filter(None, (elsewhere.shown_by(fleet.settings, word), exc.fix)))
        raise


async def running(fleet: Fleet, fanout: Fanout, workers: Sequence[Worker]) -> Found:
    """Return the runs that are on the nodes of these workers, and those of the workers that cannot tell."""
    labels = {worker.label for worker in workers}
    if any(worker.node.state in TAKEN_STATES for worker in workers):
        fleet = contact.serving(fleet, workers)
    its = [worker for worker in fleet.workers if worker.label in labels]
    # Of other states that do not serve, runs may be on.
    taken = [worker.host for worker in its if worker.node.state in TAKEN_STATES]
    replies = contact.away(fleet, taken) if taken else {}
    # A start that was refused is a run as well, and not what anybody looks for.
    requests = {worker.host: {"count": RECENT} for worker in its if worker.host not in replies}
    replies |= await fanout.call(requests, "status", limit=LIMIT)
    # A run's id is its own on each worker only: others may have one of that name elsewhere.
    runs = list(dict.fromkeys(held(fleet, reply) for reply in replies.values() if holder_of(reply)))
    covered = {host for run in runs for host in run.hosts}
    asked = [replies[worker.host] for worker in workers if worker.host in replies]
    mute = (reply for reply in asked if not reply.ok and reply.host not in covered)
    silent = contact.with_hint(fleet.settings, mute)
    # A run takes whole nodes: of one whose workers are all silent nobody tells whether it has one.
    node_of = {worker.host: worker.label for worker in its}
    unheard = {node_of[reply.host] for reply in silent} - {node_of[reply.host] for reply in asked if reply.ok}
    return Found(runs, silent, None if runs or unheard else _last(asked))


def _last(replies: Sequence[Reply]) -> Last | None:
    """Given what workers say of their newest runs, return the newest that is over and had begun."""
    known = [(float(record["since"]), record, reply.host) for reply in replies for record in records_of(reply)]
    over = [one for one in known if one[1]["state"] not in (*ON, "refused")]
    newest = max(over, key=lambda one: one[0], default=None)
    return Last(newest[1]["run_id"], newest[2]) if newest else None


def records_of(reply: Reply) -> Sequence[Mapping[str, Any]]:
    """Return the records of a worker's newest runs, as it answers."""
    return reply.value.get("records", ()) if reply.ok else ()


async def last(fleet: Fleet, fanout: Fanout, found: Last) -> RunRef:
    """Return the run that a worker has told of, with its workers by rank."""
    known = records.read(fleet.settings.state_dir, found.run_id)
    if known and found.host in (hosts := records.hosts_now(known, fleet.workers)):
        return RunRef(known.run_id, hosts)
    # In lists of runs, workers leave the names of all workers out.
    labels = {worker.host: worker.label for worker in fleet.workers}
    hosts = tuple(host for host, label in labels.items() if label == labels[found.host])
    replies = await fanout.call({host: {"run_id": found.run_id} for host in hosts}, "status", limit=LIMIT)
    seen = {host: reply.value["record"] for host, reply in replies.items() if reply.ok and reply.value.get("record")}
    return RunRef(found.run_id, _all_of(seen) if seen else hosts)


def holder_of(reply: Reply) -> Mapping[str, Any] | None:
    """Return who has a worker, as it answers; None where nobody has it, or it does not say."""
    return reply.value.get("holder") if reply.ok else None


def held(fleet: Fleet, reply: Reply) -> RunRef:
    """Given the answer of a worker that a run has, return the run."""
    run_id = reply.value["holder"]["run_id"]
    known = records.read(fleet.settings.state_dir, run_id)
    if known and reply.host in (hosts := records.hosts_now(known, fleet.workers)):
        return RunRef(run_id, hosts)
    return RunRef(run_id, tuple(_hosts_of(fleet, reply, run_id)))


def _hosts_of(fleet: Fleet, reply: Reply, run_id: str) -> list[str]:
    """Given what one worker of a run says, return the run's workers by rank, as this fleet knows them."""
    record = next((record for record in records_of(reply) if record["run_id"] == run_id), None)
    label = {worker.host: worker.label for worker in fleet.workers}
    # Whoever started it may call workers by other names. Of the run that a worker is held by it tells them all.
    if record and all(host in label for host in record["workers"]) and reply.host in record["workers"]:
        return list(record["workers"])
    return [host for host in label if label[host] == label[reply.host]]


async def _ask_for(fleet: Fleet, fanout: Fanout, run_id: str) -> RunRef:
    """Ask every worker that serves for a run that this machine knows nothing of."""
    hosts = [worker.host for worker in fleet.workers if worker.node.state in SERVING_STATES]
    replies = await fanout.call({host: {"run_id": run_id} for host in hosts}, "status", limit=LIMIT)
    found: dict[object, dict[str, Mapping[str, Any]]] = {}
    for host, reply in replies.items():
        if record := reply.value.get("record") if reply.ok else None:
            # Not the user id: each worker may give the same person another one.
            found.setdefault((*sorted(record["workers"]), record["person"]["name"]), {})[host] = record
    if found:
        return RunRef(run_id, _all_of(_one_of(run_id, list(found.values()))))
    # Where there is no launcher there is no run.
    mute = (reply for reply in replies.values() if not reply.ok and reply.kind != "no-launcher")
    silent = contact.with_hint(fleet.settings, mute)
    if lost := [reply for reply in silent if is_lost(reply)]:
        raise UnreachableError(
            f"none of the workers that answer knows a run {run_id!r}",
            where=f"silent: {texts.folded([reply.host for reply in lost])}",
            fix=lost[0].fix or _ONCE_THEY_ANSWER,
        )
    if silent:
        raise HostError(
            f"none of the workers that can tell knows a run {run_id!r}; the others cannot: {silent[0].problem}",
            where=texts.folded([reply.host for reply in silent]),
            fix=preflight.first_fix([(reply.fix, reply.host) for reply in silent]),
        )
    raise _nothing(fleet, run_id)


def _nothing(fleet: Fleet, word: str) -> UsageError:
    """Return the error that a word means nothing here."""
    known = [label_of(worker.host) for worker in fleet.workers] + records.names(fleet.settings.state_dir)
    close = targets.alike(word, dict.fromkeys(known))
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    recent = records.recent(fleet.settings.state_dir, records.KEPT)
    if before := next((run.run_id for run in recent if word in run.nodes), ""):
        hint = f"a node of this name was there: `tpu_ops status {before}` shows the last run that was started on it; "
    return UsageError(
        f"{word!r} is neither a run nor a node or worker",
        where="this fleet",
        fix=hint + "`tpu_ops list` shows workers, `tpu_ops runs` runs",
    )


def _one_of(run_id: str, found: Sequence[Mapping[str, Mapping[str, Any]]]) -> Mapping[str, Mapping[str, Any]]:
    """Given the records, by worker, of all runs of one name, return those of the one that is on, or else the newest.

    Raises:
        UsageError: Several are on.
    """
    on = [one for one in found if any(record["state"] in ON for record in one.values())]
    if len(on) > 1:
        where = "; ".join(texts.folded(list(one)) for one in on)
        raise UsageError(
            f"{len(on)} runs are called {run_id}", where=where, fix="name a worker of the one that you mean"
        )
    return on[0] if on else max(found, key=lambda one: max(float(record["since"]) for record in one.values()))


def _all_of(seen: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Given the records of a run by worker, return all its workers by rank, those that did not answer as well.

    Whoever started it may call nodes by other names: these are learnt from the workers that did answer.
    """
    newest = max(seen.values(), key=lambda record: int(record["attempt"]))
    called = {int(rec["rank"]): host for host, rec in seen.items() if rec["attempt"] == newest["attempt"]}
    workers: Sequence[str] = newest["workers"]
    labels = {label_of(workers[rank]): label_of(host) for rank, host in called.items()}
    now = (labels.get(label_of(name), label_of(name)) + name.removeprefix(label_of(name)) for name in workers)
    return tuple(called.get(rank, name) for rank, name in enumerate(now))


async def require_free_name(fleet: Fleet, fanout: Fanout, run_id: str, hosts: Sequence[str]) -> None:
    """Return where no run of this name that this machine has started is on any worker but these.

    Those refuse a name that they know; what is remembered here of the run would be lost.

    Raises:
        UsageError: It is on.
        UnreachableError: A worker of it that serves does not say.
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
        what = f"a run {run_id} was started here on other workers, and they cannot tell whether it is active"
        where = texts.folded([reply.host for reply in silent])
        raise UnreachableError(f"{what}: {silent[0].problem}", where=where, fix=advice.OTHER_NAME)


async def outcomes(fanout: Fanout, run: RunRef) -> list[Outcome]:
    """Return how every rank of a run is now."""
    begun = time.monotonic()
    replies = await fanout.call({host: {"run_id": run.run_id} for host in run.hosts}, "status", limit=LIMIT)
    on = [host for host, reply in replies.items() if reply.ok and (reply.value["record"] or {}).get("state") in ON]
    if on and time.monotonic() - begun > _STALE:
        # Ranks that were on may have ended while another worker was waited for.
        again = await fanout.call({host: {"run_id": run.run_id} for host in on}, "status", limit=SHORT_LIMIT)
        replies |= {host: reply for host, reply in again.items() if reply.ok}
    return [asked_outcome(rank, replies[host]) for rank, host in enumerate(run.hosts)]


async def newest_attempt(fanout: Fanout, run: RunRef) -> int:
    """Return the newest attempt of a run that its workers tell of in a moment, on or over; 0 where none does."""
    requests = {host: {"run_id": run.run_id} for host in run.hosts}
    replies = await fanout.call(requests, "status", limit=SHORT_LIMIT, quiet=SHORT_LIMIT)
    found = [(reply.ok and reply.value["record"]) or {} for reply in replies.values()]
    return max((int(record["attempt"]) for record in found if record), default=0)


class Stopped(NamedTuple):
    """How every rank ended, and whether all of them had, or were never there, before anybody asked.

    Where the run is on for no other reason, ``refusal`` is the answer of a worker that does not let the person end it.
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
    """Stop a run on all its workers and return how every rank ended; one that had ended before stays so.

    Args:
        fanout: Reaches the workers.
        run: The run.
        force: Whether another person's run is meant, for administrators.
        grace: Seconds between SIGTERM and SIGKILL; None is the run's own.
        reason: Why, where that is not that the person asks for it.
        requested: Whether a person wants that it is not started again in spite of a reason.
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
    told = await denied.looked_at(fanout, run.run_id, replies)
    found = [asked_outcome(rank, told[host]) for rank, host in enumerate(run.hosts)]
    ended = denied.with_reasons(found, replies)
    over = (reply.kind == "missing" or (reply.ok and reply.value.get("already")) for reply in replies.values())
    return Stopped(ended, all(over), denied.refusal(ended, replies))


async def longest_grace(fanout: Fanout, run_id: str, hosts: Sequence[str], limit: float = LIMIT) -> float:
    """Return the longest grace that was asked for ranks which are on, in seconds: a later stop waits for it too.

    Args:
        fanout: Reaches the workers.
        run_id: The run.
        hosts: Workers of it.
        limit: Seconds for each of them to tell.
    """
    replies = await fanout.call({host: {"run_id": run_id} for host in hosts}, "status", limit=limit)
    found = [(reply.ok and reply.value["record"]) or {} for reply in replies.values()]
    return max((_grace(record) for record in found if record.get("state") in ON), default=0.0)


def _grace(record: Mapping[str, Any]) -> float:
    """Return the grace of the stop that a rank ends by, in seconds; 0 where nobody has stopped it."""
    intent = record.get("intent") or {}
    return grace(record["grace"], intent) if intent.get("kind") == "stop" else 0.0


def asked_outcome(rank: int, reply: Reply) -> Outcome:
    """Given the answer of a rank's worker that was asked for its run, return how the rank is."""
    if reply.ok:
        return outcome_of(rank, reply.host, reply.value.get("record"))
    return without_record(rank, reply)
