"""The order in which workers are asked to start, and the use of their answers."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.runs.test_parts import pod
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.runs import launch
from tpu_ops.runs.spec import RunSpec
from tpu_ops.ssh.replies import Reply

SPEC = RunSpec("r1", ("true",))
WAITING = Reply("", {"record": {"state": "starting", "port": 8503}})
RUNNING = Reply("", {"record": {"state": "running", "port": 0}})
HELD = Reply("", {"holder": {}}, "held", "run r0 of bob has held this worker", "wait for it")
SILENT = Reply("", {}, "unreachable", "no route to host")


def told(*blamed: int) -> Reply:
    """Return what a rank answers that heard at the barrier whose fault it was."""
    return Reply("", {"blamed": list(blamed)}, "failed", "rank 2 (pod-w2): no such program")


class Workers:
    """Stands for the workers: what each answers to `start`; `calls` has who was asked what, call by call."""

    def __init__(self, **replies: Reply) -> None:
        self._replies = {"pod-w0": WAITING} | {name.replace("_", "-"): reply for name, reply in replies.items()}
        self.calls: list[tuple[str, dict[str, Mapping[str, Any]]]] = []
        self.hangs = ""
        self.deaf = self.slow_to_stop = False
        #: Who has stopped the run, as rank 0 knows it.
        self.stopped_by = ""
        self.hanging = asyncio.Event()

    async def call(
        self, requests: Any, action: str, *, limit: float, done: Callable[[Reply], None] | None = None
    ) -> dict[str, Reply]:
        assert limit > 0
        self.calls.append((action, dict(requests)))
        found = {}
        for host in requests:
            reply = self._replies.get(host, RUNNING) if action == "start" else self._given_up()
            if (action == "start" and host == self.hangs) or (action == "stop" and self.slow_to_stop):
                self.hanging.set()
                await asyncio.Event().wait()
            if action == "stop" and self.deaf:
                reply = SILENT
            found[host] = Reply(host, reply.value, reply.kind, reply.problem, reply.fix)
            if done:
                done(found[host])
        await asyncio.sleep(0)
        return found

    def _given_up(self) -> Reply:
        return Reply("", {"record": {"stop_requested_by": self.stopped_by}, "already": True})

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


async def test_a_run_on_a_single_worker_has_no_network_part() -> None:
    workers = Workers(pod_w0=RUNNING)
    await start(workers, 1)
    assert workers.asked == [("start", ["pod-w0"])]
    assert workers.calls[0][1]["pod-w0"]["spec"]["net"] is None


async def test_a_start_refused_by_worker_0_asks_no_other_worker() -> None:
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
    assert (await not_started(workers)).where == "pod-w[1,3]"
    workers = Workers(pod_w1=told(0), pod_w2=HELD, pod_w3=told())
    assert (await not_started(workers)).where == "pod-w2"


@pytest.mark.parametrize("leader", [False, True], ids=["a rank came too late", "a slice came too late"])
async def test_a_stop_at_the_barrier_is_told_to_the_starter_and_no_firewall(leader: bool) -> None:
    late = Reply("", {"blamed": []}, "failed", "rank 0 (pod-w0) no longer waits: given up, or a firewall is in the way")
    slices = pod(2, "a", "1") + pod(2, "b", "2")
    workers = Workers(a_w0=WAITING, b_w0=late if leader else WAITING, b_w1=late)
    workers.stopped_by = "ada"
    fanout: Any = workers
    with pytest.raises(launch.NotStarted) as raised:
        await launch.start(fanout, SPEC, slices)
    assert (raised.value.what, raised.value.where) == ("the run was not started: run r1 was stopped by ada", "a-w0")
    assert raised.value.fix == "to start the run again, use another --name"
    assert not raised.value.may_be_on


def test_an_option_that_an_older_launcher_does_not_know() -> None:
    why = "keys of the spec differ from those of this version: stall"
    found = launch.NotStarted([Reply("a-w0", {}, "invalid", why)])
    assert found.fix == "the launcher there is of another version: tpu_ops configure a --tags launcher"


async def test_the_blamed_rank_is_named_with_its_own_error() -> None:
    """The other ranks came too late, or were told of the failure."""
    late = Reply("", {"blamed": []}, "failed", "rank 0 no longer waits for ranks")
    own = Reply("", {"blamed": [3]}, "failed", "train.sh is not on PATH")
    for others in (late, told(3)):
        error = await not_started(Workers(pod_w1=others, pod_w2=others, pod_w3=own))
        assert (error.where, "train.sh is not on PATH" in str(error)) == ("pod-w3", True)
    error = await not_started(Workers(pod_w1=late, pod_w2=told(3), pod_w3=late))
    assert (error.where, "no such program" in str(error)) == ("pod-w3", True)


async def test_a_worker_that_goes_silent_after_the_start_does_not_end_the_run() -> None:
    workers = Workers(pod_w2=SILENT)
    await start(workers)
    assert [action for action, _ in workers.asked] == ["start", "start"]


async def test_a_silent_worker_0_is_told_to_give_up_and_the_user_is_informed() -> None:
    workers = Workers(pod_w0=Reply("", {}, "timeout", "it did not answer"))
    error = await not_started(workers)
    assert workers.asked == [("start", ["pod-w0"]), ("stop", ["pod-w0"])]
    assert error.where == "pod-w0"


SLICES = [*pod(2, "a", "1"), *pod(2, "b", "2", 1), *pod(2, "c", "3", 2)]


async def start_slices(workers: Workers, slices: Sequence[Worker] = SLICES) -> None:
    fanout: Any = workers
    await launch.start(fanout, SPEC, slices)


async def test_worker_0_of_each_slice_starts_in_turn_before_all_others() -> None:
    workers = Workers(a_w0=WAITING)
    await start_slices(workers)
    leaders = [("start", ["a-w0"]), ("start", ["b-w0"]), ("start", ["c-w0"])]
    assert workers.asked == [*leaders, ("start", ["a-w1", "b-w1", "c-w1"])]
    asked = {host: request for _, requests in workers.calls for host, request in requests.items()}
    assert {host for host, request in asked.items() if request.get("reserve")} == {"a-w0", "b-w0", "c-w0"}
    assert {request["spec"]["net"]["port"] for host, request in asked.items() if host != "a-w0"} == {8503}


async def test_slices_of_one_worker_leave_the_last_to_say_that_all_go() -> None:
    workers = Workers(a_w0=WAITING)
    await start_slices(workers, [*pod(1, "a", "1"), *pod(1, "b", "2", 1), *pod(1, "c", "3", 2)])
    assert workers.asked == [("start", ["a-w0"]), ("start", ["b-w0"]), ("start", ["c-w0"])]
    assert [bool(request.get("reserve")) for _, requests in workers.calls for request in requests.values()] == [
        True,
        True,
        False,
    ]


async def test_a_refused_lock_of_a_later_slice_releases_the_earlier_ones() -> None:
    workers = Workers(a_w0=WAITING, b_w0=HELD)
    with pytest.raises(launch.NotStarted, match="r0 of bob") as raised:
        await start_slices(workers)
    assert workers.asked == [("start", ["a-w0"]), ("start", ["b-w0"]), ("stop", ["a-w0"])]
    assert (raised.value.where, raised.value.fix) == ("b-w0", "wait for it")


async def test_a_silent_leader_may_have_begun_to_wait() -> None:
    workers = Workers(a_w0=WAITING, b_w0=SILENT)
    with pytest.raises(launch.NotStarted, match="no route to host") as raised:
        await start_slices(workers)
    assert "b-w0 ends by itself within 60 s" in raised.value.fix


async def test_a_silent_single_worker_is_told_to_give_up_and_may_still_run() -> None:
    workers = Workers(pod_w0=SILENT)
    with pytest.raises(launch.NotStarted) as raised:
        await start(workers, 1)
    assert workers.asked == [("start", ["pod-w0"]), ("stop", ["pod-w0"])]
    assert "ends by itself" not in raised.value.fix
    deaf = Workers(pod_w0=SILENT)
    deaf.deaf = True
    with pytest.raises(launch.NotStarted) as raised:
        await start(deaf, 1)
    assert "what this command started on pod-w0 may still run: `tpu_ops who`" in raised.value.fix
    assert raised.value.may_be_on


@pytest.mark.parametrize(
    ("reply", "deaf", "may_be_on"), [(SILENT, True, True), (SILENT, False, False), (HELD, True, False)]
)
async def test_a_run_may_be_on_where_an_answer_is_lost_and_rank_0_cannot_be_told(
    reply: Reply, deaf: bool, may_be_on: bool
) -> None:
    workers = Workers(pod_w1=told(2), pod_w2=reply, pod_w3=told(2))
    workers.deaf = deaf
    error = await not_started(workers)
    assert (error.may_be_on, "may still run" in error.fix) == (may_be_on, may_be_on)


async def interrupted(workers: Workers, size: int, hangs: str, times: int = 1) -> launch.Interrupted:
    """Press Ctrl-C while a worker starts, and again while rank 0 is told."""
    workers.hangs = hangs
    task = asyncio.create_task(start(workers, size))
    for _ in range(times):
        await workers.hanging.wait()
        workers.hanging.clear()
        task.cancel()
    with pytest.raises(launch.Interrupted) as raised:
        await task
    assert task.cancelled(), "whoever follows it takes it for left"
    return raised.value


@pytest.mark.parametrize("size", [1, 4])
async def test_a_start_that_is_interrupted_is_given_up(size: int) -> None:
    workers = Workers()
    assert not (await interrupted(workers, size, "pod-w0")).may_be_on
    assert workers.asked == [("start", ["pod-w0"]), ("stop", ["pod-w0"])]


@pytest.mark.parametrize(
    ("size", "hangs", "may_be_on"),
    [(1, "pod-w0", True), (4, "pod-w3", True), (4, "pod-w0", False)],
    ids=["the only rank", "all ranks", "rank 0 waits for nobody"],
)
async def test_an_interrupted_start_may_be_one_where_rank_0_cannot_be_told(
    size: int, hangs: str, may_be_on: bool
) -> None:
    workers = Workers()
    workers.deaf = True
    assert (await interrupted(workers, size, hangs)).may_be_on is may_be_on


async def test_a_start_interrupted_before_rank_0_is_told_may_be_on() -> None:
    workers = Workers()
    workers.slow_to_stop = True
    assert (await interrupted(workers, 1, "pod-w0", times=2)).may_be_on


@pytest.mark.parametrize("worse", [False, True], ids=["a moment", "for longer"])
async def test_a_local_failure_tells_rank_0_to_give_up_if_reachable(worse: bool) -> None:
    class Failing(Workers):
        async def call(self, requests: Any, action: str, **options: Any) -> dict[str, Reply]:
            if len(self.calls) == 1 or (worse and self.calls):
                self.calls.append((action, dict(requests)))
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            return await super().call(requests, action, **options)

    workers = Failing()
    with pytest.raises(BlockingIOError):
        await start(workers)
    assert workers.asked[-1] == ("stop", ["pod-w0"])


async def test_workers_without_an_internal_address_cannot_meet() -> None:
    bare = [worker._replace(node=worker.node._replace(internal_ips=("10.0.0.0", ""))) for worker in pod(2)]
    fanout: Any = Workers()
    with pytest.raises(UsageError, match="no internal address for pod-w1"):
        await launch.start(fanout, SPEC, bare)
    assert fanout.calls == []
