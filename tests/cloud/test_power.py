"""Which nodes can be stopped and started."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.nodes import node
from tpu_ops.cloud import power

ONE: dict[str, Any] = {"count": 1, "accelerator_type": "v4-8"}


@pytest.mark.parametrize(
    ("fields", "stop", "start", "restart"),
    [
        (ONE, "", "done", ""),
        (ONE | {"state": "STOPPED"}, "done", "", ""),
        (ONE | {"state": "STOPPING"}, "", "", ""),
        (ONE | {"state": "STARTING"}, "is STARTING and cannot be stopped now", "", ""),
        (ONE | {"state": "UNKNOWN"}, "is UNKNOWN and cannot be stopped now", "", ""),
        (ONE | {"state": "DELETING"}, *("is DELETING and cannot be",) * 3),
        ({}, "cannot stop a node with several workers, and this one has 2", "done", "cannot restart a node with"),
        ({"state": "STOPPED"}, "done", "cannot start a node with several workers", "cannot restart a node with"),
        # A node that is being created has no addresses yet.
        ({"count": 0, "state": "STARTING"}, *("several workers, and this one has 2",) * 3),
        (ONE | {"queued_resource": "q"}, "cannot stop a node of a queued resource (q)", "done", "queued resource (q)"),
        (ONE | {"queued_resource": "q", "state": "STOPPED"}, "done", "cannot start a node of a queued", "queued"),
        (ONE | {"preemptible": True}, "a spot node cannot be started again once it is stopped", "done", "spot node"),
        (ONE | {"preemptible": True, "state": "STOPPED"}, "done", "a spot node cannot be started again", "spot node"),
        (ONE | {"preemptible": True, "state": "PREEMPTED"}, *("is PREEMPTED, and such nodes cannot be",) * 3),
    ],
)
def test_what_the_api_cannot_do_is_refused_with_the_reason(fields, stop, start, restart):
    one = node("pod", **fields)
    for action, expected in ((power.STOP, stop), (power.START, start), (power.RESTART, restart)):
        refusal = power.refusal(one, action)
        assert power.is_done(one, action) == (expected == "done"), action
        assert (refusal is not None) == (expected not in ("", "done")), action
        if refusal:
            assert expected in refusal.what
            assert refusal.where == "node pod, zone us-central2-b, project lab"
            assert refusal.fix.startswith(("delete the node to end its cost, and create", "repeat the command once"))
