"""Decides what to advise a user about a run, given the outcomes of its ranks or the probes of its workers.

A worker decides on its own what to advise about the run that holds it (`host/fitness.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tpu_ops import texts
from tpu_ops.cloud.node import SERVING_STATES, TAKEN_STATES, label_of
from tpu_ops.protocol.record import ON
from tpu_ops.runs import endings
from tpu_ops.runs.outcomes import KNOWS_NOTHING, UNKNOWN, Outcome, first_failure, newest_records, run_state

#: Fix if a name is in use by another run, about which nothing more is known.
OTHER_NAME = "choose another --name"
#: Fix if a user stopped the run before it began.
STOPPED = "to start the run again, use another --name"
#: State of a run while its next attempt is being prepared.
RECOVERING = "recovering"


class Recoverer(NamedTuple):
    """The recovery of a run on this machine, whether or not a process is now performing the recovery.

    Attributes:
        run_id: The run.
        attempt: Number of the last attempt that was started.
        held: Whether a process is now performing the recovery.
        pending: Whether this process is preparing the next attempt.
        who: The user and machine of this process, as in `spec.here`; empty if unknown.
        pid: Pid of this process; 0 if unknown.
        since: When the preparation of the attempt began, in seconds since 1970; 0 if unknown.
        logs: Directory of the last attempt's logs on this machine; empty if there are none.
    """

    run_id: str
    attempt: int = 0
    held: bool = False
    pending: bool = False
    who: str = ""
    pid: int = 0
    since: float = 0.0
    logs: str = ""

    def facts(self) -> dict[str, object]:
        """Return the facts about the recovery that --json prints."""
        by = {"who": self.who or None, "pid": self.pid or None}
        return {"attempt": self.attempt + self.pending, **by, "since": self.since or None}


class Step(NamedTuple):
    """One step that a user is advised to do: a label (`what`) and the command (`how`)."""

    what: str
    how: str


def reaching(run_id: str) -> tuple[Step, ...]:
    """Return the commands that follow and stop a run that might be active."""
    return Step("follow", f"tpu_ops attach {run_id}"), Step("stop", f"tpu_ops stop {run_id}")


def starting(outcomes: Sequence[Outcome]) -> str:
    """Return how many ranks of a starting run are ready, and its timeout, as words that follow the run's state."""
    known = [outcome.record for outcome in outcomes if outcome.record and outcome.state in ON]
    # A rank that cannot start records its reason while it waits to report this to rank 0.
    ready = sum(not record.get("reason") for record in known)
    # Rank 0 is asked first to start, and the timeout begins at that moment.
    since = min(float(record["since"]) for record in known)
    until = since + float(known[0]["barrier"])
    waits = (
        f"{ready} of {texts.count(len(outcomes), 'rank')} ready; the start is given up at {texts.at(until)} "
        "unless all are ready"
    )
    return f"since {texts.at(since)}, {waits}"


def again(outcomes: Sequence[Outcome], states: Callable[[], Mapping[str, str]]) -> list[Step]:
    """Return the steps that start a run again if nothing is left of the run or a host failed; otherwise nothing.

    Args:
        outcomes: The outcomes of the ranks of a run that this machine does not recover.
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
        found.append(Step("", "with --recover a run brings lost nodes back and continues by itself"))
    elif host_failed:
        found.append(Step("", "with --recover a run continues by itself after a host has failed"))
    return found


def _is_gone(outcomes: Sequence[Outcome]) -> bool:
    """Return whether nothing is left of a run. A single active rank would still hold the run's name and its worker."""
    states = {outcome.state for outcome in outcomes}
    return "gone" in states and not states & {"failed", *UNKNOWN, *ON} and not first_failure(outcomes)


def _is_away(outcome: Outcome, states: Mapping[str, str]) -> bool:
    """Return whether a worker's node cannot run anything. A worker that has answered about the run can."""
    state = states.get(outcome.host, "")
    answered = outcome.record is not None or outcome.reason == KNOWS_NOTHING
    return state in TAKEN_STATES or (state not in SERVING_STATES and not answered)


