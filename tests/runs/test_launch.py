"""Who is asked to start, in which order, and what is made of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.runs.test_parts import pod
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.remote.replies import Reply
from tpu_ops.runs import launch
from tpu_ops.runs.spec import RunSpec

SPEC = RunSpec("r1", ("true",))
WAITING = Reply("", {"record": {"state": "starting", "port": 8503}})
RUNNING = Reply("", {"record": {"state": "running"}})
HELD = Reply("", {"holder": {}}, "held", "run r0 of bob is on this worker", "wait for it")
SILENT = Reply("", {}, "unreachable", "no route to host")


def told(*blamed: int) -> Reply:
    """Return what a rank answers that heard at the barrier whose fault it was."""
    return Reply("", {"blamed": list(blamed)}, "failed", "rank 2 (pod-w2): no such program")


class Workers:
    """Stands for the workers: what each answers to `start`; `calls` has who was asked what, call by call."""

    def __init__(self, **replies: Reply) -> None:
        self._replies = {"pod-w0": WAITING} | {name.replace("_", "-"): reply for name, reply in replies.items()}
        self.calls: list[tuple[str, dict[str, Mapping[str, Any]]]] = []

    async def call(
        self, requests: Any, action: str, *, limit: float, done: Callable[[Reply], None] | None = None
    ) -> dict[str, Reply]:
        assert limit > 0
        self.calls.append((action, dict(requests)))
        found = {}
        for host in requests:
            reply = self._replies.get(host, RUNNING) if action == "start" else Reply("", {"record": {}})
            found[host] = Reply(host, reply.value, reply.kind, reply.problem, reply.fix)
            if done:
                done(found[host])
        await asyncio.sleep(0)
        return found

    @property
    def asked(self) -> list[tuple[str, list[str]]]:
        return [(action, sorted(requests)) for action, requests in self.calls]


async def start(workers: Workers, size: int = 4) -> None:
    fanout: Any = workers
    await launch.start(fanout, SPEC, pod(size))


async def not_started(workers: Workers) -> launch.NotStarted:
    with pytest.raises(launch.NotStarted) as raised:
        await start(workers)
    return raised.value


async def test_worker_0_comes_first_and_all_others_get_its_port() -> None:
    workers = Workers()
    await start(workers)
    assert workers.asked == [("start", ["pod-w0"]), ("start", ["pod-w1", "pod-w2", "pod-w3"])]
    specs = [request["spec"] for _, requests in workers.calls for request in requests.values()]
    assert [(spec["rank"], spec["net"]["port"]) for spec in specs] == [(0, 0), (1, 8503), (2, 8503), (3, 8503)]
    assert {spec["net"]["key"] for spec in specs} == {SPEC.key}


async def test_one_worker_has_no_network_part() -> None:
    workers = Workers(pod_w0=RUNNING)
    await start(workers, 1)
    assert workers.asked == [("start", ["pod-w0"])]
    assert workers.calls[0][1]["pod-w0"]["spec"]["net"] is None


async def test_whoever_loses_worker_0_asks_nobody_else() -> None:
    workers = Workers(pod_w0=HELD)
    error = await not_started(workers)
    assert workers.asked == [("start", ["pod-w0"])]
    assert (error.where, error.fix) == ("pod-w0", "wait for it")
    assert "r0 of bob" in str(error)


async def test_a_worker_that_cannot_be_reached_makes_worker_0_give_up_at_once() -> None:
    workers = Workers(pod_w1=told(), pod_w2=SILENT, pod_w3=told())
    error = await not_started(workers)
    assert workers.asked[2:] == [("stop", ["pod-w0"])]
    assert workers.calls[2][1]["pod-w0"]["run_id"] == "r1"
    assert error.where == "pod-w2"
    assert error.exit_code == ExitCode.UNREACHABLE
    assert "pod-w2 ends by itself within 60 s" in error.fix


async def test_those_at_fault_are_named_and_not_those_that_tell_of_them() -> None:
    workers = Workers(pod_w1=told(2), pod_w2=told(2), pod_w3=told(2))
    assert (await not_started(workers)).where == "pod-w2"
    workers = Workers(pod_w1=told(1, 3), pod_w2=told(1, 3), pod_w3=told(1, 3))
    assert (await not_started(workers)).where == "pod-w1, pod-w3"
    workers = Workers(pod_w1=told(0), pod_w2=HELD, pod_w3=told())
    assert (await not_started(workers)).where == "pod-w2"


async def test_a_silent_worker_0_is_told_to_give_up_and_the_person_that_it_ends_by_itself() -> None:
    workers = Workers(pod_w0=Reply("", {}, "timeout", "it did not answer"))
    error = await not_started(workers)
    assert workers.asked == [("start", ["pod-w0"]), ("stop", ["pod-w0"])]
    assert error.where == "pod-w0"


async def test_workers_without_an_internal_address_cannot_meet() -> None:
    bare = pod(2)
    object.__setattr__(bare[1].node, "internal_ips", ("10.0.0.0", ""))
    fanout: Any = Workers()
    with pytest.raises(UsageError, match="no internal address of pod-w1"):
        await launch.start(fanout, SPEC, bare)
    assert fanout.calls == []
