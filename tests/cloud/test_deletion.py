"""Plans of deletions for some targets, and the queued resources that only use quota."""

from __future__ import annotations

import pytest

from tests.support.nodes import node
from tpu_ops.cloud import deletion
from tpu_ops.cloud.queued_resources import QueuedNode, QueuedResource

A = node("a", node_id="1", count=1, accelerator_type="v4-8")
MS0 = node("ms-0", node_id="2", queued_resource="ms")
MS1 = node("ms-1", node_id="3", queued_resource="ms")
#: A node of another zone whose queued resource has the same name.
ELSEWHERE = node("ms-0", zone="us-west4-a", node_id="4", queued_resource="ms")
LISTED = [A, MS0, MS1, ELSEWHERE]


def queue(name: str = "ms", state: str = "ACTIVE", zone: str = "us-central2-b") -> QueuedResource:
    return QueuedResource(name, "lab", zone, state, nodes=(QueuedNode(f"{name}-0", "v4-16"),))


WAITS = queue("waits", "WAITING_FOR_RESOURCES")
QUEUED = [queue(), queue(zone="us-west4-a"), WAITS]


@pytest.mark.parametrize(
    ("nodes", "named", "deleted", "stays"),
    [
        ([A], [], ["node a"], []),
        ([MS0], [], ["node ms-0"], ["ms-0"]),
        ([MS0, MS1], [], ["queued ms with ms-0 ms-1"], []),
        ([A, MS1, MS0], [], ["node a", "queued ms with ms-0 ms-1"], []),
        ([ELSEWHERE], [], ["queued ms with ms-0"], []),
        ([], [WAITS], ["queued waits with"], []),
        ([], [QUEUED[0]], ["queued ms with ms-0 ms-1"], []),
        ([MS0], [QUEUED[0]], ["queued ms with ms-0 ms-1"], []),
        ([MS0, ELSEWHERE], [], ["node ms-0", "queued ms with ms-0"], ["ms-0"]),
        ([], [], [], []),
    ],
)
def test_a_queued_resource_is_deleted_with_the_last_of_its_nodes(nodes, named, deleted, stays):
    plan = deletion.plan(nodes, named, listed=LISTED, queued=QUEUED)
    found = [
        " ".join(["queued", one.queued.name, "with", *(each.name for each in one.nodes)])
        if one.queued
        else f"node {one.nodes[0].name}"
        for one in plan.deletions
    ]
    assert (found, [each.name for each in plan.stays]) == (deleted, stays)


def test_a_queued_resource_that_could_not_be_listed_stays():
    plan = deletion.plan([MS0, MS1], [], listed=LISTED, queued=[])
    assert ([one.queued for one in plan.deletions], plan.stays) == ([None, None], (MS0, MS1))


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (deletion.Deletion((A,)), ("node a, zone us-central2-b, project lab", "v4-8, 1 worker", "files")),
        (
            deletion.Deletion((MS0, MS1), queue()),
            (
                "queued resource ms, zone us-central2-b, project lab, with its nodes ms-0, ms-1",
                "ACTIVE; v4-16",
                "files",
            ),
        ),
        (
            deletion.Deletion((), WAITS),
            (
                "queued resource waits, zone us-central2-b, project lab",
                "WAITING_FOR_RESOURCES; requests waits-0 (v4-16)",
                "the place in the queue",
            ),
        ),
    ],
)
def test_a_deletion_says_what_it_is_and_what_is_lost(one, words):
    what, size, lost = words
    assert (one.whole, one.size.startswith(size), lost in one.lost) == (what, True, True)
    assert deletion.Deletion((), queue("x", "FAILED")).lost == ""


@pytest.mark.parametrize(
    ("state", "nodes", "unanswered", "is_deleted", "reason"),
    [
        ("FAILED", [], [], True, ""),
        ("SUSPENDED", [], [], True, ""),
        ("SUSPENDED", [ELSEWHERE], [], True, ""),
        ("SUSPENDED", [MS0._replace(state="PREEMPTED")], [], False, "it still has node ms-0 (PREEMPTED)"),
        ("FAILED", [], [("lab", "us-central2-b")], False, "it is unknown whether it has nodes"),
        ("FAILED", [], [("lab", "-")], False, "it is unknown whether it has nodes"),
        ("FAILED", [], [("-", "-")], False, "it is unknown whether it has nodes"),
        ("FAILED", [], [("other", "-"), ("lab", "us-west4-a")], True, ""),
        ("SUSPENDING", [], [], False, ""),
        ("ACTIVE", [], [], False, ""),
        ("WAITING_FOR_RESOURCES", [], [], False, ""),
        ("DELETING", [], [], False, ""),
    ],
)
def test_only_failed_and_suspended_ones_without_a_node_are_husks(state, nodes, unanswered, is_deleted, reason):
    husks = deletion.husks([queue(state=state)], nodes, unanswered)
    assert [one.queued.state for one in husks.deletions if one.queued] == ([state] if is_deleted else [])
    assert [(one.state, text.startswith(reason)) for one, text in husks.left] == ([(state, True)] if reason else [])
