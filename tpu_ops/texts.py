"""Numbers, names and times as sentences for people hold them."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, noun: str) -> str:
    """Return a number of things, as in ``1 node`` and ``2 nodes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some(names: Sequence[str], limit: int = 8, rest: str = "more") -> str:
    """Return names as a line holds them, as in ``a, b and 3 more``.

    Args:
        names: All of them.
        limit: How many are named.
        rest: What the others are called.
    """
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} {rest}" if len(names) > limit else "")


def folded(hosts: Sequence[str]) -> str:
    """Return workers as one node set, which a target may be, as in ``pod-w[0-3]``; there is at least one."""
    # Imported here: most commands never need it.
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(hosts))) if len(hosts) > 1 else hosts[0]


def ago(asked_at: float, now: float) -> str:
    """Return how long ago something was, as in ``12 min ago``; both times are seconds since 1970."""
    seconds = now - asked_at
    if seconds <= -60:
        return "in the future by this machine's clock"
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= (2 if unit == "days" else 1) * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
