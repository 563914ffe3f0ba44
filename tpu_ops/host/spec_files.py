"""Spec files pass the spec of a run from a request to the supervisor. Only root can read spec files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time

from tpu_ops.protocol.spec import check
from tpu_ops.protocol.wire import Refused

from . import TYPE_CHECKING, private

if TYPE_CHECKING:
    from typing import Any

#: Seconds after which a spec file that no supervisor has taken is removed.
STALE_AFTER = 300.0


def path_of(run_dir: str, run_id: str) -> str:
    """Return the path of a run's spec file."""
    return os.path.join(run_dir, "specs", run_id + ".json")


def put(run_dir: str, spec: dict[str, Any], uid: int, asked_by: int, marker: str) -> None:
    """Write the spec for the supervisor, with the run's user, the user who asks, and the marker of the request.

    Raises:
        Refused: The run has a spec file already: another start is in progress, or died before its supervisor began.
    """
    path = path_of(run_dir, spec["run_id"])
    private.directory(run_dir, "specs")
    # The link makes the file appear with its whole content. By the marker, a repeated request finds its own spec.
    written = "{}.{}".format(path, os.getpid())
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump({"spec": spec, "uid": uid, "asked_by": asked_by, "marker": marker}, file)
        os.link(written, path)
    except FileExistsError:
        text = "run {} is already being started on this worker".format(spec["run_id"])
        fix = "wait for the other start; if its command was killed, start again after {:.0f} s".format(STALE_AFTER)
        raise Refused("held", text, fix) from None
    finally:
        os.unlink(written)


def waits(run_dir: str, run_id: str, marker: str) -> bool:
    """Return whether the spec file of this request still waits for a supervisor."""
    try:
        data = private.read(path_of(run_dir, run_id))
    except private.Damaged:
        return False  # the damaged file blocks other starts until `sweep` removes it
    return data is not None and bool(data["marker"] == marker)


def read(run_dir: str, run_id: str) -> tuple[dict[str, Any], int, int, str]:
    """Return the spec of a run, the user ids of the run and of the user who asked, and the request's marker.

    The file stays until the record exists, so that a repeated request finds the file or the record.

    Raises:
        OSError: There is no spec file.
        Damaged: The file is unreadable.
    """
    path = path_of(run_dir, run_id)
    data = private.read(path)
    if data is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return check(data["spec"]), int(data["uid"]), int(data["asked_by"]), str(data["marker"])


def discard(run_dir: str, run_id: str, marker: str) -> None:
    """Remove the spec file of this request if it exists; keep the spec file of another request."""
    if waits(run_dir, run_id, marker):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path_of(run_dir, run_id))


def sweep(run_dir: str, now: float | None = None) -> None:
    """Remove spec files that no supervisor has taken because the request that wrote them died."""
    folder = os.path.join(run_dir, "specs")
    limit = (time.time() if now is None else now) - STALE_AFTER
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        path = os.path.join(folder, name)
        try:
            if os.stat(path).st_mtime < limit:
                os.unlink(path)
        except FileNotFoundError:
            continue
