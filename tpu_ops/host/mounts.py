"""What is mounted on this host, as units of systemd: a run is ordered behind them, so that it ends before they go.

Without that a shutdown takes them away while the command saves its last checkpoint there: those of ``nofail`` in
/etc/fstab, and of network file systems, are ordered before no target that a service waits for.
"""

from __future__ import annotations

import os
import re

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Iterator

MOUNTINFO = "/proc/self/mountinfo"
#: What systemd takes away last or never, with all that is below it.
_SYSTEM = (b"/proc", b"/sys", b"/dev", b"/run")
#: Most units that are named: a host of containers has hundreds of mounts, and those lie deep.
MOST = 100
#: Longest name of a unit (systemd.unit(5)); of a path that makes a longer one systemd has none.
_LONGEST = 255
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
    for path, kind, _ in _parsed(mountinfo):
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


def _parsed(mountinfo: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield where each file system is mounted, of what type it is, and what is mounted there."""
    # Not `splitlines`: a carriage return may stand in a path, of which anybody may make one by FUSE.
    for line in mountinfo.split(b"\n"):
        left, _, right = line.partition(b" - ")
        fields, more = left.split(b" "), right.split(b" ")
        if len(fields) >= 5 and len(more) >= 2:
            path, source = (
                _OCTAL.sub(lambda match: bytes([int(match.group(1), 8)]), text) for text in (fields[4], more[1])
            )
            yield path, more[0], source


def told(path: str) -> str:
    """Return the mount that a path is on, for people and without a look at it: a server that is gone would hang one.

    Empty where it is not known. What a symbolic link leads to is not.
    """
    try:
        with open(MOUNTINFO, "rb") as file:
            mountinfo = file.read()
    except OSError:
        return ""
    wanted = os.fsencode(os.path.normpath(path))
    found = b"", b"", b""
    for point, kind, source in _parsed(mountinfo):
        around = wanted == point or wanted.startswith(point.rstrip(b"/") + b"/")
        if around and len(point) >= len(found[0]):
            found = point, kind, source
    return "{0} is {2} ({1})".format(*map(os.fsdecode, found)) if found[0] else ""


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
