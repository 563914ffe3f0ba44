"""Opens and ends master connections: one at a time for each worker, over all processes of this machine."""

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
from tpu_ops.ssh.mux import Master, Unavailable
from tpu_ops.ssh.processes import CONTROL_LIMIT, quiet
from tpu_ops.ssh.renewal import paused

#: Seconds within which a master must be authenticated; ConnectTimeout covers the TCP connection alone.
OPEN_LIMIT = 25.0
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


#: Seconds that one ssh may take to tell its master.
_EXIT_LIMIT = 3.0


def end_left(left: Iterable[tuple[str, str]], *, user: str, mux: Path) -> None:
    """Tell the masters of workers at addresses that they left to exit, as far as there are any.

    Failures are passed over: a master that cannot be told ends by itself when its keep-alive is not answered.

    Args:
        left: Addresses, each with the worker's ControlPath.
        user: Login name on the workers.
        mux: The directory of the control sockets.
    """
    left = sorted(set(left))
    # A socket's name is a digest, so that ssh itself has to look for it; none at all is seen at once.
    if not left or not mux.is_dir() or not any(mux.iterdir()):
        return
    commands = [openssh.control_left(control, user, address, "exit") for address, control in left]
    with ThreadPoolExecutor(min(16, len(commands))) as pool:
        list(pool.map(_exit, commands))


def _exit(command: list[str]) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, timeout=_EXIT_LIMIT, capture_output=True, check=False, stdin=subprocess.DEVNULL)
