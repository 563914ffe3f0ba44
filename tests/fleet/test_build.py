"""Recorded answers of the API become nodes.

Each ``recorded/NAME.json`` is an answer to ListNodes as the API's REST reference gives its form, and
``recorded/NAME.nodes.json`` what is to become of it: of each node, the fields that are not a new Node's own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.cloud import tpu_v2
from google.protobuf import json_format

from tpu_ops.cloud.nodes import combine, node_data
from tpu_ops.errors import CloudError
from tpu_ops.fleet import build, hostvars
from tpu_ops.fleet.model import Node, workers_of

RECORDED = Path(__file__).parent / "recorded"
ANSWERS = sorted(path.stem for path in RECORDED.glob("*.json") if not path.stem.endswith(".nodes"))


def answer(name):
    """Return an answer as the client's protobuf."""
    message = tpu_v2.ListNodesResponse.pb(tpu_v2.ListNodesResponse())
    return json_format.Parse((RECORDED / f"{name}.json").read_text(), message, ignore_unknown_fields=True)


def listing(name):
    page = answer(name)
    return combine({("grant", "-"): ([node_data(node) for node in page.nodes], list(page.unreachable))}, [])


def told(node):
    """Return what is known of a node, as JSON has it."""
    empty = Node("", "", "", "", "").to_json()
    return json.loads(json.dumps({key: value for key, value in node.to_json().items() if value != empty[key]}))


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_becomes_the_expected_nodes_and_warnings(name):
    listed = listing(name)
    found = {"nodes": [told(node) for node in build.nodes(listed.nodes)], "warnings": list(listed.warnings)}
    assert found == json.loads((RECORDED / f"{name}.nodes.json").read_text())


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_was_answered_has_groups_and_variables(name):
    nodes = build.nodes(listing(name).nodes)
    groups = hostvars.groups(nodes)
    for worker in workers_of(nodes):
        assert json.loads(json.dumps(hostvars.facts(worker)))["node"] == worker.node.name
        assert all(group.isascii() and group.isidentifier() for group in groups[worker.node.full_name])


@pytest.mark.parametrize("name", ANSWERS)
def test_the_order_of_nodes_does_not_depend_on_the_order_of_answers(name):
    listed = listing(name).nodes
    assert build.nodes(listed) == build.nodes(reversed(listed))


def test_values_of_metadata_never_leave_the_boundary():
    assert "secret" in (RECORDED / "pod.json").read_text()
    assert "secret" not in json.dumps(list(listing("pod").nodes))


def test_every_field_of_a_node_is_recorded_with_a_value_of_its_own():
    seen: dict[str, set[str]] = {}
    for name in ANSWERS:
        for node in build.nodes(listing(name).nodes):
            for key, value in node.to_json().items():
                seen.setdefault(key, set()).add(json.dumps(value))
    # Instance names come with guest attributes.
    assert [key for key in Node("n", "p", "z", "1", "t").to_json() if len(seen[key]) < 2] == ["instance_names"]


def test_a_name_of_another_form_is_refused():
    with pytest.raises(CloudError, match="documented form"):
        build.node(node_data(tpu_v2.Node.pb(tpu_v2.Node(name="projects/lab/locations/us-central2-b/nodes/a b"))))


def test_a_time_past_the_calendar_is_none():
    raw = tpu_v2.Node.pb(tpu_v2.Node(name="projects/lab/locations/us-central2-b/nodes/n"))
    raw.create_time.seconds = 2**60
    raw.symptoms.add().create_time.nanos = -1
    node = build.node(node_data(raw))
    assert (node.create_time, node.symptoms[0]["create_time"]) == ("", "")
