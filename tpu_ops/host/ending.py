"""How a run ends: SIGTERM to the whole tree, a grace, SIGKILL until nothing is left, then a look at the chips."""

from __future__ import annotations

import fcntl
import os
import signal
import time

from . import TYPE_CHECKING, proc

if TYPE_CHECKING:
    from typing import Any, Callable, Dict

LOCKFILES = ("/tmp/libtpu_lockfile", "/tmp/libtpu.so_lockfile")  # noqa: S108 - libtpu's own choice
#: How long SIGKILL is repeated until what is left is called stuck, in seconds.
KILL_LIMIT = 10.0
_POLL = 0.05


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
    deadline = time.monotonic() + KILL_LIMIT
    while left and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        pause(_POLL)
        left = others(cgroup)
    return [
        {
            "pid": pid,
            "state": proc.process_state(pid),
            "command": proc.read_text("/proc/{}/comm".format(pid)),
        }
        for pid in left
    ]


def chips_after() -> Dict[str, Any]:
    """Look who holds the chips of this host, and remove libtpu's lockfiles only where nobody does.

    Returns:
        ``holders`` (as `proc.holders`), ``lockfiles_removed`` and ``lockfiles_kept`` (paths).
    """
    holders = proc.holders()
    removed, kept = [], []
    for path in LOCKFILES:
        if not os.path.lexists(path):
            continue
        if not holders and _free(path) and _gone(path):
            removed.append(path)
        else:
            kept.append(path)
    return {"holders": holders, "lockfiles_removed": removed, "lockfiles_kept": kept}


def _gone(path: str) -> bool:
    """Remove a file; return whether it is gone, which a read-only disk prevents."""
    try:
        os.unlink(path)
    except OSError:
        return not os.path.lexists(path)
    return True


def _free(path: str) -> bool:
    """Return whether no process has locked a file; a symbolic link is never followed and counts as free."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return os.path.islink(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
