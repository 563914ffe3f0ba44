"""Decides whether a run stands still. This module uses no sockets and no clock.

A run is suspected if all of its ranks are silent and the chips of all of its ranks are idle or unreadable. Neither sign
is enough alone: evaluations and checkpoints are silent, and between two steps chips are idle. In a wedged collective a
program is loaded and waits, so that the duty cycle stays at 100 % while no memory is read: the duty cycle is no sign.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, NamedTuple, Sequence

from tpu_ops.protocol.values import is_number
from tpu_ops.protocol.watch import RESTART, STALL_AFTER, STALL_GRACE, STOP, TELL, in_minutes

#: A core is idle if it was in use this many seconds ago or earlier, or uses less of the memory's bandwidth (percent).
IDLE_SECONDS, IDLE_BANDWIDTH = 1.0, 1.0
#: Seconds between two reports of one stall.
REPEAT = 1800.0
#: Seconds that ranks get to write their stacks before the run is ended.
DUMP_LIMIT = 20.0
#: A rank's sample is out of date after this many times the period between two samples; it takes none while it writes
#: its stacks.
_FRESH = 3.0
#: Longest time between two samples, in seconds, and the part of ``after`` that it may be.
PERIOD, PERIOD_PART = 30.0, 0.2
_SHORTEST_PERIOD = 0.5

BUSY, IDLE, WARMING, UNREADABLE, NONE = "busy", "idle", "warming", "unreadable", "none"
#: States of a metrics service of which a rank's worst is kept, the worst first.
_WORST = ("broken", "silent", "warming", "ok", "none")


class Rules(NamedTuple):
    """When a run counts as standing still, and what is done about it; see `protocol.spec.stall_of`."""

    after: float = STALL_AFTER
    grace: float = STALL_GRACE
    on: str = TELL
    chosen: bool = False

    @property
    def period(self) -> float:
        """Seconds between two samples."""
        return min(PERIOD, max(_SHORTEST_PERIOD, self.after * PERIOD_PART)) if self.after else PERIOD

    @property
    def ends(self) -> bool:
        """Whether a run that stands still is ended."""
        return self.on in (STOP, RESTART)


#: The rules of a run whose user chose none.
DEFAULT = Rules()


# --- the chips of one rank ------------------------------------------------------------------------------------------


def state_of(services: Sequence[Mapping[str, Any]]) -> str:
    """Return the worst state of a rank's metrics services: ``broken``, ``silent``, ``warming``, ``ok`` or ``none``."""
    found = {service["state"] for service in services}
    return next((state for state in _WORST if state in found), "none")


