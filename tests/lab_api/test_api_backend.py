"""What the API asks of its backend, and what becomes of nodes when the backend fails. In-process, without wires."""

from __future__ import annotations

from typing import Any

import pytest
from google.cloud.tpu_v2alpha1.types import cloud_tpu
from google.longrunning import operations_pb2

from tests.support.lab_service import LOCATION, NODE, Lab, until
from tpu_ops.lab.api import nodes, operations, queued
from tpu_ops.lab.api.errors import ApiError
from tpu_ops.lab.api.state import State


async def test_workers_are_asked_for_as_the_node_says(lab: Lab) -> None:
    await lab.create("pod")
    ((action, (first, second)),) = lab.backend.calls
    assert action == "boot"
    assert (first.project, first.zone, first.node, first.index) == ("lab", "us-central2-b", "pod", 0)
    assert (first.node_id, second.index) == (lab.node("pod").body["id"], 1)
    assert first.peers == second.peers == ("10.128.0.8", "10.128.0.9")
    assert [first.external_ip, second.external_ip] == ["100.64.0.8", "100.64.0.9"]
    assert (first.accelerator_type, first.runtime_version) == ("v4-16", "tpu-ubuntu2204-base")
    assert first.chip_devices == ("/dev/accel0", "/dev/accel1", "/dev/accel2", "/dev/accel3")
    assert first.metadata == {"ssh-keys": "k"}


async def test_maintenance_halts_then_boots_under_new_external_addresses(lab: Lab) -> None:
    await lab.create("pod")
    await lab.act(nodes.simulate_maintenance_event, "SimulateMaintenanceEvent", "pod")
    assert lab.backend.actions() == ["boot", "halt", "boot"]
    (_, before), (_, halted), (_, after) = lab.backend.calls
    assert halted == before
    assert [worker.internal_ip for worker in after] == [worker.internal_ip for worker in before]
    assert not {worker.external_ip for worker in after} & {worker.external_ip for worker in before}


async def test_new_metadata_is_published_to_running_workers_only(lab: Lab) -> None:
    await lab.create("pod")
    change = {"node": {"name": f"{LOCATION}/nodes/pod", "metadata": {"ssh-keys": "new"}}, "updateMask": "metadata"}
    await lab.end(await lab.begin(nodes.update_node, "UpdateNode", **change))
    action, workers = lab.backend.calls[-1]
    assert (action, workers[0].metadata) == ("publish", {"ssh-keys": "new"})
    await lab.act(nodes.stop_node, "StopNode", "pod")
    await lab.end(await lab.begin(nodes.update_node, "UpdateNode", **change))
    assert lab.backend.actions() == ["boot", "publish", "halt"]


async def test_a_creation_that_fails_leaves_nothing_and_can_be_repeated(lab: Lab) -> None:
    lab.backend.fails = {"boot"}
    operation = await lab.create("pod")
    assert (operation.error.code, "boot of pod failed" in operation.error.message) == (13, True)
    assert lab.names() == []
    assert lab.backend.actions() == ["boot", "remove"]
    lab.backend.fails = set()
    assert not (await lab.create("pod")).HasField("error")
    assert lab.node("pod").internal_ips == ["10.128.0.8", "10.128.0.9"]


async def test_a_creation_that_cannot_even_be_undone_stays_visible_until_it_is_deleted(lab: Lab) -> None:
    lab.backend.fails = {"boot", "remove"}
    assert (await lab.create("pod")).HasField("error")
    assert lab.node("pod").state == "UNKNOWN"
    assert "remove of pod failed" in lab.node("pod").health_description
    assert (await lab.act(nodes.delete_node, "DeleteNode", "pod")).error.code == 13
    assert lab.names() == ["pod"]
    lab.backend.fails = set()
    assert not (await lab.act(nodes.delete_node, "DeleteNode", "pod")).HasField("error")
    assert lab.names() == []


@pytest.mark.parametrize(
    ("handler", "request_", "fails"),
    [
        (nodes.stop_node, "StopNode", "halt"),
        (nodes.simulate_maintenance_event, "SimulateMaintenanceEvent", "halt"),
        (nodes.simulate_maintenance_event, "SimulateMaintenanceEvent", "boot"),
    ],
)
async def test_a_backend_that_fails_makes_the_node_unknown_and_says_why(
    lab: Lab, handler: Any, request_: str, fails: str
) -> None:
    await lab.create("pod")
    lab.backend.fails = {fails}
    operation = await lab.act(handler, request_, "pod")
    assert (operation.error.code, lab.node("pod").state) == (13, "UNKNOWN")
    assert f"{fails} of pod failed" in lab.node("pod").health_description
    lab.backend.fails = set()
    await lab.act(nodes.start_node, "StartNode", "pod")
    assert (lab.node("pod").state, lab.node("pod").health_description) == ("READY", "")


async def test_a_node_deleted_while_it_boots_is_removed_after_the_boot(lab: Lab) -> None:
    lab.backend.gate.clear()
    creation = await lab.begin(nodes.create_node, "CreateNode", parent=LOCATION, nodeId="pod", node=NODE)
    await until(lambda: lab.backend.actions() == ["boot"])
    deletion = await lab.begin(nodes.delete_node, "DeleteNode", name=f"{LOCATION}/nodes/pod")
    lab.backend.gate.set()
    assert (await lab.end(creation)).error.code == 1
    assert not (await lab.end(deletion)).HasField("error")
    assert (lab.backend.actions(), lab.names()) == (["boot", "remove"], [])


