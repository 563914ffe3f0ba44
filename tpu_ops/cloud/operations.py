"""Waits for the API's long-running operations and for the states of nodes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.nodes import get_node, node_in_words
from tpu_ops.cloud.pages import pages
from tpu_ops.cloud.zones import raw
from tpu_ops.errors import CloudError, OpsError

Thing = TypeVar("Thing")
Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)

#: Seconds between the first two checks of an operation, which is short since some operations take no time; and the
#: longest pause between two checks.
FIRST_LOOK, LONGEST_LOOK = 0.2, 5.0
#: A pause as a multiple of the one before: the end of an operation is seen late by a fifth of its time at most.
GROWTH = 1.2

#: Part of the INVALID_ARGUMENT error of an operation that creates a node, if the node was preempted while it was being
#: created (seen in skypilot-org/skypilot).
_PREEMPTED = "while in state PREEMPTED"

#: A function that is called repeatedly during a wait, with the seconds since its beginning and the state in words.
Progress = Callable[[float, str], None]


class Failed(ApiError):
    """An operation of the API ended with an error."""


class Late(CloudError):
    """The wait for an operation or a node timed out; the API continues the operation."""


def was_preempted(failure: ApiError) -> bool:
    """Return whether an error says that a node was preempted during its creation."""
    return _PREEMPTED in failure.what


def wait(tpu: Tpu, operation: str, *, what: str, timeout: float, progress: Progress) -> None:
    """Wait until an operation is done.

    Raises:
        Failed: The operation ended with an error.
        ApiError: The API did not return the state of the operation.
        Late: The operation was not done in time.
    """
    until(
        lambda: is_done(tpu, operation, what=what),
        what=what,
        timeout=timeout,
        progress=lambda elapsed: progress(elapsed, "working"),
    )


def is_done(tpu: Tpu, operation: str, *, what: str) -> bool:
    """Return whether an operation is done.

    Raises:
        Failed: The operation ended with an error.
        ApiError: The API did not return the state of the operation.
    """
    answer = tpu.call("get_operation", {"name": operation}, what)
    if answer.done and answer.HasField("error"):
        status = status_of(answer.error.code)
        raise Failed(answer.error.message or f"it failed ({status})", status=status, where=what)
    return bool(answer.done)


def settle(tpu: Tpu, name: str, *, timeout: float, progress: Progress) -> None:
    """Wait for operations on a node that are not done yet, whoever has begun them.

    An operation that was accepted with older values may end after a later one, and then overwrites its values.
    If the API does not list operations, there is no wait.

    Args:
        tpu: The client.
        name: The node's resource name.
        timeout: Maximum number of seconds to wait for each operation.
        progress: Called while waiting.

    Raises:
        CloudError: An operation was not done in time.
    """
    where, parent = node_in_words(name), name.partition("/nodes/")[0]
    end = name.partition("/locations/")[2]

    def ask(token: str) -> Any:
        return tpu.call("list_operations", {"name": parent, "page_size": 1000, "page_token": token}, where)

    try:
        found = [one for page in pages(ask, where=where, timeout=tpu.timeout) for one in page.operations]
    except ApiError as exc:
        _log.debug("the operations of %s are not known: %s", where, exc)
        return
    for one in found:
        # The target may have the project's number instead of its id.
        if not one.done and _target(one).endswith(f"/locations/{end}"):
            with contextlib.suppress(Failed):
                wait(tpu, one.name, what=where, timeout=timeout, progress=progress)


def _target(operation: Any) -> str:
    """Return the resource that an operation changes; empty if it is not known."""
    from google.cloud.tpu_v2.types import cloud_tpu
    from google.protobuf.message import DecodeError

    metadata = raw(cloud_tpu.OperationMetadata())
    # The metadata of both API versions have the same fields; gcloud alpha begins operations of v2alpha1.
    with contextlib.suppress(DecodeError):
        metadata.ParseFromString(operation.metadata.value)
    return str(metadata.target)


def wait_for_state(
    tpu: Tpu,
    name: str,
    *,
    through: tuple[str, ...],
    what: str,
    timeout: float,
    progress: Progress,
    began: float | None = None,
) -> Node | None:
    """Wait until a node has left certain states; return the node, or None if it no longer exists.

    Args:
        tpu: The client.
        name: The node's resource name.
        through: States to wait through, for example ``CREATING``.
        what: The subject of errors, for example the node in words.
        timeout: Maximum number of seconds to wait.
        progress: Called repeatedly with the seconds since the beginning and the node's state.
        began: When waiting began, on the monotonic clock; None means now.

    Raises:
        Late: The node was still in one of these states after the timeout.
    """
    node: Node | None = None

    def look() -> bool:
        nonlocal node
        try:
            node = get_node(tpu, name)
        except ApiError as exc:
            if exc.status != "NOT_FOUND":
                raise
            node = None
        return node is None or node.state not in through

    until(
        look,
        what=what,
        timeout=timeout,
        progress=lambda elapsed: progress(elapsed, node.state if node else "gone"),
        began=began,
    )
    return node


def until(
    look: Callable[[], bool],
    *,
    what: str,
    timeout: float,
    progress: Callable[[float], None],
    began: float | None = None,
) -> None:
    """Call a function with growing pauses until it returns true.

    Raises:
        Late: It had not returned true in time.
    """
    start, delay = time.monotonic() if began is None else began, FIRST_LOOK
    while not look():
        elapsed = time.monotonic() - start
        if elapsed >= timeout:
            raise Late(
                f"not done after {timeout:.0f} s; it continues without this command",
                where=what,
                fix="run the same command again to keep waiting, or give a longer --timeout",
            )
        progress(elapsed)
        time.sleep(min(delay, max(0.0, timeout - elapsed)))
        delay = min(delay * GROWTH, LONGEST_LOOK)


def each(
    tpu: Tpu, function: Callable[[Thing], Answer], things: Sequence[Thing]
) -> list[tuple[Answer | None, OpsError | None]]:
    """Call a function for all things at once; return the result or the error of each, in order.

    An error of one does not end the others.
    """

    def one(thing: Thing) -> tuple[Answer | None, OpsError | None]:
        try:
            return function(thing), None
        except OpsError as exc:
            return None, exc

    # In this thread, an interrupt ends a single call with a message that says what the API is doing.
    return [one(thing) for thing in things] if len(things) < 2 else tpu.concurrently(one, things, len(things))


def status_of(code: int) -> str:
    """Return the name of a status code, given its number in google.rpc.Code."""
    import grpc

    return next((status.name for status in grpc.StatusCode if status.value[0] == code), "UNKNOWN")
