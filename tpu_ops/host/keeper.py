"""Writes a rank's record in a thread of its own: a disk that stalls holds up no order, no signal and no watchdog."""

from __future__ import annotations

import threading
import time

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Callable, Dict

    from .store import Store

#: How long a record is waited for, in seconds: an fsync waits for all that others have written before it, which a
#: checkpoint of tens of GB makes longer than systemd's watchdog.
PATIENCE = 1.0
#: How long the last record of a run is waited for, in seconds, and between two calls meanwhile: less than a stop waits
#: beyond its grace before it has systemd kill the supervisor (`unit.STOP_MARGIN`).
LAST_PATIENCE, _BEAT = 10.0, 1.0


class Keeper:
    """Writes records to the disk, of those that wait only the newest; to memory where that takes long or fails.

    Args:
        store: Where records are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._next: Dict[str, Any] | None = None
        self._busy = False
        self._fault = ""

    @property
    def fault(self) -> str:
        """What is wrong with the disk, as far as is known; empty where nothing is."""
        return self._fault

    def save(self, record: Dict[str, Any], beat: Callable[[], None] | None = None) -> str:
        """Write a record, which nobody may change any more; return what is wrong with the disk.

        Where the disk takes longer than a moment the record stands in memory, and goes to the disk in its turn.

        Args:
            record: The record.
            beat: Of the last record, after which others may take this worker: called every second while the disk is
                waited for, and that not for ever.
        """
        deadline = time.monotonic() + (LAST_PATIENCE if beat else PATIENCE)
        with self._changed:
            # What waits for a disk that stalls is not waited for again.
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
