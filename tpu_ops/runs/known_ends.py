"""The outcomes of runs whose workers no longer have records, as this machine has recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpu_ops.cloud.node import SERVING_STATES, label_of
from tpu_ops.fleet.view import Fleet
from tpu_ops.protocol.record import ON
from tpu_ops.runs import records
from tpu_ops.runs.outcomes import KNOWS_NOTHING, Outcome, of_refused, of_starting
from tpu_ops.ssh import openssh

#: Reason of a rank whose node was taken away, or replaced by another node.
NODE_GONE = "the node that the rank ran on is gone"
_ENDS = {"succeeded": "succeeded", "failed": "failed", "stopped": "was stopped", "refused": "was refused"}


def remembered(fleet: Fleet, run_id: str, hosts: tuple[str, ...], outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the outcomes of a run; ranks without a worker's record get the end that this machine has recorded.

    Ranks that were not asked to start because another rank refused count as refused (`of_refused`). Ranks that will
    still be asked count as starting (`of_starting`). The workers' records take precedence if the run is active, or if
    they have a later attempt than this machine's record. A serving worker that does not answer might have such a
    record.

    Args:
        fleet: The fleet as it was known before the workers were asked.
        run_id: The run.
        hosts: The workers of the run, by rank.
        outcomes: The outcomes of the ranks of the run.
    """
    from tpu_ops.runs import recovery  # imported here, since only this function needs it

    outcomes = of_starting(of_refused(outcomes))
    known = records.read(fleet.settings.state_dir, run_id)
    if known is None or records.hosts_now(known, fleet.workers) != hosts:
        return tuple(outcomes)
    nodes = {worker.host: worker.node for worker in fleet.workers}
    ids = dict(zip(known.nodes, known.node_ids, strict=False))
    before = {host: ids.get(label_of(name), "") for host, name in zip(hosts, known.hosts, strict=True)}
    # A run that this machine recovers might continue, and end in another way.
    is_over = (
        known.ended in _ENDS
        and not recovery.is_kept(fleet.settings.state_dir, run_id)
        and not _is_later(known, outcomes)
    )

    def as_seen(outcome: Outcome) -> Outcome:
        if outcome.record or outcome.state == "refused":
            return outcome
        node, state, reason = nodes.get(outcome.host), outcome.state, outcome.reason
        is_another = node is not None and node.node_id != before[outcome.host]
        if (state == "gone" and reason != KNOWS_NOTHING) or (is_another and (state == "gone" or outcome.bare)):
            # The old node was replaced: the new node has no launcher yet, or no record of the run.
            state, reason = "gone", NODE_GONE
        elif is_another and state == "unreachable" and openssh.refused(reason):
            reason = f"{NODE_GONE}, and the new node of its name refuses your login: {reason}"
        serves = node is not None and node.state in SERVING_STATES
        if is_over and (state == "gone" or outcome.bare or (state == "unreachable" and not serves)):
            state, reason = known.ended, f"{reason}; as seen from here the run {_ENDS[known.ended]}"
        intent = "stop" if state == "stopped" else ""
        return replace(outcome, state=state, reason=reason, intent=intent, remembered=known.facts())

    return tuple(map(as_seen, outcomes))


def _is_later(known: records.RunRecord, outcomes: Sequence[Outcome]) -> bool:
    """Return whether workers report that the run is active, or a later attempt than this machine's record has."""
    told = [outcome.record for outcome in outcomes if outcome.record]
    return any(record["state"] in ON or int(record["attempt"]) > known.attempt for record in told)
