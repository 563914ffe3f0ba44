"""Messages about nodes that are not serving."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from tests.support.nodes import node
from tpu_ops.cloud import remedies
from tpu_ops.cloud.node import workers_of

PLACE = "--zone us-central2-b --project lab"


def test_workers_are_in_the_order_of_the_numbers_in_their_names() -> None:
    nodes = [node(name, count=1) for name in ("tpu-10", "tpu-9", "tpu-1")]
    assert [worker.host for worker in workers_of(nodes)] == ["tpu-1-w0", "tpu-9-w0", "tpu-10-w0"]


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({}, ""),
        ({"spot": True, "preemptible": True}, " --spot"),
        ({"preemptible": True}, " --spot"),
        ({"runtime_version": "tpu-ubuntu2204-base"}, ""),
        ({"runtime_version": "v2 alpha"}, " --runtime 'v2 alpha'"),
        ({"labels": {"team": "vision", "a": "$x `y`"}}, " --label 'a=$x `y`' --label team=vision"),
        (
            {"spot": True, "labels": {"a": "b"}, "runtime_version": "other"},
            " --runtime other --spot --label a=b",
        ),
    ],
)
def test_a_node_that_was_taken_away_is_made_again_as_it_was(fields: dict[str, Any], more: str) -> None:
    fix = remedies.until_ready(node("pod2", state="PREEMPTED", **fields))
    delete, create = f"tpu_ops delete pod2 {PLACE}", f"tpu_ops create pod2 --type v4-16 {PLACE}{more}"
    assert fix == f"the node does not come back by itself: `{delete}`, then `{create}`"


def test_a_node_of_a_reservation_is_not_made_again_on_demand() -> None:
    fix = remedies.until_ready(node("pod2", state="PREEMPTED", reserved=True))
    assert fix.startswith(f"the node does not come back by itself: `tpu_ops delete pod2 {PLACE}`, then `tpu_ops create")
    assert "--reserved" in fix


def test_a_node_of_a_queued_resource_is_made_again_with_all_that_it_made() -> None:
    fix = remedies.until_ready(node("ms-0", state="PREEMPTED", queued_resource="spring", spot=True))
    delete = f"tpu_ops delete spring {PLACE}"
    assert fix == (
        f"the node does not come back by itself: `{delete}` deletes the queued resource and all its nodes; "
        "then request it again"
    )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("STOPPING", "start the node once it is STOPPED: `gcloud"),
        ("DELETING", "the node is being deleted; create it again once"),
    ],
)
def test_a_node_that_leaves_its_state_for_a_worse_one_is_not_waited_for(state: str, words: str) -> None:
    fix = remedies.until_ready(node(state=state))
    assert fix.startswith(words)
    assert "when the node is READY" not in fix


def test_the_words_of_such_a_command_are_those_of_a_shell() -> None:
    fix = remedies.until_ready(node("pod", zone="a b", state="TERMINATED"))
    assert shlex.split(fix.split("`")[1]) == ["tpu_ops", "delete", "pod", "--zone", "a b", "--project", "lab"]
