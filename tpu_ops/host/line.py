"""One connection between two supervisors: non-blocking frames in both directions. Stores when the last one came."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Any, Dict

from .frames import BadFrame, Reader, Writer

#: Maximum number of bytes that wait to be sent, in case the other supervisor does not read.
_OUT_LIMIT = 1024 * 1024
_CHUNK = 65536


class Gone(Exception):
    """The connection has ended; the text has the reason."""


def reset(sock: socket.socket) -> None:
    """Close a socket with a reset, so that the connection does not occupy the port in TIME_WAIT."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Line:
    """A connected socket that sends and receives frames.

    Args:
        sock: The socket.
        lease: Seconds after which unacknowledged data end the connection.
    """

    def __init__(self, sock: socket.socket, lease: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lease * 1000))
        self._sock = sock
        self._out = bytearray()
        self.reader = Reader()
        self.writer = Writer()
        self.heard = time.monotonic()

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether data waits to be sent."""
        return bool(self._out)

    def send(self, value: Dict[str, Any]) -> None:
        """Send an object now, or later when the socket is writable.

        Raises:
            Gone: The connection has ended.
        """
        self._out += self.writer.frame(value)
        if len(self._out) > _OUT_LIMIT:
            raise Gone("the other side does not read the data that it is sent")
        self.flush()

    def flush(self) -> None:
        """Send waiting data as far as the socket is writable.

        Raises:
            Gone: The connection has ended.
        """
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            return
        except OSError as exc:
            raise Gone(exc.strerror or str(exc)) from exc

    def receive(self) -> None:
        """Read data from the socket; `take` then returns the received objects.

        Raises:
            Gone: The connection has ended.
        """
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as exc:
            raise Gone(exc.strerror or str(exc)) from exc
        if not data:
            raise Gone("the connection was closed")
        self.reader.feed(data)

    def take(self) -> Dict[str, Any] | None:
        """Return the next received object; None if no frame is complete.

        Raises:
            Gone: The received data is not a frame of this run.
        """
        try:
            value = self.reader.take()
        except BadFrame as exc:
            raise Gone(str(exc)) from exc
        if value is not None:
            self.heard = time.monotonic()
        return value

    def close(self) -> None:
        """Close the connection. Data that was sent before still arrives."""
        self._sock.close()

    def reset(self) -> None:
        """Close the connection with a reset."""
        reset(self._sock)
