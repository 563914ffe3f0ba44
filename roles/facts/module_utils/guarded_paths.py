"""Path operations for root in which no other user's symbolic links are followed; supports Python 3.8."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

#: The maximum number of symbolic links in a path: more count as a loop, as in the kernel (path_resolution(7)).
LINKS = 40


class Refused(Exception):
    """An entry of a list that cannot be applied; the text says why."""


def others_write(entry: os.stat_result) -> bool:
    """Return whether a file or directory can be written to by accounts other than its owner and root's group."""
    return bool(entry.st_mode & (stat.S_IWOTH | (stat.S_IWGRP if entry.st_gid else 0)))


def guarded(directory: int) -> bool:
    """Return whether only root and the current account can create files and links in an open directory."""
    entry = os.fstat(directory)
    return entry.st_uid in (0, os.geteuid()) and not others_write(entry)


def guarded_way(path: str) -> bool:
    """Return whether only root and the current account can change what the existing part of a path leads to."""
    current, shared = "/", False
    for name in [part for part in path.split("/") if part]:
        current = os.path.join(current, name)
        try:
            found = os.lstat(current)
        except FileNotFoundError:
            return not shared
        shared = not stat.S_ISLNK(found.st_mode) and others_write(found)
        # In a sticky directory, such as /tmp, nobody else can replace what already exists.
        if found.st_uid not in (0, os.geteuid()) or (shared and not found.st_mode & stat.S_ISVTX):
            return False
    return not shared


def followed(link: str) -> str:
    """Return the path of the regular file that a symbolic link leads to.

    Raises:
        Refused: The link leads to no regular file, or others than root can change what the link leads to.
    """
    path, shown = link, os.readlink(link)
    for _ in range(LINKS):
        directory, missing = open_directory(os.path.dirname(path))
        os.close(directory)
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if missing or not os.path.lexists(path):
            raise Refused("the path is a link to %s, which is missing; create that file, or remove the link" % shown)
        if not guarded_way(path):
            raise Refused(
                "the path is a link to %s, which others than root can change; replace the link with the file itself: cp"
                " --remove-destination %s %s" % (shown, path, link)
            )
        if not os.path.islink(path):
            break
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    else:
        raise Refused("the path is a link to %s, which is behind too many symbolic links; remove the link" % shown)
    if not os.path.isfile(path):
        raise Refused("the path is a link to %s, which is not a file; remove the link" % shown)
    return path


def open_directory(path: str) -> tuple[int, list[str]]:
    """Open the directory at a path, or its nearest existing parent; return it and the names that are missing.

    Raises:
        Refused: Others than root could have created a symbolic link in the path, or a part of the path is not a
            directory.
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
    """Make nested directories below an open directory; close it, and return the innermost directory, open.

    Raises:
        OSError: A directory cannot be made. The given directory is still open.
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
    """Set owner, group and mode of an open directory, even if its path leads elsewhere in the meantime.

    Args:
        directory: The open directory.
        path: The directory's path, for messages.
        who: Names of owner and group, for messages.
        ids: The uid and gid.
        mode: The mode.
        act: Is called with the text of each change; returns whether to make the change.

    Raises:
        OSError: Owner, group or mode cannot be set.
    """
    found = os.fstat(directory)
    if ids != (found.st_uid, found.st_gid) and act("give %s to %s:%s" % (path, *who)):
        os.fchown(directory, *ids)
    # The mode is read again: a change of owner can clear bits of it.
    now = stat.S_IMODE(os.fstat(directory).st_mode)
    if mode != now and act("set the mode of %s to %04o" % (path, mode)):
        os.fchmod(directory, mode)
