"""Creates and deletes nodes. If a command is interrupted, the same command continues from the current state."""

from __future__ import annotations

import contextlib
import difflib
import logging
import time
from collections.abc import Iterator, Sequence

from tpu_ops import texts
from tpu_ops.cloud import nodes as cloud
from tpu_ops.cloud import operations, zones
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.node import SERVING_STATES, Json, Node
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.remedies import node_deletion
from tpu_ops.cloud.wish import Wish, must_match
from tpu_ops.errors import CloudError

_log = logging.getLogger(__name__)

#: States of a node that becomes READY by itself.
ON_THE_WAY = ("CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING")

#: States of a node that no longer exists, or that will soon be deleted.
_GOING = ("PREEMPTED", "TERMINATED", "DELETING", "STOPPING")

#: Status codes after which it is unknown whether the API has accepted a request.
UNCLEAR = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "CANCELLED")


class Refused(ApiError):
    """The API refused to create a node, or the creation failed: the node is not there."""


def find(tpu: Tpu, wish: Wish) -> Node | None:
    """Return the existing node of the requested name; None if there is no such node.

    Raises:
        CloudError: The API refused; if the zone does not exist, the error lists the existing zones.
    """
    try:
        return cloud.get_node(tpu, wish.full_name)
    except ApiError as exc:
        if exc.status == "NOT_FOUND":
            return None
        raise explained(tpu, wish, exc) from exc


def _find_first(tpu: Tpu, wish: Wish) -> Node | None:
    """Return the result of `find`; if the API does not answer, the error says that nothing was created."""
    try:
        return find(tpu, wish)
    except ApiError as exc:
        if exc.status in UNCLEAR:
            raise lost(exc, "nothing was created", "run the same command again") from exc
        raise


def create(tpu: Tpu, wish: Wish, body: Json, *, wait: bool, timeout: float, progress: Progress) -> str:
    """Create the node, or continue waiting for a node that an earlier command began to create.

    Returns:
        The result: ``created``, ``resumed``, ``already there``, or ``begun`` if `wait` is not set.

    Raises:
        CloudError: The API refused, a node of this name exists with other properties or in another state, or the node
            was not ready in time. If the API stopped answering, the error says what is known of the node.
    """
    existing = _find_first(tpu, wish)
    if existing is None:
        try:
            with interrupted("it is not known whether the API has begun to create the node", AGAIN):
                operation = cloud.create_node(tpu, wish.parent, wish.name, body)
        except ApiError as exc:
            existing = _in_spite_of(tpu, wish, exc)
        else:
            if not wait:
                return "begun"
            began = time.monotonic()
            try:
                with begun(_CREATING, _creation(wish)):
                    _until_begun(tpu, wish, operation, timeout=timeout, progress=progress)
                    # The operation is done, but the node might be changing its state again, or its listed state might
                    # be old.
                    node = operations.wait_for_state(
                        tpu,
                        wish.full_name,
                        through=ON_THE_WAY,
                        what=wish.where,
                        timeout=timeout,
                        progress=progress,
                        began=began,
                    )
            except operations.Failed as exc:
                raise _failed(tpu, wish, exc) from exc
            must_be_ready(wish, node)
            return "created"
    must_match(wish, existing)
    if existing.state == "READY":
        return "already there"
    if existing.state not in ON_THE_WAY:
        must_be_ready(wish, existing)
    if not wait:
        return "begun"
    with begun(_CREATING, _creation(wish)):
        node = operations.wait_for_state(
            tpu, wish.full_name, through=ON_THE_WAY, what=wish.where, timeout=timeout, progress=progress
        )
    must_be_ready(wish, node)
    return "resumed"


def _until_begun(tpu: Tpu, wish: Wish, operation: str, *, timeout: float, progress: Progress) -> None:
    """Wait until the operation that creates a node is done, or the node is READY.

    Operations of large slices were seen to be done only 11 minutes after their nodes were READY.
    """

    def look() -> bool:
        if operations.is_done(tpu, operation, what=wish.where):
            return True
        node = find(tpu, wish)
        return node is not None and node.state in SERVING_STATES

    operations.until(look, what=wish.where, timeout=timeout, progress=lambda elapsed: progress(elapsed, "working"))


