"""Workers that do not let a person end a run: how it is there is anybody's to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpu_ops.protocol.record import ON
from tpu_ops.runs.outcomes import UNKNOWN, Outcome
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

#: Seconds for each of them to tell.
LIMIT = 10.0


async def looked_at(fanout: Fanout, run_id: str, replies: Mapping[str, Reply]) -> dict[str, Reply]:
    """Given the answers to a stop, return in place of each refusal how the run is there.

    Where another worker allows it, the run has ended there as well.
    """
    denied = {host: {"run_id": run_id} for host, reply in replies.items() if is_denied(reply)}
    looks = await fanout.call(denied, "status", limit=LIMIT) if denied else {}
    return {**replies, **{host: reply for host, reply in looks.items() if reply.ok}}


def is_denied(reply: Reply) -> bool:
    """Return whether a worker does not let the person do what was asked."""
    return reply.kind == "denied"


def with_reasons(outcomes: Sequence[Outcome], replies: Mapping[str, Reply]) -> tuple[Outcome, ...]:
    """Return outcomes with why the person may not end those ranks that are on; the answers are those to the stop."""
    return tuple(
        replace(outcome, reason=replies[outcome.host].problem)
        if outcome.state in ON and is_denied(replies[outcome.host])
        else outcome
        for outcome in outcomes
    )


def refusal(outcomes: Sequence[Outcome], replies: Mapping[str, Reply]) -> Reply | None:
    """Return the answer of a worker that has refused a stop, where nothing else keeps the run on; else None."""
    left = [replies[outcome.host] for outcome in outcomes if outcome.state in (*ON, *UNKNOWN)]
    return left[0] if left and all(map(is_denied, left)) else None
