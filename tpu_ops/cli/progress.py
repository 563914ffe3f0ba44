"""The progress of a command: one line, which is redrawn on a terminal while the command works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tpu_ops import texts
from tpu_ops.cli import output

#: Seconds between two drawings on a terminal, and between two messages without one.
DRAWN, TOLD = 0.5, 30.0


@contextmanager
def shown(text: Callable[[float], str], *, told: bool = False) -> Iterator[None]:
    """Show the progress of a `with` block.

    Args:
        text: Returns the progress, given the seconds since the beginning; called in a thread of its own.
        told: Whether to print it as a message at intervals if there is no terminal.
    """
    if not (told or output.shows_progress()):
        yield
        return
    begun, ended = time.monotonic(), threading.Event()
    every, show = (DRAWN, output.progress) if output.shows_progress() else (TOLD, output.info)

    def draw() -> None:
        while not ended.wait(every):
            show(text(time.monotonic() - begun))

    thread = threading.Thread(target=draw, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        output.progress("")


class Transfers:
    """The progress of a copy to or from several workers.

    Args:
        what: The action, as in ``syncing``.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        #: Worker -> bytes so far, bytes in all (0 if unknown), whether it is done.
        self._workers: dict[str, tuple[int, int, bool]] = {}

    def __call__(self, host: str, moved: int, total: int, done: bool) -> None:
        """Store the progress of one worker: bytes so far, bytes in all (0 if unknown), and whether it is done."""
        self._workers[host] = moved, total, done

    def text(self, elapsed: float) -> str:
        """Return the bytes, the rate, how many workers are done, and the slowest worker that is not."""
        workers = dict(self._workers)
        if not workers:
            return f"{self._what}, {texts.lasting(elapsed)}"
        moved, total = sum(one[0] for one in workers.values()), sum(one[1] for one in workers.values())
        of_all = f" of {total / 1e6:.1f}" if total else ""
        rate = moved / max(elapsed, 0.001) / 1e6
        ended = sum(done for *_, done in workers.values())
        left = {host: (now / of if of else now) for host, (now, of, done) in workers.items() if not done}
        parts = [f"{self._what}: {moved / 1e6:.1f}{of_all} MB, {rate:.1f} MB/s"]
        if len(workers) > 1:
            parts.append(f"{ended} of {len(workers)} workers done")
        if len(workers) > 1 and left:
            slowest = min(left, key=lambda host: left[host])
            parts.append(f"slowest: {slowest}" + (f" ({left[slowest]:.0%})" if workers[slowest][1] else ""))
        return ", ".join(parts)


class Tasks:
    """The progress of a playbook.

    Args:
        what: The action, as in ``configuring``.
    """

    def __init__(self, what: str) -> None:
        self._what, self._task, self._number = what, "", 0
        #: Worker -> when it began its task, whether it has ended the task, and the task.
        self._workers: dict[str, tuple[float, bool, str]] = {}

    def at(self, host: str, task: str, ended: bool) -> None:
        """Note that a worker has begun or ended a task; the newest task of any worker is the present one."""
        known = self._workers.get(host)
        if known is None or known[2] != task:
            if task != self._task and all(task != other for _, _, other in self._workers.values()):
                self._task, self._number = task, self._number + 1
            known = time.monotonic(), ended, task
        self._workers[host] = known[0], ended, task

    def text(self, elapsed: float) -> str:
        """Return the present task, how many workers have ended it, and the slowest worker that has not."""
        begins = f"{self._what}, {texts.lasting(elapsed)}"
        workers, task = dict(self._workers), self._task
        if not workers:
            return begins
        left = {host: since for host, (since, ended, at) in workers.items() if at != task or not ended}
        text = f"{begins}: task {self._number}, {task}"
        if len(workers) == 1:
            return text
        text += f": {len(workers) - len(left)} of {len(workers)} hosts done"
        return f"{text}, slowest: {min(left, key=lambda host: left[host])}" if left else text


@contextmanager
def transfers(what: str) -> Iterator[Transfers | None]:
    """Show the progress of a copy while a `with` block works.

    Args:
        what: The action, as in ``syncing``.

    Yields:
        The object that stores the progress of the workers; None if there is no terminal.
    """
    progress = Transfers(what)
    with shown(progress.text):
        yield progress if output.shows_progress() else None
