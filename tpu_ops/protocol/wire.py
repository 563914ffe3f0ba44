"""The messages between a controller and a worker's launcher: a request line to the launcher, an answer or frames back.

The request is one JSON object on one line of standard input. Shells can print text before the launcher starts, so the
answer comes after a line with the random marker of the request. After the answer to `follow` come length-prefixed
frames. If a request says ``attended``, or its action is `follow`, the launcher gives up when its standard input ends.
"""

from __future__ import annotations

import json
import os
import re
import struct

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

#: Version of requests, answers and frames. The launcher refuses requests of another version. A new kind of frame needs
#: a new version, since controllers of this version accept only the four kinds below.
PROTOCOL = 4
#: The command line that starts the launcher. It is constant, since login shells parse it again.
COMMAND = "sudo -n /usr/local/sbin/tpu-host"
#: Beginning of the message with which a launcher refuses an action that only newer versions have.
UNKNOWN_ACTION = "unknown action"
#: Maximum size of a request in bytes: many times larger than a command and environment of 100 KB.
MAX_REQUEST = 8 * 1024 * 1024
#: The header of a frame: kind, log offset of the frame's first byte, number of bytes that follow the header.
FRAME = struct.Struct(">cQI")
#: Kind of a frame with bytes of the log, which start at the frame's offset.
DATA = b"D"
#: Kind of a frame without bytes: the log has no bytes up to this frame's offset, where the next DATA frame starts.
GAP = b"G"
#: Kind of a frame with a text for users from the rank's supervisor. The supervisor of rank 0 reports for all ranks.
NOTE = b"N"
#: Kind of the last frame: JSON with the final record, or with the current record if the request says ``live`` false.
END = b"E"
#: All kinds of frames. Any other kind means that the stream is broken.
KINDS = (DATA, GAP, NOTE, END)
#: Maximum payload of a frame that a controller accepts, in bytes; launchers send far smaller frames.
MAX_FRAME = 4 * 1024 * 1024
#: Default and maximum of the seconds between SIGTERM and SIGKILL in `unlock`.
UNLOCK_GRACE, MAX_UNLOCK_GRACE = 10.0, 600.0

_MARKER = re.compile(r"[0-9a-zA-Z]{8,64}")
_NUMBER = (int, float)
#: Keys of a request and their types, without marker, action and protocol. `spec` checks the spec of a run.
_KEYS = {
    "attempt": int,
    "attended": bool,
    "chips": int,
    "count": int,
    "force": bool,
    "grace": _NUMBER,
    "lines": bool,
    "live": bool,
    "milliseconds": int,
    "notes": int,
    "offset": int,
    "points": int,
    "port": int,
    "processes": list,
    "reason": str,
    "requested": bool,
    "reserve": bool,
    "run_id": str,
    "server": str,
    "signal": bool,
    "since": _NUMBER,
    "user": str,
    "venv": str,
}
#: Integers in requests must be smaller; no file offset is larger.
_TOO_MUCH = 2**63


class Refused(Exception):
    """The launcher refuses a request: the answer is a reason, not a result.

    Args:
        kind: One word for programs: ``invalid``, ``denied``, ``held``, ``missing``, ``damaged`` or ``failed``.
        message: The problem, as text for users.
        fix: The fix, as text for users; can be empty.
        facts: Further values for programs, for example the run that holds the worker.
    """

    def __init__(self, kind: str, message: str, fix: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.fix = fix
        self.facts = facts

    def to_json(self) -> dict[str, Any]:
        """Return the answer to a refused request as a dictionary of JSON types."""
        error = {"kind": self.kind, "message": self.message, "fix": self.fix}
        error.update(self.facts)
        return {"ok": False, "error": error}


def encode(text: str) -> bytes:
    """Return a text of a request as bytes. Lone surrogates in the text stand for bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


# --- the controller's side ------------------------------------------------------------------------------------------


def new_marker() -> str:
    """Return a random word, which no other output contains, to mark where the answer begins."""
    return os.urandom(16).hex()


def request(marker: str, action: str, values: Mapping[str, Any]) -> bytes:
    """Return a controller's request line. The controller keeps the launcher's input open until the answer arrives."""
    body = {"marker": marker, "protocol": PROTOCOL, "action": action, "attended": True}
    body.update(values)
    return json.dumps(body).encode("ascii") + b"\n"


def beginning(marker: str) -> bytes:
    """Return the line before an answer, which proves that the launcher was started."""
    return "\n{}\n".format(marker).encode("ascii")


def find_answer(output: bytes | bytearray, marker: str) -> Any:
    """Return the answer after the marker in a worker's output; None if the output contains no answer."""
    _, found, rest = output.partition(beginning(marker))
    line, ended, _ = rest.partition(b"\n")
    if not found or not ended:
        return None
    try:
        return json.loads(line)
    except ValueError:
        return None


# --- the launcher's side --------------------------------------------------------------------------------------------


def read_request(descriptor: int) -> dict[str, Any]:
    """Read one line from a descriptor and return the request in it. Bytes after the line are ignored.

    Raises:
        Refused: The line is too long, not JSON, or has no valid marker.
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
    """Parse the request line and return the request.

    Raises:
        Refused: The line is not a JSON object with a marker and an action.
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
    """Check that a request has this version of the protocol.

    Raises:
        Refused: The request has another version; the message names both versions.
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
    """Check the types of a request's values. Null counts as a missing value; unknown keys are allowed.

    Raises:
        Refused: A value has another type; the message names its key.
    """
    for key, kind in _KEYS.items():
        value = request.get(key)
        if value is None:
            continue
        if not has_type(value, kind):
            raise Refused("invalid", "the request's {} is of the wrong type".format(key))
        if isinstance(value, int) and abs(value) >= _TOO_MUCH:
            raise Refused("invalid", "the request's {} is too large".format(key))
        if isinstance(value, str) and not _is_text(value):
            raise Refused("invalid", "the request's {} is not a text without NUL bytes".format(key))


def has_type(value: Any, kind: Any) -> bool:
    """Return whether a value has a type, or one of several types. Unlike in Python, a bool is no number."""
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _is_text(value: str) -> bool:
    """Return whether a text can be a name or a path on this system."""
    try:
        return b"\0" not in encode(value)
    except UnicodeEncodeError:
        return False


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data, in several calls if the descriptor accepts only a part at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def answer(descriptor: int, marker: str, value: dict[str, Any]) -> None:
    """Write the line with the marker, and the line with the answer."""
    write_all(descriptor, beginning(marker) + json.dumps(value, sort_keys=True).encode("ascii") + b"\n")


def frame(kind: bytes, offset: int, payload: bytes = b"") -> bytes:
    """Return one frame as bytes."""
    return FRAME.pack(kind, offset, len(payload)) + payload
