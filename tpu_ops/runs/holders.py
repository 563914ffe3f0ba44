"""Finds the holders of the workers' chips, and ends the processes that a user is allowed to end."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpu_ops.errors import OpsError
from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs.control import LIMIT, SHORT_LIMIT
from tpu_ops.runs.outcomes import Outcome, person
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

#: Maximum seconds that the end of processes takes in addition to the grace.
_MARGIN = 20.0


@dataclass(frozen=True)
class Holder:
    """A process that holds chips; or a run that holds a worker, if none of its processes holds a chip yet.

    Attributes:
        host: The worker.
        user: The owner.
        run: The run that the process belongs to; empty if none.
        pid: The process id; 0 for a run without such a process.
        since: When it started, in seconds since 1970.
        command: The command line of the process or run.
        devices: Device files of the chips.
        asker: The user who started the run; empty if there is no run or the worker does not report the user.
        start: When it started, in clock ticks since the boot. Together with the pid, this identifies the process.
    """

    host: str
    user: str
    run: str
    pid: int
    since: float
    command: str = ""
    devices: tuple[str, ...] = ()
    asker: str = ""
    start: int = 0


@dataclass(frozen=True)
class Seen:
    """The holders and chips of some workers.

    Attributes:
        holders: All holders, by worker, then pid.
        chips: Number of chips of each worker that answered.
        silent: Answers of the workers that could not report their holders.
    """

    holders: tuple[Holder, ...]
    chips: Mapping[str, int]
    silent: tuple[Reply, ...]


async def look(fanout: Fanout, hosts: Sequence[str], *, limit: float = LIMIT) -> Seen:
    """Ask all workers at once for the holders of their chips. ``limit`` is in seconds, for each worker."""
    return seen_in(await fanout.call({host: {} for host in hosts}, "holders", limit=limit))


def seen_in(replies: Mapping[str, Reply]) -> Seen:
    """Return the holders and chips in the workers' replies to the actions ``holders`` or ``usage``."""
    found: list[Holder] = []
    for host, reply in replies.items():
        if reply.ok:
            found += held_on(host, reply.value)
    chips = {host: len(reply.value.get("chips") or ()) for host, reply in replies.items() if reply.ok}
    return Seen(tuple(found), chips, tuple(reply for reply in replies.values() if not reply.ok))


def of_fleet(fleet: Fleet, hosts: Sequence[str], *, limit: float = LIMIT) -> Seen:
    """Ask workers who holds their chips; workers that are known to be unreachable are not asked and count as silent."""
    away, fanout = contact.away(fleet, hosts), contact.fanout(fleet)
    seen = asyncio.run(look(fanout, [host for host in hosts if host not in away], limit=limit))
    return replace(seen, silent=(*away.values(), *contact.with_hint(fleet.settings, seen.silent)))


