"""The ends of a run that lead to another attempt, and the files on the controller for it."""

from __future__ import annotations

import argparse
import json
import os
import resource
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.specs import good, good_net, myself
from tpu_ops.cli import runs_output, train
from tpu_ops.cloud.remaking import Made, Plan
from tpu_ops.errors import ExitCode, OpsError, UsageError
from tpu_ops.host import rank_record, supervise
from tpu_ops.host.after import after
from tpu_ops.host.referee import Referee
from tpu_ops.host.store import Store
from tpu_ops.protocol import spec as protocol_spec
from tpu_ops.runs import copies, endings, recovery, spec, sync
from tpu_ops.runs.outcomes import Outcome, outcome_of

VALUE = "hush-hush-hush"
NODE = Made("projects/lab/locations/us-central2-b/nodes/pod", "1", {"accelerator_type": "v4-16"})
FIRST: dict[str, Any] = {"rank": 1, "worker": "pod-w1", "cause": "exit code 3"}
UNHEARD = {"rank": 1, "worker": "pod-w1", "cause": "lost contact: nothing heard for 15 s"}
CUT_OFF = {"rank": 0, "worker": "pod-w0", "cause": "lost contact: nothing heard for 15 s"}
NETWORK = {"rank": 0, "worker": "pod-w0", "cause": "the supervisor's network thread failed"}


def rank(number: int, state: str, **more: Any) -> Outcome:
    return Outcome(number, f"pod-w{number}", state, **more)


def failed(number: int) -> Outcome:
    return rank(number, "failed", exit={"code": 3}, reason="exit code 3", record={"first": FIRST, "attempt": 1})


def ended(number: int, first: dict[str, Any] = FIRST) -> Outcome:
    return rank(number, "stopped", intent="failed", record={"first": first, "attempt": 1})


def over(number: int) -> Outcome:
    return rank(number, "succeeded", exit={"code": 0}, record={"first": None, "attempt": 1})


@pytest.mark.parametrize(
    ("outcomes", "lost", "kind", "why"),
    [
        ([rank(0, "succeeded"), rank(1, "succeeded")], {}, "succeeded", "all ranks"),
        # The node goes right after the run: nothing is to be done again.
        ([rank(0, "succeeded"), rank(1, "succeeded")], {"n": "node pod is PREEMPTED"}, "succeeded", "all ranks"),
        ([ended(0), failed(1)], {}, "failed", "rank 1 (pod-w1): exit code 3"),
        # Ranks fail with codes of their own when their peers vanish: what the API says comes first.
        ([ended(0), failed(1)], {"n": "node pod is PREEMPTED"}, "taken", "node pod is PREEMPTED"),
        ([failed(1), rank(0, "gone", reason="knows nothing of this run")], {}, "taken", "pod-w0: knows nothing"),
        ([rank(0, "lost", reason="the host was restarted"), failed(1)], {}, "taken", "the host was restarted"),
        ([rank(0, "stopped", intent="shutdown", reason="host shuts down"), ended(1)], {}, "taken", "host shuts down"),
        # A network that was cut between workers, and is there again.
        (
            [ended(0, UNHEARD), rank(1, "stopped", intent="lost", record={"first": CUT_OFF})],
            {},
            "taken",
            "lost contact",
        ),
        ([rank(0, "stopped", intent="stop", reason="stopped by ada"), rank(1, "unknown")], {}, "stopped", "by ada"),
        # A worker says so of all ranks: whatever became of the others, and of who wanted what afterwards.
        ([rank(1, "gone", reason="knows nothing"), over(0)], {}, "succeeded", "all ranks"),
        ([over(0), rank(1, "lost", reason="the host was restarted")], {"n": "node pod is PREEMPTED"}, "succeeded", ""),
        ([replace(over(0), stop_requested_by="ada"), rank(1, "unreachable")], {}, "succeeded", "all ranks"),
        # Its own end says nothing of the others where somebody was first.
        ([replace(over(0), record={"first": FIRST}), rank(1, "gone", reason="is gone")], {}, "taken", "is gone"),
        # As does one that is only remembered here.
        ([rank(0, "succeeded"), rank(1, "gone", reason="knows nothing")], {}, "taken", "knows nothing"),
        # The supervisor of rank 0 is the one that failed.
        ([ended(0, NETWORK), ended(1, NETWORK)], {}, "taken", "network thread failed"),
    ],
)
def test_a_lost_node_explains_the_end_before_a_failed_rank(
    outcomes: list[Outcome], lost: dict[str, str], kind: str, why: str
) -> None:
    found, said = endings.ending(outcomes, lost)
    assert (found, why in said) == (kind, True), said


