"""The state directory on this machine, atomic replacement of files, and lock files."""

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

#: Seconds between two attempts to lock a file: the kernel does not report the release of a lock to other processes.
LOCK_POLL = 0.05

#: Fix for an error: a path below `state_root` cannot be written.
TO_WRITE = "make this path writable and check that the disk has space (df), or set TPU_OPS_STATE to another directory"


def state_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the absolute path of the state directory, which need not exist.

    Raises:
        UsageError: The path begins with the home directory of an unknown user, or is not valid text.
    """
    if explicit := environ.get("TPU_OPS_STATE", ""):
        return expanded(explicit, "TPU_OPS_STATE").absolute()
    home = expanded(environ.get("HOME") or "~", "HOME")
    usual = expanded(environ.get("XDG_STATE_HOME") or str(home / ".local" / "state"), "XDG_STATE_HOME")
    return usual.absolute() / "tpu_ops"


def room(exc: OSError, path: Path) -> str:
    """Return the free space of a full disk, as words that follow a failure's reason; empty if the disk is not full.

    Args:
        exc: The failed write.
        path: The file or directory, which need not exist.
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
    """Expand a path that the user has written: replace ``~`` or ``~NAME`` by the home directory.

    Args:
        text: The path.
        where: Where the user wrote it, for an error.

    Raises:
        UsageError: The user or home directory is unknown, or the path is not UTF-8.
    """
    try:
        path = Path(text).expanduser()
        str(path.absolute()).encode()
    except RuntimeError as exc:
        name = text.partition("/")[0]
        raise UsageError(f"there is no home directory {name!r}", where=where, fix="write the whole path") from exc
    except UnicodeEncodeError as exc:
        what = f"the path {exc.object!r} is not UTF-8"
        raise UsageError(what, where=where, fix="rename that part of the path, or use another directory") from exc
    return path


def resolved(text: str, where: str) -> Path:
    """Return a path that the user has written as an absolute path without symbolic links.

    Args:
        text: The path.
        where: Where the user wrote it, for an error.

    Raises:
        UsageError: A symbolic link leads back to itself; or an error of `expanded`.
    """
    path = expanded(text, where)
    try:
        return expanded(str(_without_links(path)), where)
    except OSError as exc:
        fix = "`namei -l` on this path shows where it leads"
        raise UsageError(f"a link in {path} leads back to itself", where=where, fix=fix) from exc


def _without_links(path: Path) -> Path:
    """Return a path, absolute and without symbolic links.

    Raises:
        OSError: A link leads back to itself. Path.resolve raises a RuntimeError before Python 3.13, and no error from
            Python 3.13 on.
    """
    try:
        path.stat()
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise
    return path.resolve()


def replace(path: Path, content: str | bytes, mode: int) -> None:
    """Replace a file's content atomically.

    Args:
        path: The file. If it is a symbolic link, the link itself is replaced.
        content: Text (written as UTF-8) or bytes.
        mode: Permissions of the new file.

    Raises:
        OSError: The file cannot be written, or is not a regular file. Its content is then unchanged.
    """
    refuse_irregular(path)
    _replace(path, content.encode() if isinstance(content, str) else content, mode, None)


def rewrite(path: Path, content: bytes) -> None:
    """Replace the content of a user's own file atomically. Mode and owner stay the same; symbolic links are followed.

    Args:
        path: The file. If it is missing, the file and its directory are created, accessible to this user only.
        content: The new content.

    Raises:
        OSError: The file cannot be written, or is not a regular file. Its content is then unchanged.
    """
    target = _without_links(path)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = refuse_irregular(target)
    if info is None:
        _replace(target, content, 0o600, None)
    else:
        _replace(target, content, stat.S_IMODE(info.st_mode), (info.st_uid, info.st_gid))


def refuse_irregular(path: Path) -> os.stat_result | None:
    """Return the status of a file, following symbolic links; None if it does not exist.

    Raises:
        OSError: The file is not regular but, for example, a device, a pipe or a directory, which must not be replaced.
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
    """Return the content of a file without blocking, even if it is a pipe.

    Args:
        path: The file; symbolic links are followed.
        limit: Maximum size in bytes.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger than the limit.
    """

    def unwaited(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)

    with open(path, "rb", opener=unwaited) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "this is not a regular file", str(path))
        # read() allocates the requested size, so only the file's size is requested first. The second read is for a file
        # that has grown since.
        data = file.read(min(limit, info.st_size) + 1)
        data += file.read(limit + 1 - len(data)) if len(data) > info.st_size else b""
    if len(data) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data


def _replace(path: Path, content: bytes, mode: int, owner: tuple[int, int] | None) -> None:
    # The module tempfile is not used, since its import adds some milliseconds to every command.
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
    """Remove temporary files of `replace` that killed processes left; the caller must exclude other writers.

    Raises:
        OSError: A temporary file cannot be removed, or the directory cannot be read.
    """
    beginnings = tuple(map(_beginning, paths))
    for entry in directory.iterdir():
        if entry.name.startswith(beginnings):
            entry.unlink(missing_ok=True)


def _beginning(path: Path) -> str:
    """Return the beginning of the names of the temporary files that `replace` uses for a file."""
    return f".{path.name}."


def take(handle: int) -> bool:
    """Lock an open file for this process unless another process holds the lock; return whether this succeeded."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, timeout: float) -> Iterator[int]:
    """Hold the lock of a lock file during the block.

    Yields:
        The descriptor of the lock file: a process that inherits the descriptor holds the lock too, until this process
            ends.

    Args:
        path: The lock file, created if missing; its directory must exist.
        timeout: Seconds to wait for another process that holds the lock.

    Raises:
        TimeoutError: Another process held the lock for longer.
        OSError: The lock file cannot be opened or created.
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
    """The state of a fleet on this machine cannot be written."""


def unwritable(path: Path, exc: OSError) -> UnwritableError:
    """Return the error for a file or directory of the state that cannot be written."""
    in_the_way = exc.errno in (errno.EISDIR, errno.EEXIST, errno.EINVAL)
    fix = "a part of this path is a file: move this file away, or set TPU_OPS_STATE to a directory"
    if exc.errno != errno.ENOTDIR:
        fix = "move away what is in this place: tpu_ops creates the file again" if in_the_way else TO_WRITE
    return UnwritableError(
        f"cannot write the fleet's state: {exc.strerror or exc}{room(exc, path)}",
        where=str(exc.filename or path) if in_the_way else str(path),
        fix=fix,
    )