def active(fleet: Fleet, names: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Ask the workers of some nodes for their active runs, as `active_on` does; return the runs of all nodes together.

    Args:
        fleet: The fleet.
        names: Resource names of the nodes.

    Returns:
        Run id -> person, and worker -> the reason why it could not be asked.
    """
    runs, silent = active_on(fleet, names)
    return {run_id: person for its in runs.values() for run_id, person in its.items()}, silent


def active_on(fleet: Fleet, names: Collection[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Ask the workers of some nodes for their active runs, with a short time limit.

    Args:
        fleet: The fleet.
        names: Resource names of the nodes.

    Returns:
        Resource name of each node with a run -> run id -> person; and worker -> the reason why it could not be asked.
    """
    nodes = {worker.host: worker.node.full_name for worker in fleet.workers if worker.node.full_name in names}
    try:
        seen = of_fleet(fleet, list(nodes), limit=SHORT_LIMIT)
    except OpsError as exc:
        return {}, dict.fromkeys(nodes, str(exc))
    runs: dict[str, dict[str, str]] = {}
    for holder in seen.holders:
        if holder.run:
            runs.setdefault(nodes[holder.host], {})[holder.run] = person(holder.user, holder.asker)
    # A worker without a launcher has no run, so its missing answer is no problem.
    return runs, {reply.host: reply.problem for reply in seen.silent if reply.kind != "no-launcher"}


def named(runs: Mapping[str, str]) -> str:
    """Return words such as "run r1 of ada is active", given run id -> person; empty if there are no runs."""
    subject = " and ".join(f"run {run_id} of {person}" for run_id, person in runs.items())
    return f"{subject} {'is' if len(runs) == 1 else 'are'} active" if runs else ""


async def still_held(fanout: Fanout, outcomes: Sequence[Outcome]) -> list[Holder]:
    """Return the processes that held chips when a run ended, according to its workers, and that still hold chips."""
    before = {(holder.host, holder.pid, holder.user) for outcome in outcomes for holder in held_after(outcome)}
    if not before:
        return []
    seen = await look(fanout, list(dict.fromkeys(host for host, _, _ in before)))
    return [holder for holder in seen.holders if (holder.host, holder.pid, holder.user) in before and not holder.run]


def held_after(outcome: Outcome) -> list[Holder]:
    """Return the processes that still held chips of a rank's worker when the rank had ended."""
    found = ((outcome.record or {}).get("chips") or {}).get("holders") or ()
    return [Holder(outcome.host, each["user"], "", int(each["pid"]), 0.0, each["command"]) for each in found]


def held_on(host: str, answer: Mapping[str, Any]) -> list[Holder]:
    """Return the holders in a worker's answer, including the worker's run even if it has no process with a chip."""
    found = [_holder(host, entry) for entry in answer.get("holders") or ()]
    run = answer.get("holder")
    if run is None:
        return found
    if not any(holder.run == run["run_id"] for holder in found):
        command = shlex.join(map(str, answer.get("argv") or ()))
        found.insert(0, Holder(host, run["person"], run["run_id"], 0, float(run["since"]), command))
    return [replace(holder, asker=run.get("asker", "")) if holder.run else holder for holder in found]


def _holder(host: str, entry: Mapping[str, Any]) -> Holder:
    return Holder(
        host,
        entry["user"],
        entry["run"],
        int(entry["pid"]),
        float(entry["since"]),
        entry["command"],
        tuple(entry["devices"]),
        start=int(entry.get("start", 0)),
    )


@dataclass(frozen=True)
class Unlocked:
    """The result of `unlock` on one worker.

    Attributes:
        host: The worker.
        ended: The processes that were ended.
        left: The processes that still hold chips.
        lockfiles: Lockfiles of libtpu that were removed.
        problem: The reason why `unlock` failed on the worker; empty if it did not.
        fix: The fix for the problem.
        reached: Whether the worker answered.
        kept: Lockfiles of libtpu that remain although no process holds a chip, each with the reason.
    """

    host: str
    ended: tuple[Holder, ...] = ()
    left: tuple[Holder, ...] = ()
    lockfiles: tuple[str, ...] = ()
    problem: str = ""
    fix: str = ""
    reached: bool = True
    kept: tuple[str, ...] = ()


async def unlock(
    fanout: Fanout, hosts: Sequence[str], meant: Iterable[Holder], user: str, grace: float
) -> list[Unlocked]:
    """End the processes of one user that hold chips and belong to no run, on all workers at once.

    Args:
        fanout: Reaches the workers.
        hosts: The workers.
        meant: The holders to end. Processes that started later are not ended.
        user: The owner of the processes; empty means the user who asks.
        grace: Seconds between SIGTERM and SIGKILL.
    """
    processes: dict[str, list[list[int]]] = {host: [] for host in hosts}
    for holder in meant:
        if holder.pid:
            processes[holder.host].append([holder.pid, holder.start])
    requests = {host: {"user": user, "grace": grace, "processes": processes[host]} for host in hosts}
    replies = await fanout.call(requests, "unlock", limit=LIMIT + grace + _MARGIN)
    return [_unlocked(host, replies[host]) for host in hosts]


def _unlocked(host: str, reply: Reply) -> Unlocked:
    if not reply.ok:
        return Unlocked(host, problem=reply.problem, fix=reply.fix, reached=reply.reached)
    value = reply.value
    ended, left = ([_holder(host, entry) for entry in value[key]] for key in ("ended", "left"))
    chips = value["chips"]
    return Unlocked(host, tuple(ended), tuple(left), tuple(chips["lockfiles_removed"]), kept=kept_lockfiles(chips))


def kept_lockfiles(chips: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the lockfiles of libtpu that remain although no process holds a chip, each with the reason in words.

    Launchers of older versions report no reasons.
    """
    if chips.get("holders"):
        return ()
    faults = chips.get("lockfile_faults") or {}
    return tuple(
        f"{path} was not removed: {faults.get(path, 'reason unknown')}" for path in chips.get("lockfiles_kept", ())
    )
