"""Groups and variables of hosts."""

from __future__ import annotations

from tests.support.nodes import node
from tpu_ops.cloud.node import workers_of
from tpu_ops.fleet import hostvars


def test_groups_are_valid_and_never_a_hosts_name():
    nodes = [node(), node("twin", node_id="3"), node("twin", zone="us-west4-a", node_id="4"), node("a-b", node_id="5")]
    groups = hostvars.groups(nodes)
    assert groups[nodes[0].full_name] == ("node_pod", "zone_us_central2_b", "type_v4_16", "state_ready")
    assert groups[nodes[2].full_name][0] == "node_twin_us_west4_a"
    names = {name for found in groups.values() for name in found}
    assert all(name.isidentifier() for name in names)
    assert not names & {worker.host for worker in workers_of(nodes)}


def test_nodes_whose_names_fall_together_have_groups_of_their_own():
    nodes = [node("a-b", node_id="1"), node("a_b", node_id="2")]
    first, second = (hostvars.groups(nodes)[entry.full_name][0] for entry in nodes)
    assert first != second
    assert first.startswith("node_a_b_")


def test_symptoms_are_told_to_the_worker_that_has_them():
    symptoms = ({"worker_id": "1", "type": "A"}, {"worker_id": "", "type": "B"})
    first, second = (hostvars.facts(worker)["symptoms"] for worker in workers_of([node(symptoms=symptoms)]))
    assert [entry["type"] for entry in first] == ["B"]
    assert [entry["type"] for entry in second] == ["A", "B"]
