"""Decides what is deleted after the end of a grant: nodes and queued resources for which the grant had room."""

from __future__ import annotations

import json
from pathlib import Path

from tpu_ops import files
from tpu_ops.errors import OpsError
from tpu_ops.fleet import grant
from tpu_ops.fleet.grant import Grant
from tpu_ops.fleet.holdings import Holdings

#: File in the fleet's state directory with the names of what was outside the grant at its end.
_OUTSIDE = "outside-grant.json"


def covered(found: Grant, held: Holdings, outside: frozenset[str] = frozenset()) -> list[str]:
    """Return the resource names of the nodes and queued resources for which the grant had room before its end.

    Args:
        found: The grant.
        held: What exists.
        outside: Resource names of what was outside the grant when it ended.
    """
    shares, _ = grant.shares(found, (use for use in held.uses if found.allowed(use) and use.name not in outside))
    inside = {use for members in shares for use in members}
    stay = {use.name for use in held.uses if use not in inside}
    # The deletion of a queued resource deletes all its nodes.
    stay |= {
        f"{node.full_name.rpartition('/nodes/')[0]}/queuedResources/{node.queued_resource}"
        for node in held.nodes
        if node.full_name in stay
    }
    return list(dict.fromkeys(use.name for use in held.uses if use.name not in stay))


def outside(found: Grant, state_dir: Path) -> frozenset[str]:
    """Return the resource names that `remember` has kept since the end of the grant.

    Raises:
        OpsError: The file is invalid.
    """
    file = state_dir / _OUTSIDE
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return frozenset(kept["names"]) if kept["ends"] == found.ends.isoformat() else frozenset()
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, LookupError, TypeError) as exc:
        fix = "delete unneeded nodes by name (`tpu_ops delete`), then remove this file"
        raise OpsError("the file is invalid, so nothing was deleted", where=str(file), fix=fix) from exc


def remember(found: Grant, names: frozenset[str], state_dir: Path) -> None:
    """Keep the resource names of what is outside the grant.

    Deletions make room in the grant. Without these names, the next command would delete what had no room before.

    Raises:
        OpsError: The file cannot be written.
    """
    file = state_dir / _OUTSIDE
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(file, json.dumps({"ends": found.ends.isoformat(), "names": sorted(names)}) + "\n", 0o600)
    except OSError as exc:
        raise files.unwritable(file, exc) from exc
