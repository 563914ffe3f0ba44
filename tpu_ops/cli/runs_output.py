"""How runs are shown: lines with their rank, tables of ranks, and the exit code that follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tpu_ops import texts
from tpu_ops.cli import output
from tpu_ops.errors import ExitCode
from tpu_ops.runs import advice, attempts, holders, ranks
from tpu_ops.runs.holders import Holder
from tpu_ops.runs.outcomes import UNKNOWN, Outcome, first_failure, raised_before

#: Lines shown of a failed rank whose log was not followed.
TAIL_LINES = 20
#: Workers whose processes that were left behind are named.
_WORKERS_NAMED = 4
#: Help of --rank, and of the one where a worker may be named.
RANKS_SHOWN = "ranks whose output is shown: all, or a list such as 0,3 or 0-2 (default: 0)"
RANKS_OR_OWN = RANKS_SHOWN.replace("(default: 0)", "(default: that of the worker, if RUN is one, else 0)")
#: Help of an argument that names a run.
RUN = "a run id, or a node or worker, for the run on it"


def line(said_by: Sequence[int], text: str) -> None:
    """Print one line of the log of some ranks, as `follow.Follower` gives it."""
    output.raw(_bytes(f"{_lead(said_by)}{text}\n"))


def line_aside(said_by: Sequence[int], text: str) -> None:
    """Print one line of the log of some ranks where the result is JSON."""
    output.raw(_bytes(f"{_lead(said_by)}{text}\n"), aside=True)


def part(said_by: Sequence[int], text: str, ended: bool) -> None:
    """Print a part of a line of the log of some ranks, as `follow.Follower` gives it."""
    output.piece(_lead(said_by), _bytes(text), ended=ended)


def part_aside(said_by: Sequence[int], text: str, ended: bool) -> None:
    """Print a part of a line of the log of some ranks where the result is JSON."""
    output.piece(_lead(said_by), _bytes(text), ended=ended, aside=True)


def terminal(*, aside: bool = False) -> attempts.Terminal:
    """Return what prints the output of a run; ``aside`` tells whether standard output is for something else."""
    return attempts.Terminal(line_aside if aside else line, part_aside if aside else part, output.info)


def _lead(said_by: Sequence[int]) -> str:
    return f"[{ranks.folded(said_by)}] "


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def person(name: str, asker: str) -> str:
    """Return whose a run is, and who started it where that is somebody else; empty where that is not known."""
    return name if asker in ("", name) else f"{name} (started by {asker})"


def ending(outcome: Outcome) -> str:
    """Return how a rank ended, in a few words."""
    exit_ = outcome.exit or {}
    if "code" in exit_:
        return f"exit code {exit_['code']}"
    if "signal" in exit_:
        return texts.signal_name(exit_["signal"]) or f"signal {exit_['signal']}"
    return ""


def summary(run_id: str, outcomes: Sequence[Outcome], found: advice.Recoverer | None = None) -> dict[str, Any]:
    """Return a run's result for --json.

    ``since`` and ``ended`` are seconds since 1970; ``ended`` is None while a rank is on that is known, and where none
    could record its end. Where no worker tells of the run, it is what this machine remembers of it.

    Args:
        run_id: The run.
        outcomes: How its ranks are.
        found: What recovers it on this machine.
    """
    first, newest = first_failure(outcomes), attempt(outcomes)
    known = [out.record for out in outcomes if out.record and out.record["attempt"] == newest]
    ends = [float(record["ended"]) for record in known if record.get("ended")]
    on = any(record["state"] != "lost" for record in known if not record.get("ended"))
    remembered = next((out.remembered for out in outcomes if out.remembered and not known), {})
    return {
        "run_id": run_id,
        "attempt": newest,
        "state": (state := advice.state(run_state(outcomes), found)),
        "recovery": found.facts() if found and state == advice.RECOVERING else None,
        "person": next((record["person"]["name"] for record in known), ""),
        "started_by": next((record["asker"] for record in known if record.get("asker")), ""),
        "argv": next((record["argv"] for record in known if "argv" in record), []),
        "since": min((record["since"] for record in known), default=None),
        "ended": None if on else max(ends, default=None),
        "code_digest": next((out.record["code_digest"] for out in outcomes if out.record), ""),
        "first_failure": asdict(first) if first else None,
        "ranks": [outcome.to_json() for outcome in outcomes],
        **remembered,
    }


def people(outcomes: Sequence[Outcome]) -> str:
    """Return whose a run is, as its workers tell, or else as this machine remembers; empty where that is not known."""
    records = [outcome.record for outcome in outcomes if outcome.record]
    found = {person(record["person"]["name"], record.get("asker", "")) for record in records}
    if not found:
        found = {person(out.remembered["person"], out.remembered["started_by"]) for out in outcomes if out.remembered}
    return ", ".join(sorted(found))


def attempt(outcomes: Sequence[Outcome]) -> int:
    """Return the newest attempt of a run that its workers know, or else that this machine remembers."""
    known = [outcome.record for outcome in outcomes if outcome.record]
    found = known or [outcome.remembered for outcome in outcomes if outcome.remembered]
    return max((int(record["attempt"]) for record in found), default=1)


def run_state(outcomes: Sequence[Outcome]) -> str:
    """Return the state of a whole run: that of its worst rank."""
    states = {outcome.state for outcome in outcomes}
    if first_failure(outcomes) or "failed" in states:
        # Where one rank was refused none has begun, and a worker that does not answer has not either.
        return "refused" if "refused" in states <= {"refused", "unreachable", "unknown"} else "failed"
    for state in ("unreachable", "unknown", "gone", "stopped", "starting", "running", "ending", "exited"):
        if state in states:
            return state
    if any(outcome.state == "refused" and outcome.remembered for outcome in outcomes):
        return "refused"
    # Refused for a stop, or there would be a first failure.
    return "stopped" if "refused" in states else "succeeded"


def exit_code(outcomes: Sequence[Outcome], *, of_rank: bool = False) -> int:
    """Return the exit code of a command that waited for a run, or looked at one.

    Args:
        outcomes: How its ranks are.
        of_rank: Whether a failure has the code of the rank that failed first, where it ended by itself.
    """
    state = run_state(outcomes)
    # A rank that is known to have been stopped is worse than one of which nothing is known.
    if state in {"unreachable", "unknown", "gone"} and all(outcome.state != "stopped" for outcome in outcomes):
        return ExitCode.UNREACHABLE
    if state in {"succeeded", "running", "starting", "ending", "exited"}:
        return ExitCode.OK
    return (_code_of_rank(outcomes) if of_rank else 0) or ExitCode.FAILED


def exit_code_at_end(outcomes: Sequence[Outcome], *, of_rank: bool = False) -> int:
    """Return the exit code of a command that followed a run to its end: nothing but success is 0.

    Args:
        outcomes: How its ranks are.
        of_rank: As of `exit_code`.
    """
    if run_state(outcomes) == "succeeded":
        return ExitCode.OK
    return exit_code(outcomes, of_rank=of_rank) or ExitCode.FAILED


def worst(codes: Iterable[int]) -> int:
    """Return the exit code of several runs: a known failure counts before one of which nothing is known."""
    found = list(codes)
    failed = [code for code in found if code not in {ExitCode.OK, ExitCode.UNREACHABLE}]
    return max(failed or found, default=ExitCode.OK)


def _code_of_rank(outcomes: Sequence[Outcome]) -> int:
    """Return the code with which the rank that failed first ended, as a shell has it; 0 where it did not end itself."""
    first = first_failure(outcomes)
    failed = next((outcome for outcome in outcomes if first and outcome.rank == first.rank), None)
    if failed is None or failed.state != "failed" or not failed.exit:
        return 0
    return failed.exit["code"] if "code" in failed.exit else 128 + failed.exit["signal"]


def table(outcomes: Sequence[Outcome]) -> None:
    """Print one row per rank."""
    rows = [
        {
            "rank": outcome.rank,
            "worker": outcome.host,
            "state": outcome.state,
            "end": ending(outcome),
            "lasted": _lasted(outcome.record),
            "reason": outcome.reason,
        }
        for outcome in outcomes
    ]
    output.table(rows, ("rank", "worker", "state", "end", "lasted", "reason"))


def _lasted(record: Mapping[str, Any] | None) -> str:
    if not record or (record["state"] == "lost" and not record.get("ended")):
        return ""
    end = record.get("ended") or time.time()
    return f"{max(0.0, float(end) - float(record['since'])):.0f} s"


def finish(
    run_id: str,
    outcomes: Sequence[Outcome],
    shown: Sequence[int],
    *,
    as_json: bool,
    of_rank: bool,
    more: Mapping[str, Any] | None = None,
    kept: bool = False,
    states: Callable[[], Mapping[str, str]] = dict,
) -> int:
    """Say how a run ended that was followed to its end; return the exit code.

    Args:
        run_id: The run.
        outcomes: How its ranks are.
        shown: Ranks whose lines were shown.
        as_json: Whether the result is JSON.
        of_rank: As of `exit_code`.
        more: What else is in the JSON.
        kept: As of `say_state`.
        states: The same.
    """
    state = run_state(outcomes)
    if as_json:
        with output.read_or_not():
            output.as_json({**summary(run_id, outcomes), **(more or {})})
    if state == "succeeded":
        leftovers(outcomes)
        output.info(f"run {run_id} succeeded on {'all ' * (len(outcomes) > 1)}{texts.count(len(outcomes), 'rank')}")
        _say_reasons(outcomes)
        return ExitCode.OK
    if not as_json:
        with output.read_or_not():
            table(outcomes)
    failure(outcomes, shown)
    # Whoever recovers it, with more to tell, has had that.
    say_state(run_id, outcomes, kept=kept or more is not None, states=states)
    return exit_code_at_end(outcomes, of_rank=of_rank)


def _say_reasons(outcomes: Sequence[Outcome]) -> None:
    """Say of which ranks the end is not known from their own workers, where no table does."""
    why: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.reason:
            why.setdefault(outcome.reason, []).append(outcome.host)
    for reason, hosts in why.items():
        output.info(f"  {texts.folded(hosts)}: {reason}")


def say_state(
    run_id: str,
    outcomes: Sequence[Outcome],
    *,
    kept: bool = False,
    states: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Say how a run is that is followed no more, and where nothing is known of ranks, what tells more.

    Args:
        run_id: The run.
        outcomes: How its ranks are.
        kept: Whether it is recovered here, or could be: `recovery.note_of` tells how to go on then.
        states: Returns the states of nodes, as of `advice.again`.
    """
    state = run_state(outcomes)
    output.info(f"run {run_id}: {state}")
    if state in UNKNOWN:
        output.info(f"  nodes:  {output.on_fleet('tpu_ops list')}")
        hints(run_id)
    if not kept:
        steps(advice.again(outcomes, states))


