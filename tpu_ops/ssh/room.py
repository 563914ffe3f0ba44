"""Raises the limit of open files for many concurrent sessions."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from tpu_ops.errors import OpsError

#: Maximum number of open files of one session, including its log copy and its connection's lock, and of the rest of
#: this process.
_FILES, _OTHER_FILES = 8, 128
#: Number of open files to allow if the system permits it. The ssh process of the first session can also become the
#: connection to a jump host: it inherits this limit and later needs open files for the sessions of all workers.
_AMPLE = 8192


def make(sessions: int) -> None:
    """Raise this process's limit of open files so that it can have this many sessions.

    Raises:
        OpsError: The system does not allow so many open files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # On Linux and macOS, /dev/fd lists the open files of this process.
        now = len([*Path("/dev/fd").iterdir()])
    except OSError:
        # /dev/fd cannot be opened, since the limit of open files is already reached.
        now = soft
    need = now + _OTHER_FILES + _FILES * sessions
    ample = max(need, _AMPLE if hard == resource.RLIM_INFINITY else min(_AMPLE, hard))
    if soft == resource.RLIM_INFINITY or soft >= ample:
        return
    # On macOS this can fail, since another limit is lower than the hard limit.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (ample, hard))
        return
    if soft >= need:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
    except (OSError, ValueError) as exc:
        raise OpsError(
            f"{sessions} sessions at once need {need} open files, and a process may have only {hard}",
            where="this machine: the hard limit of open files (ulimit -Hn)",
            fix="raise this limit (LimitNOFILE= of the service, nofile in /etc/security/limits.conf), or name fewer "
            "workers",
        ) from exc
