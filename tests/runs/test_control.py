"""Finding the runs of a fleet, where some workers answer and some do not."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import pod
from tpu_ops import config
from tpu_ops.cli import runs, status, stop, unlock
from tpu_ops.cloud.remedies import until_ready
from tpu_ops.errors import ExitCode, HostError, UnreachableError, UsageError
from tpu_ops.recovery import termination
from tpu_ops.runs import control, follow, holders, overview, records
from tpu_ops.runs.holders import Holder
from tpu_ops.runs.outcomes import outcome_of, run_state
from tpu_ops.runs.spec import GRACE_STOP
from tpu_ops.ssh.replies import Reply

SILENT = Reply("", {}, "unreachable", "no route to host")
LATE = Reply("", {}, "timeout", "the launcher did not answer within 45 s")
BARE = Reply("", {}, "no-launcher", "the launcher is not installed", "configure it")
DENIED = Reply("", {}, "denied", "sudo does not let you use the launcher on this worker", "configure it")
HOLDER = {"run_id": "r1", "person": "ada", "since": 5.0}


def record(rank: int) -> dict[str, Any]:
    found = {"run_id": "r1", "rank": rank, "state": "running", "since": 5.0, "workers": ["pod-w0", "pod-w1"]}
    return found | {"grace": {"failure": 10.0, "stop": 30.0}}


class Answers:
    """Stands for the workers: what each answers, an idle one by default."""

    def __init__(self, **replies: Reply) -> None:
        self._replies = {name.replace("_", "-"): reply for name, reply in replies.items()}

    async def call(self, requests: Any, action: str, **_: Any) -> dict[str, Reply]:
        idle = Reply("", {"holder": None, "records": [], "record": None})
        found = {host: self._replies.get(host, idle) for host in requests}
        return {host: Reply(host, reply.value, reply.kind, reply.problem, reply.fix) for host, reply in found.items()}


OLD = records.RunRecord(
    "old", ("gone",), ("7",), ("gone-w0",), ("true",), since=1.0, full_names=("projects/lab/locations/z/nodes/gone",)
)


@pytest.fixture(autouse=True)
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the API lists by now: the node `pod`, and no other."""
    now = SimpleNamespace(listed=[pod(2)[0].node], asked_at=0.0, unlisted=())
    monkeypatch.setattr("tpu_ops.runs.nodes.view.known", lambda _: now)


def fleet(tmp_path: Path) -> Any:
    settings = SimpleNamespace(state_dir=tmp_path, projects=("lab",), zones=(), snapshot="")
    return SimpleNamespace(workers=tuple(pod(2)), listed=(), settings=settings)


async def find(tmp_path: Path, word: str, **replies: Reply) -> control.Found:
    fanout: Any = Answers(**replies)
    return await control.find(fleet(tmp_path), fanout, word)


@pytest.mark.parametrize("asks", ["a node", "a run", "all runs", "who"])
async def test_a_login_refused_by_workers_names_the_key_and_the_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    there, said = fleet(tmp_path), "tpu@10.0.0.1: Permission denied (publickey)."
    vars(there.settings).update(user="tpu", private_key=Path("/k"), more_keys=(), only_key=True, file="tpu_vm.yml")
    refused = Reply("", {}, "unreachable", said)
    fanout: Any = Answers(pod_w0=refused, pod_w1=refused)
    monkeypatch.setattr("tpu_ops.cli.who.contact.fanout", lambda _: fanout)
    monkeypatch.setattr("tpu_ops.cli.who.contact.away", lambda *_: {})
    if asks == "a run":
        with pytest.raises(UnreachableError) as caught:
            await control.find(there, fanout, "exp")
        problem: Any = caught.value
    elif asks == "all runs":
        problem = (await overview.overview(there, fanout)).silent.problem()
    elif asks == "who":
        seen = await asyncio.to_thread(holders.of_fleet, there, ["pod-w0", "pod-w1"])
        problem = control.Found([], seen.silent).problem()
    else:
        problem = (await control.find(there, fanout, "pod")).problem()
    assert problem.fix.startswith("you logged in as tpu with /k. ")


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
    ("word", "asked", "hint"),
    [
        ("Pod", False, "did you mean pod?"),
        ("Digits-1", False, "did you mean digits-1?"),
        ("x" * 80, False, ""),
        ("digits-2", True, "did you mean digits-1?"),
    ],
)
async def test_an_unknown_run_is_reported_and_impossible_names_ask_no_worker(
    tmp_path: Path, word: str, asked: bool, hint: str
) -> None:
    records.write(tmp_path, records.RunRecord("digits-1", ("gone",), ("7",), ("gone-w0",), ("true",), since=1.0))
    questions: list[Any] = []

    class Noted(Answers):
        async def call(self, requests: Any, action: str, **options: Any) -> dict[str, Reply]:
            questions.append(requests)
            return await super().call(requests, action, **options)

    fanout: Any = Noted()
    with pytest.raises(UsageError) as caught:
        await control.find(fleet(tmp_path), fanout, word)
    assert caught.value.what == f"{word!r} is neither a run nor a node or worker"
    assert caught.value.fix == f"{hint} `tpu_ops list` shows the workers, `tpu_ops runs` the runs".lstrip()
    assert bool(questions) is asked


