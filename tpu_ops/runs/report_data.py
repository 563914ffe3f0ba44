"""Computes the report of a run from what its workers and this machine know. Nothing here asks or looks at a clock.

Times are seconds since 1970. All texts come from workers, programs and users: whoever shows them has to escape them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tpu_ops.protocol.record import ON
from tpu_ops.protocol.spec import COMMIT
from tpu_ops.protocol.values import is_number
from tpu_ops.runs import known_failures, ranks, report_curves, report_stacks
from tpu_ops.runs.outcomes import Outcome, first_failure, newest_records, outcome_of, person, raised_before, run_state
from tpu_ops.runs.report_curves import Curve
from tpu_ops.runs.report_stacks import Stack

#: Maximum number of different outputs and stacks that a report has, and of characters in each.
GROUPS, LONGEST = 12, 16_000
#: Maximum number of characters in a command, a reason and other texts of one line.
LONGEST_LINE = 2_000
#: Maximum number of notes of the supervisor that a report has.
NOTES = 30


@dataclass(frozen=True)
class Span:
    """One attempt of one rank. ``began`` is when its command was executed; ``end`` is None while it is active."""

    attempt: int
    since: float
    began: float | None
    end: float | None
    state: str


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, as far as it is known; ``why`` says what ended it."""

    number: int
    since: float | None
    ended: float | None
    state: str
    why: str = ""


@dataclass(frozen=True)
class Rank:
    """One rank, as its worker reports it.

    Attributes:
        rank: The rank.
        host: Its worker.
        state: As of `Outcome`.
        ending: Its exit code or signal: ``{"code": n}``, ``{"signal": n}`` or None.
        reason: The reason of its end.
        error: The last exception that its program printed; empty if none.
        spans: Its attempts, oldest first.
        use: Mean use of its chips in percent, see `Report.use_of`; None if unknown.
        hbm: The largest part of its chips' HBM in use, in percent; None if unknown.
        last_output: When its program last printed something; None if unknown.
        chips: State of the chips as its supervisor last saw them; empty if unknown.
    """

    rank: int
    host: str
    state: str
    ending: Mapping[str, int] | None
    reason: str
    error: str
    spans: tuple[Span, ...]
    use: float | None
    hbm: float | None
    last_output: float | None
    chips: str


@dataclass(frozen=True)
class Event:
    """What happened to some ranks: ``kind`` is ``stall`` or ``maintenance``."""

    kind: str
    at: float
    ranks: str
    text: str


@dataclass(frozen=True)
class Folded:
    """A text that is the same for some ranks."""

    ranks: str
    text: str


@dataclass(frozen=True)
class Place:
    """A node of the run. ``kind`` is its accelerator type; it and the zone are empty if the node is gone."""

    node: str
    kind: str = ""
    zone: str = ""
    workers: int = 0


@dataclass(frozen=True)
class Sources:
    """What the report of a run is made of.

    Attributes:
        run_id: The run.
        outcomes: The outcomes of its ranks, as commands show them.
        told: Rank -> its worker's answer to the action ``report``; ranks without an answer are left out.
        places: The nodes.
        copied: Attempts of which this machine has copies of logs -> when these were written last.
        tails: Rank -> last lines of the copy of its log on this machine, for ranks without an answer.
        known: Facts from this machine's record of the run: ``argv``, ``since``, ``person``; empty without a record.
        project: The project and commit that a recovery keeps, as in ``vision@<commit>``; empty if unknown.
        recovery: What a process on this machine does to recover the run, in words; empty if nothing.
        state: The state of the run as commands show it; empty means that of the ranks.
        now: The present time.
    """

    run_id: str
    outcomes: Sequence[Outcome]
    told: Mapping[int, Mapping[str, Any]]
    places: tuple[Place, ...] = ()
    copied: Mapping[int, float] | None = None
    tails: Mapping[int, str] | None = None
    known: Mapping[str, Any] | None = None
    project: str = ""
    recovery: str = ""
    state: str = ""
    now: float = 0.0


