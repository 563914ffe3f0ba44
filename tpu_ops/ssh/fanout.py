"""One command, or one request to the host program, on many workers at once over multiplexed OpenSSH.

Nothing here raises for a worker that fails: every worker has its own result, and the caller sees all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tpu_ops.errors import OpsError
from tpu_ops.protocol import wire
from tpu_ops.ssh import envelope, masters, openssh, processes, room, silence
from tpu_ops.ssh.masters import Moved, Unreachable
from tpu_ops.ssh.renewal import Renew, Renewal, paused
from tpu_ops.ssh.replies import SSH_FAILED, Output, Reply, Result, late, reply_of, result_of
from tpu_ops.ssh.silence import Silence
from tpu_ops.ssh.stream import Stream

#: Sessions at once over one master: OpenSSH's default MaxSessions is 10, and others use the master too.
SESSIONS = 6
#: Seconds for a worker to answer before a command that reads its input begins there.
_ANSWERS = 45.0

T = TypeVar("T")


class Fanout:
    """Reaches the workers of one fleet.

    Args:
        ssh_config: The fleet's OpenSSH configuration, which names every worker.
        renew: Looks for workers that do not answer and rewrites this configuration in its place; may be None.
        proxied: Workers that are reached through a proxy.
        find: Says where the master of a worker listens, as this configuration has it, so that no ssh is needed to use
            it.
        taken: Whether the node of a worker was taken away when it was seen last: then it is looked for before it is
            tried.
        connects: Whether a worker can be connected to where it was seen last, as far as that can be found out in a
            moment: a silent one is looked for only where it cannot.
        jump: Through which the proxied are reached, where it is ssh that leads to them.
    """

    def __init__(
        self,
        ssh_config: Path,
        renew: Renew | None = None,
        proxied: Collection[str] = (),
        find: masters.FindMaster = lambda host: None,
        *,
        taken: Callable[[str], bool] = lambda host: False,
        connects: Callable[[str], Coroutine[Any, Any, bool]] | None = None,
        jump: openssh.Jump | None = None,
    ) -> None:
        self.ssh_config = ssh_config
        self.masters = masters.Masters(ssh_config, proxied, find, jump)
        self._find, self._taken, self._connects = find, taken, connects
        self._renewal = Renewal(renew) if renew else None
        self._silence = Silence()
        self._sessions: dict[str, asyncio.Semaphore] = {}
        self._wanted = 0

    async def run(
        self,
        hosts: Iterable[str],
        argv: Sequence[str],
        *,
        limit: float,
        stdin: bytes | Mapping[str, bytes] = b"",
        done: Callable[[Result], None] | None = None,
    ) -> dict[str, Result]:
        """Run a command on all these workers at once, as the person who logs in.

        Args:
            hosts: The workers.
            argv: The command; every word arrives as it is.
            limit: Seconds for each worker, its connection included.
            stdin: What the command reads, for all workers or for each.
            done: Called with each result as it comes.
        """

        async def one(host: str) -> Result:
            data = stdin if isinstance(stdin, bytes) else stdin.get(host, b"")
            result = await self._run(host, argv, data, limit)
            if done:
                done(result)
            return result

        return await self._all(hosts, one)

    async def call(
        self,
        requests: Mapping[str, Mapping[str, Any]],
        action: str,
        *,
        limit: float,
        done: Callable[[Reply], None] | None = None,
        head_start: float = 0.0,
        quiet: float = 0.0,
    ) -> dict[str, Reply]:
        """Send a request to the host program of each of these workers, at once or after the first.

        Args:
            requests: Values of the request by worker.
            action: What the host program is to do.
            limit: Seconds for each worker, its connection included; a head start of another comes before them.
            done: Called with each reply as it comes.
            head_start: Seconds by which the first worker is asked before the others, unless it answers sooner.
            quiet: Seconds that the action takes by itself: only who is silent for longer is said to be waited for.
        """
        leader, answered = next(iter(requests), ""), asyncio.Event()

        async def one(host: str) -> Reply:
            if head_start and host != leader:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(head_start):
                        await answered.wait()
            reply = await self._call(host, action, requests[host], limit, quiet)
            if host == leader:
                answered.set()
            if done:
                done(reply)
            return reply

        return await self._all(requests, one)

    @contextlib.asynccontextmanager
    async def stream(self, host: str, action: str, values: Mapping[str, Any]) -> AsyncIterator[Stream]:
        """Open a request that is answered with frames; it ends on the worker when the block is left.

        Raises:
            Unreachable: There is no connection to the worker.
            OpsError: This process may not have that many sessions.
        """
        with self._room(1):
            await self.reach(host)
            command = openssh.session(self.ssh_config, host, wire.COMMAND)
            async with self._session(host), contextlib.AsyncExitStack() as stack:
                async with self.unless_gone(host):
                    session = processes.session(self._find(host), command, limit=wire.MAX_FRAME)
                    process = await stack.enter_async_context(session)
                marker = wire.new_marker()
                assert process.stdin is not None  # noqa: S101 - for the type checker
                process.stdin.write(wire.request(marker, action, values))
                yield Stream(host, process, marker, self.unless_gone)

    @contextlib.asynccontextmanager
    async def attended(self, host: str, argv: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run a command that reads its input for as long as the block lasts; its end is left to the caller.

        Its input is a pipe of ssh's process, so that another process that is given it keeps the command there.

        Raises:
            Unreachable: There is no connection to the worker.
            OpsError: This process may not have that many sessions.
        """
        with self._room(1):
            # A connection that leads to where the worker was is replaced first.
            await self.answer(host, limit=_ANSWERS)
            command = openssh.session(self.ssh_config, host, envelope.joined(argv))
            async with self._session(host), processes.started(command) as process:
                yield process

    async def answer(self, host: str, *, limit: float) -> None:
        """Return once a worker has answered over its connection, or the time is over; a stale connection is replaced.

        Raises:
            Unreachable: It cannot be reached.
        """
        marker = wire.new_marker()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit) as deadline:
                code, said = await self._exchange(host, f"echo {marker}", b"", marker.encode(), deadline)
                if code == SSH_FAILED and marker.encode() not in said.stdout.data:
                    raise Unreachable(openssh.reason(said.stderr.data.decode(errors="replace"), code))

    async def _all(self, hosts: Iterable[str], one: Callable[[str], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """Do something for every worker at once; keep the order of the workers.

        All sessions are there together, however many: the ranks of a run wait for each other while theirs last.
        """
        names = list(hosts)
        with self._room(len(names)), plain_errors():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(host)) for host in names]
        return {host: task.result() for host, task in zip(names, tasks, strict=True)}

    @contextlib.contextmanager
    def _room(self, sessions: int) -> Iterator[None]:
        self._wanted += sessions
        try:
            room.make(self._wanted)
            yield
        finally:
            self._wanted -= sessions

    # --- one worker -----------------------------------------------------------------------------------------

    async def reach(self, host: str, deadline: asyncio.Timeout | None = None) -> None:
        """Return once a master connection to a worker is open; look for it anew where it does not answer.

        Args:
            host: The worker.
            deadline: Of the caller; the time that looking for the worker takes, or waiting for one's turn to connect,
                does not count.

        Raises:
            Unreachable: It could not be opened; the text says, too, what became of the worker.
        """
        await self._look_for_taken(host, deadline)
        begun = asyncio.get_running_loop().time()
        try:
            async with self.unless_gone(host, said=False):
                await self.masters.ensure(host, deadline)
        except Unreachable as exc:
            if self._renewal is None or exc.answered:
                raise
            problem = exc
        else:
            return
        with paused(deadline):
            news = await self._renewal.news(host, begun)
        self.masters.forget(news.changed)
        if host in news.changed:
            try:
                await self.masters.ensure(host, deadline)
            except Unreachable as exc:
                problem = exc
            else:
                return
        note = news.notes.get(host)
        text = f"{problem}; {note}" if note and note != str(problem) else str(problem)
        raise Unreachable(text, answered=problem.answered, late=problem.late, fix=news.fixes.get(host, ""))

    async def _look_for_taken(self, host: str, deadline: asyncio.Timeout | None) -> None:
        """Look anew for a worker whose node was taken away when it was seen last: ssh would wait for it in vain.

        Raises:
            Unreachable: It still is.
        """
        if self._renewal is None or not self._taken(host):
            return
        with paused(deadline):
            news = await self._renewal.news(host, asyncio.get_running_loop().time())
        self.masters.forget(news.changed)
        # Where nobody could be asked, there is no note.
        if self._taken(host) and (note := news.notes.get(host)):
            raise Unreachable(note, fix=news.fixes.get(host, ""))

    @contextlib.asynccontextmanager
    async def unless_gone(
        self, host: str, quiet: float = 0.0, *, said: bool = True
    ) -> AsyncIterator[Callable[[], None]]:
        """Wait in a block for a worker; leave it where the worker is silent and turns out to be elsewhere, or away.

        Yields what is to be called once it has answered.

        Args:
            host: The worker.
            quiet: Seconds that what it was asked for takes by itself.
            said: Whether it is said that it is silent.

        Raises:
            Unreachable: It is away, or, as `Moved`, elsewhere.
            OpsError: What became of it cannot be found out, and the command ends with that.
        """
        loop = asyncio.get_running_loop()
        begun, looking, found = loop.time(), list[asyncio.Task[None]](), list[Exception]()

        async def look() -> None:
            what: Exception | None
            try:
                what = await self.gone(host, begun)
            except OpsError as exc:
                what = exc
            if what:
                found.append(what)
                patience.reschedule(loop.time())

        def heard() -> None:
            timer.cancel()
            for task in looking:
                task.cancel()
            if said:
                no_longer_silent()

        timer = loop.call_later(silence.LOOK_AFTER + quiet, lambda: looking.append(loop.create_task(look())))
        with self._silence.watch(host, quiet) if said else contextlib.nullcontext(lambda: None) as no_longer_silent:
            try:
                async with asyncio.timeout(None) as patience:
                    yield heard
            except TimeoutError:
                if not patience.expired():
                    raise
                raise found[0] from None
            finally:
                heard()

    async def gone(self, host: str, begun: float) -> Unreachable | None:
        """Return what became of a silent worker that is no longer where it was; None where it may be there.

        Args:
            host: The worker.
            begun: Since when it is silent, in the loop's time.

        Raises:
            OpsError: That cannot be found out, and the command ends with it.
        """
        if self._renewal is None or self._connects is None or await self._connects(host):
            return None
        news = await self._renewal.news(host, begun)
        self.masters.forget(news.changed)
        if host in news.changed:
            return Moved("it has another address now")
        return Unreachable(news.notes[host], fix=news.fixes[host]) if host in news.fixes else None

    def _session(self, host: str) -> asyncio.Semaphore:
        return self._sessions.setdefault(host, asyncio.Semaphore(SESSIONS))

    async def _run(self, host: str, argv: Sequence[str], stdin: bytes, limit: float) -> Result:
        marker = wire.new_marker()
        command = envelope.enveloped(marker, argv, limit)
        begun, said = asyncio.get_running_loop().time(), processes.Said(Output(marker), Output())
        try:
            async with asyncio.timeout_at(begun + limit) as deadline:
                code, _ = await self._exchange(host, command, stdin, wire.beginning(marker), deadline, said=said)
        except Unreachable as exc:
            return Result(host, None, problem=str(exc), reached=False)
        except TimeoutError:
            found = result_of(host, marker, SSH_FAILED, said.stdout, said.stderr)
            started = wire.beginning(marker) in said.stdout.data
            return late(found, _spent(limit, begun, deadline), begun=started)
        return result_of(host, marker, code, said.stdout, said.stderr)

    async def _call(self, host: str, action: str, values: Mapping[str, Any], limit: float, quiet: float) -> Reply:
        marker = wire.new_marker()
        begun = asyncio.get_running_loop().time()
        line, first = wire.request(marker, action, values), wire.beginning(marker)
        try:
            async with asyncio.timeout_at(begun + limit) as deadline:
                code, said = await self._exchange(host, wire.COMMAND, line, first, deadline, attended=True, quiet=quiet)
        except Unreachable as exc:
            return Reply(host, {}, "unreachable", str(exc), exc.fix)
        except TimeoutError:
            return Reply(host, {}, "timeout", f"the launcher did not answer within {_spent(limit, begun, deadline)}")
        return reply_of(
            host, wire.find_answer(said.stdout.data, marker), said.stderr.data.decode(errors="replace"), code
        )

    async def _exchange(
        self,
        host: str,
        command: str,
        stdin: bytes,
        begun: bytes,
        deadline: asyncio.Timeout,
        *,
        attended: bool = False,
        quiet: float = 0.0,
        said: processes.Said | None = None,
    ) -> tuple[int | None, processes.Said]:
        """Run one command line over the master; a master that turns out to be stale is replaced once.

        What it prints is in `said` as it comes. Returns ssh's exit code, and what was printed.

        Its input stays open until it has ended where it is `attended`, see `ssh.converse`.
        `begun` in the output proves that the command was started: what was started is never started again.
        """
        await self._look_for_taken(host, deadline)
        # Most often a master is open, and to ask for it first would cost as much as the session itself.
        session, replaced = openssh.shared_session, False
        said = said or processes.Said(Output(), Output())
        while True:
            words = session(self.ssh_config, host, command)
            try:
                code = await self._session_once(host, words, said, stdin, begun, attended=attended, quiet=quiet)
            except Moved:
                if replaced:
                    raise
                code = SSH_FAILED
            if code != SSH_FAILED or begun in said.stdout.data:
                self.masters.served(host)
                return code, said
            if session is openssh.shared_session and openssh.without_room(said.stderr.data.decode(errors="replace")):
                self.masters.forget([host])
            elif replaced:
                return code, said
            else:
                replaced = True
                await self.masters.drop(host)
            session = openssh.session
            # What ssh said of itself is not the command's.
            said.stdout.data.clear()
            said.stderr.data.clear()
            await self.reach(host, deadline)

    async def _session_once(
        self,
        host: str,
        command: Sequence[str],
        said: processes.Said,
        stdin: bytes,
        begun: bytes,
        *,
        attended: bool,
        quiet: float,
    ) -> int | None:
        """Run it over the master that there is; return ssh's exit code.

        Raises:
            Unreachable: As `unless_gone`.
        """
        async with (
            self._session(host),
            self.unless_gone(host, quiet) as heard,
            processes.session(self._find(host), command) as process,
        ):
            await processes.converse(process, said, stdin, begun, heard, attended=attended)
        return process.returncode


def _spent(limit: float, begun: float, deadline: asyncio.Timeout) -> str:
    """Return how long a worker had, and for how long it waited besides, which does not count.

    Args:
        limit: Seconds that it had.
        begun: When they began, in the loop's time.
        deadline: When they were over.
    """
    besides = (deadline.when() or begun) - begun - limit
    return f"{limit:g} s" + (f", plus {besides:.1f} s for its turn and its address" if besides > 0.1 else "")


def _all_of(exc: Exception) -> Iterator[Exception]:
    if isinstance(exc, ExceptionGroup):
        for one in exc.exceptions:
            yield from _all_of(one)
    else:
        yield exc


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the first error for people, or else of the system, that a group of tasks ended with, and not the group."""
    try:
        yield
    except ExceptionGroup as group:
        for kind in (OpsError, OSError):
            if found := next((one for one in _all_of(group) if isinstance(one, kind)), None):
                raise found from group
        raise
