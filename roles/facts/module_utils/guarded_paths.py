"""Safe paths: only root can have created a link on the way; runs on Python 3.8."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

#: More symbolic links on one way are a loop; the kernel's own limit (path_resolution(7)).
LINKS = 40


class Refused(Exception):
    """An entry that cannot be kept as listed; the text says why."""


def others_write(entry: os.stat_result) -> bool:
    """Return whether others than the owner and root's group can write."""
    return bool(entry.st_mode & (stat.S_IWOTH | (stat.S_IWGRP if entry.st_gid else 0)))


def guarded(directory: int) -> bool:
    """Return whether only root, or the account that runs this, can create entries in an open directory."""
    entry = os.fstat(directory)
    return entry.st_uid in (0, os.geteuid()) and not others_write(entry)


def guarded_way(path: str) -> bool:
    """Return whether only root, or the account that runs this, can change what a path leads to, as far as it exists."""
    current, shared = "/", False
    for name in [part for part in path.split("/") if part]:
        current = os.path.join(current, name)
        try:
            found = os.lstat(current)
        except FileNotFoundError:
            return not shared
        shared = not stat.S_ISLNK(found.st_mode) and others_write(found)
        # In a sticky directory nobody else can replace what already exists.
        if found.st_uid not in (0, os.geteuid()) or (shared and not found.st_mode & stat.S_ISVTX):
            return False
    return not shared


def followed(link: str) -> str:
    """Return the path of the regular file that a symbolic link leads to.

    Raises:
        Refused: There is none, or others than root can change what the link leads to.
    """
    path, shown = link, os.readlink(link)
    for _ in range(LINKS):
        directory, missing = open_directory(os.path.dirname(path))
        os.close(directory)
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if missing or not os.path.lexists(path):
            raise Refused("it is a link to %s, which is missing; create that file, or remove the link" % shown)
        if not guarded_way(path):
            raise Refused(
                "it is a link to %s, which others than root can change; replace the link with the file itself: cp"
                " --remove-destination %s %s" % (shown, path, link)
            )
        if not os.path.islink(path):
            break
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    else:
        raise Refused("it is a link to %s, which is behind too many symbolic links; remove the link" % shown)
    if not os.path.isfile(path):
        raise Refused("it is a link to %s, which is not a file; remove the link" % shown)
    return path


def open_directory(path: str) -> tuple[int, list[str]]:
    """Open the directory at a path, or the last existing one on the way; return it and the names that are missing.

    Raises:
        Refused: A link on the way may be somebody else's, or something on the way is not a directory.
    """
    names = [name for name in os.path.normpath(path).split("/") if name]
    current, real = os.open("/", os.O_RDONLY | os.O_DIRECTORY), "/"
    for _ in range(LINKS):
        for position, name in enumerate(names):
            here = os.path.join(real, name)
            try:
                kind = os.stat(name, dir_fd=current, follow_symlinks=False).st_mode
            except FileNotFoundError:
                return current, names[position:]
            if stat.S_ISLNK(kind):
                if not guarded(current):
                    raise Refused(
                        "%s is a symbolic link in a place where others than root can create one; remove it" % here
                    )
                target = os.path.normpath(os.path.join(real, os.readlink(name, dir_fd=current)))
                names = [part for part in target.split("/") if part] + names[position + 1 :]
                os.close(current)
                current, real = os.open("/", os.O_RDONLY | os.O_DIRECTORY), "/"
                break
            if not stat.S_ISDIR(kind):
                raise Refused("%s is in the way: it is not a directory; move it away" % here)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=current)
            os.close(current)
            current, real = below, here
        else:
            return current, []
    raise Refused("%s is behind too many symbolic links; remove those that lead to each other" % path)


def make_parents(directory: int, missing: list[str]) -> int:
    """Make directories below an open one; return the last of them, open, in its place.

    Raises:
        OSError: One cannot be made. The given one is still open.
    """
    last = directory
    try:
        for name in missing:
            os.mkdir(name, 0o755, dir_fd=last)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=last)
            if last != directory:
                os.close(last)
            last = below
            os.fchmod(below, 0o755)
    except OSError:
        if last != directory:
            os.close(last)
        raise
    if last != directory:
        os.close(directory)
    return last


def give(
    directory: int, path: str, *, who: tuple[Any, Any], ids: tuple[int, int], mode: int, act: Callable[[str], bool]
) -> None:
    """Set owner, group and mode of an open directory, even if its path leads elsewhere by then.

    Args:
        directory: It.
        path: Where it is, for people.
        who: Owner and group, for people.
        ids: Their numbers.
        mode: Its mode.
        act: Told what is to be done; returns whether it is.

    Raises:
        OSError: It cannot be.
    """
    found = os.fstat(directory)
    if ids != (found.st_uid, found.st_gid) and act("give %s to %s:%s" % (path, *who)):
        os.fchown(directory, *ids)
    # A change of owner may have cleared bits of the mode.
    now = stat.S_IMODE(os.fstat(directory).st_mode)
    if mode != now and act("set the mode of %s to %04o" % (path, mode)):
        os.fchmod(directory, mode)
