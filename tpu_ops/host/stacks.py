"""The action `stacks`: where the processes of a run are, with the stacks of all their threads, without ending them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

from tpu_ops.protocol import spec
from tpu_ops.protocol.record import ON
from tpu_ops.protocol.wire import Refused, require_protocol

from . import TYPE_CHECKING, private, proc, spy
from .person import asking
from .rights import require_control, require_root

if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterable, List

    from .store import Store

#: Seconds for all processes of a rank.
LIMIT = 10.0
#: Maximum number of processes, and of threads and frames in each.
_PROCESSES, _THREADS, _FRAMES = 200, 256, 100
#: Number of processes that are looked at at the same time.
_AT_ONCE = 8
#: Part of the remaining time that py-spy may take, so that what the kernel says arrives in time if py-spy does not.
_SHARE = 0.8
#: Maximum size of an answer and of the file beside the log, in bytes.
_ANSWER, KEPT = 1024 * 1024, 256 * 1024
#: (frames, threads) of each process that are left if the stacks are too long.
_SHORTER = ((_FRAMES, _THREADS), (40, 64), (20, 16), (10, 4), (5, 1))
#: Seconds for which stacks that were kept before, because the run stood still, are not replaced at its end.
_FRESH = 300.0
NAME = "stacks.json"
_ENDED = "the process has ended meanwhile"


def stacks(request: Dict[str, Any], store: Store) -> Dict[str, Any]:
    """Return the stacks of a rank's processes, or if it has ended, those that were kept at its end.

    Request: ``run_id``; ``signal``: also send SIGUSR1 to the Python processes that py-spy cannot read and that handle
        this signal. faulthandler then writes their stacks into the run's log. ``attempt``: an earlier attempt, of which
        those that were kept are returned.

    Returns:
        ``rank``, ``attempt``, ``state``, ``stacks`` (see `collect`; None if there are none), and ``kept``: whether they
        are those that were kept.

    Raises:
        Refused: The worker does not know the run or the attempt, or a signal is to be sent to another user's run.
    """
    require_root()
    require_protocol(request)
    run_id = spec.check_run_id(request.get("run_id"))
    record = store.observe(run_id)
    if record is None:
        raise Refused("missing", "this worker does not know run {}".format(run_id))
    attempt = request.get("attempt") or record["attempt"]
    if attempt != record["attempt"]:
        return _of_earlier(store, run_id, attempt)
    signals = request.get("signal") is True
    person, owner = asking(), record["person"]
    if signals and person.uid != record.get("asked_by"):
        require_control(person, owner["uid"], owner["name"], force=True)
    kept = record["state"] not in ON
    found = read_kept(store, run_id) if kept else bounded(collect(processes_of(record), signals=signals), _ANSWER)
    return _answer(record, found, kept=kept)


def _of_earlier(store: Store, run_id: str, attempt: int) -> Dict[str, Any]:
    record = store.read_aside(run_id, attempt)
    if record is None:
        raise Refused("missing", "this worker does not know attempt {} of run {}".format(attempt, run_id))
    return _answer(record, _read(os.path.join(store.log_aside(run_id, attempt), NAME)), kept=True)


def _answer(record: Dict[str, Any], found: Dict[str, Any] | None, *, kept: bool) -> Dict[str, Any]:
    return {**{key: record[key] for key in ("rank", "attempt", "state")}, "ok": True, "stacks": found, "kept": kept}


def processes_of(record: Dict[str, Any]) -> List[int]:
    """Return the processes of a rank, without its supervisor and the other processes that the supervisor has started.

    While the rank waits for the others, there are none: the command is not executed yet.
    """
    if record["state"] == "starting" or not record.get("cgroup"):
        return []
    supervisor = record["supervisor"]["pid"]
    parents = {pid: proc.parent(pid) for pid in proc.cgroup_pids(record["cgroup"]) if proc.is_alive(pid)}

    def is_own(pid: int) -> bool:
        seen = set()
        while pid in parents and pid not in seen and pid != record["pid"]:
            seen.add(pid)
            if pid == supervisor or parents[pid] == supervisor:
                return True
            pid = parents[pid]
        return False

    return [pid for pid in parents if not is_own(pid)]


def collect(
    pids: Iterable[int], limit: float = LIMIT, *, signals: bool = False, program: str = spy.PROGRAM
) -> Dict[str, Any]:
    """Return what the threads of these processes are doing; no process delays this function longer than ``limit``.

    Args:
        pids: The processes.
        limit: Seconds for all of them.
        signals: Whether SIGUSR1 is sent to Python processes that py-spy cannot read and that handle this signal.
        program: Path of py-spy.

    Returns:
        ``at`` (seconds since 1970), ``omitted`` (number of processes that were left out) and ``processes``, each with
        ``pid``, ``parent``, ``user``, ``command``, ``state``, ``wait``, ``source``, ``why`` and ``threads``. ``wait``
        is what the first thread waits for inside the kernel, if its state is D and the kernel tells it. ``source`` is
        ``py-spy``; ``kernel`` for other programs than Python, and for a Python whose stacks cannot be read, with the
        reason in ``why``; or ``faulthandler`` if the process was asked to write them itself. Each thread has ``name``,
        ``active`` and ``frames``, the innermost first: ``[function, file, line]``. From the kernel, a thread also has
        its ``state``, and one frame without file and line: what it waits for.
    """
    deadline = time.monotonic() + limit
    every = list(pids)
    found = [_known(pid) for pid in every[:_PROCESSES]]
    late = "the process could not be read within {:.0f} s".format(limit)
    for entry in found:
        entry["why"] = late

    def look(entry: Dict[str, Any]) -> None:
        left = deadline - time.monotonic()
        if left > 0:
            entry.update(_looked_at(entry["pid"], left, signals=signals, program=program))

    _at_once(look, found, deadline)
    # A thread that is late must not change the answer any more.
    return {"at": time.time(), "processes": [dict(entry) for entry in found], "omitted": len(every) - len(found)}


def _at_once(look: Callable[[Dict[str, Any]], None], entries: List[Dict[str, Any]], deadline: float) -> None:
    """Call a function for each entry, several at the same time; return at the deadline at the latest.

    A call that does not return is left to a thread that ends with this process. Reading the memory map of a process
    waits as long as the kernel changes it.
    """
    import threading  # imported late, since most requests do not need it

    waiting = iter(entries)
    lock, done = threading.Lock(), threading.Semaphore(0)

    def work() -> None:
        while True:
            with lock:
                entry = next(waiting, None)
            if entry is None:
                return
            try:
                look(entry)
            finally:
                done.release()

    for _ in range(min(_AT_ONCE, len(entries))):
        threading.Thread(target=work, name="stacks", daemon=True).start()
    for _ in entries:
        if not done.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return


def _known(pid: int) -> Dict[str, Any]:
    """Return the facts of a process that can be read without waiting."""
    folder = "/proc/{}".format(pid)
    try:
        user = proc.person_name(os.stat(folder).st_uid)
    except OSError:
        user = ""
    known = {"pid": pid, "parent": proc.parent(pid), "user": user, "command": proc.read_text(folder + "/comm")}
    return dict(known, state=proc.process_state(pid), wait="", source="kernel", why="", threads=[])


def _looked_at(pid: int, limit: float, *, signals: bool, program: str) -> Dict[str, Any]:
    """Return the remaining facts of a process; see `collect`."""
    start = proc.start_time(pid)
    threads = _threads(pid)
    if not start or not threads:
        return {"why": _ENDED, "state": "", "threads": []}
    facts: Dict[str, Any] = {"source": "kernel", "why": "", "threads": threads}
    first = threads[0]
    if first["state"] == "D":
        facts.update(state="D", wait=first["frames"][0][0] if first["frames"] else "")
    facts["command"] = proc.command_line("/proc/{}".format(pid))
    if not spy.is_python(pid):
        return facts
    stacks_, why = spy.read(pid, "".join(thread["state"] for thread in threads), limit * _SHARE, program)
    if stacks_:
        return dict(facts, source="py-spy", threads=stacks_)
    if proc.start_time(pid) != start or not proc.is_alive(pid):
        return dict(facts, why=_ENDED, state="", threads=[])
    if handles(spy.status_of(pid), signal.SIGUSR1):
        if not signals:
            why += "; it handles SIGUSR1, and may write its stacks into the log if it gets it (--signal)"
        elif proc.start_time(pid) == start and _sent(pid):
            why += "; it got SIGUSR1: faulthandler writes to where the program has said, by default into the run's log"
            facts["source"] = "faulthandler"
    return dict(facts, why=why)


def handles(status: Dict[str, str], number: int) -> bool:
    """Return whether a process handles a signal, given its status (see `spy.status_of`): others end by SIGUSR1."""
    try:
        return bool(int(status.get("SigCgt", "0"), 16) >> (number - 1) & 1)
    except ValueError:
        return False


def _sent(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        return False
    return True


def _threads(pid: int) -> List[Dict[str, Any]]:
    """Return the threads of a process as the kernel knows them, its first thread first."""
    folder = "/proc/{}/task".format(pid)
    try:
        names = sorted(os.listdir(folder), key=lambda name: (int(name) != pid, int(name)))
    except OSError:
        return []
    found = []
    for name in names:
        text = proc.read_text("{}/{}/stat".format(folder, name))
        if ")" not in text:
            continue
        state = proc.parse_stat(text)["state"]
        wait = proc.read_text("{}/{}/wchan".format(folder, name))
        frames = [[wait, "", 0]] if wait not in ("", "0") else []
        comm = text[text.index("(") + 1 : text.rindex(")")]
        found.append({"name": comm, "active": state == "R", "state": state, "frames": frames})
    return found


# --- the file beside the log ------------------------------------------------------------------------------------------


def bounded(data: Dict[str, Any], size: int) -> Dict[str, Any]:
    """Return stacks (see `collect`) with as many of their frames, threads and processes as fit into a size in bytes."""
    entries: List[Dict[str, Any]] = data["processes"]
    room = size - len(json.dumps(dict(data, processes=[], omitted=len(entries) + data["omitted"])))
    for frames, threads in _SHORTER:
        kept = _fitting((_shortened(entry, frames, threads) for entry in entries), room)
        if len(kept) == len(entries):
            break
    return dict(data, processes=kept, omitted=data["omitted"] + len(entries) - len(kept))


def _fitting(entries: Iterable[Dict[str, Any]], room: int) -> List[Dict[str, Any]]:
    """Return the first of these entries that fit into this many bytes as JSON. The others are not looked at."""
    kept = []
    for entry in entries:
        room -= len(json.dumps(entry)) + len(", ")
        if room < 0:
            break
        kept.append(entry)
    return kept


def _shortened(entry: Dict[str, Any], frames: int, threads: int) -> Dict[str, Any]:
    kept = [dict(thread, frames=thread["frames"][:frames]) for thread in entry["threads"][:threads]]
    left = len(entry["threads"]) - len(kept)
    more = "{} more threads are left out".format(left) if left else ""
    return dict(entry, threads=kept, why="; ".join(filter(None, (entry["why"], more))))


def kept_path(store: Store, run_id: str) -> str:
    """Return the path of the stacks that are kept beside the log of the attempt in a run's record."""
    return os.path.join(store.logs(run_id), NAME)


