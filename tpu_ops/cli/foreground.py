"""A run that is followed is left alone by an error and by the first Ctrl-C; a second one soon after stops it.

SIGTERM and SIGHUP leave it alone as well, and nobody is asked anything then.
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
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.ssh.fanout import Fanout

#: Seconds after the first Ctrl-C in which a second one stops the run.
AGAIN = 3.0
#: Seconds after which the event loop stands still where a signal has had no turn, as before a pipe that nobody reads:
#: the next one ends the command at once.
STANDS = 0.5


def to_its_end(
    work: Coroutine[Any, Any, int],
    running: Callable[[], tuple[Fanout, RunRef] | None],
    left: Callable[[], None],
    stopped: Callable[[Sequence[Outcome]], None] = lambda _: None,
    *,
    as_json: bool,
) -> int:
    """Do as `followed`, for a run that nobody starts again: an error of this machine does not end it, and that is said.

    Raises:
        OpsError, OSError: It cannot be followed.
    """
    try:
        return asyncio.run(followed(work, running, left, stopped, as_json=as_json))
    except BrokenPipeError:
        # Whoever read the lines has gone, as `head` does.
        if running() is None:
            raise
        output.give_up()
        left()
        return ExitCode.INTERRUPTED
    except KeyboardInterrupt:
        # Nobody reads the lines, so that the first one has had no turn and has said nothing.
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
    """Do the work and return its exit code. Ctrl-C, SIGTERM or SIGHUP ends the work, and not the run.

    Args:
        work: What starts or follows the run.
        running: Returns the run once it is on, and how to reach its workers.
        left: Called after the first Ctrl-C, to say what goes on and how to get at it.
        stopped: Called with how its ranks have ended when a second one has stopped the run and nothing of it is left.
        as_json: Whether the outcome of a stop is printed as JSON.
    """
    task = asyncio.ensure_future(work)
    pressed: asyncio.Queue[None] = asyncio.Queue()
    at_once = asyncio.Event()

    def press() -> None:
        # The second one is no reason to end in disorder what the first is ending, but where no run is on, to give up.
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
        # Who pressed more often meanwhile wanted the stop, and not that it is given up before it is sent.
        while not pressed.empty():
            pressed.get_nowait()
        if outcomes := await _stop(*run, pressed, as_json=as_json):
            stopped(outcomes)
    return ExitCode.INTERRUPTED


async def _end_of(task: asyncio.Future[int]) -> None:
    """Wait until a task has ended; who is cancelled meanwhile ends it first."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise


async def _stop(fanout: Fanout, run: RunRef, pressed: asyncio.Queue[None], *, as_json: bool) -> Sequence[Outcome]:
    """Stop the run, report its outcome and return it where nothing is left; one more Ctrl-C is not to wait for that."""
    stopping = asyncio.ensure_future(stop.end(fanout, run))
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
                # Ctrl-C ends whatever reads the lines as well; the run was stopped all the same.
                output.give_up()
            return stopped.outcomes if stop.exit_code(stopped.outcomes) == ExitCode.OK else ()
        output.info(f"no longer waiting for the end of run {run.run_id}")
        output.info(f"  to make sure that every worker was told: `tpu_ops stop {run.run_id}`")
        return ()
    finally:
        stopping.cancel()
        given_up.cancel()


@contextlib.contextmanager
def _interrupted_by(press: Callable[[], None], leave: Callable[[bool], None]) -> Iterator[None]:
    """Let signals call something for as long as the block lasts; a process that is to ignore one goes on ignoring it.

    Args:
        press: Called for each Ctrl-C.
        leave: Called for SIGTERM and SIGHUP, with whether it was called before.
    """
    loop = asyncio.get_running_loop()
    waiting: list[float] = []

    def in_turn(call: Callable[[], None]) -> None:
        """Call something in the loop, or end all here and now where an earlier signal has had no turn for so long."""

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
