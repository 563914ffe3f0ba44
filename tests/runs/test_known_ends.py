"""Messages about a run that this machine saw end, when its workers know less."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from tests.runs.test_parts import pod
from tpu_ops.cli import attach, logs, runs, status, stop
from tpu_ops.cloud.remaking import Plan
from tpu_ops.errors import ExitCode, HostError, OpsError, UnreachableError, UsageError
from tpu_ops.protocol.wire import END
from tpu_ops.recovery import termination
from tpu_ops.runs import control, ranks, records, recovery
from tpu_ops.runs.known_ends import NODE_GONE, remembered
from tpu_ops.runs.outcomes import KNOWS_NOTHING, Outcome, ending
from tpu_ops.runs.spec import RunSpec, here
from tpu_ops.ssh.replies import Reply
from tpu_ops.ssh.stream import Broken, Frame

#: A run on the nodes a and b, of two workers each.
HOSTS = ("a-w0", "a-w1", "b-w0", "b-w1")
KNOWN = records.RunRecord("r1", ("a", "b"), ("1", "2"), HOSTS, ("train", "x"), since=5.0, attempt=2)
MISSING = Reply("", {}, "missing", "this worker does not know run r1")
BARE = Reply("", {}, "no-launcher", "the launcher is not installed", "configure it")
SILENT = Reply("", {}, "unreachable", "ssh: connect to host b port 22: Connection timed out")
DENIED = Reply("", {}, "denied", "sudo does not let you use the launcher on this worker")


def record(rank: int, state: str = "succeeded", attempt: int = 2) -> dict[str, Any]:
    """Return what a worker knows of the run."""
    ended = {} if state == "running" else {"ended": 9.0}
    person = {"name": "ada", "uid": 1001}
    known = {"run_id": "r1", "rank": rank, "state": state, "attempt": attempt, "since": 6.0, "argv": ["train", "x"]}
    return {**known, **ended, "person": person, "asker": "bob", "workers": list(HOSTS), "code_digest": "", "began": 6.0}


class Stream:
    """What a worker answers to who follows."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    async def answer(self) -> Reply:
        if self._reply.kind == "unreachable":
            raise Broken(self._reply.problem)
        return self._reply

    async def frames(self) -> AsyncIterator[Frame]:
        yield Frame(END, 0, json.dumps({"record": self._reply.value["record"], "tail": ""}).encode())


class Workers:
    """Stands for the workers; of those that have had many runs since the newest are others."""

    masters = SimpleNamespace(drop=AsyncMock())

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}
        #: The newest record of each, where not of a run that is long over.
        self.newest: dict[str, dict[str, Any]] = {}

    async def call(self, requests: Any, action: str, **_: Any) -> dict[str, Reply]:
        assert action == "status"
        return {host: self._said(host, request) for host, request in requests.items()}

    def _said(self, host: str, request: Mapping[str, Any]) -> Reply:
        reply = self.replies.get(host, MISSING)
        if reply.kind == "missing":
            reply = Reply("", {"record": None})
        newest = [self.newest[host]] if host in self.newest else []
        listed: dict[str, Any] = {"records": newest, "holder": None} if "count" in request else {}
        return reply._replace(host=host, value={**reply.value, **listed})

    @contextlib.asynccontextmanager
    async def stream(self, host: str, action: str, _: object) -> AsyncIterator[Stream]:
        assert action == "follow"
        yield Stream(self.replies.get(host, MISSING)._replace(host=""))


class World:
    """A fleet of the nodes a and b, its workers, and commands that ask them."""

    def __init__(self, folder: Path, capsys: Any) -> None:
        self.folder, self._capsys, self.workers = folder, capsys, Workers()
        self.nodes(a="1", b="2")

    def nodes(self, **ids: str) -> None:
        """Have these nodes, each with its id."""
        members = tuple(worker for name, node_id in ids.items() for worker in pod(2, name, node_id))
        settings = SimpleNamespace(state_dir=self.folder, projects=("lab",), zones=(), snapshot="")
        listed = [worker.node for worker in members if worker.index == 0]
        self.fleet: Any = SimpleNamespace(
            workers=members, listed=listed, unlisted=(), settings=settings, asked_at=1e12, path=""
        )

    def ends(self, state: str, **changes: Any) -> None:
        """Have this machine see the run end."""
        records.write(self.folder, replace(KNOWN, **changes))
        records.close(self.folder, "r1", state, outcomes=[Outcome(0, "a-w0", "failed", record=record(0))])

    def told(self, *of: Reply) -> None:
        """Have the workers say this, by rank; all others know nothing of the run."""
        self.workers.replies = dict(zip(HOSTS, of, strict=False))

    def __call__(self, command: Any, *argv: str) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        self._capsys.readouterr()
        try:
            code = command.run(parser.parse_args(list(argv)))
        except (HostError, UnreachableError) as exc:
            code = exc.exit_code
        return (code, *self._capsys.readouterr())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> World:
    made = World(tmp_path, capsys)
    monkeypatch.setattr("tpu_ops.config.load", lambda _: made.fleet.settings)
    monkeypatch.setattr("tpu_ops.fleet.view.current", lambda _: made.fleet)
    monkeypatch.setattr("tpu_ops.fleet.view.known", lambda _: made.fleet)
    monkeypatch.setattr("tpu_ops.fleet.contact.fanout", lambda _: made.workers)
    monkeypatch.setattr("tpu_ops.runs.follow.RETRY_EVERY", 0.01)
    monkeypatch.setattr("tpu_ops.runs.follow.ALONE_LIMIT", 0.05)
    monkeypatch.setattr("tpu_ops.runs.follow.RETRY_LIMIT", 0.05)
    return made


