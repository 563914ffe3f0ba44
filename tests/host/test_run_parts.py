"""The parts of a run on a worker that need no systemd: spec, environment, records, logs, verdicts, rights."""

from __future__ import annotations

import errno
import json
import os
import pwd
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tpu_ops.host import actions, child, environment, logs, person, proc, record, spec, unit
from tpu_ops.host.ending import end_tree
from tpu_ops.host.store import Store
from tpu_ops.host.wire import Refused


def good_net(**changes: Any) -> dict[str, Any]:
    return {"address": "10.0.0.1", "hub": "10.0.0.0", "port": 8500, "key": "0f" * 32} | changes


def good(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "run_id": "digits-1",
        "attempt": 1,
        "rank": 1,
        "world_size": 4,
        "node": "pod",
        "slice": 0,
        "slices": 1,
        "worker": "pod-w1",
        "workers": ["pod-w0", "pod-w1", "pod-w2", "pod-w3"],
        "argv": ["python", ""],
        "env": {"A": "1"},
        "secrets": {"S": "hush"},
        "user": "",
        "cwd": "",
        "venv": "",
        "grace_failure": 10,
        "grace_stop": 30.0,
        "barrier": 60,
        "lease": 15.0,
        "exit_skew": 300,
        "net": good_net(),
        "code_digest": "",
        "started_from": "x",
    }
    return found | changes


def myself() -> person.Person:
    return person.Person(pwd.getpwuid(os.getuid()))


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "../x"},
        {"run_id": "Upper"},
        {"run_id": "a b"},
        {"run_id": "x\n"},
        {"rank": 4},
        {"rank": True},
        {"argv": []},
        {"argv": [""]},
        {"argv": ["a\0b"]},
        {"argv": [1]},
        {"argv": "ls"},
        {"env": {"A=B": "1"}},
        {"env": {"A": None}},
        {"secrets": {"../x": "1"}},
        {"secrets": {"A": 1}},
        {"secrets": {"A": "a\0b"}},
        {"secrets": {"A": "x" * (spec.MAX_SECRET + 1)}},
        {"grace_stop": -1},
        {"grace_stop": float("nan")},
        {"lease": 4},
        {"barrier": float("inf")},
        {"exit_skew": "1"},
        {"workers": ["pod-w0"]},
        {"workers": [0, 1, 2, 3]},
        {"net": None},
        {"world_size": 1, "rank": 0, "workers": ["pod-w0"]},
        {"net": good_net(key="0f")},
        {"net": good_net(address="pod-w1")},
        {"net": good_net(address="::")},
        {"net": good_net(hub="224.0.0.1")},
        {"net": good_net(port=0)},
        {"net": good_net(port=True)},
        {"net": good_net(uid=0)},
        {"rank": 0},
        {"slice": 1},
        {"slices": 0},
        {"slices": 2, "slice": 1},
        {"slices": 3},
        {"slices": 8},
        {"uid": 0},
    ],
)
def test_a_spec_that_cannot_be_carried_out_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        spec.check(good(**changes))


