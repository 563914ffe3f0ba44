"""Handles refusals: a worker does not let the user stop a run. Any user is still allowed to read the run's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpu_ops.protocol.record import ON
from tpu_ops.runs.outcomes import UNKNOWN, Outcome
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

#: Seconds for each worker to answer.
LIMIT = 10.0


async def looked_at(fanout: Fanout, run_id: str, replies: Mapping[str, Reply]) -> dict[str, Reply]:
    """Replace each refusal among the workers' answers to a stop by the current state of the run on that worker.

    If another worker allowed the stop, the run has ended on the refusing worker as well.
    """
    denied = {host: {"run_id": run_id} for host, reply in replies.items() if is_denied(reply)}
    looks = await fanout.call(denied, "status", limit=LIMIT) if denied else {}
    return {**replies, **{host: reply for host, reply in looks.items() if reply.ok}}


def is_denied(reply: Reply) -> bool:
    """Return whether a worker refused a request because the user is not allowed to make it."""
    return reply.kind == "denied"


def with_reasons(outcomes: Sequence[Outcome], replies: Mapping[str, Reply]) -> tuple[Outcome, ...]:
    """Return the outcomes; the reason of a rank that is active because its worker refused the stop is this refusal."""
    return tuple(
        replace(outcome, reason=replies[outcome.host].problem)
        if outcome.state in ON and is_denied(replies[outcome.host])
        else outcome
        for outcome in outcomes
    )


def refusal(outcomes: Sequence[Outcome], replies: Mapping[str, Reply]) -> Reply | None:
    """Return a worker's refusal of a stop if refusals are the only cause why the run is still active; else None."""
    left = [replies[outcome.host] for outcome in outcomes if outcome.state in (*ON, *UNKNOWN)]
    return left[0] if left and all(map(is_denied, left)) else None
