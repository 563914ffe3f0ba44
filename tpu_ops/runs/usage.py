"""What the chips of workers do, and for whom: asks the launchers, and gives one row for each core of each worker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet
from tpu_ops.protocol.values import is_number
from tpu_ops.runs import core_states, holders
from tpu_ops.runs.control import LIMIT
from tpu_ops.runs.holders import Holder
from tpu_ops.runs.outcomes import person
from tpu_ops.ssh.replies import Reply

#: States of the metrics of a process that holds chips, as its worker's launcher reports them.
OK, WARMING, NONE, SILENT, BROKEN = "ok", "warming", "none", "silent", "broken"
#: Further states: no process holds the chips, the launcher is too old to read metrics, the worker does not answer.
FREE, OLD, LOST = "free", "old", "lost"
#: All states, the one that needs most attention first.
STATES = (LOST, BROKEN, SILENT, OLD, NONE, WARMING, OK, FREE)
#: Fix for a launcher that is too old.
_TOO_OLD = "its launcher is too old to read metrics: `tpu_ops configure {}` updates it"


class Caller(Protocol):
    """Sends a request to the launchers of several workers at once, as `Fanout` does."""

    async def call(self, requests: Mapping[str, Mapping[str, Any]], action: str, *, limit: float) -> dict[str, Reply]:
        """Return the reply of each worker."""


@dataclass(frozen=True)
class Row:
    """One core of a worker; or all chips of a worker or process, if there are no metrics of single cores.

    Times are in seconds since 1970 by this machine's clock.

    Attributes:
        node: Label of the node.
        worker: The worker.
        state: One of `STATES`.
        core: The core's id, which JAX shows as the device id; None if the row stands for all chips.
        chip: Position of the core's chip, from 0, where a chip has several cores; else None.
        chips: Number of the worker's chips; 0 if unknown.
        hbm_used: Memory in use, in bytes.
        hbm_total: Memory of the core, in bytes.
        duty: Percent of the time in which the core was busy.
        bandwidth: Percent of the memory bandwidth in use.
        idle: Seconds since the core was busy.
        error: What libtpu reports as an error of the core; empty without an error.
        program: Fingerprint of the program on the core; empty if there is none, None if it is unknown.
        launch: Id of the program's launch.
        queued: Number of programs that wait for the core.
        why: The reason for the state; can be empty.
        pid: The process that holds the chip; 0 if there is none, or it is unknown.
        command: The command line of the process or run.
        run: The run; empty if there is none.
        person: The owner of the run or process.
        since: When the run or process started.
        last_output: When the run's rank last wrote output.
        stall: The signs by which the run's supervisor saw a stall; empty without a stall.
        notice: An announced maintenance of the worker; empty if there is none.
        answered: When the worker last answered; None if it never did.
    """

    node: str
    worker: str
    state: str
    core: int | None = None
    chip: int | None = None
    chips: int = 0
    hbm_used: float | None = None
    hbm_total: float | None = None
    duty: float | None = None
    bandwidth: float | None = None
    idle: float | None = None
    error: str = ""
    program: str | None = None
    launch: int | None = None
    queued: int | None = None
    why: str = ""
    pid: int = 0
    command: str = ""
    run: str = ""
    person: str = ""
    since: float | None = None
    last_output: float | None = None
    stall: str = ""
    notice: str = ""
    answered: float | None = None

    @property
    def owner(self) -> tuple[str, str, str]:
        """The run, or the command without a run, and the person."""
        return self.run, "" if self.run else self.command, self.person


class Use(NamedTuple):
    """The rows of one worker, at least one, and its reply."""

    rows: tuple[Row, ...]
    reply: Reply


async def ask(caller: Caller, hosts: Sequence[str], *, limit: float = LIMIT) -> dict[str, Reply]:
    """Ask all workers at once for the use of their chips; return their replies in the order of the workers.

    Launchers that are too old for this are asked for the holders of their chips only, which the new answer contains.

    Args:
        caller: Reaches the workers.
        hosts: The workers.
        limit: Seconds for each worker and question.
    """
    replies = await caller.call({host: {} for host in hosts}, "usage", limit=limit) if hosts else {}
    old = [host for host, reply in replies.items() if reply.is_old]
    return replies | (await caller.call({host: {} for host in old}, "holders", limit=limit) if old else {})


def of_fleet(fleet: Fleet, hosts: Sequence[str], *, limit: float = LIMIT) -> dict[str, Reply]:
    """Ask workers like `ask`; workers that are known to be unreachable are not asked, and have a reply that says so."""
    away = contact.away(fleet, hosts)
    asked = [host for host in hosts if host not in away]
    replies = away | asyncio.run(ask(contact.fanout(fleet), asked, limit=limit))
    hinted = contact.with_hint(fleet.settings, (replies[host] for host in hosts))
    return {reply.host: reply for reply in hinted}


def of_reply(node: str, reply: Reply, now: float, before: Use | None = None) -> Use:
    """Return the use of a worker.

    Args:
        node: Label of the worker's node.
        reply: The worker's reply to `ask`.
        now: When the reply came, in seconds since 1970.
        before: The use in the worker's reply before; a worker without an answer keeps the run and person in it.
    """
    host = reply.host
    if not reply.ok:
        last = before.rows[0] if before else Row(node, host, LOST)
        lost = Row(node, host, LOST, chips=last.chips, why=reply.problem, run=last.run, person=last.person)
        return Use((replace(lost, since=last.since, answered=last.answered),), reply)
    plain = Row(node, host, FREE, chips=len(reply.value.get("chips") or ()), answered=now)
    holding = holders.held_on(host, reply.value)
    clock = _number(reply.value.get("clock"))
    offset = 0.0 if clock is None else now - clock
    run = _run_facts(reply.value.get("run") or {}, offset)
    owners = {holder.pid: _owned(plain, holder, run, offset) for holder in holding}
    if "services" not in reply.value:
        found = [replace(owner, state=OLD, why=_TOO_OLD.format(host)) for owner in owners.values()]
        return Use(tuple(_one_each(found)) or (replace(plain, state=FREE),), reply)
    rows = []
    for service in reply.value["services"] or ():
        pid = int(service.get("pid") or 0)
        # The process on a port that a container publishes is root's, and holds no chip itself.
        owner = owners.get(pid) or next(iter(owners.values()), None) or replace(plain, pid=pid)
        rows += _of_service(owner, service)
    seen = {int(service.get("pid") or 0) for service in reply.value["services"] or ()}
    rows += [replace(owner, state=NONE) for pid, owner in owners.items() if pid not in seen]
    return Use(tuple(_one_each(rows)) or (plain,), reply)


def _owned(plain: Row, holder: Holder, run: Mapping[str, Any], offset: float) -> Row:
    """Return the row of a worker with the facts of a holder of its chips."""
    mine = replace(
        plain,
        pid=holder.pid,
        command=holder.command,
        run=holder.run,
        person=person(holder.user, holder.asker),
        since=holder.since + offset,
    )
    if not holder.run or run.get("run_id") != holder.run:
        return mine
    since = mine.since if run["since"] is None else run["since"]
    return replace(mine, since=since, last_output=run["last_output"], stall=run["stall"], notice=run["notice"])


def _run_facts(run: Mapping[str, Any], offset: float) -> dict[str, Any]:
    """Return what the rank's record and its supervisor's notes say, with times by this machine's clock."""
    watch = run.get("watch") or {}
    began, wrote = (_number(value) for value in (run.get("began"), run.get("last_output") or watch.get("last_output")))
    return {
        "run_id": run.get("run_id"),
        "since": None if began is None else began + offset,
        "last_output": None if wrote is None else wrote + offset,
        "stall": str((watch.get("stall") or {}).get("sign", "")),
        "notice": str((watch.get("maintenance") or {}).get("what", "")),
    }