def hints(run_id: str) -> None:
    """Say how to get at a run that may be on, and how to end it."""
    steps(advice.reaching(run_id))


def steps(found: Sequence[advice.Step]) -> None:
    """Say what to do, a line for each step."""
    width = max([7, *(len(step.what) + 1 for step in found)])
    for step in found:
        output.info(f"  {step.what + ':' if step.what else '':<{width}} {output.on_fleet(step.how)}")


def failure(outcomes: Sequence[Outcome], shown: Sequence[int]) -> None:
    """Say of a run that has just ended which rank failed first, as `failed_first` does, and what is left."""
    failed_first(outcomes, shown)
    leftovers(outcomes)


def failed_first(outcomes: Sequence[Outcome], shown: Sequence[int]) -> int | None:
    """Say which rank failed first and why, if one did, and show the lines that tell of it, where nobody has seen them.

    Returns:
        The rank whose output tells why.
    """
    if not (first := first_failure(outcomes)):
        return None
    who = f"rank {first.rank} ({first.host})"
    refused = any(outcome.state == "refused" and outcome.rank == first.rank for outcome in outcomes)
    output.info(f"the run did not begin: {who}: {first.cause}" if refused else f"{who} failed first: {first.cause}")
    if raised := raised_before(outcomes, first):
        what = f"printed a traceback {raised.before:.0f} s before that, which may be the cause"
        output.info(f"rank {raised.rank} ({raised.host}) {what}: {raised.error}")
        _last_lines(raised.rank, raised.text, shown)
        return raised.rank
    tail = outcomes[first.rank].tail if first.rank < len(outcomes) else ""
    if first.rank not in shown and tail:
        output.info(f"its last lines ({first.host}):")
    _last_lines(first.rank, tail, shown)
    return first.rank


