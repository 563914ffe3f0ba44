"""Follows all ranks of a run to their end and prints the output of chosen ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpu_ops.errors import OpsError
from tpu_ops.protocol import watch, wire
from tpu_ops.protocol.record import ON
from tpu_ops.runs import stuck_streams
from tpu_ops.runs.fold import Fold
from tpu_ops.runs.lines import Lines, Part
from tpu_ops.runs.outcomes import CUT, KNOWS_NOTHING, Outcome, outcome_of, short, without_record
from tpu_ops.ssh.fanout import Fanout, plain_errors
from tpu_ops.ssh.masters import Unreachable
from tpu_ops.ssh.stream import Broken, Stream

#: Seconds between two attempts to reach a worker, and seconds after which workers are given up if no worker answers.
#: While any rank can be followed, the run is active and no rank is given up.
RETRY_EVERY = 2.0
RETRY_LIMIT = 120.0
#: Seconds after which a connection counts as stable. If a stable connection breaks, RETRY_LIMIT counts from this
#: moment.
HELD = 30.0
#: Seconds after which a worker that does not answer is given up if all other ranks have ended: their workers have given
#: it up as well. The same limit is used if only the existing lines were requested.
ALONE_LIMIT = 15.0
#: Seconds between two checks for lines that have waited long enough for equal lines of other ranks.
TICK = 0.1
#: Seconds after which the received part of an unfinished line is printed.
UNFINISHED = 1.0
#: Maximum seconds that the end of a rank takes in addition to the grace.
STOP_MARGIN = 60.0
#: Seconds for a worker to report a rank's state if the rank's stream might be stuck.
ASKED_LIMIT = 45.0


def _attempt(outcome: Outcome) -> int:
    return int(outcome.record["attempt"]) if outcome.record else 0


@dataclass
class _Place:
    """The position up to which a rank was followed, and the state of its connection."""

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
    """Follows all ranks of one run.

    Args:
        fanout: Reaches the workers.
        run_id: The run.
        hosts: The workers of the run, by rank.
        shown: Ranks whose lines are printed.
        line: Called with the ranks that printed a line, and its text. Equal lines of several ranks are folded into one
            call. A byte that is not UTF-8 is a lone surrogate in the text.
        part: Called with the ranks, the text, and whether the line ends with it, for each part of a line that stayed
            unfinished for a while. Without this function, `line` is called once the line is complete.
        say: Called with messages for the user.
        live: Whether to wait for the end of the run; otherwise only the existing lines are printed.
        since: Print lines from this time on (seconds since 1970); 0 means from the beginning.
        data: Called with the rank, the offset in its log and the bytes, for all ranks, shown or not.
        offsets: Where to begin in each rank's log, instead of `since`.
        taken: Returns whether a worker's node was taken away and, as far as is known, nobody brings the node back.
        on: Called whenever a rank is found to be active, or does not answer and might be active.
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
        #: Outcomes of the ranks that are no longer followed.
        self.outcomes: dict[int, Outcome] = {}
        #: Kind of the event that a worker announces for now, see `watch.announced`; a preemption if there is one.
        self.announced = ""
        self._news = asyncio.Event()
        self._silent: set[int] = set()
        #: The time since which no rank that is still followed has answered, in the event loop's time.
        self._alone_at: float | None = None

    @property
    def silent(self) -> bool:
        """Whether a rank that has not ended does not answer."""
        return bool(self._silent - self._ended)

    async def until(self, ranks: Collection[int]) -> None:
        """Return once these ranks are no longer followed and all their lines and bytes have been passed on."""
        while not self.outcomes.keys() >= set(ranks):
            self._news.clear()
            await self._news.wait()

    async def run(self) -> list[Outcome]:
        """Follow the run until every rank has ended or is given up; return the outcomes by rank.

        Without `live` and `data`, ranks that are not shown are not asked, and their outcome is ``unknown``.

        Raises:
            OSError: Lines or bytes cannot be passed on: a pipe is closed or a disk is full.
        """
        ranks = range(len(self._hosts)) if self._live or self._data is not None else sorted(self._shown)
        outcomes, seen = dict(zip(ranks, await self._follow_all(ranks), strict=True)), 0
        # If the run was started again after some ranks had ended, follow all its ranks in the newest attempt.
        while self._data is None and (newest := max(map(_attempt, outcomes.values()))) > seen:
            seen = newest
            # These ranks are on an older attempt, or on recreated nodes whose workers had no launcher or no record of
            # the run.
            behind = [
                rank
                for rank, outcome in outcomes.items()
                if 0 < _attempt(outcome) < newest or (newest > 1 and (outcome.bare or outcome.reason == KNOWS_NOTHING))
            ]
            outcomes |= zip(behind, await self._follow_all(behind), strict=True)
        others = {
            rank: Outcome(rank, host, "unknown", reason="the worker was not asked")
            for rank, host in enumerate(self._hosts)
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
        """Repeatedly print the lines that have waited long enough for their end or for equal lines of other ranks."""
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
        # A rank that was given up might still be active, so it does not count as ended.
        if outcome.state != "unreachable":
            self._ended.add(rank)
        return outcome

    async def _follow(self, rank: int) -> Outcome:
        """Follow one rank to its end; after each break of the connection, continue at the same position in the log."""
        place, loop = self._places[rank], asyncio.get_running_loop()
        while True:
            try:
                if outcome := await self._follow_once(place):
                    return outcome
                continue
            except (Broken, Unreachable) as exc:
                problem = str(exc)
            if self._taken(place.host):
                # Print the unfinished line: the rest of the line will never arrive.
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
        """Return whether to stop retrying a rank that does not answer.

        Args:
            lost_at: The time since which the rank does not answer, in the event loop's time.
            now: The current time of the event loop.
            waits: Whether to wait until the rank answers again, up to RETRY_LIMIT.
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
        """Follow one rank over one connection; return None if a new attempt has to be followed from its beginning.

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
                # Another attempt has another log, which begins at offset 0.
                if self._data is not None:
                    return Outcome(place.rank, place.host, "gone", reason=f"attempt {attempt} has begun on this worker")
                self._start_again(place, attempt)
                return None
            place.attempt, place.heard_at = attempt, asyncio.get_running_loop().time()
            is_mute, ask = lambda: self._is_mute(place, stream), lambda: self._ask(place)
            outcome = await stuck_streams.read(self._read(place, stream), is_mute, ask)
        if outcome.cut:
            self._print(place.rank, place.lines.finish())
            self._say(f"rank {place.rank} ({place.host}): {CUT}")
        return outcome

    async def _read(self, place: _Place, stream: Stream) -> Outcome:
        """Pass on the frames of a rank's stream until the rank has ended; return the outcome.

        Raises:
            Broken: The connection ended before the rank did.
        """
        async for frame in stream.frames():
            place.heard_at = asyncio.get_running_loop().time()
            if frame.kind == wire.NOTE:
                place.notes += 1
                note = frame.payload.decode("utf-8", "replace")
                if self.announced != watch.PREEMPTED:
                    self.announced = watch.announced(note) or self.announced
                self._say(note)
                continue
            missing, place.offset = frame.offset - place.offset, frame.offset + len(frame.payload)
            if frame.kind == wire.DATA:
                self._deliver(place, frame.offset, frame.payload)
                # Passing on the data might have taken long, because the reader of the output blocked it. Further frames
                # wait here.
                place.heard_at = asyncio.get_running_loop().time()
            elif frame.kind == wire.GAP:
                # End the unfinished line here: data after the missing bytes does not continue it.
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
        """Return whether a rank's stream was silent for so long that it might be stuck."""
        alone = len(self._hosts) == 1 or not self._live
        heard_at = max(place.heard_at, stream.heard_at)
        return (alone or bool(self._ended)) and asyncio.get_running_loop().time() - heard_at >= stuck_streams.AFTER

    async def _ask(self, place: _Place) -> Outcome | Broken | None:
        """Ask a worker for the outcome of its rank; return Broken if it cannot tell, None if the rank is active."""
        request = {place.host: {"run_id": self._run_id}}
        try:
            replies = await self._fanout.call(request, "status", limit=ASKED_LIMIT, quiet=ASKED_LIMIT)
        except (OpsError, OSError) as exc:
            # An error on this machine, such as a temporary shortage, is no reason to stop following.
            return Broken(str(exc))
        reply = replies[place.host]
        if not reply.ok:
            return Broken(reply.problem)
        record = reply.value["record"]
        if record is not None and record["attempt"] != place.attempt:
            return Broken("another attempt has begun on this worker")
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
        # `_fold` knows only the ranks that are shown; only these have lines.
        if lines:
            self._fold.add(rank, lines, asyncio.get_running_loop().time())
