"""Carries out the plan of `tpu_ops apply`: deletes and changes first, then creates all nodes at once."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from tpu_ops.cloud import bodies, creation, deletion, lifecycle
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.creation import Claims, Created, CreationTerms, Order
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.nodes import get_node, node_in_words
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.queued_resources import QueuedResource
from tpu_ops.cloud.wish import Wish
from tpu_ops.config import Settings
from tpu_ops.errors import OpsError, UsageError
from tpu_ops.fleet import changing, holdings
from tpu_ops.fleet.grant import Grant
from tpu_ops.fleet.holdings import Guard, Holdings
from tpu_ops.fleet.plan import Action, Step


class Work(NamedTuple):
    """A step, and how it is done.

    Attributes:
        step: The step.
        order: The node in each place in which it may be created; None if the step creates or awaits no node.
        refusal: Why the node cannot be created.
    """

    step: Step
    order: Order | None = None
    refusal: OpsError | None = None


class Result(NamedTuple):
    """The result of a step.

    Attributes:
        step: The step.
        outcome: ``created``, ``resumed``, ``already there``, ``begun``, ``changed``, ``deleted``, or ``failed``.
        wish: The node in the place where it was created; None if the step creates no node.
        error: The error of a failed step.
        seconds: How long it took.
    """

    step: Step
    outcome: str
    wish: Wish | None = None
    error: OpsError | None = None
    seconds: float = 0.0


class Planned(NamedTuple):
    """A plan, and what it is carried out with.

    Attributes:
        works: The steps.
        claims: Where nodes may be created.
    """

    works: tuple[Work, ...]
    claims: Claims


def planned(
    tpu: Tpu, settings: Settings, granted: Grant | None, held: Holdings, steps: Sequence[Step], *, now: dt.datetime
) -> Planned:
    """Find the places of the nodes that a plan creates.

    Args:
        tpu: The client.
        settings: The settings of the fleet.
        granted: The grant; None allows every place.
        held: What exists.
        steps: The plan.
        now: The present time in UTC.

    Raises:
        UsageError: A part of the fleet could not be listed, so the rest of the grant is unknown.
    """
    if not any(step.creates for step in steps):
        nothing = Guard(None, held, now)
        return Planned(tuple(_prepared(step, nothing, ()) for step in steps), nothing)
    but = [name for step in steps for name in step.removed]
    claims = holdings.guard(tpu, settings, granted, now, but=but, held=held)
    rehearsal = claims.copy()
    zones = settings.zones if granted is None and len(settings.zones) == 1 else ()
    return Planned(tuple(_prepared(step, rehearsal, zones) for step in steps), claims)


def _prepared(step: Step, rehearsal: Guard, zones: Sequence[str]) -> Work:
    if step.declared is None:
        return Work(step)
    wish, spot = step.declared.wish, step.declared.spot
    if step.action is Action.WAIT and step.node:
        node = step.node
        there = replace(
            wish,
            zone=node.zone,
            spot=node.preemptible,
            runtime_version=node.runtime_version,
            queued=False,
            valid_until=0,
        )
        return Work(step, Order(wish.name, (there,)))
    if not step.creates:
        return Work(step)
    try:
        places = rehearsal.places(wish, step.declared.zones or zones, spot=spot)
        if not places:
            raise UsageError("no zone is given", where=f"line {step.declared.line}", fix="add `zones`")
        wishes = tuple(replace(wish, zone=zone, spot=is_spot) for zone, is_spot in places)
        # The first place with room is the likely one; creation may end up in another one.
        next(filter(rehearsal.take, wishes), None)
    except OpsError as exc:
        exc.what = f"node {step.name}: {exc.what}"
        return Work(step, refusal=exc)
    return Work(step, Order(wish.name, wishes))


def apply(
    tpu: Tpu,
    settings: Settings,
    works: Sequence[Work],
    terms: CreationTerms,
    *,
    claims: Claims,
    say: Callable[[str], None],
    progress: Callable[[str], Progress],
) -> list[Result]:
    """Do the steps of a plan, and return their results; an error of one step does not end the others.

    Nodes are not created before everything is deleted, since both may need the same quota or name.

    Args:
        tpu: The client.
        settings: The settings of the fleet.
        works: The plan.
        terms: How nodes are created. Requests for queued resources are not waited for.
        claims: Where nodes may be created.
        say: Called with messages, from several threads.
        progress: Given a node's name, returns the function that is called while the step is done.
    """

    def first(work: Work) -> Result | None:
        step, begin = work.step, time.monotonic()
        try:
            outcome = _begin(tpu, settings, step, terms.timeout, progress(step.name))
        except OpsError as exc:
            return Result(step, "failed", error=exc, seconds=time.monotonic() - begin)
        return Result(step, outcome, seconds=time.monotonic() - begin) if outcome else None

    todo = [work for work in works if work.step.does and not work.refusal]
    early = [work for work in todo if work.step.removes or work.step.change]
    results = [result for result in tpu.concurrently(first, early) if result]
    ended = {id(result.step) for result in results}
    ready = [work for work in todo if work.order and id(work.step) not in ended]
    queued = [work for work in ready if work.order and work.order.wishes[0].queued]
    waited = [work for work in ready if work not in queued]
    for part, wait in ((queued, False), (waited, True)):
        orders = [work.order for work in part if work.order]
        done = (
            creation.create_all(tpu, orders, terms._replace(wait=wait), claims=claims, say=say, progress=progress)
            if orders
            else []
        )
        results += [_created(work.step, one) for work, one in zip(part, done, strict=True)]
    return results


def _created(step: Step, one: Created) -> Result:
    return Result(step, one.outcome, one.wish, one.error, one.seconds)


def _begin(tpu: Tpu, settings: Settings, step: Step, timeout: float, progress: Progress) -> str:
    """Delete or change what exists; return the outcome, empty if the node has to be created now.

    Raises:
        CloudError: The API refused, or the deletion or change was not done in time.
    """
    if step.action is Action.AGAIN and step.queued is not None and step.node is None:
        # The node may have come since the plan: the deletion of its queued resource would delete it.
        parent = step.queued.full_name.rpartition("/queuedResources/")[0]
        if _existing(tpu, f"{parent}/nodes/{step.name}"):
            return "already there"
    if step.removes and step.queued is not None:
        _remove_queued(tpu, step.queued, timeout, progress)
    if step.removes and step.node is not None:
        _remove_node(tpu, step.node, timeout, progress)
    if not step.removes and step.node is not None:
        name = step.node.full_name
        changing.change(tpu, settings, name, step.change.edits(name), timeout=timeout, progress=progress)
        return "changed"
    return "" if step.creates else "deleted"


def _existing(tpu: Tpu, name: str) -> Node | None:
    """Return the node with a resource name; None if it does not exist."""
    try:
        return get_node(tpu, name)
    except ApiError as exc:
        if exc.status != "NOT_FOUND":
            raise
        return None


def _remove_node(tpu: Tpu, node: Node, timeout: float, progress: Progress) -> None:
    """Delete a node; do nothing if another command has deleted it, or made another one of its name."""
    what = node_in_words(node.full_name)
    now = _existing(tpu, node.full_name)
    if now is None or (node.node_id and now.node_id != node.node_id):
        return
    lifecycle.delete(tpu, node.full_name, node.node_id, what=what, wait=True, timeout=timeout, progress=progress)


def _remove_queued(tpu: Tpu, queued: QueuedResource, timeout: float, progress: Progress) -> None:
    """Delete a queued resource with its nodes; do nothing if another command has deleted or requested it again."""
    now = bodies.queued(tpu, queued.full_name)
    if now is None or now.created != queued.created:
        return
    deletion.delete_queued(tpu, queued.full_name, queued.created, wait=True, timeout=timeout, progress=progress)


def refusals(works: Sequence[Work]) -> OpsError | None:
    """Return one error for all nodes of a plan that cannot be created; None if there are none."""
    found = [work.refusal for work in works if work.refusal]
    if not found:
        return None
    first = found[0]
    if len(found) > 1:
        first = UsageError(
            f"{len(found)} nodes cannot be created; nothing was changed",
            where=first.where,
            fix=first.fix,
            details=[one.what for one in found],
        )
    return first
