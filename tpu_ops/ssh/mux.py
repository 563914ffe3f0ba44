"""A client of OpenSSH's master: it opens sessions over the master's control socket, without an ssh process for each.

The master reads and writes the three files that come with the request itself. It ends the session when the client
closes the control socket. Version 4 of the protocol is described in OpenSSH's PROTOCOL.mux; mux.c has its client.
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
#: The id of a request: every control socket carries one.
REQUEST = 0
#: Longest message that is accepted, in bytes: as long as a master accepts.
LONGEST = 256 * 1024
#: Bytes before each message, which say how long it is.
HEAD = 4

_NO_ESCAPES = 0xFFFFFFFF


class Unavailable(Exception):
    """A master did not do what it was asked for, and nothing was started."""


class Master(NamedTuple):
    """Where the master of a worker listens, if there is one.

    Attributes:
        path: Of its control socket.
        agent: Whether sessions have the person's ssh agent, where the master forwards it.
    """

    path: Path
    agent: bool = False

    def must_be_own(self) -> None:
        """See to it that the control socket is in a directory of this user.

        Raises:
            Unavailable: It is in somebody else's.
            OSError: There is no such directory.
        """
        # The written ssh config does not share connections there either (`openssh.guard`).
        if self.path.parent.stat().st_uid != os.geteuid():
            raise Unavailable("the directory of the control sockets is not this user's own")


def packed(kind: int, *values: int | bytes) -> bytes:
    """Return a message as it is sent."""
    body = b"".join(
        struct.pack(">I", value) if isinstance(value, int) else struct.pack(">I", len(value)) + value
        for value in (kind, *values)
    )
    return struct.pack(">I", len(body)) + body


def new_session(master: Master, command: str) -> bytes:
    """Return the request to run a remote command line without a terminal; three files are to follow it."""
    words = (b"", 0, 0, int(master.agent), 0, _NO_ESCAPES, b"", os.fsencode(command))
    return packed(NEW_SESSION, REQUEST, *words)


def body_length(head: bytes | bytearray) -> int:
    """Given the `HEAD` of a message, return how many bytes follow.

    Raises:
        Unavailable: They are more than anybody sends.
    """
    (found,) = struct.unpack_from(">I", head)
    if found > LONGEST:
        raise Unavailable(f"a message of {found} bytes")
    return int(found)


def numbers(body: bytes) -> tuple[int, int, int]:
    """Return the kind of a message and its first two numbers, 0 for what it does not have."""
    return struct.unpack(">III", body[:12].ljust(12, b"\0"))


def taken(said: bytearray) -> tuple[int, int, int] | None:
    """Take the first message, as of `numbers`, out of what a master said; None where it has not come whole.

    Raises:
        Unavailable: It is longer than anybody's.
    """
    if len(said) < HEAD or len(said) < (end := HEAD + body_length(said)):
        return None
    found = numbers(bytes(said[HEAD:end]))
    del said[:end]
    return found


def must_greet(message: tuple[int, int, int]) -> None:
    """See to it that a message is the hello of a master that speaks this version.

    Raises:
        Unavailable: It is not.
    """
    kind, version, _ = message
    if (kind, version) != (HELLO, VERSION):
        raise Unavailable(f"message {kind:#x} ({version}) in place of a hello of version {VERSION}")


def must_answer(message: tuple[int, int, int], wanted: int) -> None:
    """See to it that a message is the wanted answer to the request.

    Raises:
        Unavailable: It is not.
    """
    kind, request, _ = message
    if (kind, request) != (wanted, REQUEST):
        raise Unavailable(f"message {kind:#x} in place of {wanted:#x}")


def pass_file(control: socket.socket, file: int) -> None:
    """Give the master one of the files of a session."""
    socket.send_fds(control, [b"\0"], [file])


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


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
                code = value & 0xFF if kind == EXIT_MESSAGE else code
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
            writer.write(packed(ALIVE_CHECK, REQUEST))
            must_answer(await _message(reader), ALIVE)


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
    with _unavailable(), contextlib.ExitStack() as stack:
        async with asyncio.timeout(patience):
            control, (reader, writer) = await _connected(master, stack)
        writer.transport.set_write_buffer_limits(0)
        writer.write(new_session(master, command))
        # The files come behind the whole of it, and past the stream: nothing of that is to be left there.
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
    """Return a control socket on which both sides have said hello."""
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
    # A writer that nobody holds any more closes its transport.
    stack.callback(_hang_up, one, writer)
    return reader, writer


def _hang_up(one: socket.socket, writer: asyncio.StreamWriter) -> None:
    # One that was closed while it had something to write closes its socket with the last of it; to abort it then fails
    # in asyncio itself.
    if one.fileno() >= 0:
        writer.transport.abort()


def _passed(control: socket.socket, stack: contextlib.ExitStack) -> socket.socket:
    """Give the master one end of a new pair of sockets, and return the other one."""
    ours, its = socket.socketpair()
    stack.enter_context(ours)
    with its:
        pass_file(control, its.fileno())
    return ours


async def _message(reader: asyncio.StreamReader) -> tuple[int, int, int]:
    """Return the kind of the next message and its first two numbers, 0 for what it does not have."""
    size = body_length(await reader.readexactly(HEAD))
    return numbers(await reader.readexactly(size))
