"""The free space of file systems, and fixes for full ones, as text for users."""

from __future__ import annotations

import errno
import os

#: A file system with less free space counts as full, in bytes.
LITTLE = 64 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Errors of a file system that accepts no more data.
NOT_TAKEN = (*_FULL, errno.EROFS)


def facts(path: str) -> dict[str, int]:
    """Return the ``free`` and ``total`` bytes of a path's file system, and the number of ``files`` that still fit.

    The last is -1 if the file system has no limit of its own.

    Raises:
        OSError: The file system cannot be queried.
    """
    found = os.statvfs(path)
    return {
        "free": found.f_bavail * found.f_frsize,
        "total": found.f_blocks * found.f_frsize,
        "files": found.f_favail if found.f_files else -1,
    }


def is_full(path: str) -> bool:
    """Return whether the file system of a path is full, as far as it reports that."""
    try:
        found = facts(path)
    except OSError:
        return False
    return found["free"] < LITTLE or found["files"] == 0


def left(path: str) -> str:
    """Return the free space at a path, which may not exist yet, as text; empty if it is unknown."""
    while path not in ("", "/") and not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        found = facts(path)
    except OSError:
        return ""
    text = "{} has {:.1f} of {:.1f} MiB free".format(path, found["free"] / 2**20, found["total"] / 2**20)
    return text + (" and no inodes left" if found["files"] == 0 else "")


def why(exc: OSError, paths: list[str]) -> str:
    """Return why files could not be written, with the free space.

    Args:
        exc: The error.
        paths: The paths of the files.
    """
    room = "; ".join(filter(None, map(left, paths))) if exc.errno in _FULL else ""
    return (exc.strerror or str(exc)) + (" ({})".format(room) if room else "")


def fix(exc: OSError, paths: list[str]) -> str:
    """Return the fix for files that could not be written.

    Args:
        exc: The error.
        paths: The paths of the files.
    """
    if exc.errno == errno.EDQUOT:
        return "`sudo repquota -a` on this worker shows the quota that is used up"
    if exc.errno in _FULL:
        text = "make room there: `df {0}; df -i {0}; sudo du -xh -d 2 {0}` on this worker show what uses it"
        return text.format(" ".join(paths))
    text = "`df {0}; findmnt -T {0}; sudo dmesg` on this worker show what is wrong with that disk"
    return text.format(paths[0])
