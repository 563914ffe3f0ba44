"""The recovery state of a run, stored on the controller, from which a run is started again.

The state is not stored on the workers, whose disks are lost with the nodes. It does not contain the values of secrets
and environment files: these are read again for each attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tpu_ops import files
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.pending import Requests
from tpu_ops.cloud.remaking import Plan
from tpu_ops.errors import OpsError, UsageError
from tpu_ops.files import unwritable
from tpu_ops.runs import advice, installs, spec, sync

#: Maximum size of the recovery state in bytes: metadata of nodes, 256 KB each, and a command line of 2 MB.
_LARGEST = 256 * 2**20


@dataclass(frozen=True)
class Recovery:
    """The recovery state of one run.

    Attributes:
        run_id: The run.
        attempt: Number of the last attempt that was started or is being started; 0 before the first attempt.
        plan: The nodes of the last attempt, and the requests that recreate them.
        options: The other fields of `spec.RunSpec`, without values of secrets or of files.
        env_files: Paths of files with environment variables, which are read again for each attempt.
        secret_words: Values of the option `--secret` with absolute paths. The secrets themselves are read again for
            each attempt.
        code: Whether a copy of the synced code is kept.
        git: The project of the fleet and the commit that every attempt uses, as in ``vision@<commit>``.
        force: Whether `tpu_ops train --force` was used.
        outside_grant: Whether nodes are also created again if the fleet's grant does not cover them.
        max_preemptions: Allowed number of preemptions; None means unlimited.
        max_failures: Allowed number of failures of the command.
        preemptions: Number of preemptions so far.
        failures: Number of failures of the command so far.
        pending: Whether the next attempt is being prepared, for example by recreating nodes; no attempt is active at
            this time.
        counted: Whether the current loss of nodes has already been counted as a preemption.
        early: Whether a loss was counted that the API has not reported yet, because the workers reported it first.
        environment: The environment before the first attempt, from a worker's probe; empty in the state of older
            versions, and if the run has no environment.
        since: When the field `pending` became true, in seconds since 1970; 0 in the state of older versions.
    """

    run_id: str
    attempt: int
    plan: Plan
    options: Mapping[str, Any]
    env_files: tuple[str, ...] = ()
    secret_words: tuple[str, ...] = ()
    code: bool = False
    git: str = ""
    force: bool = False
    outside_grant: bool = False
    max_preemptions: int | None = None
    max_failures: int = 0
    preemptions: int = 0
    failures: int = 0
    pending: bool = False
    counted: bool = False
    early: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)
    since: float = 0.0

    def spec(self, environ: Mapping[str, str]) -> spec.RunSpec:
        """Return the spec of the run for a start; secrets and files are read now.

        Raises:
            UsageError: A secret or file does not exist, or a variable would be valid for one attempt only.
        """
        made = _without_values(self)
        env = spec.variables(made.env, map(Path, self.env_files), again=True)
        return replace(made, env=env, secrets=spec.read_secrets(self.secret_words, environ))


def _without_values(kept: Recovery) -> spec.RunSpec:
    """Return the spec of the run without the values that are read for each start."""
    options = {**kept.options, "argv": tuple(kept.options["argv"]), "env": dict(kept.options["env"])}
    return spec.RunSpec(run_id=kept.run_id, attempt=kept.attempt, **options)


def options_of(run: spec.RunSpec, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a run's spec that the recovery state stores.

    Args:
        run: The run.
        env: The variables that the user set by `--env`.
    """
    left_out = ("run_id", "attempt", "secrets", "key")
    return {**{key: value for key, value in vars(run).items() if key not in left_out}, "env": dict(env)}


def absolute(word: str) -> str:
    """Make the path in a value of `--secret` absolute; return the value."""
    name, sign, path = word.partition("=")
    return f"{name}={files.expanded(path, f'--secret {name}').absolute()}" if sign else word


def next_attempt(run: spec.RunSpec, attempt: int) -> spec.RunSpec:
    """Return the spec of a run for a later attempt, with a new key."""
    return replace(run, attempt=attempt, key=os.urandom(32).hex())


