"""Connects a rank's `watch` with this host: its control group, its log, and the programs that read chips and stacks."""

from __future__ import annotations

import importlib
import os

from . import TYPE_CHECKING, proc
from .notices import Notices
from .stalls import Rules
from .watch import Facts, Watch

if TYPE_CHECKING:
    from typing import Any, Dict, Sequence

    from .logs import Logger
    from .store import Store

#: Seconds for the stacks of all processes of a rank.
_STACKS_LIMIT = 10.0


def started(store: Store, record: Dict[str, Any], logger: Logger) -> Watch:
    """Return the watch of a rank whose command has begun; it runs already.

    Args:
        store: The store of the run.
        record: The rank's record.
        logger: The rank's log.
    """
    cgroup = record["cgroup"]

    def own() -> list[int]:
        return [pid for pid in proc.cgroup_pids(cgroup) if pid != os.getpid()]

    facts = Facts(
        output=lambda: (logger.came, logger.heard),
        # Only processes of the run: reading the open files of all processes of the host would take far longer.
        holders=lambda: proc.holders(only=own()),
        services=_services,
        stacks=lambda: _stacks(own(), os.path.join(store.logs(record["run_id"]), "stacks.json")),
        notices=Notices(),
    )
    watch = Watch(store.directory(record["run_id"]), facts, Rules(**record["stall"]), first=record["rank"] == 0)
    watch.start()
    return watch


def _services(holders: list[Dict[str, Any]]) -> Sequence[Dict[str, Any]]:
    if not holders:
        return []
    try:
        found: Sequence[Dict[str, Any]] = _module("chip_metrics").read(holders)
    except ImportError:
        return []
    return found


def _stacks(pids: list[int], path: str) -> str:
    """Keep the stacks of processes; return the error, or an empty text."""
    module = _module("stacks")
    fault: str = module.keep(path, module.collect(pids, limit=_STACKS_LIMIT))
    return fault


def _module(name: str) -> Any:
    """Return a module of this package that only the watch needs."""
    return importlib.import_module("tpu_ops.host." + name)
