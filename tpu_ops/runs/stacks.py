"""The stacks of a run's processes: asks all ranks at once, and folds equal stacks of ranks, processes and threads."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tpu_ops import texts
from tpu_ops.runs import ranks
from tpu_ops.runs.control import RunRef
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

#: Seconds that a launcher takes at most for the stacks, and seconds for each worker to answer.
_LOOK, LIMIT = 10.0, 30.0
#: Matches the files of libraries, which are not the program's own.
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<frozen ")
#: Source of stacks that are Python's; others are what the kernel says.
PYTHON = "py-spy"
_IN_KERNEL = "inside the kernel (state D)"


class Frame(NamedTuple):
    """A function that is being executed; of a thread of the kernel's list, only what the thread waits for."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})" if self.file else self.function

    @property
    def is_own(self) -> bool:
        """Whether the function belongs to the program and not to a library."""
        return not _LIBRARY.search(self.file)


@dataclass(frozen=True)
class Thread:
    """A thread and its frames, the innermost first; ``state`` is a letter of the kernel, empty with Python's frames."""

    name: str
    active: bool
    state: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Process:
    """A process of a rank.

    ``why`` is the reason if its Python stacks could not be read, and ``wait`` what it waits for in state D.
    """

    pid: int
    parent: int
    user: str
    command: str
    state: str
    source: str
    why: str
    threads: tuple[Thread, ...]
    wait: str = ""

    @property
    def is_python(self) -> bool:
        """Whether the process is a Python: of other programs, there is nothing to explain."""
        return self.source == PYTHON or bool(self.why)

    @property
    def program(self) -> str:
        """The name of the program."""
        return (self.command.split() or ["a process"])[0].rpartition("/")[2]


@dataclass(frozen=True)
class RankStacks:
    """The answer of a rank's worker.

    Attributes:
        rank: The rank.
        host: Its worker.
        state: The state of the rank; empty if the worker did not answer.
        kept: Whether the stacks are those that were kept when the rank ended.
        at: When they were taken, in seconds since 1970; 0 if there are none.
        processes: The processes.
        omitted: Number of processes that were left out.
        reply: The worker's answer if it is an error, else None.
        raw: The worker's data.
    """

    rank: int
    host: str
    state: str = ""
    kept: bool = False
    at: float = 0.0
    processes: tuple[Process, ...] = ()
    omitted: int = 0
    reply: Reply | None = None
    raw: Mapping[str, Any] | None = None


async def ask(
    fanout: Fanout, run: RunRef, shown: Collection[int], *, signal: bool = False, attempt: int | None = None
) -> list[RankStacks]:
    """Ask the workers of these ranks of a run for their stacks, all at once.

    Args:
        fanout: Reaches the workers.
        run: The run.
        shown: The ranks.
        signal: Whether processes that handle SIGUSR1 get it if their stacks cannot be read otherwise.
        attempt: An earlier attempt, of which the kept stacks are wanted.
    """
    of_host = {run.hosts[rank]: rank for rank in shown}
    request = {"run_id": run.run_id, "signal": signal, "attempt": attempt}
    replies = await fanout.call(dict.fromkeys(of_host, request), "stacks", limit=LIMIT, quiet=_LOOK)
    return [of_reply(rank, replies[host]) for host, rank in of_host.items()]


def of_reply(rank: int, reply: Reply) -> RankStacks:
    """Return the stacks in a worker's answer."""
    if not reply.ok:
        return RankStacks(rank, reply.host, reply=reply)
    data = reply.value["stacks"]
    facts = RankStacks(rank, reply.host, reply.value["state"], reply.value["kept"], raw=data)
    if data is None:
        return facts
    processes = tuple(_process(entry) for entry in data["processes"])
    return RankStacks(rank, reply.host, facts.state, facts.kept, data["at"], processes, data["omitted"], raw=data)


def _process(entry: Mapping[str, Any]) -> Process:
    threads = [
        Thread(each["name"], each["active"], each.get("state", ""), tuple(Frame(*frame) for frame in each["frames"]))
        for each in entry["threads"]
    ]
    keys = ("pid", "parent", "user", "command", "state", "source", "why")
    # Older launchers do not tell `wait`.
    return Process(**{key: entry[key] for key in keys}, threads=tuple(threads), wait=entry.get("wait", ""))


# --- one line for each place in the program ---------------------------------------------------------------------------


def place(frame: Frame) -> str:
    """Return a frame with the name of its file, as in ``all_reduce (train.py:88)``."""
    return str(frame._replace(file=frame.file.rpartition("/")[2]))


def where(process: Process) -> str:
    """Return where the first thread of a process is; empty if nothing is known.

    Of Python, this is the innermost function that belongs to the program, and the function of a library that it waits
    in.
    """
    thread = next(iter(process.threads), None)
    if thread is None:
        return ""
    if process.source != PYTHON:
        waits = f"waits in {place(thread.frames[0])}" if thread.frames else "waits"
        doing = {"R": "runs", "T": "is stopped", "D": f"{waits}, {_IN_KERNEL}"}.get(thread.state, waits)
        return f"{process.program} {doing}"
    held = f", {f'waits in {process.wait}, ' * bool(process.wait)}{_IN_KERNEL}" if process.state == "D" else ""
    if not thread.frames:
        return f"{process.program}, without a frame of Python{held}"
    inner = thread.frames[0]
    own = next((frame for frame in thread.frames if frame.is_own), inner)
    return (place(own) if own is inner else f"{place(own)}, in {place(inner)}") + held


