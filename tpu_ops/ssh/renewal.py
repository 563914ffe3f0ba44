"""Asks the API about workers that do not answer: with one request for all workers that fail at about the same time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

T = TypeVar("T")

#: Seconds to wait before a request, so that further workers that do not answer are part of it.
GATHER = 0.3
#: Minimum seconds between the answer to one request and the next request.
AGAIN = 60.0


@dataclass(frozen=True)
class News:
    """What the API says about workers that did not answer.

    Attributes:
        changed: All workers of the fleet that are now reached in a new way, such as at another address.
        notes: Worker -> a clause on its current state, which is appended to its problem.
        fixes: Worker that cannot be reached -> the fix.
    """

    changed: frozenset[str] = frozenset()
    notes: Mapping[str, str] = field(default_factory=dict)
    fixes: Mapping[str, str] = field(default_factory=dict)


#: Function that asks the API about workers that do not answer. It can block; its exceptions end the command.
Renew = Callable[[Sequence[str]], News]


class Renewal:
    """Asks the API for many tasks with few requests.

    Args:
        renew: Asks the API once.
    """

    def __init__(self, renew: Renew) -> None:
        self._renew = renew
        self._hosts: list[str] = []
        self._asking: asyncio.Task[News] | None = None
        self._news = News()
        self._answered = float("-inf")

    async def news(self, host: str, since: float) -> News:
        """Return what the API says about a worker that has not answered.

        Args:
            host: The worker.
            since: When the attempt to reach the worker began, in the event loop's time: an answer of the API that came
                later is used.
        """
        if self._asking is None:
            if since <= self._answered:
                return self._news
            if asyncio.get_running_loop().time() - self._answered < AGAIN:
                return replace(self._news, changed=frozenset())
            self._asking = asyncio.create_task(self._ask())
        self._hosts.append(host)
        # `shield`: a task that is cancelled must not cancel the request for other tasks.
        return await asyncio.shield(self._asking)

    async def _ask(self) -> News:
        try:
            await asyncio.sleep(GATHER)
            hosts = sorted(set(self._hosts))
            self._news = News()
            self._news = await in_thread(lambda: self._renew(hosts))
            return self._news
        finally:
            self._answered = asyncio.get_running_loop().time()
            self._hosts.clear()
            self._asking = None


async def in_thread(call: Callable[[], T]) -> T:
    """Call a blocking function in a thread. If this process is interrupted, it does not wait for the function's end."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(give: Callable[[], None]) -> None:
        if not answer.cancelled():
            give()

    def work() -> None:
        try:
            found = call()
        except BaseException as exc:  # the exception is raised where the answer is awaited
            give = functools.partial(answer.set_exception, exc)
        else:
            give = functools.partial(answer.set_result, found)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, give)

    threading.Thread(target=work, name="renewal", daemon=True).start()
    return await answer


@contextlib.contextmanager
def paused(deadline: asyncio.Timeout | None) -> Iterator[None]:
    """Postpone a deadline by the time that a `with` block takes."""
    if deadline is None or (when := deadline.when()) is None:
        yield
        return
    loop = asyncio.get_running_loop()
    left = when - loop.time()
    deadline.reschedule(None)
    try:
        yield
    finally:
        deadline.reschedule(loop.time() + left)
