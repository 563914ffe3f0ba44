"""The owners of people's homes; runs on Python 3.8."""

from __future__ import annotations

import os
import pwd
import stat

#: Where useradd makes homes on Debian and Ubuntu (/etc/default/useradd).
HOMES = "/home"


def usual_home(name: str) -> str:
    """Return the home that useradd gives a new account."""
    return os.path.join(HOMES, name)


def home_owner(home: str) -> int | None:
    """Return the uid that owns a home; None if the directory does not exist."""
    try:
        entry = os.lstat(home)
    except OSError:
        return None
    return entry.st_uid if stat.S_ISDIR(entry.st_mode) else None


def ownerless(name: str, home: str) -> bool:
    """Return whether a home has no owner: root closed it when the person was removed, or its uid has no account."""
    try:
        entry = os.lstat(home)
        if home != usual_home(name) or not stat.S_ISDIR(entry.st_mode):
            return False
        pwd.getpwuid(entry.st_uid)
    except OSError:
        return False
    except KeyError:
        return True
    return entry.st_uid == 0 and stat.S_IMODE(entry.st_mode) == 0o700