async def test_a_creation_can_be_cancelled(lab: Lab) -> None:
    lab.backend.gate.clear()
    creation = await lab.begin(nodes.create_node, "CreateNode", parent=LOCATION, nodeId="pod", node=NODE)
    await until(lambda: lab.backend.actions() == ["boot"])
    await operations.cancel_operation(lab.service, "v2", operations_pb2.CancelOperationRequest(name=creation))
    lab.backend.gate.set()
    ended = await lab.end(creation)
    metadata = cloud_tpu.OperationMetadata.pb()()
    assert ended.metadata.Unpack(metadata)
    assert (ended.error.code, metadata.cancel_requested, lab.names()) == (1, True, [])


async def test_a_process_ended_in_mid_maintenance_renews_addresses_once(lab: Lab) -> None:
    await lab.create("pod")
    before = list(lab.node("pod").external_ips)
    lab.backend.gate.clear()
    name = await lab.begin(nodes.simulate_maintenance_event, "SimulateMaintenanceEvent", name=f"{LOCATION}/nodes/pod")
    await until(lambda: lab.backend.actions()[-1] == "halt")
    lab.backend.gate.set()
    await until(lambda: lab.backend.actions()[-1] == "boot" and len(lab.backend.calls) == 3)
    lab.backend.gate.clear()
    await lab.reopen()
    await until(lambda: lab.backend.actions()[-1] in ("halt", "boot"))
    lab.backend.gate.set()
    await lab.end(name)
    after = lab.node("pod").external_ips
    assert not set(before) & set(after)
    assert [int(address.rsplit(".", 1)[1]) for address in after] == [10, 11]


async def test_a_new_process_boots_what_should_run(lab: Lab) -> None:
    for node in ("up", "down"):
        await lab.create(node)
    await lab.act(nodes.stop_node, "StopNode", "down")
    lab.backend.calls.clear()
    await lab.reopen()
    await until(lambda: lab.backend.calls != [])
    assert [(action, workers[0].node) for action, workers in lab.backend.calls] == [("boot", "up")]


async def test_workers_move_when_the_networks_were_made_anew(lab: Lab) -> None:
    await lab.create("pod")
    networks = type(lab.backend.networks)(
        *(type(net)("192.168.7.0/24") for net in (lab.backend.networks.internal,) * 2)
    )
    state = State(networks, lab.store.read())
    state.renumber(networks)
    (node,) = state.nodes
    assert node.internal_ips == ["192.168.7.8", "192.168.7.9"]
    assert all(address.startswith("192.168.7.") for address in node.external_ips)


async def test_slices_are_made_all_or_none(lab: Lab) -> None:
    lab.backend.fails = {"boot"}
    spec = {"multiNodeParams": {"nodeCount": 3, "nodeIdPrefix": "ms"}, "node": NODE}
    body = {"tpu": {"nodeSpec": [spec]}}
    await lab.begin(
        queued.create_queued_resource,
        "CreateQueuedResource",
        parent=LOCATION,
        queuedResourceId="q",
        queuedResource=body,
    )
    record = lab.service.state.queued.get(f"{LOCATION}/queuedResources/q")
    await until(lambda: record.state == "FAILED")
    assert record.error is not None
    assert "could not be created" in record.error["message"]
    assert lab.names() == []
    assert lab.backend.actions().count("remove") == 3


async def test_a_name_taken_while_it_waits_fails_it_and_makes_nothing(lab: Lab) -> None:
    specs = [{"nodeId": node, "node": NODE} for node in ("a", "b")]
    body = {"tpu": {"nodeSpec": specs}, "queueingPolicy": {"validAfterTime": "2999-01-01T00:00:00Z"}}
    await lab.begin(
        queued.create_queued_resource,
        "CreateQueuedResource",
        parent=LOCATION,
        queuedResourceId="q",
        queuedResource=body,
    )
    name = f"{LOCATION}/queuedResources/q"
    await until(lambda: lab.service.state.queued.get(name).state == "WAITING_FOR_RESOURCES")
    await lab.create("b")
    waiting = lab.service.state.queued.get(name)
    waiting.body["queueingPolicy"] = {}
    waiting.touch()
    lab.store.changed()
    await lab.reopen()
    await until(lambda: lab.service.state.queued.get(name).state == "FAILED")
    error = lab.service.state.queued.get(name).error
    assert error is not None
    assert (error["code"], "nodes/b" in error["message"]) == (6, True)
    assert lab.names() == ["b"]
    assert lab.node("b").state == "READY"


async def test_no_addresses_left_is_said_and_nothing_is_kept(lab: Lab) -> None:
    lab.service.state.external._end = 10
    await lab.create("one")
    with pytest.raises(ApiError, match="only 0 of 2 addresses free") as refused:
        await lab.create("two")
    assert refused.value.code.name == "RESOURCE_EXHAUSTED"
    assert lab.names() == ["one"]
    assert lab.service.state.internal.take(1) == ["10.128.0.10"]
