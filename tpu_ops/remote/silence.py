"""Says which workers are waited for: those that do not answer over a connection that was open already.

Such a connection may lead to where the worker was. OpenSSH gives it up when several of its own probes are not answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

#: Seconds without an answer after which that is said, and in which further silent workers join.
PATIENCE, GATHER = 4.0, 0.5
#: Names that are said before it is only said that there are more.
_NAMES = 4

_log = logging.getLogger(__name__)


def some(names: Sequence[str]) -> str:
    """Return names as a line for people holds them."""
    return ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} others" if len(names) > _NAMES else "")


class Silence:
    """Watches the workers of one fan-out."""

    def __init__(self) -> None:
        self._hosts: list[str] = []

    @contextmanager
    def watch(self, host: str) -> Iterator[Callable[[], None]]:
        """Say so if a worker is silent; yields what is to be called once it has answered."""
        timer = asyncio.get_running_loop().call_later(PATIENCE, self._add, host)
        try:
            yield timer.cancel
        finally:
            timer.cancel()

    def _add(self, host: str) -> None:
        if not self._hosts:
            asyncio.get_running_loop().call_later(GATHER, self._say)
        self._hosts.append(host)

    def _say(self) -> None:
        hosts = sorted(set(self._hosts))
        self._hosts.clear()
        _log.info("%s %s silent: waiting for an answer", some(hosts), "is" if len(hosts) == 1 else "are")
