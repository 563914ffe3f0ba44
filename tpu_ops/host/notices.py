"""Asks the metadata server of this host for notices of maintenance and preemption.

The keys are those of Compute Engine, which TPU VMs have too:

- ``instance/preempted``: ``TRUE`` once the VM is being preempted, about 30 s before it is gone; otherwise ``FALSE``.
- ``instance/maintenance-event``: ``NONE``, ``MIGRATE_ON_HOST_MAINTENANCE`` or ``TERMINATE_ON_HOST_MAINTENANCE``.
- ``instance/upcoming-maintenance``: JSON with the window of the next maintenance, days before it. Without one, the
  answer is an empty object, ``NONE``, an object with ``error``, or an HTTP error.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any, Callable, Dict

from tpu_ops.protocol.watch import BEING_PREEMPTED, GOES_DOWN, MAINTENANCE, PREEMPTED, UNDER_WAY

#: Address of the metadata server. Its name would be looked up with a resolver, which takes seconds without one.
ADDRESS = ("169.254.169.254", 80)
#: Seconds for an answer, and its maximum size in bytes. The server is on the same host and answers in milliseconds.
LIMIT, _LARGEST = 1.0, 64 * 1024
#: Seconds between two requests: a preemption is announced 30 s ahead, maintenance days ahead.
EVERY, _UPCOMING_EVERY = 5.0, 60.0
#: After this many failures in a row, the server counts as absent, and is asked only this often (seconds).
_FAILURES, _RARELY = 3, 600.0
#: Maximum length of a notice in characters.
_LONGEST = 300
_ONGOING = "ONGOING"

#: Returns the text of an entry below ``computeMetadata/v1/instance/``; None if there is no such entry.
Get = Callable[[str], Any]


def get(name: str, address: tuple[str, int] = ADDRESS) -> str | None:
    """Return an entry of the metadata server; None if the server does not have the entry.

    Raises:
        OSError: The server does not answer.
    """
    request = (
        "GET /computeMetadata/v1/instance/{} HTTP/1.0\r\nHost: metadata.google.internal\r\n"
        "Metadata-Flavor: Google\r\nConnection: close\r\n\r\n"
    )
    deadline, data = time.monotonic() + LIMIT, b""
    with socket.create_connection(address, LIMIT) as sock:
        sock.sendall(request.format(name).encode("ascii"))
        while len(data) < _LARGEST:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            piece = sock.recv(_LARGEST)
            if not piece:
                break
            data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or b"metadata-flavor: google" not in head.lower():
        raise OSError("another server than the metadata server answers")
    if words[1] == b"503":
        raise OSError("the metadata server cannot answer now")
    return body.decode("utf-8", "replace").strip() if words[1] == b"200" else None


def notice_of(preempted: str | None, event: str | None, upcoming: str | None) -> Dict[str, str] | None:
    """Return ``kind`` (see `protocol.watch`) and ``what`` (text) from three entries; None without a notice."""
    if (preempted or "").strip().upper() == "TRUE":
        return {"kind": PREEMPTED, "what": BEING_PREEMPTED}
    kind = (event or "NONE").strip().upper()
    if kind.startswith("TERMINATE"):
        return {"kind": MAINTENANCE, "what": GOES_DOWN}
    if kind.startswith("MIGRATE"):
        return {"kind": MAINTENANCE, "what": "this worker is being moved to another host for maintenance"}
    return _upcoming(upcoming)


def _upcoming(text: str | None) -> Dict[str, str] | None:
    """Return the notice of upcoming maintenance. Its keys come as ``window_start_time`` and ``windowStartTime``."""
    try:
        data = json.loads(text or "{}")
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    facts = {str(key).lower().replace("_", ""): str(value) for key, value in data.items()}
    start, end = facts.get("windowstarttime") or facts.get("starttime"), facts.get("windowendtime")
    if not start:
        return None
    ongoing = facts.get("maintenancestatus", "").upper() == _ONGOING
    begins = UNDER_WAY + " since" if ongoing else "maintenance of this worker's host is planned from"
    what = "{} {}".format(begins, start) + (" to {}".format(end) if end else "")
    return {"kind": MAINTENANCE, "what": plain(what)}


def plain(text: str) -> str:
    """Return a text of limited length that contains no control characters."""
    return "".join(char if char.isprintable() else "?" for char in text)[:_LONGEST]


class Notices:
    """The newest notice of this host. Only one thread may call `ask`.

    Args:
        get: Returns an entry of the metadata server; see `get`.
    """

    def __init__(self, get: Get = get) -> None:
        self._get = get
        self._due = self._upcoming_due = float("-inf")
        self._failures = 0
        self._upcoming: str | None = None
        #: The notice with the time ``at`` at which it was first seen, in seconds since 1970; None without a notice.
        self.newest: Dict[str, Any] | None = None

    @property
    def due(self) -> float:
        """When the server is to be asked again, in monotonic seconds."""
        return self._due

    def ask(self, now: float, wall: float) -> None:
        """Ask the server; keep the last notice if it does not answer.

        Args:
            now: The time by the monotonic clock.
            wall: The time in seconds since 1970.
        """
        try:
            preempted, event = self._get("preempted"), self._get("maintenance-event")
            if now >= self._upcoming_due:
                self._upcoming = self._get("upcoming-maintenance?alt=json")
                self._upcoming_due = now + _UPCOMING_EVERY
        except (OSError, ValueError):
            self._failures += 1
            self._due = now + (_RARELY if self._failures >= _FAILURES else EVERY)
            return
        self._failures, self._due = 0, now + EVERY
        found = notice_of(preempted, event, self._upcoming)
        if found is None or self.newest is None or found["what"] != self.newest["what"]:
            self.newest = found and {"at": wall, **found}
