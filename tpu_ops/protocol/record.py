"""The states and keys of a rank's record, which its worker stores and controllers read."""

from __future__ import annotations

from . import TYPE_CHECKING, spec
from .wire import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

#: States of a rank that has not ended.
ON = ("starting", "running", "exited", "ending")
#: States of a rank that has ended. They are final: the state of a record does not change any more.
FINAL = ("succeeded", "failed", "stopped", "refused", "lost")


def new(
    data: dict[str, Any],
    *,
    person: Mapping[str, Any],
    asked_by: int,
    asker: str,
    marker: str,
    boot_id: str,
    init_start: int,
    supervisor: Mapping[str, Any],
    since: float,
) -> dict[str, Any]:
    """Return the record of a rank that is being started. A record never contains the value of a variable.

    Args:
        data: The spec.
        person: ``uid`` and ``name`` of the user that the command runs as.
        asked_by: The user id of the user who sent the request.
        asker: The name of the user who sent the request.
        marker: The marker of the request.
        boot_id: The id of this boot of the worker.
        init_start: When the worker's init was started, in clock ticks since the boot of the kernel.
        supervisor: ``pid`` and ``start`` of the process that writes the record.
        since: When the rank was started, in seconds since 1970.
    """
    kept = ("run_id", "attempt", "rank", "world_size", "node", "slice", "slices", "worker", "workers")
    record = {key: data[key] for key in (*kept, "argv", "cwd", "venv", "barrier", "lease", "exit_skew")}
    record.update(
        protocol=PROTOCOL,
        person=dict(person),
        asked_by=asked_by,
        asker=asker,
        env_names=sorted(data["env"]),
        secret_names=sorted(data["secrets"]),
        spec_digest=spec.digest(data),
        code_digest=data["code_digest"],
        started_from=data["started_from"],
        marker=marker,
        grace={"failure": data["grace_failure"], "stop": data["grace_stop"]},
        boot_id=boot_id,
        init_start=init_start,
        supervisor=dict(supervisor),
        pid=0,
        cgroup="",
        since=since,
        began=None,
        exited=None,
        ended=None,
        state="starting",
        reason="",
        exit=None,
        intent=None,
        stop_requested_by="",
        port=0,
        first=None,
        blamed=[],
        failed_checks=[],
        notes=[],
        traceback=None,
        stall=spec.stall_of(data),
        left_behind=[],
    )
    return record


def grace(graces: Mapping[str, Any], intent: Mapping[str, Any] | None) -> float:
    """Return the seconds between SIGTERM and SIGKILL, from the run's graces (``failure``, ``stop``) and intent."""
    if intent is None or intent["kind"] not in ("stop", "shutdown"):
        return float(graces["failure"])
    asked = intent.get("grace")
    return float(graces["stop"] if asked is None else asked)
