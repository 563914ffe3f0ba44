"""Records on this machine of the runs that it started: each run's workers, and its end as this machine saw it.

If a worker has a record of the run, the worker's record takes precedence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpu_ops import files
from tpu_ops.cloud.node import Worker, label_of
from tpu_ops.errors import UsageError
from tpu_ops.files import UnwritableError, unwritable
from tpu_ops.runs import advice
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.ssh.fleet_files import replace

#: Number of runs whose records are kept on this machine: more than any list shows.
KEPT = 200
#: Seconds to wait for another process that writes a record.
_PATIENCE = 10.0
#: Maximum size of a record in bytes: the names of 512 workers, and a command line of 2 MB, more than Linux allows.
_LARGEST = 4 * 2**20
#: States in which a run has ended.
ENDED = ("succeeded", "failed", "stopped", "refused")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRecord:
    """A run as the machine that started it knows it.

    Attributes:
        run_id: The run.
        nodes: Labels that the run's nodes had at the start, by slice.
        node_ids: The API's ids of these nodes.
        hosts: Names that the run's workers had at the start, by rank.
        argv: The command.
        since: When the run was started, in seconds since 1970.
        attempt: The attempt; 1 for the first start.
        ended: The state in which it was seen to end: ``succeeded``, ``failed``, ``stopped`` or ``refused``; else empty.
        full_names: Resource names of the run's nodes, by slice; empty in records of older versions.
        ended_at: When the run ended, in seconds since 1970; 0 if unknown, or in records of older versions.
        person: The owner of the run; empty if the workers did not report it at the end.
        started_by: The user who started the run, if not the owner; empty if the workers did not report it at the end.
    """

    run_id: str
    nodes: tuple[str, ...]
    node_ids: tuple[str, ...]
    hosts: tuple[str, ...]
    argv: tuple[str, ...]
    since: float
    attempt: int = 1
    ended: str = ""
    full_names: tuple[str, ...] = ()
    ended_at: float = 0.0
    person: str = ""
    started_by: str = ""

    def facts(self) -> dict[str, Any]:
        """Return those facts about the run that a worker's record would also contain."""
        named = {key: getattr(self, key) for key in ("attempt", "since", "person", "started_by")}
        return {**named, "argv": list(self.argv), "ended": self.ended_at or None}


def _path(state_dir: Path, run_id: str) -> Path:
    return state_dir / "runs" / f"{run_id}.json"


def write(state_dir: Path, record: RunRecord) -> None:
    """Write the record of a run, and remove the oldest records. Workers report an active run even without a record.

    Raises:
        OpsError: The record cannot be written.
    """
    path = _path(state_dir, record.run_id)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise unwritable(path.parent, exc) from exc
    replace(path, json.dumps(asdict(record)) + "\n", 0o600)
    _prune(path.parent)


def begin(state_dir: Path, record: RunRecord, before: RunRecord | None) -> None:
    """Write the record of a run that is being started.

    Args:
        state_dir: The fleet's state directory.
        record: The run.
        before: The record under the run's name at the time when the name was found to be free.

    Raises:
        UsageError: Another run of the same name was started since then.
        OpsError: The record cannot be written.
    """
    folder = _path(state_dir, record.run_id).parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.locked(folder / ".starting", _PATIENCE):
            known = read(state_dir, record.run_id)
            if known is not None and (before is None or known.since != before.since):
                what, fix = "a run with this name was started here just now", advice.name_taken(record.run_id)
                raise UsageError(what, where=f"run {record.run_id}", fix=fix)
            write(state_dir, record)
    except (OSError, TimeoutError) as exc:
        raise unwritable(folder, exc if isinstance(exc, OSError) else OSError(str(exc))) from exc


def _prune(folder: Path) -> None:
    """Remove the oldest records. If this fails, a later run removes them."""
    with contextlib.suppress(OSError):
        found = sorted(folder.glob("*.json"), key=lambda path: -path.stat().st_mtime)
        for path in found[KEPT:]:
            # Keep the record of a run with a recovery state: the recovery could not be resumed without the record.
            if not (path.with_suffix("") / "recovery.json").exists():
                path.unlink()


