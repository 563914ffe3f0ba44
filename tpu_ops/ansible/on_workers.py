"""Have each worker run a playbook on itself: send what it lacks, and read its steps as they happen.

A playbook that runs on the controller takes a tenth of a second for each task and worker. Here, the controller only
passes lines on, so that the time hardly depends on the number of workers. The parts:

    controller: on_workers ---- ssh ---- worker: receiver, which becomes worker_play, which runs ansible-playbook
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tpu_ops import texts
from tpu_ops.ansible import archives, receiver
from tpu_ops.ansible.archives import Archive
from tpu_ops.ansible.playbook import At, Outcome, Said, Step
from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet
from tpu_ops.ssh.fanout import plain_errors
from tpu_ops.ssh.masters import Unreachable
from tpu_ops.ssh.replies import SSH_FAILED

#: Directory of the archives on workers: programs only, no variables of a fleet.
ARCHIVES = "/var/lib/tpu_ops/ansible"
#: Maximum size of a line from a worker in bytes. A line holds one step's messages, or the values of an exchange.
_LINE = 2**24
#: At most this much of the end of a worker's error output is shown, in bytes.
_ERRORS = 4000
#: Exit codes of ansible-playbook: tasks failed, or hosts were unreachable.
_FAILED, _UNREACHABLE = 2, 4
#: Name of the failed step that is shown for a worker whose playbook did not run to its end.
_WHOLE = "Run the playbook on the worker"


class Unsuitable(Exception):
    """Workers cannot run the playbook on themselves; nothing was changed.

    Attributes:
        why: Worker -> the reason.
    """

    def __init__(self, why: Mapping[str, str]) -> None:
        super().__init__(why)
        self.why = why


@dataclasses.dataclass(frozen=True)
class Order:
    """What one worker runs.

    Attributes:
        playbook: Name of the playbook, as for `Project.playbook`.
        options: Options of ansible-playbook.
        inventories: Texts of the YAML inventories of this worker alone.
        extras: Texts of YAML files of extra variables.
    """

    playbook: str
    options: Sequence[str]
    inventories: Sequence[str]
    extras: Sequence[str]


def run(
    fleet: Fleet,
    orders: Mapping[str, Order],
    sent: Sequence[Archive],
    told: Callable[[Step | Said], None] = lambda _: None,
    at: At = lambda *_: None,
) -> Outcome:
    """Run a playbook on each worker by itself; return the outcome of all together.

    Args:
        fleet: The fleet of the workers.
        orders: Worker -> what it runs.
        sent: The archives of Ansible and of the project, in this order.
        told: Called with the steps and messages of all workers, in the order of the tasks.
        at: Called when a worker has ended a task, whichever tasks the others are at.

    Raises:
        Unsuitable: Workers have no Python that is new enough; nothing was changed.
        OpsError: This process may not open enough files for all workers.
    """
    return asyncio.run(Play(contact.fanout(fleet), orders, sent, told, at).run())


class Connections(Protocol):
    """Starts programs on workers; a `Fanout` does it through ssh."""

    def attended(
        self, host: str, argv: Sequence[str], *, limit: int
    ) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
        """Run a command on a worker, as `Fanout.attended` does."""


class Play:
    """One playbook on many workers. The arguments are those of `run`, with connections in place of the fleet."""

    def __init__(
        self,
        connections: Connections,
        orders: Mapping[str, Order],
        sent: Sequence[Archive],
        told: Callable[[Step | Said], None],
        at: At = lambda *_: None,
    ) -> None:
        self._connections, self._orders, self._sent, self._told, self._at = connections, orders, sent, told, at
        self._oldest = archives.oldest_python()
        self._exchange = Exchange(orders)
        self._steps = InOrder(orders, told)
        self._outcomes: dict[str, Outcome] = {}
        #: Worker -> the version of its newest Python, if that is too old. Complete once `_all_answered` is set.
        self._old: dict[str, str] = {}
        self._unanswered, self._all_answered = set(orders), asyncio.Event()
        self._shown: set[str] = set()

    async def run(self) -> Outcome:
        """Return the outcome of all workers together; raise the errors of `run`."""
        with plain_errors():
            async with asyncio.TaskGroup() as group:
                for host in self._orders:
                    group.create_task(self._one(host))
        if self._old:
            needed = f"and Ansible needs {self._oldest} there"
            raise Unsuitable({host: f"its newest Python is {found}, {needed}" for host, found in self._old.items()})
        return merged(self._outcomes)

    async def _one(self, host: str) -> None:
        """Run the playbook on one worker. A worker that is lost costs only itself."""
        try:
            outcome = await self._played(host)
        except Unreachable as exc:
            outcome = _unfinished(host, "unreachable", str(exc))
        self._outcomes[host] = outcome
        for step in outcome.failures:
            if step.task == _WHOLE:
                self._steps.add(step)
        self._answered(host)
        await self._exchange.leave(host)
        self._steps.leave(host)

    def _answered(self, host: str) -> None:
        """Note that a worker's Python is known, or that the worker is lost."""
        self._unanswered.discard(host)
        if not self._unanswered:
            self._all_answered.set()

    async def _played(self, host: str) -> Outcome:
        """Start the receiver on a worker, send what the worker lacks, and take its lines until the outcome.

        Raises:
            Unreachable: The connection was lost.
        """
        source = inspect.getsource(receiver)
        digests = [archive.digest for archive in self._sent]
        argv = ["sudo", "-n", "python3", "-I", "-c", source, ARCHIVES, self._oldest, *digests]
        async with self._connections.attended(host, argv, limit=_LINE) as process:
            assert process.stdin and process.stdout and process.stderr  # noqa: S101, PT018 - for the type checker
            errors = asyncio.create_task(_end_of(process.stderr))
            answer = await _first(process.stdout)
            if answer and not answer["python"]:
                self._old[host] = answer["found"]
            self._answered(host)
            # No worker changes anything before all are known to have a suitable Python.
            await self._all_answered.wait()
            if self._old:
                return Outcome()
            # If the input is closed, the error output or the exit code tells the cause.
            with contextlib.suppress(ConnectionError):
                if answer:
                    await self._send(host, answer["missing"], process.stdin)
                # A line without its end is the last one of a connection that was lost.
                while (line := await process.stdout.readline()).endswith(b"\n"):
                    ((kind, content),) = json.loads(line).items()
                    if kind == "outcome":
                        return Outcome(**content | {"failures": [_step(each) for each in content["failures"]]})
                    await self._take(host, kind, content, process.stdin)
            said = (await errors).strip()
            if await process.wait() == SSH_FAILED:
                raise Unreachable(said or "the connection ended before the end of the playbook")
            return _unfinished(host, "failed", said or "its program ended without a message")

    async def _send(self, host: str, missing: Sequence[str], stdin: asyncio.StreamWriter) -> None:
        """Send the missing archives, given their digests, and the worker's order."""
        needed = [archive.data for archive in self._sent if archive.digest in missing]
        sizes = " ".join(str(len(data)) for data in needed).encode()
        order = json.dumps(dataclasses.asdict(self._orders[host])).encode()
        for data in (sizes, b"\n", *needed, order, b"\n"):
            stdin.write(data)
            await stdin.drain()

    async def _take(self, host: str, kind: str, content: Any, stdin: asyncio.StreamWriter) -> None:
        if kind == "step":
            step = _step(content)
            self._at(host, step.title, True)
            self._steps.add(step)
        elif kind == "exchange":
            stdin.write((await self._exchange.give(host, content)).encode() + b"\n")
            await stdin.drain()
        elif (text := content["text"]) not in self._shown:
            # Ansible prints the same text on every worker.
            self._shown.add(text)
            self._told(Said(text))


