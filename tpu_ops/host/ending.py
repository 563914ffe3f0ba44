"""How a run ends: SIGTERM to the whole tree, a grace, SIGKILL until nothing is left, then a look at the chips."""

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

LOCKFILES = ("/tmp/libtpu_lockfile", "/tmp/libtpu.so_lockfile")  # noqa: S108 - libtpu's own choice
#: How long SIGKILL is repeated until what is left is called stuck, in seconds: the memory of a large program, and what
#: it has mapped of a device, take a while to give back.
KILL_LIMIT = 10.0
_POLL = 0.05
#: How long processes that a command has left behind may take to end by themselves, in seconds: helpers of Python's
#: multiprocessing end just after their parent.
_BY_ITSELF = 0.5
#: Processes that a record names of those left behind.
_NAMED = 100
#: struct flock of Linux on 64-bit machines (fcntl(2)): type, whence, start, length and process.
_FLOCK = struct.Struct("@hhqqi4x")
#: What may stand in a lockfile's place, by its type in a mode.
_KINDS = {stat.S_IFDIR: "a directory with something in it", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
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


def left_behind(cgroup: str, pause: Callable[[float], None]) -> list[Dict[str, Any]]:
    """Return the processes that a command has left in its control group and that do not end by themselves.

    Args:
        cgroup: Directory of the group.
        pause: Called to wait at most so many seconds.

    Returns:
        ``{"pid", "command"}`` each, the command with its arguments.
    """
    deadline = time.monotonic() + _BY_ITSELF
    left = others(cgroup)
    while left and time.monotonic() < deadline:
        pause(_POLL)
        left = others(cgroup)
    return [{"pid": pid, "command": proc.command_line("/proc/{}".format(pid))} for pid in left[:_NAMED]]


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


def in_the_way() -> list[Dict[str, str]]:
    """Return what stands in the place of libtpu's lockfiles, is none, and is not removed here: as `_strange`, each."""
    found = []
    for path in LOCKFILES:
        try:
            strange = _strange(path)
        except OSError:
            continue  # gone, or what a start will say
        if strange:
            found.append(strange)
    return found


def _strange(path: str) -> Dict[str, str] | None:
    """Return what a path is of that is neither a file nor what can go with no loss: ``path``, ``problem``, ``fix``.

    A symbolic link, which is never followed, and an empty directory can go: either keeps libtpu from starting as well.
    Nothing is opened: a FIFO would wait for a writer, and a device do whatever that does to it.

    Raises:
        OSError: It cannot be looked at.
    """
    mode = os.lstat(path).st_mode
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and not os.listdir(path)):
        return None
    what = _KINDS.get(stat.S_IFMT(mode), "a device")
    away = "sudo mv {} /var/tmp/" if stat.S_ISDIR(mode) else "sudo rm {}"
    fix = "`ls -la {0}` on this worker shows whose it is, `{1}` takes it away".format(path, away.format(path))
    return {"path": path, "problem": "it is {} and no lockfile".format(what), "fix": fix}


def _removed(path: str, beat: Callable[[], None] | None) -> str:
    """Remove a file that no process has locked; return why it is still there and what to do, or the empty string.

    Of what else may stand in its place, see `_strange`.
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
            return what + "; end what has it open, or remove it as root"
        os.unlink(path)
    except FileNotFoundError:
        return ""
    except OSError as exc:
        fix = "`lsattr -d {0}` and `findmnt -T {0}` on this worker show what is in the way".format(path)
        return "it cannot be removed: {}; {}".format(exc.strerror or exc, fix)
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
