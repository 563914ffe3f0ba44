"""Creates the record of a rank on this host, and describes in it how the command ended."""

from __future__ import annotations

import os
import signal
import time

from tpu_ops.protocol import spec
from tpu_ops.protocol.record import FINAL, grace, new
from tpu_ops.protocol.watch import STALLED

from . import TYPE_CHECKING, proc
from .person import Person
from .store import Store

if TYPE_CHECKING:
    from typing import Any, Dict


def new_record(data: Dict[str, Any], person: Person, asked_by: int, marker: str = "") -> Dict[str, Any]:
    """Return a new record of a run whose supervisor is this process."""
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
    """Return what the run lock's file says of a run. ``since`` is in seconds since 1970; ``asker`` started the run."""
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
    """Return the run that holds this host (see `Store.holder`), with ``ends`` if the run is being ended.

    ``ends`` has the reason ``why``, and ``kill_at``: the latest time of SIGKILL, in seconds since 1970.
    """
    holder = store.holder()
    record = store.read(holder["run_id"]) if holder is not None else None
    if holder is None or record is None or record["state"] != "ending" or record["supervisor"] != holder["supervisor"]:
        return holder
    intent = record["intent"]
    begun = intent["at"] if intent else record["exited"]
    why = intent["reason"] if intent else "the run's command has ended"
    return dict(holder, ends={"why": why, "kill_at": begun + grace(record["grace"], intent)})


def exit_of(status: int) -> Dict[str, int]:
    """Return ``{"code": n}`` or ``{"signal": n}`` from a wait status."""
    return {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"code": os.WEXITSTATUS(status)}


def cause_of(ending: Dict[str, int], oom: bool = False) -> str:
    """Return how a command ended as text for users."""
    if "signal" in ending:
        known = ending["signal"] in set(signal.Signals)
        name = signal.Signals(ending["signal"]).name if known else "signal {}".format(ending["signal"])
        text = "killed by {}".format(name)
    else:
        text = "exit code {}".format(ending["code"])
    return text + ": out of memory" if oom else text


def verdict(status: int | None, intent: Dict[str, Any] | None, oom: bool = False) -> Dict[str, Any]:
    """Return state, exit and reason for the record of a rank whose command has ended.

    A command that was sent SIGTERM never counts as "succeeded": many programs exit with 0 on SIGTERM.
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
    """Return the user who requested the stop of a run; empty if no user did, for example if a recovery stopped it."""
    return str(intent["by"]) if intent is not None and intent.get("requested") else ""


def note_stop_request(store: Store, record: Dict[str, Any], name: str, *, anyway: bool = False) -> Dict[str, Any]:
    """Add the user who requested a stop to the record of an ended rank, unless the record already names a user.

    If the supervisor was killed, `after` closes the record later and keeps this field.

    Args:
        store: The store of the record.
        record: The record.
        name: The name of the user.
        anyway: Continue without the lock if the records stay locked; see `Store.changing`.

    Returns:
        The new record; the given record if another attempt has replaced it.

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
    """Remove an intent that was stored after the run's end; return the record, with the user's stop request noted.

    Otherwise the next attempt would read the intent and stop.

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


def shutdown(notice: Dict[str, Any] | None) -> Dict[str, Any]:
    """Return the intent of a rank whose host shuts down, given the newest notice of the host."""
    reason = "host shuts down" + (": {}".format(notice["what"]) if notice else "")
    intent = {"kind": "shutdown", "by": "systemd", "at": time.time(), "reason": reason}
    return dict(intent, notice=notice["kind"]) if notice else intent


def reason_of(intent: Dict[str, Any] | None) -> Dict[str, Any]:
    """Return what the command's processes find in the file `spec.REASON_FILE` when they get SIGTERM.

    ``kind`` is ``stop``, ``failure``, ``stall``, ``preempted``, ``maintenance``, ``shutdown``, or ``ended`` for
    processes that the command has left behind.
    """
    if intent is None:
        return {"kind": "ended", "reason": "the run's command has ended", "by": "", "at": time.time()}
    kind = intent.get("notice") or {"failed": "failure", "skew": "failure", "lost": "failure"}.get(intent["kind"])
    reason = str(intent.get("reason", ""))
    if reason.startswith(STALLED):
        kind = "stall"
    return {"kind": kind or intent["kind"], "reason": reason, "by": intent.get("by", ""), "at": intent.get("at")}


def first_in(ending: Dict[str, Any], intent: Dict[str, Any] | None) -> Dict[str, Any] | None:
    """Return the first failure in the order that ends the whole run; None if this rank was stopped by a user.

    After a user's stop, losing contact to other ranks is no failure: they were stopped as well.
    """
    if intent is not None and intent["kind"] == "stop" and ending["kind"] == "lost":
        return None
    first: Dict[str, Any] | None = ending["first"]
    return first


def intent_of(order: Dict[str, Any]) -> Dict[str, Any]:
    """Return the intent for this rank from the order that ends the whole run."""
    return {
        "kind": order["kind"],
        "by": order.get("by") or "the run itself",
        "at": time.time(),
        "reason": order["reason"],
        "grace": spec.grace_of(order.get("grace")),
    }
