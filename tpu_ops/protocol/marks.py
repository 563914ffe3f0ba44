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

#: Directory below the user's home that contains the synced directories; and the directory in it for the lists of synced
#: files and the locks.
PARENT = b"tpu_ops"
LISTS = b".synced"
_PIECE = 2**20
#: The mark of a directory, and that of a file that cannot be synced.
FOLDER, OTHER = "d", "?"


def mark(path: bytes) -> str:
    """Return the mark of a path: its kind, with the digest of a file or the target of a link; empty if it is missing.

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
    """Return the digest of a tree: of the names, executable bits and contents of all files; 12 hexadecimal digits."""
    total = hashlib.sha256()
    for name in sorted(marks):
        if marks[name] != FOLDER:
            kind, content = marks[name][:1].encode(), bytes.fromhex(marks[name][1:])
            total.update(b"\0".join((kind, name, content)) + b"\n")
    return total.hexdigest()[:12]


def listed(parent: bytes, name: bytes) -> set[bytes] | None:
    """Return the files that syncs have put into a directory; None if there is no list."""
    try:
        with open(os.path.join(parent, LISTS, name), "rb") as file:
            return {entry for entry in file.read().split(b"\0") if entry}
    except FileNotFoundError:
        return None


def digest_of(parent: bytes, name: bytes, beat: Callable[[], None] = lambda: None) -> str:
    """Return the digest of the current content of the listed files.

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
    """Return the file that a run locks (shared) while it uses a directory, and a sync while it changes files."""
    return os.path.join(parent, LISTS, b"." + name + b".run")


def turn_lock(parent: bytes, name: bytes) -> bytes:
    """Return the file that a sync locks while it copies, and a start until the run has begun."""
    return os.path.join(parent, LISTS, b"." + name + b".sync")


def opened(path: bytes) -> int | None:
    """Open or create a lock's file; return the descriptor, or None if that is impossible."""
    try:
        # The flags guard against a link or a pipe that the user has put in its place.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def take(descriptor: int | None, *, shared: bool = False) -> bool:
    """Lock a file; return False if another process has it. A file system without locks counts as success."""
    try:
        if descriptor is not None:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def say(descriptor: int | None, facts: Mapping[str, object]) -> None:
    """Write the holder's facts into a lock's file; errors, as on a full disk, are ignored."""
    with contextlib.suppress(OSError):
        if descriptor is not None:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(facts).encode("ascii"), 0)
            # The home may be on a file server, where another worker reads this.
            os.fsync(descriptor)


def said(descriptor: int | None) -> dict[str, object]:
    """Return the holder's facts from a lock's file; empty if there are none."""
    try:
        found = json.loads(os.pread(descriptor, 2**16, 0)) if descriptor is not None else {}
    except (OSError, ValueError):
        found = {}
    return found if isinstance(found, dict) else {}
