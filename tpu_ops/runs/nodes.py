"""What became of the nodes of a run: nothing is left of it on those that were taken away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tpu_ops.config import Settings
from tpu_ops.fleet import view
from tpu_ops.fleet.model import TAKEN_STATES, label_of
from tpu_ops.runs import records, recovery
from tpu_ops.runs.follow import Outcome


def without_nodes(
    fleet: view.Fleet, run_id: str, outcomes: Sequence[Outcome], begun: float = 0.0
) -> tuple[Outcome, ...]:
    """Return outcomes in which a rank is gone whose node was taken away, as far as is known by now.

    Args:
        fleet: As it was known before the workers were asked.
        run_id: The run.
        outcomes: How its ranks are.
        begun: When they were asked (seconds since 1970): what was known before may be so no more.
    """
    now = view.known(fleet.settings) if any(outcome.state == "unreachable" for outcome in outcomes) else None
    if now is None or now.asked_at < begun:
        return tuple(outcomes)
    states, ids = {node.node_id: node.state for node in now.listed}, _node_ids(fleet, run_id)
    # What is not listed may be in a zone that could not be.
    taken = TAKEN_STATES if now.unlisted else (*TAKEN_STATES, "")
    return tuple(
        replace(outcome, state="gone")
        if outcome.state == "unreachable" and outcome.host in ids and states.get(ids[outcome.host], "") in taken
        else outcome
        for outcome in outcomes
    )


def _node_ids(fleet: view.Fleet, run_id: str) -> dict[str, str]:
    """Return the API's id of the node of each worker, those included that a run had which was started here."""
    found = {}
    if known := records.read(fleet.settings.state_dir, run_id):
        ids = dict(zip(known.nodes, known.node_ids, strict=True))
        hosts = zip(records.hosts_now(known, fleet.workers), known.hosts, strict=True)
        found = {host: ids[label_of(before)] for host, before in hosts}
    return {worker.host: worker.node.node_id for worker in fleet.workers} | found


def taken(settings: Settings, run_id: str) -> Callable[[str], bool]:
    """Return what says of a worker of a run that its node was taken away and nobody brings it back.

    That is known of runs that this machine has started, and does not recover.
    """
    ours = records.read(settings.state_dir, run_id) and not recovery.is_kept(settings.state_dir, run_id)

    def found(host: str) -> bool:
        fleet = view.known(settings) if ours else None
        state = next((worker.node.state for worker in fleet.workers if worker.host == host), "") if fleet else "unknown"
        return state in ("", *TAKEN_STATES)

    return found
