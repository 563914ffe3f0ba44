"""The stacks of real processes: of Pythons, of other programs, and what is said where they cannot be read."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host.test_store import begun
from tpu_ops.host import ending, proc, spy, stacks
from tpu_ops.host.last_look import LastLook
from tpu_ops.host.store import Store
from tpu_ops.protocol import wire

#: A Python that every user can read, since py-spy does not read it as root.
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
WAITS = """
import threading, time
loads = threading.Event()
def in_loader(): loads.set(); time.sleep(600)
def in_training(): loads.wait(); print("ready", flush=True); time.sleep(600)
threading.Thread(target=in_loader, name="loader", daemon=True).start()
in_training()
"""
CHILDREN = """
import multiprocessing, time
def in_child(queue): queue.put(1); time.sleep(600)
if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    queue = multiprocessing.Queue()
    children = [multiprocessing.Process(target=in_child, args=(queue,), daemon=True) for _ in range(3)]
    for child in children: child.start()
    for _ in children: queue.get()
    print("ready", flush=True)
    children[0].join()
"""
WRITES_ITSELF = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1)
def in_training(): print("ready", flush=True); time.sleep(600)
in_training()
"""
#: In state D: its child opens a FIFO that nobody writes, before it would execute the program.
INSIDE_THE_KERNEL = """
import os, sys
waits = os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0
def start_loader(): os.posix_spawn("/bin/true", ["true"], {}, file_actions=[waits])
os.mkfifo(sys.argv[1])
print("ready", flush=True)
start_loader()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def public() -> Iterator[Path]:
    """Return a directory from which every user can execute programs."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture(scope="module")
