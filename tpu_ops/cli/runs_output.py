"""Show runs: output lines with their ranks, tables of ranks, advice; and derive the exit code of a command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpu_ops import texts
from tpu_ops.cli import leftovers, output
from tpu_ops.cli.terminal import Meaning
from tpu_ops.errors import ExitCode
from tpu_ops.protocol.record import ON
from tpu_ops.protocol.watch import STALLED
from tpu_ops.runs import advice, attempts, known_failures, ranks, watched
from tpu_ops.runs.outcomes import (
    UNKNOWN,
    Outcome,
    ending,
    first_failure,
    newest_records,
    person,
    raised_before,
    run_state,
)

#: Of a failed rank whose output was not shown, this many last lines are shown.
TAIL_LINES = 20
#: Help of --rank, and help of --rank for commands whose RUN may be a worker.
RANKS_SHOWN = "ranks whose output is shown: all, or a list such as 0,3 or 0-2 (default: 0)"
RANKS_OR_OWN = RANKS_SHOWN.replace("(default: 0)", "(default: that of the worker, if RUN is one, else 0)")
#: Help of the argument RUN.
RUN = "a run id; or a node or worker, which stands for the run on it"


def line(said_by: Sequence[int], text: str) -> None:
    """Print a line from the logs of these ranks, with the ranks in front, on standard output."""
    output.raw(_bytes(f"{_lead(said_by)}{text}\n"))


def line_aside(said_by: Sequence[int], text: str) -> None:
    """Print a line from the logs of these ranks on standard error, because the result is JSON."""
    output.raw(_bytes(f"{_lead(said_by)}{text}\n"), aside=True)


def part(said_by: Sequence[int], text: str, ended: bool) -> None:
    """Print a part of a line from the logs of these ranks, on standard output; ``ended`` marks the last part."""
    output.piece(_lead(said_by), _bytes(text), ended=ended)


def part_aside(said_by: Sequence[int], text: str, ended: bool) -> None:
    """Print a part of a line from the logs of these ranks on standard error, because the result is JSON."""
    output.piece(_lead(said_by), _bytes(text), ended=ended, aside=True)


def terminal(*, aside: bool = False) -> attempts.Terminal:
    """Return the functions that print the output of a run; ``aside`` means on standard error."""
    return attempts.Terminal(line_aside if aside else line, part_aside if aside else part, output.info)


def _lead(said_by: Sequence[int]) -> str:
    return f"[{ranks.folded(said_by)}] "


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def summary(run_id: str, outcomes: Sequence[Outcome], found: advice.Recoverer | None = None) -> dict[str, Any]:
    """Return a run's result for --json.

    ``since`` and ``ended`` are seconds since 1970. ``ended`` is None while a known rank is active, and if no rank could
    record its end. If no worker has a record of the run, this machine's record is used.

    Args:
        run_id: The id of the run.
        outcomes: The outcomes of its ranks.
        found: The process that recovers the run on this machine, if any.
    """
    first, records = first_failure(outcomes), newest_records(outcomes)
    ends = [float(record["ended"]) for record in records if record.get("ended")]
    on = any(record["state"] != "lost" for record in records if not record.get("ended"))
    remembered = next((out.remembered for out in outcomes if out.remembered and not records), {})
    return {
        "run_id": run_id,
        "attempt": attempt(outcomes),
        "state": (state := advice.state(run_state(outcomes), found)),
        "recovery": found.facts() if found and state == advice.RECOVERING else None,
        "person": next((record["person"]["name"] for record in records), ""),
        "started_by": next((record["asker"] for record in records if record.get("asker")), ""),
        "started_from": next((record["started_from"] for record in records if record.get("started_from")), ""),
        "argv": next((record["argv"] for record in records if "argv" in record), []),
        "since": min((record["since"] for record in records), default=None),
        "ended": None if on else max(ends, default=None),
        "code_digest": next((out.record["code_digest"] for out in outcomes if out.record), ""),
        "first_failure": asdict(first) if first else None,
        "known_failure": known._asdict() if (known := known_failures.of_run(outcomes)) else None,
        "ranks": [outcome.to_json() for outcome in outcomes],
        **remembered,
    }


@dataclass(frozen=True)
class End:
    """How a run has ended, as far as it is known.

    Attributes:
        words: The exit code, or the name of the signal, of the rank that failed first, and the known failure in two
            words if there is one; ``0`` after a success.
        exit_code: This exit code, 128 + N after signal N; None if it is not known.
        duration: Seconds from the start to the end, or until now if the run is active; None if unknown.
    """

    words: str
    exit_code: int | None
    duration: float | None

    def facts(self) -> dict[str, Any]:
        """Return the facts that `runs --json` prints."""
        return {"exit_code": self.exit_code, "duration": self.duration}


def end_of(outcomes: Sequence[Outcome], told: Mapping[str, Any]) -> End:
    """Return how a run has ended.

    Args:
        outcomes: The outcomes of its ranks.
        told: Its `summary`.
    """
    until = time.time() if told["state"] in (*ON, advice.RECOVERING) else told["ended"]
    duration = max(0.0, until - told["since"]) if until and told["since"] else None
    if told["state"] == "succeeded":
        return End("0", 0, duration)
    if failed := _failed_by_itself(outcomes):
        known = known_failures.of_run(outcomes)
        words = [ending(failed.exit).removeprefix("exit code "), *([known.short] if known else [])]
        return End(", ".join(words), _code_of_rank(outcomes), duration)
    return End("", None, duration)


def people(outcomes: Sequence[Outcome]) -> str:
    """Return the user of a run from the workers' records, else from this machine's record; empty if unknown."""
    records = [outcome.record for outcome in outcomes if outcome.record]
    found = {person(record["person"]["name"], record.get("asker", "")) for record in records}
    if not found:
        found = {person(out.remembered["person"], out.remembered["started_by"]) for out in outcomes if out.remembered}
    return ", ".join(sorted(found))


def attempt(outcomes: Sequence[Outcome]) -> int:
    """Return the number of a run's newest attempt in the workers' records, else in this machine's record."""
    known = [outcome.record for outcome in outcomes if outcome.record]
    found = known or [outcome.remembered for outcome in outcomes if outcome.remembered]
    return max((int(record["attempt"]) for record in found), default=1)