def cores_of(services: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the cores that services in state ``ok`` have reported."""
    return [core for service in services if service["state"] == "ok" for core in service["cores"]]


def _rests(core: Mapping[str, Any]) -> bool:
    """Return whether a core is idle. Older versions of libtpu report the duty cycle only."""
    idle, bandwidth, duty = core.get("idle"), core.get("hbm_bandwidth"), core.get("duty")
    if _is_idle(core) or (bandwidth is not None and bandwidth < IDLE_BANDWIDTH):
        return True
    return idle is None and bandwidth is None and duty is not None and duty < 1


def _is_idle(core: Mapping[str, Any]) -> bool:
    idle = core.get("idle")
    return idle is not None and idle >= IDLE_SECONDS


class Chips:
    """The state of one rank's chips over time.

    Attributes:
        state: ``busy``, ``idle``, ``warming``, ``unreadable`` or ``none``.
        since: Since when the chips are idle or unreadable, by the caller's clock; None if they are not.
        sign: What shows that the chips rest, as text; empty if they do not.
        used: When the chips were seen in use for the first time; None if they were not.
    """

    def __init__(self) -> None:
        self.state, self.sign = NONE, ""
        self.since: float | None = None
        self.used: float | None = None
        #: Since when the chips have been idle or unreadable without interruption.
        self._kept: float | None = None

    def see(self, services: Sequence[Mapping[str, Any]], now: float) -> None:
        """Take the answers of the metrics services of the rank's processes."""
        cores, worst = cores_of(services), state_of(services)
        self.sign, self.since = "", None
        if any(not _rests(core) for core in cores):
            self.state, self._kept = BUSY, None
            self.used = now if self.used is None else self.used
        elif worst in ("silent", "broken") or (not services and self.used is not None) or self._lost(worst):
            self.state = UNREADABLE
            self.sign, self.since = "chips unreadable", self._keep(now)
        elif worst == "warming" or not cores:
            self.state, self._kept = (WARMING if worst == "warming" else NONE), None
        else:
            self.state = IDLE
            begun = self._keep(now)
            if all(map(_is_idle, cores)):
                self.sign, self.since = "chips idle", now - min(core["idle"] for core in cores)
            else:
                by_core = [now - core["idle"] for core in cores if _is_idle(core)]
                self.sign, self.since = "chips wait without using their memory", max([begun, *by_core])

    def _lost(self, worst: str) -> bool:
        """Return whether processes hold chips that were in use, and none has a metrics service any more."""
        return worst == "none" and self.used is not None

    def _keep(self, now: float) -> float:
        # A service that answers late now and then does not start the time anew.
        if self._kept is None:
            self._kept = now
        return self._kept


# --- the ranks of a run ---------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """What a silent rank reports; times are in seconds.

    Attributes:
        silent: Time since the last output, or since the start.
        began: Time since the first output or the first use of the chips; None if there was neither.
        used: Whether the chips were ever in use.
        chips: The state of the chips.
        rests: Time for which the chips have been idle or unreadable; 0 if they are not.
        sign: What shows that the chips rest.
    """

    silent: float
    began: float | None
    used: bool
    chips: str
    rests: float
    sign: str


def sample(value: Any) -> Sample | None:
    """Return the sample in another supervisor's message; None if the message has none: the rank writes again."""
    if not isinstance(value, dict):
        return None
    silent, began, rests = (value.get(key) for key in ("silent", "began", "rests"))
    if (
        silent is None
        or rests is None
        or not _is_time(silent)
        or not _is_time(rests)
        or not (began is None or _is_time(began))
    ):
        return None
    chips, sign = str(value.get("chips", ""))[:20], str(value.get("sign", ""))[:80]
    return Sample(silent, began, value.get("used") is True, chips, float(rests), sign)


def _is_time(value: Any) -> bool:
    """Return whether a value is a number of seconds; any program of the run's user can send such a message."""
    return is_number(value) and value >= 0


class Stall(NamedTuple):
    """A run that stands still: the rank that has been silent for longest, and the signs as text."""

    rank: int
    sign: str


class Stalls:
    """The samples of all ranks of a run, and the last report.

    Args:
        size: The number of ranks.
        rules: When a run counts as standing still.
    """

    def __init__(self, size: int, rules: Rules) -> None:
        self._size, self._rules = size, rules
        self._samples: Dict[int, tuple[float, Sample]] = {}
        self._told = -math.inf
        #: Whether the run stands still, as far as was reported.
        self.stands = False

    def heard(self, rank: int, found: Sample | None, now: float) -> None:
        """Take the sample of a silent rank, or None from a rank that writes again."""
        if found is None:
            self._samples.pop(rank, None)
        else:
            self._samples[rank] = now, found

    def resumed(self, now: float) -> bool:
        """Return once whether a run that stood still does so no longer: a rank writes, or uses its chips."""
        samples = self._fresh(now)
        silent = len(samples) == self._size
        if not self.stands or (silent and all(found.chips != BUSY for found in samples.values())):
            return False
        # Chips in use are a weaker sign than output: if they stop again, the next report comes after REPEAT only.
        self.stands, self._told = False, self._told if silent else -math.inf
        return True

    def found(self, now: float) -> Stall | None:
        """Return the stall if the run stands still and this is to be reported now; otherwise None."""
        samples = self._fresh(now)
        if len(samples) < self._size or not _suspicious(samples, self._rules) or now - self._told < REPEAT:
            return None
        self.stands, self._told = True, now
        rank = max(samples, key=lambda each: (samples[each].silent, -each))
        return Stall(rank, _signs(list(samples.values())))

    def _fresh(self, now: float) -> Dict[int, Sample]:
        limit = now - _FRESH * self._rules.period - DUMP_LIMIT
        return {rank: found for rank, (at, found) in self._samples.items() if at >= limit}


def _suspicious(samples: Mapping[int, Sample], rules: Rules) -> bool:
    """Return whether the samples of all ranks show together that a run stands still."""
    if not rules.after or not samples:
        return False
    began = max((found.began for found in samples.values() if found.began is not None), default=None)
    if began is None or began < rules.grace:
        return False
    return all(found.silent >= rules.after and _rest(found, rules) for found in samples.values())


def _rest(found: Sample, rules: Rules) -> bool:
    """Return whether the chips of a rank rest. If it uses none, its silence counts only if the user chose the time."""
    if found.chips == NONE and not found.used:
        return rules.chosen
    return found.chips in (IDLE, UNREADABLE) and found.rests >= rules.after


def _signs(samples: Sequence[Sample]) -> str:
    """Return the signs that were seen, as in ``no output for 16 min, chips idle for 15 min``."""
    parts = ["no output for {}".format(in_minutes(min(found.silent for found in samples)))]
    for sign in sorted({found.sign for found in samples if found.sign}):
        least = min(found.rests for found in samples if found.sign == sign)
        count = sum(found.sign == sign for found in samples)
        where = "" if count == len(samples) else " on {} of {} ranks".format(count, len(samples))
        parts.append("{} for {}{}".format(sign, in_minutes(least), where))
    unused = sum(not found.sign for found in samples)
    if unused:
        parts.append("no chips in use" if unused == len(samples) else "no chips in use on {} ranks".format(unused))
    return ", ".join(parts)
