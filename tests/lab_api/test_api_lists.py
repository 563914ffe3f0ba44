"""Lists: paging, every location at once, and what the lab's cloud offers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud.location import locations_pb2
from google.longrunning import operations_pb2

from tests.support.lab_api import LOCATION, LabApi
from tests.support.tpu_client import Client

OTHER = "projects/other/locations"
SMALL = {"accelerator_type": "v2-8", "runtime_version": "tpu-ubuntu2204-base"}
ZONES = ("us-central1-f", "us-central1-b")


@pytest.fixture
async def fleet(client: Client, shared_api: LabApi) -> list[str]:
    """Full names of six nodes in two zones of the project ``other``, which no other test touches."""
    names = [f"{OTHER}/{zone}/nodes/page{number}" for zone in ZONES for number in range(3)]
    there = {node["name"] for node in shared_api.call("GET", f"v2/{OTHER}/-/nodes")[1].get("nodes", [])}
    for name in set(names) - there:
        parent, _, short = name.rsplit("/", 2)
        await client.do("create_node", parent=parent, node_id=short, node=SMALL)
    return sorted(names)


async def test_pages_hold_every_node_once_in_order(client: Client, fleet: list[str]) -> None:
    pages = await client.pages("list_nodes", parent=f"{OTHER}/-", page_size=4)
    assert [len(page.nodes) for page in pages] == [4, 2]
    assert [bool(page.next_page_token) for page in pages] == [True, False]
    assert [node.name for page in pages for node in page.nodes] == fleet


async def test_a_zone_lists_only_its_own(client: Client, fleet: list[str]) -> None:
    pages = await client.pages("list_nodes", parent=f"{OTHER}/{ZONES[0]}")
    assert [node.name for page in pages for node in page.nodes] == [name for name in fleet if ZONES[0] in name]
    assert [list(page.nodes) for page in await client.pages("list_nodes", parent=f"{OTHER}/us-east1-d")] == [[]]


async def test_listed_nodes_are_what_get_returns(client: Client, fleet: list[str]) -> None:
    pages = await client.pages("list_nodes", parent=f"{OTHER}/-")
    for node in pages[0].nodes:
        assert node == await client.call("get_node", name=node.name)


async def test_a_token_goes_on_after_the_last_node_even_if_that_is_gone(client: Client, fleet: list[str]) -> None:
    first = await client.pages("list_nodes", parent=f"{OTHER}/-", page_size=2)
    token = first[0].next_page_token
    await client.do("delete_node", name=fleet[1])
    rest = await client.pages("list_nodes", parent=f"{OTHER}/-", page_token=token)
    assert [node.name for page in rest for node in page.nodes] == fleet[2:]


async def test_a_token_of_another_list_is_refused(client: Client, fleet: list[str]) -> None:
    pages = await client.pages("list_nodes", parent=f"{OTHER}/-", page_size=2)
    with pytest.raises(exceptions.BadRequest, match="page_token"):
        await client.call("list_nodes", parent=f"{OTHER}/{ZONES[0]}", page_token=pages[0].next_page_token)


async def test_accelerator_types_are_those_of_the_zone(client: Client) -> None:
    pages = await client.pages("list_accelerator_types", parent=LOCATION)
    names = {entry.type_ for page in pages for entry in page.accelerator_types}
    assert {"v4-8", "v4-4096", "v6e-16"} <= names
    assert {name.split("-")[0] for name in names} == {"v4", "v6e"}
    one = await client.call("get_accelerator_type", name=f"{LOCATION}/acceleratorTypes/v4-32")
    assert (one.type_, one.accelerator_configs[0].topology) == ("v4-32", "2x2x4")
    with pytest.raises(exceptions.NotFound):
        await client.call("get_accelerator_type", name=f"{LOCATION}/acceleratorTypes/v5p-8")


async def test_runtime_versions(client: Client) -> None:
    pages = await client.pages("list_runtime_versions", parent=LOCATION, page_size=3)
    assert len(pages) > 1
    versions = {entry.version for page in pages for entry in page.runtime_versions}
    assert {"tpu-ubuntu2204-base", "v2-alpha-tpuv5-lite", "v2-alpha-tpuv6e"} <= versions
    one = await client.call("get_runtime_version", name=f"{LOCATION}/runtimeVersions/tpu-vm-base")
    assert one.version == "tpu-vm-base"
    with pytest.raises(exceptions.NotFound):
        await client.call("get_runtime_version", name=f"{LOCATION}/runtimeVersions/none")


async def test_locations(client: Client) -> None:
    found: list[Any] = []
    request = locations_pb2.ListLocationsRequest(name="projects/lab", page_size=7)
    while True:
        answer = await client._invoke("list_locations", request)
        found += answer.locations
        request.page_token = answer.next_page_token
        if not request.page_token:
            break
    assert len(found) == len({entry.location_id for entry in found}) > 7
    assert {"us-central2-b", "us-central1-f"} <= {entry.location_id for entry in found}
    one = await client._invoke("get_location", locations_pb2.GetLocationRequest(name=LOCATION))
    assert (one.name, one.location_id) == (LOCATION, "us-central2-b")
    with pytest.raises(exceptions.Forbidden):
        await client._invoke("list_locations", locations_pb2.ListLocationsRequest(name="projects/no"))


async def test_operations_are_listed_read_and_deleted(client: Client, unique: str) -> None:
    operation = await client.call(
        "create_node", parent=LOCATION, node_id=unique, node={**SMALL, "accelerator_type": "v4-8"}
    )
    name = operation.operation.name
    assert name.startswith(f"{LOCATION}/operations/")
    await client.finish(operation)
    one = await client._invoke("get_operation", operations_pb2.GetOperationRequest(name=name))
    assert one.done
    assert one.response.type_url == "type.googleapis.com/google.cloud.tpu.v2.Node"
    assert one.metadata.type_url == "type.googleapis.com/google.cloud.tpu.v2.OperationMetadata"
    for parent in (LOCATION, "projects/lab/locations/-"):
        listed = await client._invoke("list_operations", operations_pb2.ListOperationsRequest(name=parent))
        assert name in [entry.name for entry in listed.operations]
    await client._invoke("cancel_operation", operations_pb2.CancelOperationRequest(name=name))
    await client._invoke("delete_operation", operations_pb2.DeleteOperationRequest(name=name))
    with pytest.raises(exceptions.NotFound):
        await client._invoke("get_operation", operations_pb2.GetOperationRequest(name=name))


async def test_the_service_identity_is_the_projects(client: Client) -> None:
    answers = await asyncio.gather(
        *(client.call("generate_service_identity", parent=parent) for parent in (LOCATION, f"{OTHER}/{ZONES[0]}"))
    )
    assert len({answer.identity.email for answer in answers}) == 2
