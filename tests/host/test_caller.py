"""The host program ends with its caller, and its frames do not mix."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.support.specs import good, good_net, myself
from tpu_ops.host import actions, chips, follow, logs, rank_record, requests, spec_files, supervise, unit
from tpu_ops.host.after import after
from tpu_ops.host.caller import Caller, Gone
from tpu_ops.host.store import Store
from tpu_ops.protocol import spec, wire
from tpu_ops.ssh.stream import Frame

MARKER = "0123456789abcdef"
#: Rank 0 of a run of two workers.
PAIR: dict[str, Any] = {
    "rank": 0,
    "world_size": 2,
    "worker": "w0",
    "workers": ["w0", "w1"],
    "net": good_net(port=0),
}


class Line(NamedTuple):
    """Both ends of what a request comes through."""

    host: socket.socket
    controller: socket.socket

    def caller(self, *, attended: bool = True) -> Caller:
        return Caller(self.host.fileno(), attended)


@pytest.fixture
def line() -> Iterator[Line]:
    found = Line(*socket.socketpair())
    with found.host, found.controller:
        yield found


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have whoever runs the tests be root, who asks for themselves."""
    for module in (actions, chips, follow):
        monkeypatch.setattr(module, "require_root", lambda: None)
    monkeypatch.setattr(actions, "asking", myself)
    monkeypatch.setattr(chips, "asking", myself)


def on(folder: Path, **changes: Any) -> Store:
    """Return a store with a run whose supervisor is this process."""
    store = Store(str(folder))
    found = rank_record.new_record(spec.check(good(run_id="r1")), myself(), os.getuid(), MARKER) | changes
    store.prepare("r1", os.getuid(), os.getgid())
    store.write(found)
    return store


def served(store: Store, request: dict[str, Any], line: Line, *, attended: bool = True, code: int = 0) -> bytes:
    """Send a request, close the end at once, and return what comes back."""
    values = {"marker": MARKER, "protocol": wire.PROTOCOL, "attended": attended, **request}
    line.controller.sendall(json.dumps(values).encode() + b"\n")
    line.controller.close()
    answer, back = os.pipe()
    try:
        assert requests.serve(store, line.host.fileno(), back) == code
    finally:
        os.close(back)
    with os.fdopen(answer, "rb") as file:
        return file.read()


def test_a_start_ends_with_whoever_asked_and_the_run_does_not(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "_start_unit", lambda *_: on(tmp_path))
    monkeypatch.setattr(
        "tpu_ops.host.actions.time.sleep", lambda _: pytest.fail("this does not look whether anybody waits")
    )
    store = Store(str(tmp_path))
    assert served(store, {"action": "start", "spec": good(run_id="r1")}, line) == b""
    found = store.observe("r1")
    assert found is not None
    assert (found["state"], found["intent"]) == ("starting", None)


