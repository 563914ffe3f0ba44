"""The nodes that `tpu_ops apply` has made and on which site.yml has not run yet.

The file is written before a node is made, so that the next apply configures the node if this one is killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path

from tpu_ops import files

_FILE, _LOCK = "unconfigured.json", "unconfigured.lock"
#: Seconds to wait for another process that writes the file.
_PATIENCE = 10.0

#: Project and name of a node: its zone is not known before it is made.
Key = tuple[str, str]


def read(state_dir: Path) -> frozenset[Key]:
    """Return the nodes; none if the file does not exist or is damaged."""
    try:
        data = json.loads((state_dir / _FILE).read_text(encoding="utf-8"))
        return frozenset((str(project), str(name)) for project, name in data)
    except (OSError, ValueError, TypeError):
        return frozenset()


def add(state_dir: Path, keys: Collection[Key]) -> None:
    """Add nodes.

    Raises:
        OpsError: The file cannot be written.
    """
    _write(state_dir, lambda known: known | frozenset(keys))


def remove(state_dir: Path, keys: Collection[Key]) -> None:
    """Remove nodes.

    Raises:
        OpsError: The file cannot be written.
    """
    _write(state_dir, lambda known: known - frozenset(keys))


def _write(state_dir: Path, update: Callable[[frozenset[Key]], frozenset[Key]]) -> None:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.locked(state_dir / _LOCK, _PATIENCE):
            known = read(state_dir)
            if (now := update(known)) != known:
                files.replace(state_dir / _FILE, json.dumps(sorted(now)) + "\n", 0o600)
    except OSError as exc:
        raise files.unwritable(state_dir / _FILE, exc) from exc
