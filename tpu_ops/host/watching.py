"""Connects a rank's `watch` with this host: its control group, its log, and the programs that read chips and stacks."""

from __future__ import annotations

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
        stacks=lambda: _stacks(store, record),
        notices=Notices(),
    )
    watch = Watch(store.directory(record["run_id"]), facts, Rules(**record["stall"]), first=record["rank"] == 0)
    watch.start()
    return watch


def _services(holders: list[Dict[str, Any]]) -> Sequence[Dict[str, Any]]:
    if not holders:
        return []
    from . import chip_metrics  # imported late: a run without chips does not need it

    return chip_metrics.read(holders, len(proc.chips()))


def _stacks(store: Store, record: Dict[str, Any]) -> str:
    """Keep the stacks of a rank's processes; return the error, or an empty text."""
    from . import stacks  # imported late: most runs never stand still

    found = stacks.collect(stacks.processes_of(record), _STACKS_LIMIT)
    return stacks.keep(stacks.kept_path(store, record["run_id"]), found)
