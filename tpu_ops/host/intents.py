"""Stores why a run is being ended (the intent) before its supervisor receives a signal."""

from __future__ import annotations

import contextlib
import json
import os
import time

from tpu_ops.protocol.wire import Refused

from . import TYPE_CHECKING, private, space

if TYPE_CHECKING:
    from typing import Any

#: Name of the file with the intent in the directory of a run.
BESIDE = "intent.json"


class Intents:
    """The intents of this host's runs: below /run, or in the directory of the run if /run is full.

    Args:
        run_dir: Directory below /run, whose files exist until the next boot.
        runs_dir: The directories of all runs.
    """

    def __init__(self, run_dir: str, runs_dir: str) -> None:
        self._in_memory = os.path.join(run_dir, "intents")
        self._runs_dir = runs_dir
        self._run_dir = run_dir

    def put(self, run_id: str, intent: dict[str, Any]) -> None:
        """Record why a run is about to be ended. An existing intent is replaced only by a user's request.

        Raises:
            Refused: The disks are full.
        """
        faults = []
        for path in self._places(run_id):
            try:
                if os.path.dirname(path) == self._in_memory:
                    private.directory(self._run_dir, "intents")
                _put(path, intent)
            except OSError as exc:
                where = os.path.dirname(path)
                faults.append("{}: {}".format(where, space.why(exc, [where])))
            else:
                return
        message = "the request to end run {} cannot be recorded: {}".format(run_id, "; ".join(faults))
        fix = (
            "make room on one of these file systems: `df {0} {1}; df -i {0} {1}` on this worker show how full they are"
        )
        raise Refused("failed", message, fix.format(self._run_dir, self._runs_dir))

    def take(self, run_id: str, only: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the recorded intent of a run and remove it; None if there is no intent.

        Args:
            run_id: The run.
            only: Take only an intent equal to this one; None means any intent.
        """
        places = [path for path in self._places(run_id) if only is None or _read(path) == only]
        found = [intent for intent in map(_take, places) if intent is not None]
        # If both files exist, a user's request takes precedence.
        return next((intent for intent in found if intent.get("requested")), found[0] if found else None)

    def _places(self, run_id: str) -> tuple[str, str]:
        """Return the paths of a run's intent, in the order in which they are tried."""
        return os.path.join(self._in_memory, run_id + ".json"), os.path.join(self._runs_dir, run_id, BESIDE)


def _put(path: str, intent: dict[str, Any]) -> None:
    """Write an intent to a file; an existing file is replaced only if the new intent is a user's request."""
    temporary = "{}.{}".format(path, os.getpid())
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump(intent, file)
        try:
            os.link(temporary, path)
        except FileExistsError:
            if intent.get("requested"):
                os.replace(temporary, path)
    finally:
        # Remove the temporary file, also if a full disk left it incomplete.
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _take(path: str) -> dict[str, Any] | None:
    """Return the intent in a file and remove the file; None if there is no file."""
    taken = "{}.{}.taken".format(path, os.getpid())
    try:
        # Rename the file before reading, so that an intent that arrives after this moment is not removed.
        os.rename(path, taken)
    except OSError:
        return None
    try:
        return _read(taken)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(taken)


def _read(path: str) -> dict[str, Any] | None:
    """Return the intent in a file; None if there is no file. A damaged file counts as a request to stop the run."""
    try:
        return private.read(path)
    except private.Damaged as damage:
        reason = "stopped by an unknown user: {}".format(damage.message)
        return {"kind": "stop", "by": "somebody", "at": time.time(), "reason": reason, "requested": True}
