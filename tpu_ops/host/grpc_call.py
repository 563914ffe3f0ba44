"""Unary gRPC calls without TLS: HTTP/2 frames by the standard library only, with limits on time and on bytes.

The other side is a program of a user, so that every byte of it can be wrong. Header blocks are read only as far as the
status and its message need it: the client allows no dynamic table, so that each field is a literal or one of the static
table.
"""

from __future__ import annotations

import socket
import struct
import time

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Iterator, Optional, Tuple

    _Text = Tuple[bytes, bool]

#: Status codes of gRPC.
NOT_FOUND, UNIMPLEMENTED, UNAVAILABLE = 5, 12, 14
#: Maximum size of one frame that HTTP/2 allows without another agreement, and number of frames that are read in all.
_MAX_FRAME = 16384
_MAX_FRAMES = 2000
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 9
#: Flags of frames; END_STREAM and ACK are the same bit.
_END_STREAM = _ACK = 0x1
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: Window sizes of HTTP/2 before an update.
_WINDOW = 65535
#: ``grpc-status`` in HPACK's Huffman code, and the codes of the digits: length in bits and bits.
_STATUS_HUFFMAN = bytes.fromhex("9acac8b21234da8f")
_DIGITS = {(5 if digit < 3 else 6, digit if digit < 3 else digit + 22): digit for digit in range(10)}


class CallError(Exception):
    """A call has no answer.

    Args:
        kind: ``refused`` (no connection), ``silent`` (no answer in time), ``broken`` (no valid gRPC) or ``status``.
        text: The reason, as text for users.
        status: The status of gRPC; -1 if there is none.
        message: The text that came with the status; empty if there is none.
    """

    def __init__(self, kind: str, text: str, status: int = -1, message: bytes = b"") -> None:
        super().__init__(text)
        self.kind = kind
        self.status = status
        self.message = message


def _broken(text: str) -> CallError:
    return CallError("broken", text)


