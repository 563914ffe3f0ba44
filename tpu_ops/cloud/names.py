"""The resource names of the Cloud TPU API, and the names that users choose for nodes and disks."""

from __future__ import annotations

import re

from tpu_ops.errors import UsageError

#: Form of a name that a user chooses.
CHOSEN = r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?"
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


def check_chosen(name: str, noun: str, where: str) -> str:
    """Return a name that a user has chosen after checking it.

    Args:
        name: The name.
        noun: ``node`` or ``disk``.
        where: Subject of the error.

    Raises:
        UsageError: The API would reject the name.
    """
    if not re.fullmatch(CHOSEN, name):
        fix = "use up to 63 lower-case letters, digits and dashes, a letter first, no dash last"
        raise UsageError(f"{name!r:.80} cannot be a {noun}'s name", where=where, fix=fix)
    return name
