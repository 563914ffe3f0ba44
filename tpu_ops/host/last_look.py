"""Keeps the stacks of processes that do not end after SIGTERM, in a process of its own that delays nothing."""

from __future__ import annotations

import os
import signal
import sys

from . import TYPE_CHECKING, proc
from .unit import INTERPRETER

if TYPE_CHECKING:
    from typing import Callable

#: Maximum seconds for the stacks, and seconds before SIGKILL at which they are to be on the disk.
_LIMIT, _SPARE = 10.0, 0.5


class LastLook:
    """Starts the program that keeps the stacks of a run, at most once.

    The program is in the run's control group, and gets SIGKILL together with the run's processes if it is late. It is
    a fork, since `posix_spawn` would wait until the disk has given the interpreter.

    Args:
        run: Called in the new process with the seconds that it may take; does not return.
    """

    def __init__(self, run: Callable[[float], None]) -> None:
        self._run = run
        self._pid = 0

    def take(self, left: float) -> None:
        """Start the program, unless it was started before.

        Args:
            left: Seconds until the processes get SIGKILL.
        """
        if self._pid:
            return
        self._pid = os.fork()
        if self._pid == 0:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, [])
                self._run(min(_LIMIT, max(left - _SPARE, left / 2)))
            finally:
                os._exit(1)

    def is_own(self, pid: int) -> bool:
        """Return whether a process is the program or was started by it, so that it does not belong to the run."""
        return self._pid > 0 and self._pid in (pid, proc.parent(pid))


def of_run(run_id: str) -> LastLook:
    """Return what keeps the stacks of a run by this program; see `stacks.take`."""

    def execute(limit: float) -> None:
        words = [*INTERPRETER, os.path.realpath(sys.argv[0]), "stacks", run_id, "{:.1f}".format(limit)]
        os.execve(words[0], words, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"})  # noqa: S606 - no shell wanted

    return LastLook(execute)
