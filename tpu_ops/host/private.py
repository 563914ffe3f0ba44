"""Files that only root can open: records, directories below /run, lock files. Who can open a file can also lock it."""

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

#: Seconds to wait for a lock that another process holds: less than systemd's timeouts for the start of a run
#: (`unit.START_LIMIT`) and for the program after its end (`unit.STOP_MARGIN`).
LOCK_LIMIT = 10.0
_POLL = 0.02


class Damaged(Refused):
    """A state file exists but cannot be read as a JSON object.

    Args:
        path: The file.
        what: Why the file cannot be read.
    """

    def __init__(self, path: str, what: str) -> None:
        super().__init__(
            "damaged", "{} is damaged: {}".format(path, what), "remove the file: `sudo rm {}`".format(path)
        )


def directory(top: str, name: str = "") -> str:
    """Create a directory, or a directory and a subdirectory, that only root can access; return the path."""
    path = top
    for path in [top, os.path.join(top, name)] if name else [top]:
        # makedirs sets the mode neither for parent directories nor for existing directories.
        os.makedirs(path, mode=0o700, exist_ok=True)
        os.chmod(path, 0o700)
    return path


def opened(path: str) -> TextIO:
    """Open a file in order to lock it. A missing file is created; only root can access it. The content is kept."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "a+", encoding="ascii")


@contextlib.contextmanager
def locked(path: str, *, anyway: bool = False, limit: float = LOCK_LIMIT) -> Iterator[None]:
    """Lock a file for the length of a `with` block.

    Args:
        path: The file, which is created if it is missing.
        anyway: Continue without the lock if another process keeps it.
        limit: Seconds to wait for the lock; at most `LOCK_LIMIT`.

    Raises:
        Refused: Another process keeps the lock; the message names the process.
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
    """Try to lock a file; return whether it is locked now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _kept(path: str) -> Refused:
    named = "pid {pid} of {user} ({command})"
    others = [named.format(**entry) for entry in proc.holders(paths=[path]) if entry["pid"] != os.getpid()]
    message = "{} has been locked by another process for {:.0f} s".format(path, LOCK_LIMIT)
    message += "; the file is open in {}".format(", ".join(others)) if others else ""
    fix = (
        "try again: a start in progress releases the lock by itself; otherwise `sudo fuser -v {}` shows the "
        "process to end"
    )
    return Refused("failed", message, fix.format(path))


def content(path: str) -> bytes | None:
    """Return the content of a state file; None if there is no file. This never blocks, even if the path is a FIFO.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
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
    """Return the JSON object in a state file; None if there is no file.

    Args:
        path: The file.
        is_valid: Returns whether the object is of the expected kind.

    Raises:
        Damaged: The file exists but cannot be read, or contains something else.
    """
    try:
        found = content(path)
        data = None if found is None else json.loads(found.decode("ascii"))
    except OSError as exc:
        raise Damaged(path, exc.strerror or str(exc)) from exc
    except (ValueError, RecursionError):
        raise Damaged(path, "the file does not hold JSON" if found else "it is empty") from None
    if found is None:
        return None
    if not isinstance(data, dict) or not is_valid(data):
        raise Damaged(path, "the file does not contain the expected data")
    return data


def write(path: str, record: dict[str, Any], before: Callable[[], None] | None = None) -> None:
    """Replace a record's file atomically.

    Args:
        path: The file.
        record: The record.
        before: Called once the new data is on the disk, just before the new file replaces the old file.

    Raises:
        OSError: The file cannot be written.
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
