"""The contract of the node methods, through every transport of google-cloud-tpu's client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.api_core import exceptions
from google.protobuf import empty_pb2, field_mask_pb2

from tests.support.lab_api import LOCATION, LabApi
from tests.support.tpu_client import Client

NODE = {"accelerator_type": "v4-32", "runtime_version": "tpu-ubuntu2204-base"}
SMALL = {**NODE, "accelerator_type": "v4-8"}


def states(client: Client) -> Any:
    return client.types.Node.State


def internal(node: Any) -> list[str]:
    return [endpoint.ip_address for endpoint in node.network_endpoints]


def external(node: Any) -> list[str]:
    return [endpoint.access_config.external_ip for endpoint in node.network_endpoints]


async def test_a_created_node_becomes_ready_with_one_endpoint_per_worker(client: Client, unique: str) -> None:
    name = f"{LOCATION}/nodes/{unique}"
    operation = await client.call("create_node", parent=LOCATION, node_id=unique, node=NODE)
    node = await client.finish(operation)

    assert operation.metadata.verb == "create"
    assert operation.metadata.target == name
    assert operation.metadata.end_time > operation.metadata.create_time
    assert node == await client.call("get_node", name=name)
    assert node.name == name
    assert node.state == states(client).READY
    assert node.health == client.types.Node.Health.HEALTHY
    assert node.api_version == client.types.Node.ApiVersion.V2
    assert node.id > 0
    assert node.create_time is not None
    assert node.accelerator_config == client.types.AcceleratorConfig(type_="V4", topology="2x2x4")
    assert node.network_config.enable_external_ips
    assert node.service_account.email
    assert [endpoint.port for endpoint in node.network_endpoints] == [8470] * 4
    assert len(set(internal(node))) == len(set(external(node)) - {""}) == 4


async def test_fields_that_the_client_set_are_kept(client: Client, unique: str) -> None:
    wanted: dict[str, Any] = {
        **SMALL,
        "description": "d",
        "labels": {"team": "{{ lookup('pipe','id') }}"},
        "metadata": {"startup-script": "#!/bin/sh\n"},
        "tags": ["a", "b"],
        "scheduling_config": {"spot": True},
        "service_account": {"email": "me@lab", "scope": ["one"]},
        "data_disks": [{"source_disk": f"projects/lab/zones/z/disks/{unique}", "mode": "READ_WRITE"}],
        "network_config": {"network": "mine", "enable_external_ips": True},
    }
    node = await client.do("create_node", parent=LOCATION, node_id=unique, node=wanted)
    assert node.description == "d"
    assert dict(node.labels) == wanted["labels"]
    assert dict(node.metadata) == wanted["metadata"]
    assert list(node.tags) == ["a", "b"]
    assert node.scheduling_config.spot
    assert (node.service_account.email, list(node.service_account.scope)) == ("me@lab", ["one"])
    assert node.data_disks[0].source_disk == f"projects/lab/zones/z/disks/{unique}"
    assert node.network_config.network == "projects/lab/global/networks/mine"


@pytest.mark.parametrize(
    ("network", "expected"),
    [({}, True), ({"network_config": {}}, False), ({"network_config": {"enable_external_ips": True}}, True)],
)
async def test_external_addresses_follow_the_network_config(
    client: Client, unique: str, network: dict[str, Any], expected: bool
) -> None:
    node = await client.do("create_node", parent=LOCATION, node_id=unique, node={**SMALL, **network})
    assert bool(external(node)[0]) is expected
    assert node.network_config.enable_external_ips is expected


async def test_a_type_can_be_given_as_configuration(client: Client, unique: str) -> None:
    config = {"type_": "V4", "topology": "2x2x2"}
    node = await client.do(
        "create_node",
        parent=LOCATION,
        node_id=unique,
        node={"accelerator_config": config, "runtime_version": "tpu-ubuntu2204-base"},
    )
    assert (node.accelerator_type, len(node.network_endpoints)) == ("v4-16", 2)


async def test_stop_and_start_keep_identity_and_change_external_addresses(client: Client, unique: str) -> None:
    name = f"{LOCATION}/nodes/{unique}"
    first = await client.do("create_node", parent=LOCATION, node_id=unique, node=NODE)
    stopped = await client.do("stop_node", name=name)
    assert stopped.state == states(client).STOPPED
    assert external(stopped) == [""] * 4
    with pytest.raises(exceptions.GoogleAPICallError, match="is STOPPED and cannot be stopped"):
        await client.call("stop_node", name=name)

    second = await client.do("start_node", name=name)
    assert second.state == states(client).READY
    assert (second.id, internal(second)) == (first.id, internal(first))
    assert not set(external(second)) & set(external(first))
    with pytest.raises(exceptions.GoogleAPICallError, match="is READY and cannot be started"):
        await client.call("start_node", name=name)


async def test_a_deleted_node_is_gone_and_its_successor_has_another_id(client: Client, unique: str) -> None:
    name = f"{LOCATION}/nodes/{unique}"
    first = await client.do("create_node", parent=LOCATION, node_id=unique, node=SMALL)
    assert await client.do("delete_node", name=name) in (None, empty_pb2.Empty())
    with pytest.raises(exceptions.NotFound):
        await client.call("get_node", name=name)
    second = await client.do("create_node", parent=LOCATION, node_id=unique, node=SMALL)
    assert second.id != first.id


async def test_an_update_replaces_exactly_the_fields_of_the_mask(client: Client, unique: str) -> None:
    wanted: dict[str, Any] = {**SMALL, "labels": {"a": "1", "b": "2"}, "description": "old", "metadata": {"k": "v"}}
    await client.do("create_node", parent=LOCATION, node_id=unique, node=wanted)
    change: dict[str, Any] = {"name": f"{LOCATION}/nodes/{unique}", "labels": {"c": "3"}, "description": "new"}
    node = await client.do("update_node", node=change, update_mask=field_mask_pb2.FieldMask(paths=["labels"]))
    assert (dict(node.labels), node.description, dict(node.metadata)) == ({"c": "3"}, "old", {"k": "v"})
    mask = field_mask_pb2.FieldMask(paths=["metadata", "description", "tags", "data_disks"])
    change |= {"tags": ["t"], "data_disks": [{"source_disk": "projects/lab/zones/z/disks/d", "mode": "READ_ONLY"}]}
    node = await client.do("update_node", node=change, update_mask=mask)
    assert (dict(node.labels), node.description, dict(node.metadata)) == ({"c": "3"}, "new", {})
    assert (list(node.tags), len(node.data_disks)) == (["t"], 1)


async def test_external_addresses_can_be_taken_and_given(client: Client, unique: str) -> None:
    name = f"{LOCATION}/nodes/{unique}"
    await client.do("create_node", parent=LOCATION, node_id=unique, node=SMALL)
    mask = field_mask_pb2.FieldMask(paths=["network_config.enable_external_ips"])
    for wanted in (False, True):
        change = {"name": name, "network_config": {"enable_external_ips": wanted}}
        node = await client.do("update_node", node=change, update_mask=mask)
        assert bool(external(node)[0]) is wanted
        assert node.state == states(client).READY
        assert node.network_config.network.endswith("/default")


async def test_concurrent_updates_are_applied_in_the_order_they_came(client: Client, unique: str) -> None:
    await client.do("create_node", parent=LOCATION, node_id=unique, node=SMALL)
    mask = field_mask_pb2.FieldMask(paths=["description"])
    operations = [
        await client.call(
            "update_node", node={"name": f"{LOCATION}/nodes/{unique}", "description": str(number)}, update_mask=mask
        )
        for number in range(5)
    ]
    await asyncio.gather(*(client.finish(operation) for operation in operations))
    assert (await client.call("get_node", name=f"{LOCATION}/nodes/{unique}")).description == "4"


async def test_guest_attributes_come_in_the_order_asked_for(client: Client, unique: str) -> None:
    name = f"{LOCATION}/nodes/{unique}"
    await client.do("create_node", parent=LOCATION, node_id=unique, node=NODE)

    async def keys(**request: Any) -> list[list[tuple[str, str, str]]]:
        answer = await client.call("get_guest_attributes", name=name, **request)
        return [
            [(item.namespace, item.key, item.value) for item in entry.query_value.items]
            for entry in answer.guest_attributes
        ]

    every = await keys()
    assert len(every) == 4
    published = [("hostkeys", "ssh-ed25519"), ("instance", "hostname")]
    assert all([(space, key) for space, key, _ in entry] == published for entry in every)
    assert len({value for entry in every for _, _, value in entry}) == 8
    assert [entry[1][2][-4:] for entry in every] == ["-w-0", "-w-1", "-w-2", "-w-3"]
    assert await keys(worker_ids=[""]) == every
    assert await keys(worker_ids=["2", "0"]) == [every[2], every[0]]
    assert await keys(query_path="hostkeys/") == await keys(query_path="hostkeys/ssh-ed25519")
    assert await keys(query_path="hostkeys/") == [entry[:1] for entry in every]
    assert await keys(query_path="instance/hostname", worker_ids=["1"]) == [every[1][1:]]
    assert await keys(query_path="other/", worker_ids=["1"]) == [[]]
    for wrong in ("4", "-1", "x"):
        with pytest.raises(exceptions.BadRequest, match="is not a worker of"):
            await keys(worker_ids=[wrong])


async def test_a_preempted_node_can_only_be_deleted(client: Client, shared_api: LabApi, unique: str) -> None:
    name = f"{LOCATION}/nodes/{unique}"
    await client.do("create_node", parent=LOCATION, node_id=unique, node=SMALL)
    status, answer = shared_api.call("POST", "lab/preempt", {"node": name})
    assert (status, answer["state"]) == (200, "PREEMPTED")
    for method in ("start_node", "stop_node"):
        with pytest.raises(exceptions.BadRequest, match="delete it and create it again"):
            await client.call(method, name=name)
    await client.do("delete_node", name=name)


MISSING = f"{LOCATION}/nodes/missing"
REFUSED: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("unknown node", "get_node", {"name": MISSING}, "NOT_FOUND", "nodes/missing"),
    ("delete unknown", "delete_node", {"name": MISSING}, "NOT_FOUND", "nodes/missing"),
    ("stop unknown", "stop_node", {"name": MISSING}, "NOT_FOUND", "nodes/missing"),
    ("start unknown", "start_node", {"name": MISSING}, "NOT_FOUND", "nodes/missing"),
    ("attributes of unknown", "get_guest_attributes", {"name": MISSING}, "NOT_FOUND", "nodes/missing"),
    ("project", "list_nodes", {"parent": "projects/no/locations/-"}, "PERMISSION_DENIED", "project no"),
    ("zone", "list_nodes", {"parent": "projects/lab/locations/mars"}, "PERMISSION_DENIED", "mars"),
    ("zone of a node", "get_node", {"name": "projects/lab/locations/mars/nodes/n"}, "PERMISSION_DENIED", "mars"),
    ("page token", "list_nodes", {"parent": LOCATION, "page_token": "x!"}, "INVALID_ARGUMENT", "page_token"),
    ("page size", "list_nodes", {"parent": LOCATION, "page_size": -1}, "INVALID_ARGUMENT", "page_size"),
    ("type of a zone", "create_node", {"node": {"accelerator_type": "v5litepod-4"}}, "INVALID_ARGUMENT", "not found"),
    ("size of a type", "create_node", {"node": {"accelerator_type": "v4-24"}}, "INVALID_ARGUMENT", "v4-24"),
    ("no type", "create_node", {"node": {"accelerator_type": ""}}, "INVALID_ARGUMENT", "accelerator_type"),
    (
        "topology",
        "create_node",
        {"node": {"accelerator_type": "", "accelerator_config": {"type_": "V4", "topology": "3x3x3"}}},
        "INVALID_ARGUMENT",
        "3x3x3",
    ),
    (
        "type and topology",
        "create_node",
        {"node": {"accelerator_config": {"type_": "V4", "topology": "2x2x4"}}},
        "INVALID_ARGUMENT",
        "different accelerators",
    ),
    ("runtime", "create_node", {"node": {"runtime_version": "win95"}}, "INVALID_ARGUMENT", "win95"),
    ("no runtime", "create_node", {"node": {"runtime_version": ""}}, "INVALID_ARGUMENT", "runtime_version"),
    ("node id", "create_node", {"node_id": "Bad_Name"}, "INVALID_ARGUMENT", "Bad_Name"),
    ("no node id", "create_node", {"node_id": ""}, "INVALID_ARGUMENT", "node_id"),
    ("long node id", "create_node", {"node_id": "a" * 64}, "INVALID_ARGUMENT", "node_id"),
    (
        "shared disk",
        "create_node",
        {"node": {"accelerator_type": "v4-16", "data_disks": [{"source_disk": "d", "mode": "READ_WRITE"}]}},
        "INVALID_ARGUMENT",
        "READ_ONLY",
    ),
    (
        "two interfaces",
        "create_node",
        {"node": {"network_configs": [{"network": "a"}, {"network": "b"}]}},
        "INVALID_ARGUMENT",
        "network_configs",
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=[case[0] for case in REFUSED])
async def test_refusals_carry_the_code_and_name_the_cause(
    client: Client, unique: str, case: tuple[str, str, dict[str, Any], str, str]
) -> None:
    _, method, request, code, text = case
    if method == "create_node":
        request = {"parent": LOCATION, "node_id": unique, **request, "node": {**SMALL, **request.get("node", {})}}
    with pytest.raises(exceptions.GoogleAPICallError) as refused:
        await client.call(method, **request)
    assert text in str(refused.value)
    if client.transport == "rest":
        assert refused.value.response.json()["error"]["status"] == code
    else:
        assert refused.value.grpc_status_code.name == code


async def test_a_name_can_be_taken_once(client: Client, unique: str) -> None:
    await client.call("create_node", parent=LOCATION, node_id=unique, node=SMALL)
    with pytest.raises(exceptions.Conflict, match=f"nodes/{unique}' already exists"):
        await client.call("create_node", parent=LOCATION, node_id=unique, node=SMALL)


@pytest.mark.parametrize("paths", [[], ["state"], ["network_config"], ["labels", "nonsense"]])
async def test_a_bad_mask_is_refused_and_changes_nothing(client: Client, unique: str, paths: list[str]) -> None:
    name = f"{LOCATION}/nodes/{unique}"
    before = await client.do("create_node", parent=LOCATION, node_id=unique, node={**SMALL, "labels": {"a": "b"}})
    with pytest.raises(exceptions.BadRequest, match="update_mask"):
        await client.call("update_node", node={"name": name}, update_mask=field_mask_pb2.FieldMask(paths=paths))
    assert await client.call("get_node", name=name) == before