#: What the API is doing, as words for a message; and the fix for an interrupted command.
_CREATING, _DELETING = "the API is creating the node", "the API is deleting the node"
AGAIN = "run the same command again: it continues from the current state"


def _creation(wish: Wish) -> str:
    """Return the fix for a command that ended while the API was still creating the node."""
    return (
        "run the same command again to wait for it: the node costs money until "
        f"`{node_deletion(wish.name, wish.zone)}`, and `tpu_ops list` shows it"
    )


def _in_spite_of(tpu: Tpu, wish: Wish, failure: ApiError) -> Node:
    """Return the node that exists although its creation failed: another client was faster, or the answer was lost.

    Raises:
        ApiError: The node does not exist, or the API does not say whether it exists.
    """
    unclear = failure.status in UNCLEAR
    if not unclear and failure.status != "ALREADY_EXISTS":
        raise refused(explained(tpu, wish, failure)) from failure
    try:
        existing = find(tpu, wish)
    except ApiError as exc:
        what = "the node may exist" if unclear else "a node of this name exists"
        raise lost(exc, what, _creation(wish) if unclear else AGAIN) from exc
    if existing is None and unclear:
        what = "a moment later there was no node of this name, but the node may still appear"
        raise lost(failure, what, f"{AGAIN}; `tpu_ops list` shows whether the node exists") from failure
    if existing is None:
        raise failure
    return existing


def _failed(tpu: Tpu, wish: Wish, failure: operations.Failed) -> ApiError:
    """Return the error, with its fix, for a creation that failed after the API had accepted it."""
    if not operations.was_preempted(failure):
        return refused(explained(tpu, wish, failure))
    fix = f"the node was preempted while it was being created: {_removal(wish)} and run the same command again"
    return Refused(failure.what, status=failure.status, where=failure.where, fix=fix)


def refused(failure: ApiError) -> Refused:
    """Return an error as the refusal of a creation."""
    return Refused(failure.what, status=failure.status, where=failure.where, fix=failure.fix)


def lost(failure: ApiError, known: str, then: str) -> ApiError:
    """Return the error of an API that no longer answers, extended by what is known of the node and the next step."""
    fix = f"{failure.fix}; then {then}" if failure.fix else then
    return ApiError(f"{failure.what}; {known}", status=failure.status, where=failure.where, fix=fix)


@contextlib.contextmanager
def interrupted(known: str, then: str) -> Iterator[None]:
    """If the user interrupts the block, log what is known of the node, and the next step."""
    try:
        yield
    except KeyboardInterrupt:
        _log.info("%s; %s", known, then)
        raise


@contextlib.contextmanager
def begun(known: str, then: str) -> Iterator[None]:
    """If the wait in the block is interrupted or fails, say that the API continues the operation.

    Raises:
        ApiError: The operation failed, or its state is unknown.
    """
    try:
        with interrupted(f"{known}, also without this command", then):
            yield
    except operations.Failed:
        raise
    except ApiError as exc:
        raise lost(exc, f"{known}, as far as is known", then) from exc


def must_be_ready(wish: Wish, node: Node | None) -> None:
    """Check that a node that was waited for is READY.

    Raises:
        CloudError: The node is gone, or in another state.
    """
    if node is None:
        raise CloudError(
            "the node is gone: its creation failed, or it was deleted",
            where=wish.where,
            fix="run the same command again",
        )
    if node.state != "READY":
        place = f"{wish.name} --zone {wish.zone} --project {wish.project}"
        first = f"see why (`tpu_ops node describe {place}`), or "
        if node.state == "STOPPED":
            first = f"start the node (`tpu_ops node start {place}`), or "
        elif node.state in _GOING:
            first = ""
        raise CloudError(
            f"the node is in state {node.state}",
            where=wish.where,
            fix=f"{first}{_removal(wish)} and run the same command again",
        )


def _removal(wish: Wish) -> str:
    return f"delete it (`{node_deletion(wish.name, wish.zone)}`)"


