"""Show why workers cannot start a run: each fault is shown once, with all its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tpu_ops.cli import output
from tpu_ops.config import Settings
from tpu_ops.runs import preparations
from tpu_ops.runs.launch import NotStarted
from tpu_ops.runs.preflight import Fault, PreflightError, once_each
from tpu_ops.ssh.replies import Reply


@contextmanager
def told(
    run_id: str, settings: Settings, *, as_json: bool, more: Callable[[], Mapping[str, Any]] = dict
) -> Iterator[None]:
    """Print the faults of all workers if workers cannot start a run, each once, above the raised error or by it.

    In JSON, the error has all faults, including those of workers that refused the start after the checks.

    Args:
        run_id: The id of the run.
        settings: The settings of the fleet.
        as_json: Whether the result is JSON.
        more: Returns further facts for the JSON.
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
            _show(exc, once_each(rows))
        for note in dict.fromkeys(work.note for work in works.values()):
            output.info(note)
        raise


def _show(failure: PreflightError, kinds: Sequence[Mapping[str, str]]) -> None:
    """Print the faults if there are several kinds; a single kind is wholly in the error itself."""
    if len(kinds) == 1:
        failure.fix = kinds[0]["fix"]
    else:
        output.table(kinds, ("worker", "problem", "fix"))
        failure.refer_to_table()


def of_silent(replies: Iterable[Reply]) -> list[dict[str, str]]:
    """Return for --json the problem of each worker that could not answer, given the workers' replies."""
    found = (Fault(reply.host, reply.problem, reply.fix) for reply in replies)
    return [_row(fault) for fault in named(found)]


def _row(fault: Fault) -> dict[str, str]:
    fix = f"{fault.fix} (or --force)".strip() if fault.forcible else fault.fix
    return {"worker": fault.worker, "problem": fault.problem, "fix": fix}


def named(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Return the faults with the option --fleet added to the commands in their texts, where it is needed."""
    return tuple(
        replace(fault, problem=output.on_fleet(fault.problem), fix=output.on_fleet(fault.fix)) for fault in faults
    )


def overriding() -> Callable[[Fault], None]:
    """Return a function that warns of a fault that --force overrides, once for each worker and check."""
    said: set[tuple[str, str]] = set()

    def say(fault: Fault) -> None:
        if (fault.worker, fault.check) not in said:
            said.add((fault.worker, fault.check))
            output.warning(f"{fault.worker}: {fault.problem}; overridden by --force")

    return say
