"""Interrupt blocking work, as Ctrl-C does, after SIGTERM or SIGHUP or when another process asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

#: Seconds between two checks whether another process has asked this one to end.
EVERY = 0.5
#: A service manager ends a process with SIGTERM; a terminal that is closed sends SIGHUP to its processes.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: Signals within this many seconds count as one: a service manager may send both.
TOGETHER = 1.0


class Asked(KeyboardInterrupt):
    """Another process has asked this one to end. Code that cleans up after Ctrl-C also cleans up after this error."""


def _end(error: type[KeyboardInterrupt], raised: list[bool], *, again: bool = False) -> None:
    """Raise an error in the main thread, whatever it is doing.

    Args:
        error: The error: raised at once, or by `asyncio.run` after the main task has cleaned up.
        raised: A list that gets an entry when the error is raised; several calls for the same end share it.
        again: Whether the end was requested before: then the error is raised without any clean-up.
    """

    def end() -> None:
        raised.append(True)
        raise error

    def end_once(*_: object) -> None:
        if not raised:
            end()

    def cancel() -> None:
        if raised:
            # The error was raised already: `asyncio.run` lets the remaining tasks clean up.
            return
        # Cancel the main task only, as Ctrl-C does. If asyncio's internal tasks were cancelled at the same time, a task
        # that is starting a process would wait for it for ever.
        main = min(asyncio.all_tasks(), key=_number, default=None)
        if main is None:
            end()
        else:
            main.add_done_callback(end_once)
            main.cancel()

    if again:
        # Do not wait for the event loop: it may be blocked for ever, for example by a pipe that nobody reads.
        end()
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        end()
    else:
        # Cancel between two steps of the event loop: an error raised within a step would skip the task's clean-up.
        loop.call_soon_threadsafe(cancel)


def _number(task: asyncio.Task[Any]) -> int:
    """Return the number of a task in the order of creation: the main task of `asyncio.run` has the lowest number."""
    number = task.get_name().rpartition("-")[2]
    return int(number) if number.isdecimal() else sys.maxsize


@contextlib.contextmanager
def signals(call: Callable[[bool], object]) -> Iterator[None]:
    """Let SIGTERM and SIGHUP call a function for the duration of the block.

    A signal that the process ignores, as under nohup, stays ignored. Outside the main thread nothing changes.

    Args:
        call: Called in the main thread, whatever it is doing; the argument tells whether `call` was called before.
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
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that the same clean-up runs.

    Raises:
        KeyboardInterrupt: The process received SIGTERM or SIGHUP.
    """
    raised: list[bool] = []
    with signals(lambda again: _end(KeyboardInterrupt, raised, again=again)):
        yield


@contextlib.contextmanager
def ended_by(asked: Callable[[], bool]) -> Iterator[None]:
    """End a block of the main thread once a condition is true, even if the process ignores Ctrl-C.

    Args:
        asked: Returns whether the condition is true; called from another thread.

    Raises:
        Asked: The condition became true.
    """

    def watch() -> None:
        # Python calls the handler late if the signal comes just before a system call that blocks, such as the event
        # loop's wait for its next event. The next signal interrupts that call.
        while not (over.wait(EVERY) or came):
            if asked():
                signal.pthread_kill(main, signal.SIGUSR1)

    def comes(*_: object) -> None:
        if not came:
            came.append(True)
            _end(Asked, [])

    came: list[bool] = []
    main, over = threading.get_ident(), threading.Event()
    before = signal.signal(signal.SIGUSR1, comes)
    watching = threading.Thread(target=watch, name="asked", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        signal.signal(signal.SIGUSR1, before)
