"""A program that does the last checks of a run after its unit has ended, even if its supervisor was killed."""

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

#: Seconds in which the record has to be closed. With a grace period of 0, systemd allows STOP_MARGIN in total; 2 s of
#: it are for the start of Python and for the disk.
_LIMIT = unit.STOP_MARGIN - 2.0


def after(store: Store, run_id: str, marker: str = "") -> int:
    """Repeat the last checks after the unit's processes have ended, and close the record of a dead supervisor.

    systemd runs this program (ExecStopPost) with the supervisor's exit status in the environment. Nothing closes the
    record later. If another process holds the record's lock for too long, the lock is therefore ignored: no other
    attempt can begin before this program ends. The spec of another attempt may be waiting already.

    Args:
        store: The store of the record.
        run_id: The run.
        marker: The marker of the request that started the unit; empty means that this unit left no spec file.

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
        # Keep the damaged record, for `status` to report, and do the remaining steps.
        sys.stderr.write("tpu-host: {}\n".format(damage.message))
        record = None
    # A closed record is that of an earlier attempt if the supervisor was killed before it wrote its own record.
    closed = record is None or record["state"] in FINAL or not store.of_this_boot(record)
    # End processes first: they hold their chips until they have ended.
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
        store: The store of the record.
        record: The record.
        intent: The stop request for the run; None if there was none.
        chips: The state of the chips, from `ending.chips_after`.
        stuck: Processes of the run that could not be ended.
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
