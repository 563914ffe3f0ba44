"""Finds the nodes that nobody has used for a while, from what their workers tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tpu_ops import texts
from tpu_ops.cloud.node import Node, without_workers
from tpu_ops.ssh.replies import Reply

#: Seconds for each worker to answer.
LIMIT = 45.0

IDLE, USED, UNKNOWN = "idle", "used", "unknown"
#: Sign of a node that nobody is known to have used since it was created.
CREATED = "created"


class Caller(Protocol):
    """Sends a request to the launchers of several workers at once, as `Fanout` does."""

    async def call(self, requests: Mapping[str, Mapping[str, Any]], action: str, *, limit: float) -> dict[str, Reply]:
        """Return the reply of each worker."""


class Verdict(NamedTuple):
    """Whether a node is idle.

    Attributes:
        node: The node.
        state: `IDLE`, `USED` or `UNKNOWN`.
        since: When the node was used last, in seconds since 1970; None if unknown.
        sign: The last use in words, as in ``run exp of ada``; empty if unknown.
        reason: Why it is unknown whether the node is idle; empty if it is known.
    """

    node: Node
    state: str
    since: float | None = None
    sign: str = ""
    reason: str = ""


async def ask(caller: Caller, hosts: Sequence[str], *, limit: float = LIMIT) -> dict[str, Reply]:
    """Ask all workers at once who has used them last. ``limit`` is in seconds, for each worker."""
    return await caller.call({host: {} for host in hosts}, "activity", limit=limit) if hosts else {}


def is_younger(node: Node, limit: float, now: float) -> bool:
    """Return whether a node was created less than ``limit`` seconds ago: it cannot have been idle for so long."""
    age = node.age(now)
    return age is not None and age < limit


def verdict(node: Node, replies: Mapping[str, Reply], limit: float, now: float) -> Verdict:
    """Return whether a node has been idle for ``limit`` seconds.

    A node is used as long as one of its workers is. It is idle only if all its workers have answered.

    Args:
        node: The node.
        replies: The replies of the node's workers to the action ``activity``, by worker.
        limit: The time in seconds.
        now: The present time, in seconds since 1970.
    """
    age = node.age(now)
    uses = [(now - age, CREATED)] if age is not None else []
    for reply in replies.values():
        if reply.ok:
            uses += [_use(sign, now, float(reply.value["clock"])) for sign in reply.value["signs"]]
    since, sign = max(uses, default=(None, ""))
    if since is not None and now - since < limit:
        return Verdict(node, USED, since, sign)
    reason = gap(node, replies)
    if not reason and since is None:
        reason = "the API does not tell when it was created, and nobody has used it"
    return Verdict(node, UNKNOWN if reason else IDLE, since, sign, reason)


def gap(node: Node, replies: Mapping[str, Reply]) -> str:
    """Return why the workers of a node have not told all its uses; empty if they have."""
    if len(replies) < max(1, node.worker_count):
        return without_workers(node) if not node.worker_count else "not all workers were asked"
    problems = {host: problem for host, reply in replies.items() if (problem := _problem(reply))}
    return f"{texts.folded(list(problems))}: {next(iter(problems.values()))}" if problems else ""


def _use(sign: Mapping[str, Any], now: float, clock: float) -> tuple[float, str]:
    """Return the time of a use by this machine's clock, and the use in words."""
    at = now if sign["now"] else min(now, now - (clock - float(sign["at"])))
    if sign["kind"] == "run":
        return at, f"run {sign['what']} of {sign['who']}"
    if sign["kind"] == "chip":
        return at, f"process of {sign['who']} on a chip: {sign['what']}"
    return at, f"login of {sign['who']} ({sign['what']})"


def _problem(reply: Reply) -> str:
    """Return why a worker cannot tell all its uses; empty if it can."""
    if reply.ok:
        return str(next(iter(reply.value["unknown"]), ""))
    if reply.is_old:
        return "its launcher is too old to tell who has used it (`tpu_ops configure` updates it)"
    return reply.problem
