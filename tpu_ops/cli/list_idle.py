"""What `tpu_ops list --idle` shows."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Sequence
from typing import Any

from tpu_ops import texts
from tpu_ops.cli import output
from tpu_ops.cloud.node import Node
from tpu_ops.fleet import contact, idle
from tpu_ops.fleet.idle import Verdict
from tpu_ops.fleet.view import Fleet
from tpu_ops.ssh.replies import Reply

COLUMNS = ("node", "zone", "type", "tier", "age", "idle_since", "last_use")


def show(fleet: Fleet, nodes: Sequence[Node], limit: float, now: float, *, as_json: bool) -> None:
    """Ask the workers of nodes who has used them last, and print the nodes that are idle.

    Args:
        fleet: The fleet.
        nodes: The nodes.
        limit: Seconds after which an unused node is idle.
        now: The present time.
        as_json: Whether to print JSON, with the nodes that are not idle too.
    """
    replies = _ask(fleet, [node for node in nodes if not idle.is_younger(node, limit, now)])
    verdicts = [idle.verdict(node, replies.get(fleet.labels[node.full_name], {}), limit, now) for node in nodes]
    for verdict in verdicts:
        if verdict.state == idle.UNKNOWN:
            label = fleet.labels[verdict.node.full_name]
            output.warning(f"whether node {label} is idle is unknown: {output.on_fleet(verdict.reason)}")
    found = [verdict for verdict in verdicts if verdict.state == idle.IDLE]
    if as_json:
        output.as_json([_facts(fleet, verdict) for verdict in verdicts])
    elif found:
        output.table([_row(fleet, verdict, now) for verdict in found], COLUMNS)
    else:
        output.info(f"no node is known to have been idle for {texts.age(limit)}")


def _ask(fleet: Fleet, nodes: Sequence[Node]) -> dict[str, dict[str, Reply]]:
    """Return the replies of the workers of these nodes, by the node's label and the worker."""
    names = {node.full_name for node in nodes}
    workers = [worker for worker in fleet.workers if worker.node.full_name in names]
    away = contact.away(fleet, [worker.host for worker in workers])
    hosts = [worker.host for worker in workers if worker.host not in away]
    replies = away | (asyncio.run(idle.ask(contact.fanout(fleet), hosts)) if hosts else {})
    found: dict[str, dict[str, Reply]] = {}
    for worker in workers:
        found.setdefault(worker.label, {})[worker.host] = replies[worker.host]
    return found


def _row(fleet: Fleet, verdict: Verdict, now: float) -> dict[str, object]:
    node = verdict.node
    return {
        "node": fleet.labels[node.full_name],
        "zone": node.zone,
        "type": node.accelerator_type,
        "tier": node.tier,
        "age": texts.age(node.age(now)),
        "idle_since": "-" if verdict.since is None else output.at(verdict.since),
        "last_use": verdict.sign,
    }


def _facts(fleet: Fleet, verdict: Verdict) -> dict[str, Any]:
    node, since = verdict.node, verdict.since
    return {
        "node": node.name,
        "node_label": fleet.labels[node.full_name],
        "project": node.project,
        "zone": node.zone,
        "accelerator_type": node.accelerator_type,
        "use": verdict.state,
        "since": None if since is None else dt.datetime.fromtimestamp(since, dt.UTC).isoformat(timespec="seconds"),
        "sign": verdict.sign,
        "reason": verdict.reason,
    }
