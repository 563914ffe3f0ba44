"""The lab's service in this process, over a backend that writes down what it is asked."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.longrunning import operations_pb2

from tpu_ops.lab.api import lifecycle, nodes, operations, queued_walk, wire
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
        queued_walk.resume(self.service)

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


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - polls until the time-out
            await asyncio.sleep(0.005)
