"""Work in a person's home with that person's rights; runs on Python 3.8.

The owner of a home can create symbolic links anywhere in it. If root follows one, root writes where the person is not
allowed to; if the person follows it, it leads only where the person is allowed to write.
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

#: Seconds that a process may take to end after its time limit.
PATIENCE = 2

#: The PATH of the process, whatever the environment of the connection.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class PersonFault(Exception):
    """The reason why the work failed, as a message for the user."""


def become(account: pwd.struct_passwd) -> None:
    """Give up this process's rights for those of an account, and start in its home with its environment."""
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
    """Run a function in a process of an account and return its result, which must be one that JSON can hold.

    Args:
        account: The account.
        work: The function.
        seconds: How long it may take; 0 means without limit.

    Raises:
        PersonFault: The function raised it or an OSError, or took too long.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # The forked copy of the module must end here and never return.
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
                # The exception's text could contain data, such as secrets, that the function worked on.
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
        # Even SIGKILL does not end a process that waits for a file system; init will collect it later.
        os.kill(child, signal.SIGKILL)
        raise PersonFault("it did not end within %d s, as where a mount does not answer" % seconds)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        raise PersonFault("it did not end within %d s" % seconds)
    if not text:
        raise PersonFault("the process of %s ended without an answer" % account.pw_name)
    answer = json.loads(text)
    if "fault" in answer:
        raise PersonFault(answer["fault"])
    return answer["value"]


def let_go(kept: int) -> None:
    """Close all inherited descriptors but one: they hold the parent's locks, and output that a reader waits for."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def read_all(reader: int, seconds: float | None) -> bytes | None:
    """Read a pipe to its end; return None if the end does not come in time."""
    found, until = b"", time.monotonic() + (seconds or 0)
    while True:
        left = None if seconds is None else max(0.0, until - time.monotonic())
        if not select.select([reader], [], [], left)[0]:
            return None
        more = os.read(reader, 65536)
        if not more:
            return found
        found += more
