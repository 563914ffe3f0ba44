"""The only writer: results go to standard output, everything said on the way to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_ops.errors import OpsError


def line(text: str = "") -> None:
    """Print one line of a result."""
    print(text, flush=True)


def info(text: str) -> None:
    """Say what is going on."""
    print(text, file=sys.stderr, flush=True)


def warning(text: str) -> None:
    """Say what the user should know although the command goes on."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def error(failure: OpsError) -> None:
    """Print the three parts of an error: what failed, where, what to do."""
    print(f"error: {failure.what}", file=sys.stderr)
    if failure.where:
        print(f"  at:  {failure.where}", file=sys.stderr)
    if failure.fix:
        print(f"  fix: {failure.fix}", file=sys.stderr, flush=True)


def as_json(value: Any) -> None:
    """Print a result as JSON."""
    print(json.dumps(value, indent=2, sort_keys=True), flush=True)


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """Print rows as aligned columns under upper-case headings."""
    cells = [[column.upper().replace("_", " ") for column in columns]]
    cells += [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
