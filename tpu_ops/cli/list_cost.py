"""What `tpu_ops list --cost` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpu_ops import texts
from tpu_ops.cli import output
from tpu_ops.cloud import prices
from tpu_ops.cloud.node import Node
from tpu_ops.fleet import cost, grant
from tpu_ops.fleet.cost import Cost, Total
from tpu_ops.fleet.view import Fleet

COLUMNS = ("node", "zone", "type", "state", "tier", "chips", "age", "per_hour", "since_creation", "grant")


def show(fleet: Fleet, nodes: Sequence[Node], now: float, *, as_json: bool) -> None:
    """Print the estimated cost of nodes.

    Args:
        fleet: The fleet; its grant.yml names the nodes that cost nothing.
        nodes: The nodes to show.
        now: The present time.
        as_json: Whether to print JSON.

    Raises:
        UsageError: grant.yml has faults.
    """
    listed = prices.read()
    granted = grant.read(fleet.settings.path / grant.FILE)
    free = cost.covered(granted, fleet.listed, now)
    costs = [cost.estimate(node, free, listed, now) for node in nodes]
    total = cost.total(costs)
    basis = f"estimate by list prices of {listed.date}, without discounts; a grant's TPUs cost nothing"
    if as_json:
        output.as_json(_json(fleet, costs, total, now) | {"basis": basis, "source": listed.source})
    elif costs:
        output.table([_row(fleet, each, now) for each in costs], COLUMNS)
        unknown = f", and {texts.count(total.unknown, 'node')} of unknown price" if total.unknown else ""
        output.line(f"together {_dollars(total.hourly)} per hour, {_dollars(total.daily)} per day{unknown}")
        output.line(f"({basis})")


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
