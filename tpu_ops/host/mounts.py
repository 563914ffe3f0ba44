"""The file systems mounted on this host: whether their servers answer, and their systemd units.

A run is ordered after these units, so that at a shutdown the run ends before its file systems are unmounted. Otherwise,
they would be unmounted while the command saves its last checkpoint. systemd does not do this by itself: it does not
order ``nofail`` mounts of /etc/fstab and network file systems before any target that a service waits for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import signal
import time

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Container, Dict, Iterator, Sequence

MOUNTINFO = "/proc/self/mountinfo"
#: The role buckets lists its mount points in this file, one per line.
BUCKETS = "/etc/tpu_ops/buckets"
#: Top directories that systemd unmounts last or never, with all mounts below them: these mounts are left out.
_SYSTEM = (b"/proc", b"/sys", b"/dev", b"/run")
#: Maximum number of units. A host of containers has hundreds of mounts, mostly at deep paths.
MOST = 100
#: Maximum length of a unit's name (systemd.unit(5)). A mount whose unit would have a longer name has no unit.
_LONGEST = 255
#: Types of file systems that need a server to answer. Types that start with ``fuse.``, such as gcsfuse, count too.
_ANSWERED_FOR = (b"nfs", b"nfs4", b"cifs", b"smb3", b"ceph", b"glusterfs", b"lustre", b"beegfs", b"9p")
#: Seconds that a file system has to answer.
ANSWER = 5.0
#: Maximum number of file systems that are checked, each by its own process.
_ASKED = 32
_POLL = 0.005
#: Errors that do not mean that the server has failed: the mount belongs to another user, or another mount hides it.
_NO_FAULT = (0, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR)
_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")
_ESCAPED = re.compile(rb"[^A-Za-z0-9:_.]")


def found() -> list[str]:
    """Return the systemd units of this host's mounts, see `units`, and the services that mount buckets."""
    try:
        with open(MOUNTINFO, "rb") as file:
            return units(file.read()) + [_bucket_service(path) for path in _buckets()]
    except OSError:
        return []


def units(mountinfo: bytes) -> list[str]:
    """Return the units of all mounts in /proc/self/mountinfo (proc_pid_mountinfo(5)), shallow paths first.

    For an automount point, the automount unit and the mount unit are included.
    """
    paths: dict[bytes, set[str]] = {}
    for path, kind, _, _ in _parsed(mountinfo):
        if path == b"/" or any(path == top or path.startswith(top + b"/") for top in _SYSTEM):
            continue
        kinds = ("automount", "mount") if kind == b"autofs" else ("mount",)
        paths.setdefault(path, set()).update(kinds)
    names = [
        "{}.{}".format(_escaped(path), kind)
        for path in sorted(paths, key=lambda path: (path.count(b"/"), path))
        for kind in sorted(paths[path])
    ]
    return [name for name in names if len(name) <= _LONGEST][:MOST]


def _parsed(mountinfo: bytes) -> Iterator[tuple[bytes, bytes, bytes, bytes]]:
    """Yield the mount point, type, source and options of each file system."""
    # Do not use `splitlines`: it also splits at carriage returns, and any user can make a FUSE mount with one in its
    # path.
    for line in mountinfo.split(b"\n"):
        left, _, right = line.partition(b" - ")
        fields, more = left.split(b" "), right.split(b" ")
        if len(fields) >= 5 and len(more) >= 2:
            path, source = (
                _OCTAL.sub(lambda match: bytes([int(match.group(1), 8)]), text) for text in (fields[4], more[1])
            )
            yield path, more[0], source, b" ".join(more[2:])


def unfit(uid: int, needed: Sequence[str] = (), limit: float = ANSWER) -> list[Dict[str, str]]:
    """Return the mounts whose servers do not answer, and buckets that are not mounted.

    Each entry has ``path``, ``problem`` and ``fix``.

    FUSE mounts of other users are not checked: they affect only the runs of these users.

    Args:
        uid: The user id of the run's user.
        needed: Paths that the run uses; the mounts of these paths are checked even if another user made them.
        limit: Seconds that a server has to answer.
    """
    try:
        with open(MOUNTINFO, "rb") as file:
            parsed = list(_parsed(file.read()))
    except OSError:
        return []
    of = {path: (kind, source, options) for path, kind, source, options in parsed}
    asked = {
        path: (kind, source)
        for path, (kind, source, options) in of.items()
        if _is_answered_for(kind)
        and (_mounted_by(options) in (0, uid) or any(is_on(used, os.fsdecode(path)) for used in needed))
    }
    found = _missing_buckets(of)
    for path, code in _answers(list(asked)[:_ASKED], limit).items():
        if code in _NO_FAULT:
            continue
        kind, source = (os.fsdecode(text) for text in asked[path])
        name = os.fsdecode(path)
        what = "does not answer within {:.0f} s".format(limit) if code is None else "fails: " + os.strerror(code)
        fix = "check the server, or unmount the file system on this worker: `sudo umount -f -l {}`"
        found.append({
            "path": name,
            "problem": "{}, where {} ({}) is mounted, {}".format(name, source, kind, what),
            "fix": fix.format(shlex.quote(name)),
        })  # fmt: skip
    return found


