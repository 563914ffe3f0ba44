"""Follows all ranks of a run to their end: prints the lines of some, and ends the others when one fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpu_ops.remote import wire
from tpu_ops.remote.fanout import Fanout, plain_errors
from tpu_ops.remote.replies import Reply
from tpu_ops.remote.ssh import Unreachable
from tpu_ops.remote.stream import Broken
from tpu_ops.runs.lines import Lines

#: Seconds between two attempts to reach a worker again, and after which it is given up.
RETRY_EVERY = 2.0
RETRY_LIMIT = 120.0
#: A connection that held this long makes the next break a new one, in seconds.
HELD = 30.0
#: Seconds that the other ranks get to end by themselves when one has failed.
SETTLE = 0.5
#: Seconds beyond the grace that ending ranks may take.
STOP_MARGIN = 60.0


@dataclass(frozen=True)
class Outcome:
    """How one rank ended, as far as it is known.

    Attributes:
        rank: The rank.
        host: Its worker.
        state: ``succeeded``, ``failed``, ``stopped``, ``lost``, ``refused``; ``running`` where it was not waited for,
            ``unknown`` where contact was lost.
        exit: ``{"code": n}``, ``{"signal": n}`` or None.
        reason: Why, for people.
        intent: Why it was ended, as the worker recorded it: ``stop``, ``failed``, ``shutdown``; empty where it was not.
        tail: The last lines of its log.
        record: The worker's record.
    """

    rank: int
    host: str
    state: str
    exit: Mapping[str, int] | None = None
    reason: str = ""
    intent: str = ""
    tail: str = ""
    record: Mapping[str, Any] | None = None

    @property
    def is_cause(self) -> bool:
        """Whether this end is a failure of its own, and not what somebody did to the rank."""
        return self.state in {"failed", "lost", "refused"} or (
            self.state == "stopped" and self.intent not in {"stop", "failed"}
        )

    @property
    def ended_at(self) -> float:
        """When it ended by the worker's clock; late where that is not known."""
        return float((self.record or {}).get("ended") or float("inf"))

    def to_json(self) -> dict[str, Any]:
        """Return the outcome for --json."""
        keys = ("rank", "host", "state", "exit", "reason", "intent")
        return {key: getattr(self, key) for key in keys}


def outcome_of(rank: int, host: str, record: Mapping[str, Any] | None, tail: str = "") -> Outcome:
    """Given a worker's record of a run, return the outcome of its rank."""
    if record is None:
        return Outcome(rank, host, "unknown", reason="the worker knows nothing of this run")
    intent = (record.get("intent") or {}).get("kind", "")
    reason = record.get("reason") or ""
    return Outcome(rank, host, record["state"], record.get("exit"), reason, intent, tail, record)


@dataclass
class _Place:
    """How far one rank was followed."""

    rank: int
    host: str
    offset: int = 0
    lines: Lines = field(default_factory=Lines)
    lost_at: float | None = None
    reached_at: float | None = None


