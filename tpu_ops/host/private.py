"""What is root's alone: records, directories below /run, and files that are locked there, as whoever reads one can."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time

from tpu_ops.protocol.wire import Refused

from . import TYPE_CHECKING, proc

if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, TextIO

#: How long another process may keep a lock that is waited for, in seconds: less than systemd gives a start of a run,
#: and what comes behind one (`unit.START_LIMIT`, `unit.STOP_MARGIN`).
LOCK_LIMIT = 10.0
_POLL = 0.02


class Damaged(Refused):
    """A state file is there and cannot be read as a JSON object.

    Args:
        path: The file.
        what: What is wrong with it.
    """

    def __init__(self, path: str, what: str) -> None:
        super().__init__("damaged", "{} is damaged: {}".format(path, what), "remove it: `sudo rm {}`".format(path))


def directory(top: str, name: str = "") -> str:
    """Make a directory, or one of this name in it, and return it. No other user gets into either from then on.

    Raises:
        OSError: It cannot be made.
    """
    path = top
    for path in [top, os.path.join(top, name)] if name else [top]:
        # What makedirs makes on the way to the last one it gives other rights, and what is there it leaves.
        os.makedirs(path, mode=0o700, exist_ok=True)
        os.chmod(path, 0o700)
    return path


def opened(path: str) -> TextIO:
    """Open a file to lock it, made where it is missing; what stands in it stays. No other user opens it from then on.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "a+", encoding="ascii")


@contextlib.contextmanager
def locked(path: str, *, anyway: bool = False, limit: float = LOCK_LIMIT) -> Iterator[None]:
    """Have a file locked for as long as this lasts.

    Args:
        path: The file, made where it is missing.
        anyway: Where somebody else does not let go of it, go on without it.
        limit: How long that is waited for at most, in seconds; no longer than `LOCK_LIMIT`.

    Raises:
        Refused: Somebody else does not let go of it; they are named.
    """
    with opened(path) as file:
        deadline = time.monotonic() + min(limit, LOCK_LIMIT)
        while not take(file):
            if time.monotonic() >= deadline:
                if anyway:
                    break
                raise _kept(path)
            time.sleep(_POLL)
        yield


def take(file: TextIO) -> bool:
    """Lock a file where nobody else has it locked; return whether it is."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _kept(path: str) -> Refused:
    named = "pid {pid} of {user} ({command})"
    others = [named.format(**entry) for entry in proc.holders(paths=[path]) if entry["pid"] != os.getpid()]
    message = "{} has been locked by another process for {:.0f} s".format(path, LOCK_LIMIT)
    message += "; it is open in {}".format(", ".join(others)) if others else ""
    fix = "try again: a start in progress lets go of it by itself; else `sudo fuser -v {}` shows what to end"
    return Refused("failed", message, fix.format(path))


def content(path: str) -> bytes | None:
    """Return the content of a state file, None where there is none. It never waits, as opening a FIFO would.

    Raises:
        OSError: It cannot be read, or is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def read(path: str, is_valid: Callable[[dict[str, Any]], bool] = bool) -> dict[str, Any] | None:
    """Return the JSON object in a state file, None where there is no file.

    Args:
        path: The file.
        is_valid: Given the object, returns whether it is what the file is for.

    Raises:
        Damaged: The file is there and cannot be read, or holds something else.
    """
    try:
        found = content(path)
        data = None if found is None else json.loads(found.decode("ascii"))
    except OSError as exc:
        raise Damaged(path, exc.strerror or str(exc)) from exc
    except (ValueError, RecursionError):
        raise Damaged(path, "it does not hold JSON" if found else "it is empty") from None
    if found is None:
        return None
    if not isinstance(data, dict) or not is_valid(data):
        raise Damaged(path, "it does not hold what it is for")
    return data


def write(path: str, record: dict[str, Any], before: Callable[[], None] | None = None) -> None:
    """Write a record; the file is there as a whole or as it was.

    Args:
        path: The file.
        record: The record.
        before: Called once the disk has the new one, just before that takes its place.

    Raises:
        OSError: The disk does not take it.
    """
    temporary = "{}.{}".format(path, os.getpid())
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump(record, file, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            before()
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