def test_a_spec_is_readable_by_root_alone_and_gone_when_taken(tmp_path: Path) -> None:
    spec.put(str(tmp_path), good(), 1000, 1001)
    path = Path(spec.path_of(str(tmp_path), "digits-1"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(Refused, match="being started"):
        spec.put(str(tmp_path), good(), 1000, 1001)
    assert spec.take(str(tmp_path), "digits-1") == (good(), 1000, 1001)
    assert not path.exists()


def test_specs_of_dead_starters_are_swept(tmp_path: Path) -> None:
    spec.put(str(tmp_path), good(), 0, 0)
    spec.sweep(str(tmp_path), time.time() + spec.STALE_AFTER - 5)
    assert Path(spec.path_of(str(tmp_path), "digits-1")).exists()
    spec.sweep(str(tmp_path), time.time() + spec.STALE_AFTER + 5)
    assert not Path(spec.path_of(str(tmp_path), "digits-1")).exists()


def test_all_ranks_of_a_run_have_one_digest() -> None:
    assert spec.digest(good()) == spec.digest(good(rank=2, worker="pod-w2", net=None))
    assert spec.digest(good()) != spec.digest(good(argv=["other"]))


def test_nothing_that_stays_follows_from_the_value_of_a_secret() -> None:
    other = good(secrets={"S": "other"})
    assert spec.digest(good()) == spec.digest(other) != spec.digest(good(secrets={}))
    assert record.new_record(good(), myself(), 0)["secret_names"] == ["S"]
    assert "hush" not in json.dumps(record.new_record(good(), myself(), 0))


def test_secrets_are_files_of_the_person_until_they_are_dropped(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.drop_secrets()
    store.put_secrets({"OLD": "left behind"}, myself())
    folder = Path(store.secrets_dir)
    told = {"S": "\udcff\n", "S_FILE": str(folder / "S")}
    assert store.put_secrets({"S": "\udcff\n"}, myself()) == told
    assert [path.name for path in folder.iterdir()] == ["S"]
    assert (folder / "S").read_bytes() == b"\xff\n"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "S")] == [0o711, 0o600]
    assert (folder / "S").stat().st_uid == os.getuid()
    store.drop_secrets()
    assert list(folder.iterdir()) == []


def test_the_environment_is_built_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "inherited")
    monkeypatch.setenv("LD_PRELOAD", "inherited")
    asked = good(env={"A": "\udcff", "JAX_PLATFORMS": "mine", "TPU_OPS_RANK": "9"})
    from_host = {"JAX_PLATFORMS": "cpu", "TPU_WORKER_ID": "1", "MEGASCALE_SLICE_ID": ""}
    stale = {"MEGASCALE_NUM_SLICES": "2"}
    env = environment.build(asked, myself(), "/opt/v", from_host | stale, "/files")
    assert env[b"MEGASCALE_SLICE_ID"] == b""
    assert env[b"A"] == b"\xff"
    assert env[b"JAX_PLATFORMS"] == b"mine"
    assert env[b"TPU_WORKER_ID"] == b"1"
    assert env[b"TPU_OPS_RANK"] == b"1"
    assert env[b"PATH"].startswith(b"/opt/v/bin:/usr/local/sbin:")
    expected = {"HOME", "USER", "LOGNAME", "SHELL", "LANG", "PATH", "PYTHONUNBUFFERED", "VIRTUAL_ENV", *from_host, "A"}
    own = {"RUN_ID", "ATTEMPT", "RANK", "WORLD_SIZE", "NODE", "SLICE", "SLICES", "RUN_DIR"}
    assert {name.decode() for name in env} == expected | {f"TPU_OPS_{name}" for name in own}


def test_slices_of_one_run_are_told_how_to_find_each_other_by_this_attempt_alone() -> None:
    asked = good(slices=2, rank=2, slice=1, net=good_net(hub="10.0.0.9"), env={"MEGASCALE_NUM_SLICES": "7"})
    stale = {"MEGASCALE_COORDINATOR_ADDRESS": "10.9.9.9", "MEGASCALE_SLICE_ID": "5", "MEGASCALE_PORT": "8081"}
    env = environment.build(spec.check(asked), myself(), "", stale, "/files")
    assert {name: value for name, value in env.items() if name.startswith(b"MEGASCALE")} == {
        b"MEGASCALE_COORDINATOR_ADDRESS": b"10.0.0.9",
        b"MEGASCALE_NUM_SLICES": b"2",
        b"MEGASCALE_SLICE_ID": b"1",
        b"MEGASCALE_PORT": b"8081",
    }


def test_environment_files_keep_empty_values_and_skip_comments() -> None:
    text = "# x=1\nA=\nB='two words'\n C = c=d \n\nnonsense\nD=\"q\"\n"
    assert environment.parse_file(text) == {"A": "", "B": "two words", "C": "c=d", "D": "q"}


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        (None, range(8500, 8520)),
        ([9000, 9000], range(9000, 9001)),
        ([8430, 8440], None),
        ([8490, 8500], None),
        ([8000, 8100], None),
        ([32000, 32768], None),
        ([80, 90], None),
        ([9001, 9000], None),
        ([9000], None),
        (["a", "b"], None),
        (9000, None),
    ],
)
def test_the_ports_of_a_run_are_a_small_range_that_nobody_else_uses(
    tmp_path: Path, ports: object, expected: range | None
) -> None:
    path = tmp_path / "launcher.json"
    path.write_text(json.dumps({"ports": ports}))
    if expected is not None:
        assert environment.load_config(str(path))["ports"] == expected
        return
    with pytest.raises(Refused, match=r"launcher\.json"):
        environment.load_config(str(path))


