"""At which commit a clone is, by its files: git itself would have to be there, and be asked on behalf of its owner.

The formats are those of gitrepository-layout(5) and git-pack-refs(1).
"""

from __future__ import annotations

import os
import stat

from tpu_ops.protocol.spec import COMMIT

from .command import NotReady

#: How often one reference may lead to another (`SYMREF_MAXDEPTH` in git's refs-internal.h).
_DEEPEST = 5
#: More than any list of references takes, in bytes.
_LARGEST = 256 * 1024 * 1024


def require(clone: str, commit: str) -> None:
    """Return where a clone is at a commit, or does not tell, as this process may read it.

    Raises:
        NotReady: It is at another one: somebody has checked that out since the start looked.
    """
    found = head(clone)
    if found and found != commit:
        what = "{} is at {} and no longer at {}".format(clone, found[:12], commit[:12])
        fix = (
            "somebody else has checked out another commit meanwhile (`git -C {} reflog` on this worker shows what was "
            "done): agree on one, or use a project each, and start again"
        )
        raise NotReady("{}; {}".format(what, fix.format(clone)))


def head(clone: str) -> str:
    """Return the commit that is checked out in a clone; empty where its files do not tell, as those of a reftable."""
    own = os.path.join(clone, ".git")
    if not os.path.isdir(own):
        # Of a worktree or a submodule.
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
    """Return what a reference is that has no file of its own; empty where there is none."""
    for line in _read(os.path.join(common, "packed-refs")).splitlines():
        commit, _, known = line.partition(" ")
        if known == name:
            return commit
    return ""


def _read(path: str) -> str:
    """Return a file's text without its last line's end; empty where there is no such file, or it cannot be read."""
    try:
        # Whoever may write there may put something else in its place, which would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return ""
            return file.read(_LARGEST).decode("utf-8", "surrogateescape").rstrip("\n")
    except OSError:
        return ""