async def test_a_run_that_may_be_on_a_worker_that_cannot_say_so_is_not_called_none(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        await find(tmp_path, "digits-2", pod_w1=DENIED)
    said = "no worker that can tell knows a run 'digits-2'; the other workers cannot tell: sudo does not let you"
    assert caught.value.what.startswith(said)
    assert (caught.value.where, caught.value.fix) == ("pod-w1", "configure it")
    with pytest.raises(UnreachableError, match="no worker that answered knows a run 'digits-2'"):
        await find(tmp_path, "digits-2", pod_w0=DENIED, pod_w1=SILENT)
    # Where there is no launcher there is no run.
    with pytest.raises(UsageError, match="'digits-2' is neither a run nor a node or worker"):
        await find(tmp_path, "digits-2", pod_w0=BARE)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("@al", "no group is called 'al'"),
        ("pod-[1", "not a node set"),
        ("pod,nope", "no node or worker is called 'nope'"),
    ],
)
async def test_of_a_target_the_part_that_means_nothing_is_named(tmp_path: Path, word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        await find(tmp_path, word)


async def test_if_workers_do_not_know_the_run_the_last_local_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fanout: Any = Answers(pod_w0=SILENT, pod_w1=SILENT)
    monkeypatch.setattr("tpu_ops.cli.status.contact.fanout", lambda _: fanout)
    _, _, problem = await status._ask(fleet(tmp_path), "pod")
    assert problem
    assert problem.fix.endswith("`tpu_ops list` shows the state of their nodes")
    records.write(tmp_path, records.started_on("r1", pod(2), ("true",)))
    _, _, problem = await status._ask(fleet(tmp_path), "pod")
    assert problem
    assert problem.fix.endswith("; the last run that this machine started on these nodes was r1: `tpu_ops status r1`")


async def test_of_a_node_that_was_there_the_last_run_is_named(tmp_path: Path) -> None:
    records.write(tmp_path, OLD)
    with pytest.raises(UsageError, match="a node of this name existed: `tpu_ops status old` shows the last run that"):
        await find(tmp_path, "gone")


@pytest.mark.parametrize(("stale", "states"), [(60.0, ["running", "unreachable"]), (-1.0, ["failed", "unreachable"])])
async def test_running_ranks_are_asked_again_after_waiting_for_a_slow_worker(
    stale: float, states: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_STALE", stale)
    told = [Reply("", {"record": record(0) | {"state": state}}) for state in ("running", "failed")]
    fanout: Any = SimpleNamespace()

    async def call(requests: Any, action: str, **_: Any) -> dict[str, Reply]:
        answer = {"pod-w0": told.pop(0), "pod-w1": SILENT}
        return {host: answer[host]._replace(host=host) for host in requests}

    fanout.call = call
    seen = await control.outcomes(fanout, control.RunRef("r1", ("pod-w0", "pod-w1")))
    assert [outcome.state for outcome in seen] == states


@pytest.mark.parametrize(("state", "asked"), [("STOPPED", []), ("PREEMPTED", []), ("REPAIRING", ["pod-w0", "pod-w1"])])
async def test_a_node_that_is_not_serving_is_not_asked_and_the_fix_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, asked: list[str]
) -> None:
    known = fleet(tmp_path)
    known.workers = tuple(worker._replace(node=worker.node._replace(state=state)) for worker in pod(2))
    monkeypatch.setattr("tpu_ops.runs.control.contact.serving", lambda fleet, _: fleet)
    monkeypatch.setattr("tpu_ops.fleet.contact.selection.ways_of", lambda *_: None)
    questions: list[str] = []

    class Noted(Answers):
        async def call(self, requests: Any, action: str, **options: Any) -> dict[str, Reply]:
            questions.extend(requests)
            return await super().call(requests, action, **options)

    fanout: Any = Noted()
    problem = (await control.find(known, fanout, "pod")).problem()
    assert questions == asked
    if asked:
        assert problem is None
        return
    assert problem
    assert f"its node is {state} now" in problem.what
    assert problem.fix == until_ready(known.workers[0].node)


async def test_the_last_run_of_workers_is_the_newest_that_had_begun(tmp_path: Path) -> None:
    runs = [("new", "running", 9.0), ("refused", "refused", 8.0), ("last", "failed", 7.0), ("first", "succeeded", 1.0)]
    for hidden, found in ((1, control.Last("last", "pod-w1")), (3, control.Last("first", "pod-w1")), (4, None)):
        told = [{"run_id": run_id, "state": state, "since": since} for run_id, state, since in runs[hidden:]]
        reply = Reply("", {"holder": None, "records": told})
        assert (await find(tmp_path, "pod", pod_w1=reply)).last == found
        assert (await find(tmp_path, "pod", pod_w0=SILENT, pod_w1=reply)).last == found


async def test_while_nobody_of_a_node_answers_no_run_is_called_the_last_of_several(tmp_path: Path) -> None:
    over = Reply("", {"holder": None, "records": [{"run_id": "r1", "state": "failed", "since": 1.0}]})
    known = fleet(tmp_path)
    known.workers = (*pod(2), *pod(1, "solo", "2"))
    fanout: Any = Answers(pod_w0=over, solo_w0=SILENT)
    for word, found in (("pod", control.Last("r1", "pod-w0")), ("pod,solo", None)):
        assert (await control.find(known, fanout, word)).last == found


@pytest.mark.parametrize(
    ("called", "hosts"), [(["b-w0", "a-w0"], ("b-w0", "a-w0")), (["b.other-w0", "a.other-w0"], ("a-w0",))]
)
async def test_anothers_multislice_run_is_found_by_the_names_of_its_workers(
    tmp_path: Path, called: list[str], hosts: tuple[str, ...]
) -> None:
    workers = (*pod(1, "a", "2"), *pod(1, "b", "1"))
    both = SimpleNamespace(workers=workers, listed=(), settings=SimpleNamespace(state_dir=tmp_path))
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
    records.write(tmp_path, OLD)
    held = Reply("", {"holder": HOLDER, "records": [record(0)]})
    fanout: Any = Answers(pod_w0=held, pod_w1=SILENT)
    seen = await overview.overview(fleet(tmp_path), fanout)
    assert [(run.run_id, [outcome.state for outcome in outcomes]) for run, outcomes, _ in seen.rows] == [
        ("r1", ["running", "unreachable"]),
        ("old", ["gone"]),
    ]
    assert [reply.host for reply in seen.silent.silent] == ["pod-w1"]


@pytest.mark.parametrize(
    ("ended", "state"),
    [("succeeded", "succeeded"), ("stopped", "stopped"), ("failed", "failed"), ("refused", "refused")],
)
async def test_the_recorded_end_of_a_run_is_shown_when_its_nodes_are_gone(
    tmp_path: Path, ended: str, state: str
) -> None:
    records.write(tmp_path, OLD)
    records.close(tmp_path, "old", "running")
    records.close(tmp_path, "old", "gone")
    records.close(tmp_path, "unheard-of", "failed")
    fanout: Any = Answers(pod_w0=BARE, pod_w1=BARE)
    seen = await overview.overview(fleet(tmp_path), fanout)
    assert [outcome.state for outcome in seen.rows[0][1]] == ["gone"], "nobody has seen its end"
    records.close(tmp_path, "old", ended)
    seen = await overview.overview(fleet(tmp_path), fanout)
    assert run_state(seen.rows[0][1]) == state


async def test_an_overview_asks_by_name_for_a_run_that_is_behind_newer_ones(tmp_path: Path) -> None:
    for name, since in (("r1", 1.0), ("lost", 2.0)):
        records.write(tmp_path, records.RunRecord(name, ("pod",), ("1",), ("pod-w0", "pod-w1"), ("true",), since=since))

    class Busy(Answers):
        async def call(self, requests: Any, action: str, **options: Any) -> dict[str, Reply]:
            found = await super().call(requests, action, **options)
            for host, request in requests.items():
                if request.get("run_id") == "r1" and host == "pod-w0":
                    found[host] = Reply(host, {"record": record(0) | {"state": "succeeded"}})
            return found

    fanout: Any = Busy(pod_w1=BARE)
    seen = await overview.overview(fleet(tmp_path), fanout)
    assert [(run.run_id, [one.state for one in outcomes]) for run, outcomes, _ in seen.rows] == [
        ("lost", ["gone", "unknown"]),
        ("r1", ["succeeded", "unknown"]),
    ]
    assert seen.rows[0][1][1].reason == "the launcher is not installed"


# Each worker has its own runs: of one name there may be one on `a` and another one on `b`.


def of(host: str, person: str, state: str = "running", since: float = 5.0) -> dict[str, Any]:
    uid = {"ada": 1001, "bob": 1002}[person]
    asked = {"run_id": "exp", "rank": 0, "state": state, "since": since, "workers": [host], "attempt": 1}
    return asked | {"person": {"uid": uid, "name": person}}


def has(host: str, person: str) -> Reply:
    """Return what a worker answers that has a person's run `exp`."""
    held = {"run_id": "exp", "person": person, "since": 5.0}
    return Reply("", {"holder": held, "record": of(host, person), "records": [of(host, person)]})


def two(tmp_path: Path, remembered: str = "a") -> Any:
    """Return a fleet of the nodes `a` and `b`, of which one has a run that was started here."""
    if remembered:
        records.write(tmp_path, records.new("exp", (remembered,), ("1",), (f"{remembered}-w0",), ("true",)))
    workers = (*pod(1, "a", "1"), *pod(1, "b", "2"))
    return SimpleNamespace(workers=workers, listed=(), settings=SimpleNamespace(state_dir=tmp_path))


ON_A, ON_B = control.RunRef("exp", ("a-w0",)), control.RunRef("exp", ("b-w0",))


async def test_the_run_of_a_worker_is_its_own_and_not_a_namesake(tmp_path: Path) -> None:
    fanout: Any = Answers(a_w0=has("a-w0", "ada"), b_w0=has("b-w0", "bob"))
    both = two(tmp_path)
    assert (await control.find(both, fanout, "b")).runs == [ON_B]
    assert (await control.find(both, fanout, "a")).runs == [ON_A]
    assert (await control.find(both, fanout, "a,b")).runs == [ON_A, ON_B]
    assert (await control.find(both, fanout, "exp")).runs == [ON_A], "as this machine has started it"
    seen = await overview.overview(both, fanout)
    assert {run for run, _, _ in seen.rows} == {ON_A, ON_B}


async def test_of_two_runs_with_one_name_the_active_one_is_meant(tmp_path: Path) -> None:
    both = two(tmp_path, "")
    over = Reply("", {"record": of("a-w0", "ada", "succeeded", since=9.0)})
    fanout: Any = Answers(a_w0=over, b_w0=has("b-w0", "bob"))
    assert (await control.find(both, fanout, "exp")).runs == [ON_B]
    fanout = Answers(a_w0=over, b_w0=Reply("", {"record": of("b-w0", "bob", "failed")}))
    assert (await control.find(both, fanout, "exp")).runs == [ON_A], "the newest"
    fanout = Answers(a_w0=has("a-w0", "ada"), b_w0=has("b-w0", "bob"))
    with pytest.raises(UsageError, match="2 runs are called exp") as wrong:
        await control.find(both, fanout, "exp")
    assert wrong.value.where == "a-w0; b-w0"


async def test_a_run_whose_user_has_different_ids_on_its_workers_is_one_run(tmp_path: Path) -> None:
    run = [record(rank) | of(f"pod-w{rank}", "ada") for rank in range(2)]
    for rank, known in enumerate(run):
        known |= {"rank": rank, "workers": ["pod-w0", "pod-w1"], "person": {"uid": 2000 + rank, "name": "ada"}}
    both = {f"pod_w{rank}": Reply("", {"record": known}) for rank, known in enumerate(run)}
    assert (await find(tmp_path, "exp", **both)).runs == [control.RunRef("exp", ("pod-w0", "pod-w1"))]
    run[1]["person"]["name"] = "bob"
    with pytest.raises(UsageError, match="2 runs are called exp"):
        await find(tmp_path, "exp", **both)


@pytest.mark.parametrize(
    ("called", "found"),
    [
        (("a-w0", "a-w1", "b-w0", "b-w1"), ("a-w0", "a-w1", "b-w0", "b-w1")),
        # Whoever started it calls a node otherwise; of another one nobody answers, and its name is all that is known.
        (("a.zone-w0", "a.zone-w1", "c-w0", "c-w1"), ("a-w0", "a-w1", "c-w0", "c-w1")),
    ],
)
async def test_a_silent_worker_is_a_rank_of_a_run_that_was_started_elsewhere(
    tmp_path: Path, called: tuple[str, ...], found: tuple[str, ...]
) -> None:
    both = SimpleNamespace(
        workers=(*pod(2, "a", "1"), *pod(2, "b", "2")), listed=(), settings=SimpleNamespace(state_dir=tmp_path)
    )
    known = Reply("", {"record": of("a-w1", "ada") | {"rank": 1, "workers": list(called)}})
    fanout: Any = Answers(a_w0=SILENT, a_w1=known, b_w0=BARE, b_w1=LATE)
    assert (await control.find(both, fanout, "exp")).runs == [control.RunRef("exp", found)]  # type: ignore[arg-type]


async def test_a_run_is_not_called_unknown_if_workers_refuse_to_answer(tmp_path: Path) -> None:
    fanout: Any = Answers(pod_w1=DENIED)
    with pytest.raises(
        HostError, match="knows a run 'exp'; the other workers cannot tell: sudo does not let you"
    ) as caught:
        await control.find(fleet(tmp_path), fanout, "exp")
    assert (caught.value.where, caught.value.fix) == ("pod-w1", DENIED.fix)


@pytest.mark.parametrize(("reply", "error"), [(has("a-w0", "ada"), UsageError), (SILENT, UnreachableError)])
async def test_a_name_is_taken_while_a_run_of_it_is_on_elsewhere_or_may_be(
    tmp_path: Path, reply: Reply, error: type[Exception]
) -> None:
    both = two(tmp_path)
    fanout: Any = Answers(a_w0=reply)
    with pytest.raises(error, match="exp") as wrong:
        await control.require_free_name(both, fanout, "exp", ["b-w0"])
    assert (wrong.value.where, "choose another --name" in wrong.value.fix) == ("a-w0", True)  # type: ignore[attr-defined]
    over: Any = Answers(a_w0=Reply("", {"record": of("a-w0", "ada", "failed")}))
    for free, hosts in ((over, ["b-w0"]), (fanout, ["a-w0"])):
        await control.require_free_name(both, free, "exp", hosts)
    await control.require_free_name(both, fanout, "other", ["b-w0"])


def renamed(tmp_path: Path, *, other: bool) -> Any:
    """Return a fleet whose node `pod`, with the run r1 that was started here, has another label since."""
    records.write(tmp_path, records.RunRecord("r1", ("pod",), ("1",), ("pod-w0", "pod-w1"), ("true",), since=5.0))
    others = pod(2, "pod" if not other else "pod.europe-west4-b", "2")
    return SimpleNamespace(
        workers=(*others, *pod(2, "pod.us-central2-b", "1")),
        listed=(),
        settings=SimpleNamespace(state_dir=tmp_path),
    )


@pytest.mark.parametrize("other", [True, False], ids=["no node is called so", "another node is called so now"])
async def test_a_run_is_found_by_its_node_once_that_is_called_otherwise(tmp_path: Path, other: bool) -> None:
    labels = [f"pod.us-central2-b-w{index}" for index in range(2)]
    run, fleet_ = control.RunRef("r1", tuple(labels)), renamed(tmp_path, other=other)
    has_it = {label: Reply("", {"holder": HOLDER, "record": record(0), "records": [record(0)]}) for label in labels}
    fanout: Any = Answers(**has_it)
    assert (await control.find(fleet_, fanout, "r1")).runs == [run]
    assert (await control.find(fleet_, fanout, labels[1])).runs == [run]
    seen = await overview.overview(fleet_, fanout)
    assert [found for found, _, _ in seen.rows] == [run], "once"
    assert records.is_of(tmp_path, "r1", run.hosts, fleet_.workers)
    with pytest.raises(UsageError, match="a run r1 that was started here is active"):
        await control.require_free_name(fleet_, fanout, "r1", ["else-w0"])


async def test_workers_of_a_recreated_node_are_asked_by_their_old_names(tmp_path: Path) -> None:
    anew = SimpleNamespace(workers=tuple(pod(2, node_id="9")), listed=(), settings=SimpleNamespace(state_dir=tmp_path))
    records.write(tmp_path, records.new("r1", ("pod",), ("1",), ("pod-w0", "pod-w1"), ("true",)))
    fanout: Any = Answers()
    found = await control.find(anew, fanout, "r1")  # type: ignore[arg-type]
    assert found.runs == [control.RunRef("r1", ("pod-w0", "pod-w1"))]


async def test_unlock_means_the_run_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fanout: Any = Answers(a_w0=has("a-w0", "ada"), b_w0=has("b-w0", "ada"))
    both = two(tmp_path)
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.fanout", lambda _: fanout)
    doomed = [Holder("b-w0", "ada", "exp", 0, 5.0)]
    assert await unlock._runs_of(both, both.workers[1:], doomed) == [ON_B]
    assert await unlock._runs_of(both, both.workers, doomed) == [ON_B], "and none that another worker has"
    assert await unlock._runs_of(both, both.workers, [Holder("b-w0", "ada", "", 7, 5.0)]) == []


ENDED = Reply("", {"record": record(0) | {"state": "stopped"}})
ALREADY = Reply("", {**ENDED.value, "already": True})
REFUSED = Reply("", {}, "denied", "run r1 is bob's")


@pytest.mark.parametrize(
    ("first", "second", "ends"),
    [
        (ENDED, ENDED, (0, "run r1 was stopped on pod-w[0-1]")),
        (ENDED, SILENT, (4, "warning: run r1 may still be running on pod-w1: no route to host")),
        (REFUSED, REFUSED, (1, "warning: run r1 may still be running on pod-w[0-1]: run r1 is bob's")),
        (ALREADY, ALREADY, (0, "run r1 had already ended on pod-w[0-1]")),
    ],
)
def test_unlock_says_on_which_workers_a_run_ends_and_whether_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, first: Reply, second: Reply, ends: tuple[int, str]
) -> None:
    held = Reply("", {"holder": HOLDER, "records": [record(0)], "record": record(0)})

    class Pod(Answers):
        async def call(self, requests: Any, action: str, **options: Any) -> dict[str, Reply]:
            self._replies = {"pod-w0": held, "pod-w1": held}
            if action == "stop":
                self._replies = {"pod-w0": first, "pod-w1": second}
            if action == "unlock":
                self._replies["pod-w1"] = Reply("", {"ended": [], "left": [], "chips": {"lockfiles_removed": []}})
            return await super().call(requests, action, **options)

    pod_ = fleet(Path("nowhere"))
    pod_.settings.user = "ada"
    monkeypatch.setattr(config, "load", lambda _: None)
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.find", lambda *_: (pod_, pod_.workers[1:]))
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.serving", lambda fleet, _: fleet)
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.fanout", lambda _: Pod())
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.out_of_reach", lambda *_: {})
    parser = argparse.ArgumentParser()
    unlock.add_arguments(parser)
    code = unlock.run(parser.parse_args(["pod-w1", "--yes"]))
    asked, said = capsys.readouterr().err.splitlines()
    assert asked == "run r1 will be ended on all its workers: pod-w[0-1]"
    assert (code, said) == ends


