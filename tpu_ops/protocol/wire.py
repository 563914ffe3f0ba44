"""The messages between a controller and the launcher of a worker: one request line in, an answer or frames out.

The request is one JSON object on one line of standard input. Shells may print text before the launcher starts, so the
answer comes after a line with the random marker of the request. After the answer to `follow` come length-prefixed
frames. The launcher gives up a request that says ``attended``, as one to `follow`, when its standard input ends.
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
#: a new version, since controllers of this one accept only the four kinds below.
PROTOCOL = 4
#: The command line that reaches the launcher. Login shells parse it again, so nothing in it ever varies.
COMMAND = "sudo -n /usr/local/sbin/tpu-host"
#: Maximum size of a request in bytes: many times an argument vector and environment of 100 KB.
MAX_REQUEST = 8 * 1024 * 1024
#: One frame: kind, absolute log offset of its first byte, number of bytes that follow.
FRAME = struct.Struct(">cQI")
#: Bytes of the log, from the frame's offset.
DATA = b"D"
#: The log's first bytes are gone; the next DATA frame starts at this frame's offset.
GAP = b"G"
#: Text for users from the supervisor of the rank; rank 0 reports for all ranks.
NOTE = b"N"
#: JSON with the final record, or the current one without ``live``; no frame follows.
END = b"E"
#: All kinds. A stream with another kind is broken.
KINDS = (DATA, GAP, NOTE, END)
#: Maximum payload of a frame that a controller accepts, in bytes; launchers send far smaller ones.
MAX_FRAME = 4 * 1024 * 1024
#: Default and maximum of the seconds between SIGTERM and SIGKILL in `unlock`.
UNLOCK_GRACE, MAX_UNLOCK_GRACE = 10.0, 600.0

_MARKER = re.compile(r"[0-9a-zA-Z]{8,64}")
_NUMBER = (int, float)
#: Keys of a request besides its marker, action and protocol, and their types. The spec of a run is checked by `spec`.
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
#: Larger than any file offset.
_TOO_MUCH = 2**63


class Refused(Exception):
    """A request that is answered with a reason instead of a result.

    Args:
        kind: One word for programs: ``invalid``, ``denied``, ``held``, ``missing``, ``damaged`` or ``failed``.
        message: The problem, as text for users.
        fix: The fix.
        facts: Further values for programs, for example the run that holds the worker.
    """

    def __init__(self, kind: str, message: str, fix: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.fix = fix
        self.facts = facts

    def to_json(self) -> dict[str, Any]:
        """Return the refusal as an answer."""
        error = {"kind": self.kind, "message": self.message, "fix": self.fix}
        error.update(self.facts)
        return {"ok": False, "error": error}


def encode(text: str) -> bytes:
    """Return the bytes of a text in a request; bytes that are not UTF-8 are encoded as lone surrogates."""
    return text.encode("utf-8", "surrogateescape")


# --- the controller's side ------------------------------------------------------------------------------------------


def new_marker() -> str:
    """Return a random word that no other output contains: the answer follows it."""
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
    """Return the answer after the marker in a worker's output; None if there is none."""
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
        Refused: The request has another version; the text names both.
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
        Refused: A value has another type; the text names its key.
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
    """Return whether a value has a type, or one of several. Unlike in Python, a bool is not a number here."""
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _is_text(value: str) -> bool:
    """Return whether a text can be a name or a path on this system."""
    try:
        return b"\0" not in encode(value)
    except UnicodeEncodeError:
        return False


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data, in several parts if the descriptor does not accept it at once."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def answer(descriptor: int, marker: str, value: dict[str, Any]) -> None:
    """Write the marker's line and the answer's line."""
    write_all(descriptor, beginning(marker) + json.dumps(value, sort_keys=True).encode("ascii") + b"\n")


def frame(kind: bytes, offset: int, payload: bytes = b"") -> bytes:
    """Return one frame as bytes."""
    return FRAME.pack(kind, offset, len(payload)) + payload
