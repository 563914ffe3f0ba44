"""Calls of the API: what is retried and for how long, and how failures read."""

from __future__ import annotations

import pytest
from google.api_core import exceptions

from tpu_ops.cloud import client
from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.nodes import combine

REFUSED = "failed to connect to all addresses; last error: connect: Connection refused"


class Clock:
    """Time that passes only while waiting."""

    def __init__(self):
        self.now, self.pauses = 0.0, []

    def pause(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

    def __call__(self):
        return self.now


def attempt(answers, clock, **options):
    answers = iter(answers)

    def send(left):
        assert left > 0
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return client.attempt(send, where="project lab", timeout=60, clock=clock, pause=clock.pause, **options)


@pytest.mark.parametrize(
    "failure",
    [
        exceptions.ServiceUnavailable("down"),
        exceptions.ServiceUnavailable(REFUSED),
        exceptions.ResourceExhausted("slow down"),
        exceptions.Aborted("again"),
    ],
)
def test_a_passing_failure_is_retried_after_growing_delays(failure):
    clock = Clock()
    assert attempt([failure, failure, failure, "answer"], clock) == "answer"
    assert len(clock.pauses) == 3
    assert clock.pauses[0] < clock.pauses[1] < clock.pauses[2]


@pytest.mark.parametrize(
    ("failure", "status", "fix"),
    [
        (exceptions.NotFound("no"), "NOT_FOUND", "names"),
        (exceptions.PermissionDenied("no"), "PERMISSION_DENIED", "TPU Viewer"),
        (exceptions.Unauthenticated("no"), "UNAUTHENTICATED", "gcloud auth"),
        (exceptions.InvalidArgument("no"), "INVALID_ARGUMENT", ""),
        (exceptions.DeadlineExceeded("no"), "DEADLINE_EXCEEDED", "request_timeout"),
        (exceptions.FailedPrecondition("no"), "FAILED_PRECONDITION", ""),
    ],
)
def test_any_other_failure_ends_the_call_at_once(failure, status, fix):
    clock = Clock()
    with pytest.raises(ApiError) as caught:
        attempt([failure], clock)
    assert clock.pauses == []
    assert (caught.value.status, caught.value.where) == (status, "project lab")
    assert fix in caught.value.fix
    assert caught.value.exit_code == 3


def test_retries_end_within_the_time_out():
    clock = Clock()
    with pytest.raises(ApiError, match="slow down"):
        attempt([exceptions.ResourceExhausted("slow down")] * 100, clock)
    assert 40 < clock.now <= 60


def test_a_closed_port_is_not_waited_for_long():
    clock = Clock()
    with pytest.raises(ApiError, match="Connection refused"):
        attempt([exceptions.ServiceUnavailable(REFUSED)] * 100, clock)
    assert clock.now <= client.REFUSED_PATIENCE


@pytest.mark.parametrize(
    ("failure", "at_endpoint", "fix"),
    [
        (exceptions.ServiceUnavailable(REFUSED), True, "TPU_OPS_ENDPOINT"),
        (exceptions.DeadlineExceeded("late"), True, "TPU_OPS_ENDPOINT"),
        (exceptions.ServiceUnavailable(REFUSED), False, "check the network"),
        (exceptions.DeadlineExceeded("late"), False, "request_timeout"),
    ],
)
def test_an_endpoint_is_spoken_of_only_where_one_is_set(failure, at_endpoint, fix):
    error = client.api_error(failure, "project lab", at_endpoint=at_endpoint)
    assert fix in error.fix
    assert ("ENDPOINT" in error.fix) == at_endpoint


def test_a_change_is_not_sent_twice():
    clock = Clock()
    with pytest.raises(ApiError):
        attempt([exceptions.ServiceUnavailable("maybe it arrived"), "answer"], clock, retried=())
    assert clock.pauses == []


def test_retries_end_when_nobody_wants_the_answer():
    with pytest.raises(ApiError):
        client.attempt(
            lambda left: (_ for _ in ()).throw(exceptions.ServiceUnavailable("down")),
            where="",
            timeout=60,
            pause=lambda seconds: True,
        )


def denied(where):
    return ApiError("denied", status="PERMISSION_DENIED", where=where)


def named(name):
    return {"name": name, "node_id": "1"}


def test_one_forbidden_project_of_several_is_a_warning_that_names_it():
    listing = combine([("a", "-"), ("b", "-")], [([named("n")], []), denied("project b")])
    assert [node["name"] for node in listing.nodes] == ["n"]
    assert listing.unanswered == (("b", "-"),)
    assert "project b" in listing.warnings[0]


def test_an_unreachable_location_is_a_warning_that_names_it():
    listing = combine([("a", "-")], [([named("n")], ["projects/a/locations/us-west4-a", "us-east5-b"])])
    assert listing.unanswered == (("a", "us-west4-a"), ("a", "us-east5-b"))
    assert "us-west4-a" in listing.warnings[0]


def test_the_only_project_forbidden_is_an_error():
    with pytest.raises(ApiError, match="denied"):
        combine([("a", "-")], [denied("project a")])


def test_all_projects_forbidden_is_an_error():
    with pytest.raises(ApiError, match="denied"):
        combine([("a", "-"), ("b", "-")], [denied("project a"), denied("project b")])


@pytest.mark.parametrize("status", ["NOT_FOUND", "INVALID_ARGUMENT", "UNAUTHENTICATED"])
def test_a_wrong_name_among_right_ones_is_an_error(status):
    with pytest.raises(ApiError, match="wrong"):
        combine([("a", "-"), ("b", "-")], [([], []), ApiError("wrong", status=status)])


def test_a_node_listed_twice_is_one_node():
    listing = combine([("a", "z1"), ("a", "z2")], [([named("n")], []), ([named("n")], [])])
    assert len(listing.nodes) == 1