def _how(away: str | None, silent: Collection[str]) -> str:
    """Return the state of a node as words: ``away`` if it is not None, else which workers of the node do not answer."""
    if away is not None:
        return away or "not listed"
    return f"there, but {texts.folded([*silent])} did not answer" if silent else "there"


def resuming(run_id: str) -> Step:
    """Return the command that resumes a recovery which no process is performing."""
    return Step("recover", f"tpu_ops attach {run_id} --recover")


def state(of_workers: str, found: Recoverer | None) -> str:
    """Return the state of a run: its state on the workers, or RECOVERING if this machine is starting it again."""
    at_it = found is not None and found.held and (found.pending or of_workers == "gone")
    return RECOVERING if at_it and of_workers not in ON else of_workers


def recovery(found: Recoverer | None) -> str:
    """Return the state of a run's recovery on this machine as words; empty if this machine does not recover the run."""
    if found is None:
        return ""
    if not found.held:
        return f"run {found.run_id}: no process is recovering it; `{resuming(found.run_id).how}` resumes the recovery"
    by = [*filter(None, [found.who]), *([f"pid {found.pid}"] if found.pid else [])]
    if not found.pending:
        return f"run {found.run_id}: a process on this machine recovers it{_aside(by)}"
    since = [f"since {texts.at(found.since)}"] if found.since else []
    logs = f"; logs of attempt {found.attempt} are in {found.logs}" if found.logs else ""
    what = f"a process on this machine is preparing attempt {found.attempt + 1}"
    return f"run {found.run_id}: {what}{_aside([*by, *since])}{logs}"


def other_machine(run_id: str, outcomes: Sequence[Outcome], here: str) -> str:
    """Return what is known of the recovery of a run that lost hosts and was started on another machine; else empty.

    Only the machine that started a run stores the state of its recovery.

    Args:
        run_id: The run.
        outcomes: The outcomes of its ranks.
        here: This machine, as in `spec.here`.
    """
    known = newest_records(outcomes)
    machine = next((record["started_from"] for record in known if record.get("started_from")), "")
    if machine in ("", here) or not (run_state(outcomes) in ("gone", *UNKNOWN) or endings.host_failed(outcomes)):
        return ""
    attempt = known[0]["attempt"]
    # Only a recovery starts further attempts.
    how = f" with --recover (attempt {attempt} was the last one seen)" if attempt > 1 else ""
    asks = f"`tpu_ops status {run_id}` there shows whether it is being recovered"
    return f"run {run_id} was started on {machine}{how}: {asks}"


def _aside(words: Sequence[str]) -> str:
    return f" ({', '.join(words)})" if words else ""


def other_environment(venv: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return in words how a worker's environment differs from that of most workers, from their probes."""
    return f"the worker's environment differs: {environment_differences(venv, usual, 'others')}"


def environment_differences(venv: Mapping[str, Any], usual: Mapping[str, Any], called: str) -> str:
    """Return in words how an environment differs from another one, which `called` names, from their probes."""
    # Launchers of older versions report only some of the installed packages.
    key = "installed" if "installed" in venv and "installed" in usual else "packages"
    own, others, first = venv[key], usual[key], {*venv["packages"], *usual["packages"]}
    parts = [
        f"{name} {own.get(name, 'missing')} ({called} {others.get(name, 'none')})"
        for name in sorted({*own, *others}, key=lambda name: (name not in first, name))
        if own.get(name) != others.get(name)
    ]
    if venv["python"].split(".")[:2] != usual["python"].split(".")[:2]:
        parts.insert(0, f"Python {venv['python']} ({called} {usual['python']})")
    return texts.some(parts) or f"digest {venv['digest']} ({called} {usual['digest']})"


def name_taken(run_id: str, *, resumes: bool = False) -> str:
    """Return the fix for a new run whose name is that of an active run.

    Args:
        run_id: The active run.
        resumes: Whether the active run has a recovery that no process is performing.
    """
    follow, stop = reaching(run_id)
    first = f"`{resuming(run_id).how}` resumes the active run" if resumes else f"`{follow.how}` follows the active run"
    return f"{first}, `{stop.how}` ends it; or {OTHER_NAME}"
