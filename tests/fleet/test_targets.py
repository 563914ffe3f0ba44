"""The workers that a target stands for."""

from __future__ import annotations

import pytest
from ClusterShell import NodeSet

from tests.support.nodes import node
from tpu_ops.cloud.node import node_labels, workers_of
from tpu_ops.errors import UsageError
from tpu_ops.fleet import hostvars, targets

FLEET = workers_of(
    [
        node(count=4),
        node("solo", node_id="2", count=1),
        node("twin", zone="us-central2-b", node_id="3", count=1),
        node("twin", zone="us-west4-a", node_id="4", count=1),
        node("pod-w9", node_id="5", count=1),
    ]
)


@pytest.mark.parametrize(
    ("target", "hosts"),
    [
        ("pod", ["pod-w0", "pod-w1", "pod-w2", "pod-w3"]),
        ("pod-w2", ["pod-w2"]),
        ("pod-w[0-1,3]", ["pod-w0", "pod-w1", "pod-w3"]),
        ("solo,pod-w3", ["pod-w3", "solo-w0"]),
        ("pod!pod-w[1-3]", ["pod-w0"]),
        ("pod & pod-w[2-3]", ["pod-w2", "pod-w3"]),
        ("pod-w[0-1]^pod-w[1-2]", ["pod-w0", "pod-w2"]),
        ("twin.us-west4-a", ["twin.us-west4-a-w0"]),
        ("pod-w9", ["pod-w9-w0"]),
        ("@zone_us_west4_a", ["twin.us-west4-a-w0"]),
        ("@node_twin_us_west4_a,solo", ["solo-w0", "twin.us-west4-a-w0"]),
        ("@all!pod!@zone_us_west4_a", ["pod-w9-w0", "solo-w0", "twin.us-central2-b-w0"]),
    ],
)
def test_targets(target, hosts):
    assert [worker.host for worker in targets.select(FLEET, target)] == hosts


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("po", ["'po'", "did you mean pod"]),
        ("twin", ["several nodes", "twin.us-central2-b or twin.us-west4-a"]),
        ("pod-w[0-7]", ["pod-w4"]),
        ("pod-w[", ["node set"]),
        ("", ["missing"]),
        ("pod,", ["missing"]),
        ("pod!pod", ["no worker"]),
        ("@al", ["no group is called 'al'", "did you mean @all"]),
        ("@", ["no group is called ''", "groups: "]),
        ("all", ["no node or worker is called 'all'", "for all workers, write @all"]),
        ("zone_us_west4_a", ["this is the name of a group: write @zone_us_west4_a"]),
        ("*", ["'*'", "known nodes"]),
        *((text, ["cannot have brackets", text]) for text in ("*[0]", "?-w[0]", "@x[0]", "@x:y[0]", "@@[1]", "@*[0]")),
    ],
)
def test_a_wrong_target_is_explained(target, words):
    with pytest.raises(UsageError) as caught:
        targets.select(FLEET, target)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_node_set_of_too_many_names_is_refused_before_it_is_made(monkeypatch):
    workers = workers_of([node(count=2)])
    made = []
    for target in ("pod-w[0-99999999]", "pod-w[0-9999]x[0-9999]", "pod-w[1" + "0" * 50 + "]", "pod-w[0-99999999"):
        with monkeypatch.context() as patch:
            patch.setattr(NodeSet, "NodeSet", lambda *names, **options: made.append(names))
            with pytest.raises(UsageError, match="more than 100000 names"):
                targets.select(workers, target)
    assert made == []
    with pytest.raises(UsageError, match="pod has workers 0 to 1"):
        targets.select(workers, "pod-w[0-9]")
    with pytest.raises(UsageError) as caught:
        targets.select(workers, "x" * 100_000)
    assert len(str(caught.value)) < 500


def test_a_name_of_both_a_node_and_a_worker_is_ambiguous():
    workers = workers_of([node(count=2), node("pod-w0", node_id="2", count=1)])
    with pytest.raises(UsageError, match="pod-w0"):
        targets.select(workers, "pod-w0")


def test_an_empty_fleet_says_how_to_get_a_node():
    with pytest.raises(UsageError, match="tpu_ops create"):
        targets.select([], "pod")


@pytest.mark.parametrize(
    ("shown", "target", "words"),
    [
        ((), "none", "the fleet's filters exclude all of its nodes (pod, solo): see `names`"),
        ((), "@all", "the fleet's filters exclude all of its nodes (pod, solo): see `names`"),
        (("solo",), "pod", "the fleet's filters exclude it: see `names`"),
        (("solo",), "pod-w3", "the fleet's filters exclude it: see `names`"),
        (("solo",), "pods", "known nodes: solo"),
    ],
)
def test_filtered_nodes_and_missing_nodes_are_distinguished(shown, target, words):
    listed = [node(count=4), node("solo", node_id="2", count=1)]
    with pytest.raises(targets.UnknownError) as caught:
        targets.select(workers_of([one for one in listed if one.name in shown]), target, listed=listed)
    assert words in caught.value.fix


def test_groups_are_called_as_in_the_inventory_whatever_the_filters_hide():
    """Ansible names groups by all listed nodes."""
    listed = [
        node(zone=zone, name=name, node_id=node_id, queued_resource="big", count=count)
        for zone, name, node_id, count in (
            ("us-central2-b", "pod-a", "1", 2),
            ("us-west4-a", "pod_a", "2", 2),
            ("us-east1-d", "none-yet", "3", 0),
        )
    ]
    names = hostvars.groups(listed)[listed[0].full_name]
    assert [name.count("_") for name in (names[0], names[-1])] == [3, 2]
    workers = workers_of(listed[:1], node_labels(listed))
    for name in (names[0], names[-1]):
        assert targets.select(workers, f"@{name}", listed=listed) == workers
    for name in ("node_pod_a", "queued_big"):
        with pytest.raises(UsageError, match=f"no group is called '{name}'.*did you mean @{name}_"):
            targets.select(workers, f"@{name}", listed=listed)


def test_groups_hold_the_workers_whose_nodes_are_in_the_asked_states():
    fleet = workers_of([node(), node("off", node_id="2", state="STOPPED")])
    assert [worker.label for worker in targets.select(fleet, "@all", ["READY"])] == ["pod", "pod"]
    assert len(targets.select(fleet, "@state_stopped")) == 2
    for target in ("@node_off", "@node_off,@state_stopped"):
        with pytest.raises(targets.UnknownError, match=r"matches no worker.*groups hold workers .* that are READY; "):
            targets.select(fleet, target, ["READY"])
    with pytest.raises(UsageError, match=r"matches no worker.*check the operators"):
        targets.select(fleet, "@node_off!off", ["READY"])
    with pytest.raises(targets.UnknownError, match=r"matches no worker.*the fleet has no workers: create a node"):
        targets.select([], "@all", ["READY"])
    with pytest.raises(targets.UnknownError, match="node pod is READY, but the API lists no network"):
        targets.select([], "@all", ["READY"], [node(count=0)])