def close(state_dir: Path, run_id: str, state: str, otherwise: str = "", outcomes: Sequence[Outcome] = ()) -> None:
    """Record how a run ended, since its workers might be gone later. If the disk is full, nothing is recorded.

    Args:
        state_dir: The fleet's state directory.
        run_id: The run.
        state: The state of the run as it was seen.
        otherwise: The state to record if `state` is not an end, for example because a worker does not know the run.
        outcomes: The outcomes of the run's ranks; the records in them contain the owner and the time of the end.
    """
    known, state = read(state_dir, run_id), state if state in ENDED else otherwise
    if known and state in ENDED:
        told = [outcome.record for outcome in outcomes if outcome.record]
        at = max((float(record.get("ended") or 0) for record in told), default=0.0) or known.ended_at or time.time()
        person = next((record["person"]["name"] for record in told if "person" in record), known.person)
        asker = next((record["asker"] for record in told if record.get("asker")), known.started_by)
        closed = dataclasses.replace(known, ended=state, ended_at=at, person=person, started_by=asker)
        with contextlib.suppress(UnwritableError, OSError):
            write(state_dir, closed)


def forget(state_dir: Path, run_id: str) -> None:
    """Remove this machine's record of a run that did not begin."""
    _path(state_dir, run_id).unlink(missing_ok=True)


def read(state_dir: Path, run_id: str) -> RunRecord | None:
    """Return this machine's record of a run; None if there is none.

    A damaged record causes a warning; the run is then treated like one that another machine started.
    """
    if "/" in run_id or run_id.startswith("."):
        return None
    path = _path(state_dir, run_id)
    if not os.path.lexists(path):
        return None
    try:
        return _read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        _warn_once(path, (exc.strerror if isinstance(exc, OSError) else "") or "it does not contain a run's record")
        return None


@functools.cache
def _warn_once(path: Path, why: str) -> None:
    text = "the record of run %s on this machine is damaged and not used: %s: %s; its workers still report it; rm %s"
    log.warning(text, path.stem, path, why, path)


def _read(path: Path) -> RunRecord:
    data = json.loads(files.read_regular(path, _LARGEST))
    return RunRecord(
        run_id=data["run_id"],
        nodes=tuple(data["nodes"]),
        node_ids=tuple(data["node_ids"]),
        hosts=tuple(data["hosts"]),
        argv=tuple(data["argv"]),
        since=float(data["since"]),
        attempt=int(data["attempt"]),
        ended=str(data.get("ended", "")),
        full_names=tuple(data.get("full_names", ())),
        ended_at=float(data.get("ended_at", 0)),
        person=str(data.get("person", "")),
        started_by=str(data.get("started_by", "")),
    )


def hosts_now(known: RunRecord, workers: Iterable[Worker]) -> tuple[str, ...]:
    """Return the current names of a run's workers by rank: creating or deleting nodes of the same name changes labels.

    Workers of nodes that are gone, or that were replaced by other nodes, keep their names from the record.

    Args:
        known: The run.
        workers: All workers of the fleet.
    """
    ids = dict(zip(known.nodes, known.node_ids, strict=False))
    called = {(worker.node.node_id, _index(worker.host)): worker.host for worker in workers}
    return tuple(called.get((ids.get(label_of(host), ""), _index(host)), host) for host in known.hosts)


def _index(host: str) -> str:
    return host.removeprefix(label_of(host))


def is_of(state_dir: Path, run_id: str, hosts: tuple[str, ...], workers: Iterable[Worker]) -> bool:
    """Return whether this machine's record under a run id is that of the run on these workers."""
    known = read(state_dir, run_id)
    return known is not None and hosts_now(known, workers) == hosts


def names(state_dir: Path) -> list[str]:
    """Return the ids of the runs that have a record on this machine."""
    return [path.stem for path in (state_dir / "runs").glob("*.json")]


def recent(state_dir: Path, count: int) -> list[RunRecord]:
    """Return the newest records on this machine, newest first."""
    found = [record for record in (read(state_dir, name) for name in names(state_dir)) if record]
    return sorted(found, key=lambda record: -record.since)[:count]


def new(
    run_id: str, nodes: tuple[str, ...], node_ids: tuple[str, ...], hosts: tuple[str, ...], argv: tuple[str, ...]
) -> RunRecord:
    """Return a record for a run that starts now."""
    return RunRecord(run_id, nodes, node_ids, hosts, argv, time.time())


def started_on(run_id: str, workers: Sequence[Worker], argv: tuple[str, ...], attempt: int = 1) -> RunRecord:
    """Return a record for a run that starts now on these workers, given in the order of the ranks."""
    nodes = {worker.label: worker.node for worker in workers}
    ids = tuple(node.node_id for node in nodes.values())
    record = new(run_id, tuple(nodes), ids, tuple(worker.host for worker in workers), argv)
    full_names = tuple(node.full_name for node in nodes.values())
    return dataclasses.replace(record, attempt=attempt, full_names=full_names)
