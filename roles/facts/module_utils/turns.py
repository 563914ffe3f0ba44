"""Locks for changes that two playbooks must not make on a worker at the same time; supports Python 3.8.

A turn is a lock on a file. The kernel frees the lock when its process ends, so a killed process blocks nobody. The text
in the file names the holder, and is meaningless while nobody holds the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import time
from typing import TextIO

from ansible.module_utils.basic import AnsibleModule

#: The directory with one lock file for each kind of work. Only root can use the directory, and it is empty after a
#: boot.
DIRECTORY = "/run/tpu_ops-turns"

#: The kind of work for changes of virtual environments, which two roles make.
ENVIRONMENTS = "Python environments"

#: The kind of work for changes of system files, such as /etc/environment, which several roles make.
FILES = "configuration files"

#: The kind of work for changes of git's system configuration, which two roles make.
GIT = "settings of git"

#: Time limit in seconds for the wait for a turn; equal to the default time limit for apt's lock
#: (base_apt_lock_timeout).
PATIENCE = 300.0

#: The module warns if it has waited for a turn for at least this many seconds.
TOLD = 5.0

#: Seconds between two attempts to take the lock.
_POLL = 0.2
#: The maximum number of parent processes (shells, sudo, Python) that are searched for the login session.
_ABOVE = 20


#: The turns that this process holds: path of the lock file -> open lock file.
_HELD: dict[str, TextIO] = {}


def take_turn(module: AnsibleModule, what: str) -> None:
    """Wait for the lock on a kind of work on this worker, and hold it until this process ends.

    The module fails if another process holds the lock for too long, and warns if it has waited for several seconds.

    Args:
        module: The module.
        what: The kind of work as used in messages, such as "data disks".
    """
    os.makedirs(DIRECTORY, mode=0o700, exist_ok=True)
    path = os.path.join(DIRECTORY, what.replace(" ", "-"))
    if path in _HELD:
        return
    lock = _opened(path)
    began, other = time.monotonic(), ""
    while not _taken(lock):
        waited, other = time.monotonic() - began, holder(path)
        if waited >= PATIENCE:
            lock.close()
            module.fail_json(
                msg="%s: %s is at work on them on this worker, and did not end within %d s; run this playbook again"
                " once that has ended (if its playbook was killed, what is left of it here ends by itself)"
                % (what, other, waited)
            )
        time.sleep(_POLL)  # polls the lock until the deadline
    waited = time.monotonic() - began
    if other and waited >= TOLD:
        module.warn("%s: waited %.0f s for %s" % (what, waited, other))
    _HELD[path] = lock
    _write(lock, {"who": asker(), "pid": os.getpid(), "since": time.time()})


def tell_change(what: str, paths: list[str]) -> None:
    """Record the paths that this process is about to change, so that no training run starts until it has ended.

    The launcher reads this record (tpu_ops/host/fitness.py) after it has created the run's unit. So a caller that
    checks for the unit after this call either sees the run, or the run sees the record.

    Args:
        what: The kind of work, as in `take_turn`.
        paths: The existing paths that are about to change.
    """
    lock = _HELD[os.path.join(DIRECTORY, what.replace(" ", "-"))]
    lock.seek(0)
    _write(lock, dict(json.load(lock), changing=paths))


def _write(lock: TextIO, holder: dict[str, object]) -> None:
    """Write a turn's holder to its lock file with a single system call, so that readers never see a partial text."""
    text = json.dumps(holder)
    lock.seek(0)
    lock.write(text)
    lock.flush()
    lock.truncate(len(text))


def _opened(path: str) -> TextIO:
    """Open or create the lock file of a turn; child processes do not inherit it."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+", encoding="utf-8")


def _taken(lock: TextIO) -> bool:
    """Try to lock an open file without waiting, and return whether it is locked now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(path: str) -> str:
    """Given the path of a turn's lock file, return its holder: account, client address, start time and pid."""
    try:
        with open(path, encoding="utf-8") as stream:
            found = json.load(stream)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found["since"]))
        return "%s since %s (pid %d)" % (found["who"], since, found["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return "somebody else"


def busy() -> list[str]:
    """Return a line with kind of work and holder for each turn that is held on this worker at present."""
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(DIRECTORY)):
            path = os.path.join(DIRECTORY, name)
            with _opened(path) as lock:
                if not _taken(lock):
                    found.append("%s by %s" % (name.replace("-", " "), holder(path)))
    return found


def asker() -> str:
    """Return the account that logged in and started this process, and the address from which it logged in."""
    try:
        account = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        account = "uid %d" % os.getuid()
    source = _logged_in_from(os.getpid())
    return "%s from %s" % (account, source) if source else account


def _logged_in_from(pid: int) -> str:
    """Return the client address of the ssh session of a process; empty if it has none.

    sudo removes the address from the environment, so the environments of parent processes are searched.
    """
    for _ in range(_ABOVE):
        try:
            with open("/proc/%d/environ" % pid, "rb") as stream:
                variables = stream.read().split(b"\0")
            with open("/proc/%d/stat" % pid, "rb") as stream:
                # The name of the program, in parentheses, can contain any character, so the fields after it are
                # counted.
                pid = int(stream.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return ""
        for entry in variables:
            if entry.startswith(b"SSH_CONNECTION="):
                return entry.partition(b"=")[2].split(b" ")[0].decode("ascii", "replace")
        if pid <= 1:
            return ""
    return ""
