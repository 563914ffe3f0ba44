"""The report of a fleet: its nodes, who used how many chips for how long, which nodes are idle, and what they cost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpu_ops import texts
from tpu_ops.cloud import prices
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.fleet import contact, cost, grant, idle
from tpu_ops.fleet.idle import Verdict
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import outcomes
from tpu_ops.runs.control import LIMIT
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

_DAY = 86400.0
_NEW = "new"
#: Use, time and words of the last use of a node that does not serve.
_NONE: tuple[str, float | None, str] = ("", None, "")


@dataclass(frozen=True)
class Node:
    """A node.

    Attributes:
        node: Its name in the fleet.
        zone: Its zone.
        kind: Its accelerator type.
        state: Its state.
        tier: Its tier.
        chips: Number of its chips; 0 if unknown.
        use: ``idle``, ``used``, ``new`` (not used yet, but too young to be idle) or ``unknown``; empty if it is not
            READY.
        since: When it was used last, in seconds since 1970; None if unknown or never.
        sign: The last use, that there was none, or why it is unknown, in words.
        chip_hours: Hours in which runs held its chips, times the chips.
        per_hour: What it costs in an hour, in US dollars; None if unknown.
        covered: Whether the grant covers it.
    """

    node: str
    zone: str
    kind: str
    state: str
    tier: str
    chips: int
    use: str
    since: float | None
    sign: str
    chip_hours: float
    per_hour: float | None
    covered: bool


@dataclass(frozen=True)
class Person:
    """The use of a person: hours in which the person's runs held chips, times the chips, in all and of each day."""

    person: str
    chip_hours: float
    runs: int
    days: tuple[float, ...]


@dataclass(frozen=True)
class FleetReport:
    """The report of a fleet. Times are in seconds since 1970.

    Attributes:
        name: The fleet's directory.
        made: When it was made.
        begins: When each of its days begins.
        nodes: The nodes.
        people: The persons, the one with the most use first.
        per_hour: What all nodes cost in an hour, in US dollars, without those of unknown price.
        unknown_prices: Number of these.
        basis: What the prices are, in words.
        gaps: Sentences on use that is not counted.
    """

    name: str
    made: float
    begins: tuple[float, ...]
    nodes: tuple[Node, ...]
    people: tuple[Person, ...]
    per_hour: float
    unknown_prices: int
    basis: str
    gaps: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as --json prints it."""
        return asdict(self)


@dataclass(frozen=True)
class Answers:
    """The workers' answers about their uses by runs, and about their last uses, by worker."""

    uses: Mapping[str, Reply]
    activity: Mapping[str, Reply]


async def ask(fleet: Fleet, fanout: Fanout, since: float) -> Answers:
    """Ask all serving workers for their uses since a time."""
    serving = [worker.host for worker in fleet.workers if worker.node.state in SERVING_STATES]
    away = contact.away(fleet, serving)
    hosts = [host for host in serving if host not in away]
    request: Mapping[str, Any] = {"since": since}
    uses, activity = await asyncio.gather(
        fanout.call(dict.fromkeys(hosts, request), "report", limit=LIMIT), idle.ask(fanout, hosts)
    )
    return Answers({**away, **uses}, {**away, **activity})


def begins_of(now: float, days: int) -> tuple[float, ...]:
    """Return when each of the last days begins, in UTC; the last one is today."""
    today = now // _DAY * _DAY
    return tuple(today - index * _DAY for index in reversed(range(days)))


