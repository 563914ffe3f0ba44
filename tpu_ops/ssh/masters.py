"""Opens and ends master connections to workers; only one process of this machine at a time opens one to a worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tpu_ops import files
from tpu_ops.errors import OpsError
from tpu_ops.ssh import mux, openssh
from tpu_ops.ssh.mux import Absent, Master, Unavailable
from tpu_ops.ssh.processes import CONTROL_LIMIT, quiet
from tpu_ops.ssh.renewal import paused

#: Seconds in which a master connection has to be authenticated. ConnectTimeout limits only the TCP connection.
OPEN_LIMIT = 25.0
#: Maximum number of connections that are opened through a proxy at the same time. sshd refuses some if there are more
#: than ten (MaxStartups), and each gcloud process takes a second of processor time.
PROXIES = 8
#: Maximum number of direct connections that are opened at the same time. Each key exchange takes some milliseconds of
#: this machine's processor time.
WIDTH = 64
_POLL = 0.05
#: Number of attempts, with one worker at a time, after which the ssh agent counts as refusing to sign, and the seconds
#: between two attempts.
_TRIES, _AGAIN = 3, 0.5
#: Name of the lock for asking the ssh agent for one worker at a time (no worker has this name), and seconds to wait for
#: the lock, since many processes can wait for it.
_AGENT, _AGENT_LIMIT = ".agent", 300.0

_log = logging.getLogger(__name__)

#: Function that returns where the master of a worker listens; None if that is unknown.
FindMaster = Callable[[str], Master | None]


class Unreachable(Exception):
    """There is no connection to a worker; the text gives the reason, in ssh's words if there are any.

    Attributes:
        answered: Whether the worker itself refused the user, so that its address is correct.
        late: Whether the attempt timed out. Perhaps a key waited for input, for which ssh needs a terminal.
        fix: The fix, if known.
    """

    def __init__(self, problem: str, *, answered: bool = False, late: bool = False, fix: str = "") -> None:
        super().__init__(problem)
        self.answered, self.late, self.fix = answered, late, fix


class Moved(Unreachable):
    """The worker's address has changed: there is no connection to its former address."""


class Unsigned(Unreachable):
    """There is no connection to a worker, since the ssh agent that holds the user's key refused to sign."""


