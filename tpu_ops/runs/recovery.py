"""What starts a run again when its nodes are taken away, kept on the controller.

None of it is on the workers, whose disks go with the node. Nor are values of secrets and of environment files in
it: they are read again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tpu_ops import files
from tpu_ops.cloud.node import Node
from tpu_ops.cloud.pending import Requests
from tpu_ops.cloud.remaking import Plan
from tpu_ops.errors import OpsError, UsageError
from tpu_ops.files import unwritable
from tpu_ops.runs import advice, spec, sync

#: Bytes of what is kept of a run: metadata of its nodes, of 256 KB each, and a command line of 2 MB.
_LARGEST = 256 * 2**20


@dataclass(frozen=True)
class Recovery:
    """One run that is to be started again.

    Attributes:
        run_id: The run.
        attempt: The last one that was started, or is just being started; 0 before the first.
        plan: Its nodes as they were in that attempt.
        options: What `spec.RunSpec` takes beside what is here, without values of secrets or of files.
        env_files: Files of variables that are read again.
        secret_words: Values of `--secret` that are looked up again; paths are absolute.
        code: Whether a copy of the code that was synced is kept.
        git: The project of the fleet, and its commit, that every attempt has, as in ``vision@<commit>``.
        force: As of `tpu_ops train --force`.
        max_preemptions: How often its nodes may be taken away; None is without limit.
        max_failures: How often its command may fail.
        preemptions: How often that has happened.
        failures: The same of its command.
        pending: Whether the next attempt is being prepared, its nodes brought back for example, so that none is on.
        counted: Whether it is counted already that nodes are not as the plan has them.
        early: Whether a loss is counted of which the API does not tell yet, as where its workers have told first.
        since: When it became `pending`, in seconds since 1970; 0 where an older version has written it.
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
    max_preemptions: int | None = None
    max_failures: int = 0
    preemptions: int = 0
    failures: int = 0
    pending: bool = False
    counted: bool = False
    early: bool = False
    since: float = 0.0

    def spec(self, environ: Mapping[str, str]) -> spec.RunSpec:
        """Return what is started, with secrets and files read now.

        Raises:
            UsageError: One of them is not there, or is of one attempt alone.
        """
        made = _without_values(self)
        env = spec.variables(made.env, map(Path, self.env_files), again=True)
        return replace(made, env=env, secrets=spec.read_secrets(self.secret_words, environ))


def _without_values(kept: Recovery) -> spec.RunSpec:
    """Return what is started, without what is read for each start."""
    options = {**kept.options, "argv": tuple(kept.options["argv"]), "env": dict(kept.options["env"])}
    return spec.RunSpec(run_id=kept.run_id, attempt=kept.attempt, **options)


def options_of(run: spec.RunSpec, env: Mapping[str, str]) -> dict[str, Any]:
    """Return what is kept of a run.

    Args:
        run: The run.
        env: The variables that were named one by one.
    """
    left_out = ("run_id", "attempt", "secrets", "key")
    return {**{key: value for key, value in vars(run).items() if key not in left_out}, "env": dict(env)}


def absolute(word: str) -> str:
    """Given a value of `--secret`, return it such that it means the same from any directory."""
    name, sign, path = word.partition("=")
    return f"{name}={files.expanded(path, f'--secret {name}').absolute()}" if sign else word


def next_attempt(run: spec.RunSpec, attempt: int) -> spec.RunSpec:
    """Return a later attempt of a run, with a key of its own."""
    return replace(run, attempt=attempt, key=os.urandom(32).hex())


def folder(state_dir: Path, run_id: str) -> Path:
    """Return where all this is kept of a run; its logs as well."""
    return state_dir / "runs" / run_id


def requests_file(state_dir: Path, run_id: str) -> Path:
    """Return where is kept what the recovery of a run has requested from the API: `forget` leaves it."""
    return folder(state_dir, run_id) / "requests.json"


