"""Looks for workers that do not answer anew: one question for all that fail at about the same time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

T = TypeVar("T")

#: Seconds in which further workers that do not answer join the question for the first one.
GATHER = 0.3
#: Seconds between the answer to one question and the next question.
AGAIN = 60.0


@dataclass(frozen=True)
class News:
    """What was learned of a fleet whose workers did not answer.

    Attributes:
        changed: All workers that are reached another way than before, whether they were asked about or not.
        notes: Worker -> what is known of it now, in words that follow its problem.
        fixes: Worker that is known to be out of reach -> what to do about it.
    """

    changed: frozenset[str] = frozenset()
    notes: Mapping[str, str] = field(default_factory=dict)
    fixes: Mapping[str, str] = field(default_factory=dict)


#: Given the workers that do not answer, finds out what became of them. It may block; what it raises ends the command.
Renew = Callable[[Sequence[str]], News]


class Renewal:
    """Asks on behalf of many tasks.

    Args:
        renew: Asks once.
    """

    def __init__(self, renew: Renew) -> None:
        self._renew = renew
        self._hosts: list[str] = []
        self._asking: asyncio.Task[News] | None = None
        self._news = News()
        self._answered = float("-inf")

    async def news(self, host: str, since: float) -> News:
        """Return what became of a worker that has not answered.

        Args:
            host: The worker.
            since: When the attempt to reach it began, in the loop's time: what was learned later is news for it.
        """
        if self._asking is None:
            if since <= self._answered:
                return self._news
            if asyncio.get_running_loop().time() - self._answered < AGAIN:
                return replace(self._news, changed=frozenset())
            self._asking = asyncio.create_task(self._ask())
        self._hosts.append(host)
        # One that no longer wants the answer takes it from none of the others.
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
    """Call what blocks; a process that is interrupted meanwhile does not wait for its end."""
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
