"""The loop of `tpu_ops apply --watch`: rounds until a signal, growing pauses after failures, each message once."""

from __future__ import annotations

import time
from collections.abc import Callable

from tpu_ops.cli import interrupts, output
from tpu_ops.errors import ExitCode, OpsError

#: The longest pause in seconds after failed rounds, unless the rounds themselves are further apart.
LONGEST_PAUSE = 600.0


class Told:
    """Prints messages of one round after the other, but not those that the round before had as well."""

    def __init__(self) -> None:
        self._before, self._now = set[str](), set[str]()

    def next_round(self) -> None:
        """Begin a round."""
        self._before, self._now = self._now, set()

    def __call__(self, text: str) -> None:
        """Print a message, unless the round before had it, too."""
        if text not in self._before and text not in self._now:
            output.info(text)
        self._now.add(text)

    def warning(self, text: str) -> None:
        """Print a warning in the same way."""
        self(f"warning: {text}")


class _Ended(KeyboardInterrupt):
    """A service manager has ended the command."""


def pause(every: float, failures: int) -> float:
    """Return the seconds until the next round: twice as long after each failed round, up to the longest pause."""
    return min(every * float(1 << min(failures, 20)), max(every, LONGEST_PAUSE))


def watch(look: Callable[[Told], bool], every: float) -> int:
    """Call a function in rounds until SIGTERM; return the exit code.

    Args:
        look: Does one round, and returns whether everything in it succeeded.
        every: Seconds between two rounds.

    Raises:
        KeyboardInterrupt: The user has pressed Ctrl-C.
    """
    told, failures, ended = Told(), 0, list[bool]()

    def end(_again: bool) -> None:
        ended.append(True)
        raise _Ended

    try:
        with interrupts.signals(end):
            # Python drops an error that is raised while it runs a finalizer: then the loop ends after the round.
            while not ended:
                told.next_round()
                try:
                    failed = not look(told)
                except OpsError as exc:
                    failed = True
                    told.warning(str(exc))
                if failures and not failed:
                    output.info("the last round succeeded again")
                failures = failures + 1 if failed else 0
                if not ended:
                    time.sleep(pause(every, failures))
    except _Ended:
        pass
    return ExitCode.OK
