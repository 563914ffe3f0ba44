"""Follows all ranks of a run to their end and prints the lines of some. The ranks look after each other themselves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpu_ops.errors import OpsError
from tpu_ops.protocol import wire
from tpu_ops.protocol.record import ON
from tpu_ops.runs import mute
from tpu_ops.runs.fold import Fold
from tpu_ops.runs.lines import Lines, Part
from tpu_ops.runs.outcomes import CUT, KNOWS_NOTHING, Outcome, outcome_of, short, without_record
from tpu_ops.ssh.fanout import Fanout, plain_errors
from tpu_ops.ssh.masters import Unreachable
from tpu_ops.ssh.stream import Broken, Stream

#: Seconds between two attempts to reach a worker again, and after which it is given up where none answers. While
#: another is followed, the run is on and none is given up.
RETRY_EVERY = 2.0
RETRY_LIMIT = 120.0
#: A connection that held this long makes the next break a new one, in seconds.
HELD = 30.0
#: Seconds after which a silent worker is given up once all ranks that answer have ended, since the workers have given
#: it up as well, and where only the lines that there are were asked for.
ALONE_LIMIT = 15.0
#: Seconds between two looks at lines that wait for the same line of other ranks.
TICK = 0.1
#: Seconds after which what has come of a line is shown though its end has not.
UNFINISHED = 1.0
#: Seconds beyond the grace that ending ranks may take.
STOP_MARGIN = 60.0
#: Seconds for a worker whose stream may have gone mute to tell how the rank is.
ASKED_LIMIT = 45.0


def _attempt(outcome: Outcome) -> int:
    return int(outcome.record["attempt"]) if outcome.record else 0


@dataclass
class _Place:
    """How far one rank was followed."""

    rank: int
    host: str
    offset: int = 0
    attempt: int = 0
    notes: int = 0
    lines: Lines = field(default_factory=Lines)
    unfinished_at: float | None = None
    lost_at: float | None = None
    patient: bool = False
    reached_at: float | None = None
    heard_at: float = 0.0


class Follower:
    """Follows one run.

    Args:
        fanout: Reaches the workers.
        run_id: The run.
        hosts: Its workers, by rank.
        shown: Ranks whose lines are printed.
        line: Called with the ranks that said a line, and its text: equal lines of several ranks are one. A byte that is
            not UTF-8 is a lone surrogate in it.
        part: Called with the ranks, the text and whether the line ends with it, for the parts of a line that was not
            finished for a while; without it such a line is given on once it is finished.
        say: Called with what a person should know.
        live: Whether to wait for the end; else what there is now is printed.
        since: Lines from that time on (seconds since 1970); 0 is from the beginning.
        data: Called with rank, offset in its log and raw bytes, for all ranks, whoever is shown.
        offsets: Where in each rank's log to begin, in place of `since`.
        taken: Whether the node of a worker was taken away, and nobody brings it back as far as is known.
        on: Called whenever a rank is found to be on, or to be silent: then it may be.
    """

    def __init__(
        self,
        fanout: Fanout,
        run_id: str,
        hosts: Sequence[str],
        *,
        shown: Sequence[int],
        line: Callable[[Sequence[int], str], None],
        say: Callable[[str], None],
        part: Callable[[Sequence[int], str, bool], None] | None = None,
        live: bool = True,
        since: float = 0.0,
        data: Callable[[int, int, bytes], object] | None = None,
        offsets: Sequence[int] = (),
        taken: Callable[[str], bool] = lambda _: False,
        on: Callable[[], object] = lambda: None,
    ) -> None:
        self._fanout = fanout
        self._run_id = run_id
        self._hosts = list(hosts)
        self._shown = set(shown)
        self._line, self._part = line, part
        self._fold = Fold(shown, self._give)
        self._say = say
        self._live = live
        self._since = since
        self._data, self._taken, self._on = data, taken, on
        begin = tuple(offsets) or (0,) * len(self._hosts)
        self._places = [_Place(rank, host, begin[rank]) for rank, host in enumerate(self._hosts)]
        self._attempts: set[int] = set()
        self._ended: set[int] = set()
        #: How the ranks are that are followed no more.
        self.outcomes: dict[int, Outcome] = {}
        self._news = asyncio.Event()
        self._silent: set[int] = set()
        #: Since when none of those that have not ended has answered.
        self._alone_at: float | None = None

    @property
    def silent(self) -> bool:
        """Whether a rank that has not ended does not answer."""
        return bool(self._silent - self._ended)

    async def until(self, ranks: Collection[int]) -> None:
        """Return once these ranks are followed no more; their lines and bytes have been given on then."""
        while not self.outcomes.keys() >= set(ranks):
            self._news.clear()
            await self._news.wait()

    async def run(self) -> list[Outcome]:
        """Follow until every rank has ended or is given up; return the outcomes by rank.

        Where neither the end nor all bytes are wanted, ranks that are not shown are ``unknown``: nobody waits for them.

        Raises:
            OSError: Lines or bytes cannot be given on: a pipe is closed, a disk full.
        """
        ranks = range(len(self._hosts)) if self._live or self._data is not None else sorted(self._shown)
        outcomes, seen = dict(zip(ranks, await self._follow_all(ranks), strict=True)), 0
        # Where the run was started again meanwhile, its ranks are followed in the same attempt.
        while self._data is None and (newest := max(map(_attempt, outcomes.values()))) > seen:
            seen = newest
            # A node that was made anew for it knew nothing of the run at first, or had no launcher yet.
            behind = [
                rank
                for rank, outcome in outcomes.items()
                if 0 < _attempt(outcome) < newest or (newest > 1 and (outcome.bare or outcome.reason == KNOWS_NOTHING))
            ]
            outcomes |= zip(behind, await self._follow_all(behind), strict=True)
        others = {
            rank: Outcome(rank, host, "unknown", reason="it was not asked") for rank, host in enumerate(self._hosts)
        }
        return list((others | outcomes).values())

    async def _follow_all(self, ranks: Sequence[int]) -> list[Outcome]:
        try:
            with plain_errors():
                async with asyncio.TaskGroup() as group:
                    ticking = group.create_task(self._tick())
                    tasks = [group.create_task(self._rank(rank)) for rank in ranks]
                    await asyncio.gather(*tasks)
                    ticking.cancel()
        finally:
            self._fold.finish()
        return [task.result() for task in tasks]

    async def _tick(self) -> None:
        """Print what has waited long enough for its end or for other ranks, again and again."""
        while True:
            now = asyncio.get_running_loop().time()
            for place in self._places if self._part else ():
                if place.unfinished_at is not None and now - place.unfinished_at >= UNFINISHED:
                    place.unfinished_at = None
                    self._print(place.rank, place.lines.unfinished())
            self._fold.tick(now)
            await asyncio.sleep(TICK)

    async def _rank(self, rank: int) -> Outcome:
        self._ended.discard(rank)
        outcome = self.outcomes[rank] = await self._follow(rank)
        self._news.set()
        # One that was given up may be on.
        if outcome.state != "unreachable":
            self._ended.add(rank)
        return outcome

    async def _follow(self, rank: int) -> Outcome:
        """Follow one rank, again from where it stood whenever the connection breaks."""
        place, loop = self._places[rank], asyncio.get_running_loop()
        while True:
            try:
                if outcome := await self._follow_once(place):
                    return outcome
                continue
            except (Broken, Unreachable) as exc:
                problem = str(exc)
            if self._taken(place.host):
                # The beginning of a line whose end never came.
                self._print(rank, place.lines.finish())
                if self._live:
                    self._say(f"rank {rank} ({place.host}) is gone: {problem}")
                return Outcome(rank, place.host, "gone", reason=short(problem))
            waits = self._live or self._data is not None
            now, limit = loop.time(), RETRY_LIMIT if waits else ALONE_LIMIT
            held = place.reached_at is not None and now - place.reached_at > HELD
            if place.lost_at is None or held:
                place.lost_at, place.patient = now, False
                self._say(f"rank {rank} ({place.host}) does not answer: {problem}; retrying for {limit:.0f} s")
            place.reached_at = None
            self._silent.add(rank)
            self._on()
            if self._is_given_up(place.lost_at, now, waits=waits):
                self._print(rank, place.lines.finish())
                why = short(problem)
                reason = f"lost contact: {why}" if why == problem else why
                return Outcome(rank, place.host, "unreachable", reason=reason)
            if now - place.lost_at > limit and not place.patient:
                place.patient = True
                self._say(f"rank {rank} ({place.host}) still does not answer; retrying while others are followed")
            await self._fanout.masters.drop(place.host)
            await asyncio.sleep(RETRY_EVERY)

    def _is_given_up(self, lost_at: float, now: float, *, waits: bool) -> bool:
        """Return whether a silent rank is tried no longer.

        Args:
            lost_at: Since when it does not answer, in the event loop's time.
            now: The time.
            waits: Whether it may come back, and is waited for.
        """
        if not waits:
            return now - lost_at > ALONE_LIMIT
        if len(self._ended | self._silent) < len(self._hosts):
            self._alone_at = None
            return False
        if self._ended:
            return now - lost_at > ALONE_LIMIT
        if self._alone_at is None:
            self._alone_at = now
        return now - max(lost_at, self._alone_at) > RETRY_LIMIT

    async def _follow_once(self, place: _Place) -> Outcome | None:
        """Follow one rank over one connection; return None where it has to be asked for from its beginning.

        Raises:
            Broken, Unreachable: The connection ended before the rank did.
        """
        async with self._fanout.stream(place.host, "follow", self._request(place)) as stream:
            reply = await stream.answer()
            if reply.kind in {"unreachable", "timeout"}:
                raise Broken(reply.problem)
            if not reply.ok:
                return without_record(place.rank, reply._replace(host=place.host))
            place.reached_at = asyncio.get_running_loop().time()
            self._silent.discard(place.rank)
            if reply.value["record"].get("state") in ON:
                self._on()
            attempt = int(reply.value["record"]["attempt"])
            if place.attempt not in (0, attempt):
                # Its log is another one now.
                if self._data is not None:
                    return Outcome(place.rank, place.host, "gone", reason=f"attempt {attempt} has begun on it")
                self._start_again(place, attempt)
                return None
            place.attempt, place.heard_at = attempt, asyncio.get_running_loop().time()
            is_mute, ask = lambda: self._is_mute(place, stream), lambda: self._ask(place)
            outcome = await mute.read(self._read(place, stream), is_mute, ask)
        if outcome.cut:
            self._print(place.rank, place.lines.finish())
            self._say(f"rank {place.rank} ({place.host}): {CUT}")
        return outcome

    async def _read(self, place: _Place, stream: Stream) -> Outcome:
        """Give on what comes until the rank has ended.

        Raises:
            Broken: The connection ended before.
        """
        async for frame in stream.frames():
            place.heard_at = asyncio.get_running_loop().time()
            if frame.kind == wire.NOTE:
                place.notes += 1
                self._say(frame.payload.decode("utf-8", "replace"))
                continue
            missing, place.offset = frame.offset - place.offset, frame.offset + len(frame.payload)
            if frame.kind == wire.DATA:
                self._deliver(place, frame.offset, frame.payload)
                # Whoever reads the output may have taken his time, and what came meanwhile waits.
                place.heard_at = asyncio.get_running_loop().time()
            elif frame.kind == wire.GAP:
                # What comes behind the missing bytes is no end of the line before them.
                self._print(place.rank, place.lines.finish())
                self._say(
                    f"rank {place.rank}: {missing} bytes before byte {frame.offset} are not in the log on "
                    f"{place.host}: the log was rotated, or the disk could not store them"
                )
            else:
                self._print(place.rank, place.lines.finish())
                value = json.loads(frame.payload)
                return outcome_of(place.rank, place.host, value["record"], value["tail"])
        raise Broken("the connection ended")

    def _is_mute(self, place: _Place, stream: Stream) -> bool:
        """Return whether nothing has come of a rank for long, though others have ended or nobody waits for its end."""
        alone = len(self._hosts) == 1 or not self._live
        heard_at = max(place.heard_at, stream.heard_at)
        return (alone or bool(self._ended)) and asyncio.get_running_loop().time() - heard_at >= mute.AFTER

    async def _ask(self, place: _Place) -> Outcome | Broken | None:
        """Return how a rank has ended, as its worker says, why it does not, or None where the rank is on."""
        request = {place.host: {"run_id": self._run_id}}
        try:
            replies = await self._fanout.call(request, "status", limit=ASKED_LIMIT, quiet=ASKED_LIMIT)
        except (OpsError, OSError) as exc:
            # What this machine lacks for a moment is no reason to follow no more.
            return Broken(str(exc))
        reply = replies[place.host]
        if not reply.ok:
            return Broken(reply.problem)
        record = reply.value["record"]
        if record is not None and record["attempt"] != place.attempt:
            return Broken("another attempt has begun on it")
        outcome = outcome_of(place.rank, place.host, record)
        return None if self._live and outcome.state in ON else replace(outcome, cut=True)

    def _start_again(self, place: _Place, attempt: int) -> None:
        """Follow a rank from the beginning of another attempt of the run."""
        self._print(place.rank, place.lines.finish())
        place.attempt, place.offset, place.notes, place.lines = attempt, 0, 0, Lines()
        if attempt not in self._attempts:
            self._attempts.add(attempt)
            self._say(f"run {self._run_id}: attempt {attempt} has begun; its output follows from the beginning")

    def _request(self, place: _Place) -> dict[str, Any]:
        shown = place.rank in self._shown or self._data is not None
        known = {"offset": place.offset, "since": self._since, "notes": place.notes}
        return {"run_id": self._run_id, "lines": shown, "live": self._live, **known}

    def _deliver(self, place: _Place, offset: int, data: bytes) -> None:
        if self._data is not None:
            self._data(place.rank, offset, data)
        if place.rank in self._shown:
            pieces = place.lines.feed(data)
            self._print(place.rank, pieces)
            if not place.lines.has_rest:
                place.unfinished_at = None
            elif pieces or place.unfinished_at is None:
                place.unfinished_at = asyncio.get_running_loop().time()

    def _give(self, ranks: Sequence[int], line: str | Part) -> None:
        if isinstance(line, str):
            self._line(ranks, line)
        elif self._part is not None:
            self._part(ranks, line.text, line.ends)

    def _print(self, rank: int, lines: Sequence[str | Part]) -> None:
        # A rank that is not shown has none.
        if lines:
            self._fold.add(rank, lines, asyncio.get_running_loop().time())
