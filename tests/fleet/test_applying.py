"""Carrying out a plan of apply while other commands change the same nodes."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import FleetDir
from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.creation import CreationTerms
from tpu_ops.config import Filters
from tpu_ops.errors import CloudError
from tpu_ops.fleet import applying, declared, holdings, origin, plan, unconfigured
from tpu_ops.fleet.applying import Planned, Result
from tpu_ops.fleet.changing import Change, change

NOW = dt.datetime(2027, 1, 10, tzinfo=dt.UTC)
DEV = "{name: dev, type: v4-8, zones: [us-central2-b]}"
QUEUED = "{name: dev, type: v4-8, zones: [us-central2-b], queued: true}"


@pytest.fixture
def tpu(fleet: FleetDir) -> Iterator[Tpu]:
    with origin.api(fleet.settings()) as client:
        yield client


@pytest.fixture
def look(fleet: FleetDir, tpu: Tpu) -> Callable[..., Planned]:
    """Returns the plan for these entries of nodes.yml."""

    def planned(*entries: str, terms: plan.Terms | None = None) -> Planned:
        file = fleet.path / "nodes.yml"
        file.write_text("\n- ".join(["nodes:", *entries]) + "\n" if entries else "nodes: []\n")
        settings = fleet.settings()
        nodes = declared.read(file, settings.projects, Path.read_text)
        held = holdings.look(tpu, settings)
        steps = plan.steps(nodes, held, terms or plan.Terms())
        return applying.planned(tpu, settings, None, held, steps, now=NOW)

    return planned


def apply(fleet: FleetDir, tpu: Tpu, found: Planned) -> Sequence[Result]:
    quiet = CreationTerms("ada:k", wait=True, timeout=10)
    settings, silent = fleet.settings(), lambda *_: None
    return applying.apply(tpu, settings, found.works, quiet, claims=found.claims, say=silent, progress=lambda _: silent)


def preempted(fleet: FleetDir) -> None:
    fleet.create("dev")
    assert fleet.api.call("POST", "lab/preempt", {"node": f"{fleet.location()}/nodes/dev"})[0] == 200


def test_a_node_that_another_apply_has_made_again_meanwhile_is_kept(
    fleet: FleetDir, tpu: Tpu, look: Callable[..., Planned]
) -> None:
    preempted(fleet)
    found = look(DEV)
    fleet.act("delete", "dev")
    other = fleet.create("dev")
    assert [(one.outcome, one.error) for one in apply(fleet, tpu, found)] == [("already there", None)]
    assert fleet.api.node("dev", fleet.location())["id"] == other["id"]


def test_a_node_that_somebody_has_deleted_meanwhile_is_created(
    fleet: FleetDir, tpu: Tpu, look: Callable[..., Planned]
) -> None:
    preempted(fleet)
    found = look(DEV)
    fleet.act("delete", "dev")
    assert [one.outcome for one in apply(fleet, tpu, found)] == ["created"]
    assert look(DEV).works == ()


def test_a_node_that_the_plan_did_not_know_keeps_its_queued_resource(
    fleet: FleetDir, tpu: Tpu, look: Callable[..., Planned]
) -> None:
    assert [one.outcome for one in apply(fleet, tpu, look(QUEUED))] == ["begun"]
    until, node = time.monotonic() + 10, f"{fleet.location()}/nodes/dev"
    while fleet.api.call("GET", f"v2/{node}")[1].get("state") != "READY":
        assert time.monotonic() < until
    made = fleet.api.node("dev", fleet.location())["id"]
    (work,) = look(QUEUED.replace("v4-8", "v4-16"), terms=plan.Terms(recreate=True)).works
    # The plan of a command that was not told of the node.
    step = replace(work.step, action=plan.Action.AGAIN, node=None)
    found = Planned((work._replace(step=step),), look().claims)
    assert [(one.outcome, one.error) for one in apply(fleet, tpu, found)] == [("already there", None)]
    assert fleet.api.node("dev", fleet.location())["id"] == made


def test_two_commands_with_the_same_plan_both_succeed(fleet: FleetDir, tpu: Tpu, look: Callable[..., Planned]) -> None:
    for entry, name in ((QUEUED, "queuedResources/dev"), (DEV.replace("dev", "plain"), "nodes/plain")):
        first, second = look(entry), look(entry)
        results = tpu.concurrently(lambda found: apply(fleet, tpu, found), [first, second])
        assert [one.error for each in results for one in each] == [None, None]
        assert fleet.api.call("GET", f"v2/{fleet.location()}/{name}")[0] == 200


def test_a_queued_resource_is_deleted_with_its_node_before_it_is_requested_again(
    fleet: FleetDir, tpu: Tpu, look: Callable[..., Planned]
) -> None:
    assert [one.outcome for one in apply(fleet, tpu, look(QUEUED))] == ["begun"]
    queue = f"v2/{fleet.location()}/queuedResources/dev"
    before = fleet.api.call("GET", queue)[1]["createTime"]
    found = look(terms=plan.Terms(prune=True))
    assert [one.outcome for one in apply(fleet, tpu, found)] == ["deleted"]
    assert fleet.api.call("GET", queue)[0] == 404
    assert [one.outcome for one in apply(fleet, tpu, look(QUEUED))] == ["begun"]
    assert fleet.api.call("GET", queue)[1]["createTime"] != before
    # The plan is older than the present queued resource, which therefore stays.
    assert [one.outcome for one in apply(fleet, tpu, found)] == ["deleted"]
    assert fleet.api.call("GET", queue)[0] == 200


@dataclass(frozen=True)
class Racing(Tpu):
    """A client that calls functions before and after each of its own calls, as if something happened in between."""

    rival: Callable[[str], None] = lambda _: None
    then: Callable[[str], None] = lambda _: None

    def call(self, method: str, request: dict[str, Any], where: str, *, repeat: bool = True) -> Any:
        """Call the method, and the functions before and after it."""
        self.rival(method)
        answer = super().call(method, request, where, repeat=repeat)
        self.then(method)
        return answer


class Killed(BaseException):
    """Stands for the end of the process."""


def declares(at: int) -> tuple[str, ...]:
    return (
        f"{{name: 'gone-{at},typ-{at},new-{at}', type: v4-8, zones: [us-central2-b]}}",
        f"{{name: change-{at}, type: v4-8, labels: {{a: b}}, disks: [data:ro]}}",
        f"{{name: queue-{at}, type: v4-8, zones: [us-central2-b], queued: true}}",
    )


def test_the_next_apply_completes_one_that_was_killed_after_any_change(
    fleet: FleetDir, look: Callable[..., Planned]
) -> None:
    killed, at = True, 0
    while killed:
        for name, kind in (("gone", "v4-8"), ("typ", "v4-16"), ("change", "v4-8"), ("old", "v4-8")):
            fleet.create(f"{name}-{at}", kind, labels={"theirs": "x"})
        fleet.api.call("POST", "lab/preempt", {"node": f"{fleet.location()}/nodes/gone-{at}"})
        may = plan.Terms(prune=True, recreate=True, filters=Filters(names=(f"*-{at}",)))
        left = iter(range(at, 0, -1))

        def kill(method: str, left: Iterator[int] = left) -> None:
            if not method.startswith(("get_", "list_")) and not next(left, 0):
                raise Killed

        with origin.api(fleet.settings()) as tpu:
            try:
                apply(fleet, Racing(**vars(tpu), then=kill), look(*declares(at), terms=may))
                killed = False
            except Killed:
                killed = True
        with origin.api(fleet.settings()) as tpu:
            assert [one.error for one in apply(fleet, tpu, look(*declares(at), terms=may)) if one.error] == []
        wanted = dict.fromkeys((f"{name}-{at}" for name in ("change", "gone", "new", "queue", "typ")), "READY")
        until = time.monotonic() + 10
        while (states := _states(fleet, f"-{at}")) != wanted:
            assert time.monotonic() < until, (at, states)
        assert fleet.api.node(f"change-{at}", fleet.location())["labels"] == {"theirs": "x", "a": "b"}
        at += 1
    queues = fleet.api.call("GET", f"v2/{fleet.location()}/queuedResources")[1]["queuedResources"]
    assert (len(queues), at > 8) == (at, True)


def _states(fleet: FleetDir, end: str) -> dict[str, str]:
    nodes = fleet.api.call("GET", f"v2/{fleet.location()}/nodes")[1]["nodes"]
    names = {node["name"].rpartition("/")[2]: node["state"] for node in nodes}
    return {name: state for name, state in names.items() if name.endswith(end)}


@pytest.mark.parametrize(("times", "labels"), [(1, {"theirs": "y", "mine": "x"}), (99, None)])
def test_a_change_that_another_command_undoes_is_sent_again(
    fleet: FleetDir, tpu: Tpu, times: int, labels: dict[str, str] | None
) -> None:
    fleet.create("dev")
    name, looks = f"{fleet.location()}/nodes/dev", iter(range(100))

    def rival(method: str) -> None:
        if method == "get_node" and 0 < next(looks) <= times:
            fleet.api.done("PATCH", f"v2/{name}?updateMask=labels", {"labels": {"theirs": "y"}})

    def set_label() -> None:
        racing = Racing(**vars(tpu), rival=rival)
        edits = Change(labels={"mine": "x"}).edits(name)
        change(racing, fleet.settings(), name, edits, timeout=10, progress=lambda *_: None)

    if labels:
        set_label()
        assert fleet.api.node("dev", fleet.location())["labels"] == labels
    else:
        with pytest.raises(CloudError, match="the node's labels are still as another program sets them"):
            set_label()


def test_the_record_of_unconfigured_nodes_survives_damage_and_keeps_others(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert unconfigured.read(state) == frozenset()
    unconfigured.add(state, [("p", "a"), ("p", "b")])
    unconfigured.remove(state, [("p", "a"), ("p", "never")])
    assert unconfigured.read(state) == {("p", "b")}
    (state / "unconfigured.json").write_text("{damaged")
    assert unconfigured.read(state) == frozenset()
    unconfigured.add(state, [("p", "c")])
    assert unconfigured.read(state) == {("p", "c")}
