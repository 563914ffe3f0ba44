"""The action `report`: what this host knows of a run, or of its last uses by runs, for `tpu_ops report`."""

from __future__ import annotations

import contextlib
import json
import os
import stat

from tpu_ops.protocol import spec
from tpu_ops.protocol.record import FINAL
from tpu_ops.protocol.wire import Refused, require_protocol

from . import TYPE_CHECKING, activity, logs, mounts, private, probe, stacks
from .person import Person, acting_as, by_uid
from .rights import require_root
from .store import HISTORY, KEPT_RUNS, Store, same_start

if TYPE_CHECKING:
    from typing import Any, Dict, Iterator

#: Maximum number of bytes that are read from the end of a history.
_HISTORY_BYTES = 2 * 2**20
#: Default and maximum number of samples in an answer.
_POINTS, _MOST_POINTS = 300, 5000
#: Number of last lines of the output, and the maximum number of bytes in them.
_TAIL_LINES, _TAIL_BYTES = 50, 32 * 1024
#: Facts of an attempt that was set aside.
_OF_ATTEMPT = ("attempt", "since", "began", "exited", "ended", "state", "reason", "exit", "first", "intent")
#: Facts of a use of this host by a run.
_OF_USE = ("run_id", "attempt", "since", "began", "ended", "state", "asker")


def report(request: Dict[str, Any], store: Store) -> Dict[str, Any]:
    """Return what this host knows of a run; without ``run_id``, the uses of this host by runs (see `uses`).

    Request: ``run_id``; ``points``, the maximum number of samples. Without ``run_id``: ``since`` (seconds since 1970).

    Returns:
        ``record``; ``history``: samples of all attempts, oldest first, thinned to ``points``; ``watch`` and ``stacks``:
        what was noted and kept of the last attempt, or None; ``tail``: the last lines of the output; ``attempts``:
        the earlier attempts that this host still knows, with ``watch``; ``environment``: path, Python version and
        digest of the run's environment as it is now, or None if the run has none or it cannot be read.

    Raises:
        Refused: This worker has no record of the run, or the record is damaged.
    """
    require_root()
    require_protocol(request)
    if not request.get("run_id"):
        return {"ok": True, **uses(store, float(request.get("since") or 0))}
    run_id = spec.check_run_id(request["run_id"])
    record = store.observe(run_id)
    if record is None:
        raise Refused("missing", "this worker does not know run {}".format(run_id))
    folder = os.path.dirname(store.logs(run_id))
    points = max(1, min(request.get("points") or _POINTS, _MOST_POINTS))
    return {
        "ok": True,
        "record": record,
        "history": thinned(_history(store, run_id, folder), points),
        "watch": store.watch(run_id),
        "stacks": stacks.read_kept(store, run_id),
        "tail": last_lines(logs.tail(store.logs(run_id), _TAIL_BYTES)),
        "attempts": list(_earlier(store, record)),
        "environment": _environment(record),
    }


def uses(store: Store, since: float) -> Dict[str, Any]:
    """Return the uses of this host by runs that ended after a time, one for each attempt, oldest first.

    Returns:
        ``uses``: the facts of each, with ``person``, and ``until``: when it ended, or None if it goes on. ``whole``:
        whether the records reach back to that time.
    """
    found = []
    records = store.survey()[0]
    for record in records:
        ended = activity.end_of(record, store) if record["state"] in FINAL else None
        known = [(record, ended)]
        known += [(one, one["ended"] or one["exited"] or record["since"]) for one in _earlier(store, record)]
        for one, until in known:
            if until is None or until >= since:
                use = {key: one.get(key, record.get(key)) for key in _OF_USE}
                found.append(dict(use, person=record["person"]["name"], until=until))
    oldest = min((float(record["since"]) for record in records), default=0.0)
    whole = len(records) < KEPT_RUNS or oldest <= since
    return {"uses": sorted(found, key=lambda use: float(use["since"])), "whole": whole}


def _earlier(store: Store, record: Dict[str, Any]) -> Iterator[Dict[str, Any]]:
    """Yield the facts of the attempts that were set aside, oldest first; leave out damaged records."""
    run_id = record["run_id"]
    for number in _numbers(store, run_id):
        with contextlib.suppress(private.Damaged, KeyError):
            found = store.read_aside(run_id, number)
            if found is not None and not same_start(found, record):
                yield dict({key: found[key] for key in _OF_ATTEMPT}, watch=store.watch(run_id, number))


