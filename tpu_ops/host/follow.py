"""`follow`: the log of a rank as frames, from any offset, until the rank has ended or the peer has gone."""

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
#: Bytes of the log between two looks at everything else: a rank may write faster than the peer takes it.
_TURN = 1024 * 1024
#: How long a run may look lost before it is called so: systemd is closing its record meanwhile, in seconds.
_CLOSING_LIMIT = 30.0
#: How long the log of a rank that is on may be missing, in seconds: it is begun just behind its record.
_LOG_LIMIT = 1.0
#: How much of the log's end goes with the final frame, in bytes.
_TAIL = 4096


def follow(request: Dict[str, Any], store: Store, caller: Caller, sink: int) -> None:
    """Answer, then send frames until the rank has ended; the END frame carries the record and the log's last lines.

    Where another attempt begins meanwhile, this one is read to its end from where it was set aside; without its record
    the frames end without an END.

    Request: ``run_id``; ``offset`` (default 0), or in its place ``since`` (seconds since 1970); ``notes`` (default 0:
    so many notes of the supervisor are known);
    ``lines`` (default true: send the log); ``live`` (default true: wait for the end, else send what there is).

    Raises:
        Refused: There is no such run here, or its record is damaged.
        Gone: The peer has gone.
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
        # No END: the controller asks again, and is answered with this.
        sys.stderr.write("tpu-host: {}\n".format(damage.message))


def _send(request: Dict[str, Any], rank: _Attempt, directory: str, caller: Caller, sink: int) -> None:
    """Send the frames that follow the answer."""
    offset = max(0, request.get("offset") or 0)
    if not offset and request.get("since"):
        offset = logs.since(directory, float(request["since"]))
        if offset:
            # Whoever asks counts from here what is missing before the first bytes that come.
            wire.write_all(sink, wire.frame(wire.DATA, offset, b""))
    lines, live = request.get("lines", True), request.get("live", True)
    # What is written from now on belongs to whoever waits for the end.
    until = float("inf") if live else logs.end(directory)
    lost_since = 0.0
    noted = max(0, request.get("notes") or 0)
    while True:
        # The record first: what a rank wrote before its end is then read after its end was seen.
        record = rank.observe()
        if record is None:
            # Without an END: what is left of its log is nobody's to vouch for.
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
        # Of an earlier boot nothing is left that would close it.
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
        # A disk that was full to the end: no byte comes behind those that are missing.
        wire.write_all(sink, wire.frame(wire.GAP, behind))
        offset = behind
    value = {"record": record, "tail": logs.tail(directory, _TAIL).decode("utf-8", "replace")}
    wire.write_all(sink, wire.frame(wire.END, offset, json.dumps(value).encode("ascii")))


class _Attempt:
    """One attempt of a run, and no other, wherever its record is.

    Args:
        store: Where runs are kept.
        record: The record of the attempt as it is now.
    """

    def __init__(self, store: Store, record: Dict[str, Any]) -> None:
        self.store = store
        self._last = record
        #: Whether it was set aside, so that another one has begun.
        self.aside = False

    def observe(self) -> Dict[str, Any] | None:
        """Return its record with the state that holds now, None where it is no longer kept."""
        record = None if self.aside else self.store.observe(self._last["run_id"])
        if not same_start(record, self._last):
            self.aside = True
            record = self._set_aside()
        self._last = record or self._last
        return record

    def _set_aside(self) -> Dict[str, Any] | None:
        """Return the record that was set aside; it is over, though a disk that was full may not have kept how."""
        record = self.store.read_aside(self._last["run_id"], self._last["attempt"])
        if record is None or not same_start(record, self._last):
            return None
        if record["state"] in FINAL:
            return record
        if self._last["state"] in FINAL:
            return self._last
        return dict(record, state="lost", reason="it ended without a final record")


@contextlib.contextmanager
def _log_of(store: Store, record: Dict[str, Any], caller: Caller) -> Iterator[str]:
    """Give a path of an attempt's log that stays the same directory when the next attempt sets it aside."""
    deadline = time.monotonic() + _LOG_LIMIT
    descriptor = _opened(store, record)
    # The log of an attempt is begun just behind its record; one that could not start has none.
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
    """Open the directory of an attempt's log; None where it has none at this moment."""
    run_id = record["run_id"]
    found = _directory(store.logs(run_id))
    if found is not None:
        latest = store.read(run_id)
        if latest is None or same_start(latest, record):
            return found
        # Another start of the run has begun meanwhile: it may be that one's.
        os.close(found)
    return _directory(store.log_aside(run_id, record["attempt"])) if store.is_aside(record) else None


def _directory(path: str) -> int | None:
    """Open a directory; None where there is none."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None


def _send_log(sink: int, directory: str, offset: int) -> int:
    """Send what the log holds from an offset on, as far as one turn goes; return the offset behind it."""
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
