"""Ends what blocks, as Ctrl-C does, once another process of this machine has asked for it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

#: Seconds between two looks whether it has.
EVERY = 0.5


class Asked(KeyboardInterrupt):
    """It has; whoever cleans up behind Ctrl-C cleans up behind this."""


@contextlib.contextmanager
def ended_by(asked: Callable[[], bool]) -> Iterator[None]:
    """End a block of the main thread once something is true, also where Ctrl-C is ignored.

    Args:
        asked: Looked at from another thread.

    Raises:
        Asked: It was.
    """

    def end() -> None:
        raise Asked

    def ended(*_: object) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            end()
        else:
            # Between two steps: within one of a task that task would never learn that it is to clean up.
            loop.call_soon_threadsafe(end)

    def watch() -> None:
        while not over.wait(EVERY):
            if asked():
                signal.pthread_kill(main, signal.SIGUSR1)
                return

    main, over = threading.get_ident(), threading.Event()
    before = signal.signal(signal.SIGUSR1, ended)
    watching = threading.Thread(target=watch, name="asked", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        signal.signal(signal.SIGUSR1, before)
