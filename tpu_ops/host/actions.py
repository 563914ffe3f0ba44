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
#: How long a start waits for the unit of a run that has already ended to leave its name, and a stop for what is left
#: behind a supervisor that was killed, in seconds: longer than its processes are given to go.
_NAME_LIMIT = 15.0
#: How long systemd may take to answer, and to end what SIGKILL was sent to, in seconds.
_SYSTEMD_LIMIT = 15
_KILL_LIMIT = 20.0
#: What helps where the unit ends before anything is recorded.
_JOURNAL = "`sudo journalctl -u {}` on this worker shows more".format(unit.UNIT)


def _occupant(store: Store) -> Dict[str, Any] | None:
    """Return what `rank_record.occupant` does."""
    from .rank_record import occupant  # few requests want it

    return occupant(store)


def held(holder: Dict[str, Any], asker: Person) -> Refused:
    """Return the refusal that names who has this worker, and what somebody can do about it."""
    from .fitness import in_use, past_run  # few requests want it

    message = in_use(holder, "this worker", "%Y-%m-%d %H:%M:%S UTC")
    return Refused("held", message, past_run(asker, holder), holder=holder)


def start(request: Dict[str, Any], store: Store, caller: Caller) -> Dict[str, Any]:
    """Start a run and return its record once all ranks go; with ``reserve`` as soon as it is ready for the others.

    A request that comes again, since the connection broke over which it came first, is answered as the first one.

    Raises:
        Refused: The spec is wrong, another run is on, or the run does not begin; ``blamed`` are the ranks at fault, and
            ``failed_checks`` what is in this one's way, as of `fitness.faults`.
        Gone: Nobody waits for the answer any more; the run goes on as it would.
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
            # The same request may have come but a moment before this one, which then meets any of what it leaves.
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
        # The others are told where rank 0 listens; a request that comes again may come before that is known.
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
    """Return whether a run was started by this very request: the marker is random, and new for each.

    Where it is just being started so, its record is waited for until the deadline, in seconds of the monotonic clock.

    Raises:
        Gone: Nobody waits for the answer any more.
    """
    while spec_files.waits(store.run_dir, run_id, request["marker"]) and time.monotonic() < deadline:
        caller.pause(_POLL)
    record = store.read(run_id)
    if record is None:
        return False
    return (record.get("asked_by"), record.get("marker")) == (asker.uid, request["marker"])


def _leaves_name_free(earlier: Dict[str, Any] | None, person: Person) -> bool:
    """Return whether a person may use the name of what was on this worker before: nothing, or a refused first start.

    Of that nothing was executed. The person's directory of it stays, so that another person cannot have it.
    """
    if earlier is None:
        return True
    refused = earlier.get("state") == "refused" and earlier["attempt"] == 1
    # Whoever wanted it stopped wanted no other start either.
    return refused and not earlier.get("stop_requested_by") and bool(earlier["person"]["uid"] == person.uid)


def _check_earlier(earlier: Dict[str, Any] | None, data: Dict[str, Any], person: Person) -> None:
    """Return where a run is new on this worker, or goes on with a later attempt of the same person's.

    Raises:
        Refused: It was here before, in this attempt or a later one, or as somebody else's.
    """
    if earlier is None or _leaves_name_free(earlier, person):
        return
    run_id = data["run_id"]
    if earlier["person"]["uid"] != person.uid or data["attempt"] == 1:
        raise Refused("held", "run {} has been on this worker before".format(run_id), "choose another --name")
    if earlier.get("stop_requested_by"):
        # After whoever starts it again has looked.
        message = "run {} was stopped by {}".format(run_id, earlier["stop_requested_by"])
        raise Refused("held", message, "start it under another --name if it is wanted again")
    if data["attempt"] <= earlier["attempt"]:
        message = "attempt {} of run {} has been on this worker before".format(earlier["attempt"], run_id)
        raise Refused("held", message, "`tpu_ops status {}` shows its state".format(run_id))


def _of_start(record: Dict[str, Any] | None, data: Dict[str, Any], marker: str) -> Dict[str, Any] | None:
    """Return a record where it is of the start that is being made, and not of an earlier attempt or a refused start."""
    if record is None or (record["attempt"], record.get("marker")) != (data["attempt"], marker):
        return None
    return record


def _not_begun(store: Store, record: Dict[str, Any] | None) -> Refused:
    if record is None:
        return Refused("failed", "the unit {} left no record".format(unit.UNIT), _JOURNAL)
    store.settle(record)
    facts = {}
    if record["state"] == "refused":
        # Only a supervisor that lived to hear it knows whose fault it was.
        facts["blamed"] = record["blamed"]
        if record["rank"] in record["blamed"]:
            facts["failed_checks"] = record.get("failed_checks", [])
    return Refused("failed", record["reason"], **facts)


def _start_unit(store: Store, data: Dict[str, Any], marker: str, caller: Caller) -> None:
    """Start the unit; a name that an ended run is just leaving is waited for.

    Raises:
        Refused: It cannot be started.
        Gone: Nobody waits for the answer any more, and nothing was started.
    """
    # Whoever has gone may have said already that the run is not on, and have asked nobody but this.
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
                # It takes longer than others and goes on: whoever asked for it waits for it as for any other.
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
            fix = "`systemctl status {0}` on this worker shows by what; `sudo systemctl stop {0}` ends it"
            raise Refused("held", "the unit {} is taken: {}".format(unit.UNIT, text), fix.format(unit.UNIT))
        caller.pause(_POLL)


def status(request: Dict[str, Any], store: Store) -> Dict[str, Any]:
    """Return one run's record, or those of the newest runs of this worker, and who has it now.

    Of the newest, ``workers`` stands only in the record of the run that is on; ``damaged`` has the ``message`` and the
    ``fix`` of each record that cannot be read.

    Raises:
        Damaged: The record of the one run cannot be read.
    """
    require_root()
    require_protocol(request)
    run_id = request.get("run_id")
    answer: Dict[str, Any] = {"ok": True, "holder": store.holder()}
    if run_id:
        answer["record"] = store.observe(spec.check_run_id(run_id))
    else:
        # With the names of all workers in every record, 512 workers with ten runs each would answer with 39 MB.
        held_by = (answer["holder"] or {}).get("run_id")
        records, damages = store.survey()
        answer["damaged"] = [{"message": damage.message, "fix": damage.fix} for damage in damages]
        answer["records"] = [
            {key: value for key, value in record.items() if key != "workers" or record["run_id"] == held_by}
            for record in records[: request.get("count") or 10]
        ]
    return answer


def stop(request: Dict[str, Any], store: Store, caller: Caller) -> Dict[str, Any]:
    """End a run and return its final record. Without a run id: whatever run is on.

    Its supervisor tells those of the other ranks. A run that has not begun yet is refused for the request's ``reason``.
    With ``attempt``, which a starter sends that gives its own up, a record of an earlier attempt is no such run.

    Raises:
        Refused: There is no such run, it belongs to another person, the grace is none, or it did not end in time.
        Gone: Nobody waits for the answer any more; the supervisor ends the run by itself.
    """
    from .rank_record import taken_back  # no other request wants it

    require_root()
    require_protocol(request)
    person = asking()
    run_id = request.get("run_id") or (store.holder() or {}).get("run_id")
    if not run_id:
        return {"ok": True, "record": None}
    deadline = time.monotonic() + unit.START_LIMIT
    # One that is being started has no record of it yet.
    while os.path.exists(spec_files.path_of(store.run_dir, spec.check_run_id(run_id))) and time.monotonic() < deadline:
        caller.pause(_POLL)
    record = store.observe(run_id)
    if record is None or record["attempt"] < (request.get("attempt") or 0):
        raise Refused("missing", "this worker does not know run {}".format(run_id))
    intent = _intent(request, person)
    supervisor = record["supervisor"]
    alive = record["state"] != "lost" and proc.start_time(supervisor["pid"]) == supervisor["start"]
    if record["state"] in FINAL:
        # Whoever recovers it may be about to start it again.
        if not alive:
            # What comes behind a supervisor that was killed ends what it has left, and closes its record.
            store.settle(record, limit=_NAME_LIMIT)
            record = store.observe(run_id) or record
        try:
            _require_control(person, record, request)
        except Refused:
            pass  # how it ended is anybody's to know
        else:
            _note(store, record, intent, alive=alive)
        if alive:
            store.settle(record)
            record = taken_back(store, record, intent)
        return {"ok": True, "record": record, "already": True}
    _require_control(person, record, request)
    store.put_intent(run_id, intent)
    if alive:
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.kill(supervisor["pid"], signal.SIGTERM)
    ended = _await_end(store, record, intent.get("grace", 0), caller)
    return {"ok": True, "record": taken_back(store, ended, intent)}


def _require_control(person: Person, record: Dict[str, Any], request: Dict[str, Any]) -> None:
    """Return where a person may end a run: whose it is, who started it, and an administrator who insists.

    Raises:
        Refused: It is another person's.
    """
    owner = record["person"]
    if person.uid != record.get("asked_by"):
        require_control(person, owner["uid"], owner["name"], bool(request.get("force")))


def _note(store: Store, record: Dict[str, Any], intent: Dict[str, Any], *, alive: bool) -> None:
    """Keep that somebody wants no other attempt of a run that has ended.

    Args:
        store: Where its record is.
        record: Its final record.
        intent: As `_intent` has it.
        alive: Whether its supervisor, which may still be writing that, is there; what comes behind it heeds intents.

    Raises:
        Refused: Somebody keeps the records locked.
    """
    from .rank_record import note_stop_request  # few requests want it

    if not intent["requested"]:
        return
    if alive:
        store.put_intent(record["run_id"], intent)
    else:
        note_stop_request(store, record, intent["by"])


def _intent(request: Dict[str, Any], person: Person) -> Dict[str, Any]:
    """Return why a run is ended as a request has it.

    Raises:
        Refused: Its grace is none, or none that is given.
    """
    reason = str(request.get("reason") or "stopped by {}".format(person.name))[:500]
    intent = {"kind": "stop", "by": person.name, "at": time.time(), "reason": reason}
    # A recovery ends what is left of an attempt as well, and says why.
    intent["requested"] = request.get("requested") is True or not request.get("reason")
    grace = request.get("grace")
    if grace is not None:
        if not 0 <= grace <= spec.MAX_GRACE:
            raise Refused("invalid", "the grace period is not between 0 and {} s".format(spec.MAX_GRACE))
        intent["grace"] = grace
    return intent


def _limit(record: Dict[str, Any], grace: float) -> float:
    """Return how long a run may take to end, in seconds: an earlier stop may have left it more time than this one."""
    earlier = (record["intent"] or {}).get("grace") or 0
    return float(max(record["grace"]["stop"], grace, earlier) + unit.STOP_MARGIN + 5)


def _await_end(store: Store, asked: Dict[str, Any], grace: float, caller: Caller) -> Dict[str, Any]:
    """Wait until a run has ended; what does not listen is ended by systemd.

    Args:
        store: Where its record is.
        asked: Its record when it was asked to end.
        grace: Seconds between SIGTERM and SIGKILL as just asked for; 0 where nothing was.
        caller: Who waits.

    Raises:
        Refused: It did not end.
        Gone: Nobody waits for it any more.
    """
    begun = time.monotonic()
    asked_systemd = 0.0
    run_id, supervisor = asked["run_id"], asked["supervisor"]
    while True:
        record = store.observe(run_id)
        if record is None:
            return {}
        if record["supervisor"] != supervisor:
            # A later attempt has the id now: the one that was asked to end is over.
            return asked
        holder = store.holder()
        if holder is not None and holder["supervisor"] != supervisor:
            # The unit's name, and its control group, are another run's now.
            return record
        closed = record["state"] in FINAL and record["state"] != "lost"
        if closed and (store.settled(record) or asked_systemd):
            return record
        now = time.monotonic()
        if asked_systemd and now - asked_systemd > _KILL_LIMIT:
            text = "run {} did not end within {:.0f} s, nor by SIGKILL".format(run_id, now - begun)
            raise Refused("failed", text, "what waits inside the kernel (`ps -o stat,pid,cmd`, state D) needs a reboot")
        if not asked_systemd and now - begun > _limit(record, grace):
            unit.call(["systemctl", "kill", "--signal=KILL", unit.UNIT], _SYSTEMD_LIMIT)
            asked_systemd = time.monotonic()
        caller.pause(_POLL)


def probe(request: Dict[str, Any], store: Store) -> Dict[str, Any]:
    """Describe this host; with ``run_id``, ``known`` in the answer is whether a run of that name cannot be new here."""
    from .probe import describe  # no other request wants it

    asker = asking()
    person = runs_as(asker, request.get("user") or "")
    venv, chips, run_id = request.get("venv") or "", request.get("chips") or 0, request.get("run_id")
    known = bool(run_id) and not _leaves_name_free(store.read(spec.check_run_id(run_id)), person)
    return {"ok": True, "probe": describe(store, asker, person, venv, chips), "known": known}