def of_host(store: Store, number: int, **changes: Any) -> dict[str, Any]:
    """Return the record that the host program begins for a rank of two, kept on that rank's worker."""
    both = {"rank": number, "world_size": 2, "worker": f"pod-w{number}", "workers": ["pod-w0", "pod-w1"]}
    data = protocol_spec.check(good(run_id="r1", **both, net=good_net(port=8500 if number else 0)))
    found = rank_record.new_record(data, myself(), os.getuid()) | changes
    store.prepare("r1", os.getuid(), os.getgid())
    store.write(found)
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_supervisor_that_was_killed_or_hung_is_no_failure_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    monkeypatch.setattr("tpu_ops.host.after.chips_after", lambda: {"holders": []})
    monkeypatch.setenv("SERVICE_RESULT", "watchdog")
    store, unheard = Store(str(tmp_path)), {"rank": victim, "worker": f"pod-w{victim}", "cause": UNHEARD["cause"]}
    of_host(store, victim, state="running")
    after(store, "r1")
    own = outcome_of(victim, f"pod-w{victim}", store.read("r1"))
    assert own.reason.startswith("the supervisor ended (watchdog")
    other = ended(1 - victim, unheard)
    for outcomes in ([own], [own, other], [other, own]):
        assert endings.ending(outcomes, {})[0] == endings.TAKEN
    assert endings.ending([failed(1), ended(0), replace(own, rank=2)], {})[0] == endings.FAILED, "it came later"


def test_a_shutdown_after_a_rank_ended_with_0_is_not_a_failure(tmp_path: Path) -> None:
    supervisor = supervise.Supervisor(Store(str(tmp_path)), "r1")
    supervisor.record = {"stop_requested_by": ""}
    supervisor._asked_to_end()
    referee = Referee(["pod-w0", "pod-w1"], barrier=60, skew=300, now=0.0)
    for number in range(2):
        referee.ready(number)
    referee.ended(1, 10.0, 10.0, {"code": 0}, oom=False, cause="")
    referee.stopped(1, 20.0, 20.0, supervisor.intent or {})
    referee.tick(30.0)
    first = referee.take()[-1]["first"]
    done = rank(1, "succeeded", record={"first": first})
    assert endings.ending([ended(0, first), done], {}) == ("taken", "rank 1 (pod-w1): host shuts down")


def test_ranks_that_succeeded_as_another_tells_are_no_failure_of_the_run() -> None:
    killed = replace(failed(1), reason="the supervisor ended (signal; killed KILL)")
    told = endings.as_told([over(0), killed, rank(2, "unreachable")])
    assert [(one.state, one.reason) for one in told] == [
        ("succeeded", ""),
        ("succeeded", "the supervisor ended (signal; killed KILL); pod-w0 reports that the run succeeded"),
        ("succeeded", "unreachable; pod-w0 reports that the run succeeded"),
    ]
    assert runs_output.exit_code(told) == ExitCode.OK
    assert endings.as_told([killed]) == [killed]


GIVEN_UP = "not started: the command that started the run got no answer"


@pytest.mark.parametrize(
    ("outcomes", "started"),
    [
        ([failed(0)], True),
        ([rank(0, "running", record={"attempt": 1}), rank(1, "unknown")], True),
        # The same of the attempt before.
        ([rank(0, "running", record={"attempt": 2}), rank(1, "failed", record={"attempt": 2})], False),
        ([rank(0, "refused", reason="not ready within 60 s", record={"attempt": 1}), rank(1, "unknown")], False),
        ([rank(0, "stopped", intent="stop", reason=GIVEN_UP, record={"attempt": 1})], False),
    ],
)
def test_a_refused_abandoned_or_unknown_attempt_was_not_started(outcomes: list[Outcome], started: bool) -> None:
    assert endings.was_started(endings.of_attempt(outcomes, 1)) is started


def kept(run: spec.RunSpec, **changes: Any) -> recovery.Recovery:
    found = recovery.Recovery(run.run_id, 1, Plan((NODE,)), recovery.options_of(run, {"A": "\udcff"}))
    return replace(found, **changes)


def test_a_kept_run_is_private_and_holds_no_values_of_secrets(tmp_path: Path) -> None:
    (tmp_path / "env").write_text(f"FROM_FILE={VALUE}\n")
    run = spec.RunSpec(
        "r1", ("python", "\udcff"), {"A": "\udcff", "FROM_FILE": VALUE}, {"S": VALUE}, cwd="tpu_ops/x", lease=20.0
    )
    recovery.write(tmp_path, kept(run, env_files=(str(tmp_path / "env"),), secret_words=("S",)))
    path = tmp_path / "runs" / "r1" / "recovery.json"
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    assert VALUE not in path.read_text()
    assert run.key not in path.read_text()
    again = recovery.read(tmp_path, "r1")
    assert again.plan == Plan((NODE,))
    made = again.spec({"S": VALUE})
    assert made == run
    assert made.key != run.key
    with pytest.raises(UsageError, match="the variable S is not set here"):
        again.spec({})
    recovery.forget(tmp_path, "r1")
    with pytest.raises(UsageError, match="no recovery state of run r1"):
        recovery.read(tmp_path, "r1")


