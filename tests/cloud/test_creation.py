"""Nodes that are created together, against a real API process: places without capacity, retries, queued resources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fleet import ZONE
from tpu_ops.cloud import creation, operations
from tpu_ops.cloud.client import ApiError, connect
from tpu_ops.cloud.creation import Anywhere, CreationTerms, Order
from tpu_ops.cloud.wish import Wish
from tpu_ops.errors import UsageError

OTHER = "europe-west4-b"
TERMS = CreationTerms("ada:ssh-ed25519 AAAA ada", wait=True, timeout=20, first_pause=0.02)
V5E = {"accelerator_type": "v5litepod-4", "runtime_version": "v2-alpha-tpuv5-lite"}


class Said(list[str]):
    """Collects messages."""

    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def make(fleet):
    """Creates nodes of a project, and returns their results and the messages."""
    wish = Wish("", fleet.project, ZONE, "v4-8", "tpu-ubuntu2204-base")

    def run(*names, terms=TERMS, claims=None, zones=(ZONE,), timeout=10, **fields):
        orders = [Order(n, tuple(replace(wish, name=n, zone=zone, **fields) for zone in zones)) for n in names]
        said = Said()
        with connect(fleet.api.grpc, timeout=timeout) as tpu:
            done = creation.create_all(
                tpu, orders, terms, claims=claims or Anywhere(), say=said, progress=lambda _: lambda *_: None
            )
        return done, said

    yield run
    fleet.api.clear_faults()


def no_capacity(fleet, times=None, **fields):
    message = 'There is no more capacity in the zone "us-central2-b"; you can try in another zone'
    fault = {"method": "CreateNode", "project": fleet.project, "code": "RESOURCE_EXHAUSTED", "message": message}
    fleet.api.fault(**fault, **fields, **({"times": times} if times else {}))


def test_several_nodes_are_created_at_once_and_one_failure_does_not_end_the_others(fleet, make):
    fleet.create("b", "v4-16")
    done, _ = make("a", "b", "c")
    assert [one.outcome for one in done] == ["created", "failed", "created"]
    assert "v4-16, not v4-8" in str(done[1].error)
    assert [one.outcome for one in make("a", "c")[0]] == ["already there", "already there"]


def test_a_stockout_that_ends_is_waited_out(fleet, make):
    no_capacity(fleet, times=3)
    (done,), said = make("a", terms=TERMS._replace(patience=60))
    assert (done.outcome, sum("no place has capacity; next try in" in text for text in said)) == ("created", 3)


def test_an_outage_of_the_api_after_the_first_try_is_waited_out(fleet, make):
    no_capacity(fleet, times=1)

    class Outage(Anywhere):
        def renew(self):
            if not said:
                fault = {"method": "GetNode", "project": fleet.project, "code": "UNAVAILABLE", "message": "down"}
                fleet.api.fault(**fault, times=3)
            said.append("renewed")

    said = []
    (done,), texts = make("a", claims=Outage(), terms=TERMS._replace(patience=60), timeout=0.2)
    assert done.outcome == "created", done.error
    assert [text for text in texts if "the API does not answer; next try in" in text]


def test_without_patience_a_stockout_is_an_error_that_names_the_option(fleet, make):
    no_capacity(fleet)
    (done,), said = make("a")
    assert isinstance(done.error, ApiError)
    assert (done.error.status, "--until-capacity" in done.error.fix, said) == ("RESOURCE_EXHAUSTED", True, [])


def test_patience_ends(fleet, make):
    no_capacity(fleet)
    (done,), said = make("a", terms=TERMS._replace(patience=0.1))
    assert "no more capacity" in str(done.error)
    assert 0 < len(said) < 20


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("RESOURCE_EXHAUSTED", "Quota limit 'TPUV4sPreemptible' has been exceeded. Limit: 0 in zone us-central2-b."),
        ("PERMISSION_DENIED", "not you"),
        ("FAILED_PRECONDITION", "the network is being deleted"),
    ],
)
def test_an_error_that_waiting_does_not_change_ends_at_once(fleet, make, code, message):
    fleet.api.fault(method="CreateNode", project=fleet.project, code=code, message=message)
    (done,), said = make("a", terms=TERMS._replace(patience=60), zones=(ZONE, OTHER))
    assert (message[:10] in str(done.error), said) == (True, [])


@pytest.mark.parametrize("text", ["Limit: 0 in zone", "Limit: 0.0 in region", "limit of 0.", "LIMIT 0"])
def test_a_quota_of_zero_is_not_waited_for(text):
    assert not creation.lacks_capacity(ApiError(f"Quota exceeded. {text}", status="RESOURCE_EXHAUSTED", where="node a"))


@pytest.mark.parametrize("message", ["Quota exceeded. Limit: 10 in zone", "limit: 0.5", "no more capacity"])
def test_a_quota_that_can_have_room_again_is_waited_for(message):
    assert creation.lacks_capacity(ApiError(message, status="RESOURCE_EXHAUSTED", where="node a"))


def test_zones_are_tried_in_order_and_the_same_command_finds_the_node_again(fleet, make):
    no_capacity(fleet, zone=ZONE)
    zones = (ZONE, OTHER)
    (done,), said = make("a", zones=zones, **V5E)
    assert (done.outcome, done.wish.zone, len(said)) == ("created", OTHER, 1), (done, said)
    fleet.api.clear_faults()
    (again,), _ = make("a", zones=zones, **V5E)
    assert (again.outcome, again.wish.zone) == ("already there", OTHER)


def test_a_place_that_the_claims_refuse_is_not_tried(fleet, make):
    class Only(Anywhere):
        def take(self, wish):
            return wish.zone == OTHER

    (done,), _ = make("a", zones=(ZONE, OTHER), claims=Only(), **V5E)
    assert done.wish.zone == OTHER
    (none,), _ = make("b", claims=Only())
    assert isinstance(none.error, UsageError)
    assert "the grant has no room left" in str(none.error)


def test_a_queued_resource_brings_its_node_and_is_found_again(fleet, make):
    (done,), _ = make("a", queued=True, spot=True)
    assert done.outcome == "created", done.error
    node = fleet.api.node("a", fleet.location())
    assert node["queuedResource"].endswith("/queuedResources/a")
    assert node["schedulingConfig"]["spot"]
    assert make("a", queued=True, spot=True)[0][0].outcome == "already there"


def test_all_properties_of_a_node_reach_the_api(fleet, make):
    (done,), _ = make(
        "a",
        labels={"team": "vision"},
        internal_only=True,
        network="net",
        subnetwork="sub",
        service_account="me@example.com",
        metadata={"startup-script": "#!/bin/sh"},
    )
    assert done.outcome == "created", done.error
    node = fleet.api.node("a", fleet.location())
    assert node["labels"] == {"team": "vision"}
    assert node["networkConfig"].get("enableExternalIps", False) is False
    names = [node["networkConfig"][key].rpartition("/")[2] for key in ("network", "subnetwork")]
    assert names == ["net", "sub"]
    assert node["serviceAccount"] == {
        "email": "me@example.com",
        "scope": ["https://www.googleapis.com/auth/cloud-platform"],
    }
    assert node["metadata"] == {"ssh-keys": TERMS.keys, "startup-script": "#!/bin/sh"}


def test_after_the_api_has_accepted_a_request_no_other_place_is_tried(fleet, make):
    """Reads that are refused for their number look like missing capacity."""
    fleet.api.fault(method="GetOperation", project=fleet.project, code="RESOURCE_EXHAUSTED", message="Read requests")
    (done,), said = make("a", zones=(OTHER, "us-west4-a"), terms=TERMS._replace(patience=60), timeout=0.3, **V5E)
    assert "the API is creating the node" in str(done.error)
    assert said == []
    assert fleet.api.call("GET", f"v2/{fleet.location('us-west4-a')}/nodes/a")[0] == 404
    assert done.wish.zone == OTHER


def test_an_error_names_the_last_place_that_was_tried(fleet, make):
    no_capacity(fleet, zone=OTHER)
    fleet.api.fault(method="CreateNode", project=fleet.project, zone="us-west4-a", code="PERMISSION_DENIED")
    (done,), _ = make("a", zones=(OTHER, "us-west4-a"), **V5E)
    assert (done.outcome, done.wish.zone) == ("failed", "us-west4-a")


def test_a_node_that_a_colleague_creates_during_a_pause_is_found(fleet, make):
    no_capacity(fleet)

    class Colleague(Anywhere):
        def renew(self):
            fleet.api.clear_faults()
            fleet.create("a", "v5litepod-4", zone=OTHER, runtimeVersion=V5E["runtime_version"])

    (done,), _ = make("a", zones=(ZONE, OTHER), claims=Colleague(), terms=TERMS._replace(patience=60), **V5E)
    assert (done.outcome, done.wish.zone) == ("already there", OTHER)


@pytest.mark.parametrize(("owner", "outcome"), [("me", "created"), ("colleague", "already there")])
def test_after_a_preemption_only_the_rest_of_the_own_node_is_deleted(fleet, make, monkeypatch, owner, outcome):
    is_done, ids = operations.is_done, []

    def preempted(tpu, operation, *, what):
        monkeypatch.setattr(operations, "is_done", is_done)
        if owner == "me":
            assert fleet.api.call("POST", "lab/preempt", {"node": f"{fleet.location()}/nodes/a"})[0] == 200
        else:
            fleet.act("delete", "a")
            fleet.create("a", "v4-8")
        ids.append(fleet.api.node("a", fleet.location())["id"])
        raise operations.Failed("not supported while in state PREEMPTED", status="INVALID_ARGUMENT", where=what)

    monkeypatch.setattr(operations, "is_done", preempted)
    (done,), _ = make("a", terms=TERMS._replace(patience=60))
    assert done.outcome == outcome, done.error
    assert (fleet.api.node("a", fleet.location())["id"] in ids) == (owner == "colleague")


@pytest.mark.parametrize(
    ("kind", "fields", "fault"),
    [
        ("v4-16", {"queued": True, "spot": True}, "requests something else: spot v4-16 for node a"),
        ("v4-8", {"queued": True}, "requests something else: spot v4-8 for node a"),
        ("v4-8", {}, "a queued resource of this name exists"),
    ],
)
def test_a_queued_resource_of_the_name_that_requests_something_else_is_an_error(fleet, make, kind, fields, fault):
    node = {"acceleratorType": kind, "runtimeVersion": "tpu-ubuntu2204-base"}
    specs = [{"parent": fleet.location(), "nodeId": "a", "node": node}]
    body = {"tpu": {"nodeSpec": specs}, "spot": {}, "queueingPolicy": {"validAfterDuration": "3600s"}}
    status, answer = fleet.api.call("POST", f"v2/{fleet.location()}/queuedResources?queuedResourceId=a", body)
    assert status == 200, answer
    (done,), _ = make("a", terms=TERMS._replace(timeout=3), **fields)
    assert fault in str(done.error)
    assert fleet.api.call("GET", f"v2/{fleet.location()}/nodes/a")[0] == 404
