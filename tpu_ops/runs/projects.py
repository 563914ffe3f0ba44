"""Implements `tpu_ops train --git`: the role workspace checks out a project at one commit on all workers of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_ops import texts
from tpu_ops.ansible import convergence
from tpu_ops.ansible.convergence import NewDisplay
from tpu_ops.cloud.node import Worker
from tpu_ops.config import Settings
from tpu_ops.errors import HostError, UnreachableError, UsageError
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs.spec import RunSpec
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Result

#: The playbook that checks out projects. Then the role's variables for: only one project, failing if a clone has local
#: changes, and no change of a clone that an active run might use.
PLAYBOOK = "workspace"
ONLY, ON_CHANGES, DURING_RUNS = "workspace_only", "workspace_on_local_changes", "workspace_during_runs"
#: Seconds for each worker to answer, including a cold connection.
LIMIT = 45.0
#: Prints the commit of a clone; executed as the user of the run. $1 is the directory of the clone; the exit code 77
#: means that the user cannot enter it. With --git-dir, git does not check the owner of the clone.
_LOOK = '{ cd -- "$1" && [ -r . ]; } 2>/dev/null || exit 77; exec git --git-dir=.git rev-parse --verify HEAD'
_CLOSED = 77
#: Matches a line of a variables file that declares an empty list of projects.
_NONE = re.compile(r"\s*workspace_projects:\s*(\[\s*\]|null|~)\s*")


@dataclass(frozen=True)
class Project:
    """A project that is the same on all workers of a run.

    Attributes:
        name: The project's name in `workspace_projects`.
        path: Path of the clone on the workers.
        commit: The full hash of the commit; empty if the playbook (in check mode) cannot know it before something is
            installed.
    """

    name: str
    path: str
    commit: str

    @property
    def fixed(self) -> str:
        """The value of --git that means the project at exactly this commit, also later."""
        return f"{self.name}@{self.commit}"


def check(word: str, sync: str) -> None:
    """Reject an invalid value of --git, and --git together with --sync.

    Raises:
        UsageError: The value is invalid, or --sync is set too.
    """
    if sync:
        what = "--git and --sync both provide the code that the command starts in"
        raise UsageError(what, where="--git and --sync", fix="leave out one of the two")
    if word.startswith("@") or word.endswith("@"):
        fix = "write PROJECT@REF, or REF alone if `workspace_projects` has only one project"
        raise UsageError("a project or a ref is missing", where=f"--git {word}", fix=fix)


def must_be_declared(settings: Settings, inventories: str = "") -> None:
    """Reject --git for a fleet that declares no project, before Ansible is started.

    Ansible would take seconds to report this. This function only searches the variables files for a declaration.

    Args:
        settings: The fleet's settings.
        inventories: The value of ANSIBLE_INVENTORY, which names further inventories.

    Raises:
        UsageError: No variables file declares a project.
    """
    named = [Path(path) for path in inventories.split(",") if path and "\n" not in path]
    # Ansible also reads group_vars and host_vars beside a playbook. A fleet directory can have its own playbooks.
    own = (settings.file, settings.path / "site.yml", settings.path / "playbooks" / f"{PLAYBOOK}.yml")
    if any(_may_declare(path) for source in (*own, *named) for path in _variables_of(source)):
        return
    example = "workspace_projects: [{name: vision, url: https://example.org/vision.git}]"
    fix = f"declare a project there, as in `{example}` (roles/workspace/README.md); `--sync DIR` needs no project"
    where = settings.file.parent / "group_vars" / "all" / "main.yml"
    raise UsageError("--git needs a project, and `workspace_projects` has none", where=str(where), fix=fix)


def _variables_of(source: Path) -> Iterator[Path]:
    """Return all files that can contain the variables of an inventory or a playbook."""
    if source.is_file():
        yield source
    folders = [source] if source.is_dir() else [source.parent / name for name in ("group_vars", "host_vars")]
    for folder in folders:
        # A symbolic link to a directory is returned like a file and not followed. It then counts as a possible
        # declaration.
        yield from (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def _may_declare(path: Path) -> bool:
    """Return whether a file might declare a project. This is possible if the file is encrypted or cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    lines = (line.partition(" #")[0] for line in text.splitlines() if not line.lstrip().startswith("#"))
    return text.startswith("$ANSIBLE_VAULT") or any(
        "workspace_projects" in line and not _NONE.fullmatch(line) for line in lines
    )


