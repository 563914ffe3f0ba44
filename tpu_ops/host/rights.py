"""Who may use the launcher, and as whom: root's own check behind sudo, which let the person call it."""

from __future__ import annotations

import os
import sys

from tpu_ops.protocol.wire import Refused

from . import TYPE_CHECKING
from .person import LAUNCHER_GROUP, Person, by_name, groups_of

if TYPE_CHECKING:
    from typing import Callable

#: How long sudo may take to say what a person may do, in seconds.
_SUDO_LIMIT = 15


def require_root() -> None:
    """Return where this process is root.

    Raises:
        Refused: It is not.
    """
    if os.geteuid() != 0:
        raise Refused("denied", "this needs root", "call it as: sudo -n /usr/local/sbin/tpu-host")


def require_right(person: Person) -> None:
    """Return where a person has the right to use this program by now.

    sudo goes by the groups that a session began with. One that was open when its person was taken out of the launcher's
    group would keep the right for as long as it lasts, as a tmux server does for months.

    Raises:
        Refused: They have it no more.
    """
    if os.geteuid() != 0 or LAUNCHER_GROUP in groups_of(person) or person.is_admin:
        return
    # In a root shell that was opened by sudo, it was not sudo that let the person call this.
    started = os.environ.get("SUDO_COMMAND", "").partition(" ")[0]
    if os.path.basename(started) != os.path.basename(sys.argv[0]):
        return
    # Somebody else's rule may name the person. Of another than whoever calls it, sudo looks the groups up.
    if not _sudo_agrees(person, ["-n", "-l", "-U", person.name, "--", os.path.abspath(sys.argv[0])]):
        message = "{} is no longer allowed to use this worker's launcher; only this session's old groups allow it"
        fix = "whoever configures the workers grants that, with `sudo: launcher` in users_people"
        raise Refused("denied", message.format(person.name), fix)


def runs_as(asker: Person, name: str) -> Person:
    """Return the person as whom a run is to be executed: who asks, or the one of this name.

    Raises:
        Refused: There is no such user, or sudo does not let the asking person do everything as anybody.
    """
    if name in ("", asker.name):
        return asker
    person = by_name(name)
    if not has_full_sudo(asker):
        message = "{} is not allowed to run as {}: that needs full passwordless sudo".format(asker.name, name)
        raise Refused("denied", message, "leave out --user, or ask {} to start it".format(name))
    return person


def require_control(person: Person, owner_uid: int, owner_name: str, force: bool) -> None:
    """Return where a person may end a run of this owner.

    Raises:
        Refused: It is another person's run, and the asking one is no administrator or did not insist; or sudo does not
            answer.
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
    """Return whether a person has all rights on this host anyway, by a group or by sudo's own rules.

    Raises:
        Refused: sudo does not answer.
    """
    return person.is_admin or has_full_sudo(person)


def has_full_sudo(person: Person) -> bool:
    """Return whether a person gets a root shell from sudo without a password: sudo itself is asked, as that person.

    A password that was given a moment ago does not count (``-k``): it may have been on another terminal.

    Raises:
        Refused: sudo does not answer.
    """
    if person.uid == 0:
        return True
    from .child import become  # few requests want it

    root_shell = ["-k", "-n", "-u", "root", "--", "/bin/sh", "-c", ":"]
    return _sudo_agrees(person, root_shell, before=lambda: become(person))


def _sudo_agrees(person: Person, words: list[str], before: Callable[[], None] | None = None) -> bool:
    """Return whether sudo, called with these words, says that a person may do something.

    Raises:
        Refused: sudo does not answer.
    """
    import subprocess  # most requests do without it

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
        text = "sudo did not say within {} s what {} may do".format(_SUDO_LIMIT, person.name)
        fix = "`sudo -l` on this worker waits for the same: the directory of users or the name service of its rules"
        raise Refused("failed", text, fix) from None
    return done.returncode == 0
