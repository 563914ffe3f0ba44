"""Every accelerator type has its number of workers; ten thousand workers in one state are served quickly."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu

from tests.support.lab_api import LOCATION, LabApi
from tests.support.tpu_client import Client
from tpu_ops.cloud.accelerators import catalogue
from tpu_ops.lab.api.catalogue import ZONES
from tpu_ops.lab.api.fleet_file import write_fleet
from tpu_ops.lab.api.state import State
from tpu_ops.lab.backend import NoWorkers

RUNTIME = "tpu-ubuntu2204-base"
#: Chips or cores in a type's name -> workers, from the documentation and not from the table under test.
CORES_PER_WORKER = {"v2": 8, "v3": 8, "v4": 8, "v5p": 8}


def documented_workers(name: str) -> int:
    generation, _, count = name.partition("-")
    if generation in CORES_PER_WORKER:
        return int(count) // CORES_PER_WORKER[generation]
    return 1 if int(count) <= 8 else int(count) // 4


async def test_every_type_has_its_workers_and_all_are_served_quickly(lab_api: LabApi) -> None:
    """One node of every type there is and 300 of one, ten thousand workers in all: created and listed."""
    client = Client(lab_api, "grpc_asyncio")
    zone_of = {generation: zone for zone, generations in ZONES.items() for generation in generations}
    wanted = {(zone_of[entry.generation], entry.name): entry.name for entry in catalogue()}
    wanted |= {("us-central2-b", f"pod{number}"): "v4-128" for number in range(300)}
    await asyncio.gather(
        *(
            client.do(
                "create_node",
                parent=f"projects/lab/locations/{zone}",
                node_id=node,
                node={"accelerator_type": accelerator_type, "runtime_version": RUNTIME},
            )
            for (zone, node), accelerator_type in wanted.items()
        )
    )
    expected = {
        f"projects/lab/locations/{zone}/nodes/{node}": documented_workers(accelerator_type)
        for (zone, node), accelerator_type in wanted.items()
    }
    total = sum(expected.values())
    assert total > 10_000

    async def listed() -> tuple[float, dict[str, int]]:
        start = lab_api.processor_time()
        pages = await client.pages("list_nodes", parent="projects/lab/locations/-")
        sizes = {node.name: len(cloud_tpu.Node.pb(node).network_endpoints) for page in pages for node in page.nodes}
        assert all(cloud_tpu.ListNodesResponse.pb(page).ByteSize() < 4 * 1024 * 1024 for page in pages)
        return lab_api.processor_time() - start, sizes

    _, sizes = await listed()
    assert sizes == expected
    again, _ = await listed()
    assert again < 2, f"a second list of {total} workers took {again:.1f} s"
    addresses = [
        address
        for worker in lab_api.call("GET", "lab/workers")[1]["workers"]
        for address in (worker["internal_ip"], worker["external_ip"])
    ]
    assert len(set(addresses)) == len(addresses) == 2 * total
    start = lab_api.processor_time()
    await client.do(
        "create_node",
        parent="projects/lab/locations/us-central2-b",
        node_id="late",
        node={"accelerator_type": "v4-8", "runtime_version": RUNTIME},
    )
    assert lab_api.processor_time() - start < 2, "one more node among them all is quick"
    await client.close()


def test_a_fleet_of_any_size_and_state_can_be_written_as_a_file(tmp_path: Path) -> None:
    states = ["READY", "STOPPED", "PREEMPTED", "REPAIRING", "TERMINATED", "HIDDEN", "UNKNOWN"]
    hostile = {"team": "{{ lookup('pipe', 'id') }}"}
    fleet: dict[str, dict[str, Any]] = {
        f"{LOCATION}/nodes/{state.lower()}": {"acceleratorType": "v4-16", "state": state, "labels": hostile}
        for state in states
    }
    fleet |= {f"{LOCATION}/nodes/n{number}": {"acceleratorType": "v4-128"} for number in range(625)}
    api = LabApi(tmp_path / "state.json")
    write_fleet(api.state, fleet)
    api.start()
    nodes = api.call("GET", f"v2/{LOCATION}/nodes")[1]["nodes"]
    took = api.processor_time()
    api.close()
    assert {node["name"].rsplit("/", 1)[1]: node["state"] for node in nodes if "labels" in node} == {
        state.lower(): state for state in states
    }
    assert sum(len(node["networkEndpoints"]) for node in nodes) == 10_000 + 2 * len(states)
    assert took < 10, f"start and first list took {took:.1f} s"


def test_a_large_state_is_rendered_and_read_in_linear_time() -> None:
    def seconds(count: int) -> float:
        from tpu_ops.lab.api.records import NodeRecord

        state = State(NoWorkers.networks)
        body = {"acceleratorType": "v4-128", "runtimeVersion": RUNTIME, "id": "1"}
        start = time.process_time()
        for number in range(count):
            name = f"projects/lab/locations/us-central2-b/nodes/n{number}"
            state.nodes.add(NodeRecord(name, dict(body), "READY", state.internal.take(16), state.external.take(16)))
        state.text()
        return time.process_time() - start

    seconds(10)
    # The least of several: what else this process has to do, as collecting garbage, comes on top now and then.
    small, large = (min(seconds(count) for _ in range(3)) for count in (100, 1000))
    assert large < 30 * small + 0.05, f"100 nodes took {small:.3f} s, 1000 took {large:.3f} s"
