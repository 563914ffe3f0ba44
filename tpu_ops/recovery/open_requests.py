"""List or delete open requests: nodes or queued resources that a run's recovery has requested and no run uses."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tpu_ops import texts
from tpu_ops.cloud import pending
from tpu_ops.cloud.node import SERVING_STATES
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.pending import CREATE, START, Request
from tpu_ops.cloud.remedies import node_deletion
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, OpsError
from tpu_ops.fleet import origin, view
from tpu_ops.runs import holders, recovery

#: The option of `tpu_ops stop` that deletes all open requests of a run.
DELETE = "--delete-requested"
#: Seconds to wait for a deletion.
DELETION_LIMIT = 900.0

_log = logging.getLogger(__name__)


def kept(state_dir: Path, run_id: str) -> list[Request]:
    """Return the open requests of a run from its file on this machine; a damaged file is only a warning."""
    try:
        return pending.read(recovery.requests_file(state_dir, run_id))
    except OpsError as exc:
        _log.warning("run %s: %s", run_id, exc)
        return []


def removal(run_id: str, request: Request) -> str:
    """Return the command that ends the cost of a request, without the option --fleet."""
    _, project, _, zone, _, short = request.name.split("/")
    if request.kind == START:
        return shlex.join(["gcloud", "compute", "tpus", "tpu-vm", "stop", short, "--zone", zone, "--project", project])
    return node_deletion(short, zone, project) if request.is_node else shlex.join(["tpu_ops", "stop", run_id, DELETE])


def tell(run_id: str, found: Iterable[Request]) -> None:
    """Log each request with its state, its cost and the command that ends the cost."""
    for request in found:
        asked, ends = ("the start of ", "stops") if request.kind == START else ("", "deletes")
        text = f"its recovery requested {asked}{request.in_words} at {texts.at(request.since)}"
        _log.info("run %s: %s; %s; `%s` %s it", run_id, text, _cost(request), removal(run_id, request), ends)


def _cost(request: Request) -> str:
    ready = "READY" if request.is_node else "ACTIVE"
    if request.state == ready:
        return f"{ready} when last seen, and billed"
    if request.state in ("SUSPENDED", "FAILED"):
        return f"{request.state} when last seen; it uses quota"
    seen = f"{request.state} when last seen" if request.state else "not seen yet"
    return f"{seen}; it is billed once it is {ready}"


def in_use(settings: Settings, request: Request) -> str:
    """Return the runs that are active on the nodes of a request, as words; empty if there are none.

    Raises:
        CloudError: The API refused the call or did not answer.
    """
    if request.state not in ("ACTIVE", *SERVING_STATES):
        return ""
    fleet, _ = view.look(settings)
    place = request.name.rsplit("/", 2)[0]
    names = [
        node.full_name
        for node in fleet.nodes
        if node.full_name.startswith(f"{place}/")
        and request.name in (node.full_name, f"{place}/queuedResources/{node.queued_resource}")
    ]
    return holders.named(holders.active(fleet, names)[0])


def settle(
    settings: Settings,
    run_id: str,
    *,
    delete: bool,
    confirmed: Callable[[str], bool] | None,
    waiting: Callable[[str], Progress],
    used: Callable[[Settings, Request], str] = in_use,
) -> tuple[list[dict[str, Any]], OpsError | None]:
    """Log the open requests of a stopped run with their present states, and delete those that are not wanted.

    Args:
        settings: The settings of the fleet.
        run_id: The id of the run.
        delete: Whether to delete all requests.
        confirmed: Asks the user a question, and returns whether the answer is yes; None if nobody can be asked.
        waiting: Returns the function that shows the progress of a deletion, given the name of what is deleted.
        used: Returns the runs that use a request, as `in_use` does: a request in use is not deleted.

    Returns:
        Each remaining or deleted request for --json, and the first error, if any.
    """
    path = recovery.requests_file(settings.state_dir, run_id)
    if not kept(settings.state_dir, run_id):
        return [], None
    if recovery.is_held(settings.state_dir, run_id):
        # A running recovery would request the deleted nodes again.
        tell(run_id, kept(settings.state_dir, run_id))
        what = "nothing was deleted: a process on this machine is still recovering the run"
        held = OpsError(what, where=f"run {run_id}", fix="repeat the command once that process has ended")
        return _facts(run_id, kept(settings.state_dir, run_id)), held if delete else None
    book, done = pending.Requests(path, _log.warning), []
    problem: OpsError | None = None
    deleting = delete
    left = {request.name: request for request in book.all}
    try:
        with origin.api(settings) as tpu:
            for request in book.all:
                now = pending.look(tpu, request)
                del left[request.name]
                if now is None:
                    book.drop(request.name)
                    continue
                book.seen(now.name, now.state, now.made)
                tell(run_id, [now])
                if not now.state:
                    # The API does not list the new resource yet, so a deletion now would have no effect.
                    what, fix = "not deleted: the API does not list this resource yet", "repeat the command in a minute"
                    problem = problem or CloudError(what, where=now.in_words, fix=fix)
                elif (delete or confirmed) and now.kind == CREATE and (runs := used(settings, now)):
                    fix = "wait until that run has ended, or stop it, and repeat the command"
                    problem = problem or CloudError(f"not deleted: {runs} there", where=now.in_words, fix=fix)
                elif now.kind == CREATE and (delete or (confirmed and confirmed(f"delete {now.in_words}?"))):
                    deleting = True
                    pending.delete(tpu, now, timeout=DELETION_LIMIT, progress=waiting(now.in_words))
                    _log.info("run %s: deleted %s", run_id, now.in_words)
                    done.append(now)
                    book.drop(now.name)
    except OpsError as exc:
        problem = exc
        tell(run_id, left.values())
    if problem and not deleting:
        _log.warning("run %s: %s", run_id, problem)
        problem = None
    return _facts(run_id, done, deleted=True) + _facts(run_id, book.all), problem


def _facts(run_id: str, found: Iterable[Request], *, deleted: bool = False) -> list[dict[str, Any]]:
    return [
        {key: getattr(request, key) for key in ("name", "kind", "since", "state")}
        | {"deleted": deleted, "command": removal(run_id, request)}
        for request in found
    ]
