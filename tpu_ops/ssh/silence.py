"""Reports silent workers, which do not answer over a connection that was already open.

The connection can lead to a worker's former address. OpenSSH closes it only after several unanswered probes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tpu_ops import texts

if TYPE_CHECKING:
    from asyncio import TimerHandle

#: Seconds without an answer after which a worker is reported as silent, and seconds to wait for further silent workers
#: for the same report.
PATIENCE, GATHER = 4.0, 0.5
#: Seconds without an answer of this or any other worker after which the API is asked whether the worker has moved. ssh
#: would wait 10 s for a new connection, and 20 s for an answer over an old one.
LOOK_AFTER = 1.5

_log = logging.getLogger(__name__)


def say(hosts: Iterable[str]) -> None:
    """Tell the user that these workers are silent."""
    names = sorted(set(hosts), key=texts.natural)
    _log.info("%s %s silent: waiting for an answer", texts.some(names, 4), "is" if len(names) == 1 else "are")


class Silence:
    """Watches for silent workers of one fan-out."""

    def __init__(self) -> None:
        self._hosts: list[str] = []

    @contextmanager
    def watch(self, host: str, quiet: float = 0.0) -> Iterator[Callable[[], None]]:
        """Report a worker if it stays silent; yield a function that the block calls once the worker has answered.

        Args:
            host: The worker.
            quiet: Seconds that the request itself takes.
        """
        timer = _later(PATIENCE + quiet, self._add, host)
        try:
            yield timer.cancel
        finally:
            timer.cancel()

    def _add(self, host: str) -> None:
        if not self._hosts:
            _later(GATHER, self._say)
        self._hosts.append(host)

    def _say(self) -> None:
        say(self._hosts)
        self._hosts.clear()


def _later(seconds: float, call: Callable[..., None], *args: str) -> TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, call, *args)
