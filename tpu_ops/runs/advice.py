"""Advice about a run from what was seen of it; no other module of the controller decides this.

What a worker has seen itself, as the run that has it, it says itself (`host/fitness.py`). Commands in the words are on
no fleet yet (`cli/commands.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from tpu_ops import texts
from tpu_ops.cloud.node import SERVING_STATES, TAKEN_STATES, label_of
from tpu_ops.protocol.record import ON
from tpu_ops.runs import endings
from tpu_ops.runs.outcomes import KNOWS_NOTHING, UNKNOWN, Outcome, first_failure

#: What to do where a name is taken and nothing more is known of its run.
OTHER_NAME = "choose another --name"
#: What to do about a run that somebody has stopped before it began.
STOPPED = "start it under another --name if it is wanted again"
#: State of a run whose next attempt is being prepared.
RECOVERING = "recovering"


class Recoverer(NamedTuple):
    """The recovery of a run on this machine, with or without a process.

    Attributes:
        run_id: The run.
        attempt: The last one that was started.
        held: Whether a process is at it.
        pending: Whether that prepares the next attempt.
        pid: The process; 0 where it is not known.
        since: Since when it prepares the attempt, in seconds since 1970; 0 where that is not known.
        logs: Where the logs of the last attempt are kept here; empty where there is none.
    """

    run_id: str
    attempt: int = 0
    held: bool = False
    pending: bool = False
    pid: int = 0
    since: float = 0.0
    logs: str = ""

    def facts(self) -> dict[str, object]:
        """Return what --json tells of it."""
        return {"attempt": self.attempt + self.pending, "pid": self.pid or None, "since": self.since or None}


class Step(NamedTuple):
    """One step of an advice: its purpose in a word, and the command."""

    what: str
    how: str


def reaching(run_id: str) -> tuple[Step, ...]:
    """Return how to get at a run that may be on, and how to end it."""
    return Step("follow", f"tpu_ops attach {run_id}"), Step("stop", f"tpu_ops stop {run_id}")


def starting(outcomes: Sequence[Outcome]) -> str:
    """Return how far the start of a run has come which waits at the barrier, in words that follow its state."""
    known = [outcome.record for outcome in outcomes if outcome.record and outcome.state in ON]
    # A rank that cannot start says why while it waits for rank 0 to hear of it.
    ready = sum(not record.get("reason") for record in known)
    # Rank 0 is asked first, and counts from then.
    since = min(float(record["since"]) for record in known)
    until = since + float(known[0]["barrier"])
    waits = f"{ready} of {texts.count(len(outcomes), 'rank')} ready; given up at {texts.at(until)} unless all are"
    return f"since {texts.at(since)}, {waits}"


def again(outcomes: Sequence[Outcome], states: Callable[[], Mapping[str, str]]) -> list[Step]:
    """Return how to go on where nothing is left of a run, or it has failed with a host; empty where neither is so.

    Args:
        outcomes: How its ranks are, of a run that is not recovered on this machine.
        states: Returns the state of each worker's node, as this machine knows it by now.
    """
    host_failed = endings.host_failed(outcomes)
    if not (host_failed or _is_gone(outcomes)):
        return []
    known = states()
    hosts: dict[str, list[str]] = {}
    for outcome in outcomes:
        hosts.setdefault(label_of(outcome.host), []).append(outcome.host)
    silent = [outcome.host for outcome in outcomes if outcome.state in UNKNOWN]
    away = {label_of(one.host): known.get(one.host, "") for one in outcomes if _is_away(one, known)}
    nodes = [f"{label} is {_how(away.get(label), {*its} & {*silent})}" for label, its in hosts.items()]
    nodes += [f"{outcome.host}: {outcome.reason}" for outcome in outcomes if endings.of_host(outcome)]
    waits = [f"{texts.some([*away])} {'is' if len(away) == 1 else 'are'} READY"] if away else []
    if left := [host for host in silent if label_of(host) not in away]:
        waits.append(f"{texts.folded(left)} answer{'s' if len(left) == 1 else ''}")
    if waits:
        nodes.append("`tpu_ops list` shows their state now")
    start = f"tpu_ops train {','.join(hosts)} --name OTHER -- COMMAND" + (", once " * bool(waits)) + " and ".join(waits)
    found = [Step("nodes", "; ".join(nodes)), Step("again", start)]
    if away or any(outcome.state == "gone" and outcome.reason != KNOWS_NOTHING for outcome in outcomes):
        found.append(Step("", "with --recover a run brings lost nodes back and goes on by itself"))
    elif host_failed:
        found.append(Step("", "with --recover a run goes on by itself after a host has failed"))
    return found


def _is_gone(outcomes: Sequence[Outcome]) -> bool:
    """Return whether nothing is left of a run: one rank that is on keeps its name and its worker."""
    states = {outcome.state for outcome in outcomes}
    return "gone" in states and not states & {"failed", *UNKNOWN, *ON} and not first_failure(outcomes)


def _is_away(outcome: Outcome, states: Mapping[str, str]) -> bool:
    """Return whether the node of a rank's worker is not there to train on: a worker that has told of the run was."""
    state = states.get(outcome.host, "")
    answered = outcome.record is not None or outcome.reason == KNOWS_NOTHING
    return state in TAKEN_STATES or (state not in SERVING_STATES and not answered)


def _how(away: str | None, silent: Collection[str]) -> str:
    """Return how a node is: its state where that is ``away``, and which of its workers do not answer."""
    if away is not None:
        return away or "not listed"
    return f"there, but {texts.folded([*silent])} did not answer" if silent else "there"


def resuming(run_id: str) -> Step:
    """Return how to go on with a recovery that no process is at."""
    return Step("recover", f"tpu_ops attach {run_id} --recover")


def state(of_workers: str, found: Recoverer | None) -> str:
    """Return the state of a run: as its workers tell, unless a process of this machine is starting it again."""
    at_it = found is not None and found.held and (found.pending or of_workers == "gone")
    return RECOVERING if at_it and of_workers not in ON else of_workers


def recovery(found: Recoverer | None) -> str:
    """Return who recovers a run on this machine, or how to go on with that, in words; empty where nothing is to say."""
    if found is None:
        return ""
    if not found.held:
        return f"run {found.run_id}: no process is recovering it; `{resuming(found.run_id).how}` resumes that"
    pid = [f"pid {found.pid}"] if found.pid else []
    if not found.pending:
        return f"run {found.run_id}: a process on this machine recovers it{_aside(pid)}"
    since = [f"since {texts.at(found.since)}"] if found.since else []
    logs = f"; logs of attempt {found.attempt} are in {found.logs}" if found.logs else ""
    what = f"a process on this machine is preparing attempt {found.attempt + 1}"
    return f"run {found.run_id}: {what}{_aside([*pid, *since])}{logs}"


def _aside(words: Sequence[str]) -> str:
    return f" ({', '.join(words)})" if words else ""


def name_taken(run_id: str, *, resumes: bool = False) -> str:
    """Return what to do where the name of a new run is that of one which is on.

    Args:
        run_id: The run.
        resumes: Whether it is one whose recovery has no process any more.
    """
    follow, stop = reaching(run_id)
    first = f"`{resuming(run_id).how}` resumes it" if resumes else f"`{follow.how}` follows it"
    return f"{first}, `{stop.how}` ends it; or {OTHER_NAME}"
