"""Room for the files that many sessions at once take."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from tpu_ops.errors import OpsError

#: Files that one session has open at most, a copy of its log and the lock of its connection included; and all the rest.
_FILES, _OTHER_FILES = 8, 128
#: Files that are allowed where the system lets a process have them. The connection to a jump host is opened by whoever
#: comes first, perhaps for one worker, and afterwards carries those to all of them, each with some files of its own.
_AMPLE = 8192


def make(sessions: int) -> None:
    """Let this process have open what so many sessions at once take: the usual limit is meant for far fewer.

    Raises:
        OpsError: The system does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # Those of now are in /dev/fd, on Linux and macOS alike.
        now = len([*Path("/dev/fd").iterdir()])
    except OSError:
        # It takes a file to look there: none is left.
        now = soft
    need = now + _OTHER_FILES + _FILES * sessions
    ample = max(need, _AMPLE if hard == resource.RLIM_INFINITY else min(_AMPLE, hard))
    if soft == resource.RLIM_INFINITY or soft >= ample:
        return
    # macOS has a limit below the hard one.
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
