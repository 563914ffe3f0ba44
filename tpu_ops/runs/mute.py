"""Tells a stream that has gone mute from a quiet one.

Its connection stands, and nothing comes: the worker's disk stalls for example, while its sshd answers. Nothing would
ever end that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tpu_ops.ssh.stream import Broken

if TYPE_CHECKING:
    from tpu_ops.runs.outcomes import Outcome

#: Seconds without a word after which a stream may have gone mute, and between two looks at its worker. That of a rank
#: that has ended brings its end sooner: what looks lost is called so after 30 s, and 5 s are for what it leaves behind.
AFTER = 40.0
#: Seconds by which a look may be late. Beyond that this process stood still, as where nobody reads what it prints, and
#: what has come waits to be read.
LATE = 5.0


async def read(
    reading: Coroutine[Any, Any, Outcome],
    is_mute: Callable[[], bool],
    ask: Callable[[], Awaitable[Outcome | Broken | None]],
) -> Outcome:
    """Return the end that is read from a stream, or that its worker tells of twice in a row where it has gone mute.

    Args:
        reading: Reads it.
        is_mute: Whether it has brought nothing for so long that it may have.
        ask: Looks for the end that it should have brought; None is none yet, an error that this cannot be told.

    Raises:
        Broken: It has gone mute, and two looks could not tell.
    """
    told: list[Outcome | Broken] = []

    async def attend(reading: asyncio.Timeout) -> None:
        before: Outcome | Broken | None = None
        while not told:
            asleep = asyncio.get_running_loop().time()
            await asyncio.sleep(AFTER)
            stood = asyncio.get_running_loop().time() - asleep > AFTER + LATE
            found = await ask() if is_mute() and not stood else None
            # What was on its way came meanwhile.
            found = found if is_mute() else None
            if found is not None and type(found) is type(before):
                told.append(found)
                reading.reschedule(asyncio.get_running_loop().time())
            before = found

    try:
        # Read here and not in a task of its own: who answers and breaks at once is never seen as one that answers.
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
