"""What `tpu_ops list` shows of queued resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tpu_ops import texts
from tpu_ops.cli import output
from tpu_ops.cloud.listing import Place
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.queued_resources import HUSK_STATES, QueuedResource
from tpu_ops.errors import UsageError
from tpu_ops.fleet import queue
from tpu_ops.fleet.queue import Queue

COLUMNS = ("queued resource", "zone", "nodes", "state", "tier", "created", "error")


def require(queued: bool, source: str) -> None:
    """Refuse --queued if the API is not asked.

    Raises:
        UsageError: --queued was given.
    """
    if queued:
        raise UsageError(
            "queued resources are only known to the API, which is not asked",
            where=f"--queued and {source}",
            fix="leave out --queued",
        )


def warnings(found: Queue, said: Collection[str]) -> list[str]:
    """Return warnings about queued resources that could not be listed.

    Args:
        found: The API's answer.
        said: Warnings about nodes; they are not repeated.
    """
    texts_ = [text for text in found.warnings if text not in said]
    return [f"queued resources: {text}" for text in (*texts_, *([str(found.failure)] if found.failure else []))]


def names(one: QueuedResource) -> tuple[str, ...]:
    """Return the names by which --name finds a queued resource: those of its nodes and, last, its own."""
    return (*(asked.name for asked in one.nodes), one.name)


def show(
    queued: Sequence[QueuedResource],
    listed: Iterable[Node],
    now: float,
    *,
    as_json: bool = False,
    unanswered: Collection[Place] = (),
) -> None:
    """Print queued resources, and how to delete those that only use quota.

    Args:
        queued: The queued resources.
        listed: All nodes in the same projects and zones.
        now: The present time.
        as_json: Whether to print JSON.
        unanswered: Places whose queued resources could not be listed.
    """
    listed = list(listed)
    if as_json:
        output.as_json([_facts(one, listed) for one in queued])
        return
    if not queued:
        unknown = " is known, but some places could not be listed: see the warnings" if unanswered else ""
        output.info(f"no queued resource without nodes{unknown}")
        return
    output.table([_row(one, now) for one in queued], COLUMNS)
    if husks := [one.name for one in queued if one.is_husk]:
        many = texts.count(len(husks), "queued resource")
        use, them = ("uses", "it") if len(husks) == 1 else ("use", "them")
        states = " or ".join(HUSK_STATES)
        output.info(f"{many} in state {states} still {use} quota: `tpu_ops delete --failed` deletes {them}")


def nodes_in_words(one: QueuedResource) -> str:
    """Return the nodes that a queued resource requests, as in ``2 x v4-8``."""
    kinds = Counter(asked.accelerator_type for asked in one.nodes)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "-"


def _row(one: QueuedResource, now: float) -> dict[str, str]:
    created = texts.moment(one.created)
    return {
        "queued resource": one.name,
        "zone": one.zone,
        "nodes": nodes_in_words(one),
        "state": one.state,
        "tier": one.tier,
        "created": "-" if created is None else texts.ago(created, now),
        "error": one.error,
    }


def _facts(one: QueuedResource, listed: Iterable[Node]) -> dict[str, Any]:
    missing = queue.missing(one, listed)
    return {
        "name": one.name,
        "project": one.project,
        "zone": one.zone,
        "state": one.state,
        "tier": one.tier,
        "create_time": one.created,
        "nodes": [
            {"name": asked.name, "accelerator_type": asked.accelerator_type, "exists": asked.name not in missing}
            for asked in one.nodes
        ],
        "error": one.error,
    }