class Masters:
    """Opens master connections: one at a time per worker, across all processes with the same ssh configuration.

    Args:
        ssh_config: The OpenSSH configuration.
        proxied: Workers that are reached through a proxy.
        find: Returns where the master of a worker listens. If it returns None, an ssh process finds the master.
        jump: The jump host to the proxied workers; None if they are reached through IAP, or if there are none.
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
        # _jump_left: when the last stale connection to the jump host was closed, in the event loop's time.
        self._jump, self._jump_asked, self._jump_left = jump, asyncio.Lock(), float("-inf")
        # _beside: number of workers that are being connected concurrently. _alone: number of workers that are connected
        # one at a time, because the agent refused concurrent requests. _refusal: why the agent refuses single requests
        # too.
        self._beside, self._alone, self._refusal = 0, 0, ""
        self._proxies, self._width = asyncio.Semaphore(PROXIES), asyncio.Semaphore(WIDTH)
        self._locks = ssh_config.parent / "masters"
        self._ready: set[str] = set()
        self._gates: dict[str, asyncio.Lock] = {}

    async def ensure(self, host: str, deadline: asyncio.Timeout | None = None) -> None:
        """Return once a master connection to a worker is open.

        Args:
            host: The worker.
            deadline: The caller's deadline, extended by the time spent in the queue.

        Raises:
            Unreachable: The connection could not be opened.
        """
        async with self._gates.setdefault(host, asyncio.Lock()):
            if host in self._ready:
                return
            if not await self._alive(host):
                await self._reach(host, deadline)
            self._ready.add(host)

    def served(self, host: str) -> None:
        """Record that a worker has an open master connection, since a session has used the connection."""
        self._ready.add(host)

    def forget(self, hosts: Iterable[str]) -> None:
        """Let the next `ensure` check again whether each of these workers has a master connection."""
        self._ready.difference_update(hosts)

    async def drop(self, host: str) -> None:
        """Close a stale master connection for new sessions, so that the next `ensure` opens another one.

        The control command is `stop`, not `exit`: if the master still works, the sessions of other processes continue.
        """
        self._ready.discard(host)
        await quiet(openssh.control(self._config, host, "stop"), CONTROL_LIMIT)

    async def _alive(self, host: str) -> bool:
        if master := self._find(host):
            try:
                await mux.check(master, CONTROL_LIMIT)
            except Absent:
                # Start no ssh process to be told the same: many workers make this the larger part of the time.
                return False
            except Unavailable:
                pass
            else:
                return True
        code, _ = await quiet(openssh.control(self._config, host, "check"), CONTROL_LIMIT)
        return code == 0

    @contextlib.asynccontextmanager
    async def _turn(self, host: str, deadline: asyncio.Timeout | None) -> AsyncIterator[None]:
        """Queue a worker. Behind a proxy, the first worker goes alone: the others then share the proxy connection."""
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
        """Open a master connection, concurrently with others, or alone if the ssh agent refuses concurrent requests.

        gpg-agent signs only a few requests at once. Other agents sign all requests whose connections they accept.
        """
        if not self._alone:
            async with self._turn(host, deadline):
                # Check again: the agent can have begun to refuse while this worker was in the queue.
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
            _log.info(
                "the ssh agent refuses some requests if many come at once: opening connections one after the other"
            )

    async def _open_alone(self, host: str) -> None:
        left = _TRIES
        # If the agent refused a single request, do not ask it again for the queued workers.
        while not self._refusal:
            beside = self._beside
            try:
                return await self._open_unless_open(host)
            except Unsigned as exc:
                # Count a refusal only if no other connection of this process asked the agent at the same time.
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
            # If this attempt, without a master, connects, the proxy's failure was temporary: open the master again.
            code, said = await quiet(command, OPEN_LIMIT) if reached == 0 else (code, more or said)
        if code is None:
            waits = "a key may be waiting for a touch or a passphrase"
            raise Unreachable(f"no ssh connection within {OPEN_LIMIT:.0f} s ({waits})", late=True)
        if code:
            kind = Unsigned if openssh.unsigned(said) else Unreachable
            raise kind(openssh.reason(said, code), answered=openssh.refused(said))

    async def _leave_stale_jump(self, begun: float) -> bool:
        """Close the connection to the jump host if the connection is stale, for example after a laptop has slept.

        ssh itself would notice the stale connection only after it has given up the workers behind the jump host.

        Args:
            begun: When a worker behind the jump host stopped answering, in the event loop's time.

        Returns:
            Whether a stale connection was closed after ``begun``.
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
        """Hold a lock, against other processes and other tasks of this process, for the length of a `with` block.

        Args:
            name: Name of the lock: a worker's name to open its master connection, or `_AGENT` to ask the ssh agent.
            limit: Seconds to wait for the lock.
            deadline: The caller's deadline, extended by the time spent waiting.

        Raises:
            Unreachable: The lock was not free within ``limit``.
            OpsError: The lock file cannot be written.
        """
        try:
            self._locks.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(self._locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise OpsError(
                f"cannot write the lock file for opening a connection: {exc.strerror}",
                where=exc.filename or str(self._locks),
                fix=files.TO_WRITE,
            ) from exc
        try:
            until = asyncio.get_running_loop().time() + limit
            with paused(deadline):
                while not files.take(handle):
                    if asyncio.get_running_loop().time() > until:
                        raise Unreachable("another process has been opening a connection to this worker for too long")
                    # Poll: another process holds the lock, so there is no event to wait for.
                    await asyncio.sleep(_POLL)
            yield
        finally:
            os.close(handle)


#: Seconds that an ssh process has to tell a master to exit.
_EXIT_LIMIT = 3.0


def end_left(left: Iterable[tuple[str, str]], *, user: str, mux: Path) -> None:
    """Tell the masters to exit whose connections lead to addresses that their workers no longer have.

    Failures are ignored: a master that cannot be told exits by itself once its keep-alive messages are not answered.

    Args:
        left: Pairs of a former address and the worker's ControlPath.
        user: Login name on the workers.
        mux: The directory of the control sockets.
    """
    left = sorted(set(left))
    # If there is no control socket, start no ssh process. (Only ssh can tell which socket belongs to which address.)
    if not left or not mux.is_dir() or not any(mux.iterdir()):
        return
    commands = [openssh.control_left(control, user, address, "exit") for address, control in left]
    with ThreadPoolExecutor(min(16, len(commands))) as pool:
        list(pool.map(_exit, commands))


def _exit(command: list[str]) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, timeout=_EXIT_LIMIT, capture_output=True, check=False, stdin=subprocess.DEVNULL)