def test_variables_of_one_attempt_are_never_those_of_a_later_one(tmp_path: Path) -> None:
    path = tmp_path / "env"
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    for name in spec.RENDEZVOUS:
        path.write_text(f"A=1\n{name}=10.0.0.1:8476\n")
        for where, words in ((f"--env-file {path}", ["--env-file", str(path)]), ("--env", ["--env", f"{name}=1"])):
            with pytest.raises(UsageError, match=f"{name} is for one attempt only") as refusal:
                train.run(parser.parse_args(["pod", "--recover", *words]))
            assert refusal.value.where == where
            assert f"-- env {name}=... COMMAND" in refusal.value.fix
        # The file may have changed until somebody takes the run over.
        with pytest.raises(UsageError, match=f"{name} is for one attempt only"):
            kept(spec.RunSpec("r1", ("true",)), env_files=(str(path),)).spec({})
        assert spec.variables({"A": "2"}, [path]) == {"A": "2", name: "10.0.0.1:8476"}, "without --recover"
        assert spec.variables({name: ""}, [], again=True) == {name: ""}, "it says that there is none"


def test_a_later_attempt_has_a_key_of_its_own() -> None:
    run = spec.RunSpec("r1", ("true",))
    later = recovery.next_attempt(run, 2)
    assert (later.attempt, later.run_id, len(later.key)) == (2, "r1", 64)
    assert later.key != run.key


