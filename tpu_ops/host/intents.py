"""Why a run is being ended, kept for its supervisor before anything is signalled."""

from __future__ import annotations

import contextlib
import json
import os
import time

from tpu_ops.protocol.wire import Refused

from . import TYPE_CHECKING, private, space

if TYPE_CHECKING:
    from typing import Any

#: What an intent is called in the directory of its run.
BESIDE = "intent.json"


class Intents:
    """The intents of this host's runs: below /run, or, where that takes no more, in the directory of their run.

    Args:
        run_dir: What is kept until the next boot.
        runs_dir: The directories of all runs.
    """

    def __init__(self, run_dir: str, runs_dir: str) -> None:
        self._in_memory = os.path.join(run_dir, "intents")
        self._runs_dir = runs_dir
        self._run_dir = run_dir

    def put(self, run_id: str, intent: dict[str, Any]) -> None:
        """Record why a run is about to be ended; the first intent stays, but for one that a person asks for.

        Raises:
            Refused: There is no room for it anywhere.
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
        fix = "make room on one of them: `df {0} {1}; df -i {0} {1}` on this worker show how full they are"
        raise Refused("failed", message, fix.format(self._run_dir, self._runs_dir))

    def take(self, run_id: str, only: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the recorded intent and remove it; None where nobody recorded one.

        Args:
            run_id: The run.
            only: Leave any other than this one.
        """
        places = [path for path in self._places(run_id) if only is None or _read(path) == only]
        found = [intent for intent in map(_take, places) if intent is not None]
        # What a person asks for stands before all else, wherever there was room for it.
        return next((intent for intent in found if intent.get("requested")), found[0] if found else None)

    def _places(self, run_id: str) -> tuple[str, str]:
        """Return where the intent of a run may stand, what is tried first at first."""
        return os.path.join(self._in_memory, run_id + ".json"), os.path.join(self._runs_dir, run_id, BESIDE)


def _put(path: str, intent: dict[str, Any]) -> None:
    """Write an intent where none stands, or in the place of one that no person asks for.

    Raises:
        OSError: The disk does not take it.
    """
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
        # What a full disk has taken of it would stay for ever.
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _take(path: str) -> dict[str, Any] | None:
    """Return the intent in a file and remove that; None where there is none."""
    taken = "{}.{}.taken".format(path, os.getpid())
    try:
        # Away from its place at once: another that comes meanwhile is not removed with it.
        os.rename(path, taken)
    except OSError:
        return None
    try:
        return _read(taken)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(taken)


def _read(path: str) -> dict[str, Any] | None:
    """Return the intent in a file, None where there is no file. A damaged one still says that somebody wants an end."""
    try:
        return private.read(path)
    except private.Damaged as damage:
        reason = "stopped; who asked for it is not known: {}".format(damage.message)
        return {"kind": "stop", "by": "somebody", "at": time.time(), "reason": reason, "requested": True}
