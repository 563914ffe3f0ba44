"""What travels between a controller and this program: one request line in, an answer or frames out.

The request is one JSON object on one line of standard input. Shells print what they like before this program
starts, so the answer stands behind a line that holds the random marker of the request. `follow` goes on after the
answer with length-prefixed frames; its standard input stays open, and its end is the peer's good-bye. So it is for any
other request that says ``attended``.
"""

from __future__ import annotations

import json
import os
import re
import select
import struct
import time

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

#: Version of requests, answers and frames. A controller of another version is told so, never misunderstood: another
#: kind of frame, for one, takes a new version, since controllers of this one take no frame but the four kinds below.
PROTOCOL = 4
#: Longest request accepted, in bytes: argument vectors and environments of 100 KB fit many times.
MAX_REQUEST = 8 * 1024 * 1024
#: One frame: kind, absolute log offset of its first byte, number of bytes that follow.
FRAME = struct.Struct(">cQI")
#: Bytes of the log, from the frame's offset.
DATA = b"D"
#: The log's first bytes are gone; the next DATA frame starts at this frame's offset.
GAP = b"G"
#: Text for people: what the supervisor has to say of the run; rank 0's speaks for all ranks.
NOTE = b"N"
#: JSON: the run has ended (or is not to be waited for); no frame follows.
END = b"E"

_MARKER = re.compile(r"[0-9a-zA-Z]{8,64}")
_NUMBER = (int, float)
#: What a request may say besides its marker, action and protocol; the spec of a run has a check of its own.
_KEYS = {
    "attempt": int,
    "attended": bool,
    "chips": int,
    "count": int,
    "force": bool,
    "grace": _NUMBER,
    "lines": bool,
    "live": bool,
    "notes": int,
    "offset": int,
    "processes": list,
    "reason": str,
    "requested": bool,
    "reserve": bool,
    "run_id": str,
    "since": _NUMBER,
    "user": str,
    "venv": str,
}
#: More than any offset in a file.
_TOO_MUCH = 2**63


class Refused(Exception):
    """A request that is answered with a reason instead of a result.

    Args:
        kind: One word for programs: ``invalid``, ``denied``, ``held``, ``missing``, ``damaged`` or ``failed``.
        message: What is wrong, for people.
        fix: What to do about it.
        facts: More for programs, for example who holds the worker.
    """

    def __init__(self, kind: str, message: str, fix: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.fix = fix
        self.facts = facts

    def to_json(self) -> dict[str, Any]:
        """Return the answer that stands for this refusal."""
        error = {"kind": self.kind, "message": self.message, "fix": self.fix}
        error.update(self.facts)
        return {"ok": False, "error": error}


class Gone(Exception):
    """Whoever asked has gone, and nobody waits for the answer."""


class Caller:
    """Whoever has sent a request.

    Args:
        source: The descriptor that it came from.
        attended: Whether its end means that they have gone. Who pipes a request in by hand has closed it before.
    """

    def __init__(self, source: int, attended: bool) -> None:
        self._source = source
        self._poll = select.poll()
        if attended:
            self._poll.register(source, select.POLLIN)

    def pause(self, seconds: float) -> None:
        """Wait as long as this.

        Raises:
            Gone: They have gone.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not self._poll.poll(1000 * left):
                return
            if not os.read(self._source, 4096):
                raise Gone


def read_request(descriptor: int) -> dict[str, Any]:
    """Read one line from a descriptor and return the request in it; what follows the line stays unread or is dropped.

    Raises:
        Refused: The line is too long, not JSON, or carries no usable marker.
    """
    chunks = []
    size = 0
    while True:
        chunk = os.read(descriptor, 65536)
        chunks.append(chunk)
        size += len(chunk)
        if not chunk or b"\n" in chunk or size > MAX_REQUEST:
            break
    if size > MAX_REQUEST:
        raise Refused("invalid", "the request is longer than {} bytes".format(MAX_REQUEST))
    return parse_request(b"".join(chunks).split(b"\n", 1)[0])


def parse_request(line: bytes) -> dict[str, Any]:
    """Given the request line, return the request.

    Raises:
        Refused: It is not a JSON object with a marker and an action.
    """
    try:
        request = json.loads(line.decode("utf-8"))
    except ValueError as exc:
        raise Refused("invalid", "the request is not JSON: {}".format(exc)) from exc
    except RecursionError:
        raise Refused("invalid", "the request is nested too deeply") from None
    if not isinstance(request, dict) or not _MARKER.fullmatch(str(request.get("marker", ""))):
        raise Refused("invalid", "the request has no marker")
    if not isinstance(request.get("action"), str):
        raise Refused("invalid", "the request names no action")
    return request


def require_protocol(request: dict[str, Any]) -> None:
    """Return where the controller speaks this program's version.

    Raises:
        Refused: It does not.
    """
    spoken = request.get("protocol")
    if spoken != PROTOCOL:
        older = isinstance(spoken, int) and spoken < PROTOCOL
        raise Refused(
            "invalid",
            "this worker's launcher has protocol version {}, the controller {}".format(PROTOCOL, spoken),
            "update tpu_ops on the controller" if older else "update the workers: run site.yml from the controller",
        )


def check_request(request: dict[str, Any]) -> None:
    """Return where all that a request says is of the right type, or null, as if it were not said.

    Raises:
        Refused: Something is not; it is named. Keys that this version does not know are nobody's fault.
    """
    for key, kind in _KEYS.items():
        value = request.get(key)
        if value is None:
            continue
        is_bool = isinstance(value, bool)  # which Python counts as a number
        if not isinstance(value, kind) or is_bool != (kind is bool):  # type: ignore[arg-type]
            raise Refused("invalid", "the request's {} is of the wrong type".format(key))
        if isinstance(value, int) and abs(value) >= _TOO_MUCH:
            raise Refused("invalid", "the request's {} is too large".format(key))
        if isinstance(value, str) and not _is_text(value):
            raise Refused("invalid", "the request's {} is not a text without NUL bytes".format(key))


def _is_text(value: str) -> bool:
    """Return whether the system takes a text as a name or a path."""
    try:
        return b"\0" not in value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data, however often the descriptor takes only a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def answer(descriptor: int, marker: str, value: dict[str, Any]) -> None:
    """Write the marker's line and the answer's line."""
    text = "\n{}\n{}\n".format(marker, json.dumps(value, sort_keys=True))
    write_all(descriptor, text.encode("ascii"))


def frame(kind: bytes, offset: int, payload: bytes = b"") -> bytes:
    """Return one frame as bytes."""
    return FRAME.pack(kind, offset, len(payload)) + payload
