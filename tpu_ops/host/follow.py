"""The action `follow`: send the log of a rank as frames, from any offset, until the rank has ended."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

from tpu_ops.protocol import wire
from tpu_ops.protocol.record import FINAL
from tpu_ops.protocol.spec import check_run_id

from . import TYPE_CHECKING, logs
from .caller import Caller
from .private import Damaged
from .rights import require_root
from .store import Store, same_start

if TYPE_CHECKING:
    from typing import Any, Dict, Iterator

_POLL = 0.1
#: Maximum number of log bytes that are sent at once. Limited, since a rank can write faster than the caller reads.
_TURN = 1024 * 1024
#: Seconds after which a run in state "lost" is reported as lost. Until then, systemd may be about to close its record.
_CLOSING_LIMIT = 30.0
#: Seconds to wait for the log of an active rank: the log is created shortly after the record.
_LOG_LIMIT = 1.0
#: Maximum number of bytes from the end of the log that the END frame contains.
_TAIL = 4096


def follow(request: Dict[str, Any], store: Store, caller: Caller, sink: int) -> None:
    """Answer, then send frames until the rank has ended. The END frame has the record and the last lines of the log.

    If another attempt begins before that, the log of the followed attempt is sent to its end from the directory to
    which it was moved. If the record of the followed attempt is gone, no END frame is sent.

    Request: ``run_id``; ``offset`` (default 0), or ``since`` (seconds since 1970). ``notes`` is the number of the
        supervisor's notes that the caller already has (default 0). ``lines`` is whether to send the log (default true).
    ``live`` is whether to wait for the end instead of sending the existing log only (default true).

    Raises:
        Refused: This worker has no record of the run, or the record is damaged.
        Gone: The caller has gone.
    """
    require_root()
    wire.require_protocol(request)
    run_id = check_run_id(request.get("run_id"))
    record = store.observe(run_id)
    if record is None:
        raise wire.Refused("missing", "this worker does not know run {}".format(run_id))
    wire.answer(sink, request["marker"], {"ok": True, "record": record})
    try:
        with _log_of(store, record, caller) as directory:
            _send(request, _Attempt(store, record), directory, caller, sink)
    except Damaged as damage:
        # Send no END frame: the controller then repeats the request, and gets this error as the answer.
        sys.stderr.write("tpu-host: {}\n".format(damage.message))


def _send(request: Dict[str, Any], rank: _Attempt, directory: str, caller: Caller, sink: int) -> None:
    """Send the frames of `follow` after the answer."""
    offset = max(0, request.get("offset") or 0)
    if not offset and request.get("since"):
        offset = logs.since(directory, float(request["since"]))
        if offset:
            # The empty frame tells the caller the offset at which the log begins: missing bytes are counted from this
            # offset.
            wire.write_all(sink, wire.frame(wire.DATA, offset, b""))
    lines, live = request.get("lines", True), request.get("live", True)
    # If the caller does not wait for the rank's end, send only the output that exists now.
    until = float("inf") if live else logs.end(directory)
    lost_since = 0.0
    noted = max(0, request.get("notes") or 0)
    while True:
        # Read the record before the log: when the record says that the rank has ended, the log is complete.
        record = rank.observe()
        if record is None:
            # Send no END frame: the log may now be that of another attempt.
            return
        before = offset
        if lines and offset < until:
            offset = _send_log(sink, directory, offset)
        for text in record.get("notes", ())[noted:]:
            wire.write_all(sink, wire.frame(wire.NOTE, offset, text.encode("utf-8", "replace")))
            noted += 1
        state = record["state"]
        if state == "lost":
            lost_since = lost_since or time.monotonic()
        # No systemd unit will close a record of an earlier boot.
        closing = state == "lost" and not rank.aside and rank.store.of_this_boot(record)
        closing = closing and time.monotonic() - lost_since < _CLOSING_LIMIT
        more = offset > before and offset < until
        if not more and (not live or (state in FINAL and not closing)):
            break
        caller.pause(0.0 if more else _POLL)
    if live and not rank.aside:
        rank.store.settle(record)
    log = record.get("log") or {}
    behind = log.get("bytes", 0) + log.get("dropped", 0)
    if lines and behind > offset:
        # The disk was full when the rank ended: the missing bytes are the last bytes of the log.
        wire.write_all(sink, wire.frame(wire.GAP, behind))
        offset = behind
    value = {"record": record, "tail": logs.tail(directory, _TAIL).decode("utf-8", "replace")}
    wire.write_all(sink, wire.frame(wire.END, offset, json.dumps(value).encode("ascii")))


class _Attempt:
    """One attempt of a run; its record is found even after a later attempt has set it aside.

    Args:
        store: The store of the record.
        record: The current record of the attempt.
    """

    def __init__(self, store: Store, record: Dict[str, Any]) -> None:
        self.store = store
        self._last = record
        #: Whether the attempt was set aside because another one has begun.
        self.aside = False

    def observe(self) -> Dict[str, Any] | None:
        """Return the attempt's current record; None if the record no longer exists."""
        record = None if self.aside else self.store.observe(self._last["run_id"])
        if not same_start(record, self._last):
            self.aside = True
            record = self._set_aside()
        self._last = record or self._last
        return record

    def _set_aside(self) -> Dict[str, Any] | None:
        """Return the attempt's record that was set aside; its state is made final if a full disk left it open."""
        record = self.store.read_aside(self._last["run_id"], self._last["attempt"])
        if record is None or not same_start(record, self._last):
            return None
        if record["state"] in FINAL:
            return record
        if self._last["state"] in FINAL:
            return self._last
        return dict(record, state="lost", reason="the attempt ended without a final record")


@contextlib.contextmanager
def _log_of(store: Store, record: Dict[str, Any], caller: Caller) -> Iterator[str]:
    """Yield a path to an attempt's log that stays valid when the next attempt sets the log aside."""
    deadline = time.monotonic() + _LOG_LIMIT
    descriptor = _opened(store, record)
    # Wait: the log is created shortly after the record. An attempt that could not start has no log.
    while descriptor is None and record["state"] not in FINAL and time.monotonic() < deadline:
        caller.pause(_POLL)
        descriptor = _opened(store, record)
    if descriptor is None:
        yield store.log_aside(record["run_id"], record["attempt"])
        return
    try:
        yield "/proc/self/fd/{}".format(descriptor)
    finally:
        os.close(descriptor)


def _opened(store: Store, record: Dict[str, Any]) -> int | None:
    """Open the directory of an attempt's log; return None if the directory does not exist now."""
    run_id = record["run_id"]
    found = _directory(store.logs(run_id))
    if found is not None:
        latest = store.read(run_id)
        if latest is None or same_start(latest, record):
            return found
        # Another attempt has begun, and the opened directory may have its log.
        os.close(found)
    return _directory(store.log_aside(run_id, record["attempt"])) if store.is_aside(record) else None


def _directory(path: str) -> int | None:
    """Open a directory; return None if the directory does not exist."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None


def _send_log(sink: int, directory: str, offset: int) -> int:
    """Send up to _TURN bytes of the log from an offset on; return the offset after the last sent byte."""
    limit = offset + _TURN
    while offset < limit:
        start, data = logs.read(directory, offset)
        if not data:
            break
        if start > offset:
            wire.write_all(sink, wire.frame(wire.GAP, start))
        wire.write_all(sink, wire.frame(wire.DATA, start, data))
        offset = start + len(data)
    return offset
