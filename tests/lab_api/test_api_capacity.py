"""The declared capacity of the lab's cloud: lifetimes, what a restart keeps, and refusals."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.lab_api import LOCATION, PATIENCE, LabApi
from tpu_ops.lab.api.capacity import Capacity
from tpu_ops.lab.api.records import NodeRecord, timestamp

SPOT: dict[str, Any] = {"schedulingConfig": {"spot": True}}


def states(api: LabApi, collection: str = "nodes") -> dict[str, str]:
    """Return the state of each node or queued resource by short name."""
    found = api.call("GET", f"v2/{LOCATION}/{collection}")[1].get(collection, [])
    return {
        one["name"].rpartition("/")[2]: one["state"]["state"] if collection != "nodes" else one["state"]
        for one in found
    }


def until(api: LabApi, wanted: dict[str, str], collection: str = "nodes") -> None:
    deadline = time.monotonic() + PATIENCE
    while (found := states(api, collection)) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)  # polls until the deadline


def declare(api: LabApi, **parts: Any) -> Any:
    status, answer = api.call("POST", "lab/capacity", parts)
    assert status == 200, answer
    return answer


def test_lifetimes_have_the_declared_mean_and_repeat_with_the_seed() -> None:
    node = NodeRecord(f"{LOCATION}/nodes/a", {"createTime": timestamp(1000)}, "READY", [], [])

    def lifetimes(seed: int) -> list[float]:
        capacity, found = Capacity(per_hour=4, seed=seed, since=900), []
        for _ in range(2000):
            found.append(capacity.preemption(node) - 1000)
            capacity = capacity.count_preemption(node.name)
        return found

    first = lifetimes(1)
    assert (min(first) > 0, first == lifetimes(1), first == lifetimes(2)) == (True, True, False)
    assert sum(first) / len(first) == pytest.approx(900, rel=0.1)
    late = Capacity(per_hour=4, seed=1, since=5000)
    assert late.preemption(node) - 5000 == first[0], "an old node is not preempted at once by a new rate"


def test_the_capacity_survives_a_killed_process(lab_api: LabApi) -> None:
    quotas = [{"zone": "us-central2-b", "generation": "v4", "spot": True, "chips": 8}]
    declare(lab_api, quotas=quotas, stockouts=[{"zone": "us-central2-b", "type": "v4", "seconds": 3000}])
    node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}
    body = {"tpu": {"nodeSpec": [{"parent": LOCATION, "nodeId": "q", "node": node}]}, "spot": {}}
    lab_api.done("POST", f"v2/{LOCATION}/queuedResources?queuedResourceId=q", body)
    until(lab_api, {"q": "WAITING_FOR_RESOURCES"}, "queuedResources")
    lab_api.kill()
    lab_api.start()
    kept = lab_api.call("GET", "lab/capacity")[1]
    assert kept["quotas"] == [{**quotas[0], "used": {"lab": 4}}]
    assert 0 < kept["stockouts"][0]["seconds"] < 3000
    assert (states(lab_api), states(lab_api, "queuedResources")) == ({}, {"q": "WAITING_FOR_RESOURCES"})
    declare(lab_api, stockouts=[{"zone": "us-central2-b", "seconds": 0.3}])
    until(lab_api, {"q": "ACTIVE"}, "queuedResources")
    assert lab_api.call("GET", "lab/capacity")[1]["stockouts"] == []

    declare(lab_api, preemption={"per_hour": 1e6})
    lab_api.kill()
    lab_api.start()
    until(lab_api, {"q": "PREEMPTED"})


def test_only_spot_nodes_are_preempted_at_the_rate(lab_api: LabApi) -> None:
    lab_api.create("spot", **SPOT)
    lab_api.create("firm")
    declare(lab_api, preemption={"per_hour": 1e5, "seed": 3})
    until(lab_api, {"spot": "PREEMPTED", "firm": "READY"})
    declare(lab_api, preemption={})
    lab_api.create("later", **SPOT)
    assert lab_api.call("GET", "lab/capacity")[1]["preemption"] == {"per_hour": 0, "seed": 0}
    assert states(lab_api) == {"spot": "PREEMPTED", "firm": "READY", "later": "READY"}


def test_a_queued_resource_that_waits_for_capacity_ends_with_its_valid_time(lab_api: LabApi) -> None:
    declare(lab_api, stockouts=[{"zone": "us-central2-b"}])
    node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}
    body = {
        "tpu": {"nodeSpec": [{"parent": LOCATION, "nodeId": "q", "node": node}]},
        "queueingPolicy": {"validUntilDuration": "1s"},
    }
    lab_api.done("POST", f"v2/{LOCATION}/queuedResources?queuedResourceId=q", body)
    until(lab_api, {"q": "FAILED"}, "queuedResources")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"quota": []}, "the capacity has no such field; the fields are quotas"),
        ({"quotas": [{"zone": "mars", "generation": "v4", "chips": 8}]}, "'mars' is not a zone"),
        ({"quotas": [{"zone": "us-central2-b", "generation": "v5p", "chips": 8}]}, "does not offer 'v5p'"),
        ({"quotas": [{"zone": "us-central2-b", "generation": "v4"}]}, "chips"),
        ({"quotas": 2 * [{"zone": "us-central2-b", "generation": "v4", "chips": 8}]}, "the same zone"),
        ({"stockouts": ["us-central2-b"]}, "not a JSON object"),
        ({"stockouts": [{"zone": "us-central2-b", "type": "v5p-8"}]}, "does not offer 'v5p-8'"),
        ({"stockouts": [{"zone": "us-central2-b", "seconds": 0}]}, "more than 0"),
        ({"preemption": {"per_hour": -1}}, "between 0 and"),
        ({"preemption": {"per_hour": True}}, "not of type"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused_and_changes_nothing(
    shared_api: LabApi, body: Any, words: str
) -> None:
    before = shared_api.call("GET", "lab/capacity")[1]
    status, answer = shared_api.call("POST", "lab/capacity", body)
    assert (status, words in answer["error"]["message"]) == (400, True), answer
    assert shared_api.call("GET", "lab/capacity")[1] == before
