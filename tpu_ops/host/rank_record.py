"""The record of a rank on this host: what its supervisor begins with, and how it describes the end of the command."""

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
    """Return the record of a run that this process is the supervisor of."""
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
    """Return what the lock says of the run that holds it: ``since`` is in seconds since 1970, ``asker`` started it."""
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
    """Return who has this host, as `Store.holder` does; with ``ends`` where its run is being ended.

    ``ends`` has ``why``, and ``kill_at``: when SIGKILL is sent at the latest, in seconds since 1970.
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
    """Given a wait status, return ``{"code": n}`` or ``{"signal": n}``."""
    return {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"code": os.WEXITSTATUS(status)}


def cause_of(ending: Dict[str, int], oom: bool = False) -> str:
    """Given how a command ended, return that for people."""
    if "signal" in ending:
        known = ending["signal"] in set(signal.Signals)
        name = signal.Signals(ending["signal"]).name if known else "signal {}".format(ending["signal"])
        text = "killed by {}".format(name)
    else:
        text = "exit code {}".format(ending["code"])
    return text + ": out of memory" if oom else text


def verdict(status: int | None, intent: Dict[str, Any] | None, oom: bool = False) -> Dict[str, Any]:
    """Given the wait status of the command and why it was ended, return state, exit and reason.

    A command that was asked to end never counts as succeeded: many programs end with 0 on SIGTERM.
    """
    ending = None if status is None else exit_of(status)
    if intent is not None:
        return {"state": "stopped", "exit": ending, "reason": intent.get("reason", "")}
    if ending is None:
        return {"state": "failed", "exit": None, "reason": "how the command ended is not known"}
    if ending == {"code": 0}:
        return {"state": "succeeded", "exit": ending, "reason": ""}
    return {"state": "failed", "exit": ending, "reason": cause_of(ending, oom)}


def requested_by(intent: Dict[str, Any] | None) -> str:
    """Return who wanted a run stopped for good; empty where that was nobody, or what starts it again."""
    return str(intent["by"]) if intent is not None and intent.get("requested") else ""


def note_stop_request(store: Store, record: Dict[str, Any], name: str, *, anyway: bool = False) -> Dict[str, Any]:
    """Keep in the record of a rank that has ended who wants no other attempt of the run; who was first stays.

    Where its supervisor was killed, what comes behind that closes the record, and finds this there.

    Args:
        store: Where its record is.
        record: Its record.
        name: Who wants that.
        anyway: As for `Store.changing`.

    Returns:
        Its record as it stands then; the given one where another attempt has taken its place.

    Raises:
        Refused: Somebody keeps the records locked.
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
    """Return the record of a run that was asked to end, with an intent that came too late for anybody to take it.

    Behind the last one that looks for it, it would wait for the next attempt.

    Args:
        store: Where its record is.
        record: Its record.
        intent: As it was put.

    Raises:
        Refused: Somebody keeps the records locked.
    """
    if record.get("state") not in FINAL:
        return record
    supervisor = record["supervisor"]
    if proc.start_time(supervisor["pid"]) == supervisor["start"]:
        return record  # what comes behind it looks for one
    taken = store.take_intent(record["run_id"], only=intent)
    return note_stop_request(store, record, requested_by(taken)) if requested_by(taken) else record


def first_in(ending: Dict[str, Any], intent: Dict[str, Any] | None) -> Dict[str, Any] | None:
    """Given the order by which the whole run ends, and why this rank was ended, return who failed first.

    A person's stop blames nobody, though this rank hears no more of the others while it ends: they were told as well.
    """
    if intent is not None and intent["kind"] == "stop" and ending["kind"] == "lost":
        return None
    first: Dict[str, Any] | None = ending["first"]
    return first


def intent_of(order: Dict[str, Any]) -> Dict[str, Any]:
    """Given the order by which the whole run ends, return the intent with which this rank is ended."""
    return {
        "kind": order["kind"],
        "by": order.get("by") or "the run itself",
        "at": time.time(),
        "reason": order["reason"],
        "grace": spec.grace_of(order.get("grace")),
    }
