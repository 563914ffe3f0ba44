"""Ends a run: SIGTERM to all processes, a grace period, SIGKILL until no process is left, then a check of the chips."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import struct
import time

from . import TYPE_CHECKING, proc

if TYPE_CHECKING:
    from typing import Any, Callable, Dict

    from .last_look import LastLook

LOCKFILES = ("/tmp/libtpu_lockfile", "/tmp/libtpu.so_lockfile")  # noqa: S108 - libtpu's own choice
#: Seconds for which SIGKILL is repeated before remaining processes count as stuck. The kernel needs a while to free the
#: memory of a large program and its mappings of a device.
KILL_LIMIT = 10.0
_POLL = 0.05
#: Seconds for processes that a command left behind to end by themselves: helpers of Python's multiprocessing end
#: shortly after their parent.
_BY_ITSELF = 0.5
#: Maximum number of processes that a record lists because the command left them running.
_NAMED = 100
#: struct flock of Linux on 64-bit machines (fcntl(2)): type, whence, start, length and process.
_FLOCK = struct.Struct("@hhqqi4x")
#: File type -> description, for files other than a lockfile at a lockfile's path.
_KINDS = {stat.S_IFDIR: "a directory with something in it", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
#: Maximum number of processes that a message names because they have a lockfile open.
_SHOWN = 3


def others(cgroup: str) -> list[int]:
    """Return the ids of all processes of a control group, without this process and without zombies."""
    own = os.getpid()
    return [pid for pid in proc.cgroup_pids(cgroup) if pid != own and proc.is_alive(pid)]


def send(pids: list[int], number: int) -> None:
    """Send a signal to each of these processes; ignore processes that have ended already."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def left_behind(cgroup: str, pause: Callable[[float], None]) -> list[Dict[str, Any]]:
    """Return the processes that a command left in its control group and that do not end by themselves.

    Args:
        cgroup: Directory of the group.
        pause: Called to wait for at most this many seconds.

    Returns:
        For each process a dict with ``pid`` and ``command``, the command line.
    """
    deadline = time.monotonic() + _BY_ITSELF
    left = others(cgroup)
    while left and time.monotonic() < deadline:
        pause(_POLL)
        left = others(cgroup)
    return [{"pid": pid, "command": proc.command_line("/proc/{}".format(pid))} for pid in left[:_NAMED]]


def end_tree(
    cgroup: str, grace: float, pause: Callable[[float], None], last_look: LastLook | None = None
) -> list[Dict[str, Any]]:
    """End every process of a control group except this process.

    Args:
        cgroup: Directory of the group.
        grace: Seconds between SIGTERM and SIGKILL. Processes that start in these seconds get SIGTERM too.
        pause: Called to wait for at most this many seconds.
        last_look: Takes the stacks of the processes that are left after half of the grace.

    Returns:
        The remaining processes: ``{"pid", "state", "command"}`` each. In state D, a process waits inside the kernel.
    """
    told: set[int] = set()
    deadline = time.monotonic() + grace
    left = others(cgroup)
    while left and time.monotonic() < deadline:
        fresh = [pid for pid in left if pid not in told]
        send(fresh, signal.SIGTERM)
        told.update(fresh)
        if last_look is not None and deadline - time.monotonic() < grace / 2:
            last_look.take(deadline - time.monotonic())
        pause(min(_POLL, max(0.0, deadline - time.monotonic())))
        left = [pid for pid in others(cgroup) if last_look is None or not last_look.is_own(pid)]
    return _kill(cgroup, pause)


def end_left(cgroup: str) -> list[Dict[str, Any]]:
    """End the processes of a control group, except this process, after the group's supervisor has died.

    systemd has already ended these processes, unless its watchdog ended the supervisor: systemd then ends them later.

    Args:
        cgroup: Directory of the group, which can be gone already.

    Returns:
        The remaining processes; see `end_tree`.
    """
    return _kill(cgroup, time.sleep)