def exit_code(outcomes: Sequence[Outcome], *, of_rank: bool = False) -> int:
    """Return the exit code of a command that waited for a run or showed its state.

    Args:
        outcomes: The outcomes of the run's ranks.
        of_rank: Whether to return the exit code of the rank that failed first, if this rank ended by itself.
    """
    state = run_state(outcomes)
    # A rank that was stopped takes precedence over a rank whose state is not known.
    if state in {"unreachable", "unknown", "gone"} and all(outcome.state != "stopped" for outcome in outcomes):
        return ExitCode.UNREACHABLE
    if state in {"succeeded", "running", "starting", "ending", "exited"}:
        return ExitCode.OK
    return (_code_of_rank(outcomes) if of_rank else 0) or ExitCode.FAILED


def exit_code_at_end(outcomes: Sequence[Outcome], *, of_rank: bool = False) -> int:
    """Return the exit code of a command that followed a run to its end: 0 only if the run succeeded.

    Args:
        outcomes: The outcomes of the run's ranks.
        of_rank: Whether to return the exit code of the rank that failed first, as in `exit_code`.
    """
    if run_state(outcomes) == "succeeded":
        return ExitCode.OK
    return exit_code(outcomes, of_rank=of_rank) or ExitCode.FAILED


def worst(codes: Iterable[int]) -> int:
    """Return the exit code for several runs: a known failure takes precedence over an unreachable worker."""
    found = list(codes)
    failed = [code for code in found if code not in {ExitCode.OK, ExitCode.UNREACHABLE}]
    return max(failed or found, default=ExitCode.OK)


def _code_of_rank(outcomes: Sequence[Outcome]) -> int:
    """Return the exit code of the rank that failed first, 128 + N after signal N; 0 if it did not end by itself."""
    failed = _failed_by_itself(outcomes)
    if failed is None or not failed.exit:
        return 0
    return failed.exit["code"] if "code" in failed.exit else 128 + failed.exit["signal"]


