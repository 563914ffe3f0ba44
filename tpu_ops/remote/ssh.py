"""The one locked place in which master connections are opened, and how ssh's processes are run and ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from tpu_ops import files
from tpu_ops.errors import OpsError
from tpu_ops.remote import mux, openssh
from tpu_ops.remote.mux_protocol import Master, Unavailable
from tpu_ops.remote.renewal import paused
from tpu_ops.remote.replies import Output

#: Seconds within which a master must be authenticated; ConnectTimeout covers the TCP connection alone.
OPEN_LIMIT = 25.0
#: Seconds that ssh may take to talk to a master of this machine.
CONTROL_LIMIT = 5.0
#: Connections through a proxy that are opened at once: sshd refuses some of more than ten (MaxStartups), and each
#: gcloud takes a processor for a second.
PROXIES = 8
#: Other connections that are opened at once: the keys of each take the controller some milliseconds of processor time.
WIDTH = 64
_POLL = 0.05
#: How often an agent is asked for one worker alone before it is said not to sign, and the seconds from one to the next.
_TRIES, _AGAIN = 3, 0.5
#: The lock of whoever asks it alone; no worker is called so. Seconds to wait for it: many may be before one.
_AGENT, _AGENT_LIMIT = ".agent", 300.0

_log = logging.getLogger(__name__)

#: What runs a remote command line.
Process = asyncio.subprocess.Process | mux.Session
#: Given a worker, says where its master listens; None where that is not known.
FindMaster = Callable[[str], Master | None]


class Unreachable(Exception):
    """No connection to a worker; the text says why, in ssh's own words where it has some.

    Attributes:
        answered: Whether the worker itself answered and refused this person: then its address is right.
        late: Whether the time was over first. A key may have waited for what only a terminal shows.
        fix: What to do about it, where that is known.
    """

    def __init__(self, problem: str, *, answered: bool = False, late: bool = False, fix: str = "") -> None:
        super().__init__(problem)
        self.answered, self.late, self.fix = answered, late, fix


class Moved(Unreachable):
    """No connection where the worker was: it is reached another way by now."""


class Unsigned(Unreachable):
    """No connection: the agent that holds the person's key would not sign with it."""


@contextlib.asynccontextmanager
async def started(
    command: Sequence[str],
    *,
    stdout: int = asyncio.subprocess.PIPE,
    limit: int = 2**16,
    held: Sequence[int] = (),
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run ssh, or what uses it, for the length of a block; a process that has not ended then is killed.

    Args:
        command: The command line.
        stdout: Where its output goes; its input and errors are pipes.
        limit: Bytes that one part of its output may have where it is read in parts.
        held: Descriptors that it is given, such as those of locks.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        limit=limit,
        start_new_session=True,
        pass_fds=held,
        env=openssh.environment(),
    )
    try:
        yield process
    finally:
        await end(process)


@contextlib.asynccontextmanager
async def session(master: Master | None, command: Sequence[str], *, limit: int = 2**16) -> AsyncIterator[Process]:
    """Run a remote command line for the length of a block: over a master itself, or by ssh where it opens no session.

    Args:
        master: Of the worker; None where it is not known where it would listen.
        command: ssh's command line, whose last word is the remote one.
        limit: As for `started`.
    """
    direct = None
    if master:
        with contextlib.suppress(Unavailable):
            direct = await mux.open_session(master, command[-1], limit=limit, patience=CONTROL_LIMIT)
    if direct:
        with contextlib.closing(direct):
            yield direct
    else:
        async with started(command, limit=limit) as process:
            yield process


def _scratch() -> IO[bytes]:
    """Return a file that is nowhere: in memory, as a full disk is no reason not to reach a worker."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tpu_ops"), "w+b")
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return Path(os.devnull).open("w+b")


async def quiet(command: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run a command without input; return its exit code (None: not ended in time, and killed) and what it said.

    Its output goes to a file, not a pipe: a master in the background may keep it open for minutes.
    """
    with _scratch() as said:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            env=openssh.environment(),
        )
        try:
            async with asyncio.timeout(limit):
                await process.wait()
        except TimeoutError:
            return None, ""
        finally:
            await end(process)
        said.seek(0)
        return process.returncode, said.read().decode(errors="replace")


class Said(NamedTuple):
    """What a process prints, as far as it has come."""

    stdout: Output
    stderr: Output