def taken_up(state_dir: Path, nodes: Iterable[Node]) -> None:
    """Forget what any recovery here has requested of nodes on which a run has started, or that were deleted."""
    found = list(nodes)
    parents = {node.full_name: node.full_name.rpartition("/nodes/")[0] for node in found}
    sources = {f"{parents[node.full_name]}/queuedResources/{node.queued_resource}" for node in found}
    for path in (state_dir / "runs").glob("*/requests.json"):
        Requests(path).drop(*parents, *sources)


def write(state_dir: Path, recovery: Recovery) -> None:
    """Keep it, for this person only.

    Raises:
        OpsError: It cannot be written.
    """
    path = folder(state_dir, recovery.run_id) / "recovery.json"
    # A node's metadata stands in it, which may hold secrets.
    data = {**asdict(recovery), "plan": recovery.plan.to_json()}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(path, json.dumps(data) + "\n", 0o600)
    except OSError as exc:
        raise unwritable(path, exc) from exc


def require_none(state_dir: Path, run_id: str, *, alone: bool) -> None:
    """Return where no run of this name is recovered on this machine, or could be.

    Args:
        state_dir: Of the fleet.
        run_id: The name.
        alone: Whether this process has the `lock`.

    Raises:
        UsageError: One is.
    """
    if is_kept(state_dir, run_id):
        fix = advice.name_taken(run_id, resumes=alone or not is_held(state_dir, run_id))
        raise UsageError("as far as this machine knows, it has not ended", where=f"run {run_id}", fix=fix)


def read(state_dir: Path, run_id: str) -> Recovery:
    """Return what is kept of a run.

    Raises:
        UsageError: Nothing is.
        OpsError: It cannot be understood.
    """
    path = folder(state_dir, run_id) / "recovery.json"
    fix = "only runs that `tpu_ops train --recover` started on this machine, and that have not ended, can be taken over"
    if "/" in run_id or run_id.startswith("."):
        raise UsageError(f"{run_id!r} is not a run", where="--recover", fix=fix)
    try:
        data = json.loads(files.read_regular(path, _LARGEST))
        # As the version before has it, which counted before it brought nodes back.
        data.setdefault("counted", data["pending"] and data["preemptions"] > 0)
        lists = {key: tuple(data[key]) for key in ("env_files", "secret_words")}
        found = Recovery(**{**data, **lists, "plan": Plan.from_json(data["plan"])})
        _without_values(found)
    except FileNotFoundError:
        what = f"this machine keeps nothing to start run {run_id} again with"
        raise UsageError(what, where=str(path), fix=fix) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        fix = f"take the run over with the version of tpu_ops that wrote it, or end it: tpu_ops stop {run_id}"
        raise OpsError(f"this cannot be read: {exc}", where=str(path), fix=fix) from exc
    return found


def not_begun(state_dir: Path, run_id: str) -> bool:
    """Return whether nothing but what would start a run is there: no worker has been asked for any attempt."""
    with contextlib.suppress(OpsError):
        return read(state_dir, run_id).attempt == 0
    return False


def forget(state_dir: Path, run_id: str) -> None:
    """Remove what starts a run again that has ended; its logs stay."""
    place = folder(state_dir, run_id)
    (place / "recovery.json").unlink(missing_ok=True)
    (place / "stop").unlink(missing_ok=True)
    shutil.rmtree(place / "code", ignore_errors=True)


def lock(state_dir: Path, run_id: str, seconds: float = 0.0) -> AbstractContextManager[int]:
    """Return the lock of who recovers a run on this machine; it raises TimeoutError where somebody does for longer."""
    place = folder(state_dir, run_id)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return files.locked(place / "lock", seconds)


def is_kept(state_dir: Path, run_id: str) -> bool:
    """Return whether a run is recovered on this machine, or could be."""
    return (folder(state_dir, run_id) / "recovery.json").exists()


