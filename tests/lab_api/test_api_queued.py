"""Queued resources: their walk, their nodes, their end, through every transport."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from google.api_core import exceptions

from tests.support.lab_api import LOCATION, PATIENCE, LabApi
from tests.support.tpu_client import Client
from tpu_ops.lab.api.records import by_number

NODE = {"accelerator_type": "v4-16", "runtime_version": "tpu-ubuntu2204-base"}
WALK = ["ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]


def queued(name: str) -> str:
    return f"{LOCATION}/queuedResources/{name}"


def single(name: str, **fields: Any) -> dict[str, Any]:
    return {"tpu": {"node_spec": [{"parent": LOCATION, "node_id": name, "node": NODE}]}, **fields}


async def reaches(client: Client, name: str, wanted: str) -> Any:
    """Return the queued resource once it is in a state."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found = await client.call("get_queued_resource", name=queued(name))
            if found.state.state.name == wanted:
                return found
            await asyncio.sleep(0.01)  # polls until the time-out


async def test_a_queued_resource_becomes_active_and_creates_its_node(client: Client, unique: str) -> None:
    operation = await client.call(
        "create_queued_resource", parent=LOCATION, queued_resource_id=unique, queued_resource=single(unique, spot={})
    )
    seen: list[str] = []
    async with asyncio.timeout(PATIENCE):
        while seen[-1:] != ["ACTIVE"]:
            state = (await client.call("get_queued_resource", name=queued(unique))).state.state.name
            if state not in seen[-1:]:
                seen.append(state)
    states = ["CREATING", *WALK]
    assert seen == [state for state in states if state in seen], "states come in their order"
    made = await client.finish(operation)
    assert made.name == queued(unique)
    node = await client.call("get_node", name=f"{LOCATION}/nodes/{unique}")
    assert node.state.name == "READY"
    assert node.queued_resource == by_number(queued(unique)) != queued(unique)
    assert (node.scheduling_config.spot, node.multislice_node, len(node.network_endpoints)) == (True, False, 2)


async def test_a_multislice_request_makes_numbered_nodes(client: Client, unique: str) -> None:
    spec = {"parent": LOCATION, "multislice_params": {"node_count": 3, "node_id_prefix": f"{unique}-ms"}, "node": NODE}
    await client.do(
        "create_queued_resource",
        parent=LOCATION,
        queued_resource_id=unique,
        queued_resource={"tpu": {"node_spec": [spec]}},
    )
    found = await reaches(client, unique, "ACTIVE")
    assert found.tpu.node_spec[0].multislice_params.node_count == 3
    for index in range(3):
        node = await client.call("get_node", name=f"{LOCATION}/nodes/{unique}-ms-{index}")
        assert (node.multislice_node, node.queued_resource) == (True, by_number(queued(unique)))


async def test_deleting_an_active_one_needs_force_and_takes_the_node_along(client: Client, unique: str) -> None:
    await client.do(
        "create_queued_resource", parent=LOCATION, queued_resource_id=unique, queued_resource=single(unique)
    )
    await reaches(client, unique, "ACTIVE")
    with pytest.raises(exceptions.BadRequest, match="set force"):
        await client.call("delete_queued_resource", name=queued(unique))
    await client.do("delete_queued_resource", name=queued(unique), force=True)
    for method, name in (("get_queued_resource", queued(unique)), ("get_node", f"{LOCATION}/nodes/{unique}")):
        with pytest.raises(exceptions.NotFound):
            await client.call(method, name=name)


async def test_a_queued_resource_without_its_node_is_suspended_and_deletable(client: Client, unique: str) -> None:
    await client.do(
        "create_queued_resource", parent=LOCATION, queued_resource_id=unique, queued_resource=single(unique)
    )
    await reaches(client, unique, "ACTIVE")
    await client.do("delete_node", name=f"{LOCATION}/nodes/{unique}")
    await reaches(client, unique, "SUSPENDED")
    await client.do("delete_queued_resource", name=queued(unique))


