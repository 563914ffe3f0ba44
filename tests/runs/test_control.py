"""Finding the runs of a fleet, where some workers answer and some do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import pod
from tpu_ops.errors import HostError, UnreachableError
from tpu_ops.remote.replies import Reply
from tpu_ops.runs import control, records

SILENT = Reply("", {}, "unreachable", "no route to host")
LATE = Reply("", {}, "timeout", "the launcher did not answer within 45 s")
BARE = Reply("", {}, "no-launcher", "the launcher is not installed", "configure it")
HOLDER = {"run_id": "r1", "person": "ada", "since": 5.0}


def record(rank: int) -> dict[str, Any]:
    return {"run_id": "r1", "rank": rank, "state": "running", "since": 5.0, "workers": ["pod-w0", "pod-w1"]}


class Answers:
    """Stands for the workers: what each answers, an idle one by default."""

    def __init__(self, **replies: Reply) -> None:
        self._replies = {name.replace("_", "-"): reply for name, reply in replies.items()}

    async def call(self, requests: Any, action: str, **_: Any) -> dict[str, Reply]:
        idle = Reply("", {"holder": None, "records": [], "record": None})
        found = {host: self._replies.get(host, idle) for host in requests}
        return {host: Reply(host, reply.value, reply.kind, reply.problem, reply.fix) for host, reply in found.items()}


def fleet(tmp_path: Path) -> Any:
    return SimpleNamespace(workers=tuple(pod(2)), settings=SimpleNamespace(state_dir=tmp_path))


async def find(tmp_path: Path, word: str, **replies: Reply) -> control.Found:
    fanout: Any = Answers(**replies)
    return await control.find(fleet(tmp_path), fanout, word)


@pytest.mark.parametrize(("reply", "error"), [(SILENT, UnreachableError), (LATE, UnreachableError), (BARE, HostError)])
async def test_a_worker_that_cannot_tell_is_named_where_no_run_is_found(
    tmp_path: Path, reply: Reply, error: type[Exception]
) -> None:
    found = await find(tmp_path, "pod", pod_w1=reply)
    problem = found.problem()
    assert found.runs == []
    assert isinstance(problem, error)
    assert (problem.where, reply.problem in problem.what) == ("pod-w1", True)
    assert (await find(tmp_path, "pod-w0", pod_w1=reply)).problem() is None, "it was not asked for"
    assert (await find(tmp_path, "pod")).problem() is None


@pytest.mark.parametrize(
    ("called", "hosts"), [(["b-w0", "a-w0"], ("b-w0", "a-w0")), (["b.other-w0", "a.other-w0"], ("a-w0",))]
)
async def test_another_s_run_on_several_nodes_is_found_whole_where_its_workers_have_the_same_names(
    tmp_path: Path, called: list[str], hosts: tuple[str, ...]
) -> None:
    both = SimpleNamespace(workers=(*pod(1, "a", "2"), *pod(1, "b", "1")), settings=SimpleNamespace(state_dir=tmp_path))
    fanout: Any = Answers(a_w0=Reply("", {"holder": HOLDER, "records": [record(1) | {"workers": called}]}))
    found = await control.find(both, fanout, "a")  # type: ignore[arg-type]
    assert found.runs == [control.RunRef("r1", hosts)]


async def test_a_silent_worker_of_a_run_that_was_found_is_one_of_its_ranks(tmp_path: Path) -> None:
    held = Reply("", {"holder": HOLDER})
    found = await find(tmp_path, "pod", pod_w0=held, pod_w1=SILENT)
    assert found == control.Found([control.RunRef("r1", ("pod-w0", "pod-w1"))])
    fanout: Any = Answers(pod_w0=Reply("", {"record": record(0)}), pod_w1=LATE)
    states = [outcome.state for outcome in await control.outcomes(fanout, found.runs[0])]
    assert states == ["running", "unreachable"]


async def test_an_overview_has_what_is_on_and_what_this_machine_started(tmp_path: Path) -> None:
    records.write(tmp_path, records.RunRecord("old", ("gone",), ("7",), ("gone-w0",), ("true",), since=1.0))
    held = Reply("", {"holder": HOLDER, "records": [record(0)]})
    fanout: Any = Answers(pod_w0=held, pod_w1=SILENT)
    seen = await control.overview(fleet(tmp_path), fanout)
    assert [(run.run_id, [outcome.state for outcome in outcomes]) for run, outcomes, _ in seen.rows] == [
        ("r1", ["running", "unreachable"]),
        ("old", ["gone"]),
    ]
    assert [reply.host for reply in seen.silent.silent] == ["pod-w1"]


@pytest.mark.parametrize(("already", "said"), [((True, True), True), ((True, False), False)])
async def test_a_stop_tells_a_run_that_had_ended_before(tmp_path: Path, already: tuple[bool, bool], said: bool) -> None:
    replies = [Reply("", {"record": record(rank), "already": value}) for rank, value in enumerate(already)]
    fanout: Any = Answers(pod_w0=replies[0], pod_w1=replies[1])
    stopped = await control.stop(fanout, control.RunRef("r1", ("pod-w0", "pod-w1")))
    assert stopped.already is said
