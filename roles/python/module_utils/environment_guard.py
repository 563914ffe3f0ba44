"""Checks that only root and an environment's owner can change its programs; supports Python 3.8.

The programs of an environment run with the rights of its owner, so anybody who can change them has these rights.
"""

from __future__ import annotations

import glob
import os
import stat

#: The maximum number of symbolic links in a path: more count as a loop, as in the kernel (path_resolution(7)).
LINKS = 40


def stranger(path: str, uid: int) -> str:
    """Return why accounts other than root and `uid` can change what a path leads to; empty if they cannot.

    Raises:
        OSError: A part of the path cannot be read.
    """
    names, here, links = path.split("/"), "/", 0
    open_to_all = False
    while names:
        name = names.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            here = os.path.dirname(here)
            continue
        entry_path = os.path.join(here, name)
        try:
            entry = os.lstat(entry_path)
        except (FileNotFoundError, NotADirectoryError):
            return "everybody can create files in %s" % here if open_to_all else ""
        if entry.st_uid not in (0, uid):
            return "%s belongs to uid %d" % (entry_path, entry.st_uid)
        if stat.S_ISLNK(entry.st_mode):
            links += 1
            if links > LINKS:
                return "%s is behind too many symbolic links" % path
            target = os.readlink(entry_path)
            names = target.split("/") + names
            here = "/" if target.startswith("/") else here
            continue
        # A group's right to write is accepted for people, who choose their groups, but not for root.
        others = stat.S_IWOTH | (stat.S_IWGRP if uid == 0 and entry.st_gid else 0)
        # In a sticky directory, such as /tmp, nobody else can remove or replace what exists.
        open_to_all = bool(stat.S_ISDIR(entry.st_mode) and entry.st_mode & stat.S_ISVTX and entry.st_mode & others)
        if entry.st_mode & others and not open_to_all:
            return "others can write in %s" % entry_path
        here = entry_path
    return ""


def stranger_in(path: str, uid: int) -> str:
    """Return why accounts other than root and `uid` can change an environment's programs; empty if they cannot.

    Raises:
        OSError: A file or directory of the environment cannot be read.
    """
    packages = os.path.join(glob.escape(path), "lib/python3*/site-packages")
    started = [os.path.join(path, "pyvenv.cfg"), os.path.join(path, "bin/python")]
    # *.pth files are checked too, since Python runs code from their lines when it starts.
    for each in [path, *started, *sorted(glob.glob(packages) + glob.glob(packages + "/*.pth"))]:
        reason = stranger(each, uid)
        if reason:
            return reason
    return ""
