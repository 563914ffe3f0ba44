"""What makes a node again as it was, of what the API tells of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.cloud.tpu_v2.types import cloud_tpu

from tpu_ops.cloud import remaking

NAME = "projects/p/locations/z/nodes/pod"
LONG = {"type_": "V4", "topology": "4x4x16"}


class Tpu:
    """Answers with one node."""

    def __init__(self, **fields: Any) -> None:
        self._node = cloud_tpu.Node(name=NAME, id=7, **fields)

    def call(self, *_: object, **__: object) -> Any:
        return self._node


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
    made, node_id, _ = remaking.node_body(tpu, NAME)
    assert made == {"runtime_version": "v2-base", **body}
    assert node_id == "7"
    again = cloud_tpu.Node.from_json(json.dumps(made))
    assert again.accelerator_config.topology == body.get("accelerator_config", {}).get("topology", "")
