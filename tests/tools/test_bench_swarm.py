"""The benchmark's section on hundreds of workers, and what it reads of processes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from tools.bench import processes, swarm
from tools.bench.swarm import MEASURED, SwarmSample, SwarmSeries


def shown(**changes: Any) -> list[str]:
    """Return whether each target is met; the changes are those of the samples of `run` with 512 workers."""
    taken = []
    for workers in (32, 128, 512):
        for key in MEASURED:
            cpu, peak, held = 1 + workers / 100, 10**8, workers * 5 * 10**5
            sample = SwarmSample(1, workers, key, 2.0, cpu, 1.0, peak, workers, held, 99)
            taken.append(replace(sample, **changes) if (key, workers) == ("run", 512) else sample)
    lines = swarm.section(SwarmSeries("abc1234", "2026-11-28", {"cores": "2"}, tuple(taken)))
    start = lines.index("### Targets of hundreds of workers")
    return [line.rsplit("| ", 1)[1] for line in lines[start:] if line.endswith(" |")][1:]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [({}, None), ({"cpu": 9.0}, 3), ({"peak": 6 * 10**8}, 8), ({"held": 6 * 10**8}, 11)],
)
def test_a_missed_target_says_no(changes, missed):
    assert shown(**changes) == ["**no** |" if number == missed else "yes |" for number in range(len(shown()))]


def test_processes_are_found_below_their_parents_and_read_while_they_live():
    program = "exec 8</dev/null 9</dev/null; sleep 60 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout
        child = int(shell.stdout.readline())
        assert {shell.pid, child} <= {*processes.descendants([os.getpid()])} & {*processes.pids()}
        # The shell's memory is partly shared with its child.
        assert processes.resident(shell.pid) >= processes.proportional(shell.pid) > 0
        assert processes.open_files(shell.pid) >= 5
        os.kill(child, 15)
    ended = processes.read(shell.pid, "stat"), processes.resident(shell.pid), processes.open_files(shell.pid)
    assert ended == (b"", 0, 0)
