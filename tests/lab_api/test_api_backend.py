"""What the API asks of its backend, and what becomes of nodes when the backend fails. In-process, without wires."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.cloud.tpu_v2alpha1.types import cloud_tpu
from google.longrunning import operations_pb2

from tpu_ops.lab.api import lifecycle, nodes, operations, queued, wire
from tpu_ops.lab.api.errors import ApiError, Code
from tpu_ops.lab.api.service import Service
from tpu_ops.lab.api.state import State
from tpu_ops.lab.api.store import Store
from tpu_ops.lab.backend import BackendError, NoWorkers, WorkerSpec

LOCATION = "projects/lab/locations/us-central2-b"
NODE = {"acceleratorType": "v4-16", "runtimeVersion": "tpu-ubuntu2204-base", "metadata": {"ssh-keys": "k"}}


class Recorder(NoWorkers):
    """Writes down every request, fails where told to, and can be held up in the middle of one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[WorkerSpec, ...]]] = []
        self.fails: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def _note(self, action: str, workers: Sequence[WorkerSpec]) -> None:
        self.calls.append((action, tuple(workers)))
        await self.gate.wait()
        if action in self.fails:
            raise BackendError(f"{action} of {workers[0].node} failed")

    async def boot(self, workers: Sequence[WorkerSpec]) -> None:
        await self._note("boot", workers)

    async def halt(self, workers: Sequence[WorkerSpec]) -> None:
        await self._note("halt", workers)

    async def kill(self, workers: Sequence[WorkerSpec]) -> None:
        await self._note("kill", workers)

    async def remove(self, workers: Sequence[WorkerSpec]) -> None:
        await self._note("remove", workers)

    async def publish(self, workers: Sequence[WorkerSpec]) -> None:
        await self._note("publish", workers)

    def actions(self) -> list[str]:
        return [action for action, _ in self.calls]


class Lab:
    """A service over a state file, driven by method calls."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.backend = Recorder()
        self.open()

    def open(self) -> None:
        self.store = Store(self.path)
        state = State(self.backend.networks, self.store.read())
        self.store.bind(state.text)
        self.service = Service(state, self.store, self.backend, seconds=0.01, projects=["lab"])
        queued.resume(self.service)

    async def close(self) -> None:
        await self.service.close()
        self.store.close()

    async def reopen(self) -> None:
        """Do what a new process does."""
        await self.close()
        self.open()
        operations.resume(self.service)
        lifecycle.resume(self.service)

    async def begin(self, handler: Any, request: str, **fields: Any) -> str:
        """Begin an operation and return its name."""
        message = wire.parse(fields, wire.request_class("v2alpha1", request)())
        answer: Any = await self.service.call(request, handler, "v2alpha1", message)
        return str(answer.name)

    async def end(self, name: str) -> Any:
        """Return an operation once it has ended."""
        request = operations_pb2.WaitOperationRequest(name=name)
        request.timeout.FromSeconds(5)
        answer = await operations.wait_operation(self.service, "v2", request)
        assert answer.done
        return answer

    async def create(self, node: str) -> Any:
        name = await self.begin(nodes.create_node, "CreateNode", parent=LOCATION, nodeId=node, node=NODE)
        return await self.end(name)

    async def act(self, handler: Any, request: str, node: str) -> Any:
        return await self.end(await self.begin(handler, request, name=f"{LOCATION}/nodes/{node}"))

    def fill_disk(self, full: bool = True, *, after: int = 0) -> None:
        """Let every write of the state file fail from now on, or after so many more; or none."""
        write, left = Store._write.__get__(self.store), after

        def refuse(text: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(text)

        self.store._write = refuse if full else write  # type: ignore[method-assign]

    async def refused(self, handler: Any, request: str, **fields: Any) -> None:
        """Ask for something that the full disk forbids; the answer must say so and name the file."""
        with pytest.raises(ApiError) as caught:
            await self.begin(handler, request, **fields)
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        assert str(self.path) in caught.value.message
        assert "No space left on device" in caught.value.message

    def node(self, node: str) -> Any:
        return self.service.state.nodes.get(f"{LOCATION}/nodes/{node}")

    def names(self) -> list[str]:
        return [node.short for node in self.service.state.nodes]


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    found = Lab(tmp_path / "state.json")
    yield found
    found.backend.gate.set()
    await found.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - polls until the time-out
            await asyncio.sleep(0.005)


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
async def test_what_cannot_be_written_down_does_not_happen_to_a_node(
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
