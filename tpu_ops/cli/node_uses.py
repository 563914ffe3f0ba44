"""Tell the user what uses nodes that a command is about to delete or stop: active runs and recoveries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tpu_ops import texts
from tpu_ops.cli import output
from tpu_ops.cloud.node import SERVING_STATES, Node
from tpu_ops.errors import OpsError
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import holders, records, recovery


class Uses(NamedTuple):
    """The active runs on some nodes.

    Attributes:
        runs: Resource name of each node -> run id -> person.
        in_words: The runs of all nodes as words, such as "run r1 of ada is active on this node"; empty if none.
    """

    runs: Mapping[str, Mapping[str, str]]
    in_words: str


def look(fleet: Fleet, nodes: Sequence[Node]) -> Uses:
    """Ask the workers of nodes for their active runs; warn of workers that do not answer, and of runs remembered there.

    Args:
        fleet: The fleet.
        nodes: The nodes.
    """
    serving = [node for node in nodes if node.state in SERVING_STATES]
    if not serving:
        return Uses({}, "")
    runs, silent = holders.active_on(fleet, [node.full_name for node in serving])
    if silent:
        output.warning(
            f"{texts.folded(list(silent))} cannot tell whether a run is active: {next(iter(silent.values()))}"
        )
        _warn_of_remembered(fleet, serving, silent)
    where = "on this node" if len(nodes) == 1 else "on these nodes"
    words = holders.named({run_id: person for its in runs.values() for run_id, person in its.items()})
    return Uses(runs, f"{words} {where}" if words else "")


def _hosts(fleet: Fleet, node: Node) -> list[str]:
    return [worker.host for worker in fleet.workers if worker.node.full_name == node.full_name]


def _warn_of_remembered(fleet: Fleet, nodes: Sequence[Node], silent: Mapping[str, str]) -> None:
    recent = records.recent(fleet.settings.state_dir, records.KEPT)
    for node in nodes:
        if not silent.keys() & set(_hosts(fleet, node)):
            continue
        last = next((known for known in recent if node.node_id in known.node_ids), None)
        if last and not last.ended:
            look = f"`tpu_ops status {last.run_id}`"
            output.warning(
                f"run {last.run_id}, which was started on this machine, may be running on the node: {look}"
                if len(nodes) == 1
                else f"run {last.run_id}, which was started on this machine, may be running on node {node.name}: {look}"
            )


def recoveries(state_dir: Path, nodes: Sequence[Node], does: str) -> Iterator[str]:
    """Yield a warning for each run that uses one of the nodes and that is, or could be, recovered on this machine.

    Nodes are compared by name: a recovery may have recreated a node with another id.

    Args:
        state_dir: The fleet's state directory.
        nodes: The nodes.
        does: What the recovery does with the node, such as "recreates".
    """
    targets = {node.full_name: node.name for node in nodes}
    for path in sorted((state_dir / "runs").glob("*/recovery.json")):
        run_id = path.parent.name
        with contextlib.suppress(OpsError):
            needed = targets.keys() & {made.name for made in recovery.read(state_dir, run_id).plan.nodes}
            if needed:
                what = recovery.note_of(state_dir, run_id) or f"run {run_id}: a process on this machine recovers it"
                names = texts.some(sorted(targets[name] for name in needed))
                which = "this node" if len(nodes) == 1 else f"node {names}" if len(needed) == 1 else f"nodes {names}"
                yield f"{what}; recovery {does} {which} unless `tpu_ops stop {run_id}` ends the recovery"
