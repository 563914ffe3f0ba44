"""Runs one command, or sends one request to the launcher, on many workers at once over multiplexed OpenSSH.

A failure of one worker raises no exception: the caller gets a result for every worker.
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
from tpu_ops.ssh.mux import Absent
from tpu_ops.ssh.renewal import Renew, Renewal, paused
from tpu_ops.ssh.replies import SSH_FAILED, Output, Reply, Result, late, reply_of, result_of
from tpu_ops.ssh.silence import Silence
from tpu_ops.ssh.stream import Stream

#: Maximum number of concurrent sessions over one master. OpenSSH's default MaxSessions is 10, and other processes use
#: the master too.
SESSIONS = 6
#: Seconds to wait for a worker's answer before an attended command is started on the worker.
_ANSWERS = 45.0

T = TypeVar("T")


class Fanout:
    """Runs commands and sends requests on many workers of one fleet.

    Args:
            ssh_config: The fleet's OpenSSH configuration, with every worker.
            renew: Asks the API about workers that do not answer and rewrites ``ssh_config``; may be None.
            proxied: Workers that are reached through a proxy.
            find: Returns where the ssh master of a worker listens, so that a session needs no ssh process.
            taken: Returns whether a worker's node was preempted or stopped in the last listing: the API is then asked
                before the worker is tried.
            connects: Returns whether a worker's known address accepts connections, after a short check. The API is
                asked about a silent worker only if the address does not.
            jump: The jump host to the proxied workers; None if they are reached through IAP, or if there are none.
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
        # When a worker last answered a request or got a connection, in the event loop's time.
        self._progress = float("-inf")

    async def run(
        self,
        hosts: Iterable[str],
        argv: Sequence[str],
        *,
        limit: float,
        stdin: bytes | Mapping[str, bytes] = b"",
        done: Callable[[Result], None] | None = None,
    ) -> dict[str, Result]:
        """Run a command on all these workers at once, as the login user.

        Args:
            hosts: The workers.
            argv: The command and its arguments; no shell expands them.
            limit: Time limit in seconds for each worker, including the connection.
            stdin: The command's input: the same for all workers, or by worker.
            done: Called with each result as it arrives.
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
        """Send a request to the launchers of these workers, at once or with a head start for the first worker.

        Args:
            requests: Worker -> the values in its request.
            action: The launcher's action.
            limit: Time limit in seconds for each worker, including the connection but not the first worker's head
                start.
            done: Called with each reply as it arrives.
            head_start: Seconds by which the other workers are asked later than the first, unless the first answers
                sooner.
            quiet: Seconds that the action itself takes, in addition to the time after which a worker counts as silent.
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
        """Send a request that is answered with frames. Leaving the `with` block ends the request on the worker.

        Raises:
            Unreachable: There is no connection to the worker.
            OpsError: This process may not open enough files for the session.
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
    async def attended(
        self, host: str, argv: Sequence[str], *, limit: int = 2**16
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run a command that reads its input, for the length of a `with` block; the caller has to end the command.

        The input is a pipe of the ssh process: any process that inherits it keeps the command alive.

        Args:
            host: The worker.
            argv: The command and its arguments; no shell expands them.
            limit: Maximum size of the output that is read at once, in bytes.

        Raises:
            Unreachable: There is no connection to the worker.
            OpsError: This process may not open enough files for the session.
        """
        with self._room(1):
            # Test the connection first: a stale one, to the worker's former address, is replaced.
            await self.answer(host, limit=_ANSWERS)
            command = openssh.session(self.ssh_config, host, envelope.joined(argv))
            async with self._session(host), processes.started(command, limit=limit) as process:
                yield process

    async def answer(self, host: str, *, limit: float) -> None:
        """Return once a worker has answered over its connection, or after ``limit`` s; replace a stale connection.

        Raises:
            Unreachable: The worker cannot be reached.
        """
        marker = wire.new_marker()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit) as deadline:
                code, said = await self._exchange(host, f"echo {marker}", b"", marker.encode(), deadline)
                if code == SSH_FAILED and marker.encode() not in said.stdout.data:
                    raise Unreachable(openssh.reason(said.stderr.data.decode(errors="replace"), code))

    async def _all(self, hosts: Iterable[str], one: Callable[[str], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """Call ``one`` for all workers concurrently; return the results in the order of the workers.

        The number of sessions is not limited: the ranks of a run wait for each other while their sessions last.
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
        """Return once a master connection to a worker is open. If the worker does not answer, ask the API about it.

        Args:
            host: The worker.
            deadline: The caller's deadline, extended by the time spent asking the API or queueing for a connection.

        Raises:
            Unreachable: No connection could be opened. The text includes what the API said about the worker.
        """
        await self._look_for_taken(host, deadline)
        begun = asyncio.get_running_loop().time()
        try:
            async with self.unless_gone(host, said=False):
                await self.masters.ensure(host, deadline)
                self._note_progress()
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
        """Ask the API about a worker if its node was preempted or stopped in the last listing: ssh would wait in vain.

        Raises:
            Unreachable: The node is still preempted or stopped.
        """
        if self._renewal is None or not self._taken(host):
            return
        with paused(deadline):
            news = await self._renewal.news(host, asyncio.get_running_loop().time())
        self.masters.forget(news.changed)
        # Without a note, the API could not be asked: try the worker.
        if self._taken(host) and (note := news.notes.get(host)):
            raise Unreachable(note, fix=news.fixes.get(host, ""))

    @contextlib.asynccontextmanager
    async def unless_gone(
        self, host: str, quiet: float = 0.0, *, said: bool = True
    ) -> AsyncIterator[Callable[[], None]]:
        """Interrupt a `with` block that waits for a worker's answer if the worker has moved or is gone.

        Yields a function that the block calls once the worker has answered.

        Args:
            host: The worker.
            quiet: Seconds that the request itself takes.
            said: Whether to tell the user that the worker is silent.

        Raises:
            Unreachable: The worker is gone or, as `Moved`, has another address.
            OpsError: The API could not be asked about the worker; the command ends with this error.
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

        timer: asyncio.TimerHandle

        def due() -> None:
            # While other workers answer, this machine is perhaps too busy to hear this worker: do not test it yet.
            nonlocal timer
            if (left := self._progress + silence.LOOK_AFTER - loop.time()) > 0:
                timer = loop.call_later(left, due)
            else:
                looking.append(loop.create_task(look()))

        timer = loop.call_later(silence.LOOK_AFTER + quiet, due)
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
        """Return why a silent worker is no longer at its address; None if the worker is perhaps still at it.

        Args:
            host: The worker.
            begun: When the worker became silent, in the event loop's time.

        Raises:
            OpsError: The API could not be asked about the worker; the command ends with this error.
        """
        if self._renewal is None or self._connects is None or await self._connects(host):
            return None
        news = await self._renewal.news(host, begun)
        self.masters.forget(news.changed)
        if host in news.changed:
            return Moved("the worker has another address now")
        return Unreachable(news.notes[host], fix=news.fixes[host]) if host in news.fixes else None

    def _note_progress(self) -> None:
        self._progress = asyncio.get_running_loop().time()

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
        """Run one command line over the master; a stale master is replaced once. Return ssh's exit code and the output.

        ``said`` receives the output as it arrives. If ``attended``, the input stays open until the command ends
        (`processes.converse`). Once the output contains ``begun``, the command has started and is not started again.
        """
        await self._look_for_taken(host, deadline)
        # Do not check first whether a master is open: usually one is, and the check takes as long as the session.
        session, replaced = openssh.shared_session, False
        said = said or processes.Said(Output(), Output())
        while True:
            words, shared = session(self.ssh_config, host, command), session is openssh.shared_session
            try:
                code = await self._session_once(
                    host, words, said, stdin, begun, attended=attended, quiet=quiet, shared=shared
                )
            except Absent:
                code = SSH_FAILED
            except Moved:
                if replaced:
                    raise
                code = SSH_FAILED
            if code != SSH_FAILED or begun in said.stdout.data:
                self.masters.served(host)
                return code, said
            if shared and openssh.without_room(said.stderr.data.decode(errors="replace")):
                self.masters.forget([host])
            elif replaced:
                return code, said
            else:
                replaced = True
                await self.masters.drop(host)
            session = openssh.session
            # Discard the output so far, which is that of ssh and not of the command.
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
        shared: bool,
    ) -> int | None:
        """Run a command over the open master; return ssh's exit code.

        Raises:
            Unreachable: The worker is gone or has another address.
            Absent: The command line is a `shared_session`, and there is no master.
        """
        async with (
            self._session(host),
            self.unless_gone(host, quiet) as heard,
            processes.session(self._find(host), command, shared=shared) as process,
        ):

            def answered() -> None:
                heard()
                self._note_progress()

            await processes.converse(process, said, stdin, begun, answered, attended=attended)
        return process.returncode


def _spent(limit: float, begun: float, deadline: asyncio.Timeout) -> str:
    """Return a worker's time limit in words, with the waiting time that was added to it.

    Args:
        limit: The limit in seconds.
        begun: When the attempt began, in the event loop's time.
        deadline: The deadline, extended by the waiting time.
    """
    besides = (deadline.when() or begun) - begun - limit
    return f"{limit:g} s" + (
        f", plus {besides:.1f} s in the queue and for the worker's address" if besides > 0.1 else ""
    )


def _all_of(exc: Exception) -> Iterator[Exception]:
    if isinstance(exc, ExceptionGroup):
        for one in exc.exceptions:
            yield from _all_of(one)
    else:
        yield exc


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Replace an exception group of tasks by the first OpsError in it, or if it has none, by the first OSError."""
    try:
        yield
    except ExceptionGroup as group:
        for kind in (OpsError, OSError):
            if found := next((one for one in _all_of(group) if isinstance(one, kind)), None):
                raise found from group
        raise
