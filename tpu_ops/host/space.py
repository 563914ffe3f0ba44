"""How much room file systems have, and what to do about one that takes no more, in words for people."""

from __future__ import annotations

import errno
import os

#: Free bytes with which a file system counts as full.
LITTLE = 64 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Of what a file system says that takes nothing more.
NOT_TAKEN = (*_FULL, errno.EROFS)


def facts(path: str) -> dict[str, int]:
    """Return ``free`` and ``total`` bytes of the file system that a path is on, and how many ``files`` it still takes.

    The last is -1 where it has no limit of its own.

    Raises:
        OSError: It cannot be asked.
    """
    found = os.statvfs(path)
    return {
        "free": found.f_bavail * found.f_frsize,
        "total": found.f_blocks * found.f_frsize,
        "files": found.f_favail if found.f_files else -1,
    }


def is_full(path: str) -> bool:
    """Return whether the file system of a path takes no more, as far as it says."""
    try:
        found = facts(path)
    except OSError:
        return False
    return found["free"] < LITTLE or found["files"] == 0


def left(path: str) -> str:
    """Return how much room there is where a path is, or is to be made; empty where that is not known."""
    while path not in ("", "/") and not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        found = facts(path)
    except OSError:
        return ""
    text = "{} has {:.1f} of {:.1f} MiB free".format(path, found["free"] / 2**20, found["total"] / 2**20)
    return text + (" and takes no more files" if found["files"] == 0 else "")


def why(exc: OSError, paths: list[str]) -> str:
    """Return why files could not be written, and how much room there is.

    Args:
        exc: The failure.
        paths: Where they were to be.
    """
    room = "; ".join(filter(None, map(left, paths))) if exc.errno in _FULL else ""
    return (exc.strerror or str(exc)) + (" ({})".format(room) if room else "")


def fix(exc: OSError, paths: list[str]) -> str:
    """Return what to do where files could not be written.

    Args:
        exc: The failure.
        paths: Where they were to be.
    """
    if exc.errno == errno.EDQUOT:
        return "`sudo repquota -a` on this worker shows whose quota ends there"
    if exc.errno in _FULL:
        text = "make room there: `df {0}; df -i {0}; sudo du -xh -d 2 {0}` on this worker show what takes it"
        return text.format(" ".join(paths))
    text = "`df {0}; findmnt -T {0}; sudo dmesg` on this worker show what is wrong with that disk"
    return text.format(paths[0])
