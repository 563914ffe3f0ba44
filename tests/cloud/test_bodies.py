"""The request that recreates a node from the API's description of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.cloud.tpu_v2.types import cloud_tpu

from tpu_ops.cloud import bodies

NAME = "projects/p/locations/z/nodes/pod"
LONG = {"type_": "V4", "topology": "4x4x16"}


class Tpu:
    """Answers with one node, or with what is given."""

    def __init__(self, answer: Any = None, **fields: Any) -> None:
        self._answer = answer or cloud_tpu.Node(name=NAME, id=7, **fields)

    def call(self, *_: object, **__: object) -> Any:
        return self._answer


@pytest.mark.parametrize(
    ("accelerator_type", "config", "body"),
    [
        ("v4-512", LONG, {"accelerator_config": LONG}),
        ("v5p-8", {"type_": "V5P", "topology": "2x2x1"}, {"accelerator_config": {"type_": "V5P", "topology": "2x2x1"}}),
        ("v3-32", {"type_": "V3", "topology": "4x4"}, {"accelerator_type": "v3-32"}),
        ("v4-32", None, {"accelerator_type": "v4-32"}),
        ("", {"type_": "V4", "topology": "2x2x4"}, {"accelerator_config": {"type_": "V4", "topology": "2x2x4"}}),
    ],
)
def test_a_node_has_the_topology_again_that_was_chosen(
    accelerator_type: str, config: dict[str, str] | None, body: dict[str, Any]
) -> None:
    tpu: Any = Tpu(accelerator_type=accelerator_type, accelerator_config=config, runtime_version="v2-base")
    made, node_id, *_ = bodies.node_body(tpu, NAME)
    assert made == {"runtime_version": "v2-base", **body}
    assert node_id == "7"
    again = cloud_tpu.Node.from_json(json.dumps(made))
    assert again.accelerator_config.topology == body.get("accelerator_config", {}).get("topology", "")


#: A field with a number that no version of the API has, as bytes of protobuf.
NEW = b"\xfa\xff\x07\x02hi"
QUEUED = "projects/p/locations/z/queuedResources/q"


def with_new(message: Any, *path: str) -> Any:
    """Return an answer in which a message has a field that is new: the whole, or the one that fields lead to."""
    found = type(message).pb(message)
    for name in path:
        found = getattr(found, name)
        found = found[0] if hasattr(found, "append") else found
    found.MergeFromString(NEW)
    return message


def queued() -> Any:
    node = {"accelerator_type": "v4-8", "runtime_version": "rt", "labels": {"a": "b"}, "scheduling_config": {}}
    spec = {"parent": "projects/p/locations/z", "node_id": "pod", "node": node}
    resource = {"name": QUEUED, "spot": {}, "tpu": {"node_spec": [spec]}, "state": {"state": "ACTIVE"}}
    return cloud_tpu.QueuedResource(resource)


@pytest.mark.parametrize(
    ("path", "lacks"),
    [
        ((), True),
        (("spot",), True),
        (("tpu", "node_spec"), True),
        (("tpu", "node_spec", "node"), True),
        (("tpu", "node_spec", "node", "scheduling_config"), True),
        # It is the service that tells this, and nobody asks for it.
        (("state",), False),
    ],
)
def test_a_queued_resource_with_unknown_fields_is_reported(path: tuple[str, ...], lacks: bool) -> None:
    known: Any = Tpu(queued())
    found = bodies.queued(known, QUEUED)
    assert found is not None
    assert not found.lacks
    new: Any = Tpu(with_new(queued(), *path))
    again = bodies.queued(new, QUEUED)
    assert again is not None
    assert (again.body, again.lacks) == (found.body, lacks)


def test_a_queued_resource_is_requested_by_project_id_not_by_number() -> None:
    answer = queued()
    answer.tpu.node_spec[0].parent = "projects/123456/locations/z"
    tpu: Any = Tpu(answer)
    found = bodies.queued(tpu, QUEUED)
    assert found is not None
    assert found.body["tpu"]["node_spec"][0]["parent"] == "projects/p/locations/z"


SPEC = {"accelerator_type": "v4-8", "metadata": {"script": "s", "ssh-keys": "ada:A"}, "labels": {"team": "x"}}


def several(keys: str | None, **fields: Any) -> dict[str, Any]:
    metadata = {"script": "s", "service": "added"} | ({} if keys is None else {"ssh-keys": keys})
    return {"accelerator_type": "v4-8", "metadata": metadata, **fields}


@pytest.mark.parametrize(
    ("nodes", "changed"),
    [
        ((several("ada:A\nbob:B"), several("bob:B\nada:A\neve:E")), {"ssh-keys": "ada:A\nbob:B", "labels": None}),
        ((several("bob:B"), several("eve:E")), {"ssh-keys": None, "labels": None}),
        ((several(None), several(None)), {"ssh-keys": None, "labels": None}),
        ((several("ada:A", labels={"team": "y"}),) * 2, {"ssh-keys": "ada:A", "labels": {"team": "y"}}),
        (
            (several("ada:A", labels={"team": "y"}), several("ada:A", labels={"team": "z"})),
            {"ssh-keys": "ada:A", "labels": {"team": "x"}},
        ),
    ],
)
def test_slices_of_one_entry_get_the_common_keys_and_requested_fields(
    nodes: tuple[dict[str, Any], ...], changed: dict[str, Any]
) -> None:
    body = {"tpu": {"node_spec": [{"multislice_params": {"node_count": 2}, "node": SPEC}]}}
    names = [f"projects/p/locations/z/nodes/q-{index}" for index in (0, 1)]
    spec = bodies.as_updated(QUEUED, body, dict(zip(names, nodes, strict=True)))["tpu"]["node_spec"][0]
    metadata = {"script": "s"} | ({"ssh-keys": changed["ssh-keys"]} if changed["ssh-keys"] else {})
    labels = {"labels": changed["labels"]} if changed["labels"] else {}
    assert spec["node"] == {"accelerator_type": "v4-8", "metadata": metadata, **labels}


@pytest.mark.parametrize(
    ("path", "lacks"), [((), True), (("scheduling_config",), True), (("network_endpoints",), False)]
)
def test_a_node_with_unknown_fields_is_reported(path: tuple[str, ...], lacks: bool) -> None:
    fields: dict[str, Any] = {"labels": {"a": "b"}, "scheduling_config": {"spot": True}, "network_endpoints": [{}]}
    known: Any = Tpu(**fields)
    assert bodies.node_body(known, NAME)[3] is False
    new: Any = Tpu(with_new(cloud_tpu.Node(name=NAME, id=7, **fields), *path))
    assert bodies.node_body(new, NAME)[3] is lacks
