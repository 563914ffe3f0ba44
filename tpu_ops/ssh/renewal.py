"""Asks the API about workers that do not answer: once for all that fail at about the same time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

T = TypeVar("T")

#: Seconds in which further workers join the request for the first one.
GATHER = 0.3
#: Seconds between the answer to one request and the next request.
AGAIN = 60.0


@dataclass(frozen=True)
class News:
    """The answer of the API about a fleet whose workers did not answer.

    Attributes:
        changed: All workers with a new way, whether they were asked about or not.
        notes: Worker -> its current state, in words that follow its problem.
        fixes: Worker that is out of reach -> the fix.
    """

    changed: frozenset[str] = frozenset()
    notes: Mapping[str, str] = field(default_factory=dict)
    fixes: Mapping[str, str] = field(default_factory=dict)


#: Given the workers that do not answer, asks the API about them. It may block; an exception from it ends the command.
Renew = Callable[[Sequence[str]], News]


class Renewal:
    """Asks the API on behalf of many tasks.

    Args:
        renew: Makes one request.
    """

    def __init__(self, renew: Renew) -> None:
        self._renew = renew
        self._hosts: list[str] = []
        self._asking: asyncio.Task[News] | None = None
        self._news = News()
        self._answered = float("-inf")

    async def news(self, host: str, since: float) -> News:
        """Return the news about a worker that has not answered.

        Args:
            host: The worker.
            since: When the attempt to reach it began, in the loop's time: a later answer of the API counts as news.
        """
        if self._asking is None:
            if since <= self._answered:
                return self._news
            if asyncio.get_running_loop().time() - self._answered < AGAIN:
                return replace(self._news, changed=frozenset())
            self._asking = asyncio.create_task(self._ask())
        self._hosts.append(host)
        # A task that is cancelled must not cancel the request for the others.
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
    """Call a blocking function in a thread; a process that is interrupted meanwhile does not wait for its end."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(give: Callable[[], None]) -> None:
        if not answer.cancelled():
            give()

    def work() -> None:
        try:
            found = call()
        except BaseException as exc:  # raised where the answer is awaited
            give = functools.partial(answer.set_exception, exc)
        else:
            give = functools.partial(answer.set_result, found)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, give)

    threading.Thread(target=work, name="renewal", daemon=True).start()
    return await answer


@contextlib.contextmanager
def paused(deadline: asyncio.Timeout | None) -> Iterator[None]:
    """Let a deadline pass later by as long as the block lasts."""
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