def folder(state_dir: Path, run_id: str) -> Path:
    """Return the directory of a run's recovery state and logs."""
    return state_dir / "runs" / run_id


def requests_file(state_dir: Path, run_id: str) -> Path:
    """Return the path of the file with the open API requests of a run's recovery; `forget` does not remove it."""
    return folder(state_dir, run_id) / "requests.json"


def taken_up(state_dir: Path, nodes: Iterable[Node]) -> None:
    """Drop the open requests of all recoveries on this machine for nodes that now have a run, or that were deleted."""
    found = list(nodes)
    parents = {node.full_name: node.full_name.rpartition("/nodes/")[0] for node in found}
    sources = {f"{parents[node.full_name]}/queuedResources/{node.queued_resource}" for node in found}
    for path in (state_dir / "runs").glob("*/requests.json"):
        Requests(path).drop(*parents, *sources)


def write(state_dir: Path, recovery: Recovery) -> None:
    """Write the recovery state, readable by this user only.

    Raises:
        OpsError: The state cannot be written.
    """
    path = folder(state_dir, recovery.run_id) / "recovery.json"
    # recovery.json contains the metadata of nodes, which can contain secrets: only this user may read the file.
    data = {**asdict(recovery), "plan": recovery.plan.to_json()}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(path, json.dumps(data) + "\n", 0o600)
    except OSError as exc:
        raise unwritable(path, exc) from exc


def require_none(state_dir: Path, run_id: str, *, alone: bool) -> None:
    """Check that no recovery of a run with a given name is active on this machine or could be resumed.

    Args:
        state_dir: The fleet's state directory.
        run_id: The name.
        alone: Whether this process holds the `lock`.

    Raises:
        UsageError: There is such a recovery of a run.
    """
    if is_kept(state_dir, run_id):
        fix = advice.name_taken(run_id, resumes=alone or not is_held(state_dir, run_id))
        raise UsageError("as far as this machine knows, the run has not ended", where=f"run {run_id}", fix=fix)


def read(state_dir: Path, run_id: str) -> Recovery:
    """Return the recovery state of a run.

    Raises:
        UsageError: This machine has no recovery state of the run.
        OpsError: The recovery state cannot be read.
    """
    path = folder(state_dir, run_id) / "recovery.json"
    fix = "only runs that `tpu_ops train --recover` started on this machine, and that have not ended, can be taken over"
    if "/" in run_id or run_id.startswith("."):
        raise UsageError(f"{run_id!r} is not a run", where="--recover", fix=fix)
    try:
        data = json.loads(files.read_regular(path, _LARGEST))
        # Recovery states of the previous version have no `counted`. That version counted a loss before it brought nodes
        # back.
        data.setdefault("counted", data["pending"] and data["preemptions"] > 0)
        lists = {key: tuple(data[key]) for key in ("env_files", "secret_words")}
        found = Recovery(**{**data, **lists, "plan": Plan.from_json(data["plan"])})
        _without_values(found)
    except FileNotFoundError:
        what = f"this machine has no recovery state of run {run_id}"
        raise UsageError(what, where=str(path), fix=fix) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        fix = f"take over the run with the version of tpu_ops that wrote this file, or end it: `tpu_ops stop {run_id}`"
        raise OpsError(f"this cannot be read: {exc}", where=str(path), fix=fix) from exc
    return found


def not_begun(state_dir: Path, run_id: str) -> bool:
    """Return whether a run has a recovery state, but no worker has been asked yet to start an attempt."""
    with contextlib.suppress(OpsError):
        return read(state_dir, run_id).attempt == 0
    return False


def forget(state_dir: Path, run_id: str) -> None:
    """Remove the recovery state of a run that has ended; its logs stay."""
    place = folder(state_dir, run_id)
    (place / "recovery.json").unlink(missing_ok=True)
    (place / "stop").unlink(missing_ok=True)
    (place / "packages.json").unlink(missing_ok=True)
    shutil.rmtree(place / "code", ignore_errors=True)