def py_spy(public: Path) -> str:
    return str(shutil.copy(Path(sys.executable).with_name("py-spy"), public / "py-spy"))


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a program and waits until it has printed that it is ready."""
    begun: list[subprocess.Popen[str]] = []

    def started(*words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        begun.append(subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, start_new_session=True))
        stdout = begun[-1].stdout
        assert stdout is not None
        assert stdout.readline() == "ready\n"
        return begun[-1]

    yield started
    for process in begun:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def await_state(process: subprocess.Popen[str], state: str) -> None:
    deadline = time.monotonic() + 20
    while proc.process_state(process.pid) != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polls until the deadline


def functions(thread: dict[str, Any]) -> list[str]:
    return [function for function, _, _ in thread["frames"]]


def test_all_threads_of_a_python_have_stacks_the_main_thread_first(start: Start, py_spy: str) -> None:
    process = start(PYTHON, "-c", WAITS)
    [entry] = stacks.collect([process.pid], program=py_spy)["processes"]
    assert (entry["source"], entry["why"], entry["parent"]) == ("py-spy", "", os.getpid())
    assert entry["user"] == proc.person_name(os.getuid())
    assert entry["command"].startswith(f"{PYTHON} -c ")
    assert [thread["name"] for thread in entry["threads"]] == ["MainThread", "loader"]
    main, loader = entry["threads"]
    assert main["frames"] == [["in_training", "<string>", 5], ["<module>", "<string>", 7]]
    assert functions(loader)[0] == "in_loader"
    assert process.poll() is None


def test_children_of_a_python_have_stacks_of_their_own(start: Start, py_spy: str) -> None:
    process = start(PYTHON, "-c", CHILDREN)
    children = [pid for pid in proc.pids() if proc.parent(pid) == process.pid]
    found = stacks.collect([process.pid, *children], program=py_spy)
    assert [entry["source"] for entry in found["processes"]] == ["py-spy"] * 4
    assert all("in_child" in functions(entry["threads"][0]) for entry in found["processes"][1:])


def test_a_stopped_python_is_read_too(start: Start, py_spy: str) -> None:
    process = start(PYTHON, "-c", WAITS)
    os.kill(process.pid, signal.SIGSTOP)
    await_state(process, "T")
    [entry] = stacks.collect([process.pid], program=py_spy)["processes"]
    assert functions(entry["threads"][0])[0] == "in_training"
    assert proc.process_state(process.pid) == "T"


def test_a_python_inside_the_kernel_is_read_without_stopping_it(start: Start, py_spy: str, tmp_path: Path) -> None:
    process = start(PYTHON, "-c", INSIDE_THE_KERNEL, str(tmp_path / "fifo"))
    await_state(process, "D")
    before = time.monotonic()
    [entry] = stacks.collect([process.pid], program=py_spy)["processes"]
    assert time.monotonic() - before < spy.LIMIT
    assert (entry["source"], entry["why"], entry["state"]) == ("py-spy", "", "D")
    assert functions(entry["threads"][0]) == ["start_loader", "<module>"]
    assert entry["wait"] == proc.read_text(f"/proc/{process.pid}/wchan").strip("0")
    [entry] = stacks.collect([process.pid], program=str(tmp_path / "none"))["processes"]
    assert (entry["source"], entry["why"], entry["threads"][0]["state"]) == ("kernel", spy.MISSING, "D")


def test_another_program_has_its_command_and_what_the_kernel_says(start: Start, py_spy: str) -> None:
    process = start("bash", "-c", "echo ready; sleep 600; true")
    await_state(process, "S")
    [entry] = stacks.collect([process.pid], program=py_spy)["processes"]
    assert (entry["source"], entry["why"], entry["state"]) == ("kernel", "", "S")
    assert entry["command"] == "bash -c echo ready; sleep 600; true"
    assert [thread["name"] for thread in entry["threads"]] == ["bash"]


def test_a_python_that_did_not_ask_for_the_signal_survives_without_py_spy(start: Start, tmp_path: Path) -> None:
    process = start(PYTHON, "-c", WAITS)
    [entry] = stacks.collect([process.pid], program=str(tmp_path / "none"), signals=True)["processes"]
    assert (entry["source"], entry["why"]) == ("kernel", spy.MISSING)
    assert len(entry["threads"]) == 2
    assert process.poll() is None


def test_a_python_with_faulthandler_writes_its_stacks_itself_if_that_is_wanted(start: Start, tmp_path: Path) -> None:
    process = start(PYTHON, "-c", WRITES_ITSELF)
    [entry] = stacks.collect([process.pid], program=str(tmp_path / "none"))["processes"]
    assert (entry["source"], "--signal" in entry["why"]) == ("kernel", True)
    [entry] = stacks.collect([process.pid], program=str(tmp_path / "none"), signals=True)["processes"]
    assert (entry["source"], "run's log" in entry["why"]) == ("faulthandler", True)
    assert process.stderr is not None
    assert "most recent call first" in process.stderr.readline()
    assert "in in_training" in process.stderr.readline()
    assert process.poll() is None


def test_a_process_that_has_ended_is_said_to_have(py_spy: str) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    [entry] = stacks.collect([process.pid], program=py_spy)["processes"]
    assert (entry["source"], entry["threads"]) == ("kernel", [])
    assert entry["why"] == "the process has ended meanwhile"


def test_a_py_spy_that_hangs_costs_the_limit_and_no_more(start: Start, public: Path) -> None:
    process = start(PYTHON, "-c", WAITS)
    hangs = public / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    before = time.monotonic()
    found = stacks.collect([process.pid] * 20, limit=0.6, program=str(hangs))
    assert time.monotonic() - before < 2
    whys = {entry["why"] for entry in found["processes"]}
    assert all("py-spy gave no answer within" in why or "could not be read within" in why for why in whys)


def test_a_process_that_keeps_its_reader_waiting_does_not_keep_the_others() -> None:
    held, entries = threading.Event(), [{"pid": number} for number in range(30)]

    def look(entry: dict[str, Any]) -> None:
        if entry["pid"] % 10 == 0:
            held.wait(60)
        entry["seen"] = True

    before = time.monotonic()
    stacks._at_once(look, entries, before + 0.5)
    assert time.monotonic() - before < 2
    assert [entry["pid"] for entry in entries if "seen" not in entry] == [0, 10, 20]
    held.set()


def test_more_processes_than_are_shown_are_counted() -> None:
    found = stacks.collect([2**22 + number for number in range(1, 250)])
    assert (len(found["processes"]), found["omitted"]) == (200, 49)


# --- what py-spy says, and how it is called ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("errors", "scope", "expected"),
    [
        ("Permission Denied: Try running again", "3", "kernel.yama.ptrace_scope is 3"),
        ("Permission Denied: Try running again", "1", "the kernel forbids to read this process, or only another user"),
        ("Permission Denied: Try running again", "", "the kernel forbids to read this process, or only another user"),
        (
            "Error: No stacks\n\nCaused by:\n    0: Failed to suspend\n    1: odd\n\nStack backtrace:\n   0: main\n",
            "1",
            "py-spy failed: Error: No stacks; Failed to suspend; odd",
        ),
        ("", "", "py-spy failed: it was ended by a signal or printed nothing"),
    ],
)
def test_the_reason_of_a_refusal_is_told(errors: str, scope: str, expected: str) -> None:
    assert spy.refusal(errors, scope).startswith(expected) or expected in spy.refusal(errors, scope)


@pytest.mark.parametrize("text", [b"", b"[", b"{}", b"[1]", b"[" * 9000, b'[{"thread_name": null}]', b"null", b"\xff"])
def test_output_that_is_no_list_of_threads_gives_none(text: bytes) -> None:
    assert spy.parse(text) == []


@pytest.mark.parametrize(
    ("uid", "groups", "expected"),
    [
        ("1001\t1001\t1001\t1001", "27 1001", ["--reuid=1001", "--regid=1001", "--groups=27,1001"]),
        ("1001 1001 1001 1001", "", ["--reuid=1001", "--regid=1001", "--clear-groups"]),
        ("0 0 0 0", "0 27", ["--reuid=65534", "--regid=65534", "--clear-groups"]),
    ],
)
def test_py_spy_gets_the_users_rights_and_one_capability(uid: str, groups: str, expected: list[str]) -> None:
    status = {"Uid": uid, "Gid": uid, "Groups": groups}
    words = spy.command(7, status, "/opt/py-spy", stops=True, as_root=True)
    assert words[words.index("/usr/bin/setpriv") + 1 :][:3] == expected
    assert "--bounding-set=-all,+sys_ptrace" in words
    assert words[-5:] == ["/opt/py-spy", "dump", "--json", "--pid", "7"]


@pytest.mark.parametrize(
    ("caught", "expected"), [("0000000000000200", True), ("0000000000000002", False), ("x", False), ("", False)]
)
def test_only_a_process_with_a_handler_counts_as_one(caught: str, expected: bool) -> None:
    assert stacks.handles({"SigCgt": caught}, signal.SIGUSR1) is expected


# --- what is kept -----------------------------------------------------------------------------------------------------


def many(processes: int, threads: int, frames: int) -> dict[str, Any]:
    thread = {"name": "T", "active": False, "frames": [["function", "/home/ada/some/path.py", 1]] * frames}
    entry = {"pid": 1, "parent": 1, "user": "ada", "command": "python", "state": "S", "source": "py-spy", "why": ""}
    return {"at": 1.0, "omitted": 3, "processes": [dict(entry, threads=[thread] * threads)] * processes}


@pytest.mark.parametrize(("processes", "threads", "frames"), [(1, 1, 1), (20, 50, 100), (1, 900, 900), (200, 256, 100)])
def test_what_is_kept_fits_and_tells_what_was_left_out(
    tmp_path: Path, processes: int, threads: int, frames: int
) -> None:
    data = many(processes, threads, frames)
    assert stacks.keep(str(tmp_path / "stacks.json"), data) == ""
    text = (tmp_path / "stacks.json").read_text()
    assert len(text) <= stacks.KEPT
    kept = json.loads(text)
    assert len(kept["processes"]) + kept["omitted"] - 3 == processes
    first = kept["processes"][0]
    assert first["threads"][0]["frames"][0] == ["function", "/home/ada/some/path.py", 1]
    if len(first["threads"]) < threads:
        assert first["why"] == f"{threads - len(first['threads'])} more threads are left out"


def test_a_file_that_cannot_be_written_is_said_and_nothing_else_happens(tmp_path: Path) -> None:
    assert stacks.keep(str(tmp_path / "none" / "stacks.json"), many(1, 1, 1)) == "No such file or directory"


def test_supervisors_and_what_they_start_are_no_processes_of_the_run(tmp_path: Path, start: Start) -> None:
    command = start("bash", "-c", "sleep 600 & echo ready; wait")
    [child] = [pid for pid in proc.pids() if proc.parent(pid) == command.pid]
    other = start("bash", "-c", "sleep 600 & echo ready; wait")
    [its_child] = [pid for pid in proc.pids() if proc.parent(pid) == other.pid]
    group = [os.getpid(), command.pid, child, other.pid, its_child]
    (tmp_path / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in group))
    record = {"state": "running", "cgroup": str(tmp_path), "pid": command.pid, "supervisor": {"pid": os.getpid()}}
    assert stacks.processes_of(record) == sorted([command.pid, child])
    assert stacks.processes_of(dict(record, state="starting")) == []


# --- at the end -------------------------------------------------------------------------------------------------------


def test_the_last_look_comes_after_half_of_the_grace_and_delays_no_kill(tmp_path: Path, start: Start) -> None:
    ignores = start("bash", "-c", "trap '' TERM; echo ready; while :; do read -t 600 <> <(:); done")
    group, told = tmp_path / "cgroup.procs", tmp_path / "told"
    group.write_text(f"{ignores.pid}\n")

    def look(limit: float) -> None:
        # A program that never ends stands for one that waits for a disk.
        group.write_text(f"{ignores.pid}\n{os.getpid()}\n")
        told.write_text(f"{os.getpid()} {limit}")
        while True:
            signal.pause()

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        ignores.poll()

    last, before = LastLook(look), time.monotonic()
    ending.end_tree(str(tmp_path), 1.0, pause, last)
    assert time.monotonic() - before < 1.6
    pid, limit = told.read_text().split()
    assert 0 < float(limit) <= 0.5
    assert last.is_own(int(pid))
    assert not last.is_own(ignores.pid)
    assert ignores.poll() == -signal.SIGKILL
    assert os.waitpid(int(pid), 0)[1] == signal.SIGKILL


def test_processes_that_end_in_time_are_not_looked_at(tmp_path: Path, start: Start) -> None:
    process = start("bash", "-c", "echo ready; exec sleep 600")
    (tmp_path / "cgroup.procs").write_text(f"{process.pid}\n")

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        process.poll()

    last = LastLook(lambda _: os._exit(0))
    ending.end_tree(str(tmp_path), 5.0, pause, last)
    assert process.poll() == -signal.SIGTERM
    assert not last.is_own(os.getpid())
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.procs"]


def test_stacks_of_an_earlier_attempt_are_shown_if_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "require_root", lambda: None)
    store = Store(str(tmp_path))
    for attempt in (1, 2):
        begun(store, attempt, state="failed", ended=5.0)
        stacks.keep(stacks.kept_path(store, "r1"), {"processes": [], "omitted": attempt})

    def omitted(**request: int) -> int:
        answer = stacks.stacks({"protocol": wire.PROTOCOL, "run_id": "r1", **request}, store)
        assert answer["kept"]
        return int(answer["stacks"]["omitted"])

    assert (omitted(), omitted(attempt=1), omitted(attempt=2)) == (2, 1, 2)
    with pytest.raises(wire.Refused, match="does not know attempt 3 of run r1"):
        omitted(attempt=3)
