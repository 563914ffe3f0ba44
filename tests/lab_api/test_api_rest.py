"""REST as gcloud and others send it: spellings, unknown fields, errors as JSON, v1, compute, the lab's own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from tests.support.lab_api import LOCATION, LabApi

RUNTIME = "tpu-ubuntu2204-base"


def test_newer_fields_and_parameters_are_ignored(shared_api: LabApi, unique: str) -> None:
    body = {"acceleratorType": "v4-8", "runtimeVersion": RUNTIME, "notYetInvented": {"a": [1]}}
    path = f"v2alpha1/{LOCATION}/nodes?nodeId={unique}&alt=json&prettyPrint=true&somethingNew=1"
    status, operation = shared_api.call("POST", path, body)
    assert (status, operation["metadata"]["@type"]) == (
        200,
        "type.googleapis.com/google.cloud.tpu.v2alpha1.OperationMetadata",
    )


@pytest.mark.parametrize("spelling", ["network_config.enable_external_ips", "networkConfig.enableExternalIps"])
def test_masks_come_in_either_spelling(shared_api: LabApi, unique: str, spelling: str) -> None:
    shared_api.create(unique)
    body = {"networkConfig": {"enableExternalIps": False}, "description": "not in the mask"}
    ended = shared_api.done("PATCH", f"v2/{LOCATION}/nodes/{unique}?updateMask={spelling}", body)
    assert "error" not in ended
    node = shared_api.node(unique)
    assert "accessConfig" not in node["networkEndpoints"][0]
    assert "description" not in node


def test_numbers_of_64_bits_are_strings_and_enums_are_names(shared_api: LabApi, unique: str) -> None:
    node = shared_api.create(unique)
    assert node["id"].isdecimal()
    assert (node["state"], node["apiVersion"], node["health"]) == ("READY", "V2", "HEALTHY")
    listed = shared_api.call("GET", f"v2/{LOCATION}/nodes?pageSize=1000")[1]["nodes"]
    assert shared_api.node(unique) in listed


def test_force_is_understood_in_any_case(shared_api: LabApi, unique: str) -> None:
    spec = {"nodeId": unique, "node": {"acceleratorType": "v4-8", "runtimeVersion": RUNTIME}}
    path = f"v2/{LOCATION}/queuedResources"
    shared_api.done("POST", f"{path}?queuedResourceId={unique}", {"tpu": {"nodeSpec": [spec]}})
    assert "error" not in shared_api.done("DELETE", f"{path}/{unique}?force=True")
    status, refused = shared_api.call("DELETE", f"{path}/{unique}?force=maybe")
    assert (status, refused["error"]["status"]) == (400, "INVALID_ARGUMENT")


@pytest.mark.parametrize(
    "case",
    [
        ("GET", "v2/nonsense", None, 404, "NOT_FOUND"),
        ("GET", "nonsense", None, 404, "NOT_FOUND"),
        ("POST", f"v2/{LOCATION}/nodes/a", {}, 404, "NOT_FOUND"),
        ("POST", f"v2/{LOCATION}/nodes/a:simulateMaintenanceEvent", {}, 404, "NOT_FOUND"),
        ("GET", f"v1/{LOCATION}/nodes", None, 404, "NOT_FOUND"),
        ("GET", "lab/nonsense", None, 404, "NOT_FOUND"),
        ("GET", "lab/preempt", None, 404, "NOT_FOUND"),
        ("GET", f"v2/{LOCATION}/nodes?pageSize=many", None, 400, "INVALID_ARGUMENT"),
        ("GET", "v2/projects/no/locations", None, 403, "PERMISSION_DENIED"),
        ("GET", "compute/v1/projects/no", None, 403, "PERMISSION_DENIED"),
        ("GET", f"v2/{LOCATION}/acceleratorTypes?filter=x", None, 501, "UNIMPLEMENTED"),
        ("POST", f"v2/{LOCATION}/nodes?nodeId=a", {"acceleratorType": 7}, 400, "INVALID_ARGUMENT"),
        ("POST", f"v2/{LOCATION}/nodes?nodeId=a", ["no object"], 400, "INVALID_ARGUMENT"),
        ("POST", "lab/preempt", {}, 400, "INVALID_ARGUMENT"),
        ("POST", "lab/preempt", {"node": f"{LOCATION}/nodes/missing"}, 404, "NOT_FOUND"),
    ],
)
def test_every_refusal_is_the_services_json(shared_api: LabApi, case: tuple[str, str, object, int, str]) -> None:
    method, path, body, status, code = case
    found, answer = shared_api.call(method, path, body)
    assert (found, answer["error"]["code"], answer["error"]["status"]) == (status, status, code)
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "charset"),
    [(b"{half", ""), (b"\xff", ""), (b"[" * 100_000, ""), (b'{"a":' * 100_000, ""), (b"{}", "; charset=nonsense")],
    ids=["half", "no text", "deep list", "deep object", "unknown charset"],
)
def test_a_body_that_is_not_json_is_refused(shared_api: LabApi, body: bytes, charset: str) -> None:
    url = f"{shared_api.rest}/v2/{LOCATION}/nodes?nodeId=a"
    headers = {"Content-Type": f"application/json{charset}"}
    request = urllib.request.Request(url, method="POST", data=body, headers=headers)  # noqa: S310 - the loopback process
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=5)  # noqa: S310 - http on loopback
    with refused.value as failure:
        assert failure.code == 400
        assert json.load(failure)["error"]["status"] == "INVALID_ARGUMENT"


def test_v1_lists_locations_and_accelerator_types(shared_api: LabApi) -> None:
    _, locations = shared_api.call("GET", "v1/projects/lab/locations")
    assert LOCATION in [entry["name"] for entry in locations["locations"]]
    _, types = shared_api.call("GET", f"v1/{LOCATION}/acceleratorTypes?pageSize=100")
    assert "v4-32" in [entry["type"] for entry in types["acceleratorTypes"]]


def test_compute_answers_with_a_project_without_keys(shared_api: LabApi) -> None:
    status, project = shared_api.call("GET", "compute/v1/projects/lab")
    assert (status, project["name"]) == (200, "lab")
    assert project["commonInstanceMetadata"]["fingerprint"] == "bGFi"


def test_the_lab_tells_its_workers_and_itself(shared_api: LabApi, unique: str) -> None:
    node = shared_api.create(unique, "v4-16")
    _, answer = shared_api.call("GET", "lab/workers")
    workers = [worker for worker in answer["workers"] if worker["node"] == node["name"]]
    assert [worker["index"] for worker in workers] == [0, 1]
    for worker, endpoint in zip(workers, node["networkEndpoints"], strict=True):
        assert worker["internal_ip"] == endpoint["ipAddress"]
        assert worker["external_ip"] == endpoint["accessConfig"]["externalIp"]
        assert (worker["container"], worker["image"]) == ("", "none (API only)")
    _, info = shared_api.call("GET", "lab/info")
    assert (info["projects"], info["state"]) == (["lab", "other"], str(shared_api.state))
    assert info["nodes"] > 0


def test_an_operation_can_be_waited_for(shared_api: LabApi, unique: str) -> None:
    body = {"acceleratorType": "v4-8", "runtimeVersion": RUNTIME}
    _, operation = shared_api.call("POST", f"v2/{LOCATION}/nodes?nodeId={unique}", body)
    _, ended = shared_api.call("POST", f"v2/{operation['name']}:wait", {})
    assert ended["done"] is True
    assert ended["response"]["@type"] == "type.googleapis.com/google.cloud.tpu.v2.Node"
