"""Copies the logs of a run to this machine, byte for byte, as far as the workers still have the logs."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tpu_ops import files
from tpu_ops.errors import OpsError, UsageError
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.follow import Follower
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.ssh.fanout import Fanout

_log = logging.getLogger(__name__)


class Copied(NamedTuple):
    """The outcome of every rank, and the file of each log that could not be read to its end, by rank."""

    outcomes: list[Outcome]
    parts: Mapping[int, Path]


async def logs(
    fanout: Fanout, run: RunRef, directory: Path, *, taken: Callable[[str], bool], live: bool = False
) -> Copied:
    """Write each rank's log to ``directory/RUN/rank-N.log``; earlier files are replaced once all logs are complete.

    A log that could not be read to its end is left as ``rank-N.log.part``. The state of its rank is then ``unknown``,
    ``unreachable`` or ``gone``, or the outcome has ``cut``.

    Args:
        fanout: Reaches the workers.
        run: The run.
        directory: Created if it does not exist.
        taken: Returns whether a worker's node was taken away; see `Follower`.
        live: Whether to follow the logs until the run has ended.
    """
    folder = directory / run.run_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
        copied = await _copied(fanout, run, folder, taken, live=live)
    except OSError as exc:
        raise _unwritable(folder, exc) from exc
    # Remove the directory if no log had any data.
    with contextlib.suppress(OSError):
        folder.rmdir()
    return copied


def copies(paths: Mapping[int, Path], folder: Path) -> None:
    """Copy this machine's copies of logs to ``rank-N.log.part``. The name says that a copy might be incomplete.

    Args:
        paths: The copy of each rank.
        folder: Created if it does not exist.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, path in paths.items():
            shutil.copyfile(path, folder / f"rank-{rank}.log.part")
    except OSError as exc:
        raise _unwritable(folder, exc) from exc


def _unwritable(folder: Path, exc: OSError) -> OpsError:
    where = str(exc.filename or folder)
    if isinstance(exc, (FileExistsError, NotADirectoryError)):
        what = "the logs cannot be written: this is not a directory"
        return UsageError(what, where=where, fix="name another place")
    what = f"the logs cannot be written: {exc.strerror or exc}{files.room(exc, folder)}"
    return OpsError(
        what, where=where, fix="check that the directory can be written and that the disk has space (ls -ld, df)"
    )


async def _copied(fanout: Fanout, run: RunRef, folder: Path, taken: Callable[[str], bool], *, live: bool) -> Copied:
    ranks = range(len(run.hosts))
    paths = [folder / f"rank-{rank}.log" for rank in ranks]
    parts = [path.with_suffix(".log.part") for path in paths]
    with contextlib.ExitStack() as stack:
        files: list[BinaryIO] = [stack.enter_context(part.open("wb")) for part in parts]
        follower = Follower(
            fanout,
            run.run_id,
            run.hosts,
            shown=(),
            line=lambda *_: None,
            say=_log.info,
            live=live,
            taken=taken,
            data=lambda rank, _, data: files[rank].write(data),
        )
        outcomes = await follower.run()
    left = {}
    for outcome, part, path in zip(outcomes, parts, paths, strict=True):
        if outcome.record is not None and not outcome.cut:
            part.replace(path)
        elif part.stat().st_size:
            left[outcome.rank] = part
        else:
            part.unlink()
    return Copied(outcomes, left)
