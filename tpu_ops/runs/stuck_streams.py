"""Distinguishes a stuck stream of a rank from a stream on which nothing is sent.

A stuck stream has an open connection on which nothing arrives, for example because the worker's disk stalls while its
sshd still answers. A stuck stream would never end by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tpu_ops.ssh.stream import Broken

if TYPE_CHECKING:
    from tpu_ops.runs.outcomes import Outcome

#: Seconds without data after which a stream might be stuck, and seconds between two requests for the rank's state. If a
#: rank has ended, a stream that is not stuck ends sooner: a lost rank is reported within 30 s, and its last processes
#: take 5 s.
AFTER = 40.0
#: Maximum seconds by which a check can be late. If a check is later, this process itself was blocked, for example
#: because nobody reads its output. Then received data might still wait to be read.
LATE = 5.0


async def read(
    reading: Coroutine[Any, Any, Outcome],
    is_mute: Callable[[], bool],
    ask: Callable[[], Awaitable[Outcome | Broken | None]],
) -> Outcome:
    """Return the outcome at the end of a stream, or the one that the worker reports twice while the stream is stuck.

    Args:
        reading: Reads the stream.
        is_mute: Returns whether nothing has arrived on the stream for so long that it might be stuck.
        ask: Requests the outcome from the worker: None if the rank is active, an error if the worker cannot tell.

    Raises:
        Broken: The stream is stuck, and two requests gave no outcome.
    """
    told: list[Outcome | Broken] = []

    async def attend(reading: asyncio.Timeout) -> None:
        before: Outcome | Broken | None = None
        while not told:
            asleep = asyncio.get_running_loop().time()
            await asyncio.sleep(AFTER)
            stood = asyncio.get_running_loop().time() - asleep > AFTER + LATE
            found = await ask() if is_mute() and not stood else None
            # Delayed data might have arrived during the request.
            found = found if is_mute() else None
            if found is not None and type(found) is type(before):
                told.append(found)
                reading.reschedule(asyncio.get_running_loop().time())
            before = found

    try:
        # Read in this task and not in a separate task, which could miss a stream that answers and breaks at once.
        async with asyncio.timeout(None) as deadline:
            attending = asyncio.create_task(attend(deadline))
            try:
                return await reading
            finally:
                attending.cancel()
    except TimeoutError:
        if not told:
            raise
    if isinstance(told[0], Broken):
        raise told[0]
    return told[0]