def _unfinished(host: str, kind: str, message: str) -> Outcome:
    """Return the outcome of a worker that has not run the playbook to its end.

    Args:
        host: The worker.
        kind: ``failed`` or ``unreachable``.
        message: The reason.
    """
    counts = dict.fromkeys(("ok", "changed", "failed", "unreachable", "skipped", "rescued"), 0) | {kind: 1}
    code = _UNREACHABLE if kind == "unreachable" else _FAILED
    return Outcome(hosts={host: counts}, failures=[Step(_WHOLE, "", host, kind, message)], code=code)


def _step(content: Mapping[str, Any]) -> Step:
    """Return a step that a worker has written."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    return Step(**values)


async def _first(stdout: asyncio.StreamReader) -> Mapping[str, Any] | None:
    """Return the receiver's first line; None if it did not start. Lines of login scripts may come before it."""
    while line := await stdout.readline():
        if line.startswith(b'{"tpu_ops": '):
            found: Mapping[str, Any] = json.loads(line)
            return found
    return None


async def _end_of(stream: asyncio.StreamReader) -> str:
    """Return the end of an output."""
    kept = b""
    while data := await stream.read(_ERRORS):
        kept = (kept + data)[-_ERRORS:]
    return kept.decode(errors="replace")


class Exchange:
    """Passes values between workers: each waits until all others have given theirs, or have left.

    Args:
        hosts: The workers.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        #: Worker -> number of exchanges in which it has given values.
        self._turns = dict.fromkeys(hosts, 0)
        #: Number of an exchange -> values as JSON -> the workers that have given them.
        self._given: dict[int, dict[str, list[str]]] = {}
        #: Number of an exchange -> its answer. All get the same one, also if workers leave meanwhile.
        self._answers: dict[int, str] = {}
        self._news = asyncio.Condition()

    async def give(self, host: str, values: Mapping[str, Any]) -> str:
        """Give a worker's values; return the answer once all have given theirs: JSON, pairs of values and workers."""
        async with self._news:
            turn = self._turns[host] = self._turns[host] + 1
            self._given.setdefault(turn, {}).setdefault(json.dumps(values, sort_keys=True), []).append(host)
            self._news.notify_all()
            await self._news.wait_for(lambda: min(self._turns.values()) >= turn)
            if turn not in self._answers:
                # Workers that have left since they gave their values are no longer part of the play.
                given = {
                    text: [one for one in hosts if one in self._turns] for text, hosts in self._given[turn].items()
                }
                pairs = [f"[{text}, {json.dumps(hosts)}]" for text, hosts in given.items() if hosts]
                self._answers[turn] = f"[{', '.join(pairs)}]"
            return self._answers[turn]

    async def leave(self, host: str) -> None:
        """Wait for this worker no longer."""
        async with self._news:
            self._turns.pop(host, None)
            self._news.notify_all()


