"""What names mean: nodes, queued resources, nodes that are gone, or nothing."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.nodes import node
from tpu_ops.cloud.listing import QueuedListing
from tpu_ops.cloud.node import node_labels
from tpu_ops.cloud.queued_resources import QueuedResource
from tpu_ops.errors import CloudError, OpsError, UsageError
from tpu_ops.fleet import lookup
from tpu_ops.fleet.lookup import NamedPlace

A, B = node("a", node_id="1"), node("b", node_id="2", queued_resource="spring")
TWINS = [node("twin", node_id="3"), node("twin", zone="us-west4-a", node_id="4")]
HIDDEN = node("theirs", node_id="5", queued_resource="shared")
OLD = node("old", node_id="6")
QUEUED = [
    QueuedResource("waits", "lab", "us-central2-b", "WAITING_FOR_RESOURCES"),
    QueuedResource("a", "lab", "us-central2-b", "ACTIVE"),
    QueuedResource("spring", "lab", "us-central2-b", "ACTIVE"),
    QueuedResource("shared", "lab", "us-central2-b", "ACTIVE"),
    QueuedResource("both", "lab", "us-central2-b", "FAILED"),
    QueuedResource("both", "lab", "us-west4-a", "FAILED"),
]


ANYWHERE = NamedPlace()


def find(
    *words: str, place: NamedPlace = ANYWHERE, unanswered: tuple[Any, ...] = ()
) -> tuple[lookup.Found, list[bool]]:
    """Return what the words mean in a fleet, and for each listing of the queued resources whether it was needed."""
    mine, asked = [A, B, *TWINS], list[bool]()
    listed = [*mine, HIDDEN]
    fleet: Any = SimpleNamespace(nodes=mine, listed=listed, labels=node_labels(listed), unanswered=unanswered)

    def queued(needed: bool) -> QueuedListing:
        asked.append(needed)
        return QueuedListing(tuple(QUEUED))

    return lookup.find(fleet, lookup.names(words), place, queued=queued, last=lambda: [A, OLD, *TWINS]), asked


@pytest.mark.parametrize(
    ("words", "place", "expected", "unknown"),
    [
        (["a"], ANYWHERE, (["a"], [], []), []),
        (["a,b", "a"], ANYWHERE, (["a", "b"], [], []), []),
        (["twin.us-west4-a"], ANYWHERE, (["twin"], [], []), []),
        (["twin"], NamedPlace("us-west4-a"), (["twin"], [], []), []),
        (["waits"], ANYWHERE, ([], ["waits"], []), []),
        (["both"], NamedPlace("us-west4-a"), ([], ["both"], []), []),
        (["old"], ANYWHERE, ([], [], ["old"]), []),
        (["a,old,waits,typo"], ANYWHERE, (["a"], ["waits"], ["old"]), ["no node is called 'typo'"]),
        (["a,nope-[1-2]"], ANYWHERE, (["a"], [], []), ["no node is called 'nope-1'", "no node is called 'nope-2'"]),
    ],
)
def test_names_mean_nodes_queued_resources_and_nodes_that_are_gone(words, place, expected, unknown):
    found, _ = find(*words, place=place)
    assert tuple([one.name for one in part] for part in (found.nodes, found.queued, found.gone)) == expected
    assert list(found.unknown) == unknown


@pytest.mark.parametrize(("word", "asked"), [("a", []), ("b", [False]), ("waits", [True]), ("a,old", [True])])
def test_queued_resources_are_listed_only_if_the_names_depend_on_them(word, asked):
    assert find(word)[1] == asked


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("typo", ["no node is called 'typo'", "known nodes: a, b, twin.", "known queued resources: a, both, shared"]),
        ("typo,more", ["no node is called 'more'"]),
        ("twin", ["several nodes are called 'twin'", "use twin.us-central2-b or twin.us-west4-a"]),
        ("a,twin", ["several nodes are called 'twin'"]),
        ("both", ["several queued resources are called 'both'", "add --zone"]),
        ("a,theirs", ["no node is called 'theirs'", "the fleet's filters exclude it"]),
        ("shared", ["the fleet's filters exclude a node of the queued resource: theirs"]),
        ("a,,b", ["a name is missing"]),
    ],
)
def test_a_name_that_could_delete_something_else_is_refused(word, words):
    with pytest.raises(UsageError) as caught:
        find(word)
    assert [text for text in words if text not in str(caught.value)] == []


def test_a_queued_resource_whose_nodes_are_unknown_is_refused():
    with pytest.raises(CloudError, match="the API did not list the nodes there"):
        find("waits", unanswered=(("lab", "us-central2-b"),))


@pytest.mark.parametrize(
    ("listing", "refused"),
    [
        (QueuedListing((QUEUED[2],), (("lab", "-"),)), False),
        (QueuedListing((), (("lab", "us-west4-a"),)), False),
        (QueuedListing((), (("lab", "us-central2-b"),)), True),
        (QueuedListing((), (("lab", "-"),)), True),
    ],
)
def test_a_node_whose_queued_resource_could_not_be_listed_is_refused(listing, refused):
    fleet: Any = SimpleNamespace(nodes=[A, B], listed=[A, B], labels=node_labels([A, B]), unanswered=())
    with pytest.raises(CloudError, match="queued resource spring") if refused else nullcontext():
        lookup.find(fleet, ["a", "b"], NamedPlace(), queued=lambda _: listing, last=lambda: ())


def test_the_only_node_of_a_name_is_not_taken_for_the_one_that_is_gone():
    """After twin.us-west4-a is deleted, the other node's label is `twin`; the old label means neither."""
    fleet: Any = SimpleNamespace(nodes=[TWINS[0]], listed=[TWINS[0]], labels=node_labels([TWINS[0]]), unanswered=())
    found = lookup.find(fleet, ["twin.us-west4-a"], NamedPlace(), queued=lambda _: QueuedListing(), last=lambda: TWINS)
    assert (found.nodes, found.gone) == ((), (TWINS[1],))
    with pytest.raises(OpsError):
        lookup.find(fleet, ["twin.us-west4-b"], NamedPlace(), queued=lambda _: QueuedListing(), last=lambda: TWINS)
