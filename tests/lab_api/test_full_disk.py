"""What becomes of nodes and queued resources when the state cannot be written. In-process, without wires."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.lab_service import LOCATION, NODE, Lab, until
from tpu_ops.lab.api import nodes, queued, wire
from tpu_ops.lab.api.errors import ApiError, Code


async def test_a_creation_that_cannot_be_written_down_is_taken_back_whole(lab: Lab) -> None:
    lab.fill_disk()
    spec = {"nodeId": "slice", "node": NODE}
    await lab.refused(nodes.create_node, "CreateNode", parent=LOCATION, nodeId="pod", node=NODE)
    queue: Any = {"parent": LOCATION, "queuedResourceId": "q", "queuedResource": {"tpu": {"nodeSpec": [spec]}}}
    await lab.refused(queued.create_queued_resource, "CreateQueuedResource", **queue)
    state = lab.service.state
    assert (lab.names(), len(state.operations), len(state.queued), lab.backend.calls) == ([], 0, 0, [])
    await until(lambda: not lab.service.running)
    request = wire.parse({"parent": LOCATION}, wire.request_class("v2", "ListNodes")())
    page: Any = await lab.service.call("ListNodes", nodes.list_nodes, "v2", request)
    assert page.items == ()  # one may still look
    lab.fill_disk(False)
    await lab.create("pod")
    assert (lab.node("pod").state, lab.node("pod").internal_ips) == ("READY", ["10.128.0.8", "10.128.0.9"])


@pytest.mark.parametrize(
    ("handler", "request_", "state"),
    [
        (nodes.delete_node, "DeleteNode", "READY"),
        (nodes.stop_node, "StopNode", "READY"),
        (nodes.simulate_maintenance_event, "SimulateMaintenanceEvent", "READY"),
        (nodes.delete_node, "DeleteNode", "STOPPED"),
        (nodes.start_node, "StartNode", "STOPPED"),
    ],
)
async def test_a_node_request_that_cannot_be_saved_changes_nothing(
    lab: Lab, handler: Any, request_: str, state: str
) -> None:
    await lab.create("pod")
    if state == "STOPPED":
        await lab.act(nodes.stop_node, "StopNode", "pod")
    before, actions = lab.node("pod").text("v2"), lab.backend.actions()
    lab.fill_disk()
    await lab.refused(handler, request_, name=f"{LOCATION}/nodes/pod")
    with pytest.raises(ApiError):
        await nodes.preempt(lab.service, f"{LOCATION}/nodes/pod")
    assert (lab.node("pod").text("v2"), lab.backend.actions()) == (before, actions)
    lab.fill_disk(False)
    assert not (await lab.act(handler, request_, "pod")).HasField("error")


async def test_a_queued_resource_stays_what_it_is_where_the_disk_is_full(lab: Lab) -> None:
    spec = {"nodeId": "slice", "node": NODE}
    name = f"{LOCATION}/queuedResources/q"
    queue: Any = {"parent": LOCATION, "queuedResourceId": "q", "queuedResource": {"tpu": {"nodeSpec": [spec]}}}
    await lab.begin(queued.create_queued_resource, "CreateQueuedResource", **queue)
    record = lab.service.state.queued.get(name)
    lab.fill_disk()
    await lab.refused(queued.delete_queued_resource, "DeleteQueuedResource", name=name, force=True)
    await until(lambda: record.state == "ACTIVE")  # what was begun comes to its end
    await lab.refused(queued.reset_queued_resource, "ResetQueuedResource", name=name)
    assert (record.state, lab.names()) == ("ACTIVE", ["slice"])
    await lab.refused(queued.perform_maintenance_queued_resource, "PerformMaintenanceQueuedResource", name=name)
    assert lab.node("slice").state == "READY"
    lab.fill_disk(False)
    await lab.end(await lab.begin(queued.delete_queued_resource, "DeleteQueuedResource", name=name, force=True))
    assert (lab.names(), len(lab.service.state.queued)) == ([], 0)


async def test_a_refused_deletion_does_not_stop_a_creation_that_ends_meanwhile(lab: Lab) -> None:
    lab.service.seconds = 0.1
    name = f"{LOCATION}/queuedResources/q"
    spec = {"nodeId": "slice", "node": NODE}
    queue: Any = {"parent": LOCATION, "queuedResourceId": "q", "queuedResource": {"tpu": {"nodeSpec": [spec]}}}
    creation = await lab.begin(queued.create_queued_resource, "CreateQueuedResource", **queue)
    lab.fill_disk()
    async with lab.store._writing:
        deletion = asyncio.create_task(
            lab.refused(queued.delete_queued_resource, "DeleteQueuedResource", name=name, force=True)
        )
        await until(lambda: lab.service.state.operations.get(creation).done)
    await deletion
    await until(lambda: lab.service.state.queued.get(name).state == "ACTIVE")
    lab.fill_disk(False)


async def test_an_operation_under_way_ends_although_the_disk_fills(lab: Lab) -> None:
    lab.backend.gate.clear()
    creation = await lab.begin(nodes.create_node, "CreateNode", parent=LOCATION, nodeId="pod", node=NODE)
    await until(lambda: lab.backend.actions() == ["boot"])
    lab.fill_disk()
    lab.backend.gate.set()
    assert not (await lab.end(creation)).HasField("error")
    assert lab.node("pod").state == "READY"
    lab.fill_disk(False)
    await lab.reopen()
    assert lab.node("pod").state == "READY"


async def test_workers_do_not_boot_under_addresses_that_are_not_on_disk(lab: Lab) -> None:
    await lab.create("pod")
    lab.backend.gate.clear()
    name = await lab.begin(nodes.simulate_maintenance_event, "SimulateMaintenanceEvent", name=f"{LOCATION}/nodes/pod")
    await until(lambda: lab.backend.actions()[-1] == "halt")
    lab.fill_disk()
    lab.backend.gate.set()
    assert (await lab.end(name)).error.code == Code.RESOURCE_EXHAUSTED.number
    assert (lab.node("pod").state, lab.backend.actions()) == ("UNKNOWN", ["boot", "halt"])
    assert str(lab.path) in lab.node("pod").health_description
    lab.fill_disk(False)
    await lab.act(nodes.start_node, "StartNode", "pod")
    assert lab.node("pod").state == "READY"


async def test_an_update_that_the_disk_refuses_changes_nothing(lab: Lab) -> None:
    await lab.create("pod")
    fields: Any = {"node": {"name": f"{LOCATION}/nodes/pod", "labels": {"a": "b"}}, "updateMask": "labels"}
    lab.fill_disk(after=1)  # the answer that it began is still written
    name = await lab.begin(nodes.update_node, "UpdateNode", **fields)
    assert (await lab.end(name)).error.code == Code.RESOURCE_EXHAUSTED.number
    assert (lab.node("pod").state, lab.node("pod").body.get("labels", {})) == ("READY", {})
    lab.fill_disk(False)


async def test_a_client_that_goes_away_leaves_an_operation_that_ends(lab: Lab) -> None:
    creation = lab.begin(nodes.create_node, "CreateNode", parent=LOCATION, nodeId="pod", node=NODE)
    async with lab.store._writing:  # nothing gets on disk meanwhile
        request = asyncio.create_task(creation)
        await until(lambda: lab.names() == ["pod"])
        request.cancel()
        await asyncio.wait({request})
    assert request.cancelled()
    await until(lambda: lab.node("pod").state == "READY")
