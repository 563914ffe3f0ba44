"""v2alpha1: what gcloud's alpha commands and google-cloud-tpu's alpha client send."""

from __future__ import annotations

import asyncio

import pytest
from google.api_core import exceptions

from tests.support.lab_api import LOCATION, PATIENCE, LabApi
from tests.support.tpu_client import Client

NODE = {"accelerator_type": "v4-32", "runtime_version": "tpu-ubuntu2204-base"}


async def test_a_maintenance_event_changes_every_external_address(alpha_client: Client, unique: str) -> None:
    name = f"{LOCATION}/nodes/{unique}"
    before = await alpha_client.do("create_node", parent=LOCATION, node_id=unique, node=NODE)
    after = await alpha_client.do("simulate_maintenance_event", name=name, worker_ids=["1"])
    assert after.state.name == "READY"
    assert after.health.name == "HEALTHY"
    assert after.id == before.id
    assert after.api_version.name == "V2_ALPHA1"
    pairs = list(zip(before.network_endpoints, after.network_endpoints, strict=True))
    assert [old.ip_address for old, _ in pairs] == [new.ip_address for _, new in pairs]
    old = {old.access_config.external_ip for old, _ in pairs}
    new = {new.access_config.external_ip for _, new in pairs}
    assert (len(new), old & new) == (4, set())
    again = await alpha_client.do("perform_maintenance", name=name)
    third = {endpoint.access_config.external_ip for endpoint in again.network_endpoints}
    assert not third & (old | new)


async def test_maintenance_of_a_worker_that_is_not_there_is_refused(alpha_client: Client, unique: str) -> None:
    await alpha_client.do("create_node", parent=LOCATION, node_id=unique, node=NODE)
    with pytest.raises(exceptions.InvalidArgument, match="'4' is not a worker"):
        await alpha_client.call("simulate_maintenance_event", name=f"{LOCATION}/nodes/{unique}", worker_ids=["4"])


async def test_a_stopped_node_has_no_maintenance(alpha_client: Client, unique: str) -> None:
    name = f"{LOCATION}/nodes/{unique}"
    await alpha_client.do("create_node", parent=LOCATION, node_id=unique, node=NODE)
    await alpha_client.do("stop_node", name=name)
    with pytest.raises(exceptions.FailedPrecondition, match="STOPPED"):
        await alpha_client.call("simulate_maintenance_event", name=name)


async def test_the_same_request_id_creates_and_deletes_once(alpha_client: Client, unique: str) -> None:
    create = {"parent": LOCATION, "node_id": unique, "node": NODE, "request_id": "r1"}
    operations = [await alpha_client.call("create_node", **create) for _ in range(2)]
    assert len({operation.operation.name for operation in operations}) == 1
    await alpha_client.finish(operations[0])
    delete = {"name": f"{LOCATION}/nodes/{unique}", "request_id": "r2"}
    first = await alpha_client.call("delete_node", **delete)
    await alpha_client.finish(first)
    assert (await alpha_client.call("delete_node", **delete)).operation.name == first.operation.name


async def test_both_versions_show_one_queued_resource(alpha_client: Client, shared_api: LabApi, unique: str) -> None:
    spec = {"parent": LOCATION, "multi_node_params": {"node_count": 2, "node_id_prefix": f"{unique}-x"}, "node": NODE}
    made = await alpha_client.do(
        "create_queued_resource",
        parent=LOCATION,
        queued_resource_id=unique,
        queued_resource={"tpu": {"node_spec": [spec]}, "best_effort": {}},
    )
    assert made.tpu.node_spec[0].multi_node_params.node_count == 2
    assert "best_effort" in made
    path = f"{LOCATION}/queuedResources/{unique}"
    status, stable = shared_api.call("GET", f"v2/{path}")
    assert (status, stable["tpu"]["nodeSpec"][0]["multisliceParams"]["nodeCount"]) == (200, 2)
    _, alpha = shared_api.call("GET", f"v2alpha1/{path}")
    assert alpha["tpu"]["nodeSpec"][0]["multiNodeParams"] == {"nodeCount": 2, "nodeIdPrefix": f"{unique}-x"}
    async with asyncio.timeout(PATIENCE):
        while (await alpha_client.call("get_queued_resource", name=path)).state.state.name != "ACTIVE":  # noqa: ASYNC110 - the API has no event
            await asyncio.sleep(0.01)  # polls until the time-out
    nodes = [f"{LOCATION}/nodes/{unique}-x-{index}" for index in range(2)]
    before = [(await alpha_client.call("get_node", name=name)).network_endpoints for name in nodes]
    await alpha_client.do("perform_maintenance_queued_resource", name=path, node_names=[nodes[1]])
    after = [(await alpha_client.call("get_node", name=name)).network_endpoints for name in nodes]
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)


async def test_there_are_no_reservations(alpha_client: Client) -> None:
    pages = await alpha_client.pages("list_reservations", parent=LOCATION)
    assert [list(page.reservations) for page in pages] == [[]]