def test_an_unreadable_recovery_file_is_an_error_with_a_fix(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "r1"
    place.mkdir(parents=True)
    recovery.write(tmp_path, kept(spec.RunSpec("r1", ("true",))))
    written = json.loads((place / "recovery.json").read_text())
    bare = {key: value for key, value in written["options"].items() if key != "argv"}
    options: list[Any] = [written["options"] | {"novel": 1}, bare, [], written["options"] | {"env": 1}]
    others = [json.dumps(written | {"options": one}) for one in options]
    for text in ("", "[]", json.dumps({"run_id": "r1"}), *others):
        (place / "recovery.json").write_text(text)
        with pytest.raises(OpsError, match="cannot be read") as refusal:
            recovery.read(tmp_path, "r1")
        assert "tpu_ops stop r1" in refusal.value.fix


@pytest.mark.parametrize("around", [None, "*\n", "*.py\n"], ids=["alone", "in a work tree", "in one of code"])
def test_every_attempt_has_the_code_of_the_first(tmp_path: Path, around: str | None) -> None:
    source = tmp_path / "project" / "digits"
    (source / "sub" / "empty").mkdir(parents=True)
    (tmp_path / "project" / ".gitignore").write_text("sub/*.log\n")
    (source / "sub" / "kept.bin").write_text("tracked")
    for words in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", "-C", str(tmp_path / "project"), *words], check=True)
    if around is not None:
        (tmp_path / ".gitignore").write_text(around)
        subprocess.run(["git", "-C", str(tmp_path), "init", "--quiet"], check=True)
    (source / "train.py").write_text("first")
    (source / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("train.py")
    (source / ".gitignore").write_text("*.ckpt\n*.bin\n")
    (source / "big.ckpt").write_text("x")
    tree = sync.read(source)
    assert tree.files == (".gitignore", "link", "sub/kept.bin", "sub/run.sh", "train.py")
    copy = recovery.keep_code(tmp_path, "r1", tree)
    (source / "train.py").write_text("second")
    run = spec.RunSpec("r1", ("true",), cwd=tree.cwd)
    again = recovery.kept_code(tmp_path, kept(run, code=True))
    assert again is not None
    assert (again.digest, again.entries, again.name) == (tree.digest, tree.entries, "digits")
    assert again.source == copy.source
    assert recovery.kept_code(tmp_path, kept(run)) is None


def test_logs_go_on_where_an_earlier_copy_ends(tmp_path: Path) -> None:
    logs = copies.Logs(tmp_path, 2, pytest.fail)
    logs.write(0, 0, b"one")
    logs.close()
    logs = copies.Logs(tmp_path, 2, pytest.fail)
    assert logs.offsets == (3, 0)
    # What rotation took keeps its place.
    logs.write(0, 5, b"two")
    assert logs.offsets == (8, 0)
    logs.close()
    assert (tmp_path / "rank-0.log").read_bytes() == b"one\0\0two"


def test_a_full_disk_is_said_once_and_leaves_zero_bytes(tmp_path: Path) -> None:
    said: list[str] = []
    logs = copies.Logs(tmp_path, 2, said.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        logs.write(0, 0, b"first")
        logs.write(0, 5, b"second")
        logs.write(1, 0, b"1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    logs.write(0, 11, b"third")
    logs.close()
    assert (tmp_path / "rank-0.log").read_bytes() == b"firs" + b"\0" * 7 + b"third"
    assert (tmp_path / "rank-1.log").read_bytes() == b"1"
    assert len(said) == 1
    assert said[0].startswith(f"{tmp_path}/rank-0.log: ")


def test_a_disk_without_room_does_not_end_what_follows_the_run(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    said: list[str] = []
    logs = copies.Logs(tmp_path, 1, said.append)
    logs.write(0, 0, b"one")
    logs.write(0, 3, b"two")
    logs.close()
    assert ["No space left on device" in text for text in said] == [True]


def test_logs_that_cannot_be_opened_are_reported_once_and_written_later(tmp_path: Path) -> None:
    place = tmp_path / "attempt-1"
    place.write_text("")
    said: list[str] = []
    logs = copies.Logs(place, 2, said.append)
    logs.write(0, 0, b"first")
    # Whoever follows again goes on from there.
    assert logs.offsets == (5, 0)
    place.unlink()
    place.mkdir()
    (place / "rank-1.log").write_text("sec")
    logs.write(0, 5, b"third")
    logs.write(1, 0, b"second")
    assert logs.offsets == (10, 6)
    logs.close()
    assert (place / "rank-0.log").read_bytes() == b"\0" * 5 + b"third"
    assert (place / "rank-1.log").read_bytes() == b"second"
    assert [text.startswith(f"{place}/rank-0.log: ") for text in said] == [True]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Has the disk that logs are copied to as much space as `free` says, in bytes; `looks` counts who asks."""
    found = {"free": copies.FLOOR, "looks": 0}

    def statvfs(_: object) -> Any:
        found["looks"] += 1
        return SimpleNamespace(f_bavail=found["free"], f_frsize=1, f_files=0, f_favail=0)

    monkeypatch.setattr("tpu_ops.runs.copies.os.statvfs", statvfs)
    monkeypatch.setattr(copies, "LOOK_EVERY", 10)
    return found


def test_copies_of_logs_pause_while_the_disk_is_nearly_full(tmp_path: Path, room: dict[str, int]) -> None:
    said: list[str] = []
    logs = copies.Logs(tmp_path, 2, said.append)
    logs.write(0, 0, b"first")
    room["free"] -= 1
    logs.write(1, 0, b"12345")
    logs.write(0, 5, b"second")
    logs.write(1, 5, b"67890")
    logs.write(0, 11, b"third")
    what = "data that cannot be written is missing from the copies; the run continues"
    assert said == [f"{tmp_path}/rank-0.log: less than 1 GiB is free (1073.7 MB free in {tmp_path}); {what}"]
    room["free"] += 1
    # Little comes after that, and is copied all the same.
    logs.write(0, 16, b"4th")
    logs.write(1, 10, b"end")
    assert logs.offsets == (19, 13)
    logs.close()
    assert (tmp_path / "rank-0.log").read_bytes() == b"first" + b"\0" * 11 + b"4th"
    assert (tmp_path / "rank-1.log").read_bytes() == b"12345" + b"\0" * 5 + b"end"
    looks = "at the opening, once for so many bytes of all ranks, and each time where there was too little space"
    assert (len(said), room["looks"]) == (1, 5 + 1), f"{looks}, and for the warning"


def test_a_disk_that_is_nearly_full_when_copies_are_begun_gets_none(tmp_path: Path, room: dict[str, int]) -> None:
    room["free"] = 0
    said: list[str] = []
    logs = copies.Logs(tmp_path, 1, said.append)
    logs.write(0, 0, b"first")
    logs.close()
    assert (tmp_path / "rank-0.log").read_bytes() == b""
    assert len(said) == 1


def test_a_disk_that_tells_nothing_of_its_space_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpu_ops.runs.copies.os.statvfs", Mock(side_effect=OSError))
    logs = copies.Logs(tmp_path, 1, pytest.fail)
    logs.write(0, 0, b"first")
    logs.close()
    assert (tmp_path / "rank-0.log").read_bytes() == b"first"


def test_a_second_process_that_recovers_the_same_run_is_refused(tmp_path: Path) -> None:
    class Settings:
        state_dir = tmp_path

    settings: Any = Settings()
    with (
        recovery.alone(settings.state_dir, "r1"),
        pytest.raises(UsageError, match="another process"),
        recovery.alone(settings.state_dir, "r1"),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-failures", "1"], "goes with --recover only"),
        (["--recover", "--detach"], "recovery needs this command to keep running"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], said: str) -> None:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args(["pod", *words])
    with pytest.raises(UsageError, match=said):
        train.run(args)
