"""What this machine remembers of the runs it started: which workers to ask, how they were seen to end.

The truth stands on the workers.
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

#: Runs that are remembered, and those that can be started again: more than any list shows.
KEPT = 200
#: Seconds for another process to remember a run.
_PATIENCE = 10.0
#: Bytes of a record: the names of 512 workers, and a command line of 2 MB, which is more than Linux takes.
_LARGEST = 4 * 2**20
#: States in which a run has ended.
ENDED = ("succeeded", "failed", "stopped", "refused")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRecord:
    """One run as its starter knows it.

    Attributes:
        run_id: The run.
        nodes: Labels that its nodes had then, by slice.
        node_ids: The API's ids of these nodes.
        hosts: Its workers as they were called then, by rank.
        argv: The command.
        since: When it was started, seconds since 1970.
        attempt: As in the spec.
        ended: State in which it was seen to end: ``succeeded``, ``failed`` or ``stopped``; empty where it was not.
        full_names: Resource names of its nodes, by slice; empty where an older version has written it.
        ended_at: When it ended, seconds since 1970; 0 where it was not seen to end, or by an older version.
        person: Whose it is; empty where that was not heard of its workers at its end.
        started_by: Who started it, where that is somebody else; the same.
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
        """Return what a worker's record says of it as well."""
        named = {key: getattr(self, key) for key in ("attempt", "since", "person", "started_by")}
        return {**named, "argv": list(self.argv), "ended": self.ended_at or None}


def _path(state_dir: Path, run_id: str) -> Path:
    return state_dir / "runs" / f"{run_id}.json"


def write(state_dir: Path, record: RunRecord) -> None:
    """Remember a run; the oldest that are remembered are forgotten, workers tell of those that are on after all.

    Raises:
        OpsError: It cannot be written.
    """
    path = _path(state_dir, record.run_id)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise unwritable(path.parent, exc) from exc
    replace(path, json.dumps(asdict(record)) + "\n", 0o600)
    _prune(path.parent)


def begin(state_dir: Path, record: RunRecord, before: RunRecord | None) -> None:
    """Remember a run that is being started.

    Args:
        state_dir: Of the fleet.
        record: The run.
        before: What was remembered under its name when it was looked whether the name is free.

    Raises:
        UsageError: Another one of its name has been started since.
        OpsError: It cannot be written.
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
    """Forget what is too old; what cannot be removed now is removed by a later run."""
    with contextlib.suppress(OSError):
        found = sorted(folder.glob("*.json"), key=lambda path: -path.stat().st_mtime)
        for path in found[KEPT:]:
            # Without its record a run that is recovered here could not be taken over.
            if not (path.with_suffix("") / "recovery.json").exists():
                path.unlink()


def close(state_dir: Path, run_id: str, state: str, otherwise: str = "", outcomes: Sequence[Outcome] = ()) -> None:
    """Remember how a run has ended, which nobody tells once its nodes are gone; a full disk forgets it.

    Args:
        state_dir: Of the fleet.
        run_id: The run.
        state: State of the run as it was seen.
        otherwise: The one that is remembered where that says nothing of its end, as when a worker knows no such run.
        outcomes: How its ranks are, whose records say more of it.
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
    """Forget a run that never was."""
    _path(state_dir, run_id).unlink(missing_ok=True)


def read(state_dir: Path, run_id: str) -> RunRecord | None:
    """Return what this machine remembers of a run; None where it remembers nothing.

    A damaged record is warned of, and the workers tell of the run as of one that another machine has started.
    """
    if "/" in run_id or run_id.startswith("."):
        return None
    path = _path(state_dir, run_id)
    if not os.path.lexists(path):
        return None
    try:
        return _read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        _warn_once(path, (exc.strerror if isinstance(exc, OSError) else "") or "it does not hold the record of a run")
        return None


@functools.cache
def _warn_once(path: Path, why: str) -> None:
    text = "what this machine remembers of run %s is damaged and not used: %s: %s; its workers still tell of it; rm %s"
    log.warning(text, path.stem, path, why, path)


def _read(path: Path) -> RunRecord:
    """Return the record in a file.

    Raises:
        OSError: It cannot be read, or is no regular file.
        ValueError, KeyError, TypeError, AttributeError, RecursionError: It holds something else.
    """
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
    """Return a run's workers by rank, as they are called now: nodes of one name, made or deleted, change labels.

    Where a node is gone, or another one was made in its place, its workers keep the names that are remembered.

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
    """Return whether the run of this name that this machine remembers is the one on these workers of all."""
    known = read(state_dir, run_id)
    return known is not None and hosts_now(known, workers) == hosts


def names(state_dir: Path) -> list[str]:
    """Return the runs that this machine remembers."""
    return [path.stem for path in (state_dir / "runs").glob("*.json")]


def recent(state_dir: Path, count: int) -> list[RunRecord]:
    """Return the newest runs that this machine remembers, newest first."""
    found = [record for record in (read(state_dir, name) for name in names(state_dir)) if record]
    return sorted(found, key=lambda record: -record.since)[:count]


def new(
    run_id: str, nodes: tuple[str, ...], node_ids: tuple[str, ...], hosts: tuple[str, ...], argv: tuple[str, ...]
) -> RunRecord:
    """Return the record of a run that starts now."""
    return RunRecord(run_id, nodes, node_ids, hosts, argv, time.time())


def started_on(run_id: str, workers: Sequence[Worker], argv: tuple[str, ...], attempt: int = 1) -> RunRecord:
    """Return the record of a run that starts now on these workers, which are in the order of the ranks."""
    nodes = {worker.label: worker.node for worker in workers}
    ids = tuple(node.node_id for node in nodes.values())
    record = new(run_id, tuple(nodes), ids, tuple(worker.host for worker in workers), argv)
    full_names = tuple(node.full_name for node in nodes.values())
    return dataclasses.replace(record, attempt=attempt, full_names=full_names)
