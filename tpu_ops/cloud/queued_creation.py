"""Creates nodes through queued resources. If a command is interrupted, the same command continues to wait."""

from __future__ import annotations

import uuid

from tpu_ops.cloud import bodies, lifecycle, operations
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.node import Json
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.queued_resources import HUSK_STATES
from tpu_ops.cloud.remedies import node_deletion
from tpu_ops.cloud.wish import Wish, must_match
from tpu_ops.errors import CloudError


def create(tpu: Tpu, wish: Wish, body: Json, *, wait: bool, timeout: float, progress: Progress) -> str:
    """Request a node by a queued resource, or continue waiting for one.

    Returns:
        The result, as `lifecycle.create` returns it.

    Raises:
        CloudError: The API refused, a queued resource of this name requests something else or has failed, or the node
            was not ready in time. If the API stopped answering, the error says what is known.
    """
    node, found = lifecycle.find(tpu, wish), bodies.queued(tpu, wish.queue_name)
    if node is not None:
        must_match(wish, node)
        if node.state == "READY":
            return "already there"
        if found is None:
            # An earlier command has requested the node itself.
            asked = body["tpu"]["node_spec"][0]["node"]
            return lifecycle.create(tpu, wish, asked, wait=wait, timeout=timeout, progress=progress)
    if found is None:
        _request(tpu, wish, body)
    else:
        _must_match(wish, found)
    if not wait:
        return "begun"
    then = f"`tpu_ops list` shows its state; `tpu_ops delete {wish.name} --zone {wish.zone}` removes it"
    with lifecycle.begun("the queued resource waits for capacity", f"{lifecycle.AGAIN}; {then}"):
        _wait_for(tpu, wish, timeout, progress)
    return "resumed" if found else "created"


def _request(tpu: Tpu, wish: Wish, body: Json) -> None:
    """Request a queued resource.

    Raises:
        ApiError: The API refused, or it is not known whether it has accepted the request.
    """
    known = "the queued resource may exist"
    try:
        with lifecycle.interrupted(known, lifecycle.AGAIN):
            bodies.create_queued(tpu, wish.queue_name, body, str(uuid.uuid4()))
    except ApiError as exc:
        if exc.status not in (*lifecycle.UNCLEAR, "ALREADY_EXISTS"):
            raise lifecycle.refused(lifecycle.explained(tpu, wish, exc)) from exc
        # The answer was lost, or a colleague was faster.
        try:
            found = bodies.queued(tpu, wish.queue_name)
        except ApiError as failure:
            raise lifecycle.lost(failure, known, lifecycle.AGAIN) from exc
        if found is None:
            raise lifecycle.lost(exc, known, lifecycle.AGAIN) from exc
        _must_match(wish, found)


def _must_match(wish: Wish, found: bodies.Queued) -> None:
    """Check that a queued resource requests the node, and nothing else.

    Raises:
        CloudError: It requests something else.
    """
    asked = [(spec.get("node_id"), *bodies.kind_of(spec["node"])) for spec in found.body["tpu"]["node_spec"]]
    spot = "spot" in found.body
    if [(name, kind, spot or own) for name, kind, own in asked] == [(wish.name, wish.accelerator_type, wish.spot)]:
        return
    words = " and ".join(f"{kind} for node {name}" for name, kind, _ in asked)
    raise CloudError(
        f"a queued resource of this name requests something else: {'spot ' if spot else ''}{words}",
        where=bodies.queued_in_words(wish.queue_name),
        fix=f"use another name, or delete it first: `{node_deletion(wish.name, wish.zone)}`",
    )


def _wait_for(tpu: Tpu, wish: Wish, timeout: float, progress: Progress) -> None:
    """Wait until the queued resource is ACTIVE and its node is READY.

    Raises:
        CloudError: It has failed, or the API does not answer, or the time is over.
    """
    where, state = bodies.queued_in_words(wish.queue_name), ""

    def look() -> bool:
        nonlocal state
        now = bodies.queued(tpu, wish.queue_name)
        state = now.state if now else "not listed yet"
        if now and now.state in HUSK_STATES:
            raise CloudError(
                f"the queued resource is {now.state}{f': {now.error}' if now.error else ''}",
                where=where,
                fix="`tpu_ops delete --failed` removes it, since it uses quota; then run the same command again",
            )
        return bool(now and now.state == "ACTIVE")

    operations.until(look, what=where, timeout=timeout, progress=lambda elapsed: progress(elapsed, state))
    ready = operations.wait_for_state(
        tpu, wish.full_name, through=lifecycle.ON_THE_WAY, what=wish.where, timeout=timeout, progress=progress
    )
    lifecycle.must_be_ready(wish, ready)