def _numbers(store: Store, run_id: str) -> list[int]:
    """Return the numbers of the attempts that were set aside."""
    with contextlib.suppress(OSError):
        names = os.listdir(os.path.join(store.directory(run_id), "attempts"))
        return sorted(int(name) for name in names if name.isdigit() and name.isascii())
    return []


def _history(store: Store, run_id: str, last: str) -> list[Dict[str, Any]]:
    """Return the samples of all attempts; ``last`` is the directory of the last one."""
    folders = [os.path.join(store.directory(run_id), "attempts", str(number)) for number in _numbers(store, run_id)]
    # The supervisor might go on writing the file of the run's directory in later attempts, or begin a new one.
    folders = list(dict.fromkeys([*folders, store.directory(run_id), last]))
    found: list[Dict[str, Any]] = []
    for folder in folders:
        found += samples(_end_of_file(os.path.join(folder, HISTORY), _HISTORY_BYTES))
    return sorted(found, key=lambda sample: float(sample["t"]))


def _end_of_file(path: str, most: int) -> bytes:
    """Return the last bytes of a file, beginning at a line; empty if the file is missing or is not regular."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    except OSError:
        return b""
    with contextlib.suppress(OSError), os.fdopen(descriptor, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            return b""
        file.seek(max(0, info.st_size - most))
        data = file.read(most)
        return data.partition(b"\n")[2] if info.st_size > most else data
    return b""


def samples(data: bytes) -> list[Dict[str, Any]]:
    """Return the samples in the bytes of a history; skip lines that are damaged."""
    found = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            sample = json.loads(line.decode("utf-8"))
            if isinstance(sample, dict) and _is_number(sample.get("t")):
                found.append(_checked(sample))
    return found


def _checked(sample: Dict[str, Any]) -> Dict[str, Any]:
    """Return a sample with values of the expected types only."""
    cores = sample.get("cores")
    rows = [row for row in cores if isinstance(row, list) and len(row) == 6] if isinstance(cores, list) else []
    out = sample.get("out")
    return {
        "t": sample["t"],
        "out": out if _is_number(out) else None,
        "cores": [[value if _is_number(value) else None for value in row] for row in rows[:64]],
        "state": str(sample.get("state") or "")[:40],
    }


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number; infinite and undefined ones are not JSON."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18


def thinned(found: list[Dict[str, Any]], points: int) -> list[Dict[str, Any]]:
    """Return at most so many samples: each stands for several neighbours, whose measurements it has as means.

    Time, bytes of output and state are those of the last neighbour; HBM in use is the largest.
    """
    if len(found) <= points:
        return found
    result = []
    for index in range(points):
        group = found[index * len(found) // points : (index + 1) * len(found) // points]
        cores: Dict[Any, list[list[Any]]] = {}
        for sample in group:
            for row in sample["cores"]:
                cores.setdefault(row[0], []).append(row)
        result.append(dict(group[-1], cores=[_merged(rows) for rows in cores.values()]))
    return result


def _merged(rows: list[list[Any]]) -> list[Any]:
    """Return one row (id, HBM used, HBM total, duty, HBM bandwidth, idle) for several of the same core."""
    columns = [[value for value in column if value is not None] for column in zip(*rows)]  # noqa: B905 - Python 3.8
    largest = [max(column) if column else None for column in columns]
    means = [round(sum(column) / len(column), 1) if column else None for column in columns]
    return [rows[-1][0], largest[1], largest[2], means[3], means[4], rows[-1][5]]


def last_lines(data: bytes) -> str:
    """Return the last lines of an output as text."""
    return "\n".join(data.decode("utf-8", "replace").split("\n")[-_TAIL_LINES - 1 :]).strip("\n")


def _environment(record: Dict[str, Any]) -> Dict[str, Any] | None:
    """Return the path, Python version and digest of a run's environment as it is now; None if it cannot be read."""
    venv = record.get("venv")
    if not venv:
        return None
    with contextlib.suppress(OSError, ValueError, Refused):
        person: Person = by_uid(record["person"]["uid"])
        if any(mounts.is_on(venv, entry["path"]) for entry in mounts.unfit(person.uid, [venv])):
            return None  # reading a path on this mount would block
        with acting_as(person):
            facts = probe.venv_facts(venv)
        return {key: facts[key] for key in ("path", "python", "digest", "packages")}
    return None
