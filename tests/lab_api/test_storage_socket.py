"""The unix socket that gives workers the lab's buckets, and nothing else of the API."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.lab_service import Lab
from tpu_ops.lab import shared
from tpu_ops.lab.api import rest, storage_routes

PORT = 18471


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield an HTTP client of a socket whose path may be longer than a socket's."""
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        connector = aiohttp.UnixConnector(f"/proc/self/fd/{handle}/{path.name}")
        async with aiohttp.ClientSession(f"http://127.0.0.1:{PORT}", connector=connector) as client:
            yield client
    finally:
        os.close(handle)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a lab's socket, too long for the path of a socket."""
    monkeypatch.setenv("TPU_OPS_STATE", str(tmp_path / ("long" * 25)))
    return shared.storage_directory("west")


async def test_workers_share_buckets_with_the_controller_and_reach_nothing_else(lab: Lab, directory: Path) -> None:
    both = rest.application(lab.service), rest.empty_application()
    storage_routes.add_routes(both, lab.service)
    async with contextlib.AsyncExitStack() as stack:
        runner, port = await rest.serve(both[0], "127.0.0.1", 0)
        stack.push_async_callback(runner.cleanup)
        runner = await rest.serve_socket(both[1], shared.storage_socket("west", PORT))
        stack.push_async_callback(runner.cleanup)
        controller = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        worker = await stack.enter_async_context(connected(directory / f"{PORT}.sock"))

        made = await controller.post("/storage/v1/b?project=lab", json={"name": "data"})
        assert made.status == 200
        written = await worker.post("/upload/storage/v1/b/data/o?uploadType=media&name=a", data=b"content")
        # The links in an answer lead through the same port.
        assert (await written.json())["mediaLink"].startswith(f"http://127.0.0.1:{PORT}/")
        read = await controller.get("/storage/v1/b/data/o/a?alt=media")
        assert await read.read() == b"content"

        place = "/v2/projects/lab/locations/us-central2-b/nodes"
        statuses = [(await client.get(place)).status for client in (controller, worker)]
        assert statuses == [200, 404]


def test_a_new_process_replaces_the_socket_of_the_last_one(directory: Path) -> None:
    for port in (1, PORT):
        shared.storage_socket("west", port).close()
    (left,) = shared.entries(directory)
    assert left.name == f"{PORT}.sock"
    assert stat.S_ISSOCK(left.stat().st_mode)
    # Only the owner can pass through the directory to the socket.
    assert directory.stat().st_mode & 0o777 == 0o700
