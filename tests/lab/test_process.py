"""The API's process: which one a record means, and how it is started, asked and ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tpu_ops.errors import OpsError
from tpu_ops.lab import instance, process
from tpu_ops.lab.instance import Instance
from tpu_ops.lab.process import Record

#: What makes a command line one of the lab's API, as far as anybody can see.
LOOKS_LIKE = ("-m", process.MODULE)
GRPC, REST = "127.0.0.1:18470", "http://127.0.0.1:18471"
PAUSE = "import signal; print(flush=True); signal.pause()"


@pytest.fixture
def lab(tmp_path: Path) -> Instance:
    folder = tmp_path / "lab"
    folder.mkdir()
    return Instance("test", folder)


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts Python with a script and arguments, and returns it when the script has printed a line."""
    with contextlib.ExitStack() as stack:

        def start(script: str, *arguments: str) -> subprocess.Popen[bytes]:
            child = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE)
            stack.enter_context(child)
            stack.callback(child.kill)
            assert child.stdout is not None
            assert child.stdout.readline() == b"\n"
            return child

        yield start


def record(lab: Instance, pid: int, *, serves: bool = True) -> None:
    Record(pid, process.start_time(pid), GRPC, REST, serves).write(lab.process_file)


ODD = [
    "",
    "{",
    "\xff",
    "[]",
    "[" * 100_000,
    "null",
    "7",
    '{"pid": PID}',
    '{"pid": "PID", "started": "START", "grpc": "GRPC", "rest": "REST"}',
    '{"pid": null, "started": "START", "grpc": "GRPC", "rest": "REST"}',
    '{"pid": true, "started": "START", "grpc": "GRPC", "rest": "REST"}',
    '{"pid": 1, "started": "ONE", "grpc": "GRPC", "rest": "REST"}',
    '{"pid": -PID, "started": "START", "grpc": "GRPC", "rest": "REST"}',
    '{"pid": PID.0, "started": "START", "grpc": "GRPC", "rest": "REST"}',
    '{"pid": PID, "started": ["START"], "grpc": "GRPC", "rest": "REST"}',
    '{"pid": PID, "started": "START", "grpc": [], "rest": "REST"}',
    '{"pid": PID, "started": "START", "grpc": "", "rest": ""}',
    '{"pid": PID, "started": "START", "grpc": "GRPC", "rest": null}',
    '{"pid": PID, "started": "START", "grpc": "GRPC", "rest": "http://elsewhere:80"}',
    '{"pid": PID, "started": "START", "grpc": "127.0.0.1:99999", "rest": "REST"}',
    '{"pid": PID, "started": "START", "grpc": "GRPC", "rest": "REST", "serves": "no"}',
]


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_an_odd_record_is_no_api_and_nothing_is_signalled(lab: Instance, text: str, started) -> None:
    """Each names a process that would do, were the rest sound."""
    child = started(PAUSE, *LOOKS_LIKE)
    words = {"PID": str(child.pid), "START": process.start_time(child.pid), "ONE": process.start_time(1)}
    for word, value in {**words, "GRPC": GRPC, "REST": REST}.items():
        text = text.replace(word, value)
    lab.process_file.write_bytes(text.encode("latin-1"))
    assert (lab.endpoints(), lab.process(), instance.stop_api(lab)) == (None, None, False)
    assert all(isinstance(port, int) for port in instance.ports_of(lab, None))
    assert child.poll() is None


def test_the_record_of_another_program_or_of_an_earlier_process_is_no_api(lab: Instance, started) -> None:
    other = started(PAUSE, f"notes on {process.MODULE}")
    record(lab, other.pid)
    assert (lab.endpoints(), instance.stop_api(lab), other.poll()) == (None, False, None)
    again = started(PAUSE, *LOOKS_LIKE)
    Record(again.pid, "1", GRPC, REST).write(lab.process_file)
    assert (lab.endpoints(), instance.stop_api(lab), again.poll()) == (None, False, None)


def test_a_zombie_is_no_running_api(lab: Instance, started) -> None:
    child = started(PAUSE, *LOOKS_LIKE)
    record(lab, child.pid)
    assert lab.endpoints() is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is not reaped
    assert (lab.endpoints(), lab.process()) == (None, None)


def test_a_process_that_does_not_serve_yet_is_no_endpoint_and_is_ended_all_the_same(lab: Instance, started) -> None:
    child = started(PAUSE, *LOOKS_LIKE)
    record(lab, child.pid, serves=False)
    assert lab.endpoints() is None
    assert instance.stop_api(lab)
    assert child.wait(timeout=10) == -signal.SIGTERM


