"""Filters that check the variables of playbooks, and list the faults of a whole fleet; no side effects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ClusterShell.NodeSet import NodeSet


def faults_listed(checks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Given the results of `check_variables` on all hosts, return one line for each fault, sorted by file and line."""
    hosts: dict[tuple[str, str], list[str]] = {}
    waiting: set[str] = set()
    for host, check in checks.items():
        for fault in check["faults"]:
            hosts.setdefault((fault["place"], fault["text"]), []).append(host)
        waiting.update(check["waiting"])
    lines = [
        f"{place + ': ' if place else ''}{text} ({_named(hosts[place, text], len(checks))})"
        for place, text in sorted(hosts, key=_order)
    ]
    if waiting:
        lines.append(
            f"{', '.join(sorted(waiting))}: more of these roles' checks run once the faults above are corrected"
        )
    return lines


def count_faults(values: Mapping[str, Any], unit: str = "") -> list[str]:
    """Return a fault for each value that is not a whole number of 1 or more.

    Args:
        values: Variable -> a number, a string with a number, or a list of these.
        unit: A unit that may follow the number.
    """
    right = re.compile(f"[1-9][0-9]*{f'{unit}?' if unit else ''}")
    return [
        f"{name}: '{each}' is not a whole number of 1 or more"
        for name, value in values.items()
        for each in (value if isinstance(value, list) else [value])
        if not right.fullmatch(str(each))
    ]


def _order(fault: tuple[str, str]) -> tuple[bool, str, int, str]:
    """Given place and text of a fault, return a key that sorts by file and line; faults without a place come last."""
    place, text = fault
    path, _, line = place.rpartition(":")
    return (
        not place,
        path or place,
        int(line) if line.isdecimal() else 0,
        re.sub(r"\d+", lambda n: n[0].zfill(6), text),
    )


def _named(hosts: list[str], number: int) -> str:
    """Return the names of hosts as one text, folded as ClusterShell does."""
    if len(hosts) == number > 1:
        return f"all {number} workers"
    return str(NodeSet.fromlist(hosts))


class FilterModule:
    """Filters of the playbooks."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"count_faults": count_faults, "faults_listed": faults_listed}
