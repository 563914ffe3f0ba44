"""The resource names of the Cloud TPU API."""

from __future__ import annotations

import re

_NODE = re.compile(
    r"projects/(?P<project>[a-z0-9][a-z0-9.:-]{0,99})/locations/(?P<zone>[a-z][a-z0-9-]{0,99})"
    r"/nodes/(?P<name>[a-z][a-z0-9_-]{0,99})"
)


def split_name(name: str) -> tuple[str, str, str] | None:
    """Split a node's resource name into project, zone and short name; None if it has another form."""
    match = _NODE.fullmatch(name)
    return (match["project"], match["zone"], match["name"]) if match else None


def short_name(name: str) -> str:
    """Return the last part of a resource name or address."""
    return name.rpartition("/")[2]
