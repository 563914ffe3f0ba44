"""What is done once a run's unit is gone, by a program of its own: the supervisor may have been killed."""

from __future__ import annotations

import os
import sys
import time

from tpu_ops.protocol.record import FINAL

from . import TYPE_CHECKING, spec_files, unit
from .ending import chips_after, end_left
from .private import Damaged
from .rank_record import note_stop_request, requested_by
from .store import Store

if TYPE_CHECKING:
    from typing import Any, Dict

#: How long it may take until the record is closed, in seconds: systemd gives it no more than that where the grace is
#: none, and what is left of it is for the interpreter's start and for the disk.
_LIMIT = unit.STOP_MARGIN - 2.0


def after(store: Store, run_id: str, marker: str = "") -> int:
    """Repeat the last checks once the unit's processes are gone, and close the record of a dead supervisor.

    systemd runs this (ExecStopPost) and tells in the environment how the supervisor ended. Nobody closes it later, so
    that a lock which somebody keeps is in the way of nothing: while this is at work no other attempt can begin. The
    spec of one may wait already.

    Args:
        store: Where its record is.
        run_id: The run.
        marker: Of the request that started the unit; by default no spec waits.

    Returns:
        The exit code.
    """
    deadline = time.monotonic() + _LIMIT
    spec_files.discard(store.run_dir, run_id, marker)
    store.drop_secrets()
    intent = store.take_intent(run_id)
    try:
        record = store.read(run_id)
    except Damaged as damage:
        # It stays for `status` to name; all else of the end is done.
        sys.stderr.write("tpu-host: {}\n".format(damage.message))
        record = None
    # A supervisor that was killed before its own record was written leaves that of an earlier attempt.
    closed = record is None or record["state"] in FINAL or not store.of_this_boot(record)
    # What is just going holds a chip until it has gone.
    stuck = end_left(record["cgroup"]) if record is not None and not closed else []
    chips = chips_after()
    if record is None or closed:
        store.restore()
        if record is not None and requested_by(intent):
            note_stop_request(store, record, requested_by(intent), anyway=True)
        return 0
    with store.changing(run_id, anyway=True, limit=deadline - time.monotonic()):
        _close(store, store.read(run_id) or record, intent, chips=chips, stuck=stuck)
    return 0


def _close(
    store: Store,
    record: Dict[str, Any],
    intent: Dict[str, Any] | None,
    *,
    chips: Dict[str, Any],
    stuck: list[Dict[str, Any]],
) -> None:
    """Close the record of a run whose supervisor is dead.

    Args:
        store: Where it is.
        record: The record.
        intent: Why the run was to be ended; None where it was not.
        chips: How the chips are left.
        stuck: What is left of its processes.
    """
    result = os.environ.get("SERVICE_RESULT", "unknown")
    how = "{} {}".format(os.environ.get("EXIT_CODE", ""), os.environ.get("EXIT_STATUS", "")).strip()
    reason = "the supervisor ended ({}; {})".format(result, how or "no more is known")
    state = "stopped" if intent or record.get("intent") else "failed"
    if state == "failed":
        record["first"] = {"rank": record["rank"], "worker": record["worker"], "cause": reason}
    record.update(state=state, reason=reason, ended=time.time(), chips=chips, stuck=stuck)
    record["intent"] = record.get("intent") or intent
    record["stop_requested_by"] = record.get("stop_requested_by") or requested_by(intent)
    store.save(record)