def is_held(state_dir: Path, run_id: str) -> bool:
    """Return whether a process of this machine recovers a run at this moment."""
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
    """Return what recovers a run on this machine, or could; None where nothing does."""
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
    # It may just have ended.
    if not is_kept(state_dir, run_id):
        return None
    found = advice.Recoverer(run_id, held=held)
    with contextlib.suppress(OpsError):
        kept, place = read(state_dir, run_id), folder(state_dir, run_id)
        logs = str(place / f"attempt-{kept.attempt}") if kept.attempt else ""
        found = found._replace(attempt=kept.attempt, pending=held and kept.pending, logs=logs)
        if held:
            found = found._replace(pid=_pid(place / "lock"), since=kept.since if kept.pending else 0.0)
    return found


def sign(handle: int) -> None:
    """Have the file of a `lock` name this process, which recovers the run; a full disk takes no name."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)


def _pid(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return 0


def under_way(state_dir: Path, run_id: str) -> str:
    """Return what a process of this machine is about to do with a run, in words; empty where that is nothing."""
    found = recoverer(state_dir, run_id)
    return advice.recovery(found) if found and found.pending else ""


def note_of(state_dir: Path, run_id: str) -> str:
    """Return who recovers a run on this machine, or could go on with that, in words; empty where nothing is to say."""
    return advice.recovery(recoverer(state_dir, run_id))


def asked_to_stop(state_dir: Path, run_id: str) -> bool:
    """Return whether whoever recovers a run on this machine is to end that."""
    return (folder(state_dir, run_id) / "stop").exists()


def stop(state_dir: Path, run_id: str, seconds: float) -> bool:
    """See to it that a run is not started again on this machine; return whether no attempt of it is on.

    Args:
        state_dir: Of the fleet.
        run_id: The run; it may be one that nobody recovers.
        seconds: How long to wait for whoever brings its nodes back to end that.

    Raises:
        TimeoutError: That takes longer.
        OpsError: What is kept of it cannot be read, or the wish cannot be written.
    """
    place = folder(state_dir, run_id)
    if not (place / "recovery.json").exists():
        return False
    with _written(place):
        with contextlib.suppress(TimeoutError), lock(state_dir, run_id):
            # Whoever recovered it has died, perhaps before it ended what was left of the last attempt.
            never = not_begun(state_dir, run_id)
            forget(state_dir, run_id)
            return never
        pending = read(state_dir, run_id).pending
        files.replace(place / "stop", "", 0o600)
        if pending:
            with lock(state_dir, run_id, seconds):
                # What was being started at that moment may be on.
                if is_kept(state_dir, run_id):
                    pending = read(state_dir, run_id).pending
                forget(state_dir, run_id)
    return pending


@contextlib.contextmanager
def _written(place: Path) -> Iterator[None]:
    """Say where the disk does not take it what is written in a block; that a lock is held is no such thing.

    Raises:
        OpsError: It does not.
    """
    try:
        yield
    except TimeoutError:
        raise
    except OSError as exc:
        raise unwritable(place, exc) from exc


def none_left(state_dir: Path, run_id: str, seconds: float) -> None:
    """Remove what starts a run again, whose ranks have all ended, once nobody recovers it on this machine.

    Raises:
        TimeoutError: Somebody does for longer.
        OpsError: The disk does not let go of it.
    """
    with _written(folder(state_dir, run_id)), lock(state_dir, run_id, seconds):
        forget(state_dir, run_id)


def keep_code(state_dir: Path, run_id: str, tree: sync.Tree) -> sync.Tree:
    """Copy the code that goes to the workers, so that every attempt has the same; return the copy.

    Raises:
        OpsError: It cannot be written.
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


def kept_code(state_dir: Path, recovery: Recovery) -> sync.Tree | None:
    """Return the copy of a run's code, None where none was synced."""
    if not recovery.code:
        return None
    place = folder(state_dir, recovery.run_id) / "code" / Path(recovery.options["cwd"]).name
    return sync.read_copy(place)
