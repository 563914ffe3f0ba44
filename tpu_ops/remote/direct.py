"""One command on many workers at once over masters that are all open already, without an event loop.

To import asyncio takes longer than the sessions of a dozen workers do. Whatever is not as it mostly is, a master that
is missing or a connection that turns out to be stale, is left to `fanout`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from tpu_ops.remote import mux_protocol as protocol
from tpu_ops.remote import room, silence, wire
from tpu_ops.remote.mux_protocol import Master, Unavailable
from tpu_ops.remote.replies import SSH_FAILED, Output, Result, late, result_of

#: Seconds that the masters may take to say hello: they are processes of this machine.
_PATIENCE = 1.0
#: Longest request that is sent, in bytes: it must go into the buffer of a socket at once.
_LONGEST = 64 * 1024
_PIECE = 64 * 1024

#: Runs the command on workers in an event loop.
Others = Callable[[Sequence[str]], Coroutine[Any, Any, Mapping[str, Result]]]
#: As `Fanout.gone`: what became of a worker, or None.
Gone = Callable[[str, float], Coroutine[Any, Any, object]]


def run(
    masters: Mapping[str, Master], argv: Sequence[str], *, limit: float, others: Others, gone: Gone
) -> dict[str, Result]:
    """Run a command, without input, on all these workers at once.

    Args:
        masters: Worker -> where its master listens.
        argv: The command; every word arrives as it is.
        limit: Seconds that it may take.
        others: Runs it where nothing was started: on all workers where one has no master that answers.
        gone: Finds out whether a silent worker is no longer where its master leads.

    Raises:
        OpsError: This process may not have that many sessions, or `others` failed.
    """
    room.make(len(masters))
    begun = time.monotonic()
    sessions = [_Session(host, master, argv, limit) for host, master in masters.items()]
    with contextlib.ExitStack() as stack:
        for session in sessions:
            stack.callback(session.close)
        greeted = _greeted(sessions, min(limit, _PATIENCE))
        if greeted:
            for session in sessions:
                session.ask()
            together = _Together(sessions, begun, limit)
            if together.attend():
                return together.results()
        # Imported here: mostly it is not wanted.
        import asyncio

        if greeted:
            return asyncio.run(together.attend_beside(others, gone))
    return dict(asyncio.run(others([*masters])))


def _greeted(sessions: Sequence[_Session], patience: float) -> bool:
    """Return whether all masters have said hello within so many seconds."""
    until = time.monotonic() + patience
    try:
        for session in sessions:
            session.connect()
    except (OSError, Unavailable):
        return False
    files = _Files(sessions)
    while waiting := [session for session in sessions if not session.is_greeted()]:
        left = until - time.monotonic()
        if left <= 0 or any(session.has_ended() for session in waiting):
            return False
        files.read(left)
    return True


class _Together:
    """The sessions of one command.

    Args:
        sessions: One for each worker.
        begun: When they began, in the time of `time.monotonic`.
        limit: Seconds that each may take.
    """

    def __init__(self, sessions: Sequence[_Session], begun: float, limit: float) -> None:
        self._sessions = sessions
        self._begun, self._limit = begun, limit
        self._to_say = limit > silence.PATIENCE

    def attend(self) -> bool:
        """Read what the sessions say until each has ended, the time is over, one is lost, or one is silent for long.

        Returns:
            Whether it was one of the first two.
        """
        files, looks_at = _Files(self._sessions), self._begun + silence.LOOK_AFTER
        while self._are_waited_for() and (left := self._left()) > 0:
            till_look = looks_at - time.monotonic()
            if any(session.is_lost() for session in files.read(min(left, till_look) if till_look > 0 else left)):
                return False
            if till_look > 0 and time.monotonic() >= looks_at and self._silent():
                return False
        return not any(session.is_lost() for session in self._sessions)

    async def attend_beside(self, others: Others, gone: Gone) -> dict[str, Result]:
        """Go on so while `others` runs the command on workers whose sessions are lost; return all results.

        The workers that are left may wait for these. The session of a silent worker is lost once it turns out to lead
        to where the worker was.
        """
        import asyncio

        loop, moved, tasks = asyncio.get_running_loop(), asyncio.Event(), {}

        def read(session: _Session, file: int) -> None:
            for closed in session.read(file):
                loop.remove_reader(closed)
            moved.set()

        async def look(session: _Session) -> None:
            try:
                if await gone(session.host, self._begun) and session in self._silent():
                    for file in session.files:
                        loop.remove_reader(file)
                    session.close()
            finally:
                moved.set()

        def look_for_silent() -> None:
            looking.extend(loop.create_task(look(session)) for session in self._silent())

        looking = list[asyncio.Task[None]]()
        timer = loop.call_at(self._begun + silence.LOOK_AFTER, look_for_silent)
        for session in self._sessions:
            for file in session.files:
                loop.add_reader(file, read, session, file)
        while True:
            for session in self._sessions:
                if session.is_lost() and session.host not in tasks:
                    tasks[session.host] = asyncio.create_task(others([session.host]))
            for task in looking:
                if task.done():
                    task.result()
            if not self._are_waited_for() or (left := self._left()) <= 0:
                break
            moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._till_said() if self._to_say else left):
                    await moved.wait()
            self._say_who_is_silent()
        timer.cancel()
        for task in looking:
            task.cancel()
        for session in self._sessions:
            for file in session.files:
                loop.remove_reader(file)
        found = self.results()
        for part in await asyncio.gather(*tasks.values()):
            found.update(part)
        return found

    def results(self) -> dict[str, Result]:
        """Return how the command ended, but for the sessions that are lost."""
        limit = f"{self._limit:g} s"
        return {
            session.host: session.result()
            if session.has_ended()
            else late(session.result(), limit, begun=session.begun)
            for session in self._sessions
            if not session.is_lost()
        }

    def _are_waited_for(self) -> bool:
        return not all(session.has_ended() for session in self._sessions)

    def _left(self) -> float:
        """Return the seconds until the time is over."""
        return self._begun + self._limit - time.monotonic()

    def _till_said(self) -> float:
        """Return the seconds until it is to be said who is silent, at least 0."""
        return max(0.0, self._begun + silence.PATIENCE - time.monotonic())

    def _say_who_is_silent(self) -> None:
        if self._to_say and not self._till_said():
            self._to_say = False
            if silent := self._silent():
                silence.say(session.host for session in silent)

    def _silent(self) -> list[_Session]:
        """Return those whose command is not known to have begun."""
        return [session for session in self._sessions if not (session.begun or session.has_ended())]


class _Files:
    """The files of sessions, some of which may have something to read."""

    def __init__(self, sessions: Sequence[_Session]) -> None:
        self._poll = select.poll()
        self._readers = {file: session for session in sessions for file in session.files}
        for file in self._readers:
            self._poll.register(file, select.POLLIN)

    def read(self, patience: float) -> list[_Session]:
        """Wait so many seconds for what can be read, and read it; return the sessions that it is of."""
        found = []
        for file, _ in self._poll.poll(patience * 1000):
            # One that has ended has let go of its other files.
            if session := self._readers.get(file):
                found.append(session)
                for gone in session.read(file):
                    self._poll.unregister(gone)
                    del self._readers[gone]
        return found


class _Session:
    """One worker's session, which goes on when one of its files has something to read.

    Args:
        host: The worker.
        master: Where its master listens.
        argv: The command.
        limit: Seconds that it may take.

    Attributes:
        files: Those that may have something to read, and where that goes.
    """

    def __init__(self, host: str, master: Master, argv: Sequence[str], limit: float) -> None:
        self.host = host
        self.files: dict[int, Output] = {}
        self._master = master
        self._marker = wire.new_marker()
        self._request = protocol.new_session(master, wire.enveloped(self._marker, argv, limit))
        self._control = socket.socket(socket.AF_UNIX)
        self._said, self._stdout, self._stderr = Output(), Output(self._marker), Output()
        self._messages = 0
        self._code = SSH_FAILED

    def is_greeted(self) -> bool:
        """Whether the master has said hello."""
        return self._messages > 0

    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return not self.files

    def is_lost(self) -> bool:
        """Whether it has ended and its command was never started, as far as can be known."""
        opened = self._messages > 1
        return self.has_ended() and (not opened or (self._code == SSH_FAILED and not self.begun))

    @property
    def begun(self) -> bool:
        """Whether the command is known to have been started."""
        return wire.beginning(self._marker) in self._stdout.data

    def connect(self) -> None:
        """Reach the master.

        Raises:
            OSError, Unavailable: There is none, or the command is too long to be sent at once.
        """
        if len(self._request) > _LONGEST:
            raise Unavailable(f"a request of {len(self._request)} bytes")
        self._master.must_be_own()
        self._control.setblocking(False)
        self._control.connect(str(self._master.path))
        self.files[self._control.fileno()] = self._said

    def ask(self) -> None:
        """Have the master run the command; a master that does not take the request ends the session."""
        said = protocol.packed(protocol.HELLO, protocol.VERSION) + self._request
        with contextlib.suppress(OSError):
            if self._control.send(said) == len(said):
                self._give(os.open(os.devnull, os.O_RDONLY))
                for output in (self._stdout, self._stderr):
                    ours, its = os.pipe()
                    self.files[ours] = output
                    os.set_blocking(ours, False)
                    self._give(its)
                return
        self.close()

    def _give(self, file: int) -> None:
        try:
            protocol.pass_file(self._control, file)
        finally:
            os.close(file)

    def read(self, file: int) -> set[int]:
        """Take what one of the files has; return those that are closed now."""
        before = {*self.files}
        try:
            piece = os.read(file, _PIECE)
        except BlockingIOError:
            return set()
        except OSError:
            piece = b""
        self.files[file].add(piece)
        if not piece:
            self._let_go(file)
        elif file == self._control.fileno():
            with contextlib.suppress(Unavailable):
                self._understand()
                return set()
            self.close()
        return before - self.files.keys()

    def _understand(self) -> None:
        """Take what the master has said.

        Raises:
            Unavailable: It is not what was asked for.
        """
        while message := protocol.taken(self._said.data):
            kind, _, value = message
            if self._messages == 0:
                protocol.must_greet(message)
            elif self._messages == 1:
                protocol.must_answer(message, protocol.SESSION_OPENED)
            elif kind == protocol.EXIT_MESSAGE:
                self._code = value & 0xFF
            self._messages += 1

    def result(self) -> Result:
        """Return how the command ended."""
        return result_of(self.host, self._marker, self._code, self._stdout, self._stderr)

    def close(self) -> None:
        """End the session if it has not ended, and let go of its files."""
        for file in [*self.files]:
            self._let_go(file)
        self._control.close()

    def _let_go(self, file: int) -> None:
        del self.files[file]
        if file != self._control.fileno():
            os.close(file)
