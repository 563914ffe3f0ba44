"""Any fleet survives builder, cache and snapshot as it is, and has names that never meet."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from google.cloud import tpu_v2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.drawn import matching, text
from tpu_ops import config, texts
from tpu_ops.cloud import parsing
from tpu_ops.cloud.accelerators import catalogue
from tpu_ops.cloud.listing import Answered, combine
from tpu_ops.cloud.node import Node, node_labels, workers_of
from tpu_ops.config import Filters
from tpu_ops.fleet import hostvars, selection
from tpu_ops.fleet.publishing import documents
from tpu_ops.fleet.state import Files, Question, Snapshot

few = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

GROUP = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
QUESTION = Question(("lab",), (), "")

#: Short and alike on purpose, so that fleets have nodes of one name, and names that only differ where groups do not.
NAMES = st.sampled_from(["a", "a-b", "a_b", "a-w0", "a-w0-w1", "node", "b"]) | matching("[a-z][a-z0-9_-]{0,8}")
ZONES = st.sampled_from(["z", "z-a", "a", "us-central2-b"]) | matching("[a-z][a-z0-9-]{0,8}")
PROJECTS = st.sampled_from(["p", "a", "example.com:p", "p.z"]) | matching("[a-z0-9][a-z0-9.:-]{0,8}")

#: Anything that UTF-8 can say, which is what a protobuf can hold.
TEXT = text(12) | st.sampled_from(["{{ 7 }}", "#jinja2:", "a-b", "a_b", "\x00", "\u2028", "../..", "READY"])
ADDRESS = st.ip_addresses().map(str) | TEXT
FLAG = st.booleans()


@st.composite
def answers(draw):
    """What the API says of a node: a raw google.cloud.tpu.v2.Node."""
    project, zone, name = draw(PROJECTS), draw(ZONES), draw(NAMES)
    # A few for all fields of a node: what is drawn for each of them costs most of these tests' time.
    texts = st.sampled_from(draw(st.lists(TEXT, min_size=1, max_size=4)))
    addresses = st.sampled_from(draw(st.lists(ADDRESS, min_size=1, max_size=3)))
    numbers = st.integers(-1, 20)
    raw = tpu_v2.Node.pb(tpu_v2.Node(name=f"projects/{project}/locations/{zone}/nodes/{name}"))
    raw.id = draw(st.integers(-(2**63), 2**63 - 1))
    raw.accelerator_type = draw(st.sampled_from([kind.name for kind in catalogue()]) | texts)
    raw.accelerator_config.topology, raw.runtime_version = draw(texts), draw(texts)
    raw.state, raw.health, raw.health_description = draw(numbers), draw(numbers), draw(texts)
    for _ in range(draw(st.integers(0, 3))):
        raw.network_configs.add()
    for _ in range(draw(st.integers(0, 5))):
        raw.network_endpoints.add(ip_address=draw(addresses), access_config={"external_ip": draw(addresses)})
    raw.labels.update(draw(st.dictionaries(texts, texts, max_size=3)))
    if draw(FLAG):
        symptom = raw.symptoms.add(worker_id=draw(texts), symptom_type=draw(numbers), details=draw(texts))
        symptom.create_time.seconds = draw(st.integers(-(2**63), 2**63 - 1))
    raw.queued_resource, raw.multislice_node = draw(texts), draw(FLAG)
    raw.scheduling_config.preemptible, raw.scheduling_config.spot = draw(FLAG), draw(FLAG)
    raw.scheduling_config.reserved = draw(FLAG)
    if draw(FLAG):
        raw.data_disks.add(source_disk=draw(texts), mode=draw(numbers))
    raw.service_account.email = draw(texts)
    raw.create_time.seconds = draw(st.integers(-(2**63), 2**63 - 1))
    raw.metadata.update(dict.fromkeys(draw(st.lists(texts, max_size=2)), "secret"))
    return raw


def fleet_of(listed):
    return combine({("p", "-"): Answered([parsing.node(raw) for raw in listed])}, []).nodes


FLEETS = st.lists(answers(), max_size=6, unique_by=(lambda raw: raw.name, lambda raw: raw.id)).map(fleet_of)


@pytest.fixture(scope="module")
def fleet_settings(tmp_path_factory):
    """Settings of some fleet."""
    file = tmp_path_factory.mktemp("fleet") / "inventory" / "tpu_vm.yml"
    environ = {"HOME": "/nowhere", "TPU_OPS_STATE": str(file.parent.parent / "state")}
    return config.from_data({"plugin": "tpu_vm", "projects": ["p"], "user": "ada"}, file, environ)


@few
@given(FLEETS)
def test_nodes_and_variables_go_through_json_text_unchanged(nodes):
    for node in nodes:
        assert Node.from_json(json.loads(json.dumps(node.to_json()))) == node
    for worker in workers_of(nodes):
        facts = hostvars.facts(worker)
        assert json.loads(json.dumps(facts)) == facts
        assert [key for key in facts if not key.isidentifier()] == []


@few
@given(FLEETS, st.floats(0, 2**33))
def test_a_fleet_goes_through_its_snapshot_unchanged(tmp_path: Path, nodes, asked_at):
    files, snapshot = Files(tmp_path), Snapshot(asked_at, nodes)
    files.write_snapshot(QUESTION, snapshot)
    assert files.read_snapshot(QUESTION) == snapshot
    assert files.read_snapshot(QUESTION._replace(zones=("z",))) is None


@few
@given(FLEETS)
def test_whatever_was_answered_can_be_published_and_printed(nodes):
    text = documents.document(documents.EARLIEST, ("lab",), (), nodes, {}).text()
    assert documents.parse(text.encode(), "here", documents.EARLIEST + 1).nodes == nodes
    for node in nodes:
        shown = (node.accelerator_type, node.runtime_version, node.state, node.health, node.topology)
        shown += (node.queued_resource, node.service_account, node.create_time, *node.metadata_keys)
        assert "".join(shown).isprintable()


@few
@given(FLEETS, st.randoms(use_true_random=False))
def test_labels_hosts_and_groups_are_unique_and_independent_of_order(nodes, random):
    shuffled = list(nodes)
    random.shuffle(shuffled)
    labels = node_labels(nodes)
    assert labels == node_labels(shuffled)
    assert len(set(labels.values())) == len(nodes)
    workers = workers_of(nodes)
    assert workers == workers_of(shuffled)
    assert [(worker.label, worker.index) for worker in workers] == sorted(
        ((worker.label, worker.index) for worker in workers), key=lambda one: (texts.natural(one[0]), one[1])
    )
    assert len({worker.host for worker in workers}) == len(workers) == sum(node.worker_count for node in nodes)
    groups = hostvars.groups(nodes)
    assert groups == hostvars.groups(shuffled)
    assert len({names[0] for names in groups.values()}) == len(nodes)
    named = {group for names in groups.values() for group in names}
    assert [group for group in named if not GROUP.fullmatch(group)] == []
    assert not named & {worker.host for worker in workers}


@few
@given(
    FLEETS,
    st.builds(
        Filters,
        names=st.lists(NAMES | st.sampled_from(["*", "a*", "[a", "[!a]*", "?"]), max_size=2).map(tuple),
        labels=st.lists(st.tuples(TEXT, st.lists(TEXT, max_size=2).map(tuple)), max_size=1).map(tuple),
        accelerator_types=st.lists(st.sampled_from(["*", "v4-*", "v?-8", "["]) | TEXT, max_size=2).map(tuple),
    ),
)
def test_filters_choose_among_the_nodes_and_rename_nothing(fleet_settings, nodes, filters):
    chosen, workers, labels = selection.of(fleet_settings._replace(filters=filters), nodes)
    assert [node for node in nodes if node in chosen] == list(chosen)
    assert labels == node_labels(nodes)
    assert workers == [worker for worker in workers_of(nodes) if worker.node in chosen]
    assert selection.of(fleet_settings, nodes) == (nodes, workers_of(nodes), labels)
