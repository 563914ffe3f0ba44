"""The name under which known_hosts keeps a worker's host keys: bound to its node's id, not to its address."""

from __future__ import annotations

import re

_FORM = re.compile(r"tpu-(?P<id>[0-9]{0,20})-w[0-9]{1,6}")


def of(node_id: str, index: int) -> str:
    """Return the alias of a worker, given its node's id and its index."""
    return f"tpu-{node_id}-w{index}"


def node_id(alias: str) -> str | None:
    """Given a name, return the node id in it, empty where the node has none; None where the name is no alias."""
    match = _FORM.fullmatch(alias)
    return match["id"] if match else None
