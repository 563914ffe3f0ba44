"""Compares what check mode said of Molecule's scenarios with what converge then changed.

    tools/check_changes.py CHANGES_FILE

Reads what the callback changes_file wrote. Check mode must name every task that the next converge changes, with the
paths that it changes, and no other; exceptions stand in .config/molecule/exceptions.yml, each with its reason. A run
without skips changes nothing, and skips no task that converge has changed something by; exceptions stand in
.config/molecule/looked_at.yml. No scenario goes without either.

Exit codes: 0 all agree, 1 something differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
EXCEPTIONS = ROOT / ".config" / "molecule" / "exceptions.yml"
LOOKED_AT = ROOT / ".config" / "molecule" / "looked_at.yml"
Record = dict[str, Any]
Change = tuple[str, str, tuple[str, ...]]
#: Scenario and task.
Exemption = tuple[str, str]


def changes(record: Record) -> set[Change]:
    """Return what a run changed, as (task, host, paths)."""
    return {(task, host, tuple(paths)) for task, host, paths in record["changed"]}


def words(change: Change) -> str:
    """Return a change for people."""
    task, host, paths = change
    return f"{task} on {host}" + (f" ({', '.join(paths)})" if paths else "")


def skipped(record: Record, before: list[Record], looked_at: Collection[str]) -> list[tuple[str, str]]:
    """Given a run without skips and the runs before it, return task and host of what it skipped all the same.

    Handlers run by what is changed, and nothing is.
    """
    done = [each for each in before if each["scenario"] == record["scenario"] and each["playbook"] == "converge.yml"]
    changed = {
        (task, host)
        for each in done
        if not each["check"]
        for task, host, _ in each["changed"]
        if task not in each["handlers"] and task not in looked_at
    }
    return sorted(changed - {(task, host) for task, host in record["ran"]})


def faults(
    records: list[Record], excepted: set[Exemption], looked_at: Collection[str] = ()
) -> tuple[list[str], set[Exemption]]:
    """Given all runs in order, return what differs, and which exceptions were needed.

    Args:
        records: The runs.
        excepted: Where check mode and converge may differ.
        looked_at: Tasks that a run without skips may skip.
    """
    found: list[str] = []
    needed: set[Exemption] = set()
    said: dict[str, Record] = {}
    full: set[str] = set()
    for position, record in enumerate(records):
        scenario = record["scenario"]
        if record["playbook"] == "without_skips.yml":
            found += [f"{scenario}: without skips, {words(change)} changes again" for change in sorted(changes(record))]
            found += [
                f"{scenario}: without skips, {task} is skipped on {host}"
                for task, host in skipped(record, records[:position], looked_at)
            ]
            full.add(scenario)
        if record["playbook"] != "converge.yml" or record["failed"]:
            continue
        if record["check"]:
            said[scenario] = record
            continue
        if scenario not in said:
            continue
        announced, done = changes(said.pop(scenario)), changes(record)
        differing = announced ^ done
        needed |= {(scenario, task) for task, _, _ in differing} & excepted
        found += [
            f"{scenario}: {words(change)} "
            + ("was changed, and check mode did not say so" if change in done else "was announced, and not changed")
            for change in sorted(differing)
            if (scenario, change[0]) not in excepted
        ]
    checked = {record["scenario"] for record in records if record["check"]}
    scenarios = {record["scenario"] for record in records}
    found += [f"{scenario}: no run in check mode" for scenario in sorted(scenarios - checked)]
    found += [f"{scenario}: no run without skips" for scenario in sorted(scenarios - full)]
    return found, needed


def main(path: str) -> int:
    """Compare and print what differs."""
    entries = yaml.safe_load(EXCEPTIONS.read_text())
    if odd := [entry for entry in entries if set(entry) != {"scenario", "task", "reason"}]:
        print(f"{EXCEPTIONS.relative_to(ROOT)}: {odd[0]} needs scenario, task and reason", file=sys.stderr)
        return 1
    excepted = {(entry["scenario"], entry["task"]) for entry in entries}
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    found, needed = faults(records, excepted, {entry["task"] for entry in yaml.safe_load(LOOKED_AT.read_text())})
    ran = {record["scenario"] for record in records}
    found += [
        f"{EXCEPTIONS.relative_to(ROOT)}: {scenario} does not need '{task}'"
        for scenario, task in sorted(excepted - needed)
        if scenario in ran
    ]
    for fault in found:
        print(fault, file=sys.stderr)
    pairs = sum(record["check"] for record in records)
    print(f"check mode and converge compared {pairs} times: {'they agree' if not found else f'{len(found)} differ'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
