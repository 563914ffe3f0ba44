"""One connection between two supervisors: frames in and out without ever blocking, and when it was last heard."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Any, Dict

from .frames import BadFrame, Reader, Writer

#: What may wait to be sent to a side that does not read, in bytes.
_OUT_LIMIT = 1024 * 1024
_CHUNK = 65536


class Gone(Exception):
    """The connection is over; the text says why."""


def reset(sock: socket.socket) -> None:
    """Close a socket at once and for good: nothing of it stays behind on its port."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Line:
    """A connected socket.

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
        """Whether something waits to be sent."""
        return bool(self._out)

    def send(self, value: Dict[str, Any]) -> None:
        """Send a value now or when the socket takes it.

        Raises:
            Gone: The connection is over.
        """
        self._out += self.writer.frame(value)
        if len(self._out) > _OUT_LIMIT:
            raise Gone("it does not read what it is sent")
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it.

        Raises:
            Gone: The connection is over.
        """
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            return
        except OSError as exc:
            raise Gone(exc.strerror or str(exc)) from exc

    def receive(self) -> None:
        """Read what there is; `take` returns it.

        Raises:
            Gone: The connection is over.
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
        """Return the next value that has arrived, None where there is none.

        Raises:
            Gone: What arrived is not of this run.
        """
        try:
            value = self.reader.take()
        except BadFrame as exc:
            raise Gone(str(exc)) from exc
        if value is not None:
            self.heard = time.monotonic()
        return value

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        self._sock.close()

    def reset(self) -> None:
        """Close the connection at once."""
        reset(self._sock)
