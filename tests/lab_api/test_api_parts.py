"""The parts below the wires: address pools, the state, the catalogue, the file."""

from __future__ import annotations

import asyncio
import threading
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from tpu_ops.errors import UsageError
from tpu_ops.lab.api import catalogue, names
from tpu_ops.lab.api.addresses import Pool
from tpu_ops.lab.api.errors import ApiError, Code
from tpu_ops.lab.api.state import State
from tpu_ops.lab.api.store import Store
from tpu_ops.lab.backend import NoWorkers

NETWORK = IPv4Network("10.0.0.0/28")  # .8 to .14 are for workers


def test_internal_addresses_are_the_lowest_free() -> None:
    pool = Pool(NETWORK, ["10.0.0.9"], rotate=False)
    assert pool.take(3) == ["10.0.0.8", "10.0.0.10", "10.0.0.11"]
    pool.release(["10.0.0.10", ""])
    pool.release(["10.0.0.8"])
    assert pool.take(3) == ["10.0.0.8", "10.0.0.10", "10.0.0.12"]


def test_external_addresses_come_back_only_when_the_pool_wraps() -> None:
    pool = Pool(NETWORK, [], rotate=True)
    seen: list[str] = []
    for _ in range(7):
        (address,) = pool.take(1)
        seen.append(address)
        pool.release([address])
    assert len(set(seen)) == 7
    assert pool.take(1) == ["10.0.0.8"]


def test_the_cursor_goes_on_where_it_was() -> None:
    pool = Pool(NETWORK, [], rotate=True)
    pool.release(pool.take(2))
    assert Pool(NETWORK, [], pool.cursor, rotate=True).take(1) == ["10.0.0.10"]


@pytest.mark.parametrize("rotate", [True, False])
def test_a_pool_gives_all_or_nothing(rotate: bool) -> None:
    pool = Pool(NETWORK, [], rotate=rotate)
    taken = pool.take(5)
    with pytest.raises(ApiError, match="only 2 of 3") as refused:
        pool.take(3)
    assert refused.value.code is Code.RESOURCE_EXHAUSTED
    assert len({*taken, *pool.take(2)}) == 7


def test_every_generation_is_offered_somewhere_and_every_zone_has_types() -> None:
    offered = {generation for generations in catalogue.ZONES.values() for generation in generations}
    assert offered == {"v2", "v3", "v4", "v5litepod", "v5p", "v6e"}
    assert all(catalogue.types_of(zone) for zone in catalogue.ZONES)


@pytest.mark.parametrize(
    ("zone", "label", "topology", "expected"),
    [
        ("us-central2-b", "V4", "2x2x4", "v4-32"),
        ("us-central2-b", "V4", "2x4x2", "v4-32"),
        ("us-west4-a", "V5LITE_POD", "4x4", "v5litepod-16"),
        ("us-east5-a", "V5P", "2x2x1", "v5p-8"),
        ("us-east5-b", "V6E", "1x1", "v6e-1"),
    ],
)
def test_a_topology_names_a_type(zone: str, label: str, topology: str, expected: str) -> None:
    assert catalogue.find_config(zone, label, topology).name == expected


@pytest.mark.parametrize("topology", ["", "x", "2x2", "0x2x2", "2x2x2x2", "axbxc", "-2x-2x1"])
def test_a_topology_that_is_none_is_refused(topology: str) -> None:
    with pytest.raises(ApiError, match="accelerator_config"):
        catalogue.find_config("us-central2-b", "V4", topology)


@pytest.mark.parametrize(
    "name", ["", "projects/p", "projects/p/locations/", "projects//locations/z", "p/l/locations/z"]
)
def test_malformed_names_are_refused(name: str) -> None:
    with pytest.raises(ApiError, match="does not have the form"):
        names.location(name)
    with pytest.raises(ApiError, match="does not have the form"):
        names.resource(f"{name}/nodes/n", "nodes")


@pytest.mark.parametrize(
    "data",
    [{"nodes": 7}, {"nodes": [{"name": "x"}]}, {"operations": [{"name": "x", "api": 1}]}, {"next_external": "soon"}],
)
def test_a_state_that_cannot_be_understood_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="damaged"):
        State(NoWorkers.networks, data)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "not JSON"),
        ("[]", "not a state of the lab's API"),
        ('{"some": "other file"}', "not a state of the lab's API"),
        ('{"format": "tpu-ops-lab-api", "version": 99}', "format version 99"),
    ],
)
async def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(UsageError, match=why):
        Store(tmp_path / "state.json").read()


async def test_many_changes_at_once_share_their_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "state.json")
    value: list[int] = [0]
    written: list[str] = []
    store.bind(lambda: str(value[0]))
    write = store._write

    def note(text: str) -> None:
        written.append(text)
        write(text)

    monkeypatch.setattr(store, "_write", note)

    async def change() -> None:
        value[0] += 1
        store.changed()
        mine = value[0]
        await store.flush()
        assert int(store.path.read_text()) >= mine

    await asyncio.gather(*(change() for _ in range(100)))
    assert len(written) <= 3
    assert store.path.read_text() == "100"
    store.close()


async def test_a_cancelled_writer_lets_go_only_when_its_write_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "state.json")
    store.bind(lambda: "content")
    started, go_on = threading.Event(), threading.Event()
    write, overlapping = store._write, []

    def slow(text: str) -> None:
        if started.is_set() and not go_on.is_set():
            overlapping.append(text)
        started.set()
        go_on.wait(5)
        write(text)

    monkeypatch.setattr(store, "_write", slow)
    store.changed()
    first = asyncio.create_task(store.flush())
    await asyncio.to_thread(started.wait, 5)
    first.cancel()
    second = asyncio.create_task(store.flush())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait({first, second}, timeout=5)
    assert (first.cancelled(), second.exception(), overlapping) == (True, None, [])
    assert store.path.read_text() == "content"
    store.close()
