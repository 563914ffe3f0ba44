"""Asks workers for the use of their chips again and again, each worker on its own.

A worker that takes long delays only its own next question, so that questions never pile up. A worker that does not
answer is asked at growing intervals: each attempt can cost a connection and a question to the API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tpu_ops.errors import OpsError
from tpu_ops.runs import usage
from tpu_ops.runs.usage import Caller, Use
from tpu_ops.ssh.renewal import in_thread
from tpu_ops.ssh.replies import Reply

#: Seconds for a worker to answer.
LIMIT = 10.0
#: Most seconds between two questions to a worker that does not answer, and seconds between two looks at the fleet.
_MOST, LOOK = 60.0, 10.0


class Place(NamedTuple):
    """The workers to ask.

    Attributes:
        caller: Reaches the workers.
        nodes: Worker -> label of its node.
        away: Replies in place of the workers that cannot be reached according to the last listing.
        version: Differs if the fleet was listed again.
    """

    caller: Caller
    nodes: Mapping[str, str]
    away: Mapping[str, Reply]
    version: float = 0.0


class Poll:
    """The last known use of the workers' chips.

    Args:
        look: Returns the workers to ask; called at intervals, since nodes are created and move.
        every: Seconds between two questions to a worker.
        anew: Seconds between two looks at the fleet.

    Attributes:
        uses: Worker -> its use; a worker that was never heard has none.
        version: Grows with each change of `uses`.
        problem: Why the workers to ask could not be determined; empty if they were.
    """

    def __init__(self, look: Callable[[], Place], every: float, anew: float = LOOK) -> None:
        self._look, self._every, self._anew = look, every, anew
        self._place = look()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.uses: dict[str, Use] = {}
        self.version = 0
        self.problem = ""

    @property
    def waiting(self) -> list[str]:
        """The workers that have not answered yet and are not known to be silent."""
        return [host for host in self._place.nodes if host not in self.uses]

    async def run(self) -> None:
        """Ask the workers until this task is cancelled."""
        try:
            while True:
                self._begin()
                await asyncio.sleep(self._anew)
                await self._look_again()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._tasks.clear()

    async def _look_again(self) -> None:
        try:
            place = await in_thread(self._look)
        except (OpsError, OSError) as exc:
            self.problem = str(exc)
            return
        self.problem = ""
        if place.version != self._place.version:
            self._place = place

    def _begin(self) -> None:
        """Ask new workers, and forget those that are no longer workers of the target."""
        place = self._place
        for host in [host for host in {**self._tasks, **self.uses} if host not in place.nodes]:
            self.uses.pop(host, None)
            self._end(host)
            self.version += 1
        for host in place.nodes:
            if host in place.away:
                self._end(host)
                self._note(place.away[host])
            elif host not in self._tasks:
                self._tasks[host] = asyncio.create_task(self._follow(host))

    def _end(self, host: str) -> None:
        if task := self._tasks.pop(host, None):
            task.cancel()

    async def _follow(self, host: str) -> None:
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            begun = loop.time()
            try:
                reply = (await usage.ask(self._place.caller, [host], limit=LIMIT))[host]
            except OpsError as exc:
                reply = Reply(host, {}, "failed", exc.what, exc.fix)
            except OSError as exc:  # too many processes or open files on this machine
                reply = Reply(host, {}, "failed", str(exc))
            self._note(reply)
            failures = 0 if reply.ok else min(failures + 1, 10)
            pause = self._every if reply.ok else max(self._every, min(_MOST, 2.0**failures))
            await asyncio.sleep(max(0.0, begun + pause - loop.time()))

    def _note(self, reply: Reply) -> None:
        node, before = self._place.nodes[reply.host], self.uses.get(reply.host)
        self.uses[reply.host] = usage.of_reply(node, reply, time.time(), before)
        self.version += 1
