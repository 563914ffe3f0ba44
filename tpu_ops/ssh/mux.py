"""A client of OpenSSH's master: opens sessions over the control socket, without an ssh process for each.

A request passes three file descriptors, which the master reads and writes itself. The master ends the session when the
client closes the control socket. OpenSSH's PROTOCOL.mux describes version 4 of the protocol; mux.c has its client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tpu_ops.ssh.replies import SSH_FAILED

HELLO, VERSION = 0x00000001, 4
NEW_SESSION, ALIVE_CHECK = 0x10000002, 0x10000004
EXIT_MESSAGE, ALIVE, SESSION_OPENED = 0x80000004, 0x80000005, 0x80000006
#: Id of the request: each control socket carries only one.
REQUEST = 0
#: Longest message that is accepted, in bytes; a master accepts the same length.
LONGEST = 256 * 1024
#: Bytes of the length before each message.
HEAD = 4

_NO_ESCAPES = 0xFFFFFFFF


class Unavailable(Exception):
    """A master could not do what was asked; no command was started."""


class Master(NamedTuple):
    """Where the master of a worker listens, if it has one.

    Attributes:
        path: Path of its control socket.
        agent: Whether sessions get the user's ssh agent, if the master forwards it.
    """

    path: Path
    agent: bool = False

    def must_be_own(self) -> None:
        """Check that the directory of the control socket belongs to this user.

        Raises:
            Unavailable: It belongs to another user.
            OSError: It does not exist.
        """
        # The ssh config does not share connections in that case either (`openssh.guard`).
        if self.path.parent.stat().st_uid != os.geteuid():
            raise Unavailable("the directory of the control sockets is not this user's own")


def packed(kind: int, *values: int | bytes) -> bytes:
    """Return a message in the format of the protocol."""
    body = b"".join(
        struct.pack(">I", value) if isinstance(value, int) else struct.pack(">I", len(value)) + value
        for value in (kind, *values)
    )
    return struct.pack(">I", len(body)) + body


def new_session(master: Master, command: str) -> bytes:
    """Return the request to run a remote command line without a terminal; three file descriptors must follow it."""
    words = (b"", 0, 0, int(master.agent), 0, _NO_ESCAPES, b"", os.fsencode(command))
    return packed(NEW_SESSION, REQUEST, *words)


def body_length(head: bytes | bytearray) -> int:
    """Return the length of a message, given its `HEAD`.

    Raises:
        Unavailable: The length exceeds `LONGEST`.
    """
    (found,) = struct.unpack_from(">I", head)
    if found > LONGEST:
        raise Unavailable(f"the master announces a message of {found} bytes")
    return int(found)


def numbers(body: bytes) -> tuple[int, int, int]:
    """Return the kind of a message and its first two numbers; missing ones are 0."""
    return struct.unpack(">III", body[:12].ljust(12, b"\0"))


def taken(said: bytearray) -> tuple[int, int, int] | None:
    """Remove the first message from received data and return it like `numbers`; None if it is incomplete.

    Raises:
        Unavailable: The message is longer than `LONGEST`.
    """
    if len(said) < HEAD or len(said) < (end := HEAD + body_length(said)):
        return None
    found = numbers(bytes(said[HEAD:end]))
    del said[:end]
    return found


def must_greet(message: tuple[int, int, int]) -> None:
    """Check that a message is the hello of a master with this protocol version.

    Raises:
        Unavailable: It is not.
    """
    kind, version, _ = message
    if (kind, version) != (HELLO, VERSION):
        raise Unavailable(f"message {kind:#x} ({version}) instead of a hello of version {VERSION}")


def must_answer(message: tuple[int, int, int], wanted: int) -> None:
    """Check that a message is the expected answer to the request.

    Raises:
        Unavailable: It is not.
    """
    kind, request, _ = message
    if (kind, request) != (wanted, REQUEST):
        raise Unavailable(f"message {kind:#x} instead of {wanted:#x}")


def pass_file(control: socket.socket, file: int) -> None:
    """Pass the master one of the three file descriptors of a session."""
    socket.send_fds(control, [b"\0"], [file])


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Session:
    """A remote command line, with the attributes of an ssh process that its callers use.

    Args:
        control: The control socket, for reading.
        files: The command's standard input, output and error.
        close: Ends the session if it is still open, and releases its sockets.

    Attributes:
        returncode: The exit code, after `wait`; 255 if the master reported none, as for ssh.
    """

    def __init__(
        self, control: asyncio.StreamReader, files: tuple[_Stream, _Stream, _Stream], close: Callable[[], None]
    ) -> None:
        self._control = control
        (_, self.stdin), (self.stdout, _), (self.stderr, _) = files
        self.close = close
        self.returncode: int | None = None

    async def wait(self) -> int:
        """Wait for the end of the session; return the exit code."""
        code = SSH_FAILED
        with contextlib.suppress(OSError, EOFError, Unavailable):
            # The master closes the connection after it has written all output; closing it earlier would lose some.
            while self.returncode is None:
                kind, _, value = await _message(self._control)
                code = value & 0xFF if kind == EXIT_MESSAGE else code
        if self.returncode is None:
            self.returncode = code
        return self.returncode


async def check(master: Master, patience: float) -> None:
    """Return if a master answers.

    Raises:
        Unavailable: There is no master, or it does not answer within ``patience`` seconds.
    """
    with _unavailable(), contextlib.ExitStack() as stack:
        async with asyncio.timeout(patience):
            _, (reader, writer) = await _connected(master, stack)
            writer.write(packed(ALIVE_CHECK, REQUEST))
            must_answer(await _message(reader), ALIVE)


async def open_session(master: Master, command: str, *, limit: int, patience: float) -> Session:
    """Run a remote command line over a master, without a terminal.

    Args:
        master: The worker's master.
        command: The command line.
        limit: Longest part of its output that is read at once, in bytes.
        patience: Seconds for the master to answer. The worker's own answer has no limit here.

    Raises:
        Unavailable: There is no master, or it opened no session.
    """
    with _unavailable(), contextlib.ExitStack() as stack:
        async with asyncio.timeout(patience):
            control, (reader, writer) = await _connected(master, stack)
        writer.transport.set_write_buffer_limits(0)
        writer.write(new_session(master, command))
        # The descriptors are sent past the stream, after the request: the stream's buffer must be empty first.
        await writer.drain()
        ours = [_passed(control, stack) for _ in range(3)]
        stdin, stdout, stderr = [await _stream(one, stack, limit) for one in ours]
        must_answer(await _message(reader), SESSION_OPENED)
        return Session(reader, (stdin, stdout, stderr), stack.pop_all().close)


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as exc:
        raise Unavailable(str(exc)) from exc


async def _connected(master: Master, stack: contextlib.ExitStack) -> tuple[socket.socket, _Stream]:
    """Return a control socket after both sides have said hello."""
    master.must_be_own()
    control = stack.enter_context(socket.socket(socket.AF_UNIX))
    control.setblocking(False)
    await asyncio.get_running_loop().sock_connect(control, str(master.path))
    reader, writer = await _stream(control, stack)
    must_greet(await _message(reader))
    writer.write(packed(HELLO, VERSION))
    return control, (reader, writer)


async def _stream(one: socket.socket, stack: contextlib.ExitStack, limit: int = LONGEST) -> _Stream:
    reader, writer = await asyncio.open_unix_connection(sock=one, limit=limit)
    # A writer without references closes its transport.
    stack.callback(_hang_up, one, writer)
    return reader, writer


def _hang_up(one: socket.socket, writer: asyncio.StreamWriter) -> None:
    # A writer that was closed with data left closes its socket after the last of it; aborting it then fails in asyncio.
    if one.fileno() >= 0:
        writer.transport.abort()


def _passed(control: socket.socket, stack: contextlib.ExitStack) -> socket.socket:
    """Pass the master one end of a new socket pair; return the other end."""
    ours, its = socket.socketpair()
    stack.enter_context(ours)
    with its:
        pass_file(control, its.fileno())
    return ours


async def _message(reader: asyncio.StreamReader) -> tuple[int, int, int]:
    """Return the kind of the next message and its first two numbers; missing ones are 0."""
    size = body_length(await reader.readexactly(HEAD))
    return numbers(await reader.readexactly(size))
