"""The attempts of a run, followed one after the other while another process of this machine starts them."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tpu_ops.config import Settings
from tpu_ops.errors import OpsError, UsageError
from tpu_ops.fleet import contact, targets, view
from tpu_ops.runs import control, endings, nodes, ranks, records, recovery
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.follow import Follower
from tpu_ops.runs.known_ends import remembered
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.runs.recovery import Recovery
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.renewal import in_thread

#: Seconds between two looks at what that process does.
LOOK = 1.0


class Terminal(NamedTuple):
    """What prints the output of a run, and messages.

    Attributes:
        line: Prints one line of some ranks; see `Follower`.
        part: Prints a part of a line; see `Follower`.
        say: Prints a message.
    """

    line: Callable[[Sequence[int], str], None]
    part: Callable[[Sequence[int], str, bool], None]
    say: Callable[[str], None]


async def followed(
    fleet: view.Fleet,
    word: str,
    rank: str | None,
    terminal: Terminal,
    *,
    live: bool,
    since: float,
    begun: Callable[[Fanout, control.RunRef], None] = lambda *_: None,
    on: Callable[[], object] = lambda: None,
    heard: Callable[[Sequence[int]], object] = lambda _: None,
) -> tuple[control.RunRef, list[Outcome], list[int]]:
    """Find a run and show its lines; return it, how its ranks are, and the ranks that were shown.

    Args:
        fleet: The fleet.
        word: A run, or a node or worker whose run is meant.
        rank: As of `ranks.parse`; None is that of the worker, where the word is one, or else 0.
        terminal: Prints the lines.
        live: Whether to wait for the end.
        since: Lines from that time on (seconds since 1970); 0 is all.
        begun: Called with the run once it is found, and how its workers are reached.
        on: As of `Follower`.
        heard: Called with the ranks that said a line, before it is shown.
    """
    # What means no ranks of any run is said before somebody is asked.
    ranks.spans(rank or "all")
    fanout = contact.fanout(fleet)
    run_ = await the_run(fleet, fanout, word, terminal.say, live=live)
    own = str(run_.hosts.index(word)) if word in run_.hosts else "0"
    shown = ranks.parse(own if rank is None else rank, len(run_.hosts))
    begun(fanout, run_)

    def line(said_by: Sequence[int], text: str) -> None:
        heard(said_by)
        terminal.line(said_by, text)

    def part(said_by: Sequence[int], text: str, ended: bool) -> None:
        heard(said_by)
        terminal.part(said_by, text, ended)

    follower = Follower(
        fanout,
        run_.run_id,
        run_.hosts,
        shown=shown,
        line=line,
        part=part,
        say=terminal.say,
        live=live,
        since=since,
        taken=nodes.taken(fleet, run_.run_id),
        on=on,
    )
    return run_, [*remembered(fleet, run_.run_id, run_.hosts, await follower.run())], shown


async def to_the_last(
    fleet: view.Fleet,
    word: str,
    rank: str | None,
    terminal: Terminal,
    *,
    since: float,
    begun: Callable[[Fanout, RunRef], None] = lambda *_: None,
    on: Callable[[], object] = lambda: None,
    over: Callable[[], object] = lambda: None,
) -> tuple[RunRef, list[Outcome], list[int]]:
    """Follow a run to its end as `followed` does, and the attempts of it that this machine starts meanwhile.

    Args:
        fleet: The fleet.
        word: As of `followed`.
        rank: The same.
        terminal: The same.
        since: The same; of attempts that begin later it is all.
        begun: Called with each attempt that is followed.
        on: As of `followed`.
        over: Called when an attempt is followed no more.
    """
    settings, kept = fleet.settings, _kept(fleet.settings, word)
    seen = kept.attempt if kept else 0
    # One that is being asked for may take a moment to begin.
    if kept and (now := await _later(settings, word, seen - (not kept.pending), terminal.say)):
        fleet, since = now, 0.0 if kept.pending else since

    def began(fanout: Fanout, run: RunRef) -> None:
        nonlocal seen
        seen = max(seen, _attempt(settings, run.run_id))
        begun(fanout, run)

    while True:
        run, outcomes, shown = await followed(fleet, word, rank, terminal, live=True, since=since, begun=began, on=on)
        over()
        seen = max([seen, *(int(outcome.record["attempt"]) for outcome in outcomes if outcome.record)])
        if endings.ending(outcomes, {})[0] in (endings.SUCCEEDED, endings.STOPPED):
            return run, outcomes, shown
        now = await _later(settings, run.run_id, seen, terminal.say)
        if now is None:
            # What it was seen to end with from here is known by now.
            return run, [*remembered(fleet, run.run_id, run.hosts, outcomes)], shown
        fleet, word, rank, since = now, run.run_id, ranks.folded(shown), 0.0


def _kept(settings: Settings, run_id: str) -> Recovery | None:
    """Return what is kept of a run that is recovered here, or could be; None where nothing is that can be read."""
    with contextlib.suppress(OpsError):
        return recovery.read(settings.state_dir, run_id)
    return None


def _attempt(settings: Settings, run_id: str) -> int:
    """Return the latest attempt of a run that this machine knows of."""
    known = records.read(settings.state_dir, run_id)
    return known.attempt if known else 0


async def _later(settings: Settings, run_id: str, seen: int, say: Callable[[str], None]) -> view.Fleet | None:
    """Wait for an attempt that another process of this machine starts; None where it starts none.

    Args:
        settings: Of the fleet.
        run_id: The run.
        seen: The attempt that is over, or was lost.
        say: Prints a message.

    Returns:
        The fleet as it is known once workers tell of a later attempt.
    """
    said = False
    while recovery.is_held(settings.state_dir, run_id):
        kept = _kept(settings, run_id)
        if kept and kept.pending and not said:
            what = recovery.under_way(settings.state_dir, run_id)
            say(f"{what}; waiting for that")
            said = bool(what)
        elif kept and not kept.pending and kept.attempt > seen:
            fleet = await in_thread(lambda: view.current(settings))
            if await _newest(fleet, run_id) >= kept.attempt:
                return fleet
        await asyncio.sleep(LOOK)
    # It may have begun and ended between two looks.
    if _attempt(settings, run_id) > seen and not recovery.is_kept(settings.state_dir, run_id):
        return await in_thread(lambda: view.current(settings))
    return None


async def _newest(fleet: view.Fleet, run_id: str) -> int:
    """Return the newest attempt of which the workers of a run tell."""
    known = records.read(fleet.settings.state_dir, run_id)
    if known is None:
        return 0
    return await control.newest_attempt(contact.fanout(fleet), RunRef(run_id, records.hosts_now(known, fleet.workers)))


def _ended_on(fleet: view.Fleet, word: str, last: control.Last | None) -> str:
    """Return what shows the last run on the workers of a target, and what starts another."""
    workers = targets.select(fleet.workers, word, listed=fleet.listed)
    starts = ""
    if len({worker.node.accelerator_type for worker in workers}) == 1:
        labels = ",".join(sorted({worker.label for worker in workers}))
        starts = f"`tpu_ops train {labels} -- COMMAND` starts one"
    lists = "`tpu_ops runs` lists the last ones started here"
    return "; ".join(filter(None, (_shows_last(fleet, word, last), starts, lists)))


def _shows_last(fleet: view.Fleet, word: str, last: control.Last | None) -> str:
    """Return what shows the last run on the workers of a target; empty where none is known.

    Args:
        fleet: The fleet.
        word: The target.
        last: What workers tell of it.
    """
    if last:
        return f"the last run there was {last.run_id}: `tpu_ops logs {shlex.quote(word)}`"
    return nodes.last_started(fleet, word)


async def the_run(
    fleet: view.Fleet, fanout: Fanout, word: str, say: Callable[[str], None], *, live: bool
) -> control.RunRef:
    """Return the one run that a word means: for workers the run on them, or else the last one there.

    Args:
        fleet: The fleet.
        fanout: Reaches the workers.
        word: A run, or a node or worker.
        say: Prints a message.
        live: Whether the end is waited for, which then is that of a run that is on.

    Raises:
        OpsError: It means none, or several.
    """
    runs, _, last = found = await control.find(fleet, fanout, word)
    if not runs and last and not live:
        say(f"no run is active on {word}; the last one there was {last.run_id}")
        return await control.last(fleet, fanout, last)
    if not runs and (problem := found.problem()):
        problem.fix = "; ".join(filter(None, (problem.fix, _shows_last(fleet, word, last))))
        raise problem
    if len(runs) != 1:
        names = ", ".join(run_.run_id for run_ in runs)
        fix = f"name one of them: {names}" if names else _ended_on(fleet, word, last)
        what = f"{len(runs)} runs are" if names else "no run is"
        raise UsageError(f"{what} active on {word}", where=f"RUN {word!r}", fix=fix)
    return runs[0]
