"""Frames between the supervisors of a run: JSON of limited length, numbered and signed once both sides are trusted."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any, Dict

_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_SEAL = hashlib.sha256().digest_size
#: Maximum length of a frame's body before and after the handshake, in bytes.
UNPROVED_LIMIT = 1024
LIMIT = 64 * 1024


class BadFrame(Exception):
    """The received data is not a valid frame of this run: the connection has to be closed."""


def _seal(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.new(key, _NUMBER.pack(number) + body, hashlib.sha256).digest()


class Writer:
    """Creates frames; after `seal` they are signed."""

    def __init__(self) -> None:
        self._key = b""
        self._number = 0

    def seal(self, key: bytes) -> None:
        """Number and sign all further frames."""
        self._key, self._number = key, 0

    def frame(self, value: Dict[str, Any]) -> bytes:
        """Return the frame that contains a JSON object."""
        body = json.dumps(value).encode("ascii")
        if self._key:
            body += _seal(self._key, self._number, body)
            self._number += 1
        return _LENGTH.pack(len(body)) + body


class Reader:
    """Extracts frames from the bytes of a connection, which arrive in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._key = b""
        self._number = 0
        self._limit = UNPROVED_LIMIT

    def seal(self, key: bytes) -> None:
        """From now on, accept only signed frames; the maximum length is larger."""
        self._key, self._number, self._limit = key, 0, LIMIT

    def feed(self, data: bytes) -> None:
        """Add bytes that were received on the connection."""
        self._buffer += data

    def take(self) -> Dict[str, Any] | None:
        """Return the object in the next frame; None if the frame is not complete yet.

        Raises:
            BadFrame: The frame is too long, has a wrong signature or number, or is not a JSON object.
        """
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        if size > self._limit:
            raise BadFrame("a frame of {} bytes".format(size))
        if len(self._buffer) < _LENGTH.size + size:
            return None
        body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + size])
        del self._buffer[: _LENGTH.size + size]
        if self._key:
            body, seal = body[:-_SEAL], body[-_SEAL:]
            if not hmac.compare_digest(seal, _seal(self._key, self._number, body)):
                raise BadFrame("a frame with a wrong seal")
            self._number += 1
        try:
            value = json.loads(body.decode("ascii"))
        except (ValueError, RecursionError) as exc:
            raise BadFrame("a frame that is not JSON") from exc
        if not isinstance(value, dict):
            raise BadFrame("a frame that is not an object")
        return value
