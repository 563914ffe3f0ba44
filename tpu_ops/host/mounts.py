"""What is mounted on this host: whether servers of it answer, and its units of systemd.

A run is ordered behind these, so that it ends before they go. Without that a shutdown takes them away while the command
saves its last checkpoint there: those of ``nofail`` in /etc/fstab, and of network file systems, are ordered before no
target that a service waits for.
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
    from typing import Dict, Iterator, Sequence

MOUNTINFO = "/proc/self/mountinfo"
#: What systemd takes away last or never, with all that is below it.
_SYSTEM = (b"/proc", b"/sys", b"/dev", b"/run")
#: Most units that are named: a host of containers has hundreds of mounts, and those lie deep.
MOST = 100
#: Longest name of a unit (systemd.unit(5)); of a path that makes a longer one systemd has none.
_LONGEST = 255
#: Types of file systems that a server or a program answers for; so do those of ``fuse.`` and a name, as gcsfuse.
_ANSWERED_FOR = (b"nfs", b"nfs4", b"cifs", b"smb3", b"ceph", b"glusterfs", b"lustre", b"beegfs", b"9p")
#: Seconds within which they answer.
ANSWER = 5.0
#: How many are asked at most, each by a process of its own.
_ASKED = 32
_POLL = 0.005
#: What says nothing about who answers: a mount is somebody else's alone, or another one hides it.
_NO_FAULT = (0, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR)
_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")
_ESCAPED = re.compile(rb"[^A-Za-z0-9:_.]")


def found() -> list[str]:
    """Return the units of this host, as `units`."""
    try:
        with open(MOUNTINFO, "rb") as file:
            return units(file.read())
    except OSError:
        return []


def units(mountinfo: bytes) -> list[str]:
    """Given /proc/self/mountinfo (proc_pid_mountinfo(5)), return the units of what is mounted, the shallowest first.

    What is to be mounted by an automount when it is used has its unit there as well.
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
    """Yield where each file system is mounted, of what type it is, what is mounted there, and its own options."""
    # Not `splitlines`: a carriage return may stand in a path, of which anybody may make one by FUSE.
    for line in mountinfo.split(b"\n"):
        left, _, right = line.partition(b" - ")
        fields, more = left.split(b" "), right.split(b" ")
        if len(fields) >= 5 and len(more) >= 2:
            path, source = (
                _OCTAL.sub(lambda match: bytes([int(match.group(1), 8)]), text) for text in (fields[4], more[1])
            )
            yield path, more[0], source, b" ".join(more[2:])


def unfit(uid: int, needed: Sequence[str] = (), limit: float = ANSWER) -> list[Dict[str, str]]:
    """Return what is mounted and of no use, since nobody answers for it: ``path``, ``problem`` and ``fix`` each.

    What another person than the one of a run has mounted, as anybody can by FUSE, is in the way of their own runs.

    Args:
        uid: Of the person whose run it is to be.
        needed: Paths that the run is to use, whoever has mounted what they are on.
        limit: Seconds within which an answer has to come.
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
    found = []
    for path, code in _answers(list(asked)[:_ASKED], limit).items():
        if code in _NO_FAULT:
            continue
        kind, source = (os.fsdecode(text) for text in asked[path])
        name = os.fsdecode(path)
        what = "does not answer within {:.0f} s".format(limit) if code is None else "fails: " + os.strerror(code)
        fix = "see to its server, or unmount it on this worker: `sudo umount -f -l {}`"
        found.append({
            "path": name,
            "problem": "{}, where {} ({}) is mounted, {}".format(name, source, kind, what),
            "fix": fix.format(shlex.quote(name)),
        })  # fmt: skip
    return found


def _is_answered_for(kind: bytes) -> bool:
    return kind in _ANSWERED_FOR or kind.startswith(b"fuse.")


def _mounted_by(options: bytes) -> int:
    """Given the options of a file system, return the user id of who has mounted it: root unless FUSE names another."""
    named = [option[len(b"user_id=") :] for option in options.split(b",") if option.startswith(b"user_id=")]
    return int(named[0]) if named and named[0].isdigit() else 0


def is_on(path: str, point: str) -> bool:
    """Return whether a path is at or below a mount point by its name; what a symbolic link leads to is not known."""
    named = os.path.normpath(path)
    return named == point or named.startswith(point.rstrip("/") + "/")


def _answers(paths: list[bytes], limit: float) -> Dict[bytes, int | None]:
    """Ask file systems how large they are; return the error number, 0 for none, None where no answer came."""
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
        time.sleep(_POLL)  # polls until the deadline
    for pid in children:
        # Whom that does not end either, init collects one day.
        os.kill(pid, signal.SIGKILL)
    return found


def _child(path: bytes) -> int:
    """Fork a process that asks one file system and ends with its error number; return its pid.

    A thread that waits for a server would keep this process from ending, and a process that has the descriptors of this
    one would keep the session open that it answers to.
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
    """Return the mount that a path is on, for people and without a look at it: a server that is gone would hang one.

    By its name, as `is_on`; empty where it is not known, or nobody answers for it, as for a disk.
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
    """Return what to do about a path that does not answer."""
    text = "is the server of a mount there gone? {}see to it, or unmount what waits for it: `sudo umount -f -l MOUNT`"
    known = told(path)
    return text.format(known + ": " if known else "")


def _escaped(path: bytes) -> str:
    """Return a path as it stands in the name of its unit, as `systemd-escape --path` does."""
    parts = path.strip(b"/").split(b"/")
    text = "-".join(_ESCAPED.sub(lambda match: b"\\x%02x" % match.group()[0], part).decode("ascii") for part in parts)
    return "\\x2e" + text[1:] if text.startswith(".") else text