@pytest.mark.parametrize(("text", "port"), [(b"8482", 8482), (b"", None), (b"0", None), (b"x", None), (b"70000", None)])
def test_the_coordinators_port_is_a_port(text: bytes, port: int | None) -> None:
    assert environment.coordinator_port({}) == 8482
    if port:
        assert environment.coordinator_port({b"JAX_COORDINATOR_PORT": text}) == port
        return
    with pytest.raises(Refused, match="JAX_COORDINATOR_PORT"):
        environment.coordinator_port({b"JAX_COORDINATOR_PORT": text})


def test_a_missing_environment_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"absent: No such file"):
        environment.from_files([str(tmp_path / "absent")])


@pytest.mark.parametrize(
    ("status", "intent", "state", "ending"),
    [
        (0, None, "succeeded", {"code": 0}),
        (3 << 8, None, "failed", {"code": 3}),
        (9, None, "failed", {"signal": 9}),
        (64, None, "failed", {"signal": 64}),
        (34, None, "failed", {"signal": 34}),
        (0, {"reason": "stopped by ada"}, "stopped", {"code": 0}),
        (15, {"reason": "x"}, "stopped", {"signal": 15}),
        (None, {"reason": "x"}, "stopped", None),
        (None, None, "failed", None),
    ],
)
def test_only_an_own_exit_with_0_succeeds(status: int | None, intent: Any, state: str, ending: Any) -> None:
    found = record.verdict(status, intent)
    assert (found["state"], found["exit"]) == (state, ending)


@pytest.mark.parametrize(
    ("ending", "oom", "text"),
    [
        ({"code": 3}, False, "exit code 3"),
        ({"signal": 9}, False, "killed by SIGKILL"),
        ({"signal": 9}, True, "killed by SIGKILL: out of memory"),
        ({"signal": 40}, False, "killed by signal 40"),
        ({"code": 137}, True, "exit code 137: out of memory"),
    ],
)
def test_a_cause_is_said_in_words(ending: dict[str, int], oom: bool, text: str) -> None:
    assert record.cause_of(ending, oom) == text


@pytest.mark.parametrize(
    ("name", "text", "cgroup"),
    [
        (
            "sys/fs/cgroup/system.slice/tpu-run.service/memory.events",
            "low 0\noom 3\noom_kill 2\n",
            "0::/system.slice/tpu-run.service",
        ),
        (
            "sys/fs/cgroup/memory/u/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            "5:cpu:/u\n4:memory:/u\n0::/u",
        ),
    ],
)
def test_kills_for_want_of_memory_are_counted(tmp_path: Path, name: str, text: str, cgroup: str) -> None:
    assert proc.oom_kills(str(tmp_path), cgroup) == 0
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert proc.oom_kills(str(tmp_path), cgroup) == 2


def test_nothing_of_the_person_stands_in_the_unit() -> None:
    command = unit.start_command("/usr/local/lib/tpu_ops/0123/tpu-host", "digits-1", 30)
    assert "--property=KillMode=mixed" in command
    assert "--property=TimeoutStopSec=45" in command
    assert "--property=CollectMode=inactive-or-failed" in command
    assert command[-4:] == ["-IS", "/usr/local/lib/tpu_ops/0123/tpu-host", "supervise", "digits-1"]
    assert not any(char in word for word in command for char in "$%")


# --- records ------------------------------------------------------------------------------------------------


def recorded(store: Store, **changes: Any) -> dict[str, Any]:
    boot, init_start = store.boot()
    record = {
        "run_id": "r1",
        "state": "running",
        "since": time.time(),
        "boot_id": boot,
        "init_start": init_start,
        "supervisor": {"pid": os.getpid(), "start": proc.start_time(os.getpid())},
        **changes,
    }
    store.prepare("r1", os.getuid(), os.getgid())
    store.write(record)
    return record


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "running"),
        ({"boot_id": "another"}, "lost"),
        ({"init_start": -1}, "lost"),
        ({"supervisor": {"pid": 1, "start": -1}}, "lost"),
        ({"boot_id": "another", "state": "succeeded"}, "succeeded"),
    ],
)
def test_what_died_without_a_word_is_lost(tmp_path: Path, changes: dict[str, Any], state: str) -> None:
    store = Store(str(tmp_path))
    recorded(store, **changes)
    record = store.observe("r1")
    assert record is not None
    assert record["state"] == state


