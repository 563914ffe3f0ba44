"""Numbers, names, times and commands in sentences for users."""

from __future__ import annotations

import re
import shlex
import signal
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime

from ClusterShell.NodeSet import NodeSet

#: Matches a number in a name. A longer number is matched in two parts; no real name contains one.
_NUMBER = re.compile(r"([0-9]{1,9})")
#: A command of tpu_ops, which might follow variables for its environment.
_COMMAND = re.compile(r"(?:(?:env |TPU_OPS_)\S.* )?tpu_ops ([a-z]+(?:-[a-z]+)*)(?![\w-])")
#: Maximum number of workers that a command line in a message lists one by one.
_NAMED = 3


def count(number: int, noun: str) -> str:
    """Return a number with its noun, as in ``1 node`` and ``2 nodes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size(number: float) -> str:
    """Return a number of bytes as text of three digits, as in ``1.5 kB``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= 0.9995 * unit:  # a smaller number has three digits in the next unit
            return f"{number / unit:.3g} {name}"
    return f"{number:.3g} B"


def signal_name(number: int) -> str:
    """Return a signal's name, as in ``SIGKILL``; empty if the number is unknown."""
    return signal.Signals(number).name if number in set(signal.Signals) else ""


def some(names: Sequence[str], limit: int = 8, rest: str = "more") -> str:
    """Return names in one line, as in ``a, b and 3 more``.

    Args:
        names: All names.
        limit: How many of the names to list.
        rest: Noun for the names that are not listed.
    """
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} {rest}" if len(names) > limit else "")


def natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return the sort key of a name that compares numbers by their value: pod-w2 comes before pod-w10.

    Different names have different keys, so that the order does not depend on the input.
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)], name


def folded(hosts: Sequence[str]) -> str:
    """Return workers (at least one) as a node set, which is also a valid target, as in ``pod-w[0-3]``."""
    return str(NodeSet.fromlist(list(hosts)))


def target(hosts: Sequence[str]) -> str:
    """Return workers as a target, quoted for any shell, as in ``'pod-w[0-3]'``."""
    return ",".join(hosts) if len(hosts) <= _NAMED else shlex.quote(folded(hosts))


def at(moment: float) -> str:
    """Return a time (seconds since 1970), as in ``2026-01-31 12:00:00 UTC``."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))


def ago(asked_at: float, now: float) -> str:
    """Return the time since a moment, as in ``12 min ago``; both arguments are seconds since 1970."""
    seconds = now - asked_at
    if seconds <= -60:
        return "in the future by this machine's clock"
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= (2 if unit == "days" else 1) * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def moment(text: str) -> float | None:
    """Return a time in RFC 3339 as seconds since 1970; None if the text is no such time."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def age(seconds: float | None) -> str:
    """Return a number of seconds as an age, as in ``3 d``, ``5 h`` or ``12 min``; ``-`` if it is unknown."""
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= (2 if unit == "d" else 1) * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def lasting(seconds: float) -> str:
    """Return a duration in its two largest units, as in ``3 h 20 min``, ``12 min 5 s`` or ``45 s``."""
    rest = round(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if rest >= size:
            below = rest % size // smaller
            return f"{rest // size} {unit}" + (f" {below} {name}" if below else "")
    return f"{rest} s"


def on_fleet(text: str, option: Callable[[], str], *, bare: bool = False, without: Collection[str] = ()) -> str:
    """Add the option that names the fleet to the commands in a text, except commands that have the option.

    Args:
        text: The text; its commands are in backticks.
        option: Returns the option that names the fleet, as in ``--fleet /my-fleet``; empty if none is needed. The
            function is called only if the text contains a command.
        bare: Whether the text begins with a command that is not in backticks.
        without: Commands of tpu_ops that use no fleet.
    """
    parts = text.split("`")
    # External text can contain an unpaired backtick, so the text after every backtick is searched for a command.
    for number, part in enumerate(parts):
        found = _COMMAND.match(part) if number or bare else None
        if found and found[1] not in without and "--fleet" not in part.partition(" -- ")[0].split():
            parts[number] = f"{found[0]} {option()}".rstrip() + part[found.end() :]
    return "`".join(parts)
