"""The service behind gRPC and REST: it checks access, calls the handlers and stores changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from typing import Any

from tpu_ops.lab.api import names
from tpu_ops.lab.api.capacity import Capacity
from tpu_ops.lab.api.catalogue import check_zone
from tpu_ops.lab.api.errors import ApiError, Code, invalid
from tpu_ops.lab.api.faults import Faults, target_of
from tpu_ops.lab.api.names import ANY_LOCATION, Location
from tpu_ops.lab.api.records import NodeRecord
from tpu_ops.lab.api.state import State
from tpu_ops.lab.api.store import Store
from tpu_ops.lab.api.wire import Message, Page
from tpu_ops.lab.backend import Backend

#: Default and maximum number of resources on one page of a list.
PAGE_LIMIT = 1000
#: Maximum size in bytes of one page of a list: gRPC clients accept messages of up to 4 MiB by default.
PAGE_BYTES = 2 * 1024 * 1024

Handler = Callable[["Service", str, Message], Awaitable[Message | Page]]


class Service:
    """The API's state, the backend, and all other objects that the handlers share.

    Args:
        state: The resources of the lab's cloud.
        store: Writes the state file.
        backend: Runs the workers.
        seconds: Minimum duration of a long-running operation.
        projects: Ids of the existing projects; requests for other projects are refused.
    """

    def __init__(
        self, state: State, store: Store, backend: Backend, *, seconds: float, projects: Collection[str]
    ) -> None:
        self.state = state
        self.store = store
        self.backend = backend
        self.seconds = seconds
        self.projects = tuple(projects)
        #: Name of an operation, queued resource or node -> its running background task.
        self.running: dict[str, asyncio.Task[None]] = {}
        #: Function that is called for every node that was preempted or deleted.
        self.on_lost: Callable[[NodeRecord], None] | None = None
        self.faults = Faults()
        self._declared = asyncio.Event()
        self._locks: dict[str, asyncio.Lock] = {}

    async def call(self, method: str, handler: Handler, api: str, request: Message) -> Message | Page:
        """Handle one request; its changes are in the state file before the answer is sent.

        A handler that changes the state writes the state file itself, and reverts the change if writing fails. After
        the handler has returned, an error in writing other changes is only logged, so that requests that only read work
        on a full disk.

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

    def declare(self, capacity: Capacity) -> None:
        """Set the capacity of the lab's cloud, and end the waits for a declaration."""
        self.state.capacity = capacity
        self.store.changed()
        self._declared.set()
        self._declared = asyncio.Event()

    async def next_declaration(self, seconds: float | None) -> None:
        """Wait until the capacity is declared again, at most for some seconds; None has no limit."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._declared.wait(), seconds)

    def lost(self, record: NodeRecord) -> None:
        """Call `on_lost` for a node that was preempted or deleted."""
        if self.on_lost is not None:
            self.on_lost(record)

    def lock(self, name: str) -> asyncio.Lock:
        """Return the lock that serializes changes of one node's workers."""
        return self._locks.setdefault(name, asyncio.Lock())

    def unlock(self, name: str) -> None:
        """Discard the lock of a removed node, unless an operation holds the lock."""
        lock = self._locks.get(name)
        if lock is not None and not lock.locked():
            del self._locks[name]

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background, as the task of the resource with this name."""
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
        """Cancel background tasks and write the state file; unfinished operations continue after a restart."""
        tasks = list(self.running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.store.flush()

    def check_project(self, project: str) -> str:
        """Return the project if it exists.

        Raises:
            ApiError: PERMISSION_DENIED; the project does not exist.
        """
        if project not in self.projects:
            raise ApiError(Code.PERMISSION_DENIED, f"Permission denied on resource project {project}.")
        return project

    def location(self, name: str, *, wildcard: bool = False) -> Location:
        """Return the location with this name if it exists; with ``wildcard``, the zone can be ``-``.

        Raises:
            ApiError: INVALID_ARGUMENT for an invalid name; PERMISSION_DENIED for an unknown project or zone.
        """
        found = names.location(name)
        self.check_project(found.project)
        if not (wildcard and found.zone == ANY_LOCATION):
            check_zone(found.zone)
        return found

    def resource(self, name: str, collection: str, field: str = "name") -> tuple[Location, str]:
        """Split a resource's full name into location and short name; the project and the zone must exist.

        Raises:
            ApiError: INVALID_ARGUMENT for an invalid name; PERMISSION_DENIED for an unknown project or zone.
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
    """Return one page of a sorted list.

    Args:
        api: API version.
        request: The request for the list: ``page_size`` (0 for the default), ``page_token`` and the parent of the list.
        after: Function that yields the records whose names come after a given name, in order.
        response: Name of the response message.
        field: The field of the response message that holds the records.
        parent: The parent of the list, if the request has no field ``parent``. A page token is valid only for the
            parent whose list returned the token.

    Raises:
        ApiError: INVALID_ARGUMENT for a negative size or an invalid token.
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
        raise invalid("page_token: no list of this parent has returned this token")
    return last
