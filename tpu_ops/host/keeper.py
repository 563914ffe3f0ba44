"""Write a rank's record in its own thread, so that a stalled disk delays no order, signal or watchdog."""

from __future__ import annotations

import threading
import time

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Callable, Dict

    from .store import Store

#: Seconds to wait for the disk: an fsync also waits for earlier writes of other processes. A checkpoint of tens of GB
#: makes this longer than systemd's watchdog timeout.
PATIENCE = 1.0
#: Seconds to wait for the disk at the last record of a run, and between two calls of `beat` meanwhile. A stop waits
#: longer than that beyond its grace before systemd kills the supervisor (`unit.STOP_MARGIN`).
LAST_PATIENCE, _BEAT = 10.0, 1.0


class Keeper:
    """Write records to the disk, skipping all but the newest waiting one; to memory if the disk is slow or fails.

    Args:
        store: The store of the records.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._next: Dict[str, Any] | None = None
        self._busy = False
        self._fault = ""

    @property
    def fault(self) -> str:
        """The current fault of the disk; empty if there is none."""
        return self._fault

    def save(self, record: Dict[str, Any], beat: Callable[[], None] | None = None) -> str:
        """Write a record, which must not be changed any more; return the fault of the disk.

        If the disk is slow, the record is kept in memory as well, and is written to the disk later.

        Args:
            record: The record.
            beat: Given for the last record, after which other runs may take this worker. It is called every second
                while the disk is waited for, which takes at most LAST_PATIENCE.
        """
        deadline = time.monotonic() + (LAST_PATIENCE if beat else PATIENCE)
        with self._changed:
            # If an earlier record is still waiting for a stalled disk, do not wait again.
            waits = beat is not None or not self._busy
            self._next = record
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._write, name="record", daemon=True).start()
            while waits and self._busy and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, _BEAT))
                if beat:
                    beat()
            if self._busy or self._fault:
                self._store.remember(record)
            return self._fault

    def _write(self) -> None:
        while True:
            with self._changed:
                record, self._next = self._next, None
                if record is None:
                    self._busy = False
                    self._changed.notify_all()
                    return
            fault = ""
            try:
                self._store.to_disk(record)
            except OSError as exc:
                fault = exc.strerror or str(exc)
            with self._changed:
                self._fault = fault
                if not fault and self._next is None:
                    self._store.forget_in_memory(record["run_id"])
