"""Files of this machine: where tpu_ops keeps what it remembers, replaced at once, one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tpu_ops.errors import OpsError, UsageError

#: Seconds between two looks at a lock that another process holds: the kernel tells nobody when it is let go.
LOCK_POLL = 0.05

#: What to do where something below `state_root` cannot be written.
TO_WRITE = "make it writable and check that the disk has space (df), or set TPU_OPS_STATE to another directory"


def state_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory below which tpu_ops keeps what it must remember: absolute, made by nobody yet.

    Raises:
        UsageError: It begins at the home of a user that there is not, or is no text.
    """
    if explicit := environ.get("TPU_OPS_STATE", ""):
        return expanded(explicit, "TPU_OPS_STATE").absolute()
    home = expanded(environ.get("HOME") or "~", "HOME")
    usual = expanded(environ.get("XDG_STATE_HOME") or str(home / ".local" / "state"), "XDG_STATE_HOME")
    return usual.absolute() / "tpu_ops"


def room(exc: OSError, path: Path) -> str:
    """Return how much room a full disk has where a file could not be written, in words that follow why; else nothing.

    Args:
        exc: The failure.
        path: The file or directory, which need not be there.
    """
    if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    there = next((parent for parent in (path, *path.parents) if parent.is_dir()), Path("/"))
    try:
        found = os.statvfs(there)
    except OSError:
        return ""
    free = f"{found.f_bavail * found.f_frsize / 10**6:.1f} MB free in {there}"
    return f" ({free}{', and room for no more files' if found.f_files and not found.f_favail else ''})"


def expanded(text: str, where: str) -> Path:
    """Return a path as a person writes it, with the home directory that its ``~`` or ``~NAME`` means.

    Args:
        text: The path.
        where: Where it is written, for an error.

    Raises:
        UsageError: There is no such user, no home is known, or it is no text: files that hold it are UTF-8.
    """
    try:
        path = Path(text).expanduser()
        str(path.absolute()).encode()
    except RuntimeError as exc:
        name = text.partition("/")[0]
        raise UsageError(f"there is no home directory {name!r}", where=where, fix="write the whole path") from exc
    except UnicodeEncodeError as exc:
        what = f"the path {exc.object!r} is not UTF-8"
        raise UsageError(what, where=where, fix="rename what is not, or use another directory") from exc
    return path


def resolved(text: str, where: str) -> Path:
    """Return a path as a person writes it without links in it, absolute.

    Args:
        text: The path.
        where: Where it is written, for an error.

    Raises:
        UsageError: As for `expanded`, or a link in it leads back to itself.
    """
    path = expanded(text, where)
    try:
        return expanded(str(_without_links(path)), where)
    except OSError as exc:
        fix = "see where it leads: namei -l"
        raise UsageError(f"a link in {path} leads back to itself", where=where, fix=fix) from exc


def _without_links(path: Path) -> Path:
    """Return a path without links in it, absolute.

    Raises:
        OSError: A link leads back to itself. Path.resolve raises a RuntimeError before Python 3.13, and nothing since.
    """
    try:
        path.stat()
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise
    return path.resolve()


def replace(path: Path, content: str | bytes, mode: int) -> None:
    """Replace a file's content at once: a reader sees the old or the new, never a part.

    Args:
        path: The file; where it is a link, the link itself is replaced.
        content: Text (written as UTF-8) or bytes.
        mode: Permissions of the new file.

    Raises:
        OSError: It cannot be written, or is there and no regular file; what there was is as it was.
    """
    refuse_irregular(path)
    _replace(path, content.encode() if isinstance(content, str) else content, mode, None)


def rewrite(path: Path, content: bytes) -> None:
    """Replace at once the content of a file that is a person's own: its mode and owner stay, links are followed.

    Args:
        path: The file; one that is missing is made for this user only, its directory too.
        content: What it is to hold.

    Raises:
        OSError: It cannot be written, or is there and no regular file; what there was is as it was.
    """
    target = _without_links(path)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = refuse_irregular(target)
    if info is None:
        _replace(target, content, 0o600, None)
    else:
        _replace(target, content, stat.S_IMODE(info.st_mode), (info.st_uid, info.st_gid))


def refuse_irregular(path: Path) -> os.stat_result | None:
    """Return what the system says of a file, links followed; None where there is none.

    Raises:
        OSError: It is a device, a pipe, a directory or the like, which no file may take the place of.
    """
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "this is not a regular file", str(path))
    return info


def read_regular(path: Path, limit: int) -> bytes:
    """Return what a file holds, without ever waiting for it.

    Args:
        path: The file; links are followed.
        limit: Bytes that it may have.

    Raises:
        OSError: It cannot be read, is no regular file, or is larger.
    """

    def unwaited(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)

    with open(path, "rb", opener=unwaited) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "this is not a regular file", str(path))
        # As much memory is taken as is asked for; a file that grows meanwhile is read on.
        data = file.read(min(limit, info.st_size) + 1)
        data += file.read(limit + 1 - len(data)) if len(data) > info.st_size else b""
    if len(data) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data


def _replace(path: Path, content: bytes, mode: int, owner: tuple[int, int] | None) -> None:
    # Not by tempfile: its import costs every command some milliseconds.
    made = path.with_name(f"{_beginning(path)}{os.urandom(4).hex()}")
    handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            info = os.fstat(handle)
            if owner is not None and owner != (info.st_uid, info.st_gid):
                os.fchown(handle, *owner)
            os.fsync(handle)
        made.chmod(mode)
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def clear(directory: Path, paths: Iterable[Path]) -> None:
    """Remove what processes that were killed left of replacing files of a directory; nobody else may write them now.

    Raises:
        OSError: It cannot be removed, or the directory not be read.
    """
    beginnings = tuple(map(_beginning, paths))
    for entry in directory.iterdir():
        if entry.name.startswith(beginnings):
            entry.unlink(missing_ok=True)


def _beginning(path: Path) -> str:
    """Return how the name begins of the file that is to replace a file."""
    return f".{path.name}."


def take(handle: int) -> bool:
    """Lock an open file for this process unless another one holds it; return whether it is locked now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, timeout: float) -> Iterator[int]:
    """Hold a lock file for as long as the block lasts.

    Yields:
        Its descriptor: a process that is given it holds the lock as well, for as long as it lasts.

    Args:
        path: The lock file, made where it is missing; its directory exists.
        timeout: Seconds to wait for another process that holds it.

    Raises:
        TimeoutError: Another process held it for longer.
        OSError: It cannot be opened or made.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout
        while not take(handle):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} was held for more than {timeout:.0f} s")
            time.sleep(LOCK_POLL)
        yield handle
    finally:
        os.close(handle)


class UnwritableError(OpsError):
    """What this machine keeps of a fleet cannot be written."""


def unwritable(path: Path, exc: OSError) -> UnwritableError:
    """Return the error for a file or directory of the state that cannot be written."""
    in_the_way = exc.errno in (errno.EISDIR, errno.EEXIST, errno.EINVAL)
    fix = "move away the file in this path, or set TPU_OPS_STATE to a directory"
    if exc.errno != errno.ENOTDIR:
        fix = "move away what is there: it will be recreated" if in_the_way else TO_WRITE
    return UnwritableError(
        f"cannot write the fleet's state: {exc.strerror or exc}{room(exc, path)}",
        where=str(exc.filename or path) if in_the_way else str(path),
        fix=fix,
    )
