"""Synced code on a worker: the list of its files, their marks and digest, and the locks of the directory.

The controller also sends the text of this module to workers, with that of `runs/synced.py`: it imports no other module
of this package. Names of files are bytes.
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

#: Below the person's home: where the directories are. In it: the lists of what was put into each, and their locks.
PARENT = b"tpu_ops"
LISTS = b".synced"
_PIECE = 2**20
#: The mark of a directory, and that of what no sync brings.
FOLDER, OTHER = "d", "?"


def mark(path: bytes) -> str:
    """Return what a path is: its kind, with the content or the target of a file or link; empty where nothing is.

    Raises:
        OSError: It cannot be read.
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
    """Return the digest of a tree: of all files' names, executable bits and contents; 12 hexadecimal digits."""
    total = hashlib.sha256()
    for name in sorted(marks):
        if marks[name] != FOLDER:
            kind, content = marks[name][:1].encode(), bytes.fromhex(marks[name][1:])
            total.update(b"\0".join((kind, name, content)) + b"\n")
    return total.hexdigest()[:12]


def listed(parent: bytes, name: bytes) -> set[bytes] | None:
    """Return the files that syncs have put into a directory; None where there is no list."""
    try:
        with open(os.path.join(parent, LISTS, name), "rb") as file:
            return {entry for entry in file.read().split(b"\0") if entry}
    except FileNotFoundError:
        return None


def digest_of(parent: bytes, name: bytes, beat: Callable[[], None] = lambda: None) -> str:
    """Return the digest of the listed files as they are now.

    Args:
        parent: The directory that holds the lists.
        name: The directory's name in it.
        beat: Called before each file is read.

    Raises:
        OSError: A file cannot be read.
    """
    marks = {}
    for entry in listed(parent, name) or ():
        beat()
        marks[entry] = mark(os.path.join(parent, name, entry))
    return digest(marks)


# --- the locks of a directory: their files are the person's, beside the list ------------------------------------


def use_lock(parent: bytes, name: bytes) -> bytes:
    """Return the file that every run locks while it uses a directory (shared), and a sync while it changes that."""
    return os.path.join(parent, LISTS, b"." + name + b".run")


def turn_lock(parent: bytes, name: bytes) -> bytes:
    """Return the file that a sync locks while it copies, and a start until the run has begun."""
    return os.path.join(parent, LISTS, b"." + name + b".sync")


def opened(path: bytes) -> int | None:
    """Return the descriptor of a lock's file, made where it is missing; None where it cannot be opened or made."""
    try:
        # The person may have put a link or a pipe in its place.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def take(descriptor: int | None, *, shared: bool = False) -> bool:
    """Lock a file; return False where a process that excludes this one has it. A file system may know no locks."""
    try:
        if descriptor is not None:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def say(descriptor: int | None, facts: Mapping[str, object]) -> None:
    """Write into a lock's file who has it; a full disk does not take that."""
    with contextlib.suppress(OSError):
        if descriptor is not None:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(facts).encode("ascii"), 0)
            # A home may be on a server: another worker reads this.
            os.fsync(descriptor)


def said(descriptor: int | None) -> dict[str, object]:
    """Return who has a lock, as its file tells; empty where it does not."""
    try:
        found = json.loads(os.pread(descriptor, 2**16, 0)) if descriptor is not None else {}
    except (OSError, ValueError):
        found = {}
    return found if isinstance(found, dict) else {}
