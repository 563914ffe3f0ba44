"""Checks that the working directory of a command has the code that the run was started with, and locks it."""

from __future__ import annotations

import os
import time

from tpu_ops.protocol import marks
from tpu_ops.protocol.wire import encode

from . import TYPE_CHECKING
from .command import NotReady
from .person import acting_as

if TYPE_CHECKING:
    from typing import Any, Callable, Dict

    from .person import Person

#: Seconds between two reports during a long check that the check is still busy.
_BEAT = 1.0


class Copy:
    """The synced files in the working directory of a command.

    Args:
        cwd: The directory.
        digest: The digest of the files when the run was started.
        user: The run that uses the copy, from `rank_record.holder_of`.
    """

    def __init__(self, cwd: str, digest: str, user: Dict[str, Any]) -> None:
        self._cwd, self._digest, self._user = cwd, digest, user
        self._parent, self._name = os.path.split(encode(cwd))

    def require(self, beat: Callable[[], None]) -> None:
        """As the current user, lock the copy against syncs and check its digest. This process keeps the lock.

        Args:
            beat: Called about every second during the check.

        Raises:
            NotReady: A sync is replacing files of the copy, or the digest differs.
        """
        lock = marks.opened(marks.use_lock(self._parent, self._name))
        if not marks.take(lock, shared=True):
            turn = marks.opened(marks.turn_lock(self._parent, self._name))
            text = "{} of {} is replacing files of {} on this worker; start again once the sync has ended"
            raise NotReady(text.format("a sync", marks.said(turn).get("who", "somebody"), self._cwd))
        marks.say(lock, self._user)
        last = time.monotonic()

        def each() -> None:
            nonlocal last
            if time.monotonic() - last > _BEAT:
                last = time.monotonic()
                beat()

        try:
            found = marks.digest_of(self._parent, self._name, each)
        except OSError as exc:
            text = "{}: {}; the synced files must be readable for this user"
            raise NotReady(text.format(os.fsdecode(exc.filename or self._cwd), exc.strerror)) from exc
        if found != self._digest:
            text = (
                "{} has digest {} and no longer {}: another sync, or a user, has changed files in this directory "
                "since they were copied for this run; start again, and have --sync copy a directory of another name "
                "if several people use this account"
            )
            raise NotReady(text.format(self._cwd, found, self._digest))

    def hold(self, person: Person) -> int | None:
        """Lock the copy until the returned descriptor is closed. The child process holds its own lock up to this call.

        Returns:
            The descriptor of the lock.
        """
        with acting_as(person):
            lock = marks.opened(marks.use_lock(self._parent, self._name))
            marks.take(lock, shared=True)
        return lock
