"""Locks a directory on the workers: one sync or start at a time, and no sync during a run (`protocol/marks.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from tpu_ops import texts
from tpu_ops.cloud.node import label_of
from tpu_ops.errors import HostError
from tpu_ops.runs import spec, sync
from tpu_ops.ssh import openssh
from tpu_ops.ssh.fanout import Fanout, plain_errors
from tpu_ops.ssh.masters import Unreachable
from tpu_ops.ssh.replies import SSH_FAILED, Result

#: Seconds for a worker to answer, and for the ssh session with the worker to end.
LIMIT, _END_LIMIT = 45.0, 5.0

_log = logging.getLogger(__name__)


class _Holder:
    """The process on one worker that holds the worker's locks."""

    def __init__(self, host: str, process: asyncio.subprocess.Process, token: str) -> None:
        self.host, self._process, self._token = host, process, token

    @property
    def input(self) -> int:
        """The descriptor of the process's standard input; the locks are held until every copy of it is closed."""
        assert self._process.stdin is not None  # noqa: S101 - for the type checker
        return int(self._process.stdin.transport.get_extra_info("pipe").fileno())

    async def ask(self, said: bytes) -> Mapping[str, Any] | Result:
        """Send a line and return the answer, or the result of the ssh session if it ended without an answer."""
        assert self._process.stdin and self._process.stdout and self._process.stderr  # noqa: S101, PT018 - as above
        try:
            async with asyncio.timeout(LIMIT):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._process.stdin.write(said)
                    await self._process.stdin.drain()
                while line := await self._process.stdout.readline():
                    with contextlib.suppress(ValueError):
                        answer = json.loads(line)
                        if isinstance(answer, dict) and answer.get("token") == self._token:
                            return answer
                errors = await self._process.stderr.read()
                code = await self._process.wait()
        except TimeoutError:
            return Result(self.host, None, problem=f"no answer within {LIMIT:g} s", reached=False)
        if code == SSH_FAILED:
            why = openssh.reason(errors.decode(errors="replace"), code)
            return Result(self.host, None, problem=why, reached=False)
        return Result(self.host, code, stderr=errors)

    async def end(self) -> None:
        """Release the worker's locks, even if another process still has a copy of the descriptor."""
        assert self._process.stdin is not None  # noqa: S101 - as above
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_END_LIMIT):
                self._process.stdin.write(b"end\n")
                self._process.stdin.close()
                await self._process.wait()


class Turn:
    """A lock on a directory of some workers: while it is held, no other sync or start uses the directory.

    Args:
        name: The name of the directory below ~/tpu_ops.
        force: Whether files are replaced even if a run uses them.
    """

    def __init__(self, name: str, *, force: bool = False) -> None:
        self._name, self._force = name, force
        self._facts: dict[str, Any] = {"who": spec.here(), "since": time.time(), "token": os.urandom(8).hex()}
        self._holders: list[_Holder] = []

    @property
    def held(self) -> list[int]:
        """Descriptors of the locks. A process that inherits them keeps the locks even if this process is killed."""
        return [holder.input for holder in self._holders]

    @contextlib.asynccontextmanager
    async def claimed(self) -> AsyncIterator[None]:
        """During the block, exclude runs that use the directory as well.

        Raises:
            HostError: A run uses the directory, and `force` is not set.
            UnreachableError: A worker did not answer.
        """
        if used := await self._all(b"claim\n"):
            what, run_id = _use(used), next(iter(used.values())).get("run_id")
            if not self._force:
                ends = f"end the run with `tpu_ops stop {run_id}`, " if run_id else ""
                fix = (
                    f"wait until the run has ended, {ends}or copy a directory of another name; "
                    "`tpu_ops sync --force` overrides this"
                )
                raise HostError(f"{what} ~/{sync.PARENT}/{self._name}", where=texts.folded(list(used)), fix=fix)
            where = texts.folded(list(used))
            _log.warning("%s: %s ~/%s/%s: its files are replaced during the run", where, what, sync.PARENT, self._name)
        yield
        # If the block raises an exception, `end` releases this lock.
        await self._all(b"free\n")

    async def _all(self, said: bytes) -> dict[str, Mapping[str, Any]]:
        answers = await asyncio.gather(*(holder.ask(said) for holder in self._holders))
        return _busy({holder.host: answer for holder, answer in zip(self._holders, answers, strict=True)})

    async def end(self) -> None:
        """Release all locks."""
        await asyncio.gather(*(holder.end() for holder in self._holders))

    async def take(self, fanout: Fanout, hosts: Sequence[str], stack: contextlib.AsyncExitStack) -> None:
        """Lock the directory on some workers at the same time, until the stack is closed.

        Raises:
            HostError: Another command holds the lock.
            UnreachableError: A worker did not answer.
        """
        with plain_errors():
            async with asyncio.TaskGroup() as group:
                tasks = {host: group.create_task(self._take(fanout, host, stack)) for host in hosts}
        if busy := _busy({host: task.result() for host, task in tasks.items()}):
            raise HostError(
                f"another command is copying {self._name} there, or starting a run with it: {_command(busy)}",
                where=texts.folded(list(busy)),
                fix="wait until that command has ended, or end its process if its machine is gone; then run this again",
            )

    async def _take(self, fanout: Fanout, host: str, stack: contextlib.AsyncExitStack) -> Mapping[str, Any] | Result:
        try:
            process = await stack.enter_async_context(fanout.attended(host, sync.RUN))
        except Unreachable as exc:
            return Result(host, None, problem=str(exc), reached=False)
        holder = _Holder(host, process, self._facts["token"])
        self._holders.append(holder)
        return await holder.ask(sync.request_of({"action": "hold", "name": self._name, "facts": self._facts}))