def keep(path: str, data: Dict[str, Any]) -> str:
    """Write stacks (see `collect`) into a file of limited size; return the error if the disk fails, else "".

    This waits for the disk.
    """
    try:
        private.write(path, bounded(data, KEPT))
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def read_kept(store: Store, run_id: str) -> Dict[str, Any] | None:
    """Return the stacks that were kept of a run's newest attempt; None if there are none or they are damaged."""
    return _read(kept_path(store, run_id))


def _read(path: str) -> Dict[str, Any] | None:
    with contextlib.suppress(private.Damaged):
        return private.read(path, lambda data: isinstance(data.get("processes"), list))
    return None


def take(store: Store, run_id: str, limit: float) -> int:
    """Keep the stacks of a run that is being ended; called in a process of its own, see `last_look`.

    Stacks that were kept a short while ago stay: they show why the run stood still, before it got SIGTERM.
    """
    deadline = time.monotonic() + limit
    record = store.read(run_id)
    if record is None:
        return 1
    path = kept_path(store, run_id)
    with contextlib.suppress(OSError):
        if time.time() - os.stat(path).st_mtime < _FRESH:
            return 0
    # The processes are about to end anyway, so that a signal which they handle cannot do harm.
    found = collect(processes_of(record), max(0.1, deadline - time.monotonic()), signals=True)
    return 1 if found["processes"] and keep(path, found) else 0
