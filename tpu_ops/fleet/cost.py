"""Estimates what nodes and queued resources cost by list prices.

Nothing here asks the API, reads a file or looks at a clock.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable
from typing import NamedTuple

from tpu_ops.cloud.node import SERVING_STATES, Node, region_of
from tpu_ops.cloud.prices import Prices
from tpu_ops.cloud.queued_resources import QueuedResource
from tpu_ops.fleet import grant, holdings
from tpu_ops.fleet.grant import Grant, chips_of

#: States of a queued resource that still creates its nodes. An ACTIVE one does not create a lost node again.
_CREATES_NODES = ("CREATING", "ACCEPTED", "PROVISIONING", "WAITING_FOR_RESOURCES")


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


class QueuedCost(NamedTuple):
    """The estimated cost of the nodes that a queued resource is to create, in US dollars. Before, it costs nothing.

    Attributes:
        queued: The queued resource.
        covered: Whether the grant covers it.
        hourly: Cost of an hour once it is ACTIVE; 0 if it creates no more nodes; None if unknown.
    """

    queued: QueuedResource
    covered: bool
    hourly: float | None


class Total(NamedTuple):
    """The sum over some nodes or queued resources.

    Attributes:
        hourly: Cost of an hour, in US dollars, without those whose cost is unknown.
        unknown: Number of those whose cost is unknown.
    """

    hourly: float
    unknown: int

    @property
    def daily(self) -> float:
        """Cost of 24 hours, in US dollars."""
        return self.hourly * 24


def covered(
    granted: Grant | None, listed: Iterable[Node], now: float, queued: Iterable[QueuedResource] = ()
) -> set[str]:
    """Return the full names of the nodes and queued resources that the grant has room for.

    There are none if there is no grant or it has ended.

    Args:
        granted: The grant.
        listed: All nodes of the fleet's projects and zones, since they share the grant.
        now: The present time, in seconds since 1970.
        queued: All queued resources that share it, too.
    """
    if granted is None or granted.days_left(dt.datetime.fromtimestamp(now, dt.UTC)) <= 0:
        return set()
    held, outside = grant.shares(granted, holdings.uses_of(listed, queued))
    return {use.name for members in held for use in members} - {use.name for use in outside}


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
    full = _hourly(prices.of(node.accelerator_type, node.region, node.tier), node.chips)
    age = node.age(now)
    since = full * age / 3600 if serves and full is not None and age is not None else None
    return Cost(node, covered=False, hourly=full if serves else 0.0, since_creation=since)


def estimate_queued(one: QueuedResource, missing: Collection[str], free: Collection[str], prices: Prices) -> QueuedCost:
    """Return the cost of the nodes that a queued resource is to create.

    Args:
        one: The queued resource.
        missing: Names of its nodes that do not exist.
        free: Full names of the queued resources that the grant covers.
        prices: The list prices.
    """
    if one.full_name in free:
        return QueuedCost(one, covered=True, hourly=0.0)
    kinds = [asked.accelerator_type for asked in one.nodes if asked.name in missing]
    hourly = [
        _hourly(prices.of(kind, region_of(one.zone), one.tier), chips_of(kind))
        for kind in kinds
        if one.state in _CREATES_NODES
    ]
    known = [each for each in hourly if each is not None]
    return QueuedCost(one, covered=False, hourly=sum(known) if len(known) == len(hourly) else None)


def _hourly(price: float | None, chips: int) -> float | None:
    return None if price is None or not chips else price * chips


def total(costs: Iterable[Cost | QueuedCost]) -> Total:
    """Return the sum of the costs of an hour."""
    hourly = [cost.hourly for cost in costs]
    return Total(sum(value for value in hourly if value is not None), hourly.count(None))
