"""The alias of a worker in known_hosts: bound to its node's id, not to its address."""

from __future__ import annotations

import re

_FORM = re.compile(r"tpu-(?P<id>[0-9]{0,20})-w[0-9]{1,6}")


def of(node_id: str, index: int) -> str:
    """Return the alias of a worker, given its node's id and its index."""
    return f"tpu-{node_id}-w{index}"


def node_id(alias: str) -> str | None:
    """Return the node id in an alias, or "" if the node has no id; None if the name is not an alias of a worker."""
    match = _FORM.fullmatch(alias)
    return match["id"] if match else None
