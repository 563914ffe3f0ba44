"""Data disks of nodes: who may have which, and what the backend is told of them. In-process, without wires."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.lab_service import LOCATION, NODE, Lab, until
from tpu_ops.lab.api import nodes, queued
from tpu_ops.lab.api.errors import ApiError
from tpu_ops.lab.api.records import NodeRecord

SINGLE = {**NODE, "acceleratorType": "v4-8"}
URL = "https://compute.example/compute/v1/"


def disk(name: str, mode: str = "READ_ONLY") -> dict[str, str]:
    return {"sourceDisk": f"projects/lab/zones/us-central2-b/disks/{name}", "mode": mode}


async def create(lab: Lab, node: str, *disks: dict[str, str], spec: dict[str, Any] = SINGLE) -> Any:
    body = {**spec, "dataDisks": list(disks)}
    return await lab.end(await lab.begin(nodes.create_node, "CreateNode", parent=LOCATION, nodeId=node, node=body))


async def update(lab: Lab, node: str, *disks: dict[str, str]) -> Any:
    body = {"name": f"{LOCATION}/nodes/{node}", "dataDisks": list(disks)}
    return await lab.end(await lab.begin(nodes.update_node, "UpdateNode", node=body, updateMask="dataDisks"))


def told(lab: Lab) -> tuple[str, list[tuple[str, int, bool]]]:
    """Return the last thing that the backend was asked, and the disks of the first worker then."""
    action, workers = lab.backend.calls[-1]
    return action, [(each.source.rsplit("/", 1)[1], each.number, each.read_only) for each in workers[0].disks]


async def test_workers_are_booted_with_their_disks_and_told_of_changes(lab: Lab) -> None:
    await create(lab, "pod", disk("a"), disk("b"), spec=NODE)
    assert told(lab) == ("boot", [("a", 1, True), ("b", 2, True)])
    # A disk keeps its number until it is detached; a new one takes the lowest that is free.
    await update(lab, "pod", disk("b"))
    assert told(lab) == ("publish", [("b", 2, True)])
    await lab.reopen()
    await until(lambda: told(lab) == ("boot", [("b", 2, True)]))
    await update(lab, "pod", disk("c"), disk("b"), disk("d"))
    assert told(lab) == ("publish", [("c", 1, True), ("b", 2, True), ("d", 3, True)])
    await lab.act(nodes.stop_node, "StopNode", "pod")
    await update(lab, "pod")
    assert told(lab) == ("publish", [])


async def test_a_disk_that_cannot_be_attached_leaves_the_node_as_it_was(lab: Lab) -> None:
    await create(lab, "one", disk("a"))
    lab.backend.fails = {"publish"}
    operation = await update(lab, "one", disk("b"), disk("a"))
    assert (operation.error.code, "publish of one failed" in operation.error.message) == (13, True)
    assert told(lab) == ("publish", [("a", 1, True)])
    assert lab.node("one").body["dataDisks"] == [disk("a")]
    assert (lab.node("one").state, lab.node("one").disk_numbers) == ("READY", {disk("a")["sourceDisk"]: 1})


def test_a_state_file_of_an_earlier_version_gets_its_numbers() -> None:
    record = NodeRecord.from_file(
        {
            "name": f"{LOCATION}/nodes/old",
            "body": {"dataDisks": [disk("a"), disk("b")]},
            "state": "READY",
            "internal_ips": [],
            "external_ips": [],
        }
    )
    assert list(record.disk_numbers.values()) == [1, 2]


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ("READ_ONLY", "READ_ONLY", ""),
        ("READ_WRITE", "READ_ONLY", "nodes/first in mode READ_WRITE"),
        ("READ_ONLY", "READ_WRITE", "nodes/first in mode READ_ONLY"),
        ("READ_WRITE", "DISK_MODE_UNSPECIFIED", "nodes/first in mode READ_WRITE"),
    ],
)
async def test_only_disks_that_nobody_writes_to_are_shared(lab: Lab, first: str, second: str, refused: str) -> None:
    await create(lab, "first", disk("a", first))
    wanted = disk("a", second)
    wanted["sourceDisk"] = URL + wanted["sourceDisk"]
    await create(lab, "other")
    if not refused:
        assert not (await create(lab, "second", wanted)).HasField("error")
        assert not (await update(lab, "other", wanted)).HasField("error")
        return
    with pytest.raises(ApiError, match=refused):
        await create(lab, "second", wanted)
    with pytest.raises(ApiError, match=refused):
        await update(lab, "other", wanted)
    assert lab.names() == ["first", "other"]
    # Once the first has let it go, the second may have it.
    await update(lab, "first")
    assert not (await update(lab, "other", wanted)).HasField("error")


async def test_the_mode_of_an_attached_disk_does_not_change(lab: Lab) -> None:
    await create(lab, "one", disk("a", "READ_WRITE"))
    with pytest.raises(ApiError, match="detach the disk, then attach it again"):
        await update(lab, "one", disk("a"))
    assert not (await update(lab, "one", disk("a", "READ_WRITE"), disk("b"))).HasField("error")


@pytest.mark.parametrize(
    ("disks", "message"),
    [
        ([disk("a"), {**disk("a"), "sourceDisk": URL + disk("a")["sourceDisk"]}], "listed twice"),
        ([disk(str(number)) for number in range(25)], "25 disks are too many; a worker of the lab can have 24"),
    ],
)
async def test_disks_that_no_worker_can_have_are_refused(lab: Lab, disks: list[dict[str, str]], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        await create(lab, "one", *disks)


async def test_a_queued_resource_fails_whose_disk_another_node_has(lab: Lab) -> None:
    await create(lab, "first", disk("a", "READ_WRITE"))
    spec = {"nodeId": "second", "node": {**SINGLE, "dataDisks": [disk("a")]}}
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
    assert "nodes/first in mode READ_WRITE" in record.error["message"]
    assert lab.names() == ["first"]
