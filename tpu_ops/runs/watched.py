"""The notes of an active run's supervisors as text: silence, idle chips, stalls, notices of hosts."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_ops import texts
from tpu_ops.protocol.watch import in_minutes
from tpu_ops.runs.outcomes import Outcome

#: Seconds of silence, and of idle chips, that are worth telling although the run does not count as standing still.
WORTH_TELLING = 300.0


def told(outcomes: Sequence[Outcome]) -> str:
    """Return what is worth telling of a run, as in ``no output for 14 min, chips idle for 11 min``; can be empty.

    A run is as silent as its least silent rank: in most runs, only rank 0 writes. Durations end at the last sample of
    the rank's supervisor: if its disk is full, nobody knows of later output.
    """
    seen = [outcome.watch for outcome in outcomes if outcome.watch]
    silences = [watch["at"] - watch["last_output"] for watch in seen if watch.get("last_output")]
    stands = any(watch.get("stall") for watch in seen)
    if not silences or not (stands or min(silences) >= WORTH_TELLING):
        return ""
    parts = [f"no output for {in_minutes(min(silences))}"]
    rests = [watch["at"] - watch["idle_since"] for watch in seen if watch.get("idle_since")]
    if len(rests) == len(seen) and (stands or min(rests) >= WORTH_TELLING):
        unreadable = any(watch["chips"] == "unreadable" for watch in seen)
        parts.append(f"chips {'idle or unreadable' if unreadable else 'idle'} for {in_minutes(min(rests))}")
    return ("stands still: " if stands else "") + ", ".join(parts)


def notices(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the notices of maintenance and preemption of a run's workers, one line for workers with the same one."""
    hosts: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.watch and (notice := outcome.watch.get("maintenance")):
            hosts.setdefault(str(notice["what"]), []).append(outcome.host)
    return [f"{texts.folded(names)}: {what}" for what, names in hosts.items()]