def seen(rank: int, state: str = "succeeded", attempt: int = 2) -> Reply:
    return Reply("", {"record": record(rank, state, attempt)})


ALL = tuple(seen(rank) for rank in range(4))


def test_an_older_run_is_requested_although_its_end_was_seen(world: World) -> None:
    world.ends("succeeded")
    world.told(*ALL)
    told = {
        "person": "ada",
        "started_by": "bob",
        "argv": ["train", "x"],
        "since": 6.0,
        "ended": 9.0,
        "state": "succeeded",
        "attempt": 2,
    }
    assert "ada (started by bob)" in world(runs)[1]
    for command, argv in ((runs, ["--json"]), (status, ["--json", "r1"])):
        code, out, _ = world(command, *argv)
        (found,) = json.loads(out)
        assert (code, {key: found[key] for key in told}) == (0, told)
        assert found["ranks"][0]["reason"] == ""


@pytest.mark.parametrize("ended", ["succeeded", "failed", "stopped"])
@pytest.mark.parametrize(
    ("nodes", "replies", "why"),
    [
        ({"a": "1", "b": "2"}, [], KNOWS_NOTHING),
        ({"a": "8", "b": "9"}, [], NODE_GONE),
        ({"a": "8", "b": "9"}, [BARE] * 4, NODE_GONE),
        ({}, [SILENT] * 4, NODE_GONE),
        ({"a": "1", "b": "9"}, ALL[:2], NODE_GONE),
    ],
    ids=["records dropped", "made anew", "made anew, and not configured", "deleted", "one slice made anew"],
)
def test_all_commands_tell_the_same_end_of_a_run_that_this_machine_saw_end(
    world: World, nodes: dict[str, str], replies: list[Reply], why: str, ended: str
) -> None:
    code = ExitCode.OK if ended == "succeeded" else ExitCode.FAILED
    names = tuple(f"projects/lab/locations/z/nodes/{name}" for name in KNOWN.nodes)
    world.ends(ended, full_names=names)
    world.nodes(**nodes)
    world.told(*(Reply("", {"record": one.value["record"] | told(ended)}) if one.ok else one for one in replies))
    (row,) = json.loads(world(runs, "--json")[1])
    assert (row["state"], row["person"], row["argv"], row["ended"]) == (ended, "ada", ["train", "x"], 9.0)
    of_workers = any(reply.ok for reply in replies)
    assert row["since"] == (6.0 if of_workers else 5.0)
    assert row["first_failure"] is None, "which rank that was is not remembered"
    assert "ada (started by bob)" in world(runs)[1]
    found, out, err = world(status, "r1")
    assert (found, f"run r1, attempt 2: {ended}" in err) == (code, True)
    assert f"{why}; as seen from here the run " in out
    fetched = ["--follow", "--fetch", str(world.folder / "fetched"), "r1"]
    for command, argv in ((attach, ["r1"]), (logs, ["--follow", "r1"]), (logs, fetched)):
        found, out, err = world(command, *argv)
        copied = argv is not fetched or len(replies) == sum(reply.ok for reply in replies) == len(HOSTS)
        expected = code if copied else code or ExitCode.UNREACHABLE
        assert (found, why in out + err) == (expected, True), (command, out, err)
        assert ("run r1 succeeded on all 4 ranks" in err or f"run r1: {ended}" in err) or command is logs
        assert "tpu_ops attach" not in err, "there is nothing to follow"
        assert "tpu_ops stop" not in err
    assert (known := records.read(world.folder, "r1"))
    assert (known.ended, known.ended_at, known.person) == (ended, 9.0, "ada")