def lock(state_dir: Path, run_id: str, seconds: float = 0.0) -> AbstractContextManager[int]:
    """Return the lock of a run's recovery on this machine; taking it raises TimeoutError after ``seconds``."""
    place = folder(state_dir, run_id)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return files.locked(place / "lock", seconds)


@contextlib.contextmanager
def alone(state_dir: Path, run_id: str) -> Iterator[None]:
    """Hold the lock that makes this process the only one on this machine to recover a run.

    Raises:
        UsageError: Another process is recovering the run.
    """
    with contextlib.ExitStack() as stack:
        try:
            # Wait for a moment: a process that only checks for a recovery also holds the lock for an instant.
            _sign(stack.enter_context(lock(state_dir, run_id, 0.5)))
        except TimeoutError:
            what = "another process on this machine is already recovering this run"
            fix = f"`tpu_ops attach {run_id}` follows the run without recovering it"
            raise UsageError(what, where=f"run {run_id}", fix=fix) from None
        yield


def is_kept(state_dir: Path, run_id: str) -> bool:
    """Return whether a run's recovery is active on this machine or could be resumed."""
    return (folder(state_dir, run_id) / "recovery.json").exists()


def kept_nodes(state_dir: Path) -> dict[str, str]:
    """Return the nodes of all recoveries that are active on this machine or could be resumed.

    Damaged recovery states are left out.

    Returns:
        Resource name of each node -> its run. A recovery may have recreated the node with another id.
    """
    found: dict[str, str] = {}
    for path in sorted((state_dir / "runs").glob("*/recovery.json")):
        with contextlib.suppress(OpsError):
            found |= {made.name: path.parent.name for made in read(state_dir, path.parent.name).plan.nodes}
    return found


def is_held(state_dir: Path, run_id: str) -> bool:
    """Return whether a process on this machine is recovering a run now."""
    if not (folder(state_dir, run_id) / "lock").exists():
        return False
    try:
        with lock(state_dir, run_id):
            return False
    except TimeoutError:
        return True
    except OSError:
        return False


def recoverer(state_dir: Path, run_id: str) -> advice.Recoverer | None:
    """Return the recovery of a run on this machine, active or resumable; None if there is none."""
    if not is_kept(state_dir, run_id):
        return None
    held = False
    try:
        with lock(state_dir, run_id):
            pass
    except TimeoutError:
        held = True
    except OSError:
        return None
    # The recovery might have ended after the first check.
    if not is_kept(state_dir, run_id):
        return None
    found = advice.Recoverer(run_id, held=held)
    with contextlib.suppress(OpsError):
        kept, place = read(state_dir, run_id), folder(state_dir, run_id)
        logs = str(place / f"attempt-{kept.attempt}") if kept.attempt else ""
        found = found._replace(attempt=kept.attempt, pending=held and kept.pending, logs=logs)
        if held:
            found = found._replace(**_signed(place / "lock"), since=kept.since if kept.pending else 0.0)
    return found


def _sign(handle: int) -> None:
    """Write who recovers a run into the lock file: user, machine and pid; on a full disk, do nothing."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, (json.dumps({"who": spec.here(), "pid": os.getpid()}) + "\n").encode(), 0)


def _signed(path: Path) -> dict[str, Any]:
    """Return ``who`` and ``pid`` of the process that recovers a run, as far as its lock file has them."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        # Older versions write the pid alone.
        facts = found if isinstance(found, dict) else {"pid": found}
        return {"who": str(facts.get("who") or ""), "pid": int(facts.get("pid") or 0)}
    return {}


def under_way(state_dir: Path, run_id: str) -> str:
    """If a process on this machine is preparing the next attempt of a run, return this as words; else empty."""
    found = recoverer(state_dir, run_id)
    return advice.recovery(found) if found and found.pending else ""


def note_of(state_dir: Path, run_id: str) -> str:
    """Return the state of a run's recovery on this machine as words; empty if there is none."""
    return advice.recovery(recoverer(state_dir, run_id))