@contextlib.asynccontextmanager
async def alone(fanout: Fanout, hosts: Sequence[str], name: str, *, force: bool = False) -> AsyncIterator[Turn]:
    """During the block, no other command can copy this directory to the workers or start a run with it.

    Args:
        fanout: Reaches the workers.
        hosts: The workers.
        name: The name of the directory.
        force: Whether files are replaced even if a run uses them.

    Raises:
        HostError: Another command holds the lock; the message names that command.
        UnreachableError: A worker did not answer.
    """
    turn, nodes = Turn(name, force=force), dict[str, str]()
    for host in sorted(hosts, key=texts.natural):
        nodes.setdefault(label_of(host), host)
    async with contextlib.AsyncExitStack() as stack:
        try:
            # The first worker of each node is locked first, in the same order by all commands. So of two commands,
            # exactly one gets every lock.
            for first in nodes.values():
                await turn.take(fanout, [first], stack)
            await turn.take(fanout, [host for host in hosts if host not in nodes.values()], stack)
            yield turn
        finally:
            await turn.end()


def _busy(answers: Mapping[str, Mapping[str, Any] | Result]) -> dict[str, Mapping[str, Any]]:
    """Return the holder of each lock that is taken, by worker, given the workers' answers.

    Raises:
        HostError: A worker gave no answer.
        UnreachableError: A worker could not be reached.
    """
    ended: dict[str, Result] = {}
    busy: dict[str, Mapping[str, Any]] = {}
    for host, answer in answers.items():
        if isinstance(answer, Result):
            ended[host] = answer
        elif "busy" in answer:
            busy[host] = answer["busy"]
    sync.require(ended)
    if ended:
        raise sync.unanswered(list(ended))
    return busy


def _command(busy: Mapping[str, Mapping[str, Any]]) -> str:
    """Return words for the first command that holds a lock, given the holders by worker."""
    host, facts = next(iter(busy.items()))
    return f"{facts.get('who', 'somebody')}{_since(facts)} (pid {facts.get('pid', 'unknown')} on {host})"


def _use(used: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the subject and verb of a sentence on the first run that uses a directory, given the runs by worker."""
    facts = next(iter(used.values()))
    return f"run {facts['run_id']} of {facts.get('person')} uses" if facts.get("run_id") else "a run uses"


def _since(facts: Mapping[str, Any]) -> str:
    began = facts.get("since")
    return time.strftime(" since %H:%M UTC", time.gmtime(began)) if isinstance(began, (int, float)) else ""
