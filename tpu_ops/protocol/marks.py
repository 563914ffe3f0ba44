"""Synced code on a worker: the list of the synced files, their marks and digest, and the locks of the directory.

The controller also sends the source of this module and of `runs/synced.py` to workers: this module therefore imports no
other module of this package. Names of files are bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping

#: Directory below the user's home that contains the synced directories, and the directory in it for the lists of synced
#: files and for locks.
PARENT = b"tpu_ops"
LISTS = b".synced"
_PIECE = 2**20
#: The mark of a directory, and the mark of a path that cannot be synced, such as a socket.
FOLDER, OTHER = "d", "?"


def mark(path: bytes) -> str:
    """Return the mark of a path: its kind, and the digest of a file or the target of a link; "" for a missing path.

    Raises:
        OSError: The path cannot be read.
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return ""
        raise
    if stat.S_ISDIR(mode):
        return FOLDER
    if stat.S_ISLNK(mode):
        return "l" + os.readlink(path).hex()
    if not stat.S_ISREG(mode):
        return OTHER
    total = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(_PIECE), b""):
            total.update(piece)
    return ("x" if mode & stat.S_IXUSR else "f") + total.hexdigest()


def digest(marks: Mapping[bytes, str]) -> str:
    """Return the digest, 12 hexadecimal digits, of the names, executable bits and contents of a directory's files."""
    total = hashlib.sha256()
    for name in sorted(marks):
        if marks[name] != FOLDER:
            kind, content = marks[name][:1].encode(), bytes.fromhex(marks[name][1:])
            total.update(b"\0".join((kind, name, content)) + b"\n")
    return total.hexdigest()[:12]


def listed(parent: bytes, name: bytes) -> set[bytes] | None:
    """Return the files that syncs have put into a directory; None if the directory has no list of synced files."""
    try:
        with open(os.path.join(parent, LISTS, name), "rb") as file:
            return {entry for entry in file.read().split(b"\0") if entry}
    except FileNotFoundError:
        return None


def digest_of(parent: bytes, name: bytes, beat: Callable[[], None] = lambda: None) -> str:
    """Return the digest of the current content of the synced files of a directory.

    Args:
        parent: The directory that contains the synced directory and its list.
        name: The name of the synced directory.
        beat: Called before each file is read.

    Raises:
        OSError: A file cannot be read.
    """
    marks = {}
    for entry in listed(parent, name) or ():
        beat()
        marks[entry] = mark(os.path.join(parent, name, entry))
    return digest(marks)


# --- the locks of a directory: files of the user, beside the list ------------------------------------


def use_lock(parent: bytes, name: bytes) -> bytes:
    """Return the lock file that a run locks (shared) while it uses a directory, and a sync while it changes files."""
    return os.path.join(parent, LISTS, b"." + name + b".run")


def turn_lock(parent: bytes, name: bytes) -> bytes:
    """Return the lock file of a directory that a sync holds while it copies, and a start until the run has begun."""
    return os.path.join(parent, LISTS, b"." + name + b".sync")


def opened(path: bytes) -> int | None:
    """Open or create a lock file; return its descriptor, or None if it cannot be opened."""
    try:
        # O_NOFOLLOW and O_NONBLOCK protect against a link or a FIFO that the user has put at this path.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def take(descriptor: int | None, *, shared: bool = False) -> bool:
    """Lock a file; return False if another process holds the lock. True if the file system does not support locks."""
    try:
        if descriptor is not None:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def say(descriptor: int | None, facts: Mapping[str, object]) -> None:
    """Write facts about the holder of a lock into the lock file. Errors are ignored, for example on a full disk."""
    with contextlib.suppress(OSError):
        if descriptor is not None:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(facts).encode("ascii"), 0)
            # The home can be on a file server: another worker reads this file too.
            os.fsync(descriptor)


def said(descriptor: int | None) -> dict[str, object]:
    """Return the facts about the holder of a lock from the lock file; empty if the file has none."""
    try:
        found = json.loads(os.pread(descriptor, 2**16, 0)) if descriptor is not None else {}
    except (OSError, ValueError):
        found = {}
    return found if isinstance(found, dict) else {}
