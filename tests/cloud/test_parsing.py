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

from tpu_ops.cloud import parsing
from tpu_ops.cloud.listing import Answered, combine, read
from tpu_ops.cloud.node import Node, node_labels, workers_of
from tpu_ops.errors import CloudError
from tpu_ops.fleet import hostvars
from tpu_ops.fleet.publishing import documents

RECORDED = Path(__file__).parent / "recorded"
ANSWERS = sorted(path.stem for path in RECORDED.glob("*.json") if not path.stem.endswith(".nodes"))


def answer(name):
    """Return an answer as the client's protobuf."""
    message = tpu_v2.ListNodesResponse.pb(tpu_v2.ListNodesResponse())
    return json_format.Parse((RECORDED / f"{name}.json").read_text(), message, ignore_unknown_fields=True)


def listing(name):
    found = Answered()
    read(answer(name), found)
    return combine({("grant", "-"): found}, [])


def told(node):
    """Return what is known of a node, as JSON has it."""
    empty = Node("", "", "", "", "").to_json()
    return json.loads(json.dumps({key: value for key, value in node.to_json().items() if value != empty[key]}))


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_becomes_the_expected_nodes_and_warnings(name):
    listed = listing(name)
    found = {"nodes": [told(node) for node in listed.nodes], "warnings": list(listed.warnings)}
    assert found == json.loads((RECORDED / f"{name}.nodes.json").read_text())


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_was_answered_has_groups_and_variables(name):
    nodes = listing(name).nodes
    groups = hostvars.groups(nodes)
    for worker in workers_of(nodes):
        assert json.loads(json.dumps(hostvars.facts(worker)))["node"] == worker.node.name
        assert all(group.isascii() and group.isidentifier() for group in groups[worker.node.full_name])


@pytest.mark.parametrize("name", ANSWERS)
def test_the_order_of_nodes_does_not_depend_on_the_order_of_answers(name):
    found = Answered()
    read(answer(name), found)
    turned = Answered(found.nodes[::-1], found.unreachable, found.misnamed)
    assert combine({("grant", "-"): turned}, []).nodes == listing(name).nodes


def test_values_of_metadata_never_leave_the_boundary():
    assert "secret" in (RECORDED / "pod.json").read_text()
    assert "secret" not in json.dumps([node.to_json() for node in listing("pod").nodes])


def test_every_field_of_a_node_is_recorded_with_a_value_of_its_own():
    seen: dict[str, set[str]] = {}
    for name in ANSWERS:
        for node in listing(name).nodes:
            for key, value in node.to_json().items():
                seen.setdefault(key, set()).add(json.dumps(value))
    # Instance names come with guest attributes.
    assert [key for key in Node("n", "p", "z", "1", "t").to_json() if len(seen[key]) < 2] == ["instance_names"]


def test_a_name_of_another_form_is_refused():
    with pytest.raises(CloudError, match="documented form"):
        parsing.node(tpu_v2.Node.pb(tpu_v2.Node(name="projects/lab/locations/us-central2-b/nodes/a b")))


def test_a_time_past_the_calendar_is_none():
    raw = tpu_v2.Node.pb(tpu_v2.Node(name="projects/lab/locations/us-central2-b/nodes/n"))
    raw.create_time.seconds = 2**60
    raw.symptoms.add().create_time.nanos = -1
    node = parsing.node(raw)
    assert (node.create_time, node.symptoms[0]["create_time"]) == ("", "")


@pytest.mark.parametrize(
    "text", ["\x1b[31mred\nnext\u2028", "\u202e\x9b", "x\0" * 100_000], ids=["lines", "signs", "long"]
)
def test_a_node_of_hostile_texts_is_in_one_line_and_can_be_published(text):
    raw = tpu_v2.Node.pb(tpu_v2.Node(name="projects/lab/locations/us-central2-b/nodes/n", state=77, health=-1))
    raw.accelerator_type = raw.runtime_version = raw.accelerator_config.topology = raw.queued_resource = text
    raw.service_account.email = raw.health_description = raw.labels[text] = raw.metadata[text] = text
    raw.symptoms.add(worker_id=text, details=text)
    raw.data_disks.add(source_disk=text)
    raw.network_endpoints.add(ip_address=text)
    node = parsing.node(raw)
    document = documents.document(documents.EARLIEST, ("lab",), (), (node,), {}).text()
    assert documents.parse(document.encode(), "here", documents.EARLIEST + 1).nodes == (node,)
    for shown in (
        node.accelerator_type,
        node.runtime_version,
        node.topology,
        node.queued_resource,
        *node.metadata_keys,
    ):
        assert shown.isprintable()
        assert 0 < len(shown) <= 256
    assert (node.state, node.health) == ("77", "HEALTH_UNSPECIFIED")
    assert node.labels == {text[:65536]: text[:65536]}


def test_an_id_below_zero_is_none():
    raw = tpu_v2.Node.pb(tpu_v2.Node(name="projects/lab/locations/us-central2-b/nodes/n", id=-1))
    assert parsing.node(raw).node_id == ""


def test_a_size_past_reason_is_a_type_that_is_not_known():
    kind = "v4-" + "8" * 40
    raw = tpu_v2.Node.pb(tpu_v2.Node(name="projects/lab/locations/us-central2-b/nodes/n", accelerator_type=kind))
    assert parsing.node(raw).chips == 0


@pytest.mark.parametrize(
    ("projects", "labels"),
    [
        (["example.com:p", "p"], ["solo.z-a.example.com.p", "solo.z-a.p"]),
        (["example.com:p", "example.com.p"], ["solo.z-a.example.com:p", "solo.z-a.example.com.p"]),
    ],
)
def test_a_project_of_a_domain_is_in_names_without_its_colon(projects, labels):
    nodes = [Node("solo", project, "z-a", "1", "v4-8") for project in projects]
    assert list(node_labels(nodes).values()) == labels