class InOrder:
    """Passes the steps of workers on task by task, although some workers are faster than others.

    Args:
        hosts: The workers.
        told: Called with each step: all steps of a task before those of the next one.
    """

    def __init__(self, hosts: Iterable[str], told: Callable[[Step | Said], None]) -> None:
        self._told = told
        #: Worker and title -> number of its tasks of this title so far. Titles of tasks can be equal.
        self._times: dict[tuple[str, str], int] = {}
        #: Task, as its title and which one of this title it is -> its number, in the order of the tasks' first steps.
        self._numbers: dict[tuple[str, int], int] = {}
        #: Task -> its steps, for the tasks that were not passed on, in the order of their numbers.
        self._tasks: dict[tuple[str, int], list[Step]] = {}
        #: The number of the first task that was not passed on.
        self._first = 0
        #: Worker -> the largest number of its tasks.
        self._at = dict.fromkeys(hosts, -1)

    def add(self, step: Step) -> None:
        """Take a worker's next step."""
        times = self._times[step.host, step.title] = self._times.get((step.host, step.title), 0) + 1
        key = (step.title, times)
        number = self._numbers.setdefault(key, len(self._numbers))
        if number < self._first:
            self._told(step)  # the others have passed this task
            return
        self._tasks.setdefault(key, []).append(step)
        self._at[step.host] = max(self._at.get(step.host, -1), number)
        self._pass_on()

    def leave(self, host: str) -> None:
        """Wait for this worker no longer."""
        self._at.pop(host, None)
        self._pass_on()

    def _pass_on(self) -> None:
        while self._tasks and self._first <= min(self._at.values(), default=len(self._numbers)):
            for step in self._tasks.pop(next(iter(self._tasks))):
                self._told(step)
            self._first += 1


def merged(outcomes: Mapping[str, Outcome]) -> Outcome:
    """Return one outcome for those of the workers, whose set_stats data are lists."""
    hosts = {host: counts for outcome in outcomes.values() for host, counts in outcome.hosts.items()}
    data: dict[str, Any] = {}
    for outcome in outcomes.values():
        for name, values in outcome.data.items():
            data[name] = [*data.get(name, []), *values]
    return Outcome(
        hosts={host: hosts[host] for host in sorted(hosts, key=texts.natural)},
        failures=[step for outcome in outcomes.values() for step in outcome.failures],
        code=max((outcome.code or 0 for outcome in outcomes.values()), default=0),
        data=data,
        said=list(dict.fromkeys(text for outcome in outcomes.values() for text in outcome.said)),
    )