def delete(tpu: Tpu, name: str, node_id: str, *, what: str, wait: bool, timeout: float, progress: Progress) -> None:
    """Delete a node, or continue waiting for a deletion that an earlier command began.

    Args:
        tpu: The client.
        name: Its resource name. The API deletes by name, whatever the id of the node.
        node_id: The id of the intended node; empty if the API gave it none.
        what: The subject of errors.
        wait: Whether to wait until the node is gone.
        timeout: Seconds to wait.
        progress: Called while waiting.

    Raises:
        CloudError: The API refused, another node now has the name, or the node still existed after the timeout.
    """
    try:
        node = cloud.get_node(tpu, name)
    except ApiError as exc:
        if exc.status != "NOT_FOUND":
            raise lost(exc, "nothing was deleted", "run the same command again") from exc
        return
    if node_id and node.node_id not in ("", node_id):
        fix = "`tpu_ops refresh` (with --from api if a published snapshot is in use), then the same command again"
        raise CloudError(
            "the node was recreated after this command had looked it up; nothing was deleted", where=what, fix=fix
        )
    operation = "" if node.state == "DELETING" else _begin_deletion(tpu, name)
    if not wait:
        return
    with begun(_DELETING, "run the same command again to wait for it; `tpu_ops list` shows whether it is gone"):
        if operation:
            operations.wait(tpu, operation, what=what, timeout=timeout, progress=progress)
        left = operations.wait_for_state(
            tpu, name, through=("DELETING",), what=what, timeout=timeout, progress=progress
        )
    if left is not None:
        raise CloudError(f"the node still exists, in state {left.state}", where=what, fix="run the same command again")


def _begin_deletion(tpu: Tpu, name: str) -> str:
    """Begin to delete a node; return the operation's name, or "" if the node no longer exists."""
    known = "it is not known whether the API is deleting the node"
    try:
        with interrupted(known, AGAIN):
            return cloud.delete_node(tpu, name)
    except ApiError as exc:
        if exc.status == "NOT_FOUND":
            return ""
        if exc.status in UNCLEAR:
            raise lost(exc, known, f"{AGAIN}; `tpu_ops list` shows whether the node is gone") from exc
        raise


def explained(tpu: Tpu, wish: Wish, refusal: ApiError) -> ApiError:
    """Return the API's refusal; if the zone, type or runtime is unknown, the fix lists the valid ones."""
    if refusal.status not in ("INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED"):
        return refusal
    try:
        fix = unknown(tpu, wish)
    except ApiError:
        return refusal
    return ApiError(refusal.what, status=refusal.status, where=refusal.where, fix=fix) if fix else refusal


def unknown(tpu: Tpu, wish: Wish) -> str:
    """Return the first of zone, type and runtime that the API does not list, with the valid values; "" if it lists all.

    Raises:
        ApiError: The API does not list the valid values.
    """
    known = zones.locations(tpu, wish.project)
    if wish.zone not in known:
        return f"project {wish.project} has no zone {wish.zone!r}; it has {nearest(wish.zone, known)}"
    known = zones.accelerator_types(tpu, wish.project, wish.zone)
    if wish.accelerator_type not in known:
        kinds = nearest(wish.accelerator_type, known)
        return f"zone {wish.zone} has no accelerator type {wish.accelerator_type!r}; it has {kinds}"
    known = zones.runtime_versions(tpu, wish.project, wish.zone)
    if wish.runtime_version and wish.runtime_version not in known:
        versions = nearest(wish.runtime_version, known)
        return f"zone {wish.zone} has no runtime version {wish.runtime_version!r}; it has {versions}"
    return ""


def nearest(value: str, known: Sequence[str], limit: int = 16) -> str:
    """Return the names most similar to a value, for a message. Names that differ after the last dash come first."""
    if not known:
        return "none"
    alike = difflib.get_close_matches(value, known, n=limit, cutoff=0.3)
    kind = value.rpartition("-")[0]
    own = [name for name in known if kind and name.rpartition("-")[0] == kind]
    names = list(dict.fromkeys([*(name for name in alike if name in own), *own, *alike, *known]))
    return texts.some([*sorted(names[:limit], key=texts.natural), *names[limit:]], limit)
