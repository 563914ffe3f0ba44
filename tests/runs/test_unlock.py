"""`tpu_ops unlock` ends what it has shown and nothing else, and reports only free workers as free."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import pod
from tpu_ops import config
from tpu_ops.cli import leftovers, stop, unlock
from tpu_ops.errors import ExitCode, HostError, UnreachableError, UsageError
from tpu_ops.runs import control, holders
from tpu_ops.runs.outcomes import outcome_of
from tpu_ops.ssh.replies import Reply

SILENT = Reply("", {}, "unreachable", "no route to host")


def process(pid: int, user: str = "ada", run: str = "") -> dict[str, Any]:
    return {
        "pid": pid,
        "start": 10 * pid,
        "user": user,
        "run": run,
        "since": 5.0,
        "command": "python",
        "devices": ["/dev/accel0"],
    }


def holding(*found: dict[str, Any]) -> Reply:
    return Reply("", {"holders": list(found), "holder": None, "chips": ["/dev/accel0"]})


def unlocked(left: list[dict[str, Any]] | None = None, **chips: Any) -> Reply:
    values = {"lockfiles_removed": [], "lockfiles_kept": [], **chips}
    return Reply("", {"ended": [], "left": left or [], "chips": values})


class Pod:
    """Two workers: what each says when it is looked who holds chips, and then, and what they were asked."""

    def __init__(self, looks: list[Reply], then: list[Reply]) -> None:
        self.looks, self.then = looks, then
        self.asked: dict[str, Any] = {}

    async def call(self, requests: dict[str, Any], action: str, **_: Any) -> dict[str, Reply]:
        if action == "unlock":
            self.asked = requests
        replies = self.then if action == "unlock" else self.looks
        named = {f"pod-w{index}": reply for index, reply in enumerate(replies)}
        return {host: Reply(host, *(getattr(named[host], key) for key in _REST)) for host in requests}


_REST = ("value", "kind", "problem", "fix")


def unlock_pod(
    monkeypatch: pytest.MonkeyPatch, pod_: Pod, *options: str, me: str = "ada", yes: Sequence[str] = ("--yes",)
) -> int:
    settings = SimpleNamespace(state_dir=Path("nowhere"), user=me)
    fleet: Any = SimpleNamespace(workers=tuple(pod(2)), listed=(), settings=settings)
    monkeypatch.setattr(config, "load", lambda _: None)
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.find", lambda *_: (fleet, fleet.workers))
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.serving", lambda fleet, _: fleet)
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.fanout", lambda _: pod_)
    monkeypatch.setattr("tpu_ops.cli.unlock.contact.out_of_reach", lambda *_: {})
    parser = argparse.ArgumentParser()
    unlock.add_arguments(parser)
    return unlock.run(parser.parse_args(["pod", *yes, *options]))


def test_unlock_ends_only_the_processes_that_were_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    pod_ = Pod([holding(process(7), process(8, "bob")), holding()], [unlocked([process(8, "bob")]), unlocked()])
    with pytest.raises(HostError, match="chips are still held"):
        unlock_pod(monkeypatch, pod_)
    assert {host: request["processes"] for host, request in pod_.asked.items()} == {"pod-w0": [[7, 70]], "pod-w1": []}


def test_unlock_with_json_and_without_yes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pod_ = Pod([holding(process(7)), holding()], [unlocked(), unlocked()])
    with pytest.raises(UsageError, match="--json does not show them"):
        unlock_pod(monkeypatch, pod_, "--json", yes=())
    assert not pod_.asked


def test_unlock_ends_nothing_on_a_worker_that_reports_no_holders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pod_ = Pod([holding(process(7)), SILENT], [unlocked(), unlocked()])
    with pytest.raises(UnreachableError) as caught:
        unlock_pod(monkeypatch, pod_)
    assert (list(pod_.asked), caught.value.where) == (["pod-w0"], "pod-w1")
    assert capsys.readouterr().out.splitlines()[-1] == "free: pod-w0"
    with pytest.raises(UnreachableError):
        unlock_pod(monkeypatch, pod_, "--json")
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert (fault["worker"], fault["problem"]) == ("pod-w1", SILENT.problem)


@pytest.mark.parametrize(
    ("left", "fix"),
    [
        (process(7), "a process in state D waits inside the kernel"),
        (process(9), "pid 9 took a chip after the list was shown: run this command again"),
        (process(7) | {"start": 1}, "pid 7 took a chip after the list was shown"),
        (process(9, "bob"), "ask bob, or an administrator"),
    ],
)
def test_the_fix_for_chips_that_stay_held_depends_on_their_holder(
    monkeypatch: pytest.MonkeyPatch, left: dict[str, Any], fix: str
) -> None:
    pod_ = Pod([holding(process(7)), holding()], [unlocked([left]), unlocked()])
    with pytest.raises(HostError, match="chips are still held") as caught:
        unlock_pod(monkeypatch, pod_)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("left", "fix"),
    [
        ([process(7, "tpu")], "end your own processes with `tpu_ops unlock pod-w1`"),
        (
            [process(7, "tpu"), process(9, "bob")],
            "end your own processes with `tpu_ops unlock pod-w1`; ask bob, or an administrator: --force --user bob",
        ),
    ],
)
def test_unlock_for_another_user_tells_how_to_free_the_own_chips(
    monkeypatch: pytest.MonkeyPatch, left: list[dict[str, Any]], fix: str
) -> None:
    pod_ = Pod([holding(), holding(*left)], [unlocked(), unlocked(left)])
    with pytest.raises(HostError, match="chips are still held") as caught:
        unlock_pod(monkeypatch, pod_, "--user", "ada", "--force", me="tpu")
    assert (caught.value.where, caught.value.fix) == ("pod-w1", fix)


def test_a_run_of_one_s_own_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Reply("", {"holders": [], "holder": {"run_id": "r1", "person": "tpu", "since": 5.0}, "chips": []})
    with pytest.raises(HostError, match="a run of tpu is active: r1") as caught:
        unlock_pod(monkeypatch, Pod([run, holding()], [unlocked(), unlocked()]), "--user", "ada", "--force", me="tpu")
    assert caught.value.fix == "the run is yours: `tpu_ops stop r1` ends it"


def test_a_free_pod_is_free(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert unlock_pod(monkeypatch, Pod([holding(), holding()], [unlocked(), unlocked()])) == ExitCode.OK
    assert capsys.readouterr().out == "free: pod-w[0-1]\n"


LOCKED: dict[str, Any] = {
    "lockfiles_kept": ["/tmp/l"],
    "lockfile_faults": {"/tmp/l": "it is locked, and open in pid 9 of bob (python)"},
}
KEPT = "warning: pod-w0: /tmp/l was not removed: it is locked, and open in pid 9 of bob (python)"


@pytest.mark.parametrize(
    ("chips", "said"),
    [(LOCKED, KEPT), ({"lockfiles_kept": ["/tmp/l"]}, "warning: pod-w0: /tmp/l was not removed: reason unknown")],
    ids=["as it is", "of an older version"],
)
def test_a_worker_whose_lockfile_is_kept_is_not_free(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], chips: dict[str, Any], said: str
) -> None:
    code = unlock_pod(monkeypatch, Pod([holding(), holding()], [unlocked(**chips), unlocked()]))
    out, err = capsys.readouterr()
    assert (code, out, err.splitlines()) == (ExitCode.FAILED, "free: pod-w1\n", [said])


def test_a_lockfile_of_another_person_s_run_is_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Reply("", {"holders": [], "holder": {"run_id": "r1", "person": "bob", "since": 5.0}, "chips": []})
    with pytest.raises(HostError, match="a run of bob is active: r1"):
        unlock_pod(monkeypatch, Pod([run, holding()], [unlocked(**LOCKED), unlocked()]))
    out, err = capsys.readouterr()
    assert (out, err) == ("free: pod-w1\n", "")


@pytest.mark.parametrize(("holders", "said"), [([], KEPT), ([process(9, "bob")], "")])
def test_a_stop_says_that_a_lockfile_is_kept(
    capsys: pytest.CaptureFixture[str], holders: list[dict[str, Any]], said: str
) -> None:
    record = {"state": "stopped", "attempt": 1, "since": 1.0, "began": 1.0, "stuck": []}
    chips = {"holders": holders, "lockfiles_removed": [], **LOCKED}
    outcome = outcome_of(0, "pod-w0", record | {"chips": chips})
    stop.report([(control.RunRef("r1", ("pod-w0",)), control.Stopped((outcome,), already=False))], as_json=False)
    assert [line for line in capsys.readouterr().err.splitlines() if "not removed" in line] == [said] * bool(said)


async def test_of_what_a_run_has_left_on_chips_only_what_holds_them_still_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another process has the pid of the second one, and the third has ended."""
    left = [process(9, "bob"), process(10, "bob"), process(11, "bob")]
    record = {"state": "succeeded", "chips": {"holders": left, "lockfiles_removed": [], "lockfiles_kept": []}}
    outcomes = [outcome_of(0, "pod-w0", record), outcome_of(1, "pod-w1", {"state": "succeeded", "chips": None})]
    fanout: Any = Pod([holding(process(9, "bob"), process(10, "ada"))], [])
    leftovers.warn_of_held(await holders.still_held(fanout, outcomes))
    assert capsys.readouterr().err.splitlines() == [
        "warning: pod-w0: the chips are still held by pid 9 of bob: python",
        (
            "  fix: `tpu_ops unlock pod-w0` ends your own processes; for other processes ask bob; "
            "`tpu_ops who pod-w0` shows who holds them"
        ),
    ]
    assert await holders.still_held(fanout, outcomes[1:]) == []