def test_unlock_calls_no_worker_free_that_another_person_s_run_is_on(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    nothing = Reply("", {"ended": [], "left": [], "chips": {"lockfiles_removed": []}})

    class Pod(Answers):
        async def call(self, requests: Any, action: str, **options: Any) -> dict[str, Reply]:
            held = Reply("", {"holder": HOLDER, "records": [record(0)]})
            self._replies = dict.fromkeys(requests, nothing) if action == "unlock" else {"pod-w0": held}
            return await super().call(requests, action, **options)

    pod_ = fleet(Path("nowhere"))
    pod_.settings.user = "bob"
    monkeypatch.setattr(config, "load", lambda _: None)
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.find", lambda *_: (pod_, pod_.workers))
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.serving", lambda fleet, _: fleet)
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.fanout", lambda _: Pod())
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.out_of_reach", lambda *_: {})
    parser = argparse.ArgumentParser()
    unlock.add_arguments(parser)
    with pytest.raises(HostError, match="a run of ada is active: r1") as caught:
        unlock.run(parser.parse_args(["pod", "--yes"]))
    assert (caught.value.where, "ask ada" in caught.value.fix) == ("pod-w0", True)
    assert capsys.readouterr().out == "free: pod-w1\n"


@pytest.mark.parametrize(("already", "said"), [((True, True), True), ((True, False), False)])
async def test_a_stop_tells_a_run_that_had_ended_before(tmp_path: Path, already: tuple[bool, bool], said: bool) -> None:
    replies = [Reply("", {"record": record(rank), "already": value}) for rank, value in enumerate(already)]
    fanout: Any = Answers(pod_w0=replies[0], pod_w1=replies[1])
    stopped = await control.stop(fanout, control.RunRef("r1", ("pod-w0", "pod-w1")))
    assert stopped.already is said


async def test_stop_asks_rank_0_first_and_waits_for_the_grace_period() -> None:
    seen: list[tuple[list[str], float, float]] = []

    class Noted(Answers):
        async def call(
            self, requests: Any, action: str, *, head_start: float = 0.0, quiet: float = 0.0, **rest: Any
        ) -> dict[str, Reply]:
            seen.append((list(requests), head_start, quiet))
            return await super().call(requests, action, **rest)

    fanout: Any = Noted(pod_w0=ENDED, pod_w1=ENDED)
    await control.stop(fanout, control.RunRef("r1", ("pod-w1", "pod-w0")), grace=60)
    assert seen == [(["pod-w1", "pod-w0"], control._HEAD_START, 60)]
    # An earlier stop may have given the usual time, and more than this one does.
    await control.stop(fanout, control.RunRef("r1", ("pod-w1", "pod-w0")), grace=2)
    assert seen[1][2] == GRACE_STOP
    assert control._HEAD_START > 0


@pytest.mark.parametrize(
    ("intent", "grace"),
    [
        ({"kind": "stop", "grace": 600}, 600),
        ({"kind": "stop", "grace": None}, 30),
        ({"kind": "stop"}, 30),
        ({"kind": "failed", "grace": None}, 0),
        (None, 0),
    ],
)
async def test_the_grace_of_an_earlier_stop_is_what_it_named_or_the_usual_one(intent: Any, grace: float) -> None:
    on = record(0) | {"state": "ending", "intent": intent, "grace": {"stop": 30, "failure": 10}}
    fanout: Any = Answers(pod_w0=Reply("", {"record": on}))
    assert await control.longest_grace(fanout, "r1", ["pod-w0"]) == grace


class Ending(Answers):
    """Workers on which an earlier stop is on that gave its processes more time; keeps how long each answer had."""

    limits: list[tuple[str, float, list[str]]]

    async def call(self, requests: Any, action: str, *, limit: float = 0.0, **options: Any) -> dict[str, Reply]:
        self.limits.append((action, limit, list(requests)))
        if action == "status":
            intent = {"kind": "stop", "grace": 600}
            return {
                host: Reply(host, {"record": record(0) | {"state": "ending", "intent": intent}}) for host in requests
            }
        found = await super().call(requests, action, **options)
        patient = limit > 600
        return {host: ENDED._replace(host=host) if patient else reply for host, reply in found.items()}


async def test_a_stop_waits_for_the_longer_grace_of_an_earlier_one() -> None:
    fanout: Any = Ending(pod_w0=ENDED, pod_w1=LATE)
    fanout.limits = []
    stopped = await control.stop(fanout, control.RunRef("r1", ("pod-w0", "pod-w1")), grace=5)
    assert [outcome.state for outcome in stopped.outcomes] == ["stopped", "stopped"]
    assert fanout.limits == [
        ("stop", 30 + follow.STOP_MARGIN, ["pod-w0", "pod-w1"]),
        ("status", control.LIMIT, ["pod-w1"]),
        ("stop", 600 + follow.STOP_MARGIN, ["pod-w1"]),
    ]


MISSING = Reply("", {}, "missing", "this worker does not know run r1")


def over(rank: int, state: str, began: float | None, attempt: int = 1) -> Reply:
    """Return what a worker answers to a stop that had ended before."""
    found = record(rank) | {"state": state, "began": began, "ended": 6.0, "attempt": attempt, "code_digest": ""}
    return Reply("", {"record": found, "already": True})


@pytest.mark.parametrize(
    ("first", "code", "said"),
    [
        (
            MISSING,
            ExitCode.OK,
            "run r1 is not running: none of its workers knows it (if it is only just being started, run this again):",
        ),
        (over(0, "refused", None), ExitCode.OK, "run r1 was given up before it began:"),
        (over(0, "refused", None, attempt=2), ExitCode.OK, "run r1 had already ended:"),
        (over(0, "failed", 5.5), ExitCode.OK, "run r1 had already ended:"),
        (SILENT, ExitCode.UNREACHABLE, "run r1: unreachable"),
        (Reply("", {"record": ENDED.value["record"] | {"intent": {"kind": "stop"}}}), ExitCode.OK, "run r1: stopped"),
    ],
)
async def test_a_worker_that_never_heard_of_a_run_is_no_failure_to_stop_it(
    first: Reply, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start was cancelled before that worker was asked."""
    fanout: Any = Answers(pod_w0=first, pod_w1=MISSING)
    run = control.RunRef("r1", ("pod-w0", "pod-w1"))
    stopped = await control.stop(fanout, run)
    stop.report([(run, stopped)], as_json=False)
    out, err = capsys.readouterr()
    assert (stop.exit_code(stopped.outcomes), err) == (code, f"{said}\n")
    assert re.search("1 +pod-w1 +gone +the worker knows nothing of this run", out)


DAMAGED = Reply("", {}, "damaged", "/runs/r1/record.json is damaged: it is empty", "move it away")


async def test_a_damaged_record_is_shown_as_such_and_not_as_an_unknown_run(tmp_path: Path) -> None:
    fanout: Any = Answers(pod_w0=ENDED, pod_w1=DAMAGED)
    _, outcome = await control.outcomes(fanout, control.RunRef("r1", ("pod-w0", "pod-w1")))
    reason = "/runs/r1/record.json is damaged: it is empty; move it away"
    assert (outcome.host, outcome.state, outcome.reason) == ("pod-w1", "unknown", reason)
    with pytest.raises(HostError) as raised:
        await find(tmp_path, "r1", pod_w1=DAMAGED)
    assert DAMAGED.problem in raised.value.what
    assert (raised.value.where, raised.value.fix) == ("pod-w1", DAMAGED.fix)


@pytest.mark.parametrize(
    ("end", "cells", "facts"),
    [
        ({"state": "succeeded", "ended": 65.0, "exit": {"code": 0}}, ("0", "1 min"), (0, 60.0)),
        ({"state": "failed", "ended": 3665.5, "exit": {"code": 7}}, ("7", "1 h 1 min"), (7, 3660.5)),
        ({"state": "failed", "ended": 7.0, "exit": {"signal": 9}}, ("SIGKILL", "2 s"), (137, 2.0)),
        (
            {"state": "stopped", "ended": 7.0, "exit": {"signal": 15}, "intent": {"kind": "stop"}},
            ("", "2 s"),
            (None, 2.0),
        ),
        ({"state": "lost", "ended": None, "exit": None}, ("", ""), (None, None)),
    ],
)
def test_a_list_of_runs_shows_command_duration_and_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: Any, cells: tuple[str, str], facts: tuple[Any, Any]
) -> None:
    whose = {"person": {"name": "ada"}, "argv": ["python", "my train.py"], "code_digest": "", "attempt": 1}
    run_ = control.RunRef("r1", ("pod-w0",))
    row = (run_, (outcome_of(0, "pod-w0", {**whose, "since": 5.0, **end}),), 5.0)
    seen, settings = overview.Overview((row,), control.Found([])), fleet(tmp_path).settings
    runs.show(seen, settings, as_json=False)
    heading, line = capsys.readouterr().out.splitlines()
    columns = [heading.index(name) for name in ("EXIT", "STARTED", "LASTED", "COMMAND")]
    assert (line[columns[0] : columns[1]].strip(), line[columns[2] : columns[3]].strip()) == cells
    assert line[columns[3] :] == "python 'my train.py'"
    runs.show(seen, settings, as_json=True)
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["exit_code"], told["duration"]) == facts


async def test_a_list_of_runs_warns_of_damaged_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"message": DAMAGED.problem, "fix": DAMAGED.fix}
    fanout: Any = Answers(pod_w1=Reply("", {"holder": None, "records": [], "damaged": [told]}))
    there = fleet(tmp_path)
    assert runs.show(await overview.overview(there, fanout), there.settings, as_json=False) == ExitCode.OK
    assert "warning: pod-w1: /runs/r1/record.json is damaged: it is empty; move it away" in capsys.readouterr().err


NOT_THEIRS = Reply("", {}, "denied", "the run belongs to ada", "ask the owner, or add --force")
RUNNING = {
    "attempt": 1,
    "person": {"name": "ada"},
    "state": "running",
    "since": 1795635395.0,
    "ended": None,
    "code_digest": "",
}


@pytest.mark.parametrize(
    ("there", "code", "problem"),
    [
        (Reply("", {"record": record(1) | RUNNING}), ExitCode.FAILED, True),
        (ENDED, ExitCode.OK, False),
        (SILENT, ExitCode.FAILED, True),
        (NOT_THEIRS, ExitCode.FAILED, True),
    ],
    ids=["on", "ended elsewhere", "silent", "no launcher for them"],
)
async def test_a_refused_stop_names_the_owner_the_start_and_the_fix(
    there: Reply, code: int, problem: bool, tmp_path: Path
) -> None:
    class Denying(Answers):
        async def call(self, requests: Any, action: str, **options: Any) -> dict[str, Reply]:
            if action == "stop":
                return {host: NOT_THEIRS._replace(host=host) for host in requests}
            return await super().call(requests, action, **options)

    fanout: Any = Denying(pod_w0=there, pod_w1=there)
    run = control.RunRef("r1", ("pod-w0", "pod-w1"))
    stopped = await control.stop(fanout, run)
    assert (stop.exit_code(stopped.outcomes), bool(stopped.refusal)) == (code, problem)
    if stopped.refusal:
        error = termination.not_theirs(run, stopped.outcomes, stopped.refusal)
        since = ", active since 2026-11-25 19:36:35 UTC" if there.ok else ""
        assert (error.what, error.where) == ("run r1 was not stopped: the run belongs to ada", f"pod-w[0-1]{since}")
        assert error.fix == "ask the owner, or add --force"
