"""The rights of users: who may use the launcher, and as which user. This check by root follows that of sudo."""

from __future__ import annotations

import os
import sys

from tpu_ops.protocol.wire import Refused

from . import TYPE_CHECKING
from .person import LAUNCHER_GROUP, Person, by_name, groups_of

if TYPE_CHECKING:
    from typing import Callable

#: Seconds for sudo to answer.
_SUDO_LIMIT = 15


def require_root() -> None:
    """Check that this process is root."""
    if os.geteuid() != 0:
        raise Refused("denied", "this needs root", "call it as: sudo -n /usr/local/sbin/tpu-host")


def require_right(person: Person) -> None:
    """Check that a user still has the right to use this program.

    sudo uses the groups that a session began with. A session may be older than the user's removal from the launcher's
    group. It would keep the right for as long as it lasts, for example months in a tmux server.

    Raises:
        Refused: The user no longer has the right.
    """
    if os.geteuid() != 0 or LAUNCHER_GROUP in groups_of(person) or person.is_admin:
        return
    # In a root shell that was opened by sudo, sudo did not check the right to call this program.
    started = os.environ.get("SUDO_COMMAND", "").partition(" ")[0]
    if os.path.basename(started) != os.path.basename(sys.argv[0]):
        return
    # Another sudo rule may name the user. With -U, sudo looks up the user's current groups.
    if not _sudo_agrees(person, ["-n", "-l", "-U", person.name, "--", os.path.abspath(sys.argv[0])]):
        message = "{} is no longer allowed to use this worker's launcher; only this session's old groups allow it"
        fix = "an administrator grants that with `sudo: launcher` in users_people"
        raise Refused("denied", message.format(person.name), fix)


def runs_as(asker: Person, name: str) -> Person:
    """Return the user that a run is executed as: the one who asks, or the one with this name.

    Raises:
        Refused: There is no such user, or the user who asks does not have full sudo rights.
    """
    if name in ("", asker.name):
        return asker
    person = by_name(name)
    if not has_full_sudo(asker):
        message = "{} is not allowed to run as {}: that needs full passwordless sudo".format(asker.name, name)
        raise Refused("denied", message, "leave out --user, or ask {} to start it".format(name))
    return person


def require_control(person: Person, owner_uid: int, owner_name: str, force: bool) -> None:
    """Check that a user may end a run of this owner.

    Raises:
        Refused: The run belongs to another user, and the one who asks is not an administrator or did not use force; or
            sudo does not answer.
    """
    if person.uid == owner_uid:
        return
    if not administers(person):
        raise Refused(
            "denied",
            "the run belongs to {}, and {} is not an administrator of this host".format(owner_name, person.name),
            "ask {} to stop it, or an administrator, who can with --force".format(owner_name),
        )
    if not force:
        raise Refused("denied", "the run belongs to {}".format(owner_name), "ask them, or add --force")


def administers(person: Person) -> bool:
    """Return whether a user has all rights on this host, by a group or by sudo's rules.

    Raises:
        Refused: sudo does not answer.
    """
    return person.is_admin or has_full_sudo(person)


def has_full_sudo(person: Person) -> bool:
    """Return whether a user gets a root shell from sudo without a password. sudo itself is asked, as that user.

    A password that was entered recently does not count (``-k``): it may have been entered on another terminal.

    Raises:
        Refused: sudo does not answer.
    """
    if person.uid == 0:
        return True
    from .child import become  # imported late, since few requests need it

    root_shell = ["-k", "-n", "-u", "root", "--", "/bin/sh", "-c", ":"]
    return _sudo_agrees(person, root_shell, before=lambda: become(person))


def _sudo_agrees(person: Person, words: list[str], before: Callable[[], None] | None = None) -> bool:
    """Return whether sudo, called with these words, grants a user's request.

    Raises:
        Refused: sudo does not answer.
    """
    import subprocess  # most requests do not need it

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
        fix = "`sudo -l` on this worker probably hangs as well: check its name service and directory of users"
        raise Refused("failed", text, fix) from None
    return done.returncode == 0