def _of_service(owner: Row, service: Mapping[str, Any]) -> list[Row]:
    """Return a row for each core that a process reports; one row without a core if it reports none."""
    state, why = str(service.get("state")), str(service.get("why") or "")
    known = state if state in (OK, WARMING, NONE, SILENT, BROKEN) else BROKEN
    base = replace(owner, state=known, why=why)
    cores = sorted(service.get("cores") or (), key=lambda core: int(core["id"]))
    states = service.get("core_states")
    if not cores:
        return [replace(base, error=core_states.errors(states or ()))]
    return [
        replace(
            base,
            core=int(core["id"]),
            chip=core.get("chip"),
            hbm_used=_number(core.get("hbm_used")),
            hbm_total=_number(core.get("hbm_total")),
            duty=_number(core.get("duty")),
            bandwidth=_number(core.get("hbm_bandwidth")),
            idle=_number(core.get("idle")),
            **state._asdict(),
        )
        for core, state in zip(cores, core_states.by_core(cores, states), strict=True)
    ]


def _one_each(rows: Sequence[Row]) -> list[Row]:
    """Drop rows without metrics of processes whose owner has other rows, such as children that share the chips."""
    speaking = {row.owner for row in rows if row.core is not None or row.state not in (NONE, OLD)}
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.core is not None:
            found.setdefault((row.pid, row.core), row)
        elif row.state not in (NONE, OLD) or row.owner not in speaking:
            found.setdefault((row.state, *row.owner), row)
    return list(found.values())


def _number(value: object) -> float | None:
    """Return a number that is not negative; None for anything else: the values come from processes of any user."""
    return float(value) if is_number(value) and value >= 0 else None