async def converse(
    process: Process, said: Said, data: bytes, begun: bytes, heard: Callable[[], None], *, attended: bool = False
) -> None:
    """Give a process its input and take what it prints, until it has ended.

    Args:
        process: With three pipes.
        said: What it prints comes there.
        data: Its input; one that ends before it has read all is none the worse for it.
        begun: What it prints first.
        heard: Called when that has come.
        attended: Whether its input stays open until it has ended, so that it knows when this process is gone.
    """
    assert process.stdin and process.stdout and process.stderr  # noqa: S101, PT018 - for the type checker
    await asyncio.gather(
        _feed(process.stdin, data, attended),
        _read(process.stdout, said.stdout, begun, heard),
        _read(process.stderr, said.stderr),
    )
    process.stdin.close()
    await process.wait()


async def _feed(writer: asyncio.StreamWriter, data: bytes, attended: bool) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        writer.write(data)
        await writer.drain()
    if not attended:
        writer.close()


async def _read(
    reader: asyncio.StreamReader, said: Output, begun: bytes = b"", heard: Callable[[], None] | None = None
) -> None:
    while piece := await reader.read(2**16):
        said.add(piece)
        if heard and begun in said.data:
            heard()
            heard = None


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a process that has not ended, collect it, and let go of its pipes.

    The master of a connection holds these pipes too, as long as the remote command lives; Process.wait would wait
    for that.
    """
    transport = process._transport  # type: ignore[attr-defined] # asyncio has no public way to it
    cancelled: asyncio.CancelledError | None = None
    try:
        if process.returncode is None:
            # Process.kill and the transport's close would collect a process that has just ended, and asyncio's own
            # watcher, which then finds none, would report 255.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        # A killed process is collected at once, and asyncio has no event for that apart from its pipes' ends.
        while process.returncode is None:
            try:
                await asyncio.sleep(_POLL / 10)
            except asyncio.CancelledError as exc:
                # For the second time, as the loop is closed: the watcher would tell a loop that is gone, and say so.
                cancelled = exc
    finally:
        transport.close()
    if cancelled:
        raise cancelled


class Masters:
    """Opens master connections: one at a time per worker, over all processes that use the same ssh configuration.

    Args:
        ssh_config: The configuration.
        proxied: Workers that are reached through a proxy.
        find: Says where the master of a worker listens; ssh is asked where it does not know.
        jump: Through which these are reached, where it is ssh that leads to them.
    """

    def __init__(
        self,
        ssh_config: Path,
        proxied: Collection[str] = (),
        find: FindMaster = lambda host: None,
        jump: openssh.Jump | None = None,
    ) -> None:
        self._config = ssh_config
        self._proxied = proxied
        self._find = find
        self._first, self._tried = asyncio.Lock(), False
        # When a connection to the jump that no longer served was let go, in the loop's time.
        self._jump, self._jump_asked, self._jump_left = jump, asyncio.Lock(), float("-inf")
        # How many workers are being reached beside each other, and for how many the agent is to be asked alone; why it
        # does not sign even so.
        self._beside, self._alone, self._refusal = 0, 0, ""
        self._proxies, self._width = asyncio.Semaphore(PROXIES), asyncio.Semaphore(WIDTH)
        self._locks = ssh_config.parent / "masters"
        self._ready: set[str] = set()
        self._gates: dict[str, asyncio.Lock] = {}

    async def ensure(self, host: str, deadline: asyncio.Timeout | None = None) -> None:
        """Return once a master connection to a worker is open.

        Args:
            host: The worker.
            deadline: Of the caller; the time until it is this worker's turn does not count.

        Raises:
            Unreachable: It could not be opened.
        """
        async with self._gates.setdefault(host, asyncio.Lock()):
            if host in self._ready:
                return
            if not await self._alive(host):
                await self._reach(host, deadline)
            self._ready.add(host)

    def served(self, host: str) -> None:
        """Know that there is a master to a worker, since a session went over it."""
        self._ready.add(host)

    def forget(self, hosts: Iterable[str]) -> None:
        """Have the next `ensure` look again whether there is a master to each of these workers."""
        self._ready.difference_update(hosts)

    async def drop(self, host: str) -> None:
        """Retire a master that no longer serves, so that the next `ensure` opens another.

        `stop`, not `exit`: sessions that other processes have over it, if it still serves them, go on.
        """
        self._ready.discard(host)
        await quiet(openssh.control(self._config, host, "stop"), CONTROL_LIMIT)

    async def _alive(self, host: str) -> bool:
        if master := self._find(host):
            with contextlib.suppress(Unavailable):
                await mux.check(master, CONTROL_LIMIT)
                return True
        code, _ = await quiet(openssh.control(self._config, host, "check"), CONTROL_LIMIT)
        return code == 0

    @contextlib.asynccontextmanager
    async def _turn(self, host: str, deadline: asyncio.Timeout | None) -> AsyncIterator[None]:
        """Wait for the turn of a worker; behind a proxy the first goes alone, since the others then share its way."""
        if host in self._proxied:
            async with self._first:
                if not self._tried:
                    self._tried = True
                    yield
                    return
        turns = self._proxies if host in self._proxied else self._width
        with paused(deadline):
            await turns.acquire()
        try:
            yield
        finally:
            turns.release()

    async def _reach(self, host: str, deadline: asyncio.Timeout | None) -> None:
        """Open a master beside others, or alone where the agent that holds the keys does not sign for many at once.

        gpg-agent signs for a handful, others for as many as they take connections.
        """
        if not self._alone:
            async with self._turn(host, deadline):
                # While this one waited for its turn the agent may have begun to refuse.
                if not self._alone:
                    self._beside += 1
                    try:
                        return await self._open_unless_open(host)
                    except Unsigned:
                        self._say_one_by_one()
                    finally:
                        self._beside -= 1
        self._alone += 1
        try:
            async with self._locked(_AGENT, _AGENT_LIMIT, deadline):
                await self._open_alone(host)
        finally:
            self._alone -= 1
            if not self._alone:
                self._refusal = ""

    def _say_one_by_one(self) -> None:
        if not self._alone:
            _log.info("the ssh agent refuses some of many requests at once: opening connections one after the other")

    async def _open_alone(self, host: str) -> None:
        left = _TRIES
        # An agent that has refused a worker alone is not waited for again by those that wait for their turn.
        while not self._refusal:
            beside = self._beside
            try:
                return await self._open_unless_open(host)
            except Unsigned as exc:
                # Others may still be asking it beside this one: those of this process end soon, others are not heard.
                left -= not beside
                self._refusal = "" if left else str(exc)
            if left:
                await asyncio.sleep(_AGAIN)
        raise Unsigned(self._refusal, answered=True)

    async def _open_unless_open(self, host: str) -> None:
        async with self._locked(host, OPEN_LIMIT + CONTROL_LIMIT):
            if not await self._alive(host):
                await self._open(host)

    async def _open(self, host: str) -> None:
        command = openssh.open_master(self._config, host)
        begun = asyncio.get_running_loop().time()
        code, said = await quiet(command, OPEN_LIMIT)
        if code and host in self._proxied and openssh.unanswered(said) and await self._leave_stale_jump(begun):
            code, said = await quiet(command, OPEN_LIMIT)
        if code and host in self._proxied and openssh.unexplained(said):
            reached, more = await quiet(openssh.attempt(self._config, host), OPEN_LIMIT)
            # Where that connects, what kept the proxy from it was over in a moment.
            code, said = await quiet(command, OPEN_LIMIT) if reached == 0 else (code, more or said)
        if code is None:
            waits = "a key may be waiting for a touch or a passphrase"
            raise Unreachable(f"no ssh connection within {OPEN_LIMIT:.0f} s ({waits})", late=True)
        if code:
            kind = Unsigned if openssh.unsigned(said) else Unreachable
            raise kind(openssh.reason(said, code), answered=openssh.refused(said))

    async def _leave_stale_jump(self, begun: float) -> bool:
        """Let the connection to the jump go where nothing answers over it any more, as after a laptop has slept.

        ssh itself gives it up later than it gives up the workers behind it.

        Args:
            begun: Since when a worker behind it does not answer, in the loop's time.

        Returns:
            Whether there was such a connection since then.
        """
        if self._jump is None:
            return False
        async with self._jump_asked:
            if self._jump_left < begun and (await quiet(openssh.through_jump(self._jump), CONTROL_LIMIT))[0] is None:
                await quiet(openssh.leave_jump(self._jump), CONTROL_LIMIT)
                self._jump_left = asyncio.get_running_loop().time()
        return self._jump_left >= begun

    @contextlib.asynccontextmanager
    async def _locked(self, name: str, limit: float, deadline: asyncio.Timeout | None = None) -> AsyncIterator[None]:
        """Keep other processes, and what else goes on in this one, from the same for as long as the block lasts.

        Args:
            name: Of what is locked: a worker, to which only one opens a master, or the agent.
            limit: Seconds to wait for the lock.
            deadline: Of the caller; the time until it has the lock does not count.

        Raises:
            Unreachable: Another had it for all that time.
            OpsError: The lock's file cannot be written.
        """
        try:
            self._locks.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(self._locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise OpsError(
                f"cannot write the lock of a connection: {exc.strerror}",
                where=exc.filename or str(self._locks),
                fix=files.TO_WRITE,
            ) from exc
        try:
            until = asyncio.get_running_loop().time() + limit
            with paused(deadline):
                while not files.take(handle):
                    if asyncio.get_running_loop().time() > until:
                        raise Unreachable("another process has been opening a connection for too long")
                    # Another process holds the lock: there is no event of ours to wait for.
                    await asyncio.sleep(_POLL)
            yield
        finally:
            os.close(handle)
