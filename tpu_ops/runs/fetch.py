"""Copies the logs of a run to this machine, byte for byte as far as the workers still have them."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import BinaryIO

from tpu_ops.errors import OpsError
from tpu_ops.remote.fanout import Fanout
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.follow import Follower, Outcome

_log = logging.getLogger(__name__)


async def logs(fanout: Fanout, run: RunRef, directory: Path, *, live: bool = False) -> list[Outcome]:
    """Write each rank's log to ``directory/RUN/rank-N.log``; what was there before is replaced once all is copied.

    Args:
        fanout: Reaches the workers.
        run: The run.
        directory: Made where it is missing.
        live: Whether to go on until the run has ended.

    Returns:
        How every rank is; one whose log could not be read to its end keeps the file ``rank-N.log.part``.

    Raises:
        OpsError: The files cannot be written.
    """
    folder = directory / run.run_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return await _copied(fanout, run, folder, live=live)
    except OSError as exc:
        what = f"the logs cannot be written: {exc.strerror or exc}"
        raise OpsError(what, where=str(exc.filename or folder), fix="see that the disk has space (df)") from exc


async def _copied(fanout: Fanout, run: RunRef, folder: Path, *, live: bool) -> list[Outcome]:
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
            data=lambda rank, _, data: files[rank].write(data),
        )
        outcomes = await follower.run()
    for outcome, part, path in zip(outcomes, parts, paths, strict=True):
        if outcome.state != "unknown":
            part.replace(path)
    return outcomes
