"""Says which workers are waited for: those that do not answer over a connection that was open already.

Such a connection may lead to where the worker was. OpenSSH gives it up when several of its own probes are not answered.
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

#: Seconds without an answer after which that is said, and in which further silent workers join.
PATIENCE, GATHER = 4.0, 0.5
#: Seconds without an answer after which it is found out whether the worker is still where it was: ssh would wait for
#: 10 s for a new connection, and for 20 s for an answer over an old one.
LOOK_AFTER = 1.5

_log = logging.getLogger(__name__)


def say(hosts: Iterable[str]) -> None:
    """Say that these workers are waited for."""
    names = sorted(set(hosts), key=texts.natural)
    _log.info("%s %s silent: waiting for an answer", texts.some(names, 4, "others"), "is" if len(names) == 1 else "are")


class Silence:
    """Watches the workers of one fan-out."""

    def __init__(self) -> None:
        self._hosts: list[str] = []

    @contextmanager
    def watch(self, host: str, quiet: float = 0.0) -> Iterator[Callable[[], None]]:
        """Say so if a worker is silent; yields what is to be called once it has answered.

        Args:
            host: The worker.
            quiet: Seconds that what it was asked for takes by itself.
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
