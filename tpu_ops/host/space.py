"""The free space of file systems, and the fixes for full file systems as text for users."""

from __future__ import annotations

import errno
import os

#: A file system with less free space than this, in bytes, counts as full.
LITTLE = 64 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Error numbers of a file system that accepts no more data.
NOT_TAKEN = (*_FULL, errno.EROFS)


def facts(path: str) -> dict[str, int]:
    """Return the ``free`` and ``total`` bytes of a path's file system, and how many ``files`` can still be created.

    ``files`` is -1 if the file system does not limit the number of files.

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
    """Return whether the file system of a path is full; False if it cannot be queried."""
    try:
        found = facts(path)
    except OSError:
        return False
    return found["free"] < LITTLE or found["files"] == 0


def left(path: str) -> str:
    """Return the free space at a path as text; empty if unknown. If the path does not exist, its parent is used."""
    while path not in ("", "/") and not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        found = facts(path)
    except OSError:
        return ""
    text = "{} has {:.1f} of {:.1f} MiB free".format(path, found["free"] / 2**20, found["total"] / 2**20)
    return text + (" and no inodes left" if found["files"] == 0 else "")


def why(exc: OSError, paths: list[str]) -> str:
    """Return as text why files could not be written, with the free space.

    Args:
        exc: The error.
        paths: The paths of the files.
    """
    room = "; ".join(filter(None, map(left, paths))) if exc.errno in _FULL else ""
    return (exc.strerror or str(exc)) + (" ({})".format(room) if room else "")


def fix(exc: OSError, paths: list[str]) -> str:
    """Return as text the fix for files that could not be written.

    Args:
        exc: The error.
        paths: The paths of the files.
    """
    if exc.errno == errno.EDQUOT:
        return "`sudo repquota -a` on this worker shows which quota is used up"
    if exc.errno in _FULL:
        text = (
            "make room on this file system: `df {0}; df -i {0}; sudo du -xh -d 2 {0}` on this worker show what "
            "uses the space"
        )
        return text.format(" ".join(paths))
    text = "`df {0}; findmnt -T {0}; sudo dmesg` on this worker show what is wrong with the disk"
    return text.format(paths[0])
