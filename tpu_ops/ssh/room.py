"""Raises the limit of open files for many concurrent sessions."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from tpu_ops.errors import OpsError

#: Most open files of one session, including its log copy and its connection's lock, and of everything else.
_FILES, _OTHER_FILES = 8, 128
#: Open files that are allowed if the system permits it. The first session opens the connection to a jump, perhaps for
#: one worker only, but the connection later carries the sessions to all workers, each with some open files.
_AMPLE = 8192


def make(sessions: int) -> None:
    """Allow this process the open files of so many sessions: the usual limit is far lower.

    Raises:
        OpsError: The system does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # /dev/fd lists the open files, on Linux and macOS alike.
        now = len([*Path("/dev/fd").iterdir()])
    except OSError:
        # Listing the directory needs an open file: none is left.
        now = soft
    need = now + _OTHER_FILES + _FILES * sessions
    ample = max(need, _AMPLE if hard == resource.RLIM_INFINITY else min(_AMPLE, hard))
    if soft == resource.RLIM_INFINITY or soft >= ample:
        return
    # macOS has another limit, below the hard one.
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
            fix="raise it (LimitNOFILE= of the service, nofile in /etc/security/limits.conf), or name fewer workers",
        ) from exc
