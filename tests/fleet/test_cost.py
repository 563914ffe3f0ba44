"""The estimate of what nodes cost."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from tests.support.nodes import node
from tpu_ops.cloud import prices
from tpu_ops.cloud.accelerators import catalogue, generations
from tpu_ops.cloud.prices import Prices
from tpu_ops.cloud.queued_resources import QueuedNode, QueuedResource
from tpu_ops.fleet import cost, grant
from tpu_ops.fleet.cost import Cost, QueuedCost, Total

NOW = dt.datetime(2026, 11, 27, 12, tzinfo=dt.UTC).timestamp()
LISTED = Prices(
    "July 2026",
    "a test",
    {
        "on-demand": {"v4": {"us-central2": 3.0}, "v2": {"us-central1": 1.5}, "v2-8": {"us-central1": 1.0}},
        "spot": {"v4": {"us-central2": 1.0}},
    },
)


def made(kind="v4-8", zone="us-central2-b", *, name="pod", hours=2.0, chips=4, **fields):
    created = dt.datetime.fromtimestamp(NOW - hours * 3600, dt.UTC).isoformat() if hours is not None else ""
    return node(name, zone=zone, accelerator_type=kind, chips=chips, create_time=created, **fields)


@pytest.mark.parametrize(
    ("there", "hourly", "since"),
    [
        (made(), 12.0, 24.0),
        (made(preemptible=True, spot=True), 4.0, 8.0),
        (made(preemptible=True), 4.0, 8.0),
        (made("v4-32", chips=16, hours=0.5), 48.0, 24.0),
        # The type's own price precedes its generation's, and another region has its own price or none.
        (made("v2-8", "us-central1-b"), 4.0, 8.0),
        (made("v2-32", "us-central1-a", chips=16), 24.0, 48.0),
        (made("v2-8", "europe-west4-a"), None, None),
        # Unknown: no price, no chips, no time of creation; a reservation has prices of its own.
        (made("v9-8"), None, None),
        (made(chips=0), None, None),
        (made(hours=None), 12.0, None),
        (made(reserved=True), None, None),
        # Only READY nodes are charged.
        (made(state="STOPPED"), 0.0, None),
        (made(state="PREEMPTED"), 0.0, None),
        (made(state="CREATING", hours=0.1), 0.0, None),
        # A clock that is behind the API's.
        (made(hours=-1), 12.0, 0.0),
    ],
)
def test_the_cost_of_a_node(there, hourly, since):
    assert cost.estimate(there, (), LISTED, NOW) == Cost(there, covered=False, hourly=hourly, since_creation=since)


def test_a_node_that_the_grant_covers_costs_nothing():
    there = made()
    found = cost.estimate(there, {there.full_name}, LISTED, NOW)
    assert found == Cost(there, covered=True, hourly=0.0, since_creation=0.0)


def test_the_sum_leaves_out_unknown_costs_and_counts_them():
    costs = [cost.estimate(each, (), LISTED, NOW) for each in (made(), made(spot=True), made("v9-8"), made("v9-8"))]
    total = cost.total(costs)
    assert (total, total.daily) == (Total(16.0, 2), 384.0)


@pytest.mark.parametrize(
    ("days", "line", "names"),
    [
        (30, "8 on-demand Cloud TPU v4 chips in zone us-central2-b", {"a", "b"}),
        (30, "4 on-demand Cloud TPU v4 chips in zone us-central2-b", {"a"}),
        (30, "8 spot Cloud TPU v4 chips in zone us-central2-b", set()),
        (-1, "8 on-demand Cloud TPU v4 chips in zone us-central2-b", set()),
        (30, "", set()),
    ],
)
def test_the_grant_covers_the_nodes_that_its_lines_have_room_for(days, line, names):
    parsed = grant.parse_line(line)
    ends = dt.datetime.fromtimestamp(NOW, dt.UTC) + dt.timedelta(days=days)
    granted = grant.Grant(Path("grant.yml"), ends, (parsed,)) if parsed else None
    listed = [made(name="a"), made(name="b")]
    found = cost.covered(granted, listed, NOW)
    assert found == {each.full_name for each in listed if each.name in names}


def test_the_price_file_has_generations_types_and_regions_that_exist():
    found = prices.read()
    known = {*generations(), *(kind.name for kind in catalogue())}
    assert found.date
    assert found.source
    for tier, tables in found.tables.items():
        assert tables.keys() <= known, tier
        for name, regions in tables.items():
            assert all(0.05 < price < 10 and region.count("-") == 1 for region, price in regions.items()), (tier, name)
    for name, regions in found.tables["spot"].items():
        assert all(price < found.tables["on-demand"][name][region] for region, price in regions.items()), name
    assert found.of("v4-32", "us-central2", "on-demand") == 3.22
    assert [found.of(kind, "us-central1", "on-demand") for kind in ("v2-8", "v2-32")] == [1.125, 1.5]


@pytest.mark.parametrize(
    ("state", "kinds", "missing", "hourly"),
    [
        ("WAITING_FOR_RESOURCES", ("v4-8", "v4-16"), "ab", 36.0),
        ("PROVISIONING", ("v4-8", "v4-16"), "b", 24.0),
        ("ACTIVE", ("v4-8",), "a", 0.0),
        ("FAILED", ("v4-8",), "a", 0.0),
        ("SUSPENDED", ("v4-8",), "a", 0.0),
        ("ACCEPTED", ("v4-8", "v9-8"), "ab", None),
        ("ACCEPTED", (), "", 0.0),
    ],
)
def test_the_cost_of_a_queued_resource_once_it_is_active(state, kinds, missing, hourly):
    asked = tuple(QueuedNode(name, kind) for name, kind in zip("ab", kinds, strict=False))
    one = QueuedResource("q", "p", "us-central2-b", state, nodes=asked)
    assert cost.estimate_queued(one, missing, (), LISTED) == QueuedCost(one, covered=False, hourly=hourly)
    assert cost.estimate_queued(one, missing, {one.full_name}, LISTED) == QueuedCost(one, covered=True, hourly=0.0)
