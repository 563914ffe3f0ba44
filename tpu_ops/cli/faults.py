"""How faults of workers that are to run something are shown: each once, with all its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tpu_ops import texts
from tpu_ops.cli import output
from tpu_ops.config import Settings
from tpu_ops.runs import preparations
from tpu_ops.runs.launch import NotStarted
from tpu_ops.runs.preflight import Fault, PreflightError, for_any
from tpu_ops.ssh.replies import Reply


@contextmanager
def told(
    run_id: str, settings: Settings, *, as_json: bool, more: Callable[[], Mapping[str, Any]] = dict
) -> Iterator[None]:
    """Print the faults of all workers where some are not fit for a run; the error that goes on tells of the first.

    Where the result is JSON, the error tells them all, those of a start that was refused later as well.

    Args:
        run_id: The run.
        settings: Of the fleet.
        as_json: Whether the result is JSON.
        more: Returns what else is in the JSON.
    """

    def facts(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        return {**more(), "run_id": run_id, "state": "refused", "faults": rows}

    try:
        yield
    except NotStarted as exc:
        if not exc.may_be_on:
            faults = [Fault(reply.host, reply.problem, reply.fix) for reply in exc.refused]
            exc.facts = facts([_row(fault) for fault in named(faults)])
        raise
    except PreflightError as exc:
        works = preparations.each_at_work(settings.state_dir, exc.unconfigured(), but=run_id)
        exc.configured_by({host: work.fix for host, work in works.items()})
        rows = [_row(fault) for fault in named(exc.faults)]
        exc.facts = facts(rows)
        if not as_json:
            output.table(once_each(rows), ("worker", "problem", "fix"))
        for note in dict.fromkeys(work.note for work in works.values()):
            output.info(note)
        raise


def of_silent(replies: Iterable[Reply]) -> list[dict[str, str]]:
    """Given the answers of workers that could not say, return for --json what is wrong with each."""
    found = (Fault(reply.host, reply.problem, reply.fix) for reply in replies)
    return [_row(fault) for fault in named(found)]


def _row(fault: Fault) -> dict[str, str]:
    fix = f"{fault.fix} (or --force)".strip() if fault.forcible else fault.fix
    return {"worker": fault.worker, "problem": fault.problem, "fix": fix}


def named(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Return faults in which commands name the fleet."""
    return tuple(
        replace(fault, problem=output.on_fleet(fault.problem), fix=output.on_fleet(fault.fix)) for fault in faults
    )


def once_each(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Given the faults of all workers, return each once with its workers, and with them together in its fix."""
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["problem"], for_any(row["fix"], row["worker"])), []).append(row)
    found = []
    for (problem, fix), group in groups.items():
        hosts = [row["worker"] for row in group]
        found.append({"worker": texts.folded(hosts), "problem": problem, "fix": fix.replace("\0", texts.target(hosts))})
    return found


def overriding() -> Callable[[Fault], None]:
    """Return what says that a run is started in spite of a fault: once of each, however often it is found."""
    said: set[tuple[str, str]] = set()

    def say(fault: Fault) -> None:
        if (fault.worker, fault.check) not in said:
            said.add((fault.worker, fault.check))
            output.warning(f"{fault.worker}: {fault.problem}; overridden by --force")

    return say
