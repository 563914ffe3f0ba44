"""Calls of the API: what is retried and for how long, and how failures read."""

from __future__ import annotations

import pytest
from google.api_core import exceptions

from tpu_ops.cloud import buckets, client
from tpu_ops.cloud.client import ApiError
from tpu_ops.errors import CloudError

FOREIGN = "last error: UNAVAILABLE: ipv4:127.0.0.1:80: Failed parsing HTTP/2 (Expected SETTINGS frame, got type 79)"
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
        exceptions.DeadlineExceeded("Deadline expired before operation could complete."),
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
        (exceptions.InternalServerError("no"), "INTERNAL", "wait a moment"),
        (exceptions.Unknown("Stream removed"), "UNKNOWN", "wait a moment"),
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


def test_a_deadline_of_the_service_is_retried_until_the_timeout():
    clock = Clock()
    with pytest.raises(ApiError, match="no answer within 60 s") as caught:
        attempt([exceptions.DeadlineExceeded("expired")] * 100, clock)
    assert 40 < clock.now <= 60
    assert "request_timeout" in caught.value.fix


NO_CAPACITY = (
    'There is no more capacity in the zone "us-central2-b"; you can try in another zone where Cloud TPU Nodes are '
    "offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x1]"
)
NO_RESERVED = "Insufficient reserved capacity. Contact customer support to increase your reservation. [EID: 0x2]"
NO_QUOTA = "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0 in region us-east5."
NO_MORE_QUOTA = "Quota 'TPUV4sPreemptiblePodPerProjectPerRegionForTPUAPI' exhausted. Limit 20800 in region us-central2"
TOO_FAST = "Quota exceeded for quota metric 'CreateNode requests' and limit 'CreateNode requests per minute'"
NOT_ENABLED = "Cloud TPU API has not been used in project 764086051850 before or it is disabled. Enable it at x"
NO_ADDRESSES = (
    "Constraint constraints/compute.vmExternalIpAccess violated for project 123456789. Add instance "
    "projects/p/zones/z/instances/i to the constraint to use external IP with it."
)
NO_NETWORK = (
    "Invalid value for field 'resource.networkInterfaces[0].network': 'projects/p/global/networks/default'. The "
    "referenced network resource cannot be found."
)
NO_QUOTA_PROJECT = (
    "Your application is authenticating by using local Application Default Credentials. The tpu.googleapis.com API "
    "requires a quota project, which is not set by default."
)
NOT_THEIR_PROJECT = (
    "Caller does not have required permission to use project p. Grant the caller the "
    "roles/serviceusage.serviceUsageConsumer role, or a custom role with the serviceusage.services.use permission"
)


@pytest.mark.parametrize(
    ("status", "message", "fix"),
    [
        ("RESOURCE_EXHAUSTED", NO_CAPACITY, "waits until there is capacity"),
        ("FAILED_PRECONDITION", NO_RESERVED, "waits until there is capacity"),
        ("RESOURCE_EXHAUSTED", NO_QUOTA, "spot and on-demand TPUs have quotas of their own"),
        ("RESOURCE_EXHAUSTED", NO_MORE_QUOTA, "SUSPENDED or FAILED"),
        ("RESOURCE_EXHAUSTED", TOO_FAST, "wait a minute"),
        (
            "INTERNAL",
            "Quota 'CPUS' exceeded.  Limit: 72.0 in region us-central1.",
            "more of the quota that the message names",
        ),
        (
            "PERMISSION_DENIED",
            "Compute Engine API has not been used in project 1 before",
            "enable the API in the message",
        ),
        ("RESOURCE_EXHAUSTED", "slow down", "wait, or ask for more quota"),
        ("PERMISSION_DENIED", NOT_ENABLED, "gcloud services enable tpu.googleapis.com"),
        ("PERMISSION_DENIED", NO_QUOTA_PROJECT, "set one for your login: gcloud auth"),
        ("PERMISSION_DENIED", NOT_THEIR_PROJECT, "choose a quota project for your login that you may use"),
        ("PERMISSION_DENIED", "Request had insufficient authentication scopes.", "the scope cloud-platform"),
        ("PERMISSION_DENIED", "Permission 'tpu.nodes.list' denied on 'projects/p/locations/z'", "TPU Viewer"),
        ("INTERNAL", "Quota 'IN_USE_ADDRESSES' exceeded.  Limit: 8.0 in region us-central1.", "--internal-only"),
        ("FAILED_PRECONDITION", NO_ADDRESSES, "--internal-only"),
        ("INVALID_ARGUMENT", NO_NETWORK, "--network"),
        ("INVALID_ARGUMENT", "Cloud TPU received a bad request.", ""),
    ],
)
def test_the_fix_of_an_api_error_follows_its_status_and_message(status, message, fix):
    told = ApiError(f"{message} ({status})", status=status).fix
    assert fix in told if fix else told == ""


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
    error = client.api_error(failure, "project lab", timeout=20, at_endpoint=at_endpoint)
    assert fix in error.fix
    assert ("ENDPOINT" in error.fix) == at_endpoint


@pytest.mark.parametrize(
    "reason",
    [
        "('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))",
        "HTTPSConnectionPool(host='oauth2.googleapis.com', port=443): Max retries exceeded with url: /token",
        "HTTPSConnectionPool(host='oauth2.googleapis.com', port=443): Read timed out. (read timeout=120)",
        "('internal_failure: Backend Error', {'error': 'internal_failure'})",
        "Failed to retrieve http://metadata/ ... Compute Engine Metadata server unavailable. Last exception: timed out",
    ],
)
def test_no_answer_about_credentials_is_no_refusal(reason):
    failure = exceptions.ServiceUnavailable(f"Getting metadata from plugin failed with error: {reason}")
    error = client.api_error(failure, "project lab", timeout=20)
    assert (error.status, error.what) == ("UNAVAILABLE", f"no access token: {reason}")
    assert "network" in error.fix


def test_api_text_in_errors_is_one_line_without_escape_sequences():
    failure = exceptions.PermissionDenied("\x1b[31mhack\r\nline2\u202e größe")
    assert client.api_error(failure, "zone \x07", timeout=20).what == (
        r"\x1b[31mhack line2\u202e größe (PERMISSION_DENIED)"
    )
    assert client.api_error(failure, "zone \x07", timeout=20).where == r"zone \x07"


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


def test_text_of_cloud_storage_is_one_line_without_escape_sequences():
    with pytest.raises(CloudError, match=r"\\x1b\[31mno next"), buckets.requests("gs://grant/fleet.json", "read"):
        raise OSError("\x1b[31mno\nnext")


def test_a_port_that_speaks_no_grpc_is_said_and_not_waited_for():
    clock = Clock()
    failures = iter(lambda: exceptions.ServiceUnavailable(FOREIGN), None)
    with pytest.raises(ApiError, match="this is not a gRPC port") as caught:
        attempt(failures, clock, at_endpoint=True)
    assert "TPU_OPS_ENDPOINT" in caught.value.fix
    assert clock.now < client.REFUSED_PATIENCE
