"""Checks that only an environment's owner can change its programs; runs on Python 3.8.

The programs of an environment run with its owner's rights, so anybody else who can change them has these rights.
"""

from __future__ import annotations

import glob
import os
import stat

#: More symbolic links on one way are a loop; the kernel's own limit (path_resolution(7)).
LINKS = 40


def stranger(path: str, uid: int) -> str:
    """Return why accounts other than root and the owner can change what a path leads to; empty if they cannot.

    Raises:
        OSError: Something on the way cannot be read.
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
        # People choose their groups themselves, but root's rights must not depend on a group.
        others = stat.S_IWOTH | (stat.S_IWGRP if uid == 0 and entry.st_gid else 0)
        # In a directory such as /tmp nobody else can remove what exists.
        open_to_all = bool(stat.S_ISDIR(entry.st_mode) and entry.st_mode & stat.S_ISVTX and entry.st_mode & others)
        if entry.st_mode & others and not open_to_all:
            return "others can write in %s" % entry_path
        here = entry_path
    return ""


def stranger_in(path: str, uid: int) -> str:
    """Return why accounts other than root and the owner can change an environment's programs; empty if they cannot.

    Raises:
        OSError: Something in it cannot be read.
    """
    packages = os.path.join(glob.escape(path), "lib/python3*/site-packages")
    started = [os.path.join(path, "pyvenv.cfg"), os.path.join(path, "bin/python")]
    # Python runs lines of *.pth when it starts.
    for each in [path, *started, *sorted(glob.glob(packages) + glob.glob(packages + "/*.pth"))]:
        reason = stranger(each, uid)
        if reason:
            return reason
    return ""
