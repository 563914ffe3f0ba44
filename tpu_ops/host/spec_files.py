"""The spec of a run on its way from a request to the supervisor: a file that only root can read."""

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

#: Spec files that no supervisor took within this many seconds are removed.
STALE_AFTER = 300.0


def path_of(run_dir: str, run_id: str) -> str:
    """Return where the spec of a run waits for its supervisor."""
    return os.path.join(run_dir, "specs", run_id + ".json")


def put(run_dir: str, spec: dict[str, Any], uid: int, asked_by: int, marker: str) -> None:
    """Write the spec for the supervisor, readable by root alone, with whose run it is, who asks and how.

    Raises:
        Refused: A spec of this run waits already: another start is at work, or died before its supervisor began.
    """
    path = path_of(run_dir, spec["run_id"])
    private.directory(run_dir, "specs")
    # Whoever finds it finds all of it: by the marker the same request knows itself when it comes again.
    written = "{}.{}".format(path, os.getpid())
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump({"spec": spec, "uid": uid, "asked_by": asked_by, "marker": marker}, file)
        os.link(written, path)
    except FileExistsError:
        text = "run {} is being started here already".format(spec["run_id"])
        fix = "wait for that start; if it died, start this one {:.0f} s after it".format(STALE_AFTER)
        raise Refused("held", text, fix) from None
    finally:
        os.unlink(written)


def waits(run_dir: str, run_id: str, marker: str) -> bool:
    """Return whether the spec that came with this very request waits for its supervisor."""
    try:
        data = private.read(path_of(run_dir, run_id))
    except private.Damaged:
        return False  # it keeps another start away until `sweep` removes it
    return data is not None and bool(data["marker"] == marker)


def read(run_dir: str, run_id: str) -> tuple[dict[str, Any], int, int, str]:
    """Return the spec of a run, the user ids of its person and its asker, and the request's marker.

    It stays until there is a record: the same request that comes again finds one of the two.

    Raises:
        OSError: There is none.
        Damaged: It cannot be read.
    """
    path = path_of(run_dir, run_id)
    data = private.read(path)
    if data is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return check(data["spec"]), int(data["uid"]), int(data["asked_by"]), str(data["marker"])


def discard(run_dir: str, run_id: str, marker: str) -> None:
    """Remove the spec that came with this very request where it still waits; that of the next attempt stays."""
    if waits(run_dir, run_id, marker):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path_of(run_dir, run_id))


def sweep(run_dir: str, now: float | None = None) -> None:
    """Remove specs that no supervisor took: their starters died."""
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
