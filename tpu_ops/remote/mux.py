"""Sessions over ssh's masters without an ssh process for each.

A session is asked for over the master's control socket; the master itself reads and writes the three files that come
with the request, and ends the session when the control socket is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

from tpu_ops.remote import mux_protocol as protocol
from tpu_ops.remote.mux_protocol import Master, Unavailable
from tpu_ops.remote.replies import SSH_FAILED

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
                code = value & 0xFF if kind == protocol.EXIT_MESSAGE else code
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
            writer.write(protocol.packed(protocol.ALIVE_CHECK, protocol.REQUEST))
            protocol.must_answer(await _message(reader), protocol.ALIVE)


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
        writer.write(protocol.new_session(master, command))
        # The files come behind the whole of it, and past the stream: nothing of that is to be left there.
        await writer.drain()
        ours = [_passed(control, stack) for _ in range(3)]
        stdin, stdout, stderr = [await _stream(one, stack, limit) for one in ours]
        protocol.must_answer(await _message(reader), protocol.SESSION_OPENED)
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
    protocol.must_greet(await _message(reader))
    writer.write(protocol.packed(protocol.HELLO, protocol.VERSION))
    return control, (reader, writer)


async def _stream(one: socket.socket, stack: contextlib.ExitStack, limit: int = protocol.LONGEST) -> _Stream:
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
        protocol.pass_file(control, its.fileno())
    return ours


async def _message(reader: asyncio.StreamReader) -> tuple[int, int, int]:
    """Return the kind of the next message and its first two numbers, 0 for what it does not have."""
    length = protocol.length(await reader.readexactly(protocol.HEAD))
    return protocol.numbers(await reader.readexactly(length))
