"""Reads the commit of a git clone from its files: git may be missing, and would have to run as the clone's owner.

The formats are those of gitrepository-layout(5) and git-pack-refs(1).
"""

from __future__ import annotations

import os
import stat

from tpu_ops.protocol.spec import COMMIT

from .command import NotReady

#: Maximum depth of symbolic references (`SYMREF_MAXDEPTH` in git's refs-internal.h).
_DEEPEST = 5
#: Maximum size of a reference file that is read, in bytes: more than any list of references needs.
_LARGEST = 256 * 1024 * 1024


def require(clone: str, commit: str) -> None:
    """Check that a commit is checked out in a clone. A clone that this process cannot read is not checked.

    Raises:
        NotReady: Another commit is checked out: it replaced the expected commit after the controller's check.
    """
    found = head(clone)
    if found and found != commit:
        what = "{} is at {} and no longer at {}".format(clone, found[:12], commit[:12])
        fix = (
            "somebody else has checked out another commit since this run was prepared (`git -C {} reflog` on this "
            "worker shows what was "
            "done): agree on one commit, or use a project each, and start again"
        )
        raise NotReady("{}; {}".format(what, fix.format(clone)))


def head(clone: str) -> str:
    """Return the commit that is checked out in a clone; empty if the files do not tell it, as with reftables."""
    own = os.path.join(clone, ".git")
    if not os.path.isdir(own):
        # In a worktree or a submodule, .git is a file.
        word, _, place = _read(own).partition(" ")
        if word != "gitdir:":
            return ""
        own = os.path.join(clone, place)
    common = os.path.join(own, _read(os.path.join(own, "commondir")))
    value = _read(os.path.join(own, "HEAD"))
    for _ in range(_DEEPEST):
        if COMMIT.fullmatch(value):
            return value
        name = value[len("ref: ") :].strip()
        if not value.startswith("ref: refs/") or ".." in name:
            return ""
        value = _read(os.path.join(common, name)) or _packed(common, name)
    return ""


def _packed(common: str, name: str) -> str:
    """Return the commit of a reference in the file packed-refs; empty if the reference is not in this file."""
    for line in _read(os.path.join(common, "packed-refs")).splitlines():
        commit, _, known = line.partition(" ")
        if known == name:
            return commit
    return ""


def _read(path: str) -> str:
    """Return a file's text without the last line end; empty if the file is missing or unreadable."""
    try:
        # O_NONBLOCK: if a user put a FIFO at this path, opening it must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return ""
            return file.read(_LARGEST).decode("utf-8", "surrogateescape").rstrip("\n")
    except OSError:
        return ""