class Follower:
    """Follows one run.

    Args:
        fanout: Reaches the workers.
        run_id: The run.
        hosts: Its workers, by rank.
        shown: Ranks whose lines are printed.
        line: Called with rank and text of every line of these.
        say: Called with what a person should know.
        fail_fast: Whether the other ranks are ended when one has failed.
        grace: Seconds between SIGTERM and SIGKILL then.
        live: Whether to wait for the end; else what there is now is printed.
    """

    def __init__(
        self,
        fanout: Fanout,
        run_id: str,
        hosts: Sequence[str],
        *,
        shown: Sequence[int],
        line: Callable[[int, str], None],
        say: Callable[[str], None],
        fail_fast: bool = False,
        grace: float = 10.0,
        live: bool = True,
    ) -> None:
        self._fanout = fanout
        self._run_id = run_id
        self._hosts = list(hosts)
        self._shown = set(shown)
        self._line = line
        self._say = say
        self._fail_fast = fail_fast
        self._grace = grace
        self._live = live
        self._ended: set[int] = set()
        self._tasks: list[asyncio.Task[Outcome]] = []
        self._ending: asyncio.Task[None] | None = None

    async def run(self) -> list[Outcome]:
        """Follow until every rank has ended or is given up; return the outcomes by rank."""
        with plain_errors():
            async with asyncio.TaskGroup() as group:
                self._tasks = [group.create_task(self._rank(rank)) for rank in range(len(self._hosts))]
        if self._ending is not None:
            await self._ending
        return [task.result() for task in self._tasks]

    async def _rank(self, rank: int) -> Outcome:
        outcome = await self._follow(rank)
        self._ended.add(rank)
        if outcome.is_cause and self._fail_fast and self._ending is None:
            self._ending = asyncio.create_task(self._end_others(outcome))
        return outcome

    async def _follow(self, rank: int) -> Outcome:
        """Follow one rank, again from where it stood whenever the connection breaks."""
        place = _Place(rank, self._hosts[rank])
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await self._follow_once(place)
            except (Broken, Unreachable) as exc:
                problem = str(exc)
            now = loop.time()
            held = place.reached_at is not None and now - place.reached_at > HELD
            if place.lost_at is None or held:
                place.lost_at = now
                self._say(f"rank {rank} ({place.host}) does not answer: {problem}; trying for {RETRY_LIMIT:.0f} s")
            place.reached_at = None
            if now - place.lost_at > RETRY_LIMIT:
                return Outcome(rank, place.host, "unknown", reason=f"lost contact: {problem}")
            await self._fanout.masters.drop(place.host)
            await asyncio.sleep(RETRY_EVERY)

    async def _follow_once(self, place: _Place) -> Outcome:
        """Follow one rank over one connection.

        Raises:
            Broken, Unreachable: The connection ended before the rank did.
        """
        async with self._fanout.stream(place.host, "follow", self._request(place)) as stream:
            reply = await stream.answer()
            if reply.kind == "unreachable":
                raise Broken(reply.problem)
            if not reply.ok:
                return Outcome(place.rank, place.host, "unknown", reason=reply.problem)
            place.reached_at = asyncio.get_running_loop().time()
            async for frame in stream.frames():
                place.offset = frame.offset + len(frame.payload)
                if frame.kind == wire.DATA:
                    self._print(place.rank, place.lines.feed(frame.payload))
                elif frame.kind == wire.GAP:
                    self._say(f"rank {place.rank}: the log before byte {frame.offset} is no longer on {place.host}")
                else:
                    self._print(place.rank, place.lines.finish())
                    value = json.loads(frame.payload)
                    return outcome_of(place.rank, place.host, value["record"], value["tail"])
        raise Broken("the connection ended")

    def _request(self, place: _Place) -> dict[str, Any]:
        shown = place.rank in self._shown
        return {"run_id": self._run_id, "offset": place.offset, "lines": shown, "live": self._live}

    def _print(self, rank: int, lines: Sequence[str]) -> None:
        for text in lines:
            self._line(rank, text)

    async def _end_others(self, cause: Outcome) -> None:
        """End the ranks that are left; their own follower sees them end."""
        # One mistake in the program ends all ranks within the same moment: only what goes on needs to be ended.
        await asyncio.wait(self._tasks, timeout=SETTLE)
        left = [host for rank, host in enumerate(self._hosts) if rank not in self._ended]
        if not left:
            return
        reason = (
            f"rank {cause.rank} {cause.state}: {cause.reason}" if cause.reason else f"rank {cause.rank} {cause.state}"
        )
        count = f"{len(left)} ranks that are" if len(left) > 1 else "one rank that is"
        self._say(f"{reason}; ending the {count} left")
        request = {"run_id": self._run_id, "kind": "failed", "reason": reason, "grace": self._grace}
        limit = self._grace + STOP_MARGIN
        await self._fanout.call(dict.fromkeys(left, request), "stop", limit=limit, done=self._complain)

    def _complain(self, reply: Reply) -> None:
        if not reply.ok:
            self._say(f"{reply.host} could not be told to end: {reply.problem}")


def first_cause(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the rank that failed first, None where none failed of itself.

    A host that is gone or a fatal signal comes before an exit code: the others' errors follow from it.
    """
    causes = [outcome for outcome in outcomes if outcome.is_cause]
    return min(causes, key=_order, default=None)


def _order(outcome: Outcome) -> tuple[float, int, int]:
    hard = outcome.state != "failed" or "signal" in (outcome.exit or {})
    # Clocks of workers differ: ends within the same second count as at the same time.
    return (outcome.ended_at // 1.0, 0 if hard else 1, outcome.rank)