def test_a_later_attempt_sets_aside_what_the_last_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    monkeypatch.setattr("tpu_ops.host.store.KEPT_ATTEMPTS", 2)
    for attempt in (1, 2, 3, 5):
        recorded(store, attempt=attempt, state="failed")
        Path(store.logs("r1"), f"{attempt:020d}.log").write_text(str(attempt))
        # What the person keeps is the person's.
        assert Path(store.files("r1"), "checkpoint").exists() == (attempt != 1)
        Path(store.files("r1"), "checkpoint").touch()
    newest = store.read("r1")
    assert newest is not None
    assert newest["attempt"] == 5
    assert logs.read(store.logs("r1"), 0)[1] == b"5"
    aside = Path(store.directory("r1"), "attempts")
    assert sorted(path.name for path in aside.iterdir()) == ["2", "3"]
    assert json.loads((aside / "3" / "record.json").read_text())["attempt"] == 3
    assert [path.read_text() for path in (aside / "3" / "log").iterdir()] == ["3"]
    assert [record["attempt"] for record in store.recent(10)] == [5]


@pytest.mark.parametrize(
    ("attempt", "uid", "refused"),
    [
        (3, 0, ""),
        (2, 0, "attempt 2 of run r1 has been on this worker before"),
        (1, 0, "run r1 has been on this worker before"),
        (3, 1, "run r1 has been on this worker before"),
    ],
)
def test_a_run_comes_back_with_a_later_attempt_of_its_person_only(attempt: int, uid: int, refused: str) -> None:
    earlier = {"run_id": "r1", "attempt": 2, "person": {"uid": os.getuid() + uid}}
    asked = good(run_id="r1", attempt=attempt)
    if not refused:
        actions._check_earlier(earlier, asked, myself())
        return
    with pytest.raises(Refused, match=refused):
        actions._check_earlier(earlier, asked, myself())


def test_a_run_of_unknown_name_has_no_record(tmp_path: Path) -> None:
    assert Store(str(tmp_path)).observe("never") is None
    assert Store(str(tmp_path)).recent(5) == []


