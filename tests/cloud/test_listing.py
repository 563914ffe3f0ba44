"""The answers of several projects and zones are merged into one listing, or an error."""

from __future__ import annotations

import pytest

from tpu_ops.cloud import client
from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.listing import Answered, combine
from tpu_ops.cloud.names import split_name
from tpu_ops.cloud.node import Node

A, B = ("a", "-"), ("b", "-")


def node(name="n", **fields):
    return Node(name, "a", "us-west4-a", **{"node_id": "1", "accelerator_type": "v4-8", **fields})


def failed(status="PERMISSION_DENIED", what="denied", fix="ask"):
    return ApiError(what, status=status, where="somewhere", fix=fix)


def combined(answers, **options):
    return combine(answers, list(answers), **options)


@pytest.mark.parametrize("order", [(A, B), (B, A)])
def test_a_forbidden_project_of_several_is_a_warning_with_the_fix(order):
    answers = {A: Answered([node()]), B: failed()}
    listing = combined({place: answers[place] for place in order})
    assert listing.nodes == (node(),)
    assert listing.unanswered == (B,)
    assert listing.warnings == ("project b: not listed: denied (ask)",)


@pytest.mark.parametrize("status", client.RETRIED)
def test_a_place_whose_failure_did_not_pass_leaves_the_others_listed(status):
    listing = combined({A: Answered([node()]), B: failed(status)})
    assert (listing.nodes, listing.unanswered) == ((node(),), (B,))


def test_zones_that_fail_alike_share_a_warning():
    zones = ["us-west4-a", "us-east5-a", "us-east5-b"]
    listing = combined(
        {A: Answered([]), **{("b", zone): failed() for zone in zones[:2]}, ("b", zones[2]): failed(what="no")}
    )
    assert [text.split(" (")[0] for text in listing.warnings] == [
        "project b, zone us-west4-a, us-east5-a: not listed: denied",
        "project b, zone us-east5-b: not listed: no",
    ]


def test_an_unreachable_location_is_a_warning_that_names_it():
    listing = combined({A: Answered([node()], ["projects/a/locations/us-west4-b", "us-east5-b", "us-east5-b"])})
    assert listing.unanswered == (("a", "us-west4-b"), ("a", "us-east5-b"))
    assert len(listing.warnings) == 1
    assert "project a, zone us-west4-b, us-east5-b: not listed" in listing.warnings[0]


@pytest.mark.parametrize(
    "answers",
    [
        {A: failed()},
        {A: failed(), B: failed()},
        {A: failed(), B: failed("UNAVAILABLE", "down")},
        {("a", "us-west4-a"): failed(), ("a", "us-west4-b"): failed()},
    ],
)
def test_nothing_listed_is_an_error_and_never_an_empty_fleet(answers):
    with pytest.raises(ApiError, match="denied"):
        combined(answers)


@pytest.mark.parametrize("status", ["NOT_FOUND", "INVALID_ARGUMENT", "UNAUTHENTICATED"])
def test_a_wrong_project_or_zone_in_the_settings_is_an_error(status):
    answers = {("a", "us-west4-a"): Answered([node()]), ("a", "us-west4-z"): failed(status, "wrong")}
    with pytest.raises(ApiError, match="wrong"):
        combined(answers)
    listing = combine(answers, [A])
    assert (len(listing.nodes), listing.unanswered) == (1, (("a", "us-west4-z"),))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({A: Answered([node()]), B: failed()}, "denied"),
        ({A: Answered([node()], ["projects/a/locations/us-west4-b"])}, "project a, zone us-west4-b.*could not reach"),
    ],
)
def test_with_strict_permissions_any_failure_is_an_error(answers, words):
    with pytest.raises(ApiError, match=words):
        combined(answers, strict_permissions=True)


def test_a_node_listed_twice_is_one_node_as_it_was_listed_last():
    later = node(node_id="2")
    assert combined({A: Answered([node(), later])}).nodes == (later,)


ODD = ["", "pod", "projects/a/locations/us-west4-a/nodes/a b", "projects/a/locations/us-west4-a/nodes/x\n", "x" * 10**6]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("strict_permissions", [False, True])
def test_a_node_with_an_invalid_name_is_skipped_with_a_warning(name, strict_permissions):
    listing = combined({A: Answered([node()], misnamed=[name])}, strict_permissions=strict_permissions)
    assert listing.nodes == (node(),)
    assert listing.unanswered == ()
    assert len(listing.warnings) == 1
    assert repr(name)[:100] in listing.warnings[0]
    assert len(listing.warnings[0]) < 400


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("projects/lab/locations/us-central2-b/nodes/pod", ("lab", "us-central2-b", "pod")),
        ("projects/example.com:grant/locations/us-central2-b/nodes/n-1", ("example.com:grant", "us-central2-b", "n-1")),
        ("projects/123456789/locations/us-central2-b/nodes/n", ("123456789", "us-central2-b", "n")),
        ("projects/lab/locations/us-central2-b/nodes/../x", None),
        ("projects/{{ x }}/locations/us-central2-b/nodes/a", None),
        ("projects/lab/locations/us-central2-b/queuedResources/pod", None),
        *((name, None) for name in ODD),
    ],
)
def test_a_name_is_split_where_its_form_is_known(name, parts):
    assert split_name(name) == parts


@pytest.mark.parametrize(
    ("listed", "ids", "words"),
    [
        ([node(), node()], ["1"], []),
        (
            [node(), node(node_id="2")],
            ["2"],
            ["node n,", "listed twice, with the ids 1 and 2; the node with the last id"],
        ),
        ([node(node_id="2"), node(node_id="")], [""], ["node n,", "the ids 2 and none"]),
        (
            [node(), node("m")],
            ["1", "1"],
            ["node n, zone us-west4-a, project a: has the same id 1 as node m, zone us-west4"],
        ),
        ([node(node_id=""), node("m", node_id="")], ["", ""], []),
    ],
)
def test_a_node_with_two_ids_and_an_id_of_two_nodes_are_warned_of(listed, ids, words):
    listing = combined({A: Answered(listed)})
    assert [found.node_id for found in listing.nodes] == ids
    assert len(listing.warnings) == bool(words)
    assert [word for word in words if word not in listing.warnings[0]] == []
