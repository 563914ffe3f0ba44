"""Hubs with their peers, which end with the test, and the signals of a supervisor."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.star import Star
from tpu_ops.host import hub, link, peer, supervise


@pytest.fixture
def waits() -> Iterator[None]:
    """Have signals wait until they are asked for, as the supervisor does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, supervise._AWAITED)
    yield
    # Nobody waits for these any more, and they would end the tests.
    while signal.sigtimedwait(supervise._AWAITED, 0):
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture
def star(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Star]]:
    for module in (hub, peer, link):
        monkeypatch.setattr(module, "BEAT", 0.2)
    monkeypatch.setattr(hub, "UNPROVED_SECONDS", 1.0)
    made: list[Star] = []

    def make(size: int, **changes: Any) -> Star:
        made.append(Star(size, **changes))
        return made[-1]

    yield make
    for each in made:
        each.hub.say(say="stop", intent={"kind": "stop"}, at=0.0)
        for one in each.links:
            one.say(say="done")
