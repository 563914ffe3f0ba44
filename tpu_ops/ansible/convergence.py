"""Configure workers of the fleet with a playbook, and let NFS servers accept mounts from them."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tpu_ops import texts
from tpu_ops.ansible import exported, playbook, playing
from tpu_ops.ansible.failures import AGAIN, fix_of, shown
from tpu_ops.ansible.playbook import Outcome, Said, Step
from tpu_ops.cloud.node import Worker
from tpu_ops.config import Settings
from tpu_ops.config.find import read_file
from tpu_ops.errors import HostError, UsageError
from tpu_ops.fleet import hostvars, view
from tpu_ops.fleet.view import Fleet

_log = logging.getLogger(__name__)


class Display(Protocol):
    """Shows what a playbook does."""

    def __call__(self, note: Step | Said) -> None:
        """Show one step, or a text of Ansible."""

    def end(self) -> None:
        """Show what was collected of the last task: the playbook has ended."""

    def failures(self, failures: Sequence[Step]) -> None:
        """Show the steps that failed."""


#: Returns the display of one playbook, given whether the playbook runs in check mode.
NewDisplay = Callable[[bool], Display]


def converge(
    fleet: Fleet,
    workers: Sequence[Worker],
    display: NewDisplay,
    name: str = "site",
    variables: Mapping[str, object] | None = None,
    *,
    tags: str = "",
    check: bool = False,
    then: str = AGAIN,
) -> Outcome:
    """Run site.yml, or another playbook, on some workers; return the playbook's outcome.

    Args:
        fleet: The fleet.
        workers: The workers.
        display: Returns the display of a playbook.
        name: The name of the playbook, as for `Project.playbook`.
        variables: Extra variables, which override all others.
        tags: Tags of the roles to run; empty runs all.
        check: Whether to run Ansible in check mode, which changes nothing.
        then: Advice: what the user does after correcting an error.

    Raises:
        UnreachableError: Workers did not answer, or refused the login.
        HostError: The playbook failed on a worker.
        UsageError: Ansible did not run the playbook.
    """
    settings = fleet.settings
    project = playbook.project_of(settings.path, settings.file)
    file = project.playbook(name)
    progress = display(check)
    given = (["-e", json.dumps(dict(variables))] if variables else []) + (["--check"] if check else [])
    given += [f"--tags={tags}"] if tags else []
    outcome = playing.play(settings, project, file, hosts=limit_of(fleet, workers), options=given, told=progress)
    progress.end()
    if (servers := left_out(outcome)) and not check:
        # Also after a failure of site.yml: the cause may be a refused mount, which the next try needs.
        _let_in(project, settings, file, servers, display)
    progress.failures(outcome.failures)
    names = texts.folded([worker.host for worker in workers])
    if fix := fix_of(outcome, file, names, settings, then):
        _log.info("  fix: %s", fix)
        raise HostError(f"{file.name} failed on these workers", where=names, fix=f"correct the error above and {then}")
    return outcome


def left_out(outcome: Outcome) -> list[str]:
    """Return the NFS servers that the hosts of a playbook mount from, and that the playbook did not run on."""
    # A worker that runs the playbook on itself names all servers but itself.
    return sorted({*outcome.data.get("nfs_left_out", ())} - outcome.hosts.keys())


def letting_in(servers: Sequence[str], settings: Settings, file: Path) -> str:
    """Return the command that makes NFS servers accept mounts from the fleet's present addresses."""
    names = shlex.quote(",".join(servers))
    fleet = view.known(settings)
    if fleet and {*servers} <= {worker.host for worker in fleet.workers}:
        which = "" if file.name == "site.yml" else f" --playbook {shlex.quote(file.stem)}"
        return f"`tpu_ops configure {names}{which} --tags nfs`"
    # A server in another inventory cannot be the target of `tpu_ops configure`.
    inventory = "" if os.environ.get(exported.VARIABLE) else f"-i {shlex.quote(str(settings.file))} "
    return f"`ansible-playbook {inventory}{shlex.quote(shown(file))} --tags nfs --limit {names}`"


def _let_in(
    project: playbook.Project,
    settings: Settings,
    file: Path,
    servers: Sequence[str],
    display: NewDisplay,
) -> None:
    """Make NFS servers accept mounts from new workers. A failure is only a warning: most tasks need no mount."""
    _log.info("letting new workers mount NFS from %s", texts.folded(servers))
    progress = display(False)
    outcome = playbook.run(project, file, hosts=servers, options=["--tags", "nfs"], told=progress)
    progress.end()
    if outcome.code:
        progress.failures(outcome.failures)
        what = "may refuse mounts to new workers; correct the error above and run"
        _log.warning("%s %s %s", texts.folded(servers), what, letting_in(servers, settings, file))


def rehearse(fleet: Fleet, workers: Sequence[Worker], display: NewDisplay) -> None:
    """Run only the initial checks of site.yml, on one worker of each node; this changes nothing.

    The checks fail if Ansible lacks what the inventory's files need, such as vault passwords or exported variables.

    Raises:
        UnreachableError: Workers did not answer, or refused the login.
        HostError: A variable has an invalid value.
        UsageError: Ansible did not start.
    """
    settings = fleet.settings
    project = playbook.project_of(settings.path, settings.file)
    file = project.playbook("site")
    nodes = dict.fromkeys(worker.node.full_name for worker in workers)
    groups = hostvars.groups(fleet.listed)
    hosts = [next(f"{group}[0]" for group in groups[name] if group.startswith("node_")) for name in nodes]
    progress = display(True)
    outcome = playbook.run(project, file, hosts=hosts, options=["--tags", "always", "--check"], told=progress)
    progress.failures(outcome.failures)
    # A site.yml in the fleet's directory may have no checks. Ansible's exit code is then 0, which is no error here.
    if outcome.code and (fix := fix_of(outcome, file, ", ".join(hosts), settings)):
        _log.info("  fix: %s", fix)
        what = "site.yml would fail on these workers, and recovery runs site.yml on each recreated node"
        fix = "correct the errors above first, or start anyway with --force"
        raise HostError(what, where=texts.folded([step.host for step in outcome.failures]), fix=fix)


def limit_of(fleet: Fleet, workers: Sequence[Worker]) -> list[str]:
    """Return the host patterns that select these workers in Ansible.

    Raises:
        UsageError: The inventory sets `hostnames`, so only whole nodes can be selected, but the workers are not.
    """
    if not read_file(fleet.settings.file).get("hostnames"):
        return [worker.host for worker in workers]
    groups = hostvars.groups(fleet.listed)
    whole = {worker.node.full_name: worker.node.worker_count for worker in workers}
    for name, count in whole.items():
        if sum(worker.node.full_name == name for worker in workers) != count:
            raise UsageError(
                "`hostnames` gives the workers other names in the inventory, and the target is not a whole node",
                where=str(fleet.settings.file),
                fix="name whole nodes, or use ansible-playbook --limit with the inventory's names",
            )
    return [next(group for group in groups[name] if group.startswith("node_")) for name in whole]