async def must_configure(fanout: Fanout, hosts: Sequence[str]) -> None:
    """Reject --git for a user who is not allowed to configure workers, before Ansible is started.

    Raises:
        HostError: On some worker, sudo does not let the user execute all commands without a password.
        UnreachableError: A worker did not answer.
    """
    if refused := await without_sudo(fanout, hosts):
        what = "--git configures workers, which needs full passwordless sudo, and you do not have this right there"
        fix = "`--sync DIR` copies a directory of your own and needs no sudo"
        raise HostError(what, where=texts.folded(refused), fix=fix)


async def without_sudo(fanout: Fanout, hosts: Sequence[str]) -> list[str]:
    """Return the workers on which sudo does not let the user execute all commands without a password.

    Raises:
        UnreachableError: A worker did not answer.
    """
    return [result.host for result in _answered(await fanout.run(hosts, ["sudo", "-n", "true"], limit=LIMIT))]


def variables(word: str) -> dict[str, object]:
    """Return the variables with which the playbook checks out a project, given PROJECT@REF or REF."""
    return {ONLY: word, ON_CHANGES: "fail", DURING_RUNS: False}


def same(told: Mapping[str, Mapping[str, Any]], count: int) -> Project:
    """Return the project that is the same on all hosts, given the paths and commits that the playbook reported by host.

    Raises:
        UsageError: The project, path or commit is not the same on all hosts, or a host reported none.
    """
    places = {(name, path) for at in told.values() for name, path in at["paths"].items()}
    commits = {commit for at in told.values() for commit in at["commits"].values()}
    if len(told) == count and len(places) == 1 and len(commits) <= 1:
        ((name, path),) = places
        return Project(name, path, "".join(commits))
    seen = sorted({f"{name} in {path}" for name, path in places} | {commit[:12] for commit in commits})
    what = (
        f"{len(told)} of {count} workers report {', '.join(seen) or 'no project'}, "
        "and a run needs the same project on all workers"
    )
    raise UsageError(what, where="workspace_projects", fix="give all nodes of the run the same project, url and path")


def check_out(
    fleet: Fleet,
    workers: Sequence[Worker],
    word: str,
    display: NewDisplay,
    *,
    dry: bool = False,
) -> Project:
    """Check out a project of the fleet on all workers.

    Args:
        fleet: The fleet.
        workers: The workers.
        word: PROJECT@REF, or only REF.
        display: Returns the display of the playbook.
        dry: Whether to run Ansible in check mode, which changes nothing.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: The checkout failed on a worker, for example because its clone has local changes.
        UsageError: The project does not exist, or is not the same one on all workers.
    """
    outcome = convergence.converge(fleet, workers, display, PLAYBOOK, variables(word), check=dry)
    return same(outcome.data.get("workspace") or {}, len(workers))


async def look(fanout: Fanout, hosts: Sequence[str], run: RunSpec) -> None:
    """Check, right before a start, that the user of the run can read the project and that it is still at its commit.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: On some workers, the user cannot read the project, or it is at another commit.
    """
    person = ["sudo", "-n", "-H", "-u", run.user, "--"] if run.user else []
    results = await fanout.run(hosts, [*person, "/bin/sh", "-c", _LOOK, "sh", run.cwd], limit=LIMIT)
    failed = _answered(results)
    if closed := [result.host for result in failed if result.code == _CLOSED]:
        what = f"{run.user or 'you'} cannot enter {run.cwd}, where the run would start"
        fix = "change its owner, group or mode in `workspace_projects`, or run as its owner with --user"
        raise HostError(what, where=texts.folded(closed), fix=fix)
    if failed:
        said = failed[0].problem or failed[0].stderr.decode(errors="replace").strip()
        fix = f"check that {run.user or 'you'} can read {run.cwd}/.git there, or run as its owner with --user"
        raise HostError(f"git cannot tell the commit of {run.cwd}: {said}", where=failed[0].host, fix=fix)
    at = {host: result.stdout.decode(errors="replace").strip() for host, result in results.items()}
    if moved := [host for host, commit in at.items() if commit != run.code_digest]:
        what = f"{run.cwd} is at {at[moved[0]][:12]} and no longer at {run.code_digest[:12]}"
        fix = "somebody else has checked out another commit; agree on one commit, or use separate projects"
        raise HostError(what, where=texts.folded(moved), fix=fix)


def _answered(results: Mapping[str, Result]) -> list[Result]:
    """Return the results of the commands that failed.

    Raises:
        UnreachableError: A worker did not answer.
    """
    if away := [result for result in results.values() if not result.reached]:
        raise UnreachableError(away[0].problem, where=texts.folded([result.host for result in away]))
    return [result for result in results.values() if not result.ok]
