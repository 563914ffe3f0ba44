"""Reads what `tpu_ops train` and `logs` print: equal lines of several ranks are one."""

from __future__ import annotations

import re

from tpu_ops.runs.ranks import parse

_LINE = re.compile(r"\[([0-9,-]+)\] (.*)")


def lines_of(printed: str, rank: int) -> list[str]:
    """Return the lines that one rank said, in order."""
    found = [_LINE.fullmatch(line) for line in printed.splitlines()]
    return [match[2] for match in found if match and rank in parse(match[1], 10_000)]