def _buckets() -> list[bytes]:
    """Return the mount points of the role buckets."""
    try:
        with open(BUCKETS, "rb") as file:
            return file.read().split()
    except OSError:
        return []


def _bucket_service(path: bytes) -> str:
    return "tpu_ops-bucket-{}.service".format(_escaped(path))


def _missing_buckets(mounted: Container[bytes]) -> list[Dict[str, str]]:
    """Return the mount points of the role buckets where nothing is mounted: a run would write to the worker's disk."""
    fix = "`sudo systemctl restart '{0}'` on this worker; `journalctl -u '{0}'` says why it was not mounted"
    return [
        {
            "path": os.fsdecode(path),
            "problem": "the bucket at {} is not mounted".format(os.fsdecode(path)),
            "fix": fix.format(_bucket_service(path)),
        }
        for path in _buckets()
        if path not in mounted
    ]


def _is_answered_for(kind: bytes) -> bool:
    return kind in _ANSWERED_FOR or kind.startswith(b"fuse.")


def _mounted_by(options: bytes) -> int:
    """Return the id of the user that mounted a file system: root (0) unless the mount's options name a FUSE user."""
    named = [option[len(b"user_id=") :] for option in options.split(b",") if option.startswith(b"user_id=")]
    return int(named[0]) if named and named[0].isdigit() else 0


def is_on(path: str, point: str) -> bool:
    """Return whether a path is at or below a mount point, without following symbolic links."""
    named = os.path.normpath(path)
    return named == point or named.startswith(point.rstrip("/") + "/")


def _answers(paths: list[bytes], limit: float) -> Dict[bytes, int | None]:
    """Call statvfs on file systems; return path -> error number, 0 for success, None for no answer in time."""
    found: Dict[bytes, int | None] = dict.fromkeys(paths)
    children = {_child(path): path for path in paths}
    until = time.monotonic() + limit
    while children:
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                found[children.pop(pid)] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else errno.EIO
        if time.monotonic() > until:
            break
        time.sleep(_POLL)  # poll the children until the deadline
    for pid in children:
        # A child that waits inside the kernel does not end now; init collects it later.
        os.kill(pid, signal.SIGKILL)
    return found


def _child(path: bytes) -> int:
    """Fork a process that calls statvfs on one file system and exits with the error number; return its pid.

    A process and not a thread: a thread that waits for a server would keep this process from ending. The child closes
    all inherited descriptors, which would keep the session of this request open.
    """
    pid = os.fork()
    if pid:
        return pid
    code = errno.EIO
    try:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                os.close(int(name))
        os.statvfs(path)
        code = 0
    except OSError as exc:
        code = exc.errno or errno.EIO
    finally:
        os._exit(code)


def told(path: str) -> str:
    """Return a description of the mount that a path is on, without accessing the path, which could block forever.

    Symbolic links are not followed, as in `is_on`. The result is empty if the mount is unknown or needs no server.
    """
    try:
        with open(MOUNTINFO, "rb") as file:
            mountinfo = file.read()
    except OSError:
        return ""
    found = b"", b"", b""
    for point, kind, source, _ in _parsed(mountinfo):
        if is_on(path, os.fsdecode(point)) and len(point) >= len(found[0]):
            found = point, kind, source
    is_asked = _is_answered_for(found[1]) or found[1] == b"autofs"
    return "{0} is {2} ({1})".format(*map(os.fsdecode, found)) if is_asked else ""


def gone(path: str) -> str:
    """Return the fix for a path that does not answer."""
    text = (
        "is the server of a mount there down? {}check the server, or unmount the file system: `sudo umount -f -l MOUNT`"
    )
    known = told(path)
    return text.format(known + ": " if known else "")


def _escaped(path: bytes) -> str:
    """Return a path escaped for a unit's name, as `systemd-escape --path` does."""
    parts = path.strip(b"/").split(b"/")
    text = "-".join(_ESCAPED.sub(lambda match: b"\\x%02x" % match.group()[0], part).decode("ascii") for part in parts)
    return "\\x2e" + text[1:] if text.startswith(".") else text
