"""Estimates what nodes cost by list prices. Nothing here asks the API, reads a file or looks at a clock."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable
from typing import NamedTuple

from tpu_ops.cloud.node import SERVING_STATES, Node
from tpu_ops.cloud.prices import Prices
from tpu_ops.fleet import grant, holdings
from tpu_ops.fleet.grant import Grant


class Cost(NamedTuple):
    """The estimated cost of a node in US dollars.

    Attributes:
        node: The node.
        covered: Whether the grant covers the node.
        hourly: Cost of an hour in the present state; None if unknown.
        since_creation: Cost of the time since the node was created, as if it had always been READY; None if unknown.
    """

    node: Node
    covered: bool
    hourly: float | None
    since_creation: float | None


class Total(NamedTuple):
    """The sum over some nodes.

    Attributes:
        hourly: Cost of an hour, in US dollars, without the nodes whose cost is unknown.
        unknown: Number of nodes whose cost is unknown.
    """

    hourly: float
    unknown: int

    @property
    def daily(self) -> float:
        """Cost of 24 hours, in US dollars."""
        return self.hourly * 24


def covered(granted: Grant | None, listed: Iterable[Node], now: float) -> set[str]:
    """Return the full names of the nodes that the grant has room for; none if there is no grant or it has ended.

    Args:
        granted: The grant.
        listed: All nodes of the fleet's projects and zones, since they share the grant.
        now: The present time, in seconds since 1970.
    """
    if granted is None or granted.days_left(dt.datetime.fromtimestamp(now, dt.UTC)) <= 0:
        return set()
    held, _ = grant.shares(granted, holdings.uses_of(listed, ()))
    return {use.name for members in held for use in members}


def estimate(node: Node, free: Collection[str], prices: Prices, now: float) -> Cost:
    """Return the cost of a node.

    Cloud TPU charges for the time in which a node is READY (cloud.google.com/tpu/pricing). For how long a node that is
    not READY was READY before is unknown.

    Args:
        node: The node.
        free: Full names of the nodes that the grant covers.
        prices: The list prices.
        now: The present time, in seconds since 1970.
    """
    if node.full_name in free:
        return Cost(node, covered=True, hourly=0.0, since_creation=0.0)
    serves = node.state in SERVING_STATES
    price = prices.of(node.accelerator_type, node.region, node.tier)
    full = None if price is None or not node.chips else price * node.chips
    age = node.age(now)
    since = full * age / 3600 if serves and full is not None and age is not None else None
    return Cost(node, covered=False, hourly=full if serves else 0.0, since_creation=since)


def total(costs: Iterable[Cost]) -> Total:
    """Return the sum of the costs of an hour."""
    hourly = [cost.hourly for cost in costs]
    return Total(sum(value for value in hourly if value is not None), hourly.count(None))