async def test_preemption_suspends_and_reset_makes_new_nodes(client: Client, shared_api: LabApi, unique: str) -> None:
    await client.do(
        "create_queued_resource", parent=LOCATION, queued_resource_id=unique, queued_resource=single(unique)
    )
    await reaches(client, unique, "ACTIVE")
    name = f"{LOCATION}/nodes/{unique}"
    before = await client.call("get_node", name=name)
    assert shared_api.call("POST", "lab/preempt", {"node": name})[0] == 200
    suspended = await reaches(client, unique, "SUSPENDED")
    assert suspended.state.state_initiator.name == "SERVICE"
    assert (await client.call("get_node", name=name)).state.name == "PREEMPTED"
    await client.do("reset_queued_resource", name=queued(unique))
    await reaches(client, unique, "ACTIVE")
    after = await client.call("get_node", name=name)
    assert (after.state.name, after.id != before.id) == ("READY", True)


async def test_a_queued_resource_fails_when_its_valid_time_is_over(client: Client, unique: str) -> None:
    policy = {"valid_until_time": {"seconds": int(time.time()) - 5}}
    await client.call(
        "create_queued_resource",
        parent=LOCATION,
        queued_resource_id=unique,
        queued_resource=single(unique, queueing_policy=policy),
    )
    failed = await reaches(client, unique, "FAILED")
    assert "valid interval" in failed.state.failed_data.error.message


async def test_the_same_request_id_begins_one_operation(client: Client, unique: str) -> None:
    request = {
        "parent": LOCATION,
        "queued_resource_id": unique,
        "queued_resource": single(unique),
        "request_id": f"id-{unique}",
    }
    first = await client.call("create_queued_resource", **request)
    second = await client.call("create_queued_resource", **request)
    assert first.operation.name == second.operation.name
    with pytest.raises(exceptions.Conflict):
        await client.call("create_queued_resource", **{**request, "request_id": "another"})


async def test_they_are_listed_in_pages(client: Client) -> None:
    parent = "projects/other/locations/us-central2-b"
    for number in range(3):
        spec = {"parent": parent, "node_id": f"listed{number}", "node": NODE}
        try:
            await client.call(
                "create_queued_resource",
                parent=parent,
                queued_resource_id=f"listed{number}",
                queued_resource={"tpu": {"node_spec": [spec]}},
            )
        except exceptions.Conflict:
            continue  # made by the same test over another transport
    pages = await client.pages("list_queued_resources", parent="projects/other/locations/-", page_size=2)
    shorts = [entry.name.rsplit("/", 1)[1] for page in pages for entry in page.queued_resources]
    assert ([len(page.queued_resources) for page in pages], shorts) == ([2, 1], ["listed0", "listed1", "listed2"])


REFUSED = [
    ("no nodes", {"tpu": {}}, "node_spec: missing"),
    ("no node id", single(""), "node_id: missing"),
    ("bad node id", single("Bad"), "Bad"),
    ("type", {"tpu": {"node_spec": [{"node_id": "a", "node": {**NODE, "accelerator_type": "v5p-8"}}]}}, "v5p-8"),
    ("parent", {"tpu": {"node_spec": [{"parent": "projects/x/locations/y", "node_id": "a", "node": NODE}]}}, "parent"),
    ("count", {"tpu": {"node_spec": [{"multislice_params": {"node_count": 0}, "node": NODE}]}}, "node_count"),
]


@pytest.mark.parametrize(("body", "text"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
async def test_bad_requests_are_refused(client: Client, unique: str, body: dict[str, Any], text: str) -> None:
    with pytest.raises(exceptions.BadRequest, match=text):
        await client.call("create_queued_resource", parent=LOCATION, queued_resource_id=unique, queued_resource=body)
    with pytest.raises(exceptions.NotFound):
        await client.call("get_queued_resource", name=queued(unique))
