"""The guard of a command counts the fleet's nodes again while time passes."""

from __future__ import annotations

import datetime as dt
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fleet import FleetDir
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.queued_resources import QueuedNode, QueuedResource
from tpu_ops.cloud.remaking import Made, Plan
from tpu_ops.cloud.wish import Wish
from tpu_ops.fleet import origin
from tpu_ops.fleet.grant import Grant, Line
from tpu_ops.fleet.holdings import FRESH, Guard, Holdings, look, refuse_uncovered

NOW = dt.datetime(2027, 1, 10, 12, tzinfo=dt.UTC)
LINE = Line(16, "v4", "us-central2-b", spot=False, number=3)
FOREVER = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)
WISH = Wish("pod", "p", "us-central2-b", "v4-32", "tpu-ubuntu2204-base")


def node(name: str, created: str = "", state: str = "READY") -> Node:
    return Node(name, "p", "us-central2-b", name, "v4-32", state=state, chips=16, create_time=created)


def test_a_guard_that_looks_again_sees_what_a_colleague_has_created() -> None:
    later = Holdings((node("theirs"),), ())
    guard = Guard(Grant(Path("grant.yml"), FOREVER, (LINE,)), Holdings((), ()), NOW, lambda: later)
    assert guard.take(WISH)
    guard.release(WISH)
    guard.renew()
    assert not guard.take(WISH)


def test_a_guard_that_looks_again_sees_that_the_grant_has_ended() -> None:
    began, ends = dt.datetime(2025, 1, 1, tzinfo=dt.UTC), dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    guard = Guard(Grant(Path("grant.yml"), ends, (LINE,)), Holdings((), ()), began, lambda: Holdings((), ()))
    assert guard.take(WISH)
    guard.release(WISH)
    guard.renew()
    assert not guard.take(WISH)


@pytest.mark.parametrize(
    ("method", "projects", "expected"),
    [
        ("ListQueuedResources", ["second"], [("second", "-")]),
        ("ListNodes", ["second"], [("second", "-")]),
        ("ListQueuedResources", ["project", "second"], [("-", "-")]),
    ],
)
def test_only_places_that_could_not_be_listed_are_unlisted(
    fleet: FleetDir, method: str, projects: list[str], expected: list[tuple[str, str]]
) -> None:
    ids = {"project": fleet.project, "second": fleet.second}
    for name in projects:
        fleet.api.fault(method=method, project=ids[name], code="PERMISSION_DENIED", message="not you")
    try:
        with origin.api(fleet.settings()) as tpu:
            held = look(tpu, fleet.settings(), fleet.second)
    finally:
        fleet.api.clear_faults()
    assert list(held.unlisted) == [(ids.get(project, project), zone) for project, zone in expected]
    assert len(held.warnings) == 1


def test_nodes_that_wait_at_the_same_time_share_one_listing() -> None:
    looks, time, all_ask = list[float](), [100.0], threading.Barrier(8)

    def look_again() -> Holdings:
        looks.append(time[0])
        return Holdings((node("theirs"),), ())

    guard = Guard(Grant(Path("grant.yml"), FOREVER, (LINE,)), Holdings((), ()), NOW, look_again, lambda: time[0])

    def renew(_: int) -> bool:
        all_ask.wait(10)
        guard.renew()
        return guard.take(WISH)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(renew, range(8))) == [False] * 8
    assert looks == [100.0]
    time[0] += FRESH - 1
    guard.renew()
    assert len(looks) == 1
    time[0] += 1
    guard.renew()
    assert len(looks) == 2


def test_a_requested_queued_resource_that_is_listed_is_counted_once() -> None:
    wish = replace(WISH, queued=True)
    asked = QueuedResource("pod", "p", "us-central2-b", "ACCEPTED", nodes=(QueuedNode("pod", "v4-32"),))
    grant = Grant(Path("grant.yml"), FOREVER, (replace(LINE, amount=32),))
    guard = Guard(grant, Holdings((), ()), NOW, lambda: Holdings((), (asked,)))
    assert guard.take(wish)
    guard.renew()
    assert guard.take(replace(wish, name="second"))
    assert not guard.take(replace(wish, name="third"))


def test_a_copy_counts_on_its_own() -> None:
    guard = Guard(Grant(Path("grant.yml"), FOREVER, (LINE,)), Holdings((), ()), NOW)
    assert guard.copy().take(WISH)
    assert guard.take(WISH)
    assert not guard.take(WISH)


def test_a_node_of_a_run_keeps_the_room_that_it_had_before_others_came() -> None:
    held = Holdings((node("extra", "2027-01-05T00:00:00Z"), node("pod", "2027-01-01T00:00:00Z", "PREEMPTED")), ())
    body = {"accelerator_type": "v4-32"}
    refuse_uncovered(Grant(Path("grant.yml"), FOREVER, (LINE,)), held, Plan((Made(WISH.full_name, "1", body),)), NOW)
