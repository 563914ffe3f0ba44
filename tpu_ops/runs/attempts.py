"""Follows the attempts of a run one after the other, while another process on this machine starts them."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tpu_ops.config import Settings
from tpu_ops.errors import OpsError, UsageError
from tpu_ops.fleet import contact, targets, view
from tpu_ops.runs import control, endings, nodes, preparations, ranks, records, recovery
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.follow import Follower
from tpu_ops.runs.known_ends import remembered
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.runs.recovery import Recovery
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.renewal import in_thread

#: Seconds between two checks whether the other process has started the next attempt.
LOOK = 1.0


class Terminal(NamedTuple):
    """Functions that print the output of a run and messages to the user.

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
    """Find a run and print its output; return the run, the outcomes of its ranks, and the ranks whose lines were shown.

    Args:
        fleet: The fleet.
        word: A run id, or a node or worker that the run is on.
        rank: The ranks to show, in the form of `ranks.parse`. None means the rank on the worker if `word` is a worker,
            else rank 0.
        terminal: Prints the lines.
        live: Whether to follow the run until it has ended; otherwise only the existing lines are printed.
        since: Print lines from this time on (seconds since 1970); 0 means all lines.
        begun: Called once the run is found, with the fanout that reaches its workers and the run.
        on: As of `Follower`.
        heard: Called with the ranks that printed a line, before the line is shown.
    """
    # Reject an invalid list of ranks before any worker is asked.
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
    """Follow a run like `followed`, and then each further attempt that this machine starts, to the run's end.

    Args:
        fleet: The fleet.
        word: See `followed`.
        rank: See `followed`.
        terminal: See `followed`.
        since: See `followed`; all lines of later attempts are printed.
        begun: Called when an attempt is followed, with the fanout that reaches its workers and the run.
        on: As of `followed`.
        over: Called when an attempt is no longer followed.
    """
    settings, kept = fleet.settings, _kept(fleet.settings, word)
    seen = kept.attempt if kept else 0
    # An attempt that another process is about to start might need a moment to begin: wait for it.
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
            # The recovering process has recorded the end of the run by now.
            return run, [*remembered(fleet, run.run_id, run.hosts, outcomes)], shown
        fleet, word, rank, since = now, run.run_id, ranks.folded(shown), 0.0


def _kept(settings: Settings, run_id: str) -> Recovery | None:
    """Return the recovery state of a run on this machine; None if there is none or it cannot be read."""
    with contextlib.suppress(OpsError):
        return recovery.read(settings.state_dir, run_id)
    return None


def _attempt(settings: Settings, run_id: str) -> int:
    """Return the number of the run's latest attempt that this machine has recorded; 0 without a record."""
    known = records.read(settings.state_dir, run_id)
    return known.attempt if known else 0


async def _later(settings: Settings, run_id: str, seen: int, say: Callable[[str], None]) -> view.Fleet | None:
    """Wait until another process on this machine has started a later attempt; return None if it starts no attempt.

    Args:
        settings: The fleet's settings.
        run_id: The run.
        seen: Number of the attempt that was followed before.
        say: Prints a message.

    Returns:
        The fleet as it is known after the later attempt was started.
    """
    said = False
    while recovery.is_held(settings.state_dir, run_id):
        kept = _kept(settings, run_id)
        if kept and kept.pending and not said:
            what = recovery.under_way(settings.state_dir, run_id)
            say(f"{what}; waiting for that attempt")
            said = bool(what)
        elif kept and not kept.pending and kept.attempt > seen:
            fleet = await in_thread(lambda: view.current(settings))
            if await _newest(fleet, run_id) >= kept.attempt:
                return fleet
        await asyncio.sleep(LOOK)
    # A later attempt might have begun and ended between two checks.
    if _attempt(settings, run_id) > seen and not recovery.is_kept(settings.state_dir, run_id):
        return await in_thread(lambda: view.current(settings))
    return None


async def _newest(fleet: view.Fleet, run_id: str) -> int:
    """Return the number of the newest attempt that a run's workers report; 0 if this machine has no record of it."""
    known = records.read(fleet.settings.state_dir, run_id)
    if known is None:
        return 0
    return await control.newest_attempt(contact.fanout(fleet), RunRef(run_id, records.hosts_now(known, fleet.workers)))


def _ended_on(fleet: view.Fleet, word: str, last: control.Last | None) -> str:
    """Return the fix if no run is active on a target: commands that show the last run, start a run, and list runs."""
    workers = targets.select(fleet.workers, word, listed=fleet.listed)
    starts = ""
    if len({worker.node.accelerator_type for worker in workers}) == 1:
        labels = ",".join(sorted({worker.label for worker in workers}))
        starts = f"`tpu_ops train {labels} -- COMMAND` starts a run"
    lists = "`tpu_ops runs` lists the last runs started here"
    return "; ".join(filter(None, (_shows_last(fleet, word, last), starts, lists)))


def _shows_last(fleet: view.Fleet, word: str, last: control.Last | None) -> str:
    """Return words with the command that shows the last run on the workers of a target; empty if no run is known.

    Args:
        fleet: The fleet.
        word: The target.
        last: The last run that the workers report, or None.
    """
    if last:
        return f"the last run there was {last.run_id}: `tpu_ops logs {shlex.quote(word)}`"
    return nodes.last_started(fleet, word)


async def the_run(
    fleet: view.Fleet, fanout: Fanout, word: str, say: Callable[[str], None], *, live: bool
) -> control.RunRef:
    """Return the single run that a word names: the run of this id, or the active or last run on workers.

    Args:
        fleet: The fleet.
        fanout: Reaches the workers.
        word: A run id, or a node or worker.
        say: Prints a message.
        live: Whether only an active run is accepted, because the caller waits for its end.

    Raises:
        OpsError: The word names no run, or several runs.
    """
    runs, _, last = found = await control.find(fleet, fanout, word)
    if not runs and last and not live:
        say(f"no run is active on {word}; the last one there was {last.run_id}")
        return await control.last(fleet, fanout, last)
    if not runs and (problem := preparations.problem_of(found.silent, fleet.settings.state_dir)):
        problem.fix = "; ".join(filter(None, (problem.fix, _shows_last(fleet, word, last))))
        raise problem
    if len(runs) != 1:
        names = ", ".join(run_.run_id for run_ in runs)
        fix = f"name one of these runs: {names}" if names else _ended_on(fleet, word, last)
        what = f"{len(runs)} runs are" if names else "no run is"
        raise UsageError(f"{what} active on {word}", where=f"RUN {word!r}", fix=fix)
    return runs[0]
