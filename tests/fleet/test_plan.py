"""The plan of apply: which steps make the nodes of a fleet what nodes.yml declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tpu_ops.cloud.node import Node
from tpu_ops.cloud.queued_resources import QueuedNode, QueuedResource
from tpu_ops.cloud.setups import Setup
from tpu_ops.cloud.wish import Wish
from tpu_ops.config import Filters
from tpu_ops.fleet import plan
from tpu_ops.fleet.declared import Declared
from tpu_ops.fleet.holdings import Holdings
from tpu_ops.fleet.plan import Terms

ZONE, OTHER = "us-central2-b", "europe-west4-b"
WISH = Wish("dev", "lab", "", "v4-8", "base")
PLAIN = Declared(WISH, given=frozenset({"name", "type"}))


def declares(**given: Any) -> Declared:
    """Return the declared node `dev` with further keys of its entry."""
    own = {key: given[key] for key in ("zones", "spot", "keep") if key in given}
    names = {"runtime": "runtime_version", "type": "accelerator_type"}
    wish = {names.get(key, key): value for key, value in given.items() if key not in own}
    return Declared(replace(WISH, **wish), given=frozenset({"name", "type", *given}), **own)


def node(name: str = "dev", zone: str = ZONE, **fields: Any) -> Node:
    usual = {"runtime_version": "base", "state": "READY", **fields}
    return Node(name, "lab", zone, "1", usual.pop("accelerator_type", "v4-8"), **usual)


def queue(name: str, state: str, *nodes: str, zone: str = ZONE) -> QueuedResource:
    return QueuedResource(name, "lab", zone, state, nodes=tuple(QueuedNode(each, "v4-8") for each in nodes or (name,)))


def steps(
    one: Declared | None, nodes: list[Node], queued: list[QueuedResource], terms: Terms, **held: Any
) -> list[tuple[str, str]]:
    """Return action and name of each step; steps that another command has to do are in parentheses."""
    found = plan.steps([one] if one else [], Holdings(tuple(nodes), tuple(queued), **held), terms)
    return [(str(step.action) if step.does else f"({step.action})", step.name) for step in found]


LIVE = node("two", queued_resource="pair")
PAIR = queue("pair", "ACTIVE", "dev", "two")


@pytest.mark.parametrize(
    ("one", "nodes", "queued", "expected"),
    [
        (PLAIN, [], [], [("create", "dev")]),
        (PLAIN, [node()], [], []),
        (PLAIN, [node(state="PREEMPTED")], [], [("make again", "dev")]),
        (PLAIN, [node(state="TERMINATED")], [], [("make again", "dev")]),
        (PLAIN, [node(state="DELETING")], [], [("make again", "dev")]),
        (PLAIN, [node(state="CREATING")], [], [("wait", "dev")]),
        (PLAIN, [node(state="REPAIRING")], [], [("wait", "dev")]),
        (PLAIN, [node(state="STOPPED")], [], [("(leave)", "dev")]),
        (PLAIN, [node(state="UNKNOWN")], [], [("(leave)", "dev")]),
        (PLAIN, [node(state="PREEMPTED"), node(zone=OTHER)], [], [("(delete)", "dev")]),
        (PLAIN, [], [queue("dev", "WAITING_FOR_RESOURCES")], [("(leave)", "dev")]),
        (PLAIN, [], [queue("big", "PROVISIONING", "dev")], [("(leave)", "dev")]),
        (PLAIN, [], [queue("dev", "FAILED")], [("make again", "dev")]),
        (PLAIN, [], [queue("dev", "SUSPENDED")], [("make again", "dev")]),
        (PLAIN, [], [queue("dev", "ACTIVE")], [("make again", "dev")]),
        (PLAIN, [node(queued_resource="dev")], [queue("dev", "ACTIVE")], []),
        (PLAIN, [node(state="PREEMPTED", queued_resource="dev")], [queue("dev", "ACTIVE")], [("make again", "dev")]),
        (
            PLAIN,
            [node(state="PREEMPTED", queued_resource="pair"), LIVE],
            [PAIR],
            [("(leave)", "dev"), ("(leave)", "two")],
        ),
        (declares(type="v4-16"), [node()], [], [("(recreate)", "dev")]),
        (declares(type="v4-16"), [node(state="PREEMPTED")], [], [("make again", "dev")]),
        (declares(zones=(OTHER,)), [node()], [], [("(recreate)", "dev")]),
        (declares(labels={"team": "vision"}), [node()], [], [("change", "dev")]),
        (declares(labels={"team": "vision"}), [node(state="CREATING")], [], [("wait", "dev")]),
        (None, [node("old")], [], [("(delete)", "old")]),
        (None, [node("old", state="DELETING")], [], []),
        (None, [], [queue("old", "FAILED")], [("(delete)", "old")]),
        (None, [node("old", queued_resource="old")], [queue("old", "ACTIVE")], [("(delete)", "old")]),
    ],
)
def test_the_steps_follow_from_the_state_of_node_and_queued_resource(
    one: Declared | None, nodes: list[Node], queued: list[QueuedResource], expected: list[tuple[str, str]]
) -> None:
    assert steps(one, nodes, queued, Terms()) == expected


KEPT = {f"projects/lab/locations/{ZONE}/nodes/dev": "r1"}


@pytest.mark.parametrize(
    ("one", "nodes", "terms", "expected"),
    [
        (declares(type="v4-16"), [node()], Terms(recreate=True), [("recreate", "dev")]),
        (None, [node("old")], Terms(prune=True), [("delete", "old")]),
        (None, [node("old")], Terms(prune=True, zones=(OTHER,)), []),
        (None, [node("old")], Terms(prune=True, filters=Filters(names=("mine-*",))), []),
        (None, [node()], Terms(prune=True, kept=KEPT), [("(leave)", "dev")]),
        (PLAIN, [node(state="PREEMPTED")], Terms(kept=KEPT), [("(leave)", "dev")]),
        (PLAIN, [], Terms(kept=KEPT), [("(leave)", "dev")]),
        (PLAIN, [node(zone=OTHER, state="PREEMPTED")], Terms(kept=KEPT), [("make again", "dev")]),
        (declares(type="v4-16"), [node()], Terms(recreate=True, kept=KEPT), [("(leave)", "dev")]),
        (PLAIN, [node()], Terms(unconfigured={("lab", "dev")}), [("configure", "dev")]),
        (PLAIN, [node(state="CREATING")], Terms(unconfigured={("lab", "dev")}), [("wait", "dev")]),
    ],
)
def test_options_filters_and_recoveries_decide_what_is_done(
    one: Declared | None, nodes: list[Node], terms: Terms, expected: list[tuple[str, str]]
) -> None:
    assert steps(one, nodes, [], terms) == expected


def test_the_queued_resource_of_a_recovery_is_not_pruned() -> None:
    assert steps(None, [], [queue("q", "ACCEPTED", "dev")], Terms(prune=True, kept=KEPT)) == []
    assert steps(None, [], [queue("q", "ACCEPTED", "dev")], Terms(prune=True)) == [("delete", "q")]


@pytest.mark.parametrize(
    ("zones", "queued", "unlisted", "expected"),
    [
        ((), [], (("lab", OTHER),), "(leave)"),
        ((ZONE,), [], (("lab", OTHER),), "create"),
        ((ZONE,), [], (("lab", "-"),), "(leave)"),
        ((ZONE,), [], (("-", "-"),), "(leave)"),
        ((ZONE,), [], (("away", "-"),), "create"),
        ((ZONE,), [queue("dev", "ACTIVE")], (("lab", ZONE),), "(leave)"),
        ((ZONE,), [queue("dev", "FAILED")], (("lab", ZONE),), "(leave)"),
        ((OTHER,), [queue("dev", "ACTIVE")], (("lab", ZONE),), "(leave)"),
        ((ZONE,), [queue("dev", "ACTIVE")], (("lab", OTHER),), "make again"),
    ],
)
def test_a_node_that_may_exist_in_an_unlisted_zone_is_not_created(
    zones: tuple[str, ...], queued: list[QueuedResource], unlisted: tuple[tuple[str, str], ...], expected: str
) -> None:
    assert steps(declares(zones=zones), [], queued, Terms(), unlisted=unlisted) == [(expected, "dev")]


MINE = node("mine-1", queued_resource="pair", labels={"team": "vision"})
VISION = Filters(labels=(("team", ("vision",)),))


@pytest.mark.parametrize(
    ("sibling", "terms", "unlisted", "expected"),
    [
        (node("mine-2"), Terms(), (), ["delete", "delete"]),
        (node("mine-2"), Terms(filters=Filters(names=("mine-*",))), (), ["delete", "delete"]),
        (node("theirs"), Terms(filters=Filters(names=("mine-*",))), (), ["(leave)"]),
        (node("two", labels={"team": "audio"}), Terms(filters=VISION), (), ["(leave)"]),
        (node("dev"), Terms(kept=KEPT), (), ["(leave)", "(leave)"]),
        (None, Terms(), (), ["delete"]),
        (None, Terms(filters=VISION), (), ["delete"]),
        (None, Terms(), (("lab", ZONE),), ["(leave)"]),
    ],
)
def test_a_queued_resource_is_pruned_only_if_all_its_nodes_may_be(
    sibling: Node | None, terms: Terms, unlisted: tuple[tuple[str, str], ...], expected: list[str]
) -> None:
    others = [sibling._replace(queued_resource="pair")] if sibling else []
    pair = queue("pair", "ACTIVE", "mine-1", sibling.name if sibling else "mine-2")
    found = steps(None, [MINE, *others], [pair], replace(terms, prune=True), unlisted=unlisted)
    assert [action for action, _ in found] == expected


def test_a_step_names_all_nodes_that_it_deletes() -> None:
    held = Holdings((MINE,), (queue("pair", "ACTIVE", "mine-1", "mine-2"),))
    place = f"projects/lab/locations/{ZONE}/nodes"
    (step,) = plan.steps([], held, Terms(prune=True))
    assert step.deleted_nodes == (f"{place}/mine-1", f"{place}/mine-2")
    (step,) = plan.steps([], held, Terms())
    assert step.deleted_nodes == ()


@pytest.mark.parametrize(
    ("unlisted", "expected"),
    [
        ((), ["delete"]),
        ((("lab", ZONE),), []),
        ((("lab", "-"),), []),
        ((("-", "-"),), []),
        ((("lab", OTHER),), ["delete"]),
    ],
)
def test_a_queued_resource_in_an_unlisted_place_is_not_pruned(
    unlisted: tuple[tuple[str, str], ...], expected: list[str]
) -> None:
    found = steps(None, [], [queue("q", "ACTIVE", "two")], Terms(prune=True), unlisted=unlisted)
    assert [action for action, _ in found] == expected


@pytest.mark.parametrize(
    ("one", "here", "terms"),
    [(PLAIN, node(state="PREEMPTED"), Terms()), (None, node("old"), Terms(prune=True))],
)
def test_a_node_whose_queued_resource_could_not_be_listed_is_not_deleted(
    one: Declared | None, here: Node, terms: Terms
) -> None:
    here = here._replace(queued_resource="q")
    assert steps(one, [here], [], terms, unlisted=(("lab", ZONE),)) == [("(leave)", here.name)]


ELSEWHERE = "projects/lab/global/networks/training"


@pytest.mark.parametrize(
    ("given", "has", "setup", "words"),
    [
        ({}, {"runtime_version": "older", "preemptible": True, "service_account": "x"}, Setup(internal_only=True), []),
        ({"type": "v4-16"}, {}, None, ["type is v4-8, not v4-16"]),
        ({"runtime": "new"}, {}, None, ["runtime is base, not new"]),
        ({"spot": True}, {}, None, ["it is on-demand, not spot"]),
        ({"spot": False}, {"preemptible": True}, None, ["it is spot, not on-demand"]),
        ({"reserved": True, "spot": False}, {}, None, ["it is not reserved"]),
        ({"zones": (OTHER,)}, {}, None, [f"zone is {ZONE}, not {OTHER}"]),
        ({"zones": (OTHER, ZONE)}, {}, None, []),
        ({"service_account": "a@b"}, {}, None, ["service account is none, not a@b"]),
        ({"network": "training"}, {}, Setup(network=ELSEWHERE), []),
        ({"network": ELSEWHERE}, {}, Setup(network=ELSEWHERE), []),
        ({"network": "default"}, {}, Setup(network=ELSEWHERE), ["network is training, not default"]),
        ({"internal_only": True}, {}, Setup(), ["it has external addresses"]),
        ({"scopes": ("a",)}, {}, Setup(scopes=("b", "a")), ["scopes are a, b, not a"]),
        ({"scopes": ("a", "b")}, {}, Setup(scopes=("b", "a")), []),
    ],
)
def test_only_what_the_file_sets_is_compared(
    given: Mapping[str, Any], has: Mapping[str, Any], setup: Setup | None, words: list[str]
) -> None:
    assert plan.differences(declares(**given), node(**has), setup) == words


DISKS = ({"source": "projects/1/zones/z/disks/data", "mode": "READ_ONLY"}, {"source": "x/extra", "mode": "READ_WRITE"})


@pytest.mark.parametrize(
    ("given", "detach", "words", "extra"),
    [
        ({"labels": {"a": "1", "b": "2"}}, False, ["label b=2 (now 3)"], []),
        (
            {"metadata": {"same": "s", "secret": "new", "more": "m"}},
            False,
            ["metadata secret differs", "metadata more is"],
            [],
        ),
        ({"disks": {"data": "ro"}}, False, [], ["extra"]),
        ({"disks": {"data": "rw", "extra": "rw"}}, False, ["disk data:rw (attached in the other mode)"], []),
        ({"disks": {"data": "ro", "new": "ro"}}, True, ["disk new:ro attached", "disk extra detached"], ["extra"]),
        ({}, True, [], []),
    ],
)
def test_labels_metadata_and_disks_are_changed_without_touching_others(
    given: Mapping[str, Any], detach: bool, words: list[str], extra: list[str]
) -> None:
    has = node(labels={"a": "1", "b": "3", "theirs": "x"}, data_disks=DISKS)
    setup = Setup(metadata={"same": "s", "secret": "old", "ssh-keys": "k"})
    change, why, more = plan.changes(declares(**given), has, setup, detach=detach)
    assert [said.startswith(word) for said, word in zip(why, words, strict=True)] == [True] * len(words)
    assert more == extra
    assert "new" not in repr(change) or "disk new:ro attached" in why, "values of the metadata are secret"
    assert bool(change) == bool(words)
