"""Writes a rank's record in a separate thread, so that a stalled disk delays no order, signal or watchdog."""

from __future__ import annotations

import threading
import time

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Callable, Dict

    from .store import Store

#: Seconds to wait until a record is on the disk. An fsync also waits for earlier writes of other processes: with a
#: checkpoint of tens of GB, for longer than systemd's watchdog timeout.
PATIENCE = 1.0
#: Seconds to wait until the last record of a run is on the disk, and seconds between two calls of `beat` during this
#: wait. systemd kills the supervisor only later (`unit.STOP_MARGIN` after the grace period of a stop).
LAST_PATIENCE, _BEAT = 10.0, 1.0


class Keeper:
    """Writes records to the disk, and to memory too while the disk is slow or fails. Replaced records are skipped.

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
        """The error of the last write to the disk; empty if the write succeeded."""
        return self._fault

    def save(self, record: Dict[str, Any], beat: Callable[[], None] | None = None) -> str:
        """Write a record, which the caller must not change any more; return the error of the disk.

        If the disk is slow, the record is stored in memory now, and is written to the disk later.

        Args:
            record: The record.
            beat: Given for the last record, after which other runs may take this worker: the wait is then up to
                LAST_PATIENCE. Called every second during this wait.
        """
        deadline = time.monotonic() + (LAST_PATIENCE if beat else PATIENCE)
        with self._changed:
            # If an earlier record is still being written, the disk has stalled: wait only for the last record.
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