def short(found: Iterable[RankStacks]) -> list[str]:
    """Return one line for each place at which processes are, as in ``ranks 0-2: all_reduce (train.py:88)``.

    Programs that a Python was started by, or that it has started, are left out.
    """
    at: dict[tuple[bool, str], dict[int, int]] = {}
    for one in found:
        shown = _shown(one.processes)
        parents = {process.pid: process.parent for process in one.processes}
        pids = {process.pid for process in shown}
        for process in shown:
            if text := where(process):
                counts = at.setdefault((_is_below(process.pid, parents, pids), text), {})
                counts[one.rank] = counts.get(one.rank, 0) + 1
    # `sorted` keeps the order of equal keys: the places of the programs themselves come first.
    order = sorted(at.items(), key=lambda item: (item[0][0], min(item[1])))
    return [f"{_who(counts, 'child process' if below else 'process')}: {text}" for (below, text), counts in order]


def _shown(processes: Sequence[Process]) -> list[Process]:
    """Return the processes that `short` shows: Pythons if there are any, and what waits inside the kernel."""
    shown = [process for process in processes if process.is_python or process.state == "D"]
    return shown if any(process.is_python for process in shown) else list(processes)


def _is_below(pid: int, parents: Mapping[int, int], pids: Collection[int]) -> bool:
    """Return whether one of these processes is above a process."""
    seen = {pid}
    while (pid := parents.get(pid, 0)) in parents and pid not in seen:
        if pid in pids:
            return True
        seen.add(pid)
    return False


def _who(counts: Mapping[int, int], noun: str) -> str:
    """Return ranks and the number of their processes, as in ``ranks 0-2, 4 child processes each``.

    Args:
        counts: Rank -> number of its processes.
        noun: What a process is called; it is left out if each rank has one and it is called just that.
    """
    who = ranks.named([*counts])
    numbers = set(counts.values())
    if numbers == {1} and noun == "process":
        return who
    each = len(numbers) == 1
    return (
        f"{who}, {_number(max(numbers) if each else sum(counts.values()), noun)}{' each' * (each and len(counts) > 1)}"
    )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


# --- all stacks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Threads with equal stacks: a title that names their ranks, processes and threads, and the frames."""

    title: str
    frames: tuple[Frame, ...]


def full(found: Iterable[RankStacks]) -> list[Group]:
    """Return all stacks, the equal ones of all ranks as one: those of the processes' first threads come first."""
    members: dict[tuple[bool, Hashable, tuple[Frame, ...]], list[tuple[int, Process, Thread]]] = {}
    for one in found:
        for process in one.processes:
            for number, thread in enumerate(process.threads):
                program = "" if process.source == PYTHON else process.program
                key = (number > 0, (program, thread.state), thread.frames)
                members.setdefault(key, []).append((one.rank, process, thread))
    # Others than Pythons come last.
    order = sorted(members.items(), key=lambda item: (item[0][1] != ("", ""), item[0][0], min(m[0] for m in item[1])))
    return [Group(_title(group), frames) for (_, _, frames), group in order]


def _title(group: Sequence[tuple[int, Process, Thread]]) -> str:
    """Return the title of threads, as in ``ranks 0-2, 1 thread each: MainThread``."""
    counts: dict[int, int] = {}
    for rank, _, _ in group:
        counts[rank] = counts.get(rank, 0) + 1
    _, process, thread = group[0]
    names = texts.some(list(dict.fromkeys(thread.name for _, _, thread in group)), 2)
    one = len({(rank, process.pid) for rank, process, _ in group}) == 1
    active = sum(thread.active for _, _, thread in group)
    facts = [
        f"{_who(counts, 'thread')}: {names}",
        f"of pid {process.pid}: {process.command}" if one else "",
        f"state {thread.state}" if thread.state else "",
        f"{active} running" if active else "",
    ]
    return ", ".join(filter(None, facts))


def problems(found: Sequence[RankStacks]) -> list[str]:
    """Return why Python stacks are missing, equal reasons of several ranks as one line."""
    whys: dict[str, dict[int, int]] = {}
    for one in found:
        for process in one.processes:
            if process.why:
                counts = whys.setdefault(process.why, {})
                counts[one.rank] = counts.get(one.rank, 0) + 1
    left_out = [f"rank {one.rank}: {_number(one.omitted, 'more process')} left out" for one in found if one.omitted]
    return [f"{_who(counts, 'process')}: {why}" for why, counts in whys.items()] + left_out


def to_json(run: RunRef, found: Sequence[RankStacks]) -> dict[str, Any]:
    """Return the stacks of a run for --json."""
    return {
        "run_id": run.run_id,
        "places": short(found),
        "ranks": [
            {
                "rank": one.rank,
                "worker": one.host,
                "state": one.state,
                "kept": one.kept,
                "stacks": one.raw,
                "problem": one.reply.problem if one.reply else "",
            }
            for one in found
        ],
    }
