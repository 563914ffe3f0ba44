"""What a run's supervisor notes while the run is active (``watch.json``), and the rules by which a run stands still.

``watch.json`` has these keys; times are in seconds since 1970:

- ``at``: when it was written; ``last_output``: when the rank last wrote, or None.
- ``chips``: ``busy``, ``idle``, ``warming``, ``unreadable`` or ``none``; ``idle_since``: since when the chips are idle
  or unreadable, or None.
- ``stall``: None, or ``at`` and ``sign`` (text) while the run stands still.
- ``maintenance``: None, or ``at``, ``what`` (text) and ``kind`` (``maintenance`` or ``preempted``) of a notice.
"""

from __future__ import annotations

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
#: Kinds of notices of a host.
PREEMPTED, MAINTENANCE = "preempted", "maintenance"
#: Texts of notices of what happens now, or their beginnings. Maintenance that is only planned is not among them.
BEING_PREEMPTED = "this worker is being preempted"
GOES_DOWN = "the host of this worker goes down for maintenance now"
UNDER_WAY = "maintenance of this worker's host is under way"
_NOW = {BEING_PREEMPTED: PREEMPTED, GOES_DOWN: MAINTENANCE, UNDER_WAY: MAINTENANCE}


def announced(note: str) -> str:
    """Return the kind of event that a note of a run, ``rank 3 (pod-w3): NOTICE``, announces for now; or ``""``."""
    what = note.partition("): ")[2]
    return next((kind for text, kind in _NOW.items() if what.startswith(text)), "")


def in_minutes(seconds: float) -> str:
    """Return a duration in whole minutes from two minutes on, as in ``45 s``, ``14 min`` or ``3 h 20 min``."""
    rest = round(seconds)
    if rest < 120:
        return "{} s".format(rest)
    if rest < 7200:
        return "{} min".format(rest // 60)
    hours, minutes = rest // 3600, rest % 3600 // 60
    return "{} h".format(hours) + (" {} min".format(minutes) if minutes else "")
