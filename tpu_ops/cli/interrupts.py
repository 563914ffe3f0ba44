"""Ends what blocks, as Ctrl-C does, once a signal or another process of this machine has asked for it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

#: Seconds between two looks whether another process has.
EVERY = 0.5
#: By these a service manager ends a process, and a terminal that closes those that were begun on it.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: Seconds within which these are one, as a service manager may send both.
TOGETHER = 1.0


class Asked(KeyboardInterrupt):
    """Another process has; whoever cleans up behind Ctrl-C cleans up behind this."""


def _end(error: type[KeyboardInterrupt], raised: list[bool], *, again: bool = False) -> None:
    """Raise an error in the midst of whatever the main thread does.

    Args:
        error: Raised at once, or from `asyncio.run` when what runs there has cleaned up.
        raised: Of all calls that mean the same end; one entry for each time that it was raised.
        again: Whether that was asked for before: nothing cleans up then.
    """

    def end() -> None:
        raised.append(True)
        raise error

    def end_once(*_: object) -> None:
        if not raised:
            end()

    def cancel() -> None:
        if raised:
            # Behind that, `asyncio.run` lets all that is left clean up.
            return
        # As Ctrl-C does: where all tasks are cancelled together, those of asyncio among them, one that just starts a
        # process waits for it for ever.
        main = min(asyncio.all_tasks(), key=_number, default=None)
        if main is None:
            end()
        else:
            main.add_done_callback(end_once)
            main.cancel()

    if again:
        # Here and now: what blocks the loop, such as a pipe that nobody reads, may never let go of it.
        end()
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        end()
    else:
        # Between two steps: within one of a task that task would never learn that it is to clean up.
        loop.call_soon_threadsafe(cancel)


def _number(task: asyncio.Task[Any]) -> int:
    """Return the number of a task, in the order in which they were made: `asyncio.run` makes the first one."""
    number = task.get_name().rpartition("-")[2]
    return int(number) if number.isdecimal() else sys.maxsize


@contextlib.contextmanager
def signals(call: Callable[[bool], object]) -> Iterator[None]:
    """Have SIGTERM and SIGHUP call something for the length of a block.

    What ignores one of them, as below nohup, goes on ignoring it. Elsewhere than in the main thread nothing is changed.

    Args:
        call: Called in the main thread, whatever that does, with whether it was called before.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    main = threading.current_thread() is threading.main_thread()
    taken = [number for number, handler in before.items() if main and handler not in (signal.SIG_IGN, None)]
    came: list[float] = []

    def comes(*_: object) -> None:
        now = time.monotonic()
        if not came or now - came[-1] > TOGETHER:
            came.append(now)
            call(len(came) > 1)

    for number in taken:
        signal.signal(number, comes)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a block as Ctrl-C does: whoever cleans up behind that cleans up behind these.

    Raises:
        KeyboardInterrupt: One of them came.
    """
    raised: list[bool] = []
    with signals(lambda again: _end(KeyboardInterrupt, raised, again=again)):
        yield


@contextlib.contextmanager
def ended_by(asked: Callable[[], bool]) -> Iterator[None]:
    """End a block of the main thread once something is true, also where Ctrl-C is ignored.

    Args:
        asked: Looked at from another thread.

    Raises:
        Asked: It was.
    """

    def watch() -> None:
        while not over.wait(EVERY):
            if asked():
                signal.pthread_kill(main, signal.SIGUSR1)
                return

    main, over = threading.get_ident(), threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: _end(Asked, []))
    watching = threading.Thread(target=watch, name="asked", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        signal.signal(signal.SIGUSR1, before)
