"""The actions `holders` and `unlock`: list the processes that hold chips of this host, and end such processes."""

from __future__ import annotations

import pwd
import signal
import time

from tpu_ops.protocol.wire import MAX_UNLOCK_GRACE, UNLOCK_GRACE, Refused, require_protocol

from . import TYPE_CHECKING, proc
from .caller import Caller
from .ending import chips_after, send
from .person import Person, asking
from .rights import administers, require_root
from .store import Store

if TYPE_CHECKING:
    from typing import Any, Dict

#: Seconds that processes have to end after SIGKILL.
_KILL_LIMIT = 5.0
_POLL = 0.05
#: Maximum number of digits in a user id.
_UID_DIGITS = 10


def holders(request: Dict[str, Any], store: Store) -> Dict[str, Any]:
    """Return the processes that hold chips (see `described`), the run that holds this worker, and the run's command."""
    require_root()
    require_protocol(request)
    holder = store.holder()
    argv = ((store.read(holder["run_id"]) if holder else None) or {}).get("argv") or []
    seen = described(store, holder)
    return {"ok": True, "holders": seen, "holder": holder, "argv": argv, "chips": proc.chips()}


def described(store: Store, holder: Dict[str, Any] | None) -> list[Dict[str, Any]]:
    """Return the processes that hold chips, each with its start time and the run whose control group it is in."""
    record = store.read(holder["run_id"]) if holder else None
    own = set(proc.cgroup_pids(record["cgroup"])) if record and record.get("cgroup") else set()
    found = []
    for entry in proc.holders():
        run = holder["run_id"] if holder and entry["pid"] in own else ""
        found.append(dict(entry, since=proc.started_at(entry["pid"]), start=proc.start_time(entry["pid"]), run=run))
    return found


def unlock(request: Dict[str, Any], store: Store, caller: Caller) -> Dict[str, Any]:
    """End processes that hold chips and belong to no run, then remove libtpu's lockfiles if no process holds a chip.

    Request: ``user`` is the owner of the processes, by default the user who asks. Only an administrator may name
        another owner, by user id if there is no account. ``grace`` is the time in seconds between SIGTERM and SIGKILL.
        ``processes`` has ``[pid, start]`` for each process to end; without it, as in requests of older controllers, all
        processes of the owner are ended. Processes of a run are never ended: use `stop`.

    Returns:
        ``ended`` and ``left`` (see `described`), and ``chips`` (see `chips_after`).

    Raises:
        Refused: The user may not end these processes, or the owner does not exist.
        Gone: The caller has gone. Processes that got SIGTERM then get no SIGKILL.
    """
    require_root()
    require_protocol(request)
    person = asking()
    uid = _allowed(person, request.get("user") or "")
    grace = UNLOCK_GRACE if request.get("grace") is None else request["grace"]
    if not 0 <= grace <= MAX_UNLOCK_GRACE:
        raise Refused("invalid", "the grace period is not between 0 and {:.0f} s".format(MAX_UNLOCK_GRACE))
    meant = request.get("processes")
    doomed = [
        entry
        for entry in described(store, store.holder())
        if entry["uid"] == uid and not entry["run"] and (meant is None or [entry["pid"], entry["start"]] in meant)
    ]
    for number, limit in ((signal.SIGTERM, float(grace)), (signal.SIGKILL, _KILL_LIMIT)):
        alive = [entry for entry in doomed if _is_there(entry)]
        if not alive:
            break
        send([entry["pid"] for entry in alive], number)
        deadline = time.monotonic() + limit
        while any(map(_is_there, alive)) and time.monotonic() < deadline:
            caller.pause(_POLL)
    ended = [entry for entry in doomed if not _is_there(entry)]
    chips = chips_after()
    return {"ok": True, "ended": ended, "left": described(store, store.holder()), "chips": chips}


def _is_there(entry: Dict[str, Any]) -> bool:
    """Return whether a process that held chips still runs; another process of the same number does not count."""
    return proc.start_time(entry["pid"]) == entry["start"] and proc.is_alive(entry["pid"])


def _allowed(person: Person, user: str) -> int:
    """Return the id of the user whose processes are to be ended, if the user who asks may do that."""
    if not user or user == person.name:
        return person.uid
    if not administers(person):
        text = "{} is not an administrator of this host and cannot end processes of {}"
        raise Refused("denied", text.format(person.name, user), "ask {} or an administrator".format(user))
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        # `proc.person_name` returns the user id as the name if there is no account, for example in a container.
        if user.isascii() and user.isdecimal() and len(user) <= _UID_DIGITS and proc.person_name(int(user)) == user:
            return int(user)
        fix = "`tpu_ops who` names the users that hold chips; a user without an account is named by the user id"
        raise Refused("missing", "there is no user {} on this host".format(user), fix) from None
