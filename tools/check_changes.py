"""Compare what check mode announced in Molecule's scenarios with what converge then changed.

    tools/check_changes.py CHANGES_FILE

It reads the file of the callback changes_file. Check mode must announce every task that the next converge changes, with
the changed paths, and no other task. After side effects, all other details of a task must agree as well, since each of
them names a thing that was broken. On a bare worker, details depend on earlier tasks, which check mode does not carry
out.

Exceptions are in .config/molecule/exceptions.yml, for the runs before side effects (workers: prepared) or after them
(workers: broken). A run without skips must not change anything, or skip a task that has changed something in converge;
exceptions are in .config/molecule/looked_at.yml. Each exception has its reason, and is reported when it is no longer
needed. Every scenario needs a run in check mode. Each scenario of a role also needs a run without skips.

Exit codes: 0 all agree, 1 something differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
EXCEPTIONS = ROOT / ".config" / "molecule" / "exceptions.yml"
LOOKED_AT = ROOT / ".config" / "molecule" / "looked_at.yml"
#: The scenario of all roles. It has no run without skips: each role's own scenario has one.
ALL_ROLES = "site"
Record = dict[str, Any]
Change = tuple[str, str, tuple[str, ...]]
#: An exception: scenario and task; for a check-mode exception also the kind of workers (prepared or broken).
Exemption = tuple[str, ...]


def changes(record: Record, *, detailed: bool) -> set[Change]:
    """Return the changes of a run as (task, host, paths); with ``detailed``, the details follow the paths."""
    return {
        (task, host, tuple([*paths, *details] if detailed else paths))
        for task, host, paths, details in record["changed"]
    }


def words(change: Change) -> str:
    """Return a change as text for users."""
    task, host, named = change
    return f"{task} on {host}" + (f" ({', '.join(named)})" if named else "")


def compared(records: list[Record], excepted: set[Exemption]) -> tuple[list[str], set[Exemption]]:
    """Compare check mode with converge in all runs; return the differences, and the exceptions that were not needed."""
    found: list[str] = []
    needed: set[Exemption] = set()
    said: dict[str, Record] = {}
    broken: set[str] = set()
    for record in records:
        scenario = record["scenario"]
        if record["playbook"] == "side_effect.yml":
            broken.add(scenario)
        if record["playbook"] != "converge.yml" or record["failed"]:
            continue
        if record["check"]:
            said[scenario] = record
            continue
        if scenario not in said:
            continue
        detailed, workers = scenario in broken, "broken" if scenario in broken else "prepared"
        announced, done = changes(said.pop(scenario), detailed=detailed), changes(record, detailed=detailed)
        differing = announced ^ done
        needed |= {(scenario, task, workers) for task, _, _ in differing}
        found += [
            f"{scenario}: {words(change)} "
            + (
                "was changed, but not announced by check mode"
                if change in done
                else "was announced by check mode, but not changed"
            )
            for change in sorted(differing)
            if (scenario, change[0], workers) not in excepted
        ]
    checked = {record["scenario"] for record in records if record["check"]}
    scenarios = {record["scenario"] for record in records}
    found += [f"{scenario}: no run in check mode" for scenario in sorted(scenarios - checked)]
    return found, {exemption for exemption in excepted - needed if exemption[0] in scenarios}


def without_skips(records: list[Record], looked_at: set[Exemption]) -> tuple[list[str], set[Exemption]]:
    """Return what runs without skips changed or skipped, and the exceptions that were not needed.

    Whether a task changes something depends on the worker. If a task has changed nothing, its exception is not checked.
    """
    found: list[str] = []
    judged: set[Exemption] = set()
    needed: set[Exemption] = set()
    done: dict[str, set[tuple[str, str]]] = {}
    full: set[str] = set()
    for record in records:
        scenario = record["scenario"]
        if record["playbook"] == "converge.yml" and not record["check"]:
            # Changed tasks notify handlers, and in a run without skips no task changes anything.
            changed = {(task, host) for task, host, *_ in record["changed"] if task not in record["handlers"]}
            done.setdefault(scenario, set()).update(changed)
        if record["playbook"] != "without_skips.yml":
            continue
        full.add(scenario)
        before = done.get(scenario, set())
        skipped = before - {(task, host) for task, host in record["ran"]}
        judged |= {(scenario, task) for task, _ in before}
        needed |= {(scenario, task) for task, _ in skipped}
        found += [
            f"{scenario}: without skips, {words(change)} changes again"
            for change in sorted(changes(record, detailed=True))
        ]
        found += [
            f"{scenario}: without skips, {task} is skipped on {host}"
            for task, host in sorted(skipped)
            if (scenario, task) not in looked_at
        ]
    scenarios = {record["scenario"] for record in records}
    found += [f"{scenario}: no run without skips" for scenario in sorted(scenarios - full - {ALL_ROLES})]
    return found, looked_at & judged - needed


def main(path: str) -> int:
    """Compare the runs and print the differences."""
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    found: list[str] = []
    for file, compare, keys in (
        (EXCEPTIONS, compared, ["scenario", "task", "workers"]),
        (LOOKED_AT, without_skips, ["scenario", "task"]),
    ):
        where, entries = file.relative_to(ROOT), yaml.safe_load(file.read_text())
        if odd := [entry for entry in entries if set(entry) != {*keys, "reason"}]:
            print(f"{where}: {odd[0]} needs {', '.join(keys)} and reason, and no more", file=sys.stderr)
            return 1
        differing, stale = compare(records, {tuple(entry[key] for key in keys) for entry in entries})
        found += differing
        found += [f"{where}: {scenario} does not need {' on workers '.join(task)}" for scenario, *task in sorted(stale)]
    for fault in found:
        print(fault, file=sys.stderr)
    pairs = sum(record["check"] for record in records)
    print(f"check mode and converge compared {pairs} times: {'they agree' if not found else f'{len(found)} differ'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
