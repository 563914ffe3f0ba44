"""Users of this host: the user who sends a request, whom sudo names and not the request, and the rights of users."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd

from tpu_ops.protocol.wire import Refused

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, Mapping

#: Groups whose members administer the host. Google's guest agent uses the first group.
ADMIN_GROUPS = ("google-sudoers", "sudo", "wheel", "admin")

#: Group whose members may use the launcher. The roles launcher and users maintain this group.
LAUNCHER_GROUP = "tpu-run"


class Person:
    """A user of this host, from the password database."""

    def __init__(self, entry: pwd.struct_passwd) -> None:
        self.uid = entry.pw_uid
        self.gid = entry.pw_gid
        self.name = entry.pw_name
        self.home = entry.pw_dir
        self.shell = entry.pw_shell or "/bin/sh"

    @property
    def is_admin(self) -> bool:
        """Whether this user has all rights on the host."""
        return self.uid == 0 or bool(set(groups_of(self)) & set(ADMIN_GROUPS))


def groups_of(person: Person) -> list[str]:
    """Return the names of all groups of a user."""
    names = []
    for gid in os.getgrouplist(person.name, person.gid):
        try:
            names.append(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return names


def asking(environ: Mapping[str, str] = os.environ) -> Person:
    """Return the user who sends the request: the user whom sudo names, else the user who runs this program.

    Raises:
        Refused: The user id has no entry in the password database.
    """
    text = environ.get("SUDO_UID", "")
    uid = int(text) if text.isdigit() and os.geteuid() == 0 else os.getuid()
    return by_uid(uid)


def by_uid(uid: int) -> Person:
    """Return the user with a user id.

    Raises:
        Refused: There is no such user.
    """
    try:
        return Person(pwd.getpwuid(uid))
    except KeyError:
        fix = (
            "`getent passwd {}` on this worker finds nothing: the account is missing, or the directory service is down"
        )
        text = "user id {} has no entry in the password database"
        raise Refused("denied", text.format(uid), fix.format(uid)) from None


def by_name(name: str) -> Person:
    """Return the user with a name.

    Raises:
        Refused: There is no such user.
    """
    try:
        return Person(pwd.getpwnam(name))
    except KeyError:
        fix = "people in `users_people` get an account when the worker is configured: `tpu_ops configure`"
        raise Refused("missing", "there is no user {} on this worker".format(name), fix) from None


def way_past(asker: Person, owner: Dict[str, Any], ends: str, insists: str) -> str:
    """Return what a user can do about a run or process that keeps this host busy.

    Args:
        asker: The user who wants to know.
        owner: The owner of the run or process: ``uid``, ``person`` (a name), and if known ``asker``, who started it.
        ends: The command by which the owner ends the run or process.
        insists: The command by which an administrator ends the run or process.
    """
    if asker.uid == owner.get("uid") or asker.name == owner.get("asker"):
        return ends
    fix = "ask {} to end it".format(owner["person"])
    return "{}, or as an administrator: {}".format(fix, insists) if asker.is_admin else fix


@contextlib.contextmanager
def acting_as(person: Person) -> Iterator[None]:
    """Access files with a user's rights for the length of a `with` block, and not with the rights of root."""
    if os.geteuid() != 0:
        yield
        return
    before = os.getgroups()
    os.initgroups(person.name, person.gid)
    os.setegid(person.gid)
    os.seteuid(person.uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)
