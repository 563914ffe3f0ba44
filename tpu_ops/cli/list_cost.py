"""What `tpu_ops list --cost` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpu_ops import texts
from tpu_ops.cli import list_queued, output
from tpu_ops.cloud import prices
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.queued_resources import QueuedResource
from tpu_ops.fleet import cost, grant, queue
from tpu_ops.fleet.cost import Cost, QueuedCost, Total
from tpu_ops.fleet.queue import Queue
from tpu_ops.fleet.view import Fleet

COLUMNS = ("node", "zone", "type", "state", "tier", "chips", "age", "per_hour", "since_creation", "grant")
QUEUED_COLUMNS = ("queued resource", "zone", "nodes", "state", "tier", "per_hour_once_active", "grant")


def show(
    fleet: Fleet,
    nodes: Sequence[Node],
    queued: Sequence[QueuedResource],
    found: Queue | None,
    now: float,
    *,
    as_json: bool,
) -> None:
    """Print the estimated cost of nodes, and what queued resources will cost.

    Args:
        fleet: The fleet; its grant.yml names the nodes that cost nothing.
        nodes: The nodes to show.
        queued: The queued resources to show.
        found: All queued resources, since they share the grant; None if they are unknown.
        now: The present time.
        as_json: Whether to print JSON.

    Raises:
        UsageError: grant.yml has faults.
    """
    listed = prices.read()
    granted = grant.read(fleet.settings.path / grant.FILE)
    free = cost.covered(granted, fleet.listed, now)
    costs = [cost.estimate(node, free, listed, now) for node in nodes]
    free = cost.covered(granted, fleet.listed, now, found.queued if found else ())
    later = [cost.estimate_queued(one, queue.missing(one, fleet.listed), free, listed) for one in queued]
    basis = f"estimate by list prices of {listed.date}, without discounts; a grant's TPUs cost nothing"
    if as_json:
        rows = None if found is None else [_queued_facts(each) for each in later]
        output.as_json(
            _json(fleet, costs, cost.total(costs), now)
            | {"queued_resources": rows, "basis": basis, "source": listed.source}
        )
        return
    if costs:
        total = cost.total(costs)
        output.table([_row(fleet, each, now) for each in costs], COLUMNS)
        output.line(
            f"together {_dollars(total.hourly)} per hour, {_dollars(total.daily)} per day{_unknown(total, 'node')}"
        )
    if later:
        total = cost.total(later)
        if costs:
            output.line()
        output.table([_queued_row(each) for each in later], QUEUED_COLUMNS)
        output.line(
            f"queued resources cost nothing yet; once ACTIVE, together {_dollars(total.hourly)} per hour"
            f"{_unknown(total, 'queued resource')}"
        )
    if costs or later:
        output.line(f"({basis})")


def _unknown(total: Total, noun: str) -> str:
    return f", and {texts.count(total.unknown, noun)} of unknown price" if total.unknown else ""


def _dollars(amount: float | None) -> str:
    return "unknown" if amount is None else f"${amount:,.2f}"


def _row(fleet: Fleet, each: Cost, now: float) -> dict[str, object]:
    node = each.node
    return {
        "node": fleet.labels[node.full_name],
        "zone": node.zone,
        "type": node.accelerator_type,
        "state": node.state,
        "tier": node.tier,
        "chips": node.chips or "-",
        "age": texts.age(node.age(now)),
        "per_hour": _dollars(each.hourly),
        "since_creation": _dollars(each.since_creation),
        "grant": "covered" if each.covered else "-",
    }


def _queued_row(each: QueuedCost) -> dict[str, object]:
    one = each.queued
    return {
        "queued resource": one.name,
        "zone": one.zone,
        "nodes": list_queued.nodes_in_words(one),
        "state": one.state,
        "tier": one.tier,
        "per_hour_once_active": _dollars(each.hourly),
        "grant": "covered" if each.covered else "-",
    }


def _queued_facts(each: QueuedCost) -> dict[str, Any]:
    one = each.queued
    return {
        "name": one.name,
        "project": one.project,
        "zone": one.zone,
        "state": one.state,
        "tier": one.tier,
        "per_hour_once_active": _rounded(each.hourly),
        "covered_by_grant": each.covered,
    }


def _json(fleet: Fleet, costs: Sequence[Cost], total: Total, now: float) -> dict[str, Any]:
    return {
        "currency": "USD",
        "per_hour": _rounded(total.hourly),
        "per_day": _rounded(total.daily),
        "unknown": total.unknown,
        "nodes": [
            {
                "node": each.node.name,
                "node_label": fleet.labels[each.node.full_name],
                "project": each.node.project,
                "zone": each.node.zone,
                "accelerator_type": each.node.accelerator_type,
                "state": each.node.state,
                "tier": each.node.tier,
                "chips": each.node.chips,
                "age_seconds": None if (age := each.node.age(now)) is None else round(age),
                "per_hour": _rounded(each.hourly),
                "since_creation": _rounded(each.since_creation),
                "covered_by_grant": each.covered,
            }
            for each in costs
        ],
    }


def _rounded(amount: float | None) -> float | None:
    return None if amount is None else round(amount, 4)
