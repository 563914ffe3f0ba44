"""How a run ends: SIGTERM to the whole tree, a grace, SIGKILL until nothing is left, then a look at the chips."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import time

from . import TYPE_CHECKING, proc

if TYPE_CHECKING:
    from typing import Any, Callable, Dict

LOCKFILES = ("/tmp/libtpu_lockfile", "/tmp/libtpu.so_lockfile")  # noqa: S108 - libtpu's own choice
#: How long SIGKILL is repeated until what is left is called stuck, in seconds: the memory of a large program, and what
#: it has mapped of a device, take a while to give back.
KILL_LIMIT = 10.0
_POLL = 0.05
#: struct flock of Linux on 64-bit machines (fcntl(2)): type, whence, start, length and process.
_FLOCK = struct.Struct("@hhqqi4x")
#: Processes that are named of those that have a lockfile open.
_SHOWN = 3


def others(cgroup: str) -> list[int]:
    """Return every process of a control group but this one; the dead that nobody has collected do not count."""
    own = os.getpid()
    return [pid for pid in proc.cgroup_pids(cgroup) if pid != own and proc.is_alive(pid)]


def send(pids: list[int], number: int) -> None:
    """Send a signal to each of these processes; some may be gone already."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end_tree(cgroup: str, grace: float, pause: Callable[[float], None]) -> list[Dict[str, Any]]:
    """End every process of a control group but this one.

    Args:
        cgroup: Directory of the group.
        grace: Seconds between SIGTERM and SIGKILL. A process that started meanwhile gets its SIGTERM too.
        pause: Called to wait at most so many seconds.

    Returns:
        What could not be ended: ``{"pid", "state", "command"}`` each; state D waits inside the kernel.
    """
    told: set[int] = set()
    deadline = time.monotonic() + grace
    left = others(cgroup)
    while left and time.monotonic() < deadline:
        fresh = [pid for pid in left if pid not in told]
        send(fresh, signal.SIGTERM)
        told.update(fresh)
        pause(min(_POLL, max(0.0, deadline - time.monotonic())))
        left = others(cgroup)
    return _kill(cgroup, pause)


def end_left(cgroup: str) -> list[Dict[str, Any]]:
    """End the processes of a control group but this one, whose supervisor is dead; return those that do not go.

    systemd has done so already, but where its watchdog has ended the supervisor: then it does so later.

    Args:
        cgroup: Directory of the group, which may be gone.

    Returns:
        As `end_tree`.
    """
    return _kill(cgroup, time.sleep)


def _kill(cgroup: str, pause: Callable[[float], None]) -> list[Dict[str, Any]]:
    """Kill the processes of a control group but this one until they are gone; return those that do not go."""
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
    """Look who holds the chips of this host, and remove libtpu's lockfiles only where nobody does.

    Args:
        beat: As for `proc.holders`.

    Returns:
        ``holders`` (as `proc.holders`), ``lockfiles_removed`` and ``lockfiles_kept`` (paths), ``lockfile_faults`` (why
        a path is kept though nobody holds a chip).
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


def _removed(path: str, beat: Callable[[], None] | None) -> str:
    """Remove a file that no process has locked; return why it is still there, or the empty string.

    A symbolic link is never followed, and counts as one that nobody has locked. So does a directory, which keeps libtpu
    from starting as well; one in which there is something stays.
    """
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
            return ""
        if not os.path.islink(path) and _locked(path):
            named = "pid {pid} of {user} ({command})"
            found = proc.holders(paths=[path], beat=beat)
            openers = ", ".join(named.format(**entry) for entry in found[:_SHOWN])
            return "it is locked" + (", and open in {}".format(openers) if openers else "")
        os.unlink(path)
    except FileNotFoundError:
        return ""
    except OSError as exc:
        what = "it is a directory and" if exc.errno == errno.ENOTEMPTY else "it"
        return "{} cannot be removed: {}".format(what, exc.strerror or exc)
    return ""


def _locked(path: str) -> bool:
    """Return whether a process has locked a file, by either kind of lock.

    libtpu takes that of `lockf` (`TryAcquireTpuLock` in XLA's tpu_initialize_util.cc), which `flock` does not see.
    It is only asked for: one taken here, however briefly, would have a libtpu that starts at this moment give up.

    Raises:
        OSError: It cannot be opened.
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