def _kill(cgroup: str, pause: Callable[[float], None]) -> list[Dict[str, Any]]:
    """Repeat SIGKILL to the processes of a control group, except this process; return processes that remain."""
    deadline = time.monotonic() + KILL_LIMIT
    left = others(cgroup)
    while left and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        pause(_POLL)
        left = others(cgroup)
    return _told(left)


def _told(pids: list[int]) -> list[Dict[str, Any]]:
    return [
        {
            "pid": pid,
            "state": proc.process_state(pid),
            "command": proc.read_text("/proc/{}/comm".format(pid)),
        }
        for pid in pids
    ]


def chips_after(beat: Callable[[], None] | None = None) -> Dict[str, Any]:
    """Return the processes that hold this host's chips; if there are none, remove libtpu's lockfiles.

    Args:
        beat: Called from time to time during the search; see `proc.holders`.

    Returns:
        ``holders`` (see `proc.holders`), ``lockfiles_removed`` and ``lockfiles_kept`` (paths), ``lockfile_faults`` (why
        a path is kept although no process holds a chip).
    """
    holders = proc.holders(beat=beat)
    removed, kept, faults = [], [], {}
    for path in LOCKFILES:
        if not os.path.lexists(path):
            continue
        if not holders:
            faults[path] = _removed(path, beat)
        if faults.get(path) == "":
            removed.append(path)
            del faults[path]
        else:
            kept.append(path)
    return {"holders": holders, "lockfiles_removed": removed, "lockfiles_kept": kept, "lockfile_faults": faults}


def in_the_way() -> list[Dict[str, str]]:
    """Describe files at the paths of libtpu's lockfiles that are no lockfiles (see `_strange`); remove nothing."""
    found = []
    for path in LOCKFILES:
        try:
            strange = _strange(path)
        except OSError:
            continue  # the path was removed just now, or a start will report the error
        if strange:
            found.append(strange)
    return found


def _strange(path: str) -> Dict[str, str] | None:
    """Return ``path``, ``problem`` and ``fix`` if a path is no regular file and must not be removed; else None.

    A symbolic link, which is never followed, and an empty directory can be removed without loss; both keep libtpu from
    starting. The path is not opened: a FIFO would wait for a writer, and opening a device can have effects.

    Raises:
        OSError: The path cannot be inspected.
    """
    mode = os.lstat(path).st_mode
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and not os.listdir(path)):
        return None
    what = _KINDS.get(stat.S_IFMT(mode), "a device")
    away = "sudo mv {} /var/tmp/" if stat.S_ISDIR(mode) else "sudo rm {}"
    fix = "`ls -la {0}` on this worker shows its owner, `{1}` removes it".format(path, away.format(path))
    return {"path": path, "problem": "it is {}, not a lockfile".format(what), "fix": fix}


def _removed(path: str, beat: Callable[[], None] | None) -> str:
    """Remove a lockfile unless a process has locked it; return why the file was not removed and the fix, or "".

    If the path is another kind of file, the description from `_strange` is returned.
    """
    try:
        strange = _strange(path)
        if strange:
            return "{problem}; {fix}".format(**strange)
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
            return ""
        if not os.path.islink(path) and _locked(path):
            named = "pid {pid} of {user} ({command})"
            found = proc.holders(paths=[path], beat=beat)
            openers = ", ".join(named.format(**entry) for entry in found[:_SHOWN])
            what = "it is locked" + (", and open in {}".format(openers) if openers else "")
            return what + "; end the process that has the lockfile open, or remove the lockfile as root"
        os.unlink(path)
    except FileNotFoundError:
        return ""
    except OSError as exc:
        fix = "`lsattr -d {0}` and `findmnt -T {0}` on this worker show the reason".format(path)
        return "it cannot be removed: {}; {}".format(exc.strerror or exc, fix)
    return ""


def _locked(path: str) -> bool:
    """Return whether a process has locked a file with `lockf` or `flock`.

    libtpu uses `lockf` (`TryAcquireTpuLock` in XLA's tpu_initialize_util.cc), and `flock` does not see locks of
    `lockf`. This function only tests the lock of `lockf`: taking it, even briefly, would make a starting libtpu give
    up.

    Raises:
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        if _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))[0] != fcntl.F_UNLCK:
            return True
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
