"""What to do about a run, in words, from what was seen of it: the only place that decides this on the controller.

What a worker has seen itself, as the run that has it, it says itself (`host/fitness.py`). Commands in the words are on
no fleet yet (`cli/commands.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tpu_ops import texts
from tpu_ops.runs.outcomes import ON, Outcome

#: What to do where a name is taken and nothing more is known of its run.
OTHER_NAME = "choose another --name"
#: What to do about a run that somebody has stopped before it began.
STOPPED = "start it under another --name if it is wanted again"


class Step(NamedTuple):
    """What to do: what for in a word, and how."""

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


def resuming(run_id: str) -> Step:
    """Return how to go on with a recovery that no process is at."""
    return Step("recover", f"tpu_ops attach {run_id} --recover")


def name_taken(run_id: str, *, resumes: bool = False) -> str:
    """Return what to do where the name of a new run is that of one which is on.

    Args:
        run_id: The run.
        resumes: Whether it is one whose recovery has no process any more.
    """
    follow, stop = reaching(run_id)
    first = f"`{resuming(run_id).how}` resumes it" if resumes else f"`{follow.how}` follows it"
    return f"{first}, `{stop.how}` ends it; or {OTHER_NAME}"