def copied(world: World, attempt: int, *of: bytes) -> None:
    """Have copies of logs of an attempt on this machine, by rank; an empty one is of a rank that said nothing."""
    place = world.folder / f"runs/r1/attempt-{attempt}"
    place.mkdir(parents=True)
    for rank, data in enumerate(of):
        (place / f"rank-{rank}.log").write_bytes(data)
        os.utime(place / f"rank-{rank}.log", (1e9, 1e9))


@pytest.mark.parametrize(
    ("argv", "lines", "said"),
    [
        ([], ["[0] new"], "rank 0 (a-w0), attempt 10: this machine's copy of the log, last written 2001-09-09"),
        (["--rank", "all"], ["[0,2] new", "[2] cut"], "ranks 0,2 (a-w0,b-w0), attempt 10: "),
        (["--rank", "2"], ["[2] new", "[2] cut"], "rank 2: 3 bytes of its log are missing in the copy"),
        (["--rank", "3"], [], "copies of the run's logs, attempt by attempt: "),
        (["--since", "2001-01-01T00:00"], ["[0] new"], "the whole copy follows: copies have no times"),
        (["--since", "2002-01-01T00:00"], [], "nothing was written to the copy since --since"),
    ],
)
def test_logs_of_a_node_that_is_gone_are_those_that_were_copied_here(
    world: World, argv: list[str], lines: list[str], said: str
) -> None:
    records.write(world.folder, KNOWN)
    world.nodes(a="8", b="9")
    copied(world, 2, b"old\n", b"", b"old\n")
    copied(world, 10, b"new\n", b"", b"new\n\0\0\0cut")
    code, out, err = world(logs, "r1", *argv)
    assert (code, out.splitlines()) == (ExitCode.UNREACHABLE, lines)
    assert said in err
    assert NODE_GONE in err, "what is shown is a copy, since"


def test_copies_of_a_node_that_is_gone_are_fetched_as_parts(world: World) -> None:
    records.write(world.folder, KNOWN)
    world.nodes(a="1", b="9")
    world.told(*ALL[:2])
    copied(world, 1, b"", b"", b"old\n")
    copied(world, 2, b"", b"", b"new\n")
    code, _, err = world(logs, "r1", "--fetch", str(world.folder / "fetched"))
    there = {path.name: path.read_bytes() for path in (world.folder / "fetched/r1").iterdir()}
    assert (code, there) == (
        ExitCode.UNREACHABLE,
        {"rank-0.log": b"", "rank-1.log": b"", "rank-2.log.part": b"new\n"},
    )
    assert "rank 2 (b-w0), attempt 2: this machine's copy" in err


@pytest.mark.parametrize(
    ("changes", "replies"),
    [({"hosts": ("a-w0", "a-w1"), "nodes": ("a",), "node_ids": ("1",)}, [SILENT] * 4), ({}, [seen(0, attempt=3)])],
    ids=["of another run of the name", "of an earlier attempt"],
)
def test_copies_of_something_else_are_not_shown(
    world: World, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], replies: list[Reply]
) -> None:
    records.write(world.folder, replace(KNOWN, **changes))
    world.told(*replies)
    copied(world, 2, b"", b"", b"other\n")
    monkeypatch.setattr("tpu_ops.runs.attempts.the_run", AsyncMock(return_value=control.RunRef("r1", HOSTS)))
    code, out, _ = world(logs, "r1", "--rank", "all")
    assert (code, out) == (ExitCode.UNREACHABLE, "")