@dataclass(frozen=True)
class Report:
    """The report of a run.

    Attributes:
        code: The commit, or the digest of the synced code, in words; empty if unknown.
        environments: Ranks -> their environment as it is now, in words.
        first: Who failed first and why, in words; empty if no rank failed.
        known: The failure that the output names by a known text, in words; empty if none.
        raised: A traceback that a rank printed before that, which might be the cause; empty if none.
        use_of: What ``use`` is: ``duty cycle`` or ``HBM bandwidth``; empty if nothing was measured.
        use: Use of the chips over time, in percent.
        hbm: HBM in use over time, in percent.
        output: Output of a rank over time, in bytes per second.
        hangs: Where the processes were when their stacks were taken.
        notes: What the supervisor noted during the run.
        silent: Ranks -> why nothing is known of them.
    """

    run_id: str
    state: str
    attempt: int
    person: str
    argv: tuple[str, ...]
    directory: str
    started_from: str
    since: float | None
    ended: float | None
    made: float
    code: str
    environments: tuple[Folded, ...]
    places: tuple[Place, ...]
    first: str
    known: str
    raised: str
    recovery: str
    attempts: tuple[Attempt, ...]
    ranks: tuple[Rank, ...]
    events: tuple[Event, ...]
    use_of: str
    use: Curve
    hbm: Curve
    output: Curve
    tails: tuple[Folded, ...]
    hangs: tuple[str, ...]
    stacks: tuple[Stack, ...]
    notes: tuple[str, ...]
    silent: tuple[Folded, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as --json prints it."""
        return asdict(self)


def compute(given: Sources) -> Report:
    """Return the report of a run."""
    outcomes, records = given.outcomes, newest_records(given.outcomes)
    known = given.known or {}
    failure = first_failure(outcomes)
    state = given.state or run_state(outcomes)
    spans = {outcome.rank: _spans(outcome, given.told.get(outcome.rank, {})) for outcome in outcomes}
    measured = {rank: report_curves.Measured.of(answer.get("history")) for rank, answer in given.told.items()}
    kind = report_curves.kind_of(measured.values())
    starts = [span.since for found in spans.values() for span in found]
    since = min([*starts, *([float(known["since"])] if known.get("since") else [])], default=None)
    on = state in (*ON, "recovering") or any(span.end is None for found in spans.values() for span in found)
    ended = None if on else max((span.end for found in spans.values() for span in found if span.end), default=None)
    if ended is None and not on:
        ended = known.get("ended")
    window = (since if since is not None else given.now, ended or given.now)
    first = failure.rank if failure else None
    stacks = report_stacks.of_ranks({rank: answer.get("stacks") for rank, answer in given.told.items()})
    return Report(
        run_id=given.run_id,
        state=state,
        attempt=max((int(record["attempt"]) for record in records), default=int(known.get("attempt") or 1)),
        person=_first(records, lambda one: person(one["person"]["name"], one.get("asker") or ""))
        or person(known.get("person") or "", known.get("started_by") or ""),
        argv=tuple(_line(word) for word in _first(records, lambda one: one.get("argv")) or known.get("argv") or ()),
        directory=_line(_first(records, lambda one: one.get("cwd"))),
        started_from=_line(_first(records, lambda one: one.get("started_from"))),
        since=since,
        ended=ended,
        made=given.now,
        code=_code(records, given.project),
        environments=_environments(given.told),
        places=given.places,
        first=_line(failure.text) if failure else "",
        known=_line(found.what()) if (found := known_failures.of_run(outcomes)) else "",
        raised=_raised(outcomes),
        recovery=given.recovery,
        attempts=_attempts(given, state),
        ranks=tuple(_rank(one, given.told.get(one.rank, {}), spans[one.rank], measured, kind) for one in outcomes),
        events=_events(given.told),
        use_of=kind,
        use=report_curves.curve([one.use(kind) for one in measured.values()], window),
        hbm=report_curves.curve([one.hbm() for one in measured.values()], window),
        output=report_curves.curve([one.output() for one in measured.values()], window),
        tails=_folded({rank: text for rank, text in _tails(given).items() if text.strip()}, first),
        hangs=report_stacks.places(stacks),
        stacks=report_stacks.folded(stacks),
        notes=tuple(_line(text) for text in _first(records, lambda one: one.get("notes")) or ())[-NOTES:],
        silent=_folded({one.rank: one.reason for one in outcomes if one.record is None and one.reason}, None),
    )


def _first(records: Iterable[Mapping[str, Any]], fact: Any) -> Any:
    """Return the first fact of the records that is known; an empty text if none is."""
    return next(filter(None, map(fact, records)), "")


def _line(text: object) -> str:
    """Return a text of limited length."""
    shown = str(text)
    return shown if len(shown) <= LONGEST_LINE else f"{shown[:LONGEST_LINE]} ..."


def _code(records: Sequence[Mapping[str, Any]], project: str) -> str:
    found = str(_first(records, lambda one: one.get("code_digest")))
    if project:
        return f"commit {project}"
    if COMMIT.fullmatch(found):
        return f"commit {found}"
    return f"synced code, digest {found}" if found else ""


def _environments(told: Mapping[int, Mapping[str, Any]]) -> tuple[Folded, ...]:
    found = {}
    for rank, answer in told.items():
        if isinstance(one := answer.get("environment"), Mapping):
            packages = one.get("packages") or {}
            named = ", ".join(f"{name} {packages[name]}" for name in sorted(packages))
            words = f"{one.get('path')}: Python {one.get('python')}, digest {one.get('digest')}"
            found[rank] = f"{words}; {named}" if named else words
    return _folded(found, None)


def _spans(outcome: Outcome, answer: Mapping[str, Any]) -> tuple[Span, ...]:
    """Return the attempts of a rank, from its worker's answer and from its record."""
    facts = [*(answer.get("attempts") or ()), *([outcome.record] if outcome.record else [])]
    spans = []
    for number, one in enumerate(facts):
        last = number == len(facts) - 1
        state = outcome.state if last and outcome.record else str(one["state"])
        # A lost rank has no end: its host knows when the next attempt began there.
        later = None if last else float(facts[number + 1]["since"])
        end = one.get("ended") or one.get("exited") or later
        if end is None and state not in (*ON, "unreachable", "unknown"):
            end = one.get("began") or one["since"]
        spans.append(Span(int(one["attempt"]), float(one["since"]), one.get("began"), end, state))
    return tuple(spans)


def _attempts(given: Sources, state: str) -> tuple[Attempt, ...]:
    """Return all attempts that a worker or this machine knows, oldest first."""
    found: dict[int, Attempt] = {}
    for number, at in (given.copied or {}).items():
        why = "no worker knows it any more; this machine has copies of its logs"
        found[number] = Attempt(number, None, at, "unknown", why)
    newest = max((int(one.record["attempt"]) for one in given.outcomes if one.record), default=0)
    earlier: dict[int, list[Outcome]] = {}
    for outcome in given.outcomes:
        for facts in (given.told.get(outcome.rank) or {}).get("attempts") or ():
            one = outcome_of(outcome.rank, outcome.host, facts)
            earlier.setdefault(int(facts["attempt"]), []).append(one)
        if outcome.record and int(outcome.record["attempt"]) < newest:
            earlier.setdefault(int(outcome.record["attempt"]), []).append(outcome)
    latest = [one for one in given.outcomes if one.record and int(one.record["attempt"]) == newest]
    for number, members in sorted({**earlier, **({newest: latest} if latest else {})}.items()):
        known = [member.record for member in members if member.record]
        failure = first_failure(members)
        why = failure.text if failure else _reason(members)
        ends = [one.get("ended") or one.get("exited") for one in known]
        goes_on = number == newest and any(one["state"] in ON for one in known)
        ended = None if goes_on else max(filter(None, ends), default=(given.copied or {}).get(number))
        shown = state if number == newest and state != "recovering" else run_state(members)
        found[number] = Attempt(number, min(float(one["since"]) for one in known), ended, shown, _line(why))
    return tuple(found[number] for number in sorted(found))


def _reason(members: Sequence[Outcome]) -> str:
    return next((member.reason for member in members if member.reason and member.state not in ON), "")


def _rank(
    outcome: Outcome,
    answer: Mapping[str, Any],
    spans: tuple[Span, ...],
    measured: Mapping[int, report_curves.Measured],
    kind: str,
) -> Rank:
    watch = answer.get("watch")
    watch = watch if isinstance(watch, Mapping) else {}
    own = measured.get(outcome.rank, report_curves.Measured())
    last = watch.get("last_output")
    return Rank(
        rank=outcome.rank,
        host=outcome.host,
        state=outcome.state,
        ending=outcome.exit,
        reason=_line(outcome.reason),
        error=_line((outcome.traceback or {}).get("error", "")),
        spans=spans,
        use=report_curves.mean_of(own.use(kind)),
        hbm=max((value for _, value in own.hbm()), default=None),
        last_output=float(last or 0) if is_number(last) else None,
        chips=_line(watch.get("chips") or ""),
    )


def _events(told: Mapping[int, Mapping[str, Any]]) -> tuple[Event, ...]:
    """Return stalls and notices of all attempts; those of several ranks of an attempt with the same text are one."""
    found: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for rank, answer in told.items():
        for attempt, watch in _watches(answer):
            for kind, words in (("stall", "sign"), ("maintenance", "what")):
                one = watch.get(kind)
                if isinstance(one, Mapping) and is_number(one.get("at")):
                    key = kind, _line(one.get(words) or ""), attempt
                    found.setdefault(key, []).append((rank, float(one["at"])))
    events = [
        Event(kind, min(at for _, at in seen), ranks.folded(sorted(rank for rank, _ in seen)), text)
        for (kind, text, _), seen in found.items()
    ]
    return tuple(sorted(events, key=lambda event: event.at))


def _watches(answer: Mapping[str, Any]) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """Yield the number of each attempt that a worker knows, and what its supervisor noted last."""
    last = {**(answer.get("record") or {}), "watch": answer.get("watch")}
    for facts in (*(answer.get("attempts") or ()), last):
        if isinstance(watch := facts.get("watch"), Mapping):
            yield int(facts.get("attempt") or 0), watch


def _raised(outcomes: Sequence[Outcome]) -> str:
    failure = first_failure(outcomes)
    found = raised_before(outcomes, failure) if failure else None
    if found is None:
        return ""
    return _cut(f"rank {found.rank} ({found.host}) raised this {found.before:.0f} s before:\n{found.text}")


def _tails(given: Sources) -> dict[int, str]:
    """Return the last lines of each rank's output: from its worker, else from a copy here."""
    told = {rank: str(answer.get("tail") or "") for rank, answer in given.told.items()}
    return {**(given.tails or {}), **told}


def _cut(text: str) -> str:
    """Return the end of a text, of limited length."""
    return text if len(text) <= LONGEST else f"... {text[-LONGEST:]}"


def _folded(found: Mapping[int, str], first: int | None) -> tuple[Folded, ...]:
    """Return each different text with its ranks: that of the rank ``first`` first, and at most `GROUPS` of them."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(found, key=lambda rank: (rank != first, rank)):
        groups.setdefault(_cut(found[rank]), []).append(rank)
    every = [Folded(ranks.folded(sorted(members)), text) for text, members in groups.items()]
    if len(every) <= GROUPS:
        return tuple(every)
    left = [rank for text, members in [*groups.items()][GROUPS:] for rank in members]
    rest = replace(every[GROUPS], ranks=ranks.folded(sorted(left)), text="(left out, to keep this short)")
    return (*every[:GROUPS], rest)
