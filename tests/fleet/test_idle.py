"""Which nodes are idle, given what their workers tell."""

from __future__ import annotations

import datetime as dt

import pytest

from tests.support.nodes import node
from tpu_ops.fleet import idle
from tpu_ops.fleet.idle import IDLE, UNKNOWN, USED
from tpu_ops.ssh.replies import Reply

NOW = dt.datetime(2026, 11, 27, 12, tzinfo=dt.UTC).timestamp()
HOUR = 3600.0
LIMIT = 12 * HOUR


def made(*, hours=100.0, count=1, **fields):
    created = dt.datetime.fromtimestamp(NOW - hours * HOUR, dt.UTC).isoformat() if hours is not None else ""
    return node("pod", count=count, create_time=created, **fields)


def use(kind, hours, *, who="ada", what="exp", now=False):
    return {"kind": kind, "who": who, "what": what, "at": NOW - hours * HOUR, "now": now}


def told(*signs, unknown=(), clock=NOW):
    return Reply("pod-w0", {"ok": True, "clock": clock, "signs": list(signs), "unknown": list(unknown)})


SILENT = Reply("pod-w1", {}, "unreachable", "No route to host")
OLD = Reply("pod-w1", {}, "old", "the worker's launcher is too old for this")
NO_LOGINS = told(unknown=["it keeps no record of logins"])


@pytest.mark.parametrize(
    ("there", "replies", "state", "hours", "words"),
    [
        (made(), [told()], IDLE, 100, "created"),
        (made(hours=11), [told()], USED, 11, "created"),
        (made(hours=12), [told()], IDLE, 12, "created"),
        (made(), [told(use("run", 13))], IDLE, 13, "run exp of ada"),
        (made(), [told(use("run", 11))], USED, 11, "run exp of ada"),
        (made(), [told(use("run", 50, now=True))], USED, 0, "run exp of ada"),
        (made(), [told(use("chip", 50, what="python", now=True))], USED, 0, "process of ada on a chip: python"),
        (made(), [told(use("login", 20, what="pts/0"), use("run", 30))], IDLE, 20, "login of ada (pts/0)"),
        # If a worker is used, its node is used, although another worker does not answer.
        (made(count=2), [told(use("login", 1)), SILENT], USED, 1, "login"),
        (made(count=2), [told(use("run", 20)), told(use("run", 14))], IDLE, 14, "run"),
        # A worker that cannot tell everything makes the node unknown, never idle.
        (made(count=2), [told(), SILENT], UNKNOWN, 100, "w1: No route to host"),
        (made(count=2), [told(), OLD], UNKNOWN, 100, "launcher is too old"),
        (made(count=2), [told()], UNKNOWN, 100, "not all workers were asked"),
        (made(), [NO_LOGINS], UNKNOWN, 100, "no record of logins"),
        (made(count=0, state="STOPPED"), [], UNKNOWN, 100, "is in state STOPPED"),
        (made(hours=None), [told()], UNKNOWN, None, "does not tell when it was created"),
        (made(hours=None), [told(use("login", 20))], IDLE, 20, "login"),
        # The worker's clock may differ, and may be behind what it has recorded.
        (made(), [told(use("run", 20), clock=NOW - 10 * HOUR)], USED, 10, "run"),
        (made(), [told(use("run", -5))], USED, 0, "run"),
    ],
)
def test_the_verdict_on_a_node(there, replies, state, hours, words):
    answers = {f"pod-w{index}": reply for index, reply in enumerate(replies)}
    found = idle.verdict(there, answers, LIMIT, NOW)
    assert (found.state, found.since) == (state, None if hours is None else NOW - hours * HOUR)
    assert words in (found.reason if state == UNKNOWN else found.sign)
    assert bool(found.reason) == (state == UNKNOWN)


def test_only_a_node_that_is_younger_than_the_time_is_not_asked():
    ages = [11, 12, 100, None]
    assert [idle.is_younger(made(hours=hours), LIMIT, NOW) for hours in ages] == [True, False, False, False]


class Workers:
    """Stands in for the fan-out, and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    async def call(self, requests, action, *, limit):
        self.asked.append((list(requests), action))
        return {host: told()._replace(host=host) for host in requests}


async def test_all_workers_are_asked_in_one_round():
    workers = Workers()
    assert (await idle.ask(workers, ["pod-w0", "pod-w1"])).keys() == {"pod-w0", "pod-w1"}
    assert await idle.ask(workers, []) == {}
    assert workers.asked == [(["pod-w0", "pod-w1"], "activity")]
