"""Recorded answers of the API become nodes: a table of JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.cloud import tpu_v2
from google.protobuf import json_format

from tpu_ops.cloud.nodes import node_data
from tpu_ops.errors import CloudError
from tpu_ops.fleet import build
from tpu_ops.fleet.model import Node

ANSWERS = json.loads((Path(__file__).parent / "answers.json").read_text())


def built(answer):
    raw = json_format.ParseDict(answer, tpu_v2.Node.pb(tpu_v2.Node()))
    return build.node(json.loads(json.dumps(node_data(raw))))


@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: case["what"].replace(" ", "-"))
def test_recorded_answer(case):
    node = built(case["answer"])
    seen = {key: getattr(node, key) for key in case["node"]}
    assert json.loads(json.dumps(seen)) == case["node"]
    assert Node.from_json(json.loads(json.dumps(node.to_json()))) == node


def test_values_of_metadata_never_leave_the_boundary():
    assert "secret" not in json.dumps(built(ANSWERS[0]["answer"]).to_json())


def test_a_state_newer_than_the_client_is_shown_as_its_number():
    raw = tpu_v2.Node.pb(tpu_v2.Node(name="projects/lab/locations/us-central2-b/nodes/n"))
    raw.state = 77
    assert build.node(node_data(raw)).state == "77"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "pod",
        "projects/lab/locations/us-central2-b/nodes/a b",
        "projects/lab/locations/us-central2-b/nodes/a\n",
        "projects/lab/locations/us-central2-b/nodes/../x",
        "projects/{{ x }}/locations/us-central2-b/nodes/a",
    ],
)
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(CloudError, match="documented form"):
        built({"name": name})


def test_the_order_of_nodes_does_not_depend_on_the_order_of_answers():
    data = [node_data(json_format.ParseDict(case["answer"], tpu_v2.Node.pb(tpu_v2.Node()))) for case in ANSWERS]
    assert build.nodes(data) == build.nodes(reversed(data))
