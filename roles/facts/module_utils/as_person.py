"""Run a function in a person's home with that person's rights; supports Python 3.8.

The owner of a home can create symbolic links anywhere in the home. A root process that follows such a link would write
where the person is not allowed to write. A process with the person's rights cannot.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import select
import signal
import time
from collections.abc import Callable
from typing import Any

#: Seconds to wait for the end of the person's process after its time limit.
PATIENCE = 2

#: The PATH of the person's process, whatever PATH the Ansible connection has.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class PersonFault(Exception):
    """The function failed in the person's process; the text is the message for the user."""


def become(account: pwd.struct_passwd) -> None:
    """Change this process to the user id and groups, environment variables and home directory of an account."""
    if os.geteuid() != account.pw_uid:
        os.initgroups(account.pw_name, account.pw_gid)
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    for name in list(os.environ):
        if name.startswith(("SUDO_", "SSH_", "XDG_", "GIT_")):
            del os.environ[name]
    names = {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name, "PATH": PATH}
    os.environ.update(names, LC_ALL="C.UTF-8")
    os.umask(0o022)
    try:
        os.chdir(account.pw_dir)
    except OSError:
        os.chdir("/")


def as_person(account: pwd.struct_passwd, work: Callable[[], Any], seconds: int = 0) -> Any:
    """Run a function in a child process with an account's rights and return its result, which must be valid JSON.

    Args:
        account: The account.
        work: The function, without arguments.
        seconds: The time limit; 0 means no limit.

    Raises:
        PersonFault: The function raised PersonFault or OSError, or exceeded the time limit.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # The child process must end here: it must not return into the module.
        try:
            os.close(reader)
            if seconds:
                let_go(writer)
            try:
                become(account)
                signal.alarm(seconds)
                answer = {"value": work()}
            except (PersonFault, OSError) as exc:
                answer = {"fault": str(exc)}
            except Exception as exc:
                # Only the exception's type is reported: its text could contain data of the function, such as secrets.
                answer = {"fault": "%s in the module" % type(exc).__name__}
            with os.fdopen(writer, "w") as stream:
                json.dump(answer, stream)
        finally:
            os._exit(0)
    os.close(writer)
    try:
        text = read_all(reader, seconds + PATIENCE if seconds else None)
    finally:
        os.close(reader)
    if text is None:
        # Even SIGKILL does not end a process that waits for a file system, so do not wait for it: init collects it
        # later.
        os.kill(child, signal.SIGKILL)
        raise PersonFault(
            "the work in the person's home did not end within %d s; perhaps a mount there does not answer" % seconds
        )
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        raise PersonFault("the work in the person's home did not end within %d s" % seconds)
    if not text:
        raise PersonFault("the process with the rights of %s ended without a result" % account.pw_name)
    answer = json.loads(text)
    if "fault" in answer:
        raise PersonFault(answer["fault"])
    return answer["value"]


def let_go(kept: int) -> None:
    """Close all inherited file descriptors but one, since they keep the parent's locks and output open."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def read_all(reader: int, seconds: float | None) -> bytes | None:
    """Read a pipe until it is closed; return None if it is not closed within the time limit."""
    found, until = b"", time.monotonic() + (seconds or 0)
    while True:
        left = None if seconds is None else max(0.0, until - time.monotonic())
        if not select.select([reader], [], [], left)[0]:
            return None
        more = os.read(reader, 65536)
        if not more:
            return found
        found += more
