"""The service behind both wires: who may ask, which handler answers, and when the answer is on disk."""

from __future__ import annotations

import asyncio
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from typing import Any

from tpu_ops.lab.api import names
from tpu_ops.lab.api.catalogue import check_zone
from tpu_ops.lab.api.errors import ApiError, Code, invalid
from tpu_ops.lab.api.faults import Faults, target_of
from tpu_ops.lab.api.names import ANY_LOCATION, Location
from tpu_ops.lab.api.records import NodeRecord
from tpu_ops.lab.api.state import State
from tpu_ops.lab.api.store import Store
from tpu_ops.lab.api.wire import Message, Page
from tpu_ops.lab.backend import Backend

#: Most resources on one page, and how many where the client does not say.
PAGE_LIMIT = 1000
#: Most bytes on one page: gRPC channels accept 4 MiB unless told otherwise.
PAGE_BYTES = 2 * 1024 * 1024

Handler = Callable[["Service", str, Message], Awaitable[Message | Page]]


class Service:
    """One state, one backend, and what all handlers share.

    Args:
        state: The resources.
        store: Their file.
        backend: Plays the workers.
        seconds: Shortest time that a long-running operation takes.
        projects: Projects that exist; every other one is forbidden.
    """

    def __init__(
        self, state: State, store: Store, backend: Backend, *, seconds: float, projects: Collection[str]
    ) -> None:
        self.state = state
        self.store = store
        self.backend = backend
        self.seconds = seconds
        self.projects = tuple(projects)
        #: Task of every operation and every queued resource that is on its way, by resource name.
        self.running: dict[str, asyncio.Task[None]] = {}
        #: Told of every node that was preempted or deleted.
        self.on_lost: Callable[[NodeRecord], None] | None = None
        self.faults = Faults()
        self._locks: dict[str, asyncio.Lock] = {}

    async def call(self, method: str, handler: Handler, api: str, request: Message) -> Message | Page:
        """Answer one request; what it changed is on disk before it is answered.

        Handlers that change something flush it themselves and take it back where that fails. What others changed, and
        this one saw, is only waited for: on a full disk one may still look.

        Raises:
            ApiError: The request failed.
        """
        try:
            unreachable = await self.faults.meet(target_of(method, request))
            answer = await handler(self, api, request)
            await self.store.settle()
        except ApiError:
            raise
        except Exception as failure:
            logging.getLogger(__name__).exception("%s failed", method)
            raise ApiError(Code.INTERNAL, f"the lab's API failed: {type(failure).__name__}: {failure}") from failure
        return answer.without(unreachable) if isinstance(answer, Page) and unreachable else answer

    def lost(self, record: NodeRecord) -> None:
        """Say that a node's workers are gone for good."""
        if self.on_lost is not None:
            self.on_lost(record)

    def lock(self, name: str) -> asyncio.Lock:
        """Return the lock that orders what happens to one node's workers."""
        return self._locks.setdefault(name, asyncio.Lock())

    def unlock(self, name: str) -> None:
        """Forget the lock of a node that is gone, unless another operation waits for it."""
        lock = self._locks.get(name)
        if lock is not None and not lock.locked():
            del self._locks[name]

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run something that belongs to a resource in the background."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.running[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self.running.get(name) is task:
            del self.running[name]
        if not task.cancelled() and (failure := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"background work of {name} failed", "exception": failure, "task": task}
            )

    async def close(self) -> None:
        """End the background work; operations in flight go on when the state is served again."""
        tasks = list(self.running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.store.flush()

    def check_project(self, project: str) -> str:
        """Return the project if it is one of the lab's.

        Raises:
            ApiError: PERMISSION_DENIED.
        """
        if project not in self.projects:
            raise ApiError(Code.PERMISSION_DENIED, f"Permission denied on resource project {project}.")
        return project

    def location(self, name: str, *, wildcard: bool = False) -> Location:
        """Given ``projects/P/locations/Z``, return it if it exists; ``-`` for the zone where a list allows it.

        Raises:
            ApiError: INVALID_ARGUMENT or PERMISSION_DENIED.
        """
        found = names.location(name)
        self.check_project(found.project)
        if not (wildcard and found.zone == ANY_LOCATION):
            check_zone(found.zone)
        return found

    def resource(self, name: str, collection: str, field: str = "name") -> tuple[Location, str]:
        """Given a resource name, return location and short name if the location exists.

        Raises:
            ApiError: INVALID_ARGUMENT or PERMISSION_DENIED.
        """
        location, short = names.resource(name, collection, field)
        self.check_project(location.project)
        check_zone(location.zone)
        return location, short


def paged(
    api: str,
    request: Message,
    after: Callable[[str], Iterator[Any]],
    *,
    response: str = "",
    field: str = "",
    parent: str = "",
) -> Page:
    """Cut one page out of a sorted list.

    Args:
        api: API version.
        request: Has ``page_size`` (0 for the default), ``page_token`` and what is listed.
        after: Given a name, yields the records that come after it.
        response: Name of the response message.
        field: Its repeated field.
        parent: What is listed where the request does not call it ``parent``; a token is only good for the list that
            gave it.

    Raises:
        ApiError: INVALID_ARGUMENT for a negative size or a foreign token.
    """
    if request.page_size < 0:
        raise invalid(f"page_size: {request.page_size} must not be negative")
    parent = parent or request.parent
    limit = min(request.page_size or PAGE_LIMIT, PAGE_LIMIT)
    items: list[Any] = []
    total = 0
    for record in after(_read_token(parent, request.page_token)):
        total += record.pb(api).ByteSize()
        if items and (len(items) == limit or total > PAGE_BYTES):
            return Page(response, field, tuple(items), _write_token(parent, items[-1].name))
        items.append(record)
    return Page(response, field, tuple(items), "")


def _write_token(parent: str, last: str) -> str:
    return urlsafe_b64encode(f"{parent}\n{last}".encode()).decode()


def _read_token(parent: str, token: str) -> str:
    if not token:
        return ""
    try:
        origin, last = urlsafe_b64decode(token.encode()).decode().split("\n")
    except ValueError:
        origin = last = ""
    if origin != parent:
        raise invalid("page_token: not one that a list of this parent returned")
    return last