class Connection:
    """A connection on which calls are made one after the other. Errors close no socket: use it in a `with` block.

    Args:
        connected: A socket to connect.
        address: The address as the socket's family needs it.
        deadline: When all calls have to be done, in seconds of the monotonic clock.
        limit: Maximum number of bytes to receive in all.

    Raises:
        CallError: No connection within the time.
    """

    def __init__(self, connected: socket.socket, address: Tuple[Any, ...], deadline: float, limit: int) -> None:
        self._socket = connected
        self._deadline = deadline
        self._left = limit
        self._frames = _MAX_FRAMES
        self._received = bytearray()
        self._stream = -1
        try:
            self._socket.settimeout(self._remaining())
            self._socket.connect(address)
        except socket.timeout:
            raise CallError("silent", "no connection in time") from None
        except OSError as exc:
            raise CallError("refused", exc.strerror or str(exc)) from None
        # No dynamic table, no pushes, and windows that allow for all that may come.
        settings = struct.pack(">HIHIHI", 1, 0, 2, 0, 4, max(limit, _WINDOW))
        self._greeting = _PREFACE + _frame(_SETTINGS, 0, 0, settings)
        if limit > _WINDOW:
            self._greeting += _frame(8, 0, 0, struct.pack(">I", limit - _WINDOW))

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, path: str, message: bytes) -> bytes:
        """Return the answer to a message.

        Args:
            path: ``/PACKAGE.SERVICE/METHOD``.
            message: The serialized request.

        Raises:
            CallError: There is no answer. Other calls are possible only after the kind ``status``.
        """
        self._stream += 2
        block = b"".join(
            _literal(name, value)
            for name, value in (
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", "localhost"),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
            )
        )
        body = b"\0" + struct.pack(">I", len(message)) + message
        request = _frame(_HEADERS, _END_HEADERS, self._stream, block) + _frame(_DATA, _END_STREAM, self._stream, body)
        self._send(self._greeting + request)
        self._greeting = b""
        return self._answer()

    def _answer(self) -> bytes:
        """Return the message of the answer on the current stream."""
        data, status, message, ended = bytearray(), -1, b"", False
        while not ended:
            kind, flags, payload = self._of_stream()
            if kind == _RST_STREAM:
                raise _broken("it ends the call{}".format(_error_of(payload)))
            if kind == _DATA:
                data += _unpadded(payload, flags)
            elif kind == _HEADERS:
                block = self._block(payload, flags)
                found, http = statuses(block)
                if http not in (-1, 200):
                    raise _broken("HTTP status {}".format(http))
                status = found if found >= 0 else status
                message = message_of(block) or message
            ended = kind in (_DATA, _HEADERS) and bool(flags & _END_STREAM)
        if status > 0:
            raise CallError("status", "gRPC status {}".format(status), status, message)
        if not data:
            raise CallError("status", "an error without a readable gRPC status")
        if len(data) < 5 or data[0] != 0 or struct.unpack(">I", data[1:5])[0] != len(data) - 5:
            raise _broken("the length of a message is wrong")
        return bytes(data[5:])

    def _block(self, payload: bytes, flags: int) -> bytes:
        """Return a whole header block, whose first part is the payload of a HEADERS frame."""
        block = _unpadded(payload, flags)[5 if flags & _PRIORITY else 0 :]
        while not flags & _END_HEADERS:
            kind, flags, stream, payload = self._next()
            if (kind, stream) != (_CONTINUATION, self._stream):
                raise _broken("headers without their end")
            block += payload
        return block

    def _of_stream(self) -> Tuple[int, int, bytes]:
        """Return type, flags and payload of the next frame of the current stream; act on those of the connection."""
        while True:
            kind, flags, stream, payload = self._next()
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                self._send(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
            elif kind == _GOAWAY:
                raise _broken("it ends the connection{}".format(_error_of(payload[4:8])))
            elif kind in (_PUSH_PROMISE, _CONTINUATION):
                raise _broken("unexpected frame of type {}".format(kind))
            elif stream == self._stream:
                return kind, flags, payload

    def _next(self) -> Tuple[int, int, int, bytes]:
        """Return type, flags, stream and payload of the next frame."""
        self._frames -= 1
        if self._frames < 0:
            raise _broken("more than {} frames".format(_MAX_FRAMES))
        head = self._take(9)
        if head[:5] == b"HTTP/":
            raise _broken("it speaks HTTP/1")
        length = int.from_bytes(head[:3], "big")
        if length > _MAX_FRAME:
            raise _broken("a frame of {} bytes".format(length))
        return head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF, self._take(length)

    def _take(self, count: int) -> bytes:
        """Return the next bytes."""
        while len(self._received) < count:
            if self._left <= 0:
                raise _broken("the answer is too long")
            try:
                self._socket.settimeout(self._remaining())
                data = self._socket.recv(min(65536, self._left))
            except socket.timeout:
                raise CallError("silent", "no answer in time") from None
            except OSError as exc:
                raise _broken(exc.strerror or str(exc)) from None
            if not data:
                raise _broken("it closes the connection")
            self._left -= len(data)
            self._received += data
        found = bytes(self._received[:count])
        del self._received[:count]
        return found

    def _send(self, data: bytes) -> None:
        try:
            self._socket.settimeout(self._remaining())
            self._socket.sendall(data)
        except socket.timeout:
            raise CallError("silent", "it reads no request in time") from None
        except OSError as exc:
            raise _broken(exc.strerror or str(exc)) from None

    def _remaining(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise CallError("silent", "no answer in time")
        return remaining


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """Return a header field as HPACK's literal that is never indexed; name and value have less than 127 bytes."""
    return bytes((0x10, len(name))) + name.encode("ascii") + bytes((len(value),)) + value.encode("ascii")


def _error_of(code: bytes) -> str:
    return " (error {})".format(int.from_bytes(code, "big")) if len(code) == 4 else ""


def _unpadded(payload: bytes, flags: int) -> bytes:
    """Return the payload of a frame without its padding."""
    if not flags & _PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise _broken("the padding of a frame is wrong")
    return payload[1 : len(payload) - payload[0]]


def statuses(block: bytes) -> Tuple[int, int]:
    """Return the status of gRPC and that of HTTP in a header block; -1 for a status that is missing or not readable.

    Raises:
        CallError: The block is not valid.
    """
    grpc, http = -1, -1
    for index, name, value in _fields(block):
        if value is None:
            # Indices 8 to 14 of the static table: the statuses 200, 204, 206, 304, 400, 404, 500.
            if 8 <= index <= 14:
                http = (200, 204, 206, 304, 400, 404, 500)[index - 8]
        elif name in ((b"grpc-status", False), (_STATUS_HUFFMAN, True)):
            grpc = _number(*value)
        elif 8 <= index <= 14:
            http = _number(*value)
    return grpc, http


def message_of(block: bytes) -> bytes:
    """Return the message of gRPC in a header block; empty if there is none or it is in the Huffman code.

    Raises:
        CallError: The block is not valid.
    """
    values = (value for _, name, value in _fields(block) if name == (b"grpc-message", False))
    return next((value[0] for value in values if value and not value[1]), b"")


def _fields(block: bytes) -> Iterator[Tuple[int, _Text, Optional[_Text]]]:
    """Yield the fields of a header block: index in the table, or 0; name; and value, None for a field of the table.

    A text is its bytes, and whether they are in the Huffman code. The name of a field with an index is empty.

    Raises:
        CallError: The block is not valid.
    """
    at = 0
    while at < len(block):
        first = block[at]
        if first & 0x80:
            index, at = _integer(block, at, 7)
            yield index, (b"", False), None
        elif first & 0xE0 == 0x20:
            _, at = _integer(block, at, 5)  # the size of the dynamic table
        else:
            index, at = _integer(block, at, 6 if first & 0x40 else 4)
            name, coded, at = (b"", False, at) if index else _string(block, at)
            value, packed, at = _string(block, at)
            yield index, (name, coded), (value, packed)


def _integer(block: bytes, at: int, bits: int) -> Tuple[int, int]:
    """Return an integer whose first byte has that many bits of it, and the offset after it."""
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for shift in range(0, 28, 7):
        if at >= len(block):
            break
        value += (block[at] & 0x7F) << shift
        at += 1
        if not block[at - 1] & 0x80:
            return value, at
    raise _broken("the headers are not valid")


def _string(block: bytes, at: int) -> Tuple[bytes, bool, int]:
    """Return the bytes of a string, whether they are in the Huffman code, and the offset after it."""
    if at >= len(block):
        raise _broken("the headers are not valid")
    coded = bool(block[at] & 0x80)
    length, at = _integer(block, at, 7)
    if length > len(block) - at:
        raise _broken("the headers are not valid")
    return block[at : at + length], coded, at + length


def _number(value: bytes, coded: bool) -> int:
    """Return a status of one to three digits; -1 if the value is something else."""
    if not coded:
        return int(value) if value.isdigit() and len(value) <= 3 else -1
    bits = "".join("{:08b}".format(byte) for byte in value[:4])
    number, at = -1, 0
    while at < len(bits):
        for width in (5, 6):
            digit = _DIGITS.get((width, int(bits[at : at + width], 2))) if at + width <= len(bits) else None
            if digit is not None:
                number, at = max(number, 0) * 10 + digit, at + width
                break
        else:
            return number if set(bits[at:]) == {"1"} else -1
    return number
