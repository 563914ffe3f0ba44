"""A client of OpenSSH masters: opens sessions over a control socket, without an ssh process for each session.

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
#: Id of the request; only one request is sent on each connection to a control socket.
REQUEST = 0
#: Maximum length of a message that is accepted, in bytes; the same as in OpenSSH.
LONGEST = 256 * 1024
#: Size of the length that precedes each message, in bytes.
HEAD = 4

_NO_ESCAPES = 0xFFFFFFFF


class Unavailable(Exception):
    """A master is missing, or did not carry out the request: no command was started."""


class Absent(Unavailable):
    """No process listens on the control socket: there is no master."""


class Master(NamedTuple):
    """The control socket on which the master of a worker listens, if the master exists.

    Attributes:
        path: Path of the control socket.
        agent: Whether sessions get the user's ssh agent, if the master forwards the agent.
    """

    path: Path
    agent: bool = False

    def must_be_own(self) -> None:
        """Check that the directory of the control socket belongs to this user.

        Raises:
            Unavailable: The directory belongs to another user.
            OSError: The directory does not exist.
        """
        # The ssh config turns off shared connections for such a directory too (`openssh.guard`).
        if self.path.parent.stat().st_uid != os.geteuid():
            raise Unavailable("the directory of the control sockets is not this user's own")


def packed(kind: int, *values: int | bytes) -> bytes:
    """Return a message in the format of OpenSSH's multiplexing protocol."""
    body = b"".join(
        struct.pack(">I", value) if isinstance(value, int) else struct.pack(">I", len(value)) + value
        for value in (kind, *values)
    )
    return struct.pack(">I", len(body)) + body


def new_session(master: Master, command: str) -> bytes:
    """Return the request to run a remote command line without a terminal. Three file descriptors must follow it."""
    words = (b"", 0, 0, int(master.agent), 0, _NO_ESCAPES, b"", os.fsencode(command))
    return packed(NEW_SESSION, REQUEST, *words)


def body_length(head: bytes | bytearray) -> int:
    """Return the length of a message, given its first HEAD bytes.

    Raises:
        Unavailable: The length exceeds `LONGEST`.
    """
    (found,) = struct.unpack_from(">I", head)
    if found > LONGEST:
        raise Unavailable(f"the master announces a message of {found} bytes")
    return int(found)


def numbers(body: bytes) -> tuple[int, int, int]:
    """Return the kind of a message and its first two numbers; a missing number is 0."""
    return struct.unpack(">III", body[:12].ljust(12, b"\0"))


def taken(said: bytearray) -> tuple[int, int, int] | None:
    """Remove the first message from received data and return its `numbers`; None if the message is incomplete.

    Raises:
        Unavailable: The message is longer than `LONGEST`.
    """
    if len(said) < HEAD or len(said) < (end := HEAD + body_length(said)):
        return None
    found = numbers(bytes(said[HEAD:end]))
    del said[:end]
    return found


def must_greet(message: tuple[int, int, int]) -> None:
    """Check that a message is the hello of a master with the same protocol version.

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
    """Pass one of the three file descriptors of a session to the master."""
    socket.send_fds(control, [b"\0"], [file])


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Session:
    """A remote command line that runs over a master. It has the same attributes as an asyncio process of ssh.

    Args:
        control: The control socket, for reading.
        files: The command's standard input, output and error.
        close: Ends the session if it is still open, and closes its sockets.

    Attributes:
        returncode: The exit code, after `wait`. Like ssh, 255 if the master reported no exit code.
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
            # Wait until the master closes the connection, after it has written all output: closing it earlier would
            # lose output.
            while self.returncode is None:
                kind, _, value = await _message(self._control)
                code = value & 0xFF if kind == EXIT_MESSAGE else code
        if self.returncode is None:
            self.returncode = code
        return self.returncode


async def check(master: Master, patience: float) -> None:
    """Check that a master answers.

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
        limit: Maximum size of the output that is read at once, in bytes.
        patience: Seconds that the master has to answer. The worker's answer has no time limit here.

    Raises:
        Unavailable: There is no master, or the master opened no session.
    """
    with _unavailable(), contextlib.ExitStack() as stack:
        async with asyncio.timeout(patience):
            control, (reader, writer) = await _connected(master, stack)
        writer.transport.set_write_buffer_limits(0)
        writer.write(new_session(master, command))
        # The descriptors are sent on the socket itself, after the request: first wait until the stream's buffer is
        # empty.
        await writer.drain()
        ours = [_passed(control, stack) for _ in range(3)]
        stdin, stdout, stderr = [await _stream(one, stack, limit) for one in ours]
        must_answer(await _message(reader), SESSION_OPENED)
        return Session(reader, (stdin, stdout, stderr), stack.pop_all().close)


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, ConnectionRefusedError) as exc:
        raise Absent(str(exc)) from exc
    except (OSError, EOFError) as exc:
        raise Unavailable(str(exc)) from exc


async def _connected(master: Master, stack: contextlib.ExitStack) -> tuple[socket.socket, _Stream]:
    """Connect to a control socket, exchange the hello messages, and return the socket and its streams."""
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
    # Keep a reference to the writer: a writer without references closes its transport.
    stack.callback(_hang_up, one, writer)
    return reader, writer


def _hang_up(one: socket.socket, writer: asyncio.StreamWriter) -> None:
    # Do not abort a transport whose socket is closed already, which would fail in asyncio: a closed writer closes its
    # socket after sending its last data.
    if one.fileno() >= 0:
        writer.transport.abort()


def _passed(control: socket.socket, stack: contextlib.ExitStack) -> socket.socket:
    """Create a socket pair, pass one end to the master, and return the other end."""
    ours, its = socket.socketpair()
    stack.enter_context(ours)
    with its:
        pass_file(control, its.fileno())
    return ours


async def _message(reader: asyncio.StreamReader) -> tuple[int, int, int]:
    """Return the kind of the next message and its first two numbers; a missing number is 0."""
    size = body_length(await reader.readexactly(HEAD))
    return numbers(await reader.readexactly(size))
