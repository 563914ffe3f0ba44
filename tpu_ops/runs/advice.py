"""Advice about a run, from the outcomes of its ranks or the probes of its workers; no other module decides it.

A worker gives its own advice about the run that holds it (`host/fitness.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tpu_ops import texts
from tpu_ops.cloud.node import SERVING_STATES, TAKEN_STATES, label_of
from tpu_ops.protocol.record import ON
from tpu_ops.runs import endings
from tpu_ops.runs.outcomes import KNOWS_NOTHING, UNKNOWN, Outcome, first_failure

#: Fix for a run name that is in use, if nothing more is known about its run.
OTHER_NAME = "choose another --name"
#: Fix for a run that a user stopped before it began.
STOPPED = "to run it again, start it under another --name"
#: State of a run while its next attempt is being prepared.
RECOVERING = "recovering"


class Recoverer(NamedTuple):
    """The recovery of a run on this machine, whether or not a process is working on it.

    Attributes:
        run_id: The run.
        attempt: The last attempt that was started.
        held: Whether a process is working on the recovery.
        pending: Whether this process is preparing the next attempt.
        pid: The process; 0 if unknown.
        since: When the preparation of the attempt began, in seconds since 1970; 0 if unknown.
        logs: Directory of the last attempt's logs on this machine; empty if there are none.
    """

    run_id: str
    attempt: int = 0
    held: bool = False
    pending: bool = False
    pid: int = 0
    since: float = 0.0
    logs: str = ""

    def facts(self) -> dict[str, object]:
        """Return the recovery as --json prints it."""
        return {"attempt": self.attempt + self.pending, "pid": self.pid or None, "since": self.since or None}


class Step(NamedTuple):
    """One step of an advice: a label and the command."""

    what: str
    how: str


def reaching(run_id: str) -> tuple[Step, ...]:
    """Return the commands that follow and stop a run that may be active."""
    return Step("follow", f"tpu_ops attach {run_id}"), Step("stop", f"tpu_ops stop {run_id}")


def starting(outcomes: Sequence[Outcome]) -> str:
    """Return the progress of a run that waits at the barrier, in words that follow its state."""
    known = [outcome.record for outcome in outcomes if outcome.record and outcome.state in ON]
    # A rank that cannot start records its reason while it waits to report this to rank 0.
    ready = sum(not record.get("reason") for record in known)
    # Rank 0 is asked first, and its timeout counts from then.
    since = min(float(record["since"]) for record in known)
    until = since + float(known[0]["barrier"])
    waits = f"{ready} of {texts.count(len(outcomes), 'rank')} ready; given up at {texts.at(until)} unless all are"
    return f"since {texts.at(since)}, {waits}"


def again(outcomes: Sequence[Outcome], states: Callable[[], Mapping[str, str]]) -> list[Step]:
    """Return how to start a run again if nothing is left of it or a host failed; empty in all other cases.

    Args:
        outcomes: The outcomes of its ranks. The run is not recovered on this machine.
        states: Returns the state of each worker's node, as this machine knows it now.
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
    """Return whether nothing is left of a run: a single active rank would still hold its name and its worker."""
    states = {outcome.state for outcome in outcomes}
    return "gone" in states and not states & {"failed", *UNKNOWN, *ON} and not first_failure(outcomes)


def _is_away(outcome: Outcome, states: Mapping[str, str]) -> bool:
    """Return whether a worker's node cannot run anything; a worker that answered about the run can."""
    state = states.get(outcome.host, "")
    answered = outcome.record is not None or outcome.reason == KNOWS_NOTHING
    return state in TAKEN_STATES or (state not in SERVING_STATES and not answered)


def _how(away: str | None, silent: Collection[str]) -> str:
    """Return the state of a node as words: ``away`` if it is set, else which of its workers do not answer."""
    if away is not None:
        return away or "not listed"
    return f"there, but {texts.folded([*silent])} did not answer" if silent else "there"


def resuming(run_id: str) -> Step:
    """Return the command that resumes a recovery without a process."""
    return Step("recover", f"tpu_ops attach {run_id} --recover")


def state(of_workers: str, found: Recoverer | None) -> str:
    """Return the state of a run: that of its workers, or RECOVERING if a process here is starting it again."""
    at_it = found is not None and found.held and (found.pending or of_workers == "gone")
    return RECOVERING if at_it and of_workers not in ON else of_workers


def recovery(found: Recoverer | None) -> str:
    """Return the state of a run's recovery on this machine as words; empty if there is none."""
    if found is None:
        return ""
    if not found.held:
        return f"run {found.run_id}: no process is recovering it; `{resuming(found.run_id).how}` resumes the recovery"
    pid = [f"pid {found.pid}"] if found.pid else []
    if not found.pending:
        return f"run {found.run_id}: a process on this machine recovers it{_aside(pid)}"
    since = [f"since {texts.at(found.since)}"] if found.since else []
    logs = f"; logs of attempt {found.attempt} are in {found.logs}" if found.logs else ""
    what = f"a process on this machine is preparing attempt {found.attempt + 1}"
    return f"run {found.run_id}: {what}{_aside([*pid, *since])}{logs}"


def _aside(words: Sequence[str]) -> str:
    return f" ({', '.join(words)})" if words else ""


def other_environment(venv: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return in words how a worker's environment differs from that of most workers, from their probes."""
    # Launchers of older versions report only some packages.
    key = "installed" if "installed" in venv and "installed" in usual else "packages"
    own, others, first = venv[key], usual[key], {*venv["packages"], *usual["packages"]}
    parts = [
        f"{name} {own.get(name, 'missing')} (others {others.get(name, 'none')})"
        for name in sorted({*own, *others}, key=lambda name: (name not in first, name))
        if own.get(name) != others.get(name)
    ]
    if venv["python"].split(".")[:2] != usual["python"].split(".")[:2]:
        parts.insert(0, f"Python {venv['python']} (others {usual['python']})")
    difference = texts.some(parts) or f"digest {venv['digest']} (others {usual['digest']})"
    return f"its environment differs: {difference}"


def name_taken(run_id: str, *, resumes: bool = False) -> str:
    """Return the fix for a new run whose name is that of an active run.

    Args:
        run_id: The active run.
        resumes: Whether the active run has a recovery without a process.
    """
    follow, stop = reaching(run_id)
    first = f"`{resuming(run_id).how}` resumes it" if resumes else f"`{follow.how}` follows it"
    return f"{first}, `{stop.how}` ends it; or {OTHER_NAME}"
