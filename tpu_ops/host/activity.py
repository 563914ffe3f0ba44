"""The action `activity`: who has used this host last, by runs, by processes that hold chips, and by logins."""

from __future__ import annotations

import contextlib
import os
import struct
import time

from tpu_ops.protocol.wire import require_protocol

from . import TYPE_CHECKING, proc
from .rights import require_root
from .store import Store

if TYPE_CHECKING:
    from typing import Any, Dict, Iterator

#: Files with the open logins and with all logins. The second file is rotated once a month.
OPEN_LOGINS = "run/utmp"
LOGINS = ("var/log/wtmp", "var/log/wtmp.1")
#: One entry of these files as glibc writes it on x86-64: type, pid, line, id, user, host, exit status, session, time.
_ENTRY = struct.Struct("<hxxi32s4s32s256shhiii20x16x")
#: Types of entries: the host was booted, a user has logged in, a login has ended.
_BOOT, _USER, _ENDED = 2, 7, 8
#: Maximum number of bytes that are read from the end of a file.
_MOST = 4 * 2**20
#: Number of newest runs that are looked at. Only one run at a time can be on a host.
_RUNS = 5


def activity(request: Dict[str, Any], store: Store) -> Dict[str, Any]:
    """Return the signs that somebody uses or has used this host.

    Returns:
        ``clock``: this host's time. ``signs``: ``{"kind", "who", "what", "at", "now"}`` each. ``kind`` is ``run``,
        ``chip`` or ``login``; ``what`` is the run's id, the process's command or the terminal; ``at`` is the time of
        the last use in seconds since 1970, and ``now`` whether the use goes on. ``unknown``: one sentence for each kind
        of use that this host cannot report.
    """
    require_root()
    require_protocol(request)
    now = time.time()
    runs, unknown = _runs(store, now)
    logins = last_login()
    if logins is None:
        unknown.append("it keeps no record of logins (/{})".format(LOGINS[0]))
    return {"ok": True, "clock": now, "signs": [*runs, *_chips(now), *(logins or ())], "unknown": unknown}


def _sign(kind: str, who: str, what: str, at: float, now: bool = False) -> Dict[str, Any]:
    return {"kind": kind, "who": who, "what": what, "at": at, "now": now}


def _runs(store: Store, now: float) -> tuple[list[Dict[str, Any]], list[str]]:
    """Return signs of the active run and of the last runs, and a sentence for each damaged record."""
    found = []
    holder = store.holder()
    if holder is not None:
        found.append(_sign("run", holder["person"], holder["run_id"], now, True))
    records, damages = store.survey()
    for record in records[:_RUNS]:
        found.append(_sign("run", record["person"]["name"], record["run_id"], end_of(record, store)))
    return found, [damage.message for damage in damages]


def end_of(record: Dict[str, Any], store: Store) -> float:
    """Return when a run ended. For a run that was lost without a record of its end, return the latest possible time."""
    times = [record[key] for key in ("since", "began", "exited", "ended") if record.get(key)]
    if record["state"] == "lost":
        if not store.of_this_boot(record):
            times.append(proc.started_at(1))
        folder = store.directory(record["run_id"])
        with contextlib.suppress(OSError):  # the run's directory was removed in the meantime
            times += [os.stat(os.path.join(folder, name)).st_mtime for name in os.listdir(folder)]
    return float(max(times))


def _chips(now: float) -> list[Dict[str, Any]]:
    return [_sign("chip", entry["user"], entry["command"], now, True) for entry in proc.holders()]


def last_login(root: str = "/") -> list[Dict[str, Any]] | None:
    """Return a sign of the last login at a terminal, if there was one; None if this host keeps no record of logins.

    A login is in use when it begins and ends, and when its terminal has input or output. An ssh connection without a
    terminal is in no record: those of scp, rsync, editors, and the launcher's own.
    """
    paths = [os.path.join(root, name) for name in LOGINS]
    if not os.path.exists(paths[0]):
        return None
    found: list[Dict[str, Any]] = []
    for path in paths:
        found += _logins(path)
    found += _open_logins(root)
    return [max(found, key=lambda sign: float(sign["at"]))] if found else []


def _logins(path: str) -> list[Dict[str, Any]]:
    """Return a sign for the begin and for the end of each login in a file."""
    found = []
    users: Dict[str, str] = {}
    for kind, line, user, at in _entries(path):
        if kind == _BOOT:
            users.clear()
        elif kind == _USER:
            users[line] = user
            found.append(_sign("login", user, line, at))
        elif kind == _ENDED and line in users:
            found.append(_sign("login", users.pop(line), line, at))
    return found


def _open_logins(root: str) -> list[Dict[str, Any]]:
    """Return a sign for the last input or output of each open login's terminal."""
    found = []
    for kind, line, user, at in _entries(os.path.join(root, OPEN_LOGINS)):
        if kind != _USER:
            continue
        try:
            terminal = os.stat(os.path.join(root, "dev", line))
        except OSError:
            continue  # the login has ended
        found.append(_sign("login", user, line, max(at, terminal.st_atime, terminal.st_mtime)))
    return found


def _entries(path: str) -> Iterator[tuple[int, str, str, float]]:
    """Yield type, terminal, user and time of each entry in a file; nothing if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size // _ENTRY.size * _ENTRY.size - _MOST // _ENTRY.size * _ENTRY.size))
            data = file.read()
    except OSError:
        return
    for fields in _ENTRY.iter_unpack(data[: len(data) // _ENTRY.size * _ENTRY.size]):
        yield fields[0], _text(fields[2]), _text(fields[4]), float(fields[9]) + fields[10] / 1e6


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "replace")