def _last_lines(rank: int, text: str, shown: Sequence[int]) -> None:
    for line_ in text.splitlines()[-TAIL_LINES:] if rank not in shown else ():
        line_aside([rank], line_)


def notes(outcomes: Sequence[Outcome]) -> None:
    """Say what the ranks of a run that is on have noted: what its followers were told."""
    for text in dict.fromkeys(note for outcome in outcomes for note in (outcome.record or {}).get("notes") or ()):
        output.info(f"  {text}")


def left_behind(outcomes: Sequence[Outcome]) -> None:
    """Warn of processes that are ended because the command of their rank has ended without them."""
    found = [outcome for outcome in outcomes if outcome.left_behind]
    for outcome in found[:_WORKERS_NAMED]:
        named = [f"pid {process['pid']} ({process['command']})" for process in outcome.left_behind]
        what = f"processes that the command of rank {outcome.rank} left behind are ended"
        output.warning(f"{outcome.host}: {what}: {texts.some(named)}")
    if others := found[_WORKERS_NAMED:]:
        hosts = texts.folded([outcome.host for outcome in others])
        output.warning(f"{hosts}: processes that were left behind are ended there too; `status RUN --json` names them")


def leftovers(outcomes: Sequence[Outcome]) -> None:
    """Warn of what a run has left.

    These are processes that were ended behind its commands, or could not be ended, chips that are still held, and
    lockfiles that are there.
    """
    left_behind(outcomes)
    held: list[Holder] = []
    for outcome in outcomes:
        record = outcome.record or {}
        for process in record.get("stuck") or ():
            what = f"pid {process['pid']} ({process['command']})"
            output.warning(f"{outcome.host}: {what} could not be ended, state {process['state']}")
        held += holders.held_after(outcome)
        for text in holders.kept_lockfiles(record.get("chips") or {}):
            output.warning(f"{outcome.host}: {text}")
    still_held(held)


def still_held(held: Sequence[Holder]) -> None:
    """Warn of processes that hold chips after the end of a run which they have outlived, and say what to do."""
    for holder in held:
        who = f"pid {holder.pid} of {holder.user}: {holder.command}"
        output.warning(f"{holder.host}: the chips are still held by {who}")
    if held:
        target = texts.target(list(dict.fromkeys(holder.host for holder in held)))
        people = ", ".join(sorted({holder.user for holder in held}))
        ends = f"`tpu_ops unlock {target}` ends what is yours, else ask {people}"
        output.info(f"  fix: {ends}; `tpu_ops who {target}` shows who holds them")
