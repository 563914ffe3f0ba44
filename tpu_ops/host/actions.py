"""The actions on runs: start, status, stop; and probe, which describes this host."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from tpu_ops.protocol import spec
from tpu_ops.protocol.record import FINAL
from tpu_ops.protocol.wire import Refused, require_protocol

from . import TYPE_CHECKING, proc, spec_files, unit
from .caller import Caller
from .person import Person, asking
from .rights import require_control, require_root, runs_as
from .store import Store

if TYPE_CHECKING:
    from typing import Any, Dict

_POLL = 0.05
#: Seconds that a start waits until the systemd unit of an ended run is gone, and that a stop waits for the processes of
#: a killed supervisor. Longer than the time that processes are given to end.
_NAME_LIMIT = 15.0
#: Seconds that systemd has to answer, and seconds that processes have to end after SIGKILL.
_SYSTEMD_LIMIT = 15
_KILL_LIMIT = 20.0
#: Fix for a systemd unit that ends before it writes the run's record.
_JOURNAL = "`sudo journalctl -u {}` on this worker shows more".format(unit.UNIT)


def _occupant(store: Store) -> Dict[str, Any] | None:
    """Return the run that holds this worker, or None (`rank_record.occupant`)."""
    from .rank_record import occupant  # imported late, since few requests need it

    return occupant(store)


def held(holder: Dict[str, Any], asker: Person) -> Refused:
    """Return the error for a worker that another run holds: it names the run and how the user can get the worker."""
    from .fitness import in_use, past_run  # imported late, since few requests need it

    message = in_use(holder, "this worker", "%Y-%m-%d %H:%M:%S UTC")
    return Refused("held", message, past_run(asker, holder), holder=holder)


def start(request: Dict[str, Any], store: Store, caller: Caller) -> Dict[str, Any]:
    """Start a rank; return its record once all ranks have begun, or with ``reserve`` once it waits for other ranks.

    A request that is repeated after a broken connection gets the answer of the first request.

    Raises:
        Refused: The spec is invalid, another run is active, or the run does not begin. If it does not begin, ``blamed``
            has the ranks at fault, and ``failed_checks`` the faults of this worker (see `fitness.faults`).
        Gone: The caller has gone. The run continues.
    """
    require_root()
    require_protocol(request)
    data = spec.check(request.get("spec"))
    asker = asking()
    person = runs_as(asker, data["user"])
    run_id = data["run_id"]
    deadline = time.monotonic() + unit.START_LIMIT
    if not _has_come(request, run_id, store, asker, caller, deadline=deadline):
        try:
            holder = _occupant(store)
            if holder is not None:
                raise held(holder, asker)
            _check_earlier(store.read(run_id), data, person)
            spec_files.sweep(store.run_dir)
            spec_files.put(store.run_dir, data, person.uid, asker.uid, request["marker"])
        except Refused:
            # An earlier copy of the same request may have started the run, and so caused this refusal.
            if not _has_come(request, run_id, store, asker, caller, deadline=deadline):
                raise
        else:
            try:
                _start_unit(store, data, request["marker"], caller)
            finally:
                spec_files.discard(store.run_dir, run_id, request["marker"])
    record = _of_start(store.observe(run_id), data, request["marker"])
    reserve = request.get("reserve") is True
    while record is not None and record["state"] == "starting":
        # Return only once the record has the port of rank 0, which the other ranks need. The port may be missing when
        # the request is a repeated one.
        listens = record["port"] or record["rank"] > 0 or data["net"] is None
        if reserve and listens and not record["reason"]:
            break
        caller.pause(_POLL)
        record = store.observe(run_id)
    if record is None or (record["state"] in FINAL and not record["began"]):
        raise _not_begun(store, record)
    return {"ok": True, "record": record}


def _has_come(
    request: Dict[str, Any], run_id: str, store: Store, asker: Person, caller: Caller, *, deadline: float
) -> bool:
    """Return whether this request has already started the run. Each request has its own random marker.

    If that start is still in progress, wait for its record until ``deadline``, in seconds of the monotonic clock.

    Raises:
        Gone: The caller has gone.
    """
    while spec_files.waits(store.run_dir, run_id, request["marker"]) and time.monotonic() < deadline:
        caller.pause(_POLL)
    record = store.read(run_id)
    if record is None:
        return False
    return (record.get("asked_by"), record.get("marker")) == (asker.uid, request["marker"])


def _leaves_name_free(earlier: Dict[str, Any] | None, person: Person) -> bool:
    """Return whether a user may use a run's name: there is no earlier record, or the record of a refused first start.

    A refused start executed nothing. The directory of the run stays the user's own: other users may not use the name.
    """
    if earlier is None:
        return True
    refused = earlier.get("state") == "refused" and earlier["attempt"] == 1
    # A user who requested a stop did not want another start.
    return refused and not earlier.get("stop_requested_by") and bool(earlier["person"]["uid"] == person.uid)


def _check_earlier(earlier: Dict[str, Any] | None, data: Dict[str, Any], person: Person) -> None:
    """Check that the run is new on this worker, or is a later attempt of the same user's run.

    Raises:
        Refused: The worker knows this attempt or a later one, or the run is another user's.
    """
    if earlier is None or _leaves_name_free(earlier, person):
        return
    run_id = data["run_id"]
    if earlier["person"]["uid"] != person.uid or data["attempt"] == 1:
        raise Refused("held", "this worker already has a record of run {}".format(run_id), "choose another --name")
    if earlier.get("stop_requested_by"):
        # The user requested the stop after the recovering controller had looked for such a request.
        message = "run {} was stopped by {}".format(run_id, earlier["stop_requested_by"])
        raise Refused("held", message, "to run it again, start it under another --name")
    if data["attempt"] <= earlier["attempt"]:
        message = "this worker already has a record of attempt {} of run {}".format(earlier["attempt"], run_id)
        raise Refused("held", message, "`tpu_ops status {}` shows its state".format(run_id))


def _of_start(record: Dict[str, Any] | None, data: Dict[str, Any], marker: str) -> Dict[str, Any] | None:
    """Return the record if this start wrote it; None if an earlier attempt or another start did."""
    if record is None or (record["attempt"], record.get("marker")) != (data["attempt"], marker):
        return None
    return record


def _not_begun(store: Store, record: Dict[str, Any] | None) -> Refused:
    if record is None:
        return Refused(
            "failed", "the systemd unit {} ended without writing a record of the run".format(unit.UNIT), _JOURNAL
        )
    store.settle(record)
    facts = {}
    if record["state"] == "refused":
        # Only the state "refused" says that rank 0's decision arrived, which names the ranks at fault.
        facts["blamed"] = record["blamed"]
        if record["rank"] in record["blamed"]:
            facts["failed_checks"] = record.get("failed_checks", [])
    return Refused("failed", record["reason"], **facts)


def _start_unit(store: Store, data: Dict[str, Any], marker: str, caller: Caller) -> None:
    """Start the systemd unit of a rank; first wait until the unit of an ended run is gone.

    Raises:
        Refused: The unit cannot be started.
        Gone: The caller has gone, and nothing was started.
    """
    # Start nothing for a caller that has gone: it may already have reported that the run did not start.
    caller.pause(0)
    program = os.path.realpath(sys.argv[0])
    command = unit.start_command(program, data["run_id"], data["grace_stop"], marker)
    deadline = time.monotonic() + _NAME_LIMIT
    while True:
        try:
            code, text = unit.call(command, unit.START_LIMIT + _SYSTEMD_LIMIT)
        except Refused:
            record = store.observe(data["run_id"])
            if record is None or record["attempt"] != data["attempt"] or record["state"] in FINAL:
                unit.take_back(data["run_id"], _SYSTEMD_LIMIT)
            elif record["marker"] == marker:
                # The start takes longer than usual but goes on: let the caller wait for the record.
                return
            raise
        if code == 0:
            return
        record = _of_start(store.read(data["run_id"]), data, marker)
        if record is not None and record["state"] == "refused":
            raise _not_begun(store, record)
        holder = _occupant(store)
        if holder is not None and holder["run_id"] != data["run_id"]:
            raise held(holder, asking())
        if "already" not in text:
            raise Refused("failed", text, _JOURNAL)
        if time.monotonic() > deadline:
            fix = (
                "`systemctl status {0}` on this worker shows the unit's processes; "
                "`sudo systemctl stop {0}` ends the unit"
            )
            raise Refused("held", "the systemd unit {} still exists: {}".format(unit.UNIT, text), fix.format(unit.UNIT))
        caller.pause(_POLL)


def status(request: Dict[str, Any], store: Store) -> Dict[str, Any]:
    """Return the record of one run, or the newest records of this worker, and the run that holds this worker now.

    Among the newest records, only the record of the active run has ``workers``. ``damaged`` has the ``message`` and the
    ``fix`` for each unreadable record. ``watch`` has what the supervisor of the run, without ``run_id`` of the active
    run, has noted last (`protocol.watch`).
    """
    require_root()
    require_protocol(request)
    run_id = request.get("run_id")
    answer: Dict[str, Any] = {"ok": True, "holder": store.holder(), "watch": None}
    if run_id:
        answer["record"] = store.observe(spec.check_run_id(run_id))
        answer["watch"] = store.watch(run_id) if answer["record"] else None
    else:
        # Leave out the names of all workers: with ten runs on each of 512 workers, the answers would have 39 MB.
        held_by = (answer["holder"] or {}).get("run_id")
        answer["watch"] = store.watch(held_by) if held_by else None
        records, damages = store.survey()
        answer["damaged"] = [{"message": damage.message, "fix": damage.fix} for damage in damages]
        answer["records"] = [
            {key: value for key, value in record.items() if key != "workers" or record["run_id"] == held_by}
            for record in records[: request.get("count") or 10]
        ]
    return answer


def stop(request: Dict[str, Any], store: Store, caller: Caller) -> Dict[str, Any]:
    """End a run and return its final record. Without a run id, the active run is ended.

    The supervisor informs the supervisors of the other ranks. The start of a run that has not begun yet is refused with
    the request's ``reason``. A controller that gives up its own start sends ``attempt``: earlier attempts are not
    ended.

    Raises:
        Refused: The run does not exist, belongs to another user or did not end in time, or the grace period is invalid.
        Gone: The caller has gone. The supervisor still ends the run.
    """
    from .rank_record import taken_back  # imported late, since only this request needs it

    require_root()
    require_protocol(request)
    person = asking()
    run_id = request.get("run_id") or (store.holder() or {}).get("run_id")
    if not run_id:
        return {"ok": True, "record": None}
    deadline = time.monotonic() + unit.START_LIMIT
    # Wait while the run is being started: it has no record yet.
    while os.path.exists(spec_files.path_of(store.run_dir, spec.check_run_id(run_id))) and time.monotonic() < deadline:
        caller.pause(_POLL)
    record = store.observe(run_id)
    if record is None or record["attempt"] < (request.get("attempt") or 0):
        raise Refused("missing", "this worker does not know run {}".format(run_id))
    intent = _intent(request, person)
    supervisor = record["supervisor"]
    alive = record["state"] != "lost" and proc.start_time(supervisor["pid"]) == supervisor["start"]
    if record["state"] in FINAL:
        # The run has ended, but a recovery may be about to start it again: note the stop.
        if not alive:
            # `after` ends the processes of a killed supervisor, and closes its record.
            store.settle(record, limit=_NAME_LIMIT)
            record = store.observe(run_id) or record
        try:
            _require_control(person, record, request)
        except Refused:
            pass  # every user may see how a run ended
        else:
            _note(store, record, intent, alive=alive)
        if alive:
            store.settle(record)
            record = taken_back(store, record, intent)
        return {"ok": True, "record": record, "already": True}
    _require_control(person, record, request)
    store.put_intent(run_id, intent)
    if alive:
        with contextlib.suppress(ProcessLookupError):  # the supervisor has just ended
            os.kill(supervisor["pid"], signal.SIGTERM)
    ended = _await_end(store, record, intent.get("grace", 0), caller)
    return {"ok": True, "record": taken_back(store, ended, intent)}


def _require_control(person: Person, record: Dict[str, Any], request: Dict[str, Any]) -> None:
    """Check that the user may end a run: its owner, the user who started it, or an administrator with `force`."""
    owner = record["person"]
    if person.uid != record.get("asked_by"):
        require_control(person, owner["uid"], owner["name"], bool(request.get("force")))


def _note(store: Store, record: Dict[str, Any], intent: Dict[str, Any], *, alive: bool) -> None:
    """Record that a user stopped a run that has ended: a recovery must not start another attempt.

    Args:
        store: The store of the record.
        record: The run's final record.
        intent: The stop request as a result of `_intent`.
        alive: Whether the supervisor still runs and may write the record. The supervisor or `after` then reads the
            intent.
    """
    from .rank_record import note_stop_request  # imported late, since few requests need it

    if not intent["requested"]:
        return
    if alive:
        store.put_intent(record["run_id"], intent)
    else:
        note_stop_request(store, record, intent["by"])


def _intent(request: Dict[str, Any], person: Person) -> Dict[str, Any]:
    """Return the intent of a stop request: who stops the run, why, and with which grace period.

    Raises:
        Refused: The grace period is invalid.
    """
    reason = str(request.get("reason") or "stopped by {}".format(person.name))[:500]
    intent = {"kind": "stop", "by": person.name, "at": time.time(), "reason": reason}
    # A recovery also stops the remaining ranks of an attempt, with a reason. Such a stop is not a user's request.
    intent["requested"] = request.get("requested") is True or not request.get("reason")
    grace = request.get("grace")
    if grace is not None:
        if not 0 <= grace <= spec.MAX_GRACE:
            raise Refused("invalid", "the grace period is not between 0 and {} s".format(spec.MAX_GRACE))
        intent["grace"] = grace
    return intent


def _limit(record: Dict[str, Any], grace: float) -> float:
    """Return the seconds that a run may take to end. An earlier stop can have had a longer grace period."""
    earlier = (record["intent"] or {}).get("grace") or 0
    return float(max(record["grace"]["stop"], grace, earlier) + unit.STOP_MARGIN + 5)


def _await_end(store: Store, asked: Dict[str, Any], grace: float, caller: Caller) -> Dict[str, Any]:
    """Wait until a run has ended; if it takes too long, let systemd kill it.

    Args:
        store: The store of the run's record.
        asked: The run's record at the time of the stop.
        grace: This stop's seconds between SIGTERM and SIGKILL; 0 if the request names none.
        caller: The caller that waits.

    Raises:
        Refused: The run did not end.
        Gone: The caller has gone.
    """
    begun = time.monotonic()
    asked_systemd = 0.0
    run_id, supervisor = asked["run_id"], asked["supervisor"]
    while True:
        record = store.observe(run_id)
        if record is None:
            return {}
        if record["supervisor"] != supervisor:
            # The record is now that of a later attempt, so the stopped attempt has ended.
            return asked
        holder = store.holder()
        if holder is not None and holder["supervisor"] != supervisor:
            # Another run holds this worker now, so the stopped run has ended.
            return record
        closed = record["state"] in FINAL and record["state"] != "lost"
        if closed and (store.settled(record) or asked_systemd):
            return record
        now = time.monotonic()
        if asked_systemd and now - asked_systemd > _KILL_LIMIT:
            text = "run {} did not end within {:.0f} s, and SIGKILL did not end it".format(run_id, now - begun)
            raise Refused(
                "failed",
                text,
                "only a reboot ends processes that wait inside the kernel (`ps -o stat,pid,cmd`, state D)",
            )
        if not asked_systemd and now - begun > _limit(record, grace):
            unit.call(["systemctl", "kill", "--signal=KILL", unit.UNIT], _SYSTEMD_LIMIT)
            asked_systemd = time.monotonic()
        caller.pause(_POLL)


def probe(request: Dict[str, Any], store: Store) -> Dict[str, Any]:
    """Describe this host. With ``run_id``, ``known`` is whether this host would refuse a new run of that name."""
    from .probe import describe  # imported late, since only this request needs it

    asker = asking()
    person = runs_as(asker, request.get("user") or "")
    venv, chips, run_id = request.get("venv") or "", request.get("chips") or 0, request.get("run_id")
    known = bool(run_id) and not _leaves_name_free(store.read(spec.check_run_id(run_id)), person)
    return {"ok": True, "probe": describe(store, asker, person, venv, chips), "known": known}
