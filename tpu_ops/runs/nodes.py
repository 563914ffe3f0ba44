"""What became of the nodes of a run: nothing is left of it on those that were taken away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tpu_ops.cloud.node import TAKEN_STATES, label_of
from tpu_ops.config import Settings
from tpu_ops.fleet import targets, view
from tpu_ops.runs import control, records
from tpu_ops.runs.outcomes import Outcome


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
    ids = _node_ids(fleet, run_id)
    return tuple(
        replace(outcome, state="gone")
        if outcome.state == "unreachable" and _is_taken(now, ids.get(outcome.host))
        else outcome
        for outcome in outcomes
    )


def states(fleet: view.Fleet) -> dict[str, str]:
    """Return the state of each worker's node, as this machine knows it by now."""
    return {worker.host: worker.node.state for worker in (view.known(fleet.settings) or fleet).workers}


def taken(fleet: view.Fleet, run_id: str) -> Callable[[str], bool]:
    """Return what says of a worker of a run that its node was taken away and nobody brings it back.

    That is known of runs that this machine has started, and does not recover.

    Args:
        fleet: As it is known before anybody asks.
        run_id: The run.
    """
    from tpu_ops.runs import recovery  # whatever is about no run's end does without it

    state_dir = fleet.settings.state_dir
    ours = records.read(state_dir, run_id) and not recovery.is_kept(state_dir, run_id)
    ids = _node_ids(fleet, run_id) if ours else {}

    def found(host: str) -> bool:
        now = view.known(fleet.settings) if ours else None
        return now is not None and _is_taken(now, ids.get(host))

    return found


def last_started(fleet: view.Fleet, word: str) -> str:
    """Return what shows the last run that this machine has started on the nodes of a target; empty where it knows none.

    Args:
        fleet: The fleet.
        word: The target, or what is none.
    """
    if not control.is_target(fleet, word):
        return ""
    ids = {worker.node.node_id for worker in targets.select(fleet.workers, word, listed=fleet.listed)}
    recent = records.recent(fleet.settings.state_dir, records.KEPT)
    here = next((known.run_id for known in recent if ids & {*known.node_ids}), "")
    return f"the last run that was started here was {here}: `tpu_ops status {here}`" if here else ""


def _is_taken(now: view.Fleet, node_id: str | None) -> bool:
    """Return whether a node that was there before, if any is meant, is taken away as the fleet is known now."""
    if node_id is None:
        return False
    state = next((node.state for node in now.listed if node.node_id == node_id), "")
    # What is not listed may be in a zone that could not be.
    return state in TAKEN_STATES or not (state or now.unlisted)


def _node_ids(fleet: view.Fleet, run_id: str) -> dict[str, str]:
    """Return the API's id of the node of each worker, those included that a run had which was started here.

    A node that nobody asks for with these settings is not among them: that it is not listed says nothing of it.
    """
    found = {}
    if known := records.read(fleet.settings.state_dir, run_id):
        places = zip(known.nodes, known.node_ids, known.full_names, strict=False)
        ids = {label: node_id for label, node_id, full_name in places if _is_asked_for(fleet.settings, full_name)}
        hosts = zip(records.hosts_now(known, fleet.workers), known.hosts, strict=True)
        found = {host: ids[label_of(before)] for host, before in hosts if label_of(before) in ids}
    return {worker.host: worker.node.node_id for worker in fleet.workers} | found


def _is_asked_for(settings: Settings, full_name: str) -> bool:
    """Return whether the API is asked for all nodes of the project and zone of a node."""
    _, project, _, zone, *_ = full_name.split("/")
    return not settings.snapshot and project in settings.projects and (not settings.zones or zone in settings.zones)
