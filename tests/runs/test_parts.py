"""The parts of a run on the controller that need no worker."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.specs import good, myself
from tpu_ops import texts
from tpu_ops.cli import doctor as doctor_command
from tpu_ops.cli import logs as cli_logs
from tpu_ops.cli import run as run_command
from tpu_ops.cli import runs_output, who
from tpu_ops.cloud.node import Node, Worker, workers_of
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.host import environment as host_environment
from tpu_ops.host import fitness
from tpu_ops.protocol import spec as protocol_spec
from tpu_ops.protocol import wire
from tpu_ops.protocol.wire import Refused, require_protocol
from tpu_ops.runs import attempts, control, doctor, preflight, ranks, records, spec, sync
from tpu_ops.runs.holders import Holder
from tpu_ops.runs.lines import Lines, Part
from tpu_ops.runs.outcomes import KNOWS_NOTHING, NOT_STARTED, Outcome, first_failure, of_refused, outcome_of, run_state
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply, Result


def pod(size: int = 4, name: str = "pod", node_id: str = "1", subnet: int = 0) -> list[Worker]:
    node = Node(
        name=name,
        project="lab",
        zone="us-central2-b",
        node_id=node_id,
        accelerator_type="v4-32",
        state="READY",
        internal_ips=tuple(f"10.0.{subnet}.{index}" for index in range(size)),
        chips_per_worker=4,
    )
    return workers_of([node])


def stand_in(folder: Path) -> Any:
    """Return what stands for the settings of a fleet whose state is kept in a folder."""
    return SimpleNamespace(state_dir=folder)


# --- spec ---------------------------------------------------------------------------------------------------


def test_the_spec_that_a_controller_sends_is_valid_on_a_worker() -> None:
    run = spec.RunSpec("digits-1", ("python", "\udcff", ""), {"A": ""}, cwd="tpu_ops/digits", force=True)
    sent = run.for_rank(pod(), 2, 8501)
    assert protocol_spec.check(sent) == sent
    assert (sent["chips"], sent["force"]) == (4, True)
    assert set(sent) == set(good())
    assert sent["net"] == {"address": "10.0.0.2", "hub": "10.0.0.0", "port": 8501, "key": run.key}
    assert run.key not in repr(run)
    assert (sent["rank"], sent["world_size"], sent["worker"], sent["node"]) == (2, 4, "pod-w2", "pod")


def test_every_rank_is_told_its_slice() -> None:
    run = spec.RunSpec("digits-1", ("true",))
    workers = [*pod(2, "a", "1"), *pod(2, "b", "2", 1)]
    sent = [run.for_rank(workers, rank, 8501 if rank else 0) for rank in range(4)]
    assert [protocol_spec.check(one)["slice"] for one in sent] == [0, 0, 1, 1]
    assert {one["slices"] for one in sent} == {2}
    assert [one["net"]["hub"] for one in sent] == ["10.0.0.0"] * 4
    assert len({protocol_spec.digest(one) for one in sent}) == 1


def made_together(name: str, node_id: str, subnet: int = 0) -> list[Worker]:
    """Return the workers of a node that a queued resource made as one slice of several."""
    return workers_of([worker.node._replace(multislice=True) for worker in pod(2, name, node_id, subnet)[:1]])


def test_a_run_of_one_slice_of_several_is_told_that_there_are_no_others() -> None:
    run = spec.RunSpec("digits-1", ("true",), {"A": "1"})
    none = dict.fromkeys(protocol_spec.MEGASCALE, "")
    sent = [run.for_rank(made_together("big-0", "1"), rank, 8501 if rank else 0) for rank in range(2)]
    assert [protocol_spec.check(one)["env"] for one in sent] == [{"A": "1"} | none] * 2
    env = host_environment.build(sent[0], myself(), "", {}, "/x")
    assert {name: env[name.encode()] for name in none} == dict.fromkeys(none, b"")
    asked = spec.RunSpec("digits-1", ("true",), {"MEGASCALE_NUM_SLICES": "2"})
    assert asked.for_rank(made_together("big-0", "1"), 0)["env"] == none | {"MEGASCALE_NUM_SLICES": "2"}
    several = [*made_together("big-0", "1"), *made_together("big-1", "2", 1)]
    for workers in (several, pod(2)):
        assert run.for_rank(workers, 0)["env"] == {"A": "1"}


@pytest.mark.parametrize("run_id", ["", "Upper", "a b", "../x", "-x", "x" * 80, "x\n", "a.json"])
def test_invalid_and_conflicting_run_names_are_refused_locally(run_id: str) -> None:
    with pytest.raises(UsageError):
        spec.RunSpec(run_id, ("true",))


@pytest.mark.parametrize(
    ("times", "what", "fix"),
    [
        ({"barrier": 0.5}, "0.5 seconds are too few", "give 1 to 3600 seconds"),
        ({"lease": 4.9}, "4.9 seconds are too few", "give 5 to 3600 seconds"),
        ({"lease": 3601}, "3601 seconds are too many", "give 5 to 3600 seconds"),
        ({"exit_skew": 86401}, "86401 seconds are too many", "give 1 to 86400 seconds"),
        ({"grace_stop": 3601}, "3601 seconds are too many", "give 0 to 3600 seconds"),
    ],
)
def test_times_that_no_worker_takes_are_refused_here(times: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(UsageError) as wrong:
        spec.RunSpec("r1", ("true",), **times)
    assert (wrong.value.what, wrong.value.fix) == (what, fix)
    assert wrong.value.where == "--" + next(iter(times)).replace("_", "-")


@pytest.mark.parametrize("path", ["env", "./env", "~/env"])
def test_a_relative_environment_path_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="not an absolute path") as wrong:
        spec.RunSpec("r1", ("true",), venv=path)
    assert wrong.value.where == "--venv"
    assert spec.RunSpec("r1", ("true",), venv="/srv/env").venv == "/srv/env"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("digits", "digits-20261120-181500-ab12"),
        ("My Run_2", "my-run-2-20261120-181500-ab12"),
        ("--", "run-20261120-181500-ab12"),
    ],
)
def test_a_run_is_called_by_what_and_when(word: str, expected: str) -> None:
    made = spec.new_run_id(word, datetime(2026, 11, 20, 18, 15, tzinfo=UTC), "ab12")
    assert made == expected
    spec.RunSpec(made, ("true",))


@pytest.mark.parametrize(
    ("argv", "synced", "expected"),
    [
        (["python", "-u", "dir/train.py", "--x"], "", "train"),
        (["python", "train.py"], "digits", "digits"),
        (["/usr/bin/sleep", "1"], "", "sleep"),
    ],
)
def test_a_run_is_called_by_its_code(argv: list[str], synced: str, expected: str) -> None:
    assert spec.name_of(argv, synced) == expected


def test_variables_are_taken_as_they_stand(tmp_path: Path) -> None:
    assert spec.parse_env(["A=b=c", "B="]) == {"A": "b=c", "B": ""}
    path = tmp_path / "env"
    path.write_text("# x\n\nA= spaced \nB='kept'\n")
    assert spec.read_env_file(path) == {"A": " spaced ", "B": "'kept'"}
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert spec.read_env_file(path) == {"A": " spaced ", "B": "'kept'"}, "its first line begins behind the mark"
    odd = "a\x0cb\x1cc\x85d\u2028e\rf"
    path.write_bytes(f"A={odd}\r\nB=2\n".encode())
    assert spec.read_env_file(path) == {"A": odd, "B": "2"}
    path.write_text("A=1\nthe-secret without sign\n")
    with pytest.raises(UsageError) as wrong:
        spec.read_env_file(path)
    assert "line 2" in str(wrong.value)
    assert "secret" not in str(wrong.value)
    with pytest.raises(UsageError):
        spec.parse_env(["NO-SIGN"])


def test_a_run_is_remembered_and_forgotten(tmp_path: Path) -> None:
    record = records.new("digits-1", ("pod",), ("1",), ("pod-w0",), ("true",))
    records.write(tmp_path, record)
    assert records.read(tmp_path, "digits-1") == record
    records.forget(tmp_path, "digits-1")
    assert records.read(tmp_path, "digits-1") is None
    assert records.read(tmp_path, "../../etc/passwd") is None


def test_the_oldest_runs_are_forgotten_unless_they_are_recovered_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "KEPT", 2)
    (tmp_path / "runs" / "r0").mkdir(parents=True)
    (tmp_path / "runs" / "r0" / "recovery.json").touch()
    for number in range(5):
        records.write(tmp_path, records.new(f"r{number}", ("pod",), ("1",), ("pod-w0",), ("true",)))
        os.utime(tmp_path / "runs" / f"r{number}.json", (number, number))
    assert [record.run_id for record in records.recent(tmp_path, 9)] == ["r4", "r3", "r0"]


def test_a_damaged_memory_is_none(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x.json").write_text('{"run_id": "x"}')
    assert records.read(tmp_path, "x") is None


def test_a_run_takes_whole_nodes() -> None:
    workers = pod()
    assert [worker.index for worker in control.by_rank(workers[::-1], "pod")] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="1 of the 4 workers of pod"):
        control.by_rank(workers[1:2], "pod-w1")
    with pytest.raises(UsageError, match="1 of the 4 workers of a") as wrong:
        control.by_rank([*pod(4, "a")[:1], *pod(4, "b", "2")], "a-w0,b")
    assert wrong.value.fix == "use a,b"


def test_slices_are_in_the_order_of_node_ids_whatever_they_are_called() -> None:
    ranks = control.by_rank([*pod(2, "a", "7"), *pod(2, "b", "3")], "a,b")
    assert [worker.host for worker in ranks] == ["b-w0", "b-w1", "a-w0", "a-w1"]


def test_slices_of_one_run_are_of_one_type() -> None:
    other = [worker._replace(node=worker.node._replace(accelerator_type="v4-16")) for worker in pod(4, "b", "2")]
    with pytest.raises(UsageError, match="one accelerator type, but the target has 2: b is v4-16, a is v4-32"):
        control.by_rank([*pod(4, "a"), *other], "a,b")


# --- preflight ----------------------------------------------------------------------------------------------


def probe(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "boot_id": os.urandom(4).hex(),
        "clock": 1000.0,
        "venv": {"path": "/v", "exists": True, "python": "3.11", "packages": {"jax": "0.10.2"}, "digest": "d1"},
        "environment_files": {"/etc/e": True},
        "chips": [f"/dev/accel{number}" for number in range(4)],
        "holders": [],
        "holder": None,
        "space": {"/": {"free": 10**10, "total": 10**11}},
    }
    found |= changes
    return {"protocol": wire.PROTOCOL, "faults": fitness.faults(found, 4, asker=myself()), **found}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"protocol": 1, "boot_id": ""}, ["launcher has protocol version 1, this machine"]),
        ({"boot_id": ""}, ["boot"]),
        ({"venv": {"path": "/v", "exists": False, "asked": False}}, ["no environment at /v"]),
        ({"environment_files": {"/etc/e": False}}, ["/etc/e is missing"]),
        ({"chips": []}, ["no chip device files, 4 expected"]),
        ({"chips": ["/dev/vfio/0"]}, ["device files of 1 chip, 4 expected"]),
        ({"chips": ["/dev/accel0", "/dev/accel1", "/dev/accel3"]}, ["device files of 3 chips, 4 expected"]),
        (
            {"holder": {"run_id": "r1", "person": "ada", "since": 0}},
            ["run r1 of ada has held this worker since 1970-01-01 00:00 UTC"],
        ),
        ({"holders": [{"pid": 7, "user": "bob", "command": "python x"}]}, ["held by pid 7 of bob: python x"]),
        ({"space": {"/": {"free": 2**20, "total": 2**30}}}, ["/ has 1 of 1024 MiB free, and a start needs 256"]),
    ],
)
def test_each_fault_of_a_worker_is_reported_with_a_fix(changes: dict[str, Any], words: list[str]) -> None:
    faults = preflight.faults_of(pod()[1], probe(**changes))
    assert [fault.worker for fault in faults] == ["pod-w1"] * len(words)
    assert all(word in fault.problem for word, fault in zip(words, faults, strict=True))
    assert all(fault.fix for fault in faults)


@pytest.mark.parametrize(
    ("newer_by", "here", "there"),
    [(-1, "tpu_ops configure pod-w1", "update the workers"), (1, "update tpu_ops on this machine", "update tpu_ops")],
    ids=["older launcher", "newer launcher"],
)
def test_whichever_is_older_of_launcher_and_controller_is_to_be_updated(newer_by: int, here: str, there: str) -> None:
    assert here in preflight.faults_of(pod()[1], probe(protocol=wire.PROTOCOL + newer_by))[0].fix
    with pytest.raises(Refused) as refused:
        require_protocol({"protocol": wire.PROTOCOL - newer_by})
    assert refused.value.fix.startswith(there)


def test_the_unlock_fix_names_all_workers_whose_chips_are_held() -> None:
    held = probe(faults=[{"check": "free", "problem": "held", "fix": "tpu_ops unlock WORKER --force --user bob"}])
    faults = [preflight.faults_of(worker, held)[0] for worker in pod(2)]
    assert faults[1].fix == "tpu_ops unlock pod-w1 --force --user bob"
    assert preflight.PreflightError(faults, 2).fix == "tpu_ops unlock pod-w0,pod-w1 --force --user bob"


def test_an_environment_that_the_person_named_is_the_persons_matter() -> None:
    for asked, fix in ((False, "tpu_ops configure pod-w0"), (True, "--venv")):
        absent = probe(venv={"path": "/nope", "exists": False, "asked": asked})
        assert fix in preflight.faults_of(pod()[0], absent)[0].fix


def test_the_worker_that_differs_from_the_others_is_named() -> None:
    odd = {"path": "/v", "exists": True, "python": "3.12", "packages": {"jax": "0.9"}, "digest": "d2"}
    probes = {
        "w0": probe(),
        "w1": probe(venv=odd),
        "w2": probe(clock=1400.0),
        "w3": probe(boot_id="x"),
        "w4": probe(boot_id="x"),
    }
    found = {fault.worker: fault.problem for fault in preflight.differences(probes)}
    assert set(found) == {"w1", "w2", "w3", "w4"}
    assert found["w1"] == "the worker's environment differs: Python 3.12 (others 3.11), jax 0.9 (others 0.10.2)"
    assert preflight.differences(probes)[0].fix == "tpu_ops configure 'w[0-4]'"
    assert found["w2"] == "the worker's clock is +400 s off"
    assert found["w3"] == "the worker is the same machine as w4"


@pytest.mark.parametrize(
    ("argv", "env", "said"),
    [
        (("true", "x" * 131071), {}, ""),
        (("true", "x" * 131072), {}, "^argument 1: longer than 128 KiB, the limit of Linux"),
        (("true",), {"A": "x" * 131070}, "^variable A: longer than 128 KiB, the limit of Linux"),
        (("true", *["x" * 100_000] * 11), {}, "together longer than 1024 KiB"),
    ],
)
def test_a_command_that_linux_rejects_is_refused_before_any_contact(
    argv: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    if not said:
        spec.RunSpec("r1", argv, env)
        return
    with pytest.raises(UsageError, match=said):
        spec.RunSpec("r1", argv, env)


def test_every_package_that_differs_is_named_those_that_matter_most_first() -> None:
    usual = {"path": "/v", "exists": True, "python": "3.11.2", "packages": {"jax": "1"}, "digest": "d"}
    usual["installed"] = {"jax": "1", "absl-py": "2", "optax": "3"}
    odd = usual | {"python": "3.11.9", "packages": {"jax": "2"}, "digest": "e"}
    odd["installed"] = {"jax": "2", "absl-py": "2", "chex": "4"}
    probes = {"w0": probe(venv=usual), "w1": probe(venv=usual), "w2": probe(venv=odd)}
    (fault,) = preflight.differences(probes)
    told = "jax 2 (others 1), chex 4 (others none), optax missing (others 3)"
    assert fault.problem == f"the worker's environment differs: {told}"


async def test_clocks_that_were_read_minutes_apart_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0

    class OneByOne:
        async def call(self, requests: Any, action: str, *, done: Callable[[Reply], None], **_: Any) -> Any:
            nonlocal now
            replies = {}
            for number, host in enumerate(requests):
                now += 60
                off = 90.0 if number == 3 else 0.0
                replies[host] = Reply(host, {"probe": probe(clock=1000.0 + now + off, boot_id=host)})
                done(replies[host])
            return replies

    monkeypatch.setattr(preflight, "time", SimpleNamespace(monotonic=lambda: now))
    faults, _ = await preflight.examine(cast(Fanout, OneByOne()), pod())
    assert [(fault.worker, fault.problem) for fault in faults] == [("pod-w3", "the worker's clock is +90 s off")]


def test_silence_counts_before_what_is_wrong() -> None:
    silent = preflight.fault_of_reply(Reply("pod-w1", {}, "unreachable", "no route"))
    assert "tpu_ops refresh" in silent.fix
    refused = Reply("pod-w1", {}, "unreachable", "ada@34.0.0.1: Permission denied (publickey).")
    assert preflight.fault_of_reply(refused).fix == "see why: `tpu_ops run pod-w1 -- true`"
    wrong = preflight.fault_of_reply(Reply("pod-w0", {}, "no-launcher", "not installed", "configure it"))
    assert preflight.PreflightError([wrong, silent], 4).exit_code == ExitCode.UNREACHABLE
    error = preflight.PreflightError([wrong], 4)
    assert (error.exit_code, error.fix, error.where) == (ExitCode.FAILED, "configure it", "pod-w0")


def test_a_rank_whose_worker_was_restarted_keeps_no_run_from_having_ended() -> None:
    whose: dict[str, Any] = {"person": {"name": "ada"}, "argv": ["x"], "code_digest": "", "attempt": 1, "since": 5.0}
    ends: list[dict[str, Any]] = [{"state": "failed", "ended": 8.0}, {"state": "lost", "ended": None}]
    outcomes = [outcome_of(rank, f"pod-w{rank}", whose | end) for rank, end in enumerate(ends)]
    assert runs_output.summary("r1", outcomes)["ended"] == 8.0
    assert [runs_output._lasted(outcome.record) for outcome in outcomes] == ["3 s", ""]


@pytest.mark.parametrize(("ended", "over"), [((8.0, 9.0), 9.0), ((8.0, None), None)])
def test_a_summary_tells_whose_run_it_is_of_what_and_since_when(ended: tuple[Any, Any], over: float | None) -> None:
    whose = {
        "person": {"name": "ada"},
        "asker": "root",
        "argv": ["python", "train.py"],
        "code_digest": "c",
        "exit": None,
    }
    outcomes = [
        outcome_of(rank, f"pod-w{rank}", {**whose, "state": "running", "attempt": 2, "since": 5.0 + rank, "ended": end})
        for rank, end in enumerate(ended)
    ]
    earlier = {**whose, "state": "failed", "attempt": 1, "since": 1.0, "ended": 2.0, "argv": ["old"]}
    outcomes.append(outcome_of(2, "pod-w2", earlier))
    found = runs_output.summary("r1", outcomes)
    assert (found["person"], found["started_by"], found["argv"]) == ("ada", "root", ["python", "train.py"])
    assert (found["attempt"], found["since"], found["ended"]) == (2, 5.0, over)
    unknown = runs_output.summary("r1", [outcome_of(0, "pod-w0", None)])
    assert (unknown["person"], unknown["argv"], unknown["since"], unknown["ended"]) == ("", [], None, None)


def test_equal_faults_are_shown_once_with_all_their_workers() -> None:
    rows = [
        {"worker": f"pod-w{index}", "problem": "absent", "fix": f"tpu_ops configure pod-w{index}"}
        for index in (0, 1, 2, 10)
    ]
    other = {"worker": "pod-w3", "problem": "busy", "fix": "wait"}
    assert preflight.once_each([*rows, other]) == [
        {
            "worker": "pod-w[0-2,10]",
            "problem": "absent",
            "fix": "tpu_ops configure 'pod-w[0-2,10]'",
        },
        other,
    ]


def test_the_error_names_all_workers_that_the_first_fix_helps() -> None:
    faults = [preflight.Fault(f"pod-w{index}", "no launcher", preflight.configure(f"pod-w{index}")) for index in (0, 1)]
    faults.insert(1, preflight.Fault("pod-w2", "its chips are held", "wait for it"))
    error = preflight.PreflightError(faults, 4)
    assert (error.where, error.fix) == ("pod-w[0-2]", "tpu_ops configure pod-w0,pod-w1")
    many = [preflight.Fault(f"pod-w{index}", "x", preflight.configure(f"pod-w{index}")) for index in range(64)]
    assert preflight.PreflightError(many, 64).fix == "tpu_ops configure 'pod-w[0-63]'"
    assert preflight.PreflightError([preflight.Fault("pod-w0", "x")], 4).fix == "see the table above"


# --- lines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "lines", "rest"),
    [
        ([b"a\nb"], ["a"], ["b"]),
        ([b"a", b"b\n\nc\n"], ["ab", "", "c"], []),
        ([b"10%\r20%\r", b"done\n"], ["10%", "20%", "done"], []),
        ([b"x\r\ny\n"], ["x", "y"], []),
        ([b"x\r", b"\ny\n"], ["x", "y"], []),
        ([b"x\r", b"\n", b"\n", b"", b"\ny\n"], ["x", "", "", "y"], []),
        ([b"x\r", b"", b"\ny\n"], ["x", "y"], []),
        ([b"abcdefghij", b"kl\n"], ["abcdefgh", "ijkl"], []),
        ([b"abcdefghijklmnopqr\n"], ["abcdefgh", "ijklmnop", "qr"], []),
        ([b"\xff\xc3", b"\xa4\n"], ["\udcffä"], []),
        (["abcdefgäh\nabcdefgä".encode()], ["abcdefg", "äh", "abcdefg"], ["ä"]),
    ],
)
def test_bytes_become_lines_whatever_pieces_they_come_in(
    pieces: list[bytes], lines: list[str], rest: list[str]
) -> None:
    splitter = Lines(longest=8)
    assert [line for piece in pieces for line in splitter.feed(piece)] == lines
    assert splitter.finish() == rest


def test_a_line_in_parts_has_all_its_bytes_and_no_divided_character() -> None:
    lines = Lines()
    assert lines.feed("loss ä".encode()[:-1]) == []
    assert lines.unfinished() == [Part("loss ")]
    assert lines.unfinished() == []
    assert lines.feed("ä\nnext".encode()[1:]) == [Part("ä", ends=True)]
    assert lines.unfinished() == [Part("next")]
    assert lines.feed(b"\n") == [Part("", ends=True)]
    assert lines.feed(b"\0\xff") == []
    assert lines.unfinished() == [Part("\0\udcff")]
    assert lines.finish() == [Part("", ends=True)]
    assert lines.finish() == []


# --- outcomes -----------------------------------------------------------------------------------------------


def ended(rank: int, state: str, first: int | None = None, intent: str = "") -> Outcome:
    named = None if first is None else {"rank": first, "worker": f"pod-w{first}", "cause": f"cause of {first}"}
    return Outcome(rank, f"pod-w{rank}", state, None, "own reason", intent=intent, record={"first": named})


SILENT = Outcome(1, "pod-w1", "unknown")


@pytest.mark.parametrize(
    ("outcomes", "rank", "cause"),
    [
        ([ended(0, "succeeded"), ended(1, "stopped", intent="stop")], None, ""),
        ([ended(0, "stopped", 1, "failed"), ended(1, "failed", 1)], 1, "cause of 1"),
        # Rank 2 was cut off and blames the hub; worker 1's record is out of reach.
        ([ended(0, "stopped", 2), SILENT, ended(2, "stopped", 0), ended(3, "stopped", 2)], 2, "cause of 2"),
        # With two workers nobody can tell which of them was cut off: the hub's word counts.
        ([ended(0, "stopped", 1, "failed"), ended(1, "stopped", 0, "lost")], 1, "cause of 1"),
        ([ended(0, "succeeded"), ended(1, "stopped", intent="shutdown")], 1, "own reason"),
        ([ended(0, "succeeded"), Outcome(1, "pod-w1", "lost")], 1, "lost"),
    ],
)
def test_the_first_failure_is_what_the_workers_found(outcomes: list[Outcome], rank: int | None, cause: str) -> None:
    first = first_failure(outcomes)
    assert ((first.rank, first.cause) if first else (None, "")) == (rank, cause)


def refused(rank: int, reason: str, *blamed: int) -> Outcome:
    return Outcome(rank, f"pod-w{rank}", "refused", reason=reason, record={"blamed": list(blamed), "attempt": 1})


NEVER = [Outcome(rank, f"pod-w{rank}", "gone", reason=KNOWS_NOTHING) for rank in range(4)]
LATE = "rank 0 (pod-w0, 10.0.0.2:8500) no longer waits for ranks"


@pytest.mark.parametrize(
    ("told", "rank", "cause", "others"),
    [
        # Its node was renamed since.
        ([refused(0, "rank 1 (x-w1): no foo", 1), refused(1, "rank 1 (x-w1): no foo", 1), *NEVER[2:]], 1, "no foo", 2),
        ([refused(0, "not started: pod-w2: denied"), refused(1, LATE), *NEVER[2:]], 2, "denied", 1),
        ([refused(0, "not ready within 5 s: rank 3 (pod-w3)", 3), refused(1, LATE), *NEVER[2:]], 3, "not ready", 1),
        ([refused(0, "a chip is held", 0), *NEVER[1:]], 0, "a chip is held", 3),
        ([NEVER[0], refused(1, LATE), refused(2, "no foo", 2), NEVER[3]], 2, "no foo", 2),
    ],
)
def test_a_refused_start_names_the_worker_and_reports_none_as_gone(
    told: list[Outcome], rank: int, cause: str, others: int, capsys: Any
) -> None:
    as_seen = of_refused(told)
    first = first_failure(as_seen)
    assert first is not None
    assert (first.rank, first.host, first.cause.startswith(cause)) == (rank, f"pod-w{rank}", True)
    assert {outcome.state for outcome in as_seen} == {"refused"}
    assert [outcome.reason for outcome in as_seen].count(NOT_STARTED) == others
    assert as_seen[rank].reason.endswith(first.cause), "what its own worker has no record of is told there too"
    runs_output.failed_first(as_seen, [0])
    assert capsys.readouterr().err == f"the run did not begin: rank {rank} (pod-w{rank}): {first.cause}\n"


@pytest.mark.parametrize(
    ("cause", "options", "told"),
    [
        ("host shuts down", {}, True),
        ("lost contact: nothing heard for 15 s", {}, True),
        ("exit code 1", {}, False),
        ("host shuts down", {"kept": True}, False),
        ("host shuts down", {"more": {"preemptions": 3}}, False),
    ],
)
def test_a_run_that_failed_with_its_host_shows_the_restart_command(
    cause: str, options: dict[str, Any], told: bool, capsys: Any
) -> None:
    first = {"rank": 1, "worker": "pod-w1", "cause": cause}
    record = {"first": first, "attempt": 1, "state": "stopped", "since": 1.0, "ended": 2.0}
    found = [Outcome(rank, f"pod-w{rank}", "stopped", record=record) for rank in range(2)]
    code = runs_output.finish("r1", found, [0], as_json=False, of_rank=False, **options)
    assert (code, "with --recover a run continues by itself" in capsys.readouterr().err) == (1, told)


def test_ranks_are_gone_whose_run_has_begun_elsewhere() -> None:
    told = [ended(0, "failed", 0), NEVER[1]]
    assert of_refused(told) == told
    assert of_refused(NEVER) == NEVER


@pytest.mark.parametrize(
    ("states", "state", "code"),
    [
        (["succeeded", "succeeded"], "succeeded", 0),
        (["succeeded", "failed"], "failed", 1),
        (["stopped", "succeeded"], "failed", 1),
        (["running", "running"], "running", 0),
        (["succeeded", "unknown"], "unknown", 4),
        (["failed", "unknown"], "failed", 1),
        (["refused", "refused"], "refused", 1),
        (["refused", "unreachable"], "refused", 1),
        (["refused", "failed"], "failed", 1),
    ],
)
def test_a_run_is_as_good_as_its_worst_rank(states: list[str], state: str, code: int) -> None:
    outcomes = [Outcome(rank, f"w{rank}", name) for rank, name in enumerate(states)]
    assert (run_state(outcomes), runs_output.exit_code(outcomes)) == (state, code)


def test_a_refused_run_that_only_this_machine_remembers_is_refused() -> None:
    outcomes = [Outcome(0, "w0", "refused", reason="as seen from here the run was refused", remembered={"attempt": 1})]
    assert (run_state(outcomes), runs_output.exit_code(outcomes)) == ("refused", 1)


def test_a_stopped_run_is_never_a_success() -> None:
    outcomes = [Outcome(0, "w0", "stopped", {"code": 0}, intent="stop"), Outcome(1, "w1", "succeeded", {"code": 0})]
    assert (run_state(outcomes), runs_output.exit_code(outcomes)) == ("stopped", 1)


@pytest.mark.parametrize(("wanted", "state"), [(True, "stopped"), (False, "refused")])
def test_a_stop_at_the_barrier_is_no_failure_and_a_start_that_is_given_up_is(wanted: bool, state: str) -> None:
    told = {"intent": {"kind": "stop", "requested": wanted}}
    outcomes = [Outcome(0, "w0", "refused", reason="why", intent="stop", record=told), Outcome(1, "w1", "refused")]
    assert (run_state(outcomes), runs_output.exit_code(outcomes)) == (state, 1)


def test_of_a_run_that_its_worker_has_forgotten_nothing_is_left() -> None:
    assert outcome_of(0, "w0", None).state == "gone"


@pytest.mark.parametrize(("text", "expected"), [("all", [0, 1, 2, 3]), ("0,3", [0, 3]), ("1-2,2", [1, 2]), ("0", [0])])
def test_ranks_are_chosen(text: str, expected: list[int]) -> None:
    assert ranks.parse(text, 4) == expected


@pytest.mark.parametrize("text", ["", "4", "a", "1-", "-1", "0,,1"])
def test_ranks_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        ranks.parse(text, 4)


def test_impossible_ranks_are_refused_before_any_contact(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2-1 goes backwards"):
        asyncio.run(attempts.followed(None, "nobody", "2-1", runs_output.terminal(), live=False, since=0.0))  # type: ignore[arg-type]


def test_ranks_that_go_backwards_are_refused_with_what_was_meant() -> None:
    with pytest.raises(UsageError, match="2-1 goes backwards") as wrong:
        ranks.parse("0,2-1", 4)
    assert (wrong.value.where, wrong.value.fix) == ("--rank", "write 1-2")


# --- run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", ["unreachable", "unknown"])
def test_a_stopped_run_is_no_success_where_a_worker_is_silent_either(silent: str) -> None:
    outcomes = [Outcome(0, "w0", "stopped", intent="stop"), Outcome(1, "w1", silent)]
    assert [runs_output.exit_code(outcomes, of_rank=of_rank) for of_rank in (False, True)] == [1, 1]
    assert runs_output.exit_code([Outcome(0, "w0", "running"), Outcome(1, "w1", silent)]) == 4


def test_equal_output_is_gathered_the_most_first() -> None:
    results = [Result(f"pod-w{index}", 0, b"a" if index in {0, 2, 3} else b"b") for index in range(5)]
    groups = run_command.gathered(results)
    assert [(texts.folded(hosts), result.stdout) for hosts, result in groups] == [
        ("pod-w[0,2-3]", b"a"),
        ("pod-w[1,4]", b"b"),
    ]


def test_cut_output_is_reported_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    cut = Result("pod-w0", 0, b"x", cut=True)
    run_command.show([cut, cut._replace(host="pod-w1")])
    assert capsys.readouterr() == (
        "--- pod-w[0-1] (2 workers)\nx\n",
        "warning: pod-w[0-1]: the output was cut after 64 MiB\n",
    )
    assert len(run_command.gathered([cut, cut._replace(host="pod-w1", cut=False)])) == 2
    assert run_command.row(cut)["cut"] is True


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([Result("a", 0)], 0),
        ([Result("a", 0), Result("b", 255)], 1),
        ([Result("a", None, problem="late")], 1),
        ([Result("a", 0), Result("b", None, problem="down", reached=False)], 4),
        ([Result("a", None, problem="down", reached=False), Result("b", 3)], 1),
    ],
)
def test_the_exit_code_is_honest(results: list[Result], code: int) -> None:
    assert run_command.exit_code(results) == code


# --- sync ---------------------------------------------------------------------------------------------------


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "digits"
    for name, text in {
        "train.py": "x",
        "sub/part.py": "y",
        "out/big.ckpt": "z",
        "__pycache__/a.pyc": "",
        ".git/HEAD": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / ".gitignore").write_text("*.ckpt\n")
    (folder / "link").symlink_to("train.py")
    return folder


def test_a_tree_is_what_gitignore_leaves(code: Path) -> None:
    tree = sync.read(code)
    assert tree.files == (".gitignore", "link", "sub/part.py", "train.py")
    assert (tree.name, tree.cwd) == ("digits", "tpu_ops/digits")
    assert re.fullmatch("[0-9a-f]{12}", tree.digest)


def test_a_tree_has_what_an_exception_in_gitignore_brings_back(code: Path) -> None:
    for name in ("config.json", "big.json", "sub/out", "out/x"):
        (code / name).write_text("")
    (code / ".gitignore").write_text("*.json\n!config.json\n/out\n")
    assert sync.read(code).files == (".gitignore", "config.json", "link", "sub/out", "sub/part.py", "train.py")


@pytest.mark.parametrize("kind", ["named pipe", "socket"])
def test_a_named_pipe_or_socket_in_the_code_is_refused_at_once(
    code: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(code)  # a socket's path may not be long
    with socket.socket(socket.AF_UNIX) as listener:
        os.mkfifo("sub/odd") if kind == "named pipe" else listener.bind("sub/odd")
        with pytest.raises(UsageError, match=f"sub/odd' is a {kind}"):
            sync.read(code)
    with (code / ".gitignore").open("a") as file:
        file.write("odd\n")
    assert sync.read(code).files == (".gitignore", "link", "sub/part.py", "train.py")


def test_names_of_any_bytes_are_brought_as_they_are(code: Path, tmp_path: Path) -> None:
    odd = [b"; x", b"two\nlines", b"\xff\xfe", b"tab\t", b"\\#012", b"\\#x", "\u00e4".encode(), b"#hash", b" "]
    for name in odd:
        (code / os.fsdecode(name)).write_text("x")
    tree = sync.read(code)
    assert {os.fsencode(entry) for entry in tree.files} >= set(odd)
    there = tmp_path / "there"
    *options, source, _ = [word for word in sync.transfer_command(tree, "x", tmp_path) if not word.startswith("--rsh")]
    subprocess.run([*options, source, f"{there}/"], input=sync.transfer_list(tree.entries), check=True)
    assert {os.fsencode(path.name) for path in there.iterdir()} >= set(odd)


def test_the_digest_follows_content_names_and_executable_bits(code: Path) -> None:
    seen = {sync.read(code).digest}
    os.utime(code / "train.py", (1, 1))
    assert sync.read(code).digest in seen
    for change in (
        lambda: (code / "train.py").write_text("other"),
        lambda: (code / "train.py").chmod(0o755),
        lambda: (code / "sub" / "part.py").rename(code / "part.py"),
        lambda: (code / "link").rename(code / "other"),
    ):
        change()
        seen.add(sync.read(code).digest)
    assert len(seen) == 5


@pytest.mark.parametrize(("name", "there"), [("my project (2)", "my-project-2-"), ("-dash", "dash"), ("Größe", "Gr-e")])
def test_unusual_characters_of_a_directorys_name_are_dashes_on_workers(tmp_path: Path, name: str, there: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "train.py").touch()
    tree = sync.read(tmp_path / name)
    assert tree.cwd == f"tpu_ops/{there}"
    assert sync.transfer_command(tree, "pod-w3", Path("/s/config"))[-2:] == [
        f"{tmp_path / name}/",
        f"pod-w3:{tree.cwd}/",
    ]


@pytest.mark.parametrize("name", ["missing", "--", "empty"])
def test_directories_that_cannot_be_brought_are_refused(tmp_path: Path, name: str) -> None:
    if name != "missing":
        (tmp_path / name).mkdir()
    if name == "--":
        (tmp_path / name / "train.py").touch()
    with pytest.raises(UsageError):
        sync.read(tmp_path / name)


def test_the_tree_goes_over_the_fleets_own_connections(code: Path) -> None:
    command = sync.transfer_command(sync.read(code), "pod-w3", Path("/s/ssh_config"))
    assert command[-2:] == [f"{code}/", "pod-w3:tpu_ops/digits/"]
    assert "--rsh=ssh -F /s/ssh_config -o BatchMode=yes -o ControlMaster=no -T" in command
    assert not any(word.startswith("--delete") for word in command)


def test_ranks_are_written_as_they_are_read() -> None:
    for text in ("0", "0-3", "0,2-3,7"):
        assert ranks.folded(ranks.parse(text, 8)) == text


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172800)])
def test_a_time_is_so_long_ago_or_a_date(text: str, seconds: float) -> None:
    assert abs(time.time() - seconds - cli_logs.moment(text)) < 60
    assert cli_logs.moment("2026-01-31T12:00+00:00") == 1769860800
    assert cli_logs.moment("2026-01-31 12:00:00 UTC") == 1769860800, "as tables have it"
    with pytest.raises(argparse.ArgumentTypeError, match="is in the future"):
        cli_logs.moment("2999-01-31 12:00")


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write 10m for ten minutes ago"):
        cli_logs.moment("yesterday")


def test_the_doctor_looks_at_more_than_a_start_does() -> None:
    usual = {"program": "/p/1", "lockfiles": [], "preloads": []}
    probes = {f"pod-w{index}": probe(**usual) for index in range(3)}
    assert doctor.further(probes) == []
    probes["pod-w1"] = probe(program="/p/2", lockfiles=["/tmp/l"], preloads=[{"file": "/etc/e", "line": "libtcmalloc"}])
    assert [(fault.worker, fault.check) for fault in doctor.further(probes)] == [
        ("pod-w1", "launcher"),
        ("pod-w1", "lockfile"),
        ("pod-w1", "preload"),
    ]
    # A lockfile of a process that holds a chip is in use.
    probes["pod-w1"] = probe(
        **usual | {"lockfiles": ["/tmp/l"], "holders": [{"pid": 1, "user": "ada", "command": "x"}]}
    )
    assert doctor.further(probes) == []
    # What the worker itself has told of, as a start is refused for it, is none that `unlock` removes.
    strange = {"path": "/tmp/l", "problem": "it is a FIFO, not a lockfile", "fix": "look"}
    probes["pod-w1"] = probe(**usual | {"lockfiles": ["/tmp/l", "/tmp/m"]}, in_the_way=[strange])
    (fault,) = doctor.further(probes)
    assert (fault.problem, fault.fix) == ("/tmp/m exists, and nobody holds a chip", "tpu_ops unlock pod-w1")
    told = {"check": "lockfile", "problem": "/tmp/l would make libtpu fail: it is a FIFO", "fix": "look"}
    (fault,) = preflight.faults_of(pod()[0], probe() | {"faults": [told]})
    assert (fault.check, fault.fix, fault.forcible) == ("lockfile", "look", False)
    assert fault.check in doctor.CHECKS


class Probes:
    """Stands for the workers: each describes itself; those of the node `other` have another jax."""

    async def call(self, requests: Any, *_: Any, done: Any, **__: Any) -> dict[str, Reply]:
        usual: dict[str, Any] = {"program": "/p/1", "lockfiles": [], "preloads": []}
        venv = {**probe()["venv"], "packages": {"jax": "0.9.0"}, "digest": "d2"}
        replies = {
            host: Reply(host, {"probe": probe(**usual, **({"venv": venv} if host.startswith("other") else {}))})
            for host in requests
        }
        for reply in replies.values():
            done(reply)
        return replies


async def test_doctor_and_train_judge_several_nodes_of_one_run_alike() -> None:
    fanout: Any = Probes()
    workers = [*pod(), *pod(name="other", node_id="2", subnet=1)]
    with pytest.raises(preflight.PreflightError) as refused:
        await preflight.check(fanout, control.by_rank(workers, "pod,other"))
    findings = await doctor.examine(fanout, workers, "pod,other")
    (same,) = (finding for finding in findings if finding.check == "same")
    assert (same.passed, same.each_node) == (False, False)
    assert {fault.worker for fault in same.faults} == {f"other-w{index}" for index in range(4)}
    assert [(one.worker, one.problem) for one in same.faults] == [
        (one.worker, one.problem) for one in refused.value.faults
    ]


@pytest.mark.parametrize("target", ["", "pod-w0,other"])
async def test_doctor_says_that_nodes_of_no_one_run_are_compared_by_themselves(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fanout: Any = Probes()
    workers = [*pod()[: 1 if target else 4], *pod(name="other", node_id="2", subnet=1)]
    findings = await doctor.examine(fanout, workers, target)
    (same,) = (finding for finding in findings if finding.check == "same")
    assert (same.passed, same.each_node, doctor_command.row(same)["each_node"]) == (True, True, True)
    doctor_command.show(same)
    assert capsys.readouterr().out.splitlines() == [
        f"PASS  the environment is the same on all workers, node by node ({len(workers)} workers)",
        *(f"        {text}" for text in same.notes),
    ]
    (note,) = same.notes
    assert note.startswith("the environment of other is not that of pod: jax ")
    assert "(pod 0.10.2)" in note
    assert note.endswith("for a run on all of them: tpu_ops configure other,pod")
    assert doctor_command.row(same)["notes"] == [note]


async def test_doctor_names_differing_nodes_of_several_types_in_the_target() -> None:
    fanout: Any = Probes()
    small = pod(name="other", node_id="2", subnet=1)
    workers = [*pod(), *(one._replace(node=one.node._replace(accelerator_type="v5litepod-16")) for one in small)]
    for target, notes in (("pod,other", 1), ("", 0)):
        findings = await doctor.examine(fanout, workers, target)
        (same,) = (finding for finding in findings if finding.check == "same")
        assert (same.passed, same.each_node, len(same.notes)) == (True, True, notes)
        assert "for a run on all" not in "".join(same.notes)


def test_every_fault_is_of_a_check_that_the_doctor_names() -> None:
    assert {fault.check for fault in preflight.faults_of(pod()[0], probe(boot_id="", chips=[]))} == {
        "identity",
        "chips",
    }
    assert set(preflight.CHECKS) < set(doctor.CHECKS)


def test_a_run_is_one_row_and_a_stray_process_its_own() -> None:
    found = [
        Holder("pod-w0", "ada", "r1", 5, 100.0, "python train.py"),
        Holder("pod-w1", "ada", "r1", 6, 90.0, "python train.py"),
        Holder("pod-w1", "bob", "", 7, 50.0, "python notebook"),
    ]
    rows = who.rows(found)
    assert [(row["worker"], row["person"], row["run"], row["pid"]) for row in rows] == [
        ("pod-w[0-1]", "ada", "r1", "5 +1"),
        ("pod-w1", "bob", "none", 7),
    ]
    assert rows[0]["since"] == "1970-01-01 00:01:30 UTC"
