"""The record of a rank on this host: its creation by the supervisor, and its description of the command's end."""

from __future__ import annotations

import os
import signal
import time

from tpu_ops.protocol import spec
from tpu_ops.protocol.record import FINAL, grace, new

from . import TYPE_CHECKING, proc
from .person import Person
from .store import Store

if TYPE_CHECKING:
    from typing import Any, Dict


def new_record(data: Dict[str, Any], person: Person, asked_by: int, marker: str = "") -> Dict[str, Any]:
    """Return the record of a new run whose supervisor is this process."""
    boot, init_start = Store.boot()
    return new(
        data,
        person={"uid": person.uid, "name": person.name},
        asked_by=asked_by,
        asker=proc.person_name(asked_by),
        marker=marker,
        boot_id=boot,
        init_start=init_start,
        supervisor={"pid": os.getpid(), "start": proc.start_time(os.getpid())},
        since=time.time(),
    )


def holder_of(record: Dict[str, Any]) -> Dict[str, Any]:
    """Return the run lock's entry for a run: ``since`` is in seconds since 1970, ``asker`` started the run."""
    person = record["person"]
    return {
        "run_id": record["run_id"],
        "person": person["name"],
        "uid": person["uid"],
        "asker": record["asker"],
        "since": record["since"],
        "supervisor": record["supervisor"],
    }


def occupant(store: Store) -> Dict[str, Any] | None:
    """Return the run that holds this host, as `Store.holder`, with ``ends`` if the run is being ended.

    ``ends`` has the reason ``why``, and ``kill_at``: the latest time of SIGKILL, in seconds since 1970.
    """
    holder = store.holder()
    record = store.read(holder["run_id"]) if holder is not None else None
    if holder is None or record is None or record["state"] != "ending" or record["supervisor"] != holder["supervisor"]:
        return holder
    intent = record["intent"]
    begun = intent["at"] if intent else record["exited"]
    why = intent["reason"] if intent else "its command has ended"
    return dict(holder, ends={"why": why, "kill_at": begun + grace(record["grace"], intent)})


def exit_of(status: int) -> Dict[str, int]:
    """Return ``{"code": n}`` or ``{"signal": n}`` from a wait status."""
    return {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"code": os.WEXITSTATUS(status)}


def cause_of(ending: Dict[str, int], oom: bool = False) -> str:
    """Return the end of a command as text for users."""
    if "signal" in ending:
        known = ending["signal"] in set(signal.Signals)
        name = signal.Signals(ending["signal"]).name if known else "signal {}".format(ending["signal"])
        text = "killed by {}".format(name)
    else:
        text = "exit code {}".format(ending["code"])
    return text + ": out of memory" if oom else text


def verdict(status: int | None, intent: Dict[str, Any] | None, oom: bool = False) -> Dict[str, Any]:
    """Return state, exit and reason from the wait status of the command and the intent that ended it.

    A command that was asked to end never counts as "succeeded": many programs exit with 0 on SIGTERM.
    """
    ending = None if status is None else exit_of(status)
    if intent is not None:
        return {"state": "stopped", "exit": ending, "reason": intent.get("reason", "")}
    if ending is None:
        return {"state": "failed", "exit": None, "reason": "it is not known how the command ended"}
    if ending == {"code": 0}:
        return {"state": "succeeded", "exit": ending, "reason": ""}
    return {"state": "failed", "exit": ending, "reason": cause_of(ending, oom)}


def requested_by(intent: Dict[str, Any] | None) -> str:
    """Return the user who wanted a run stopped for good; empty if nobody did, or only a recovery ended it."""
    return str(intent["by"]) if intent is not None and intent.get("requested") else ""


def note_stop_request(store: Store, record: Dict[str, Any], name: str, *, anyway: bool = False) -> Dict[str, Any]:
    """Add to the record of an ended rank the user who wants no further attempt; the first one stays.

    If its supervisor was killed, `after` closes the record and keeps this entry.

    Args:
        store: The store of the record.
        record: The record.
        name: The name of the user.
        anyway: Continue if the records stay locked; see `Store.changing`.

    Returns:
        The new record; the given one if another attempt has replaced it.

    Raises:
        Refused: The records stay locked by another process.
    """
    with store.changing(record["run_id"], anyway=anyway):
        found = store.read(record["run_id"])
        if found is None or found["attempt"] != record["attempt"]:
            return record
        if found["state"] != "succeeded" and not found.get("stop_requested_by"):
            found["stop_requested_by"] = name
            store.save(found)
        return found


def taken_back(store: Store, record: Dict[str, Any], intent: Dict[str, Any]) -> Dict[str, Any]:
    """Remove an intent that came after the run's end; return the record with its stop request, if any.

    An intent that nothing reads any more would otherwise be taken by the next attempt.

    Args:
        store: The store of the record.
        record: The record.
        intent: The intent that was stored.

    Raises:
        Refused: The records stay locked by another process.
    """
    if record.get("state") not in FINAL:
        return record
    supervisor = record["supervisor"]
    if proc.start_time(supervisor["pid"]) == supervisor["start"]:
        return record  # `after` will read the intent
    taken = store.take_intent(record["run_id"], only=intent)
    return note_stop_request(store, record, requested_by(taken)) if requested_by(taken) else record


def first_in(ending: Dict[str, Any], intent: Dict[str, Any] | None) -> Dict[str, Any] | None:
    """Return the first failure, from the order that ends the whole run and this rank's intent.

    After a user's stop there is none, even if this rank loses contact while it ends: the others were stopped as well.
    """
    if intent is not None and intent["kind"] == "stop" and ending["kind"] == "lost":
        return None
    first: Dict[str, Any] | None = ending["first"]
    return first


def intent_of(order: Dict[str, Any]) -> Dict[str, Any]:
    """Return this rank's intent from the order that ends the whole run."""
    return {
        "kind": order["kind"],
        "by": order.get("by") or "the run itself",
        "at": time.time(),
        "reason": order["reason"],
        "grace": spec.grace_of(order.get("grace")),
    }
