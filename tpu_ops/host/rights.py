"""The rights of users: who may use the launcher, and as which user. Checked as root, after sudo's own check."""

from __future__ import annotations

import os
import sys

from tpu_ops.protocol.wire import Refused

from . import TYPE_CHECKING
from .person import LAUNCHER_GROUP, Person, by_name, groups_of

if TYPE_CHECKING:
    from typing import Callable

#: Seconds that sudo has to answer.
_SUDO_LIMIT = 15


def require_root() -> None:
    """Check that this process is root."""
    if os.geteuid() != 0:
        raise Refused("denied", "the launcher needs root", "call it as: sudo -n /usr/local/sbin/tpu-host")


def require_right(person: Person) -> None:
    """Check that a user still has the right to use this program.

    sudo uses the groups that the user had when the session began. A session, such as a tmux server, can last for months
    after the user was removed from the launcher's group.

    Raises:
        Refused: The user no longer has the right.
    """
    if os.geteuid() != 0 or LAUNCHER_GROUP in groups_of(person) or person.is_admin:
        return
    # If sudo started another program, such as a root shell, sudo did not check the right to call this program.
    started = os.environ.get("SUDO_COMMAND", "").partition(" ")[0]
    if os.path.basename(started) != os.path.basename(sys.argv[0]):
        return
    # Another sudo rule may grant the right. With -U, sudo looks up the user's current groups.
    if not _sudo_agrees(person, ["-n", "-l", "-U", person.name, "--", os.path.abspath(sys.argv[0])]):
        message = (
            "{} is no longer allowed to use this worker's launcher; only the groups of this old session still "
            "allow that"
        )
        fix = "an administrator grants this right with `sudo: launcher` in users_people"
        raise Refused("denied", message.format(person.name), fix)


def runs_as(asker: Person, name: str) -> Person:
    """Return the user that a run is executed as: the user with this name, or the user who asks if the name is empty.

    Raises:
        Refused: There is no such user, or the user who asks does not have full sudo rights.
    """
    if name in ("", asker.name):
        return asker
    person = by_name(name)
    if not has_full_sudo(asker):
        message = "{} is not allowed to run commands as {}: this needs full passwordless sudo".format(asker.name, name)
        raise Refused("denied", message, "leave out --user, or ask {} to start the run".format(name))
    return person


def require_control(person: Person, owner_uid: int, owner_name: str, force: bool) -> None:
    """Check that a user may end the runs of this owner, who can be the same user.

    Raises:
        Refused: The run belongs to another user, and the user who asks is no administrator or did not use force; or
            sudo does not answer.
    """
    if person.uid == owner_uid:
        return
    if not administers(person):
        raise Refused(
            "denied",
            "the run belongs to {}, and {} is not an administrator of this host".format(owner_name, person.name),
            "ask {} to stop the run, or an administrator, who can stop it with --force".format(owner_name),
        )
    if not force:
        raise Refused("denied", "the run belongs to {}".format(owner_name), "ask the owner, or add --force")


def administers(person: Person) -> bool:
    """Return whether a user has all rights on this host, by a group or by sudo's rules.

    Raises:
        Refused: sudo does not answer.
    """
    return person.is_admin or has_full_sudo(person)


def has_full_sudo(person: Person) -> bool:
    """Return whether a user gets a root shell from sudo without a password, by calling sudo as this user.

    A password that sudo remembers does not count (``-k``): the user may have entered it on another terminal.

    Raises:
        Refused: sudo does not answer.
    """
    return may_run_as(person, "root")


def may_run_as(person: Person, name: str) -> bool:
    """Return whether a user gets a shell of the user with this name from sudo without a password, as `has_full_sudo`.

    Raises:
        Refused: sudo does not answer.
    """
    if person.uid == 0:
        return True
    from .child import become  # imported late, since few requests need it

    shell = ["-k", "-n", "-u", name, "--", "/bin/sh", "-c", ":"]
    return _sudo_agrees(person, shell, before=lambda: become(person))


def _sudo_agrees(person: Person, words: list[str], before: Callable[[], None] | None = None) -> bool:
    """Return whether sudo, called with these words, grants a user's request.

    Raises:
        Refused: sudo does not answer.
    """
    import subprocess  # imported late, since most requests do not need it

    try:
        done = subprocess.run(
            ["sudo", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
            cwd="/",
            preexec_fn=before,
            timeout=_SUDO_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = "sudo did not answer within {} s whether {} may do this".format(_SUDO_LIMIT, person.name)
        fix = "`sudo -l` on this worker probably hangs as well: check the worker's name service and directory of users"
        raise Refused("failed", text, fix) from None
    return done.returncode == 0