@pytest.mark.parametrize("kept", [True, False], ids=["started here", "started elsewhere"])
def test_all_commands_tell_that_ranks_of_a_refused_start_were_never_started(
    world: World, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    if kept:
        world.ends("failed")
    refusal = record(1, "refused") | {"reason": "not started: rank 1 (a-w1): no chips", "began": 0.0, "blamed": [1]}
    world.told(MISSING, Reply("", {"record": refusal, "already": True}))
    monkeypatch.setattr("tpu_ops.runs.attempts.the_run", AsyncMock(return_value=control.RunRef("r1", HOSTS)))
    monkeypatch.setattr(control, "find", AsyncMock(return_value=control.Found([control.RunRef("r1", HOSTS)])))
    said = control.Stopped((), already=True)
    for command, code in ((status, ExitCode.FAILED), (attach, ExitCode.FAILED), (stop, ExitCode.OK)):
        if command is stop:
            ends = [control.asked_outcome(rank, world.workers._said(host, {})) for rank, host in enumerate(HOSTS)]
            monkeypatch.setattr(termination, "end", AsyncMock(return_value=said._replace(outcomes=tuple(ends))))
        found, out, _ = world(command, "--json", "r1")
        (told,) = json.loads(out) if command is not attach else (json.loads(out),)
        assert (found, {rank["state"] for rank in told["ranks"]}) == (code, {"refused"}), command
    if kept:
        (row,) = json.loads(world(runs, "--json")[1])
        assert {rank["state"] for rank in row["ranks"]} == {"refused"}
    found, _, err = world(logs, "r1", "--rank", "all")
    assert (found, err.count("was never started"), len(err.splitlines())) == (ExitCode.OK, 4, 4)


LOCKED_OUT = Reply("", {}, "unreachable", "tpu@10.0.0.1: Permission denied (publickey).")


@pytest.mark.parametrize(
    ("reply", "state", "why"),
    [
        (BARE, "gone", NODE_GONE),
        (LOCKED_OUT, "unreachable", f"{NODE_GONE}, and the new node of its name refuses your login: tpu@10.0.0.1"),
    ],
    ids=["not configured", "not configured for this person"],
)
def test_of_a_run_whose_nodes_were_made_anew_it_is_said_that_they_are_gone(
    world: World, reply: Reply, state: str, why: str
) -> None:
    """No end was seen, and no launcher on the new nodes can report the run as unknown."""
    records.write(world.folder, KNOWN)
    world.nodes(a="8", b="9")
    world.fleet.asked_at = 0.0
    world.told(*[reply] * 4)
    code, out, err = world(status, "r1")
    assert (code, f"run r1, attempt 2: {state}" in err, out.count(why)) == (ExitCode.UNREACHABLE, True, 4)
    assert ("with --recover" in err) is (state == "gone")


def told(ended: str) -> dict[str, Any]:
    """Return how a rank's record tells of the end of the run."""
    return (
        {"state": "stopped", "intent": {"kind": "failed" if ended == "failed" else "stop"}}
        if (ended != "succeeded")
        else {}
    )


@pytest.mark.parametrize(
    ("replies", "state"),
    [
        ([seen(0, "running", attempt=3)], "gone"),
        ([seen(0, "running")], "gone"),
        ([seen(0, "stopped", attempt=3)], "failed"),
        ([SILENT], "unreachable"),
        ([DENIED], "unknown"),
    ],
    ids=["a later attempt is on", "it is on", "a later attempt has ended", "it may be on", "the same, asked in vain"],
)
def test_a_remembered_end_hides_neither_what_is_on_nor_a_later_attempt(
    world: World, replies: list[Reply], state: str
) -> None:
    world.ends("succeeded")
    world.told(*replies)
    (row,) = json.loads(world(runs, "--json")[1])
    (found,) = json.loads(world(status, "--json", "r1")[1])
    assert (found["state"], row["state"]) == (state, state)
    others = {rank["state"] for rank in found["ranks"][1:]}
    assert others == ({"gone"} if replies[0].ok else {"succeeded"})
    # While one rank is on there is something left of the run, and its name is taken.
    assert "again:" not in world(status, "r1")[2]


def test_a_run_at_the_barrier_is_shown_as_starting_everywhere(world: World) -> None:
    records.write(world.folder, KNOWN)
    world.told(Reply("", {"record": record(0, "starting") | {"ended": None, "barrier": 60}}))
    (row,) = json.loads(world(runs, "--json")[1])
    code, _, said = world(status, "r1")
    assert (row["state"], code) == ("starting", ExitCode.OK)
    waits = "1 of 4 ranks ready; the start is given up at 1970-01-01 00:01:06 UTC unless all are ready"
    assert f"run r1, attempt 2: starting since 1970-01-01 00:00:06 UTC, {waits}" in said.splitlines()
    assert "gone" not in said
    assert "again:" not in said


def test_the_end_of_an_attempt_is_not_that_of_a_run_that_is_recovered_here(world: World) -> None:
    world.ends("failed")
    options = recovery.options_of(RunSpec("r1", ("x",)), {})
    recovery.write(world.folder, recovery.Recovery("r1", 2, Plan(()), options, pending=True))
    code, _, err = world(status, "r1")
    assert (code, "run r1, attempt 2: gone" in err) == (ExitCode.UNREACHABLE, True)
    assert "no process is recovering it; `tpu_ops attach r1 --recover` resumes the recovery" in err
    assert "tpu_ops train" not in err


def test_a_run_is_recovering_while_this_machine_brings_its_nodes_back(world: World) -> None:
    records.write(world.folder, KNOWN)
    fix = "the node does not come back by itself: `tpu_ops delete a`"
    world.told(*[Reply("", {}, "unreachable", "its node is PREEMPTED now", fix)] * 4)
    kept = recovery.Recovery(
        "r1", 2, Plan(()), recovery.options_of(RunSpec("r1", ("x",)), {}), pending=True, since=60.0
    )
    recovery.write(world.folder, kept)
    with recovery.alone(world.folder, "r1"):
        (row,) = json.loads(world(runs, "--json")[1])
        _, out, err = world(runs)
        shown = world(status, "r1")[2]
        with pytest.raises(UnreachableError) as wrong:
            runs.run(argparse.Namespace(fleet="", json=False))
    by = {"who": here(), "pid": os.getpid()}
    assert (row["state"], row["recovery"]) == ("recovering", {"attempt": 3, **by, "since": 60.0})
    assert " recovering " in out
    named = f"{here()}, pid {os.getpid()}"
    note = f"a process on this machine is preparing attempt 3 ({named}, since 1970-01-01 00:01:00 UTC); logs"
    assert f"run r1: {note}" in err
    assert "run r1, attempt 2: recovering" in shown
    assert f"run r1: {note}" in shown
    assert wrong.value.fix == "wait until run r1 has started again, or end it: `tpu_ops stop r1`"
    (row,) = json.loads(world(runs, "--json")[1])
    assert (row["state"], row["recovery"]) == ("unreachable", None), "no process of this machine recovers it"


def test_another_run_of_the_name_is_not_the_one_that_is_remembered(world: World) -> None:
    world.ends("succeeded", hosts=("a-w0", "a-w1"), nodes=("a",), node_ids=("1",))
    on_b = control.RunRef("r1", ("b-w0", "b-w1"))
    outcomes = [Outcome(rank, host, "gone") for rank, host in enumerate(on_b.hosts)]
    assert remembered(world.fleet, "r1", on_b.hosts, outcomes) == tuple(outcomes)


def test_of_a_run_whose_end_nobody_saw_is_told_what_starts_another_one(world: World) -> None:
    records.write(world.folder, KNOWN)
    world.nodes(a="8", b="9")
    again = "  again:  tpu_ops train a,b --name OTHER -- COMMAND"
    for command, argv in ((status, ["r1"]), (attach, ["r1"]), (logs, ["--follow", "r1"])):
        code, _, err = world(command, *argv)
        assert (code, again in err.splitlines()) == (ExitCode.UNREACHABLE, True)
    (row,) = json.loads(world(runs, "--json")[1])
    assert (row["state"], row["argv"], row["since"], row["ended"]) == ("gone", ["train", "x"], 5.0, None)
    assert (row["person"], row["attempt"]) == ("", 2)


def test_files_are_compatible_with_older_versions_in_both_directions(tmp_path: Path) -> None:
    records.write(tmp_path, replace(KNOWN, ended="succeeded"))
    path = tmp_path / "runs/r1.json"
    data = json.loads(path.read_text())
    older = {key: data[key] for key in data if key not in ("ended_at", "person", "started_by")}
    path.write_text(json.dumps(older))
    known = records.read(tmp_path, "r1")
    assert known == replace(KNOWN, ended="succeeded")
    assert known.facts()["ended"] is None


def test_an_end_that_no_worker_tells_of_is_now_or_when_it_was_seen_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records.write(tmp_path, KNOWN)
    for now, ended_at in ((50.0, 50.0), (60.0, 50.0)):
        monkeypatch.setattr("tpu_ops.runs.records.time.time", lambda now=now: now)
        records.close(tmp_path, "r1", "stopped")
        known = records.read(tmp_path, "r1")
        assert known
        assert known.ended_at == ended_at


@pytest.mark.parametrize(("replies", "on"), [(ALL, False), ([seen(0, "running"), *ALL[1:]], True)])
def test_attach_mentions_ctrl_c_only_while_the_run_is_active(
    world: World, replies: list[Reply], on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    records.write(world.folder, KNOWN)
    world.told(*replies)
    err = world(attach, "r1")[2]
    assert ("run r1 on 4 workers; Ctrl-C detaches" in err) is on


def newest(rank: int, run_id: str = "r1", since: float = 6.0) -> dict[str, Any]:
    """Return what a worker says of its newest run in a list, where it leaves out the names of all workers."""
    known = record(rank) | {"run_id": run_id, "since": since}
    return {key: value for key, value in known.items() if key != "workers"}


def test_logs_show_the_last_run_and_status_and_attach_name_it(world: World, refused: Callable[..., Any]) -> None:
    world.told(*ALL)
    world.workers.newest = {host: newest(rank) for rank, host in enumerate(HOSTS)}
    code, _, err = world(logs, "a-w1")
    assert (code, "no run is active on a-w1; the last one there was r1\n" in err) == (ExitCode.OK, True)
    code, _, err = world(status, "a")
    assert (code, err) == (
        ExitCode.OK,
        "no run is active on a; the last one there was r1: `tpu_ops status r1` shows its end\n",
    )
    # Whoever waits for an end means a run that is on.
    for command, argv in ((attach, ["a-w[0-1]"]), (logs, ["--follow", "a-w[0-1]"])):
        assert refused(world, command, *argv).fix.startswith("the last run there was r1: `tpu_ops logs 'a-w[0-1]'`; ")


def test_the_last_run_is_shown_although_one_of_its_workers_is_silent(world: World, refused: Callable[..., Any]) -> None:
    world.told(*ALL[:1], SILENT, *ALL[2:])
    world.workers.newest = {host: newest(rank) for rank, host in enumerate(HOSTS)}
    code, _, err = world(logs, "a")
    assert (code, "the last one there was r1" in err, "a-w1" in err) == (ExitCode.OK, True, False)
    code, _, err = world(status, "a")
    assert (code, "the last one there was r1" in err) == (ExitCode.UNREACHABLE, True)
    parser = argparse.ArgumentParser()
    attach.add_arguments(parser)
    with pytest.raises(
        UnreachableError,
        match=r"could not tell.*once the workers answer;.*; the last run there was r1: `tpu_ops logs a`",
    ):
        attach.run(parser.parse_args(["a"]))


@pytest.mark.parametrize(("words", "shown"), [([], "3"), (["--rank", "0"], "0"), (["--rank", "all"], "0-3")])
def test_a_worker_s_own_rank_is_shown(
    world: World, words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.told(*ALL)
    world.workers.newest = {host: newest(rank) for rank, host in enumerate(HOSTS)}
    done = AsyncMock(
        return_value=[Outcome(rank, host, "succeeded", record=record(rank)) for rank, host in enumerate(HOSTS)]
    )
    follower = Mock(return_value=SimpleNamespace(run=done))
    monkeypatch.setattr("tpu_ops.runs.attempts.Follower", follower)
    world(logs, "b-w1", *words)
    assert ranks.folded(follower.call_args.kwargs["shown"]) == shown


def test_logs_of_a_rank_that_never_started_show_the_reason(world: World) -> None:
    records.write(world.folder, KNOWN)
    world.told(Reply("", {"record": record(0, "refused") | {"reason": "no such program"}}), *ALL[1:])
    assert "rank 0 (a-w0) was never started: no such program" in world(logs, "r1")[2]


def test_of_several_last_runs_the_newest_is_meant(world: World) -> None:
    world.workers.newest = {"a-w0": newest(0, since=7.0), "a-w1": newest(1, "r3", 9.0), "b-w0": newest(2, "r2", 8.0)}
    assert "no run is active on a,b; the last one there was r3\n" in world(logs, "a,b")[2]
    assert "no run is active on a,b; the last one there was r3: `tpu_ops status r3` shows" in world(status, "a,b")[2]


def test_workers_without_a_launcher_have_no_run_and_that_is_no_error(world: World) -> None:
    world.told(*[BARE] * len(ALL))
    for argv, first in (
        ((), "no run is active, and this machine has no record of a run"),
        (("a,b",), "no run is active on a,b\n"),
    ):
        code, out, err = world(status, *argv)
        assert (code, out) == (ExitCode.OK, "")
        assert err.startswith(first)
        assert "a-w[0-1],b-w[0-1] have no launcher yet, so no run: `tpu_ops configure 'a-w" in err
        assert json.loads(world(status, *argv, "--json")[1]) == []


@pytest.mark.parametrize(
    ("known", "run_id", "hosts"),
    [
        (KNOWN, "r1", HOSTS),
        (None, "r1", HOSTS),
        # Others may call a run as a node, or as one that was started here on another.
        (None, "a", HOSTS),
        (replace(KNOWN, nodes=("b",), node_ids=("2",), hosts=HOSTS[2:]), "r1", HOSTS),
    ],
)
async def test_the_last_run_of_a_worker_is_the_one_that_it_tells_of(
    world: World, known: records.RunRecord | None, run_id: str, hosts: tuple[str, ...]
) -> None:
    world.told(*ALL)
    if known:
        records.write(world.folder, known)
    fanout: Any = world.workers
    found = await control.last(world.fleet, fanout, control.Last(run_id, "a-w1"))
    assert found == control.RunRef(run_id, hosts)


def test_status_tells_who_failed_first_and_where_its_output_is(world: World) -> None:
    first = {"rank": 2, "worker": "b-w0", "cause": "exit code 3"}
    told = [
        seen(rank, "failed")._replace(value={"record": record(rank, "failed") | {"first": first}}) for rank in range(4)
    ]
    for of_rank_2, shown in ((told[2], True), (SILENT, False)):
        world.told(*told[:2], of_rank_2, told[3])
        code, _, err = world(status, "r1")
        assert (code, "rank 2 (b-w0) failed first: exit code 3" in err) == (ExitCode.FAILED, True)
        assert ("  output: tpu_ops logs r1 --rank 2\n" in err) is shown


def raising(rank: int, at: float, exited: float | None) -> dict[str, Any]:
    """Return the record of a rank that printed a traceback at a time, and failed at another."""
    text = f"Traceback (most recent call last):\nKeyError: {rank}"
    found = {"at": at, "error": f"KeyError: {rank}", "text": text} if at else None
    first = {"rank": 0, "worker": "a-w0", "cause": "killed by SIGABRT"}
    return record(rank, "failed") | {"first": first, "exited": exited, "traceback": found}


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        # The others waited for rank 2, and raised themselves once it was given up.
        ({0: 999.5, 1: 999.6, 2: 700.0, 3: 0.0}, "rank 2 (b-w0) printed a traceback 300 s before that"),
        ({0: 690.0, 1: 0.0, 2: 700.0, 3: 0.0}, "rank 0 (a-w0) printed a traceback 310 s before that"),
        # What the failure of rank 0 brought about, or what nobody can tell from that.
        ({0: 999.5, 1: 999.6, 2: 0.0, 3: 0.0}, ""),
        ({0: 0.0, 1: 1000.4, 2: 999.8, 3: 0.0}, ""),
        ({0: 999.0, 1: 0.0, 2: 998.5, 3: 0.0}, ""),
        # Whatever that was, it went on for an hour.
        ({0: 0.0, 1: 0.0, 2: -2600.0, 3: 0.0}, ""),
        ({0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}, ""),
    ],
)
def test_a_rank_that_raised_before_another_failed_first_is_the_likely_cause(
    world: World, raised: dict[int, float], told: str
) -> None:
    world.told(*[seen(rank)._replace(value={"record": raising(rank, at, 1000.0)}) for rank, at in raised.items()])
    _, _, err = world(status, "r1")
    assert "rank 0 (a-w0) failed first: killed by SIGABRT" in err
    assert told in err
    assert ("printed a traceback" in err) is bool(told)
    rank = told.split()[1] if told else "0"
    assert (f"[{rank}] KeyError: {rank}\n" in err) is bool(told)
    assert f"  output: tpu_ops logs r1 --rank {rank}\n" in err


def test_without_a_time_of_the_first_failure_no_traceback_is_blamed(world: World) -> None:
    world.told(*[seen(rank)._replace(value={"record": raising(rank, 700.0, None)}) for rank in range(4)])
    assert "printed a traceback" not in world(status, "r1")[2]


@pytest.mark.parametrize("state", ["running", "succeeded"])
def test_status_tells_what_the_ranks_of_a_run_that_is_on_have_noted(world: World, state: str) -> None:
    noted = [record(rank, state) | {"notes": ["rank 1 has exited", f"rank {rank} is slow"]} for rank in range(4)]
    world.told(*[seen(rank)._replace(value={"record": made}) for rank, made in enumerate(noted)])
    _, _, err = world(status, "r1")
    assert [err.count("rank 1 has exited"), err.count("rank 3 is slow")] == ([1, 1] if state == "running" else [0, 0])


def test_a_target_without_a_run_shows_how_to_start_one_and_list_old_ones(
    world: World, refused: Callable[..., Any]
) -> None:
    for command, word, nodes in ((attach, "a-w0", "a"), (logs, "a,b", "a,b")):
        wrong = refused(world, command, word)
        assert wrong.what == f"no run is active on {word}"
        starts = f"`tpu_ops train {nodes} -- COMMAND` starts a run"
        assert wrong.fix == f"{starts}; `tpu_ops runs` lists the last runs started here"


@pytest.fixture
def refused() -> Callable[..., Any]:
    """Return what calls a command and returns the error that it ends with."""

    def call(world: World, command: Any, *argv: str) -> Any:
        with pytest.raises(UsageError) as caught:
            world(command, *argv)
        return caught.value

    return call


def test_logs_that_are_fetched_are_of_all_ranks(world: World, refused: Callable[..., Any], tmp_path: Path) -> None:
    wrong = refused(world, logs, "--fetch", str(tmp_path / "there"), "--rank", "0", "r1")
    assert (wrong.where, "all ranks" in wrong.what) == ("--rank", True)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(("state", "name"), [(15, "SIGTERM"), (11, "SIGSEGV"), (40, "signal 40")])
def test_a_signal_that_ended_a_rank_has_its_name(state: int, name: str) -> None:
    assert ending({"signal": state}) == name


@pytest.mark.parametrize("state", ["PREEMPTED", "STOPPED"])
def test_of_a_node_whose_state_is_known_ssh_s_words_are_left_out(world: World, state: str) -> None:
    clause = f"its node is {state} now"
    world.told(*[SILENT._replace(problem=f"{SILENT.problem}; {clause}")] * 2, SILENT)
    records.write(world.folder, KNOWN)
    for command in (status, attach):
        _, out, _ = world(command, "--json", "r1")
        found = json.loads(out)
        ranks = (found[0] if command is status else found)["ranks"]
        assert ranks[0]["reason"] == clause
        assert ranks[2]["reason"].endswith(SILENT.problem)


STOPPED_RECORD = {"intent": {"kind": "stop"}, "attempt": 1, "person": {"name": "ada"}, "began": 1.0, "since": 1.0}


@pytest.mark.parametrize(
    ("states", "reason", "record", "said"),
    [
        (("gone", "gone"), "its node is PREEMPTED now", None, "gone"),
        (("gone", "gone"), termination.NOT_ON, None, "stopped"),
        (("gone", "stopped"), "its node is PREEMPTED now", STOPPED_RECORD | {"state": "stopped"}, "stopped"),
        (("gone", "unreachable"), "", None, "unreachable"),
    ],
)
def test_stop_reports_only_runs_that_were_active_or_in_recovery(
    states: tuple[str, ...], reason: str, record: Any, said: str, capsys: Any
) -> None:
    first = Outcome(0, "w0", states[0], reason=reason)
    second = Outcome(1, "w1", states[1], reason=reason, record=record, intent="stop" if record else "")
    run = control.RunRef("r1", ("w0", "w1"))
    stop.report([(run, control.Stopped((first, second), already=False))], as_json=False)
    assert capsys.readouterr().err == f"run r1: {said}\n"


@pytest.mark.parametrize(("state", "noted"), [("succeeded", False), ("failed", True)])
def test_at_the_end_of_a_run_its_recovery_is_named_if_it_continues(world: World, state: str, noted: bool) -> None:
    records.write(world.folder, KNOWN)
    recovery.write(world.folder, recovery.Recovery("r1", 2, Plan(()), recovery.options_of(RunSpec("r1", ("x",)), {})))
    world.told(*(seen(rank, state) for rank in range(4)))
    assert ("run r1: no process is recovering it; `tpu_ops attach r1 --recover`" in world(attach, "r1")[2]) is noted
    with recovery.lock(world.folder, "r1"):
        assert "run r1: a process on this machine recovers it" in world(status, "r1")[2]


@pytest.mark.parametrize(
    ("states", "problem", "code"),
    [
        (["running", "unreachable"], None, 4),
        (["unreachable", "failed"], None, 1),
        (["running"], UnreachableError("silent"), 4),
        (["failed"], UnreachableError("silent"), 1),
    ],
)
def test_status_of_several_runs_ends_with_a_failure_that_is_known(
    world: World, monkeypatch: pytest.MonkeyPatch, states: list[str], problem: OpsError | None, code: int
) -> None:
    told = [(control.RunRef(f"r{at}", ("a-w0",)), (Outcome(0, "a-w0", state),)) for at, state in enumerate(states)]
    monkeypatch.setattr(status, "_ask", AsyncMock(return_value=(told, control.Found([]), problem)))
    ended, _, said = world(status, "a")
    assert (ended, "error: silent" in said) == (code, problem is not None and code == 1)


def test_lines_that_were_followed_while_the_run_went_on_are_no_success(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `attach`, the expected end has not come."""
    outcomes = [Outcome(0, "a-w0", "running", record=record(0)), Outcome(1, "a-w1", "succeeded", record=record(1))]
    following = AsyncMock(return_value=(control.RunRef("r1", ("a-w0", "a-w1")), outcomes, [0]))
    monkeypatch.setattr("tpu_ops.runs.attempts.followed", following)
    assert world(logs, "r1", "--follow")[0] == ExitCode.FAILED
    assert world(logs, "r1")[0] == ExitCode.OK


@pytest.mark.parametrize("damage", ["empty", "garbage", "a FIFO"])
def test_a_damaged_record_of_this_machine_is_warned_of_and_never_waited_for(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    records.write(tmp_path, KNOWN)
    path = tmp_path / "runs" / "r1.json"
    kept = tmp_path / "runs" / "r1" / "recovery.json"
    kept.parent.mkdir()
    for file in (path, kept):
        if damage == "a FIFO":
            file.unlink(missing_ok=True)
            os.mkfifo(file)
        else:
            file.write_text("" if damage == "empty" else "[1,")
    assert records.read(tmp_path, "r1") is None
    assert records.recent(tmp_path, 5) == []
    (said,) = caplog.messages
    assert said.startswith(f"the record of run r1 on this machine is damaged and not used: {path}: ")
    with pytest.raises(OpsError, match="this cannot be read"):
        recovery.read(tmp_path, "r1")
