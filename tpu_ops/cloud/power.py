"""Stops and starts nodes. If a command is interrupted, the same command continues from the current state."""

from __future__ import annotations

from tpu_ops.cloud import lifecycle, operations
from tpu_ops.cloud import nodes as cloud
from tpu_ops.cloud.accelerators import accelerator_type
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.node import SERVING_STATES, Node
from tpu_ops.cloud.nodes import node_in_words
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.remedies import made_again
from tpu_ops.errors import CloudError

#: What can be done to a node.
STOP, START, RESTART = "stop", "start", "restart"
#: The participle of each.
DONE = {STOP: "stopped", START: "started", RESTART: "restarted"}

_STOPPED, _STOPPING = "STOPPED", "STOPPING"
#: States from which the API starts a node: it is UNKNOWN after a failed repair.
_STARTABLE = (_STOPPED, "UNKNOWN")
#: States that a node leaves by itself, and those from which each action begins.
_PASSING = (_STOPPING, *lifecycle.ON_THE_WAY)
_FROM = {
    STOP: (*SERVING_STATES, _STOPPING),
    START: (*_STARTABLE, *_PASSING),
    RESTART: (*SERVING_STATES, *_STARTABLE, *_PASSING),
}


def is_done(node: Node, action: str) -> bool:
    """Return whether a node already is what the action makes of it."""
    return (action == STOP and node.state == _STOPPED) or (action == START and node.state in SERVING_STATES)


def refusal(node: Node, action: str) -> CloudError | None:
    """Return why a node cannot be stopped or started, with the fix; None if it can be, or if nothing is to do."""
    if is_done(node, action):
        return None
    verb = DONE[action]
    fix = f"delete the node to end its cost, and create it again: {made_again(node)}"
    if node.state in ("PREEMPTED", "TERMINATED"):
        what = f"the node is {node.state}, and such nodes cannot be {verb}"
    elif _workers(node) > 1:
        what = f"the Cloud TPU API cannot {action} a node with several workers, and this one has {_workers(node)}"
    elif node.queued_resource:
        what = f"the Cloud TPU API cannot {action} a node of a queued resource ({node.queued_resource})"
    elif node.preemptible:
        what = "a spot node cannot be started again once it is stopped"
    elif node.state not in _FROM[action]:
        what = f"the node is {node.state} and cannot be {verb} now"
        fix = f"repeat the command once it is {' or '.join(SERVING_STATES if action == STOP else _STARTABLE)}"
    else:
        return None
    return CloudError(what, where=node_in_words(node.full_name), fix=fix)


def _workers(node: Node) -> int:
    try:
        return max(node.worker_count, accelerator_type(node.accelerator_type).workers)
    except ValueError:
        return node.worker_count


def act(tpu: Tpu, node: Node, action: str, *, wait: bool, timeout: float, progress: Progress) -> str:
    """Stop, start or restart a node, or continue what an earlier command began.

    Args:
        tpu: The client.
        node: The node as it was listed.
        action: `STOP`, `START` or `RESTART`.
        wait: Whether to wait until it is done. A restart always waits until the node has stopped.
        timeout: Seconds to wait for each of the two.
        progress: Called during the wait.

    Returns:
        The result: ``stopped``, ``started``, ``restarted``, ``already stopped``, ``already started``, or ``begun``.

    Raises:
        CloudError: The API refused, the node was recreated meanwhile, or it did not reach its state in time.
    """
    now = _now(tpu, node)
    if problem := refusal(now, action):
        raise problem
    if is_done(now, action):
        return f"already {DONE[action]}"
    if now.state == _STOPPING or (action != START and now.state in SERVING_STATES):
        _reach(tpu, now, STOP, wait=wait or action != STOP, timeout=timeout, progress=progress)
        now = _now(tpu, node)
    if action != STOP:
        _reach(tpu, now, START, wait=wait, timeout=timeout, progress=progress)
    return DONE[action] if wait else "begun"


def _now(tpu: Tpu, node: Node) -> Node:
    """Return a node as it is now.

    Raises:
        CloudError: The API refused, the node is gone, or another node has its name.
    """
    now = cloud.get_node(tpu, node.full_name)
    if node.node_id and now.node_id not in ("", node.node_id):
        what = "the node was recreated after this command had looked it up; nothing was changed"
        raise CloudError(what, where=node_in_words(node.full_name), fix="run the same command again")
    return now


def _begin(tpu: Tpu, now: Node, action: str) -> str:
    """Begin to stop or start a node; return the operation's name, or "" if the node changes its state without it.

    The answer can be lost, and another client can be faster.
    """
    try:
        return (cloud.stop_node if action == STOP else cloud.start_node)(tpu, now.full_name)
    except ApiError as exc:
        if exc.status not in ("FAILED_PRECONDITION", *lifecycle.UNCLEAR):
            raise
        if cloud.get_node(tpu, now.full_name).state == now.state:
            raise
        return ""


def _reach(tpu: Tpu, now: Node, action: str, *, wait: bool, timeout: float, progress: Progress) -> None:
    """Stop or start a node that is not yet in the wanted state."""
    what, name, wanted = node_in_words(now.full_name), now.full_name, _STOPPED if action == STOP else "READY"
    operation = _begin(tpu, now, action) if now.state in (SERVING_STATES if action == STOP else _STARTABLE) else ""
    if not wait:
        return
    state = now.state

    def has_settled() -> bool:
        nonlocal state, operation
        # Operations were seen to end only minutes after their node had reached its state.
        if operation and operations.is_done(tpu, operation, what=what):
            operation = ""
        try:
            state = cloud.get_node(tpu, name).state
        except ApiError as exc:
            if exc.status != "NOT_FOUND":
                raise
            state = "gone"
        return state == wanted or (not operation and state not in _PASSING)

    operations.until(has_settled, what=what, timeout=timeout, progress=lambda elapsed: progress(elapsed, state))
    if state != wanted:
        fix = "`tpu_ops node describe` shows the node; then run the same command again"
        raise CloudError(f"the node is {state}, not {wanted}", where=what, fix=fix)