def compute(fleet: Fleet, answers: Answers, begins: Sequence[float], now: float, *, idle_for: float) -> FleetReport:
    """Return the report of a fleet.

    Args:
        fleet: The fleet.
        answers: The workers' answers.
        begins: When each day begins, oldest first.
        now: The present time.
        idle_for: Seconds after which an unused node is idle.

    Raises:
        UsageError: grant.yml has faults.
    """
    listed = prices.read()
    free = cost.covered(grant.read(fleet.settings.path / grant.FILE), fleet.listed, now)
    costs = {node.full_name: cost.estimate(node, free, listed, now) for node in fleet.nodes}
    total = cost.total(costs.values())
    used = {worker.host: _used(worker, answers.uses.get(worker.host), begins, now) for worker in fleet.workers}
    nodes = []
    for node in sorted(fleet.nodes, key=lambda node: texts.natural(fleet.labels[node.full_name])):
        hosts = [worker.host for worker in fleet.workers if worker.node.full_name == node.full_name]
        serves = node.state in SERVING_STATES
        replies = {host: answers.activity[host] for host in hosts if host in answers.activity}
        use, since, sign = _last_use(idle.verdict(node, replies, idle_for, now), replies, now) if serves else _NONE
        nodes.append(
            Node(
                node=fleet.labels[node.full_name],
                zone=node.zone,
                kind=node.accelerator_type,
                state=node.state,
                tier=node.tier,
                chips=node.chips,
                use=use,
                since=since,
                sign=sign,
                chip_hours=round(sum(sum(days) for host in hosts for _, _, days in used[host]), 2),
                per_hour=costs[node.full_name].hourly,
                covered=costs[node.full_name].covered,
            )
        )
    return FleetReport(
        name=str(fleet.settings.path),
        made=now,
        begins=tuple(begins),
        nodes=tuple(nodes),
        people=_people([use for found in used.values() for use in found]),
        per_hour=round(total.hourly, 4),
        unknown_prices=total.unknown,
        basis=f"estimate by list prices of {listed.date}, without discounts; a grant's TPUs cost nothing",
        gaps=_gaps(answers.uses),
    )


def _last_use(verdict: Verdict, replies: Mapping[str, Reply], now: float) -> tuple[str, float | None, str]:
    """Return whether a node is in use, when it was used last, and the last use in words."""
    if verdict.sign not in ("", idle.CREATED):
        return verdict.state, verdict.since, verdict.sign
    created = f"created {texts.ago(verdict.since, now)}" if verdict.since is not None else ""
    if reason := verdict.reason or idle.gap(verdict.node, replies):
        return idle.UNKNOWN, None, "; ".join(filter(None, [created, reason]))
    return _NEW if verdict.state == idle.USED else verdict.state, None, f"never used, {created}"


def _used(
    worker: Worker, reply: Reply | None, begins: Sequence[float], now: float
) -> list[tuple[str, str, tuple[float, ...]]]:
    """Return the uses of a worker's chips: person, run, and chip-hours of each day."""
    if reply is None or not reply.ok:
        return []
    chips = worker.node.chips / max(1, worker.node.worker_count)
    found = []
    for use in reply.value.get("uses") or ():
        start = float(use.get("began") or use["since"])
        until = now if use.get("until") is None else float(use["until"])
        days = tuple(chips * max(0.0, min(until, begin + _DAY, now) - max(start, begin)) / 3600 for begin in begins)
        if any(days):
            found.append((outcomes.person(str(use["person"]), str(use.get("asker") or "")), str(use["run_id"]), days))
    return found


def _people(found: Sequence[tuple[str, str, tuple[float, ...]]]) -> tuple[Person, ...]:
    people: dict[str, tuple[set[str], list[tuple[float, ...]]]] = {}
    for person, run_id, days in found:
        runs, every = people.setdefault(person, (set(), []))
        runs.add(run_id)
        every.append(days)
    sums = {person: tuple(map(sum, zip(*every, strict=True))) for person, (_, every) in people.items()}
    made = [
        Person(person, round(sum(days), 2), len(people[person][0]), tuple(round(hours, 3) for hours in days))
        for person, days in sums.items()
    ]
    return tuple(sorted(made, key=lambda one: (-one.chip_hours, one.person)))


def _gaps(uses: Mapping[str, Reply]) -> tuple[str, ...]:
    silent = [host for host, reply in uses.items() if not reply.ok]
    short = [host for host, reply in uses.items() if reply.ok and not reply.value.get("whole", True)]
    gaps = ["the use of nodes that no longer exist, and of chips without a run, is not counted"]
    if silent:
        first = uses[silent[0]].problem
        if "unknown action" in first:
            first = "the launcher there is too old for this (`tpu_ops configure` updates it)"
        gaps.append(f"{texts.folded(silent)} did not tell who used them: {first}")
    if short:
        gaps.append(f"{texts.folded(short)} no longer know all runs of these days")
    return tuple(gaps)