def asked_to_stop(state_dir: Path, run_id: str) -> bool:
    """Return whether a user has asked the recovery of a run on this machine to end."""
    return (folder(state_dir, run_id) / "stop").exists()


def stop(state_dir: Path, run_id: str, seconds: float) -> bool:
    """Prevent further starts of a run by this machine; return whether no attempt of the run is active.

    Args:
        state_dir: The fleet's state directory.
        run_id: The run, with or without a recovery.
        seconds: How long to wait for a process that is bringing the run's nodes back.

    Raises:
        TimeoutError: The process that brings the nodes back did not end in time.
        OpsError: The recovery state cannot be read, or the file that asks for its end cannot be written.
    """
    place = folder(state_dir, run_id)
    if not (place / "recovery.json").exists():
        return False
    with _written(place):
        with contextlib.suppress(TimeoutError), lock(state_dir, run_id):
            # No process holds the lock: the recovering process has died, perhaps before it stopped all ranks of the
            # last attempt.
            never = not_begun(state_dir, run_id)
            forget(state_dir, run_id)
            return never
        pending = read(state_dir, run_id).pending
        files.replace(place / "stop", "", 0o600)
        if pending:
            with lock(state_dir, run_id, seconds):
                # If an attempt was being started at this moment, the attempt might be active.
                if is_kept(state_dir, run_id):
                    pending = read(state_dir, run_id).pending
                forget(state_dir, run_id)
    return pending


@contextlib.contextmanager
def _written(place: Path) -> Iterator[None]:
    """Turn write errors in the block into OpsError; the TimeoutError of a lock is not changed."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError as exc:
        raise unwritable(place, exc) from exc


def none_left(state_dir: Path, run_id: str, seconds: float) -> None:
    """Wait until no process is recovering a run whose ranks have all ended, and remove its recovery state.

    Raises:
        TimeoutError: After ``seconds``, a process was still recovering the run.
        OpsError: The recovery state cannot be removed.
    """
    with _written(folder(state_dir, run_id)), lock(state_dir, run_id, seconds):
        forget(state_dir, run_id)


def keep_code(state_dir: Path, run_id: str, tree: sync.Tree) -> sync.Tree:
    """Copy the code that is synced to the workers, so that every attempt uses the same code; return the copy.

    Raises:
        OpsError: The copy cannot be written.
    """
    source = folder(state_dir, run_id) / "code" / tree.name
    try:
        for entry in tree.entries:
            target = source / entry
            if entry.endswith("/"):
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree.source / entry, target, follow_symlinks=False)
    except OSError as exc:
        raise unwritable(source, exc) from exc
    return replace(tree, source=source)


def keep_packages(state_dir: Path, run_id: str, made: installs.Installed) -> None:
    """Store the packages of a run's project, so that every attempt has the same packages.

    Raises:
        OpsError: They cannot be written.
    """
    path = _packages(state_dir, run_id)
    try:
        files.replace(path, json.dumps({"base": made.base, "path": made.path, "pins": made.pins}) + "\n", 0o600)
    except OSError as exc:
        raise unwritable(path, exc) from exc


def kept_packages(state_dir: Path, run_id: str) -> dict[str, str] | None:
    """Return ``path`` and ``pins`` of a run's project environment, and ``base``, the fleet's environment below it.

    Returns:
        None if the run has installed nothing.

    Raises:
        OpsError: They cannot be read.
    """
    path = _packages(state_dir, run_id)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {key: str(found[key]) for key in ("base", "path", "pins")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        fix = f"end the run: `tpu_ops stop {run_id}`"
        raise OpsError(f"this cannot be read: {exc}", where=str(path), fix=fix) from exc


def _packages(state_dir: Path, run_id: str) -> Path:
    return folder(state_dir, run_id) / "packages.json"


def kept_code(state_dir: Path, recovery: Recovery) -> sync.Tree | None:
    """Return the copy of a run's code on this machine; None if no code was synced."""
    if not recovery.code:
        return None
    place = folder(state_dir, recovery.run_id) / "code" / Path(recovery.options["cwd"]).name
    return sync.read_copy(place)