def _failed_by_itself(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the outcome of the rank that failed first, if its command ended by itself."""
    first = first_failure(outcomes)
    failed = next((outcome for outcome in outcomes if first and outcome.rank == first.rank), None)
    return failed if failed and failed.state == "failed" and failed.exit else None


def table(outcomes: Sequence[Outcome]) -> None:
    """Print one row per rank."""
    rows = [
        {
            "rank": outcome.rank,
            "worker": outcome.host,
            "state": outcome.state,
            "end": ending(outcome.exit),
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
    """Print the end of a run that was followed; return the exit code.

    Args:
        run_id: The id of the run.
        outcomes: The outcomes of its ranks.
        shown: The ranks whose output was shown.
        as_json: Whether the result is JSON.
        of_rank: Whether to return the exit code of the rank that failed first, as in `exit_code`.
        more: Further facts for the JSON; not None if this command recovers the run.
        kept: Whether the run is, or could be, recovered on this machine.
        states: Returns the states of the workers' nodes, for advice.
    """
    state = run_state(outcomes)
    if as_json:
        with output.read_or_not():
            output.as_json({**summary(run_id, outcomes), **(more or {})})
    if state == "succeeded":
        leftovers.warn(outcomes)
        every = "all " * (len(outcomes) > 1)
        output.info(f"run {run_id} succeeded on {every}{texts.count(len(outcomes), 'rank')}", Meaning.OK)
        _say_reasons(outcomes)
        return ExitCode.OK
    if not as_json:
        with output.read_or_not():
            table(outcomes)
    failure(outcomes, shown)
    # A command that recovers the run (`more` is not None) needs no advice on how to start it again.
    say_state(run_id, outcomes, kept=kept or more is not None, states=states)
    return exit_code_at_end(outcomes, of_rank=of_rank)


def _say_reasons(outcomes: Sequence[Outcome]) -> None:
    """Print the reasons in the outcomes of a run that succeeded: no table shows them."""
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
    """Print the state of a run that is not followed any more, and the commands that help.

    Args:
        run_id: The id of the run.
        outcomes: The outcomes of its ranks.
        kept: Whether the run is, or could be, recovered on this machine: then do not advise to start it again.
        states: Returns the states of the workers' nodes, for `advice.again`.
    """
    state = run_state(outcomes)
    output.info(f"run {run_id}: {state}")
    if state in UNKNOWN:
        output.info(f"  nodes:  {output.on_fleet('tpu_ops list')}")
        hints(run_id)
    if not kept:
        steps(advice.again(outcomes, states))


def hints(run_id: str) -> None:
    """Print the commands that show and stop a run that may be active."""
    steps(advice.reaching(run_id))


def steps(found: Sequence[advice.Step]) -> None:
    """Print advice, one line for each step."""
    width = max([7, *(len(step.what) + 1 for step in found)])
    for step in found:
        output.info(f"  {step.what + ':' if step.what else '':<{width}} {output.on_fleet(step.how)}")


def failure(outcomes: Sequence[Outcome], shown: Sequence[int]) -> None:
    """Print which rank of an ended run failed first, and warn of processes and lockfiles that are left."""
    failed_first(outcomes, shown)
    leftovers.warn(outcomes)


def failed_first(outcomes: Sequence[Outcome], shown: Sequence[int]) -> int | None:
    """Print which rank failed first and why, if a rank failed, and the last lines of its log if they were not shown.

    Returns:
        The rank whose output contains the cause.
    """
    if not (first := first_failure(outcomes)):
        return None
    who = f"rank {first.rank} ({first.host})"
    refused = any(outcome.state == "refused" and outcome.rank == first.rank for outcome in outcomes)
    text = f"the run did not begin: {who}: {first.cause}" if refused else f"{who} failed first: {first.cause}"
    if first.cause.startswith(STALLED):
        text = first.text
    output.info(text, Meaning.FAILED)
    if known := known_failures.of_run(outcomes):
        output.info(f"  {known.what()}")
        output.info(f"  fix: {known.fix}")
    if raised := raised_before(outcomes, first):
        what = f"printed a traceback {raised.before:.0f} s before that, which may be the cause"
        output.info(f"rank {raised.rank} ({raised.host}) {what}: {raised.error}")
        _last_lines(raised.rank, raised.text, shown)
        return raised.rank
    tail = outcomes[first.rank].tail if first.rank < len(outcomes) else ""
    if first.rank not in shown and tail:
        output.info(f"last lines of the log on {first.host}:")
    _last_lines(first.rank, tail, shown)
    return first.rank


def _last_lines(rank: int, text: str, shown: Sequence[int]) -> None:
    for line_ in text.splitlines()[-TAIL_LINES:] if rank not in shown else ():
        line_aside([rank], line_)


def notes(outcomes: Sequence[Outcome]) -> None:
    """Print what is noted of an active run's ranks: the notes in their records, and what is the case now."""
    noted = [note for outcome in outcomes for note in (outcome.record or {}).get("notes") or ()]
    notices = watched.notices(outcomes)
    # Each rank has also a note of a notice that holds: one line for all workers is enough.
    now = tuple("".join(notice.partition(": ")[1:]) for notice in notices)
    past = dict.fromkeys(note for note in noted if not note.endswith(now))
    for text in filter(None, (*past, watched.told(outcomes), *notices)):
        output.info(f"  {text}")