def test_a_process_that_ignores_sigterm_is_killed(lab: Instance, started) -> None:
    child = started(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {PAUSE}", *LOOKS_LIKE)
    record(lab, child.pid)
    assert instance.stop_api(lab, timeout=1.0)
    assert child.wait(timeout=10) == -signal.SIGKILL


def test_a_stopped_process_does_not_answer_and_is_ended_in_order(lab: Instance, lab_api) -> None:
    pid = lab_api._process.pid
    Record(pid, process.start_time(pid), lab_api.grpc, lab_api.rest).write(lab.process_file)
    assert instance.answers(lab)
    os.kill(pid, signal.SIGSTOP)
    assert not instance.answers(lab, timeout=0.3)
    assert instance.stop_api(lab, timeout=10)
    assert lab_api._process.wait(timeout=10) == 0


def test_a_process_whose_record_is_lost_is_found_by_its_lab(lab: Instance, started) -> None:
    options = ("--state", str(lab.state_file), "--containers", lab.name)
    child = started(PAUSE, *LOOKS_LIKE, *options)
    other = started(PAUSE, *LOOKS_LIKE, "--state", str(lab.state_file.with_name("other.json")), *options[2:])
    assert instance.stop_api(lab)
    assert (child.wait(timeout=10), other.poll()) == (-signal.SIGTERM, None)
    assert not instance.stop_api(lab)


def test_an_instance_whose_record_is_odd_takes_free_ports(lab: Instance) -> None:
    lab.process_file.write_text(json.dumps({"pid": 2, "started": "1", "grpc": "x", "rest": []}))
    assert instance.ports_of(lab, None) == (0, 0)


def test_a_start_time_is_that_of_the_process(started) -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    child = started(PAUSE)
    ticks = int(process.start_time(child.pid)) / os.sysconf("SC_CLK_TCK")
    assert before - 1 < ticks < time.clock_gettime(time.CLOCK_BOOTTIME) + 1
    assert process.start_time(2**22 + 1) == ""


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the API, a program that says at once that it serves."""
    program = tmp_path / "python"
    text = f"#!{sys.executable}\nimport signal\nprint({json.dumps({'grpc': GRPC, 'rest': REST})!r}, flush=True)\n"
    program.write_text(f"{text}signal.pause()\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.usefixtures("serving")
def test_a_process_that_serves_is_recorded(lab: Instance) -> None:
    found = instance.start_api(lab, (0, 0), seconds=0, timeout=30)
    assert found == lab.endpoints() == instance.Endpoints(GRPC, REST)
    assert instance.stop_api(lab)


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize("writes", [0, 1], ids=["before it serves", "when it serves"])
def test_a_full_disk_is_an_error_in_words_and_leaves_no_process(
    lab: Instance, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, records = Record.write, []

    def full(record: Record, path: Path) -> None:
        records.append(record)
        if len(records) > writes:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(record, path)

    monkeypatch.setattr(Record, "write", full)
    with pytest.raises(OpsError, match="No space left on device") as caught:
        instance.start_api(lab, (0, 0), seconds=0, timeout=30)
    assert caught.value.where == str(lab.process_file)
    assert records[-1].pid > 1
    assert (lab.process(), records[-1].runs()) == (None, False)


def test_a_directory_that_is_gone_is_an_error_in_words(lab: Instance) -> None:
    lab.directory.rmdir()
    with pytest.raises(OpsError) as caught:
        instance.start_api(lab, (0, 0), seconds=0)
    assert caught.value.where.startswith(str(lab.directory))


@pytest.mark.usefixtures("serving")
def test_a_command_killed_before_it_has_recorded_the_process_leaves_none(lab: Instance, tmp_path: Path) -> None:
    """The killed command writes down which process it had started; that one must end by itself."""
    script = f"""
import os, signal, sys
from pathlib import Path
from tpu_ops.lab import instance, process
def killed(record, path):
    Path({str(tmp_path / "pid")!r}).write_text(str(record.pid))
    os.kill(os.getpid(), signal.SIGKILL)
process.Record.write = killed
sys.executable = {sys.executable!r}
instance.start_api(instance.Instance("test", Path({str(lab.directory)!r})), (0, 0), seconds=0)
"""
    python = Path(sys.prefix) / "bin" / "python"
    assert subprocess.run([python, "-c", script], timeout=30, check=False).returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while process.start_time(pid):
        assert time.monotonic() < deadline, f"process {pid} was left behind"
        time.sleep(0.01)  # polls until the deadline
    assert (lab.directory / "ready.json").read_text() == ""