def test_a_stop_ends_with_whoever_asked_and_the_order_stands(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, told = on(tmp_path, state="running"), []
    monkeypatch.setattr("tpu_ops.host.actions.os.kill", lambda *words: told.append(words))
    monkeypatch.setattr(
        "tpu_ops.host.actions.time.sleep", lambda _: pytest.fail("this does not look whether anybody waits")
    )
    assert served(store, {"action": "stop", "run_id": "r1"}, line) == b""
    assert told == [(os.getpid(), 15)]
    assert (store.take_intent("r1") or {})["kind"] == "stop"


def test_a_request_that_is_piped_in_by_hand_is_answered(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on(tmp_path, state="running")

    def end(*_: object) -> None:
        store.write(dict(store.read("r1") or {}, state="stopped"))

    monkeypatch.setattr("tpu_ops.host.actions.os.kill", end)
    said = served(store, {"action": "stop", "run_id": "r1"}, line, attended=False)
    assert wire.find_answer(said, MARKER)["record"]["state"] == "stopped"


def test_a_caller_is_waited_for_only_as_long_as_they_are_there(line: Line) -> None:
    caller = line.caller()
    line.controller.sendall(b"more than the request\n")
    begun = time.monotonic()
    caller.pause(0.05)
    assert time.monotonic() - begun >= 0.05
    line.controller.close()
    with pytest.raises(Gone):
        caller.pause(60)
    begun = time.monotonic()
    line.caller(attended=False).pause(0.05)
    assert time.monotonic() - begun >= 0.05


# --- follow ---------------------------------------------------------------------------------------------------


def frames(said: bytes) -> list[Frame]:
    """Return the frames behind the answer."""
    stream = io.BytesIO(said.partition(f"\n{MARKER}\n".encode())[2].partition(b"\n")[2])
    found = []
    while head := stream.read(wire.FRAME.size):
        kind, offset, size = wire.FRAME.unpack(head)
        found.append(Frame(kind, offset, stream.read(size)))
    return found


def followed(store: Store, caller: Caller, sink: int, **changes: Any) -> None:
    request = {"marker": MARKER, "protocol": wire.PROTOCOL, "run_id": "r1", **changes}
    follow.follow(request, store, caller, sink)


@pytest.mark.parametrize("live", [True, False])
def test_a_rank_that_writes_without_end_holds_nothing_back(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    store, sent = on(tmp_path, state="running", notes=["a word of the supervisor"]), tmp_path / "sent"
    Path(store.logs("r1"), f"{0:020d}.log").write_bytes(b"x" * 25)
    reads = iter(range(20))

    def endless(_: str, offset: int) -> tuple[int, bytes]:
        if next(reads, None) is None:
            line.controller.close()  # the peer has had enough
            return offset, b""
        return offset, b"x" * 10

    monkeypatch.setattr(logs, "read", endless)
    monkeypatch.setattr(logs, "tail", lambda *_: b"")
    monkeypatch.setattr(follow, "_TURN", 10)
    with sent.open("wb") as file:
        if live:
            with pytest.raises(Gone):
                followed(store, line.caller(), file.fileno())
        else:
            followed(store, line.caller(), file.fileno(), live=False)
    kinds = b"".join(frame.kind for frame in frames(sent.read_bytes()))
    assert kinds == b"DN" + b"D" * 19 if live else b"DNDDE"


def test_the_end_of_a_run_comes_behind_all_of_its_log(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sent = on(tmp_path, state="failed", cgroup=""), tmp_path / "sent"
    data = bytes(range(200))
    Path(store.logs("r1"), f"{0:020d}.log").write_bytes(data)
    monkeypatch.setattr(follow, "_TURN", 10)
    monkeypatch.setattr(logs.read, "__defaults__", (7,))
    with sent.open("wb") as file:
        followed(store, line.caller(), file.fileno())
    found = frames(sent.read_bytes())
    assert b"".join(frame.payload for frame in found[:-1]) == data
    assert (found[-1].kind, found[-1].offset) == (wire.END, 200)


def test_no_text_stands_among_frames(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure after the answer ends the connection, and the controller asks again."""
    store = on(tmp_path, state="running")

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(logs, "read", fails)
    said = served(store, {"action": "follow", "run_id": "r1"}, line, code=1)
    assert wire.find_answer(said, MARKER)["record"]["run_id"] == "r1"
    assert frames(said) == []
    assert "Input/output error" in capsys.readouterr().err


# --- the grace that a person asks for -------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "given"), [(None, 30.0), (5, 5.0), (600, 600.0)])
def test_the_grace_of_a_stop_is_the_one_that_was_asked_for(asked: float | None, given: float) -> None:
    intent = {"kind": "stop", "grace": asked}
    assert supervise.Supervisor._grace(good(), intent) == given
    assert supervise.Supervisor._grace(good(), {**intent, "kind": "failed"}) == 10.0


@pytest.mark.parametrize(
    ("graces", "given"),
    [
        ((5, None), 50),
        ((600, None), 620),
        # A stop with a long grace is on: one more is not to cut it short.
        ((None, 600), 620),
        ((5, 600), 620),
    ],
)
def test_a_stop_is_waited_for_as_long_as_its_grace(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch, graces: tuple[int | None, int | None], given: int
) -> None:
    """The wait itself advances the test's clock; nothing is killed before the grace period ends."""
    now, killed = [1000.0], list[float]()
    began = now[0]

    def pause(_self: Caller, _seconds: float) -> None:
        now[0] += 1

    def call(command: list[str], _limit: float) -> tuple[int, str]:
        assert command[:2] == ["systemctl", "kill"]
        killed.append(now[0] - began)
        return 0, ""

    monkeypatch.setattr("tpu_ops.host.actions.os.kill", lambda *_: None)
    monkeypatch.setattr("tpu_ops.host.actions.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Caller, "pause", pause)
    monkeypatch.setattr("tpu_ops.host.actions.unit.call", call)
    asked, earlier = graces
    request = {"protocol": wire.PROTOCOL, "run_id": "r1"} | ({} if asked is None else {"grace": asked})
    intent = None if earlier is None else {"kind": "stop", "grace": earlier}
    with pytest.raises(wire.Refused, match="did not end within") as raised:
        actions.stop(request, on(tmp_path, state="ending", intent=intent), line.caller(attended=False))
    assert killed == [given + 1]
    assert "only a reboot" in raised.value.fix


def test_a_supervisor_that_ends_just_before_it_is_told_is_no_fault(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on(tmp_path, state="running")

    def gone(*_: object) -> None:
        store.write(dict(store.read("r1") or {}, state="succeeded"))
        raise ProcessLookupError

    monkeypatch.setattr("tpu_ops.host.actions.os.kill", gone)
    said = served(store, {"action": "stop", "run_id": "r1"}, line, attended=False)
    assert wire.find_answer(said, MARKER)["record"]["state"] == "succeeded"


def test_a_start_whose_asker_has_gone_starts_nothing(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C, the user was told that the run is not active."""
    monkeypatch.setattr(unit, "call", lambda *_: pytest.fail("it is started"))
    store = Store(str(tmp_path))
    assert served(store, {"action": "start", "spec": good(run_id="r1")}, line) == b""
    assert (store.read("r1"), list(Path(store.run_dir, "specs").iterdir())) == (None, [])


@pytest.mark.parametrize(
    ("known", "description", "ended"),
    [
        ("its own", "tpu_ops run r1", False),
        ("nothing", "tpu_ops run r1", True),
        ("nothing", "tpu_ops run r2", False),
        # Of the same run, at the same moment: it is that request's to answer for.
        ("another request's", "tpu_ops run r1", False),
    ],
)
def test_a_start_that_systemd_takes_long_over_goes_on_or_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str, description: str, ended: bool
) -> None:
    """A start that was only refused would run later without anybody's knowledge."""
    called: list[list[str]] = []
    store = Store(str(tmp_path))

    def call(command: list[str], _limit: float) -> tuple[int, str]:
        called.append(command)
        if command[0] == "systemd-run":
            if known != "nothing":
                on(tmp_path, marker=MARKER if known == "its own" else "of another request")
            raise wire.Refused("failed", "systemd did not answer")
        return 0, description if "show" in command else ""

    monkeypatch.setattr(unit, "call", call)
    begin = lambda: actions._start_unit(store, spec.check(good(run_id="r1")), MARKER, SimpleNamespace(pause=print))  # type: ignore[arg-type] # noqa: E731
    if known == "its own":
        begin()
    else:
        with pytest.raises(wire.Refused, match="did not answer"):
            begin()
    assert (called[-1][:2] == ["systemctl", "stop"]) is ended


@pytest.mark.parametrize("begins", [True, False])
def test_a_stop_waits_for_a_start_that_has_no_record_yet(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    store = Store(str(tmp_path))
    spec_files.put(store.run_dir, spec.check(good(run_id="r1")), os.getuid(), os.getuid(), MARKER)
    waited: list[float] = []

    def pause(_self: Caller, seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            if begins:
                on(tmp_path)
            spec_files.discard(store.run_dir, "r1", MARKER)

    def end(*_: object) -> None:
        store.write(dict(store.read("r1") or {}, state="refused"))

    monkeypatch.setattr(Caller, "pause", pause)
    monkeypatch.setattr("tpu_ops.host.actions.os.kill", end)
    answer = wire.find_answer(served(store, {"action": "stop", "run_id": "r1"}, line, attended=False), MARKER)
    if begins:
        assert answer["record"]["state"] == "refused"
    else:
        assert answer["error"]["kind"] == "missing"
    assert len(waited) == 3


@pytest.mark.parametrize(("attempt", "kind"), [(2, "missing"), (1, "")])
def test_giving_up_a_start_leaves_an_ended_earlier_attempt_alone(
    tmp_path: Path, line: Line, attempt: int, kind: str
) -> None:
    store = on(tmp_path, state="failed")
    request = {"action": "stop", "run_id": "r1", "attempt": attempt, "reason": "not started: w1"}
    answer = wire.find_answer(served(store, request, line, attended=False), MARKER)
    assert (answer.get("error") or {}).get("kind", "") == kind
    assert (store.read("r1") or {})["stop_requested_by"] == "", "nobody wants that the run does not go on"


def test_a_stopped_run_is_not_started_again_by_an_outdated_recovery(tmp_path: Path, line: Line) -> None:
    store = on(tmp_path, state="failed", stop_requested_by="ada", marker="another request's")
    request = {"action": "start", "spec": good(run_id="r1", attempt=2)}
    answer = wire.find_answer(served(store, request, line, attended=False), MARKER)
    assert answer["error"]["message"] == "run r1 was stopped by ada"


def test_a_stop_of_a_run_that_the_host_went_down_under_is_kept(tmp_path: Path, line: Line) -> None:
    store = on(tmp_path, state="running", init_start=-1)
    answer = wire.find_answer(served(store, {"action": "stop", "run_id": "r1"}, line, attended=False), MARKER)
    assert (answer["already"], answer["record"]["state"]) == (True, "lost")
    found = store.observe("r1") or {}
    assert (found["state"], found["stop_requested_by"]) == ("lost", myself().name)


def test_a_stop_during_the_last_write_of_a_record_is_kept(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpu_ops.host.after.chips_after", lambda: {"holders": []})
    # Its supervisor is this process, and lives.
    store = on(tmp_path, state="failed")
    served(store, {"action": "stop", "run_id": "r1"}, line, attended=False)
    assert (store.read("r1") or {})["stop_requested_by"] == ""
    after(store, "r1")
    assert (store.read("r1") or {})["stop_requested_by"] == myself().name


@pytest.mark.parametrize("own", [True, False], ids=["of its own start", "of the next attempt"])
@pytest.mark.parametrize("state", ["running", "failed"])
def test_the_clean_up_after_a_run_takes_only_its_own_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, own: bool
) -> None:
    monkeypatch.setattr("tpu_ops.host.after.chips_after", lambda: {"holders": []})
    store, marker = on(tmp_path, state=state), MARKER if own else MARKER[::-1]
    spec_files.put(store.run_dir, good(run_id="r1", attempt=1 if own else 2), os.getuid(), os.getuid(), marker)
    after(store, "r1", MARKER)
    assert spec_files.waits(store.run_dir, "r1", marker) is not own


@pytest.mark.parametrize("first", [True, False])
def test_a_users_request_comes_before_a_recoverys(tmp_path: Path, first: bool) -> None:
    store, told = Store(str(tmp_path)), [{"kind": "stop", "requested": True}, {"kind": "stop", "requested": False}]
    for intent in told if first else reversed(told):
        store.put_intent("r1", intent)
    assert store.take_intent("r1") == told[0]
    assert list(Path(store.run_dir, "intents").iterdir()) == []


@pytest.mark.parametrize(("state", "wish"), [("failed", True), ("stopped", True), ("succeeded", False)])
def test_a_stop_of_an_ended_run_prevents_further_attempts(tmp_path: Path, line: Line, state: str, wish: bool) -> None:
    store = on(tmp_path, state=state, supervisor={"pid": os.getpid(), "start": -1})
    answer = wire.find_answer(served(store, {"action": "stop", "run_id": "r1"}, line, attended=False), MARKER)
    found = store.read("r1") or {}
    assert (answer["already"], found["state"]) == (True, state)
    assert found["stop_requested_by"] == (myself().name if wish else "")


@pytest.mark.parametrize("state", ["stopped", "running"])
def test_a_stop_leaves_the_next_run_alone_which_has_the_same_unit(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The record shows the run as ended, or is gone, while the next run has the same control group."""
    monkeypatch.setattr(unit, "call", lambda *_: pytest.fail("the next run is killed"))
    (tmp_path / "cgroup").mkdir()
    store = on(tmp_path, state="running", cgroup=str(tmp_path / "cgroup"))
    other = {"run_id": "r2", "supervisor": {"pid": os.getpid(), "start": -1}}
    monkeypatch.setattr(Store, "holder", lambda _: other)

    def end(*_: object) -> None:
        store.write(dict(store.read("r1") or {}, state=state))

    monkeypatch.setattr("tpu_ops.host.actions.os.kill", end)
    answer = wire.find_answer(served(store, {"action": "stop", "run_id": "r1"}, line, attended=False), MARKER)
    assert answer["record"]["state"] == state


def test_a_repeated_start_waits_until_the_port_of_the_hub_is_known(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on(tmp_path, **{key: good(**PAIR)[key] for key in ("rank", "world_size", "workers")})

    def pause(_self: Caller, _seconds: float) -> None:
        store.write(dict(store.read("r1") or {}, port=8503))

    monkeypatch.setattr(Caller, "pause", pause)
    again = {"action": "start", "spec": good(run_id="r1", **PAIR), "reserve": True}
    answer = wire.find_answer(served(store, again, line, attended=False), MARKER)
    assert answer["record"]["port"] == 8503


def test_a_systemd_that_hangs_is_said(tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "start_command", lambda *_: ["sleep", "60"])
    monkeypatch.setattr(unit, "START_LIMIT", 0.1)
    monkeypatch.setattr(actions, "_SYSTEMD_LIMIT", 0.1)
    said = served(Store(str(tmp_path)), {"action": "start", "spec": good()}, line, attended=False)
    error = wire.find_answer(said, MARKER)["error"]
    assert (error["kind"], "systemd did not answer `sleep`" in error["message"]) == ("failed", True)
    assert "systemctl list-jobs" in error["fix"]


# --- a request that comes again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["starting", "running", "refused"])
def test_a_start_whose_connection_broke_is_answered_when_it_is_sent_again(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(actions, "_start_unit", lambda *_: pytest.fail("it has been started"))
    changes: dict[str, Any] = {"state": state, "port": 8503, "began": time.time() if state == "running" else None}
    store = on(tmp_path, **changes, reason="no such program" if state == "refused" else "", blamed=[1])
    lock = store.lock(rank_record.holder_of(store.read("r1") or {}))
    assert lock is not None
    again = {"action": "start", "spec": good(run_id="r1"), "reserve": True}
    answer = wire.find_answer(served(store, again, line, attended=False), MARKER)
    lock.close()
    if state == "refused":
        assert (answer["error"]["message"], answer["error"]["blamed"]) == ("no such program", [1])
    else:
        assert (answer["record"]["state"], answer["record"]["port"]) == (state, 8503)


def test_a_start_that_is_sent_again_waits_for_what_the_first_one_began(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor has not taken the spec yet."""
    store, asked = Store(str(tmp_path)), good(run_id="r1")
    spec_files.put(store.run_dir, asked, os.getuid(), os.getuid(), MARKER)

    def pause(*_: object) -> None:
        spec_files.discard(store.run_dir, "r1", MARKER)
        on(tmp_path, state="running", began=time.time())

    monkeypatch.setattr(Caller, "pause", pause)
    monkeypatch.setattr(actions, "_start_unit", lambda *_: pytest.fail("it is being started"))
    said = served(store, {"action": "start", "spec": asked}, line, attended=False)
    assert wire.find_answer(said, MARKER)["record"]["state"] == "running"


@pytest.mark.parametrize("waits", [True, False], ids=["its spec waits", "its record is there"])
def test_a_repeated_start_gets_the_answer_of_the_first_one(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The first start arrives while the second one checks whether there was one."""
    store, asked, sweep = Store(str(tmp_path)), good(run_id="r1"), spec_files.sweep

    def first(*words: Any) -> None:
        sweep(*words)
        spec_files.put(store.run_dir, asked, os.getuid(), os.getuid(), MARKER)

    def put(*_: object) -> None:
        began()
        raise wire.Refused("held", "run r1 is already being started on this worker")

    def began(*_: object) -> None:
        on(tmp_path, state="running", began=time.time())
        spec_files.discard(store.run_dir, "r1", MARKER)

    monkeypatch.setattr(spec_files, "sweep", first)
    if not waits:
        monkeypatch.setattr(spec_files, "put", put)
        monkeypatch.setattr(spec_files, "sweep", sweep)
    monkeypatch.setattr(Caller, "pause", began)
    monkeypatch.setattr(actions, "_start_unit", lambda *_: pytest.fail("it is being started"))
    said = served(store, {"action": "start", "spec": asked}, line, attended=False)
    assert wire.find_answer(said, MARKER)["record"]["state"] == "running"


@pytest.mark.parametrize("has_lock", [True, False], ids=["its run has the worker", "its record is read"])
def test_a_repeated_start_is_not_refused_because_of_its_own_run(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch, has_lock: bool
) -> None:
    """The first start has progressed since the second one checked whether there was one."""
    store = Store(str(tmp_path))

    def holder(*_: object) -> dict[str, Any] | None:
        on(tmp_path, state="running", began=time.time())
        return rank_record.holder_of(store.read("r1") or {}) if has_lock else None

    monkeypatch.setattr(Store, "holder", holder)
    monkeypatch.setattr(actions, "_start_unit", lambda *_: pytest.fail("it is being started"))
    said = served(store, {"action": "start", "spec": good(run_id="r1")}, line, attended=False)
    assert wire.find_answer(said, MARKER)["record"]["state"] == "running"


def test_a_repeated_start_waits_only_once_for_a_missing_supervisor(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked, clock = Store(str(tmp_path)), good(run_id="r1"), [100.0]
    spec_files.put(store.run_dir, asked, os.getuid(), os.getuid(), MARKER)

    def pause(_: object, seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(actions, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(Caller, "pause", pause)
    said = served(store, {"action": "start", "spec": asked}, line, attended=False)
    error = wire.find_answer(said, MARKER)["error"]
    assert (error["kind"], "is already being started on this worker" in error["message"]) == ("held", True)
    assert clock[0] - 100.0 == pytest.approx(unit.START_LIMIT, abs=0.1)


def test_a_start_that_comes_again_meets_the_spec_until_there_is_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, seen = Store(str(tmp_path)), []
    alone = good(run_id="r1", rank=0, world_size=1, workers=["pod-w0"], net=None)
    spec_files.put(store.run_dir, spec.check(alone), os.getuid(), os.getuid(), MARKER)
    write = Store.write

    def written(one: Store, found: dict[str, Any]) -> None:
        seen.append(spec_files.waits(store.run_dir, "r1", MARKER))
        write(one, found)

    def prepare(*_: object) -> None:
        seen.append(spec_files.waits(store.run_dir, "r1", MARKER))
        raise wire.Refused("failed", "no more of it is wanted")

    monkeypatch.setattr(Store, "write", written)
    monkeypatch.setattr(supervise.Supervisor, "_prepare", prepare)
    monkeypatch.setattr(supervise.Supervisor, "_finish", lambda *_, **__: None)
    monkeypatch.setattr("tpu_ops.host.supervise.environment.load_config", dict)
    monkeypatch.setattr("tpu_ops.host.supervise.signal.pthread_sigmask", lambda *_: None)
    assert supervise.Supervisor(store, "r1").run() == 1
    assert seen == [True, False], "before the record, and behind it"


@pytest.mark.parametrize("changes", [{"marker": "another-start"}, {"asked_by": os.getuid() + 1}])
def test_another_start_of_the_same_name_is_refused(tmp_path: Path, line: Line, changes: dict[str, Any]) -> None:
    store = on(tmp_path, state="running", **changes)
    lock = store.lock(rank_record.holder_of(store.read("r1") or {}))
    assert lock is not None
    said = served(store, {"action": "start", "spec": good(run_id="r1")}, line, attended=False)
    lock.close()
    assert wire.find_answer(said, MARKER)["error"]["kind"] == "held"


# --- what is sent by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "key"),
    [
        ({"action": "stop", "run_id": 5}, "run_id"),
        ({"action": "stop", "run_id": ["r1"], "grace": "x"}, "grace"),
        ({"action": "stop", "run_id": "r1", "grace": "x"}, "grace"),
        ({"action": "stop", "run_id": "r1", "grace": True}, "grace"),
        ({"action": "stop", "run_id": "r1", "attempt": "one"}, "attempt"),
        ({"action": "status", "count": "many"}, "count"),
        ({"action": "status", "count": [1]}, "count"),
        ({"action": "status", "count": 2**70}, "count"),
        ({"action": "probe", "chips": "four"}, "chips"),
        ({"action": "probe", "chips": {}, "venv": 7}, "chips"),
        ({"action": "probe", "user": "a\0b"}, "user"),
        ({"action": "probe", "venv": "\ud800"}, "venv"),
        ({"action": "follow", "run_id": "r1", "offset": "0"}, "offset"),
        ({"action": "follow", "run_id": "r1", "offset": 1e400}, "offset"),
        ({"action": "follow", "run_id": "r1", "since": "yesterday"}, "since"),
        ({"action": "follow", "run_id": "r1", "notes": {}}, "notes"),
        ({"action": "unlock", "processes": 7}, "processes"),
        ({"action": "unlock", "user": 0.5}, "user"),
    ],
    ids=json.dumps,
)
def test_a_request_of_wrong_types_is_refused_and_the_key_is_named(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any], key: str
) -> None:
    monkeypatch.setattr("tpu_ops.host.actions.os.kill", lambda *_: pytest.fail("it is carried out"))
    said = served(on(tmp_path, state="running"), request_, line, attended=False)
    error = wire.find_answer(said, MARKER)["error"]
    assert (error["kind"], f"the request's {key} is " in error["message"]) == ("invalid", True), error


def test_a_key_that_is_null_or_unknown_is_none(tmp_path: Path, line: Line) -> None:
    request = {"action": "status", "run_id": None, "count": None, "colour": "green"}
    answer = wire.find_answer(served(on(tmp_path, state="failed"), request, line, attended=False), MARKER)
    assert [record["run_id"] for record in answer["records"]] == ["r1"]
