"""Processes of this machine, from the files in /proc: their children, processor time, memory and open files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path


def pids() -> list[int]:
    """Return the ids of all processes."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def read(pid: int, name: str) -> bytes:
    """Return a file of a process; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    """Return the children of a process; empty if the process has ended."""
    found = list[int]()
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (thread / "children").read_text().split()]
    return found


def descendants(parents: Sequence[int]) -> list[int]:
    """Return the children of processes, their children, and so on."""
    found, left = list[int](), list(parents)
    while left:
        below = children(left.pop())
        found += below
        left += below
    return found


def busy(processes: Iterable[int], *, ended: bool = False) -> float:
    """Return the seconds of processor time of processes; if ``ended``, also those of their ended children."""
    found = 0.0
    for pid in processes:
        # The file stat counts in hundredths of a second, which is more than an idle connection takes.
        found += int((read(pid, "schedstat").split() or [b"0"])[0]) / 1e9
        if ended:
            fields = read(pid, "stat").rpartition(b")")[2].split()
            found += sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
    return found


def resident(pid: int) -> int:
    """Return the memory of a process in bytes, with the pages that it shares; 0 if it has ended."""
    fields = read(pid, "statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def proportional(pid: int) -> int:
    """Return the memory of a process in bytes; a page that n processes share counts as an n-th of a page."""
    lines = read(pid, "smaps_rollup").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:"))


def open_files(pid: int) -> int:
    """Return the number of open files of a process; 0 if it has ended."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0
