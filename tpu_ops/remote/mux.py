"""Sessions over ssh's masters without an ssh process for each: OpenSSH's multiplexing protocol, version 4.

OpenSSH's source has it: PROTOCOL.mux tells of it, the client's side is in mux.c. A session is asked for over the
master's control socket; the master itself reads and writes the three files that come with the request, and ends the
session when the control socket is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tpu_ops.remote.replies import SSH_FAILED

_HELLO, _VERSION = 0x00000001, 4
_NEW_SESSION, _ALIVE_CHECK = 0x10000002, 0x10000004
_EXIT_MESSAGE, _ALIVE, _SESSION_OPENED = 0x80000004, 0x80000005, 0x80000006
#: The id of a request: every control socket carries one.
_REQUEST = 0
_NO_ESCAPES = 0xFFFFFFFF
#: Longest message that is accepted, in bytes: as long as a master accepts.
_LONGEST = 256 * 1024

_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Unavailable(Exception):
    """A master did not do what it was asked for, and nothing was started."""


@dataclass(frozen=True)
class Master:
    """Where the master of a worker listens, if there is one.

    Attributes:
        path: Of its control socket.
        agent: Whether sessions have the person's ssh agent, where the master forwards it.
    """

    path: Path
    agent: bool = False


class Session:
    """A remote command line, with what users of ssh's processes know of these.

    Args:
        control: What the master says.
        files: What the command reads, writes, and writes as its errors.
        close: Ends the session if it has not ended, and lets go of all this.

    Attributes:
        returncode: Once its end was waited for, the exit code; 255 where none came, as ssh has it.
    """

    def __init__(
        self, control: asyncio.StreamReader, files: tuple[_Stream, _Stream, _Stream], close: Callable[[], None]
    ) -> None:
        self._control = control
        (_, self.stdin), (self.stdout, _), (self.stderr, _) = files
        self.close = close
        self.returncode: int | None = None

    async def wait(self) -> int:
        """Return the exit code when the session has ended."""
        code = SSH_FAILED
        with contextlib.suppress(OSError, EOFError, Unavailable):
            # The master hangs up when it has written everything; to do so before would lose some of it.
            while self.returncode is None:
                kind, _, value = await _message(self._control)
                code = value & 0xFF if kind == _EXIT_MESSAGE else code
        if self.returncode is None:
            self.returncode = code
        return self.returncode


async def check(master: Master, patience: float) -> None:
    """Return if there is a master that answers.

    Raises:
        Unavailable: There is none, or it does not answer within so many seconds.
    """
    with _unavailable(), contextlib.ExitStack() as stack:
        async with asyncio.timeout(patience):
            _, (reader, writer) = await _connected(master, stack)
            writer.write(_packed(_ALIVE_CHECK, _REQUEST))
            await _answered(reader, _ALIVE)


async def open_session(master: Master, command: str, *, limit: int, patience: float) -> Session:
    """Run a remote command line over a master, without a terminal.

    Args:
        master: Of the worker.
        command: The command line.
        limit: Bytes that one part of its output may have where it is read in parts.
        patience: Seconds that the master may take until it is known to be one; the worker then takes what it takes.

    Raises:
        Unavailable: There is no master, or it opened no session.
    """
    words = (b"", 0, 0, int(master.agent), 0, _NO_ESCAPES, b"", os.fsencode(command))
    with _unavailable(), contextlib.ExitStack() as stack:
        async with asyncio.timeout(patience):
            control, (reader, writer) = await _connected(master, stack)
        writer.transport.set_write_buffer_limits(0)
        writer.write(_packed(_NEW_SESSION, _REQUEST, *words))
        # The files come behind the whole of it, and past the stream: nothing of that is to be left there.
        await writer.drain()
        ours = [_passed(control, stack) for _ in range(3)]
        stdin, stdout, stderr = [await _stream(one, stack, limit) for one in ours]
        await _answered(reader, _SESSION_OPENED)
        return Session(reader, (stdin, stdout, stderr), stack.pop_all().close)


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as exc:
        raise Unavailable(str(exc)) from exc


async def _connected(master: Master, stack: contextlib.ExitStack) -> tuple[socket.socket, _Stream]:
    """Return a control socket on which both sides have said hello."""
    # The written ssh config does not share connections in a directory of somebody else's (`openssh.guard`).
    if master.path.parent.stat().st_uid != os.geteuid():
        raise Unavailable("the directory of the control sockets is not this user's own")
    control = stack.enter_context(socket.socket(socket.AF_UNIX))
    control.setblocking(False)
    await asyncio.get_running_loop().sock_connect(control, str(master.path))
    reader, writer = await _stream(control, stack)
    kind, version, _ = await _message(reader)
    if (kind, version) != (_HELLO, _VERSION):
        raise Unavailable(f"message {kind:#x} ({version}) in place of a hello of version {_VERSION}")
    writer.write(_packed(_HELLO, _VERSION))
    return control, (reader, writer)


async def _stream(one: socket.socket, stack: contextlib.ExitStack, limit: int = _LONGEST) -> _Stream:
    reader, writer = await asyncio.open_unix_connection(sock=one, limit=limit)
    # A writer that nobody holds any more closes its transport.
    stack.callback(_hang_up, writer)
    return reader, writer


def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


def _passed(control: socket.socket, stack: contextlib.ExitStack) -> socket.socket:
    """Give the master one end of a new pair of sockets, and return the other one."""
    ours, its = socket.socketpair()
    stack.enter_context(ours)
    with its:
        socket.send_fds(control, [b"\0"], [its.fileno()])
    return ours


def _packed(kind: int, *values: int | bytes) -> bytes:
    body = b"".join(
        struct.pack(">I", value) if isinstance(value, int) else struct.pack(">I", len(value)) + value
        for value in (kind, *values)
    )
    return struct.pack(">I", len(body)) + body


async def _message(reader: asyncio.StreamReader) -> tuple[int, int, int]:
    """Return the kind of the next message and its first two numbers, 0 for what it does not have."""
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    if length > _LONGEST:
        raise Unavailable(f"a message of {length} bytes")
    body = await reader.readexactly(length)
    return struct.unpack(">III", body[:12].ljust(12, b"\0"))


async def _answered(reader: asyncio.StreamReader, wanted: int) -> None:
    kind, request, _ = await _message(reader)
    if (kind, request) != (wanted, _REQUEST):
        raise Unavailable(f"message {kind:#x} in place of {wanted:#x}")
