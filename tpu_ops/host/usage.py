"""The action `usage`: what the chips of this host do, by the metrics of the processes that hold them, and for whom."""

from __future__ import annotations

import contextlib
import os
import time

from tpu_ops.protocol.wire import require_protocol

from . import TYPE_CHECKING, chip_metrics, chips, logs, proc
from .rights import require_root
from .store import Store

if TYPE_CHECKING:
    from typing import Any, Dict


def usage(request: Dict[str, Any], store: Store) -> Dict[str, Any]:
    """Return what uses the chips of this host.

    Returns:
        ``clock``: this host's time. ``chips``: the device files. ``holders``: the processes that hold chips (see
        `chips.described`). ``services``: their metrics (see `chip_metrics.read_with_states`). ``holder``: the run that
        holds this worker, or null; ``argv``: its command; ``run``: its state and its last output, or null.
    """
    require_root()
    require_protocol(request)
    holder = store.holder()
    record = store.observe(holder["run_id"]) if holder else None
    holders, found = chips.described(store, holder), proc.chips()
    return {
        "ok": True,
        "clock": time.time(),
        "chips": found,
        "holder": holder,
        "argv": (record or {}).get("argv") or [],
        "holders": holders,
        "services": chip_metrics.read_with_states(holders, len(found)),
        "run": described_run(store, record) if record else None,
    }


def described_run(store: Store, record: Dict[str, Any]) -> Dict[str, Any]:
    """Return the state of a run on this host, when it wrote output last, and what its supervisor has noticed."""
    found = {key: record.get(key) for key in ("run_id", "attempt", "rank", "state", "began")}
    run_id = record["run_id"]
    return dict(found, last_output=last_output(store.logs(run_id)), watch=store.watch(run_id))


def last_output(directory: str) -> float | None:
    """Return when the newest byte of a log was written, in seconds since 1970; None if the log is empty."""
    for _, path in reversed(logs.segments(directory)):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            if found.st_size:
                return found.st_mtime
    return None