def test_one_lock_names_its_holder_as_long_as_it_lives(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    own = {"pid": os.getpid(), "start": proc.start_time(os.getpid())}
    lock = store.lock({"run_id": "r1", "person": "ada", "uid": 1, "since": 2.0, "supervisor": own})
    assert lock is not None
    assert store.lock({}) is None
    holder = store.holder()
    assert holder is not None
    assert (holder["run_id"], holder["person"]) == ("r1", "ada")
    lock.close()
    gone = store.lock({"run_id": "r2", "supervisor": {"pid": 1, "start": -1}})
    assert gone is not None
    assert store.holder() is None


def test_the_first_intent_stays(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put_intent("r1", {"kind": "failed"})
    store.put_intent("r1", {"kind": "stop"})
    assert store.take_intent("r1") == {"kind": "failed"}
    assert store.take_intent("r1") is None


class Someone(person.Person):
    """A person of the test's own making."""

    def __init__(self, uid: int, admin: bool) -> None:
        self.uid, self.name, self._admin = uid, f"u{uid}", admin

    @property
    def is_admin(self) -> bool:
        """As told."""
        return self._admin


@pytest.mark.parametrize(
    ("uid", "admin", "force", "allowed"),
    [(7, False, False, True), (8, False, True, False), (8, True, False, False), (8, True, True, True)],
)
def test_a_run_is_its_persons_and_an_insisting_administrators(
    uid: int, admin: bool, force: bool, allowed: bool
) -> None:
    if allowed:
        person.require_control(Someone(uid, admin), 7, "ada", force)
        return
    with pytest.raises(Refused, match="belongs to ada"):
        person.require_control(Someone(uid, admin), 7, "ada", force)


def test_files_are_opened_with_the_persons_own_rights(tmp_path: Path) -> None:
    somebody = person.Person(pwd.getpwnam("nobody")) if os.geteuid() == 0 else myself()
    before = (os.geteuid(), os.getegid(), os.getgroups())
    with person.acting_as(somebody):
        assert os.geteuid() == somebody.uid
    assert (os.geteuid(), os.getegid(), os.getgroups()) == before


def test_a_longer_grace_than_asked_for_is_never_taken() -> None:
    assert actions._intent({"grace": 5}, Someone(1, False))["grace"] == 5
    for wrong in (-1, True, "5", float("inf"), 10**9):
        assert "grace" not in actions._intent({"grace": wrong}, Someone(1, False))


# --- logs ---------------------------------------------------------------------------------------------------


def written(folder: Path, *pieces: bytes, segment: int = 10, total: int = logs.TOTAL) -> logs.Logger:
    source, sink = os.pipe()
    logger = logs.Logger(source, str(folder), segment, total)
    logger.start()
    for piece in pieces:
        os.write(sink, piece)
    os.close(sink)
    logger.join(10)
    assert not logger.is_alive()
    return logger


def everything(folder: Path, offset: int = 0) -> bytes:
    found = b""
    while True:
        start, data = logs.read(str(folder), offset, limit=7)
        if not data:
            return found
        assert start == offset
        found += data
        offset += len(data)


def test_a_log_is_read_from_any_offset_over_all_segments(tmp_path: Path) -> None:
    data = bytes(range(256)) * 2
    logger = written(tmp_path, data[:100], data[100:300], data[300:])
    assert logger.facts() == {"bytes": 512, "dropped": 0, "rotated": 0, "fault": ""}
    assert len(logs.segments(str(tmp_path))) > 1
    assert all(path == str(tmp_path / f"{offset:020d}.log") for offset, path in logs.segments(str(tmp_path)))
    for offset in (0, 1, 99, 100, 101, 300, 511, 512, 600):
        assert everything(tmp_path, offset) == data[offset:]
    assert logs.tail(str(tmp_path), 20) == data[-20:]


def test_a_reader_whose_segment_is_gone_starts_at_the_first_one_left(tmp_path: Path) -> None:
    written(tmp_path, b"a" * 10, segment=10)
    (tmp_path / f"{0:020d}.log").rename(tmp_path / f"{30:020d}.log")
    assert logs.read(str(tmp_path), 5) == (30, b"a" * 10)


def test_a_full_disk_drops_bytes_and_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{0:020d}.log").symlink_to("/dev/full")
    logger = written(tmp_path, b"x" * 1000)
    assert logger.facts() == {"bytes": 0, "dropped": 1000, "rotated": 0, "fault": "No space left on device"}
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_segments_go_once_the_log_has_its_size(tmp_path: Path) -> None:
    logger = written(tmp_path, b"a" * 25, b"b" * 30, segment=10, total=30)
    assert logger.facts() == {"bytes": 55, "dropped": 0, "rotated": 30, "fault": ""}
    assert logs.read(str(tmp_path), 0) == (30, b"b" * 10)
    assert everything(tmp_path, 30) == b"b" * 25
    assert len(list(tmp_path.glob("*.index"))) == len(logs.segments(str(tmp_path)))


class Disk:
    """Plays a disk that has room for so many bytes of logs; what is removed makes room again."""

    def __init__(self, folder: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.room, self.write = folder, room, os.write
        monkeypatch.setattr("tpu_ops.host.logs.os.write", self)

    def __call__(self, handle: int, data: bytes) -> int:
        if Path(f"/proc/self/fd/{handle}").readlink().suffix != ".log":
            return self.write(handle, data)
        free = self.room - sum(path.stat().st_size for path in self.folder.glob("*.log"))
        if free <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.write(handle, data[:free])


def test_on_a_full_disk_the_oldest_segment_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(tmp_path, 25, monkeypatch)
    logger = written(tmp_path, bytes(range(100)))
    assert (logger.dropped, logger.fault) == (0, "No space left on device")
    left = everything(tmp_path, logs.segments(str(tmp_path))[0][0])
    assert bytes(range(100)).endswith(left)
    assert len(left) >= 15


def test_bytes_that_had_no_room_are_missed_at_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, 4, monkeypatch)
    source, sink = os.pipe()
    logger = logs.Logger(source, str(tmp_path), 10)
    logger._append(b"abcdefgh")
    disk.room = 100
    logger._append(b"ijkl")
    os.close(sink)
    logger.run()
    assert (logger.dropped, logger.offset) == (4, 12)
    assert logs.read(str(tmp_path), 0) == (0, b"abcd")
    assert logs.read(str(tmp_path), 4) == (8, b"ijkl")
    assert logs.end(str(tmp_path)) == 12
    assert logs.tail(str(tmp_path), 6) == b"ijkl"


def test_a_time_means_the_first_byte_that_may_be_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 100.0}
    monkeypatch.setattr("tpu_ops.host.logs.time.time", lambda: clock["now"])
    monkeypatch.setattr("tpu_ops.host.logs.time.monotonic", lambda: clock["now"])
    source, sink = os.pipe()
    logger = logs.Logger(source, str(tmp_path), 10)
    for moment, data in ((100.0, b"abcd"), (110.0, b"efgh"), (110.5, b"ijkl"), (200.0, b"mnop")):
        clock["now"] = moment
        logger._append(data)
    os.close(sink)
    logger.run()
    found = [logs.since(str(tmp_path), moment) for moment in (0, 100, 105, 110, 111, 200, 300)]
    assert found == [0, 0, 4, 4, 10, 12, 16]
    assert logs.since(str(tmp_path / "none"), 5.0) == 0


# --- child and ending ---------------------------------------------------------------------------------------


def test_a_held_child_runs_nothing_until_it_may(tmp_path: Path) -> None:
    source, sink = os.pipe()
    env = {b"PATH": b"/usr/bin:/bin", b"X": b"\xff"}
    held = child.Child.fork(["sh", "-c", 'printf "%s" "$X"; pwd; kill -TERM $$'], env, str(tmp_path), myself(), sink)
    os.close(sink)
    os.set_blocking(source, False)
    with pytest.raises(BlockingIOError):
        os.read(source, 1)
    os.set_blocking(source, True)
    assert held.go() == ""
    with os.fdopen(source, "rb") as file:
        assert file.read() == b"\xff" + str(tmp_path).encode() + b"\n"
    assert os.WTERMSIG(os.waitpid(held.pid, 0)[1]) == 15


@pytest.mark.parametrize(
    ("argv", "cwd", "said"),
    [
        (["no-such-program"], "/", "no-such-program is not on PATH"),
        (["./x"], "/", "./x is no executable file"),
        (["/etc/passwd"], "/", "/etc/passwd is no executable file"),
        (["true"], "/no/such/directory", "working directory /no/such/directory: No such file"),
    ],
)
def test_what_cannot_be_executed_is_known_before_it_is_tried(argv: list[str], cwd: str, said: str) -> None:
    with Path(os.devnull).open("wb") as sink, pytest.raises(child.NotReady, match=said):
        child.Child.fork(argv, {b"PATH": b"/usr/bin:/bin"}, cwd, myself(), sink.fileno())


def test_a_child_whose_supervisor_is_gone_ends_without_running(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with Path(os.devnull).open("wb") as sink:
        held = child.Child.fork(["touch", str(mark)], {b"PATH": b"/usr/bin:/bin"}, "/", myself(), sink.fileno())
    os.close(held._go)
    os.waitpid(held.pid, 0)
    assert not mark.exists()


def test_the_tree_is_told_first_and_killed_after_the_grace(tmp_path: Path) -> None:
    """A directory of files plays the control group: this process and two others, one of which ignores SIGTERM."""
    ready = tmp_path / "ready"
    stubborn = subprocess.Popen(["sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.05; done"])
    polite = subprocess.Popen(["sleep", "60"])
    deadline = time.monotonic() + 10
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polls until the deadline
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n{stubborn.pid}\n{polite.pid}\n")
    begun = time.monotonic()
    assert end_tree(str(tmp_path), 0.4, time.sleep) == []
    assert time.monotonic() - begun >= 0.4
    assert (polite.wait(5), stubborn.wait(5)) == (-15, -9)
