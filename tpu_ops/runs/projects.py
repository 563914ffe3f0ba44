"""`tpu_ops train --git`: one project of the fleet at one commit on all workers of a run, by the role workspace."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_ops import texts
from tpu_ops.config import Settings
from tpu_ops.errors import HostError, UnreachableError, UsageError
from tpu_ops.runs.spec import RunSpec
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Result

#: The playbook that brings projects, and the role's variables by which it brings one, and neither beside local changes
#: nor under a run.
PLAYBOOK = "workspace"
ONLY, ON_CHANGES, DURING_RUNS = "workspace_only", "workspace_on_local_changes", "workspace_during_runs"
#: Seconds for one look at a worker, a cold connection included.
LIMIT = 45.0
#: Prints the commit of a clone as whoever runs there sees it. $1 is the clone; 77 says that it cannot be entered. With
#: --git-dir git asks nobody whose clone it is.
_LOOK = '{ cd -- "$1" && [ -r . ]; } 2>/dev/null || exit 77; exec git --git-dir=.git rev-parse --verify HEAD'
_CLOSED = 77
#: A line of a file of variables that says that there are no projects.
_NONE = re.compile(r"\s*workspace_projects:\s*(\[\s*\]|null|~)\s*")


@dataclass(frozen=True)
class Project:
    """A project as it is on all workers.

    Attributes:
        name: Its name in `workspace_projects`.
        path: The clone.
        commit: The whole commit; empty where it is not known before something is installed.
    """

    name: str
    path: str
    commit: str

    @property
    def fixed(self) -> str:
        """What means it at this very commit, also later."""
        return f"{self.name}@{self.commit}"


def check(word: str, sync: str) -> None:
    """Refuse a value of --git that is none, and one beside --sync.

    Raises:
        UsageError: It is so.
    """
    if sync:
        what = "both provide the code that the command starts in"
        raise UsageError(what, where="--git and --sync", fix="leave out one of the two")
    if word.startswith("@") or word.endswith("@"):
        fix = "write PROJECT@REF, or REF alone if `workspace_projects` has only one project"
        raise UsageError("a project or a ref is missing", where=f"--git {word}", fix=fix)


def must_be_declared(settings: Settings, inventories: str = "") -> None:
    """Refuse a fleet without any project, before Ansible is started for it.

    Ansible knows them all, and takes seconds to say so. Here it is only looked whether a file of variables has any.

    Args:
        settings: Of the fleet.
        inventories: As of ANSIBLE_INVENTORY.

    Raises:
        UsageError: None has.
    """
    named = [Path(path) for path in inventories.split(",") if path and "\n" not in path]
    # Ansible reads variables beside a playbook as well, which a fleet's directory may have of its own.
    own = (settings.file, settings.path / "site.yml", settings.path / "playbooks" / f"{PLAYBOOK}.yml")
    if any(_may_declare(path) for source in (*own, *named) for path in _variables_of(source)):
        return
    example = "workspace_projects: [{name: vision, url: https://example.org/vision.git}]"
    fix = f"declare it there, as in `{example}` (roles/workspace/README.md); `--sync DIR` needs none"
    where = settings.file.parent / "group_vars" / "all" / "main.yml"
    raise UsageError("--git needs a project, and `workspace_projects` has none", where=str(where), fix=fix)


def _variables_of(source: Path) -> Iterator[Path]:
    """Return the files that the variables of an inventory or a playbook may be in."""
    if source.is_file():
        yield source
    folders = [source] if source.is_dir() else [source.parent / name for name in ("group_vars", "host_vars")]
    for folder in folders:
        # What is behind a link to a directory is not looked at, and may declare one.
        yield from (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def _may_declare(path: Path) -> bool:
    """Return whether a file may declare a project: one that cannot be read here, as it is encrypted, may."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    lines = (line.partition(" #")[0] for line in text.splitlines() if not line.lstrip().startswith("#"))
    return text.startswith("$ANSIBLE_VAULT") or any(
        "workspace_projects" in line and not _NONE.fullmatch(line) for line in lines
    )


async def must_configure(fanout: Fanout, hosts: Sequence[str]) -> None:
    """Refuse who may not configure workers, before Ansible is started for it.

    Raises:
        HostError: Somewhere sudo does not let the person do everything without a password.
        UnreachableError: A worker did not answer.
    """
    if refused := await without_sudo(fanout, hosts):
        what = "--git configures workers, which needs full passwordless sudo, and you do not have it there"
        fix = "`--sync DIR` copies a directory of your own and needs no sudo"
        raise HostError(what, where=texts.folded(refused), fix=fix)


async def without_sudo(fanout: Fanout, hosts: Sequence[str]) -> list[str]:
    """Return the workers where sudo does not let the person do everything without a password.

    Raises:
        UnreachableError: A worker did not answer.
    """
    return [result.host for result in _answered(await fanout.run(hosts, ["sudo", "-n", "true"], limit=LIMIT))]


def variables(word: str) -> dict[str, object]:
    """Return the variables with which the playbook brings a project, given PROJECT@REF, or REF."""
    return {ONLY: word, ON_CHANGES: "fail", DURING_RUNS: False}


def same(told: Mapping[str, Mapping[str, Any]], count: int) -> Project:
    """Given what the playbook told of each host, return the project that is the same on all.

    Raises:
        UsageError: It is not.
    """
    places = {(name, path) for at in told.values() for name, path in at["paths"].items()}
    commits = {commit for at in told.values() for commit in at["commits"].values()}
    if len(told) == count and len(places) == 1 and len(commits) <= 1:
        ((name, path),) = places
        return Project(name, path, "".join(commits))
    seen = sorted({f"{name} in {path}" for name, path in places} | {commit[:12] for commit in commits})
    what = f"{len(told)} of {count} workers report {', '.join(seen) or 'no project'}, and a run needs the same on all"
    raise UsageError(what, where="workspace_projects", fix="give all nodes of the run the same project, url and path")


async def look(fanout: Fanout, hosts: Sequence[str], run: RunSpec) -> None:
    """Look that whoever runs can use the project, and that it is still at the commit, right before the start.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: It is not so on some.
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
        fix = f"see that {run.user or 'you'} may read {run.cwd}/.git there, or run as its owner with --user"
        raise HostError(f"git cannot tell the commit of {run.cwd}: {said}", where=failed[0].host, fix=fix)
    at = {host: result.stdout.decode(errors="replace").strip() for host, result in results.items()}
    if moved := [host for host, commit in at.items() if commit != run.code_digest]:
        what = f"{run.cwd} is at {at[moved[0]][:12]} and no longer at {run.code_digest[:12]}"
        fix = "somebody else has checked out another commit meanwhile; agree on one, or use a project each"
        raise HostError(what, where=texts.folded(moved), fix=fix)


def _answered(results: Mapping[str, Result]) -> list[Result]:
    """Return the results that are failures.

    Raises:
        UnreachableError: A worker did not answer.
    """
    if away := [result for result in results.values() if not result.reached]:
        raise UnreachableError(away[0].problem, where=texts.folded([result.host for result in away]))
    return [result for result in results.values() if not result.ok]
