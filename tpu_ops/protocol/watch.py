"""What a run's supervisor notes while the run is active (``watch.json``), and the rules by which a run stands still.

``watch.json`` has these keys; times are in seconds since 1970:

- ``at``: when it was written; ``last_output``: when the rank last wrote, or None.
- ``chips``: ``busy``, ``idle``, ``warming``, ``unreadable`` or ``none``; ``idle_since``: since when the chips are idle
  or unreadable, or None.
- ``stall``: None, or ``at`` and ``sign`` (text) while the run stands still.
- ``maintenance``: None, or ``at``, ``what`` (text) and ``kind`` (``maintenance`` or ``preempted``) of a notice.
"""

from __future__ import annotations

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

#: Seconds without a sign of life after which a run counts as standing still; 0 in a spec means never.
STALL_AFTER = 900.0
#: Seconds after the first output or the first use of chips in which a run never counts as standing still: the first
#: compilation of a large model takes tens of minutes.
STALL_GRACE = 1800.0
#: What is done about a run that stands still: tell the user only, end the run, or end it so that it is started again.
TELL, STOP, RESTART = "tell", "stop", "restart"
STALL_ACTIONS = (TELL, STOP, RESTART)
#: Beginning of the cause of a run that was ended because it stood still.
STALLED = "stalled: "
#: Seconds of silence and of idle chips that are worth telling although the run does not count as standing still.
WORTH_TELLING = 300.0


def lasting(seconds: float) -> str:
    """Return a duration as text, as in ``45 s``, ``14 min`` or ``3 h 20 min``."""
    rest = round(seconds)
    if rest < 120:
        return "{} s".format(rest)
    if rest < 7200:
        return "{} min".format(rest // 60)
    hours, minutes = rest // 3600, rest % 3600 // 60
    return "{} h".format(hours) + (" {} min".format(minutes) if minutes else "")


def told(watch: Mapping[str, Any] | None, now: float) -> str:
    """Return what is worth telling of a rank, as in ``no output for 14 min, chips idle for 11 min``; can be empty.

    Args:
        watch: The content of the rank's ``watch.json``, or None.
        now: The time by the worker's clock, in seconds since 1970; `watch` itself may be half a minute old.
    """
    if not watch:
        return ""
    silent = now - watch["last_output"] if watch.get("last_output") else 0.0
    idle = now - watch["idle_since"] if watch.get("idle_since") else 0.0
    parts = []
    if silent >= WORTH_TELLING or watch.get("stall"):
        parts.append("no output for {}".format(lasting(silent)) if silent else "no output yet")
        if idle >= WORTH_TELLING or (watch.get("stall") and idle):
            state = "unreadable" if watch["chips"] == "unreadable" else "idle"
            parts.append("chips {} for {}".format(state, lasting(idle)))
    text = ", ".join(parts)
    if watch.get("stall"):
        text = "stands still: " + text
    if watch.get("maintenance"):
        text = "; ".join(filter(None, (text, str(watch["maintenance"]["what"]))))
    return text
