"""Waits for the API's long-running operations and for the states of nodes."""

from __future__ import annotations

import time
from collections.abc import Callable

from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.nodes import get_node
from tpu_ops.errors import CloudError

#: Seconds between two looks; the first look comes sooner, for operations that take no time.
FIRST_LOOK, LONGEST_LOOK = 0.2, 5.0

#: What the operation that makes a node ends with, as INVALID_ARGUMENT, where the node was preempted on the way (seen in
#: skypilot-org/skypilot).
_PREEMPTED = "while in state PREEMPTED"

#: Told now and then what is waited for: seconds since the beginning, and the state in words.
Progress = Callable[[float, str], None]


class Failed(ApiError):
    """An operation ended with an error, which the API has told."""


class Late(CloudError):
    """What was waited for takes longer; it goes on."""


def was_preempted(failure: ApiError) -> bool:
    """Return whether an error says that a node was preempted while it was made."""
    return _PREEMPTED in failure.what


def wait(tpu: Tpu, operation: str, *, what: str, timeout: float, progress: Progress) -> None:
    """Wait until an operation is done.

    Raises:
        Failed: It ended with an error.
        ApiError: The API did not say how far it is.
        Late: It was not done in time.
    """
    _until(
        lambda: is_done(tpu, operation, what=what),
        what=what,
        timeout=timeout,
        progress=lambda elapsed: progress(elapsed, "working"),
    )


def is_done(tpu: Tpu, operation: str, *, what: str) -> bool:
    """Return whether an operation is done.

    Raises:
        Failed: It ended with an error.
        ApiError: The API did not say.
    """
    answer = tpu.call("get_operation", {"name": operation}, what)
    if answer.done and answer.HasField("error"):
        status = status_of(answer.error.code)
        raise Failed(answer.error.message or f"it failed ({status})", status=status, where=what)
    return bool(answer.done)


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
    """Wait until a node has left certain states; return it, or None where it is gone.

    Args:
        tpu: The client.
        name: The node's resource name.
        through: States to wait through, for example ``CREATING``.
        what: What is waited for, for an error.
        timeout: Seconds to wait at most.
        progress: Told what is waited for.
        began: When waiting began, on the monotonic clock; None is now.

    Raises:
        Late: The node was still in one of these states when the time was over.
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

    _until(
        look,
        what=what,
        timeout=timeout,
        progress=lambda elapsed: progress(elapsed, node.state if node else "gone"),
        began=began,
    )
    return node


def _until(
    look: Callable[[], bool],
    *,
    what: str,
    timeout: float,
    progress: Callable[[float], None],
    began: float | None = None,
) -> None:
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
        delay = min(delay * 1.5, LONGEST_LOOK)


def status_of(code: int) -> str:
    """Return the name of a google.rpc.Code."""
    import grpc

    return next((status.name for status in grpc.StatusCode if status.value[0] == code), "UNKNOWN")
