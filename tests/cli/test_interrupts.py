"""SIGTERM and SIGHUP at commands that wait for workers, as real processes: they leave nothing behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from tests.support.fleet import ROOT, FleetDir
from tests.support.lab_api import LabApi
from tpu_ops.cloud.remaking import Made, Plan
from tpu_ops.runs import records, recovery, spec

pytestmark = pytest.mark.signals

SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
#: Plays OpenSSH on its way to a worker: it tells its number and waits.
SSH = '#!/bin/sh\ncase "$*" in *"-O check"*) exit 1 ;; esac\necho $$ >>"$PIDS"\nexec sleep 600\n'


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Has every ssh wait; returns the processes that were started for one, as far as they are there."""
    program, pids = tmp_path / "bin" / "ssh", tmp_path / "pids"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    pids.touch()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PIDS", str(pids))
    return lambda: [int(line) for line in pids.read_text().split() if Path(f"/proc/{line}").exists()]


@contextmanager
def command(*argv: str, ignoring: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run tpu_ops for the length of a block, as the background of a script does: it ignores Ctrl-C."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number == ignoring else signal.SIG_DFL)

    with subprocess.Popen(
        [sys.executable, "-m", "tpu_ops.cli.main", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,  # noqa: PLW1509 - no threads here
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def await_(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    """Wait until something holds, for as long as a process is there."""
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)  # polls while the process is there


@SIGNALS
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("attach", "r1"), "  stop:   tpu_ops stop r1"),
        (("logs", "r1", "--follow"), "no longer following; the run continues"),
        (("train", "solo", "--", "true"), "interrupted before the run was started"),
        (("train", "solo", "--recover", "--", "true"), "interrupted"),
        (("sync", "solo", str(ROOT / "examples" / "digits")), "interrupted"),
        (("configure", "solo", "--playbook", "facts"), "interrupted"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_signal_detaches_from_the_run_and_ends_local_processes(
    fleet: FleetDir, children: Callable[[], list[int]], argv: tuple[str, ...], said: str, number: signal.Signals
) -> None:
    fleet.create("solo")
    record = records.new("r1", ("solo",), (fleet.api.node("solo", fleet.location())["id"],), ("solo-w0",), ("true",))
    records.write(fleet.settings().state_dir, record)
    with command(*argv) as process:
        await_(process, children)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, said in err.splitlines()) == (130, True), err
        assert "Ctrl-C again" not in err
    until = time.monotonic() + 10
    while left := children():
        assert time.monotonic() < until, left
        time.sleep(0.01)  # polls until whoever adopts what was killed has collected it, or the deadline passes


@pytest.fixture
def brought_back(fleet: FleetDir, fleet_api: LabApi) -> Iterator[FleetDir]:
    """A fleet of which a run is recovered whose node cannot be made again for now."""
    options = recovery.options_of(spec.RunSpec("r1", ("true",)), {})
    made = Made(f"{fleet.location()}/nodes/solo", "1", {"accelerator_type": "v4-8", "runtime_version": "rt"})
    recovery.write(
        fleet.settings().state_dir, recovery.Recovery("r1", 1, Plan((made,)), options, pending=True, counted=True)
    )
    fleet_api.fault(method="CreateNode", code="RESOURCE_EXHAUSTED", message="no capacity", project=fleet.project)
    yield fleet
    fleet_api.clear_faults()


@SIGNALS
def test_a_recovery_that_brings_nodes_back_ends_and_says_how_to_go_on(
    brought_back: FleetDir, number: signal.Signals
) -> None:
    with command("attach", "r1", "--recover") as process:
        assert process.stderr
        said = iter(process.stderr.readline, "")
        assert any("next try in" in line for line in said), process.wait()
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
    assert [line for line in err.splitlines() if line] == [
        "run r1 is not running; nothing will restart it",
        "  stop:    tpu_ops stop r1",
        "  recover: tpu_ops attach r1 --recover",
        "interrupted",
    ]
    assert recovery.is_kept(brought_back.settings().state_dir, "r1")


def test_below_nohup_a_terminal_that_closes_ends_nothing(brought_back: FleetDir) -> None:
    with command("attach", "r1", "--recover", ignoring=signal.SIGHUP) as process:
        assert process.stderr
        assert any("next try in" in line for line in iter(process.stderr.readline, ""))
        status = Path(f"/proc/{process.pid}/status").read_text()
        ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn:")).split()[1], 16)
        assert [bool(ignored >> number - 1 & 1) for number in (signal.SIGHUP, signal.SIGTERM)] == [True, False]


BLOCK = "with interrupts.ended_by_signals():\n    asyncio.run(work())"
FOLLOWS = (
    "left = lambda: os.write(2, b'the run continues')\n"
    "raise SystemExit(foreground.to_its_end(work(), lambda: None, left, as_json=False))"
)


@pytest.mark.parametrize(
    ("block", "sent", "code"),
    [
        (
            "with interrupts.ended_by_signals():\n    asyncio.run(work())",
            (signal.SIGTERM, signal.SIGHUP),
            -signal.SIGINT,
        ),
        (FOLLOWS, (signal.SIGTERM, signal.SIGHUP), 130),
        (FOLLOWS, (signal.SIGINT, signal.SIGINT), 130),
        (FOLLOWS, (signal.SIGINT, signal.SIGTERM), 130),
    ],
    ids=["what a signal ends", "what follows a run", "Ctrl-C", "Ctrl-C, and then SIGTERM"],
)
def test_the_second_signal_ends_a_command_with_a_blocked_pipe(
    block: str, sent: tuple[signal.Signals, signal.Signals], code: int
) -> None:
    """As with `| less` on its first page: the event loop is blocked, and the first signal is never handled."""
    script = (
        "import asyncio, os\n"
        "from tpu_ops.cli import foreground, interrupts\n"
        "interrupts.TOGETHER, foreground.STANDS = 0.0, 0.0\n"
        "async def work():\n"
        "    os.write(2, b'begun')\n"
        "    while True:\n"
        "        os.write(1, bytes(4096))\n"
        f"{block}\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=listens,  # noqa: PLW1509 - no threads here
    ) as process:
        try:
            assert process.stderr
            assert process.stdout
            assert process.stderr.read(5) == b"begun"
            full = fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ)
            until = time.monotonic() + 10
            while (waits := waiting(process.stdout)) < full:
                assert time.monotonic() < until, waits
                time.sleep(0.01)  # polls until the pipe takes no more, or the deadline passes
            for number in sent:
                assert process.poll() is None
                process.send_signal(number)
                while int(status(process.pid, "SigPnd") or "0", 16) or int(status(process.pid, "ShdPnd") or "0", 16):
                    time.sleep(0.01)  # polls until the signal has been delivered
            assert process.wait(timeout=20) == code
            assert (b"the run continues" in process.stderr.read()) is (code == 130), "it says what goes on"
        finally:
            process.kill()


def listens() -> None:
    """Have a process hear what ends it, whatever whoever runs the tests ignores."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def waiting(pipe: IO[bytes]) -> int:
    """Return how many bytes a pipe holds."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def status(pid: int, field: str) -> str:
    """Return a field of /proc/PID/status; empty where the process has gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return line.split()[1]
    return ""
