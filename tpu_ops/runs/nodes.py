"""Finds out whether the nodes of a run were taken away, so that their ranks are gone."""

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
    """Return the outcomes; an unreachable rank whose node was taken away gets the state "gone".

    Args:
        fleet: The fleet as it was known before the workers were asked.
        run_id: The run.
        outcomes: The outcomes of the ranks of the run.
        begun: When the workers were asked, in seconds since 1970. A snapshot of the nodes that is older is not used.
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
    """Return the current state of each worker's node, as this machine knows it."""
    return {worker.host: worker.node.state for worker in (view.known(fleet.settings) or fleet).workers}


def taken(fleet: view.Fleet, run_id: str) -> Callable[[str], bool]:
    """Return a function that tells whether a worker's node was taken away and nobody brings it back.

    The function returns True only for runs that this machine has started and does not recover.

    Args:
        fleet: The fleet as it is known before the workers are asked.
        run_id: The run.
    """
    from tpu_ops.runs import recovery  # only needed here

    state_dir = fleet.settings.state_dir
    ours = records.read(state_dir, run_id) and not recovery.is_kept(state_dir, run_id)
    ids = _node_ids(fleet, run_id) if ours else {}

    def found(host: str) -> bool:
        now = view.known(fleet.settings) if ours else None
        return now is not None and _is_taken(now, ids.get(host))

    return found


def last_started(fleet: view.Fleet, word: str) -> str:
    """Return a hint about the last run that this machine started on the nodes of a target; empty if there is none.

    Args:
        fleet: The fleet.
        word: The target, which can be invalid.
    """
    if not control.is_target(fleet, word):
        return ""
    ids = {worker.node.node_id for worker in targets.select(fleet.workers, word, listed=fleet.listed)}
    recent = records.recent(fleet.settings.state_dir, records.KEPT)
    here = next((known.run_id for known in recent if ids & {*known.node_ids}), "")
    return f"the last run that this machine started on these nodes was {here}: `tpu_ops status {here}`" if here else ""


def _is_taken(now: view.Fleet, node_id: str | None) -> bool:
    """Return whether a node, given its earlier id or None, was taken away according to the fleet ``now``."""
    if node_id is None:
        return False
    state = next((node.state for node in now.listed if node.node_id == node_id), "")
    # A node that is not listed might be in a zone that could not be listed.
    return state in TAKEN_STATES or not (state or now.unlisted)


def _node_ids(fleet: view.Fleet, run_id: str) -> dict[str, str]:
    """Return the API's id of each worker's node; for the workers of the run, the id at the time of the run's start.

    Nodes of the run outside the projects and zones of these settings are left out: these nodes are never listed, so a
    missing node means nothing.
    """
    found = {}
    if known := records.read(fleet.settings.state_dir, run_id):
        places = zip(known.nodes, known.node_ids, known.full_names, strict=False)
        ids = {label: node_id for label, node_id, full_name in places if _is_asked_for(fleet.settings, full_name)}
        hosts = zip(records.hosts_now(known, fleet.workers), known.hosts, strict=True)
        found = {host: ids[label_of(before)] for host, before in hosts if label_of(before) in ids}
    return {worker.host: worker.node.node_id for worker in fleet.workers} | found


def _is_asked_for(settings: Settings, full_name: str) -> bool:
    """Return whether these settings list all nodes in the project and zone of a node, given its resource name."""
    _, project, _, zone, *_ = full_name.split("/")
    return not settings.snapshot and project in settings.projects and (not settings.zones or zone in settings.zones)
