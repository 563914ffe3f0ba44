"""Warns of what a run has left on its workers: processes, chips that are held, and lockfiles; and of lost output."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_ops import texts
from tpu_ops.cli import output
from tpu_ops.runs import holders, ranks
from tpu_ops.runs.holders import Holder
from tpu_ops.runs.outcomes import Outcome

#: The processes that a run left behind are named for at most this many workers.
_WORKERS_NAMED = 4


def warn_of_processes(outcomes: Sequence[Outcome]) -> None:
    """Warn of processes that a rank's command left behind when it ended, and that are therefore ended."""
    found = [outcome for outcome in outcomes if outcome.left_behind]
    for outcome in found[:_WORKERS_NAMED]:
        named = [f"pid {process['pid']} ({process['command']})" for process in outcome.left_behind]
        what = f"processes that the command of rank {outcome.rank} left behind are ended"
        output.warning(f"{outcome.host}: {what}: {texts.some(named)}")
    if others := found[_WORKERS_NAMED:]:
        hosts = texts.folded([outcome.host for outcome in others])
        output.warning(f"{hosts}: processes that were left behind are ended there too; `status RUN --json` names them")


def warn_of_lost_output(outcomes: Sequence[Outcome]) -> None:
    """Warn of output that the workers' disks did not take, so that it is in no log."""
    lost: dict[str, dict[int, int]] = {}
    for outcome in outcomes:
        log = (outcome.record or {}).get("log") or {}
        if log.get("dropped"):
            lost.setdefault(log["fault"], {})[outcome.rank] = log["dropped"]
    for fault, sizes in lost.items():
        output.warning(f"{ranks.named([*sizes])}: {texts.size(sum(sizes.values()))} of the output are lost: {fault}")


def warn(outcomes: Sequence[Outcome]) -> None:
    """Warn of everything that an ended run has left on its workers, and of output that it has lost.

    It can leave processes that its commands left behind, processes that cannot be ended, chips that are still held, and
    lockfiles.
    """
    warn_of_lost_output(outcomes)
    warn_of_processes(outcomes)
    held: list[Holder] = []
    for outcome in outcomes:
        record = outcome.record or {}
        for process in record.get("stuck") or ():
            what = f"pid {process['pid']} ({process['command']})"
            output.warning(f"{outcome.host}: {what} could not be ended, state {process['state']}")
        held += holders.held_after(outcome)
        for text in holders.kept_lockfiles(record.get("chips") or {}):
            output.warning(f"{outcome.host}: {text}")
    warn_of_held(held)


def warn_of_held(held: Sequence[Holder]) -> None:
    """Warn of processes that still hold chips after the end of their run, and print how to end them."""
    for holder in held:
        who = f"pid {holder.pid} of {holder.user}: {holder.command}"
        output.warning(f"{holder.host}: the chips are still held by {who}")
    if held:
        target = texts.target(list(dict.fromkeys(holder.host for holder in held)))
        people = ", ".join(sorted({holder.user for holder in held}))
        ends = f"`tpu_ops unlock {target}` ends your own processes; for other processes ask {people}"
        output.info(f"  fix: {ends}; `tpu_ops who {target}` shows who holds them")
