"""Follow a run: an error or the first Ctrl-C only ends the following; a second Ctrl-C soon after stops the run.

SIGTERM and SIGHUP also end only the following, and the command then waits for no second Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from tpu_ops.cli import interrupts, output, runs_output, stop
from tpu_ops.errors import ExitCode, OpsError
from tpu_ops.recovery import termination
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.ssh.fanout import Fanout

#: Seconds after the first Ctrl-C in which a second Ctrl-C stops the run.
AGAIN = 3.0
#: If the event loop has not handled a signal after this many seconds, it is blocked, for example by a pipe that nobody
#: reads. The next signal then ends the command at once.
STANDS = 0.5


def to_its_end(
    work: Coroutine[Any, Any, int],
    running: Callable[[], tuple[Fanout, RunRef] | None],
    left: Callable[[], None],
    stopped: Callable[[Sequence[Outcome]], None] = lambda _: None,
    *,
    as_json: bool,
) -> int:
    """Follow a run without recovery, as `followed` does; after an error of this machine, say that the run continues.

    Raises:
        OpsError, OSError: The run cannot be followed.
    """
    try:
        return asyncio.run(followed(work, running, left, stopped, as_json=as_json))
    except BrokenPipeError:
        # The reader of the output has ended, as `head` does.
        if running() is None:
            raise
        output.give_up()
        left()
        return ExitCode.INTERRUPTED
    except KeyboardInterrupt:
        # The event loop was blocked, so the first Ctrl-C had no effect and printed nothing.
        left()
        return ExitCode.INTERRUPTED
    except (OpsError, OSError):
        if running():
            left()
        raise


async def followed(
    work: Coroutine[Any, Any, int],
    running: Callable[[], tuple[Fanout, RunRef] | None],
    left: Callable[[], None],
    stopped: Callable[[Sequence[Outcome]], None] = lambda _: None,
    *,
    as_json: bool,
) -> int:
    """Do the work and return its exit code. Ctrl-C, SIGTERM or SIGHUP ends the work, but not the run.

    Args:
        work: Starts or follows the run.
        running: Returns the run and the connections to its workers; None before the run is active.
        left: Called after the first Ctrl-C: prints what continues and which commands reach it.
        stopped: Called with the outcomes of the ranks after a second Ctrl-C has stopped the whole run.
        as_json: Whether the outcome of a stop is printed as JSON.
    """
    task = asyncio.ensure_future(work)
    pressed: asyncio.Queue[None] = asyncio.Queue()
    at_once = asyncio.Event()

    def press() -> None:
        # A second Ctrl-C must not disturb the clean-up after the first, unless no run is active: then it gives up.
        if pressed.empty() or running() is None:
            task.cancel()
        pressed.put_nowait(None)

    def leave(again: bool) -> None:
        at_once.set()
        if again:
            task.cancel()
        press()

    with _interrupted_by(press, leave):
        await _end_of(task)
        if not task.cancelled():
            return task.result()
        output.info("")
        left()
        run = running()
        if run is None or at_once.is_set():
            return ExitCode.INTERRUPTED
        output.info(f"  Ctrl-C again within {AGAIN:g} s stops the run")
        pressed.get_nowait()
        try:
            await asyncio.wait_for(pressed.get(), AGAIN)
        except TimeoutError:
            return ExitCode.INTERRUPTED
        if at_once.is_set():
            return ExitCode.INTERRUPTED
        # Drop further presses of Ctrl-C: they must not end the wait for the stop, which is only sent below.
        while not pressed.empty():
            pressed.get_nowait()
        if outcomes := await _stop(*run, pressed, as_json=as_json):
            stopped(outcomes)
    return ExitCode.INTERRUPTED


async def _end_of(task: asyncio.Future[int]) -> None:
    """Wait until a task has ended; if the wait is cancelled, cancel the task and wait for its end first."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise


async def _stop(fanout: Fanout, run: RunRef, pressed: asyncio.Queue[None], *, as_json: bool) -> Sequence[Outcome]:
    """Stop the run and print the outcome; return it if no rank is left. Another Ctrl-C ends the wait for the stop."""
    stopping = asyncio.ensure_future(termination.end(fanout, run))
    given_up = asyncio.ensure_future(pressed.get())
    try:
        await asyncio.wait({stopping, given_up}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            stopped = stopping.result()
            try:
                if as_json:
                    output.as_json(runs_output.summary(run.run_id, stopped.outcomes))
                else:
                    stop.report([(run, stopped)], as_json=False)
            except BrokenPipeError:
                # Ctrl-C also ends the program that reads the output; the run was stopped all the same.
                output.give_up()
            return stopped.outcomes if termination.is_ended(stopped.outcomes) else ()
        output.info(f"no longer waiting for the end of run {run.run_id}")
        output.info(f"  to make sure that every worker was told: `tpu_ops stop {run.run_id}`")
        return ()
    finally:
        stopping.cancel()
        given_up.cancel()


@contextlib.contextmanager
def _interrupted_by(press: Callable[[], None], leave: Callable[[bool], None]) -> Iterator[None]:
    """Let signals call functions for the duration of the block; a signal that the process ignores stays ignored.

    Args:
        press: Called for each Ctrl-C.
        leave: Called for SIGTERM and SIGHUP, with whether it was called before.
    """
    loop = asyncio.get_running_loop()
    waiting: list[float] = []

    def in_turn(call: Callable[[], None]) -> None:
        """Call a function in the event loop; end the command at once if an earlier signal was not handled in time."""

        def take_turn() -> None:
            waiting.clear()
            call()

        now = time.monotonic()
        if waiting and now - waiting[0] > STANDS:
            raise KeyboardInterrupt
        waiting.append(now)
        loop.call_soon_threadsafe(take_turn)

    with interrupts.signals(lambda again: in_turn(lambda: leave(again))):
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: in_turn(press))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
