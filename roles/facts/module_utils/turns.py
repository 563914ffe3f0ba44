"""Locks for changes that two playbooks must not make on a worker at once; runs on Python 3.8.

A turn is a lock that the kernel frees with its process, so that a killed process blocks nobody. The text in the file
names the holder, and is meaningless once the lock is free.
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

#: The directory with one file for each kind of work. Only root can use it, and it is empty after a boot.
DIRECTORY = "/run/tpu_ops-turns"

#: The turn at virtual environments, which two roles change.
ENVIRONMENTS = "Python environments"

#: The turn at files of the system, such as /etc/environment, which several roles change.
FILES = "configuration files"

#: The turn at git's configuration for everybody, which two roles change.
GIT = "settings of git"

#: Seconds to wait for a turn: as long as tasks wait for apt's lock (base_apt_lock_timeout).
PATIENCE = 300.0

#: Seconds of waiting after which the module warns.
TOLD = 5.0

#: Seconds between two attempts to take the lock.
_POLL = 0.2
#: The most processes (shells, sudo, Python) between a module and the login session that started it.
_ABOVE = 20


#: The turns that this process has, by the paths of their files.
_HELD: dict[str, TextIO] = {}


def take_turn(module: AnsibleModule, what: str) -> None:
    """Take this worker's turn at a kind of work, until this process ends.

    The module fails if another process holds the turn for too long, and warns if it has waited for some time.

    Args:
        module: The module.
        what: The work, for messages, such as "data disks".
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
                msg="%s: %s is at work on them on this worker, and did not end within %d s; run the same again once"
                " that has ended (if its playbook was killed, what is left of it here ends by itself)"
                % (what, other, waited)
            )
        time.sleep(_POLL)  # polls the lock until the deadline
    waited = time.monotonic() - began
    if other and waited >= TOLD:
        module.warn("%s: waited %.0f s for %s" % (what, waited, other))
    _HELD[path] = lock
    _write(lock, {"who": asker(), "pid": os.getpid(), "since": time.time()})


def tell_change(what: str, paths: list[str]) -> None:
    """Record the paths that this process changes from now on, so that no training run starts meanwhile.

    The launcher reads the record (tpu_ops/host/fitness.py) after its unit exists. So a check for the unit that follows
    this call misses no run.

    Args:
        what: The work, as for `take_turn`.
        paths: What exists and is changed.
    """
    lock = _HELD[os.path.join(DIRECTORY, what.replace(" ", "-"))]
    lock.seek(0)
    _write(lock, dict(json.load(lock), changing=paths))


def _write(lock: TextIO, holder: dict[str, object]) -> None:
    """Write the holder of a turn with one call, so that no reader sees half of it."""
    text = json.dumps(holder)
    lock.seek(0)
    lock.write(text)
    lock.flush()
    lock.truncate(len(text))


def _opened(path: str) -> TextIO:
    """Open the file of a turn, which need not be there yet; what the process starts does not get it."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+", encoding="utf-8")


def _taken(lock: TextIO) -> bool:
    """Try to lock a file, and return whether it worked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(path: str) -> str:
    """Given the file of a turn, return its holder: account, address of the login, start time and pid."""
    try:
        with open(path, encoding="utf-8") as stream:
            found = json.load(stream)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found["since"]))
        return "%s since %s (pid %d)" % (found["who"], since, found["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return "somebody else"


def busy() -> list[str]:
    """Return one line with work and holder for each turn that is held on this worker, without waiting."""
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(DIRECTORY)):
            path = os.path.join(DIRECTORY, name)
            with _opened(path) as lock:
                if not _taken(lock):
                    found.append("%s by %s" % (name.replace("-", " "), holder(path)))
    return found


def asker() -> str:
    """Return the account that started this process through sudo, and the address of its login."""
    try:
        account = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        account = "uid %d" % os.getuid()
    source = _logged_in_from(os.getpid())
    return "%s from %s" % (account, source) if source else account


def _logged_in_from(pid: int) -> str:
    """Return the address that the session of a process comes from; sudo takes it out of the environment below it."""
    for _ in range(_ABOVE):
        try:
            with open("/proc/%d/environ" % pid, "rb") as stream:
                variables = stream.read().split(b"\0")
            with open("/proc/%d/stat" % pid, "rb") as stream:
                # The name of the program, in brackets, can contain anything.
                pid = int(stream.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return ""
        for entry in variables:
            if entry.startswith(b"SSH_CONNECTION="):
                return entry.partition(b"=")[2].split(b" ")[0].decode("ascii", "replace")
        if pid <= 1:
            return ""
    return ""
