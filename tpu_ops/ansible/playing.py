"""Run a playbook of tpu_ops on workers: from the controller, or on each worker itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tpu_ops import texts
from tpu_ops.ansible import archives, first_boot, on_workers, playbook, values
from tpu_ops.ansible.on_workers import Order, Unsuitable
from tpu_ops.ansible.playbook import At, Outcome, Project, Said, Step
from tpu_ops.config import Settings
from tpu_ops.config.find import read_file
from tpu_ops.errors import UsageError
from tpu_ops.fleet import view

#: From this number of workers on, they run the playbook on themselves.
MANY = 4
#: The playbooks that workers can run on themselves. The others compare workers, or return data of each one to tpu_ops.
PLAYBOOKS = ("disks", "python", "site", "users")
#: At most this many different reasons are shown why workers cannot run a playbook on themselves.
_SHOWN = 4
#: The tag of tasks that only run where workers run the playbook on themselves.
TAG = "on_workers"
#: Name of the task that fails if variables are faulty, before the first change (playbooks/tasks/check_fleet.yml).
_FAULTY = "Refuse faulty variables"

_log = logging.getLogger(__name__)


def play(
    settings: Settings,
    project: Project,
    file: Path,
    *,
    hosts: Sequence[str] = (),
    options: Sequence[str] = (),
    told: Callable[[Step | Said], None] = lambda _: None,
    at: At = lambda *_: None,
    on_themselves: bool | None = None,
) -> Outcome:
    """Run a playbook and return its outcome. Workers that configure themselves at their first boot are waited for.

    Args:
        settings: The fleet's settings.
        project: The directory of playbooks and roles.
        file: The playbook.
        hosts: Names or groups of the inventory; empty means all hosts.
        options: Further options of ansible-playbook, such as ``--check``.
        told: Called with each step when it ends, and with each message outside of tasks.
        at: Called when a host begins or ends a task.
        on_themselves: Whether each worker runs the playbook on itself; None means where that is possible and pays.

    Raises:
        UsageError: ``on_themselves`` is true and not possible, or a variable has no value.
    """
    reason = not_on_workers(settings, project, file)
    if on_themselves and reason:
        raise _refusal(reason)
    fleet = view.last(settings)
    if fleet and "--check" not in options:
        first_boot.wait(fleet, hosts)
    count = len(hosts or fleet.workers) if fleet else 0
    if on_themselves or (on_themselves is None and not reason and count >= MANY):
        try:
            outcome = _on_workers(settings, project, file, hosts, options, told=_without_faults(told), at=at)
        except Unsuitable as exc:
            if on_themselves:
                raise _refusal(_grouped(exc.why)) from exc
            _log.info("the controller runs the playbook: %s", _grouped(exc.why))
        else:
            if not any(step.task == _FAULTY for step in outcome.failures):
                return outcome
            # Nothing was changed. Workers do not have the fleet's files: only the controller can name file and line.
    return playbook.run(project, file, hosts=hosts, options=options, told=told, at=at)


def not_on_workers(settings: Settings, project: Project, file: Path) -> str:
    """Return why no worker can run this playbook of this fleet on itself; empty if workers can."""
    if project.of_fleet:
        return f"{file}: a playbook of the fleet's own may need the controller"
    if file.stem not in PLAYBOOKS:
        return f"{file}: only {', '.join(PLAYBOOKS)} can run on workers"
    if read_file(settings.file).get("hostnames"):
        return f"{settings.file}: `hostnames` gives workers names that tpu_ops does not know"
    return ""


def _without_faults(told: Callable[[Step | Said], None]) -> Callable[[Step | Said], None]:
    """Return a function that leaves out the steps that name faulty variables."""

    def passed_on(note: Step | Said) -> None:
        if isinstance(note, Said) or note.task != _FAULTY:
            told(note)

    return passed_on


def _grouped(why: Mapping[str, str]) -> str:
    """Return the reasons of workers in words, equal ones once."""
    groups: dict[str, list[str]] = {}
    for host, reason in why.items():
        groups.setdefault(reason, []).append(host)
    reasons = [f"{texts.folded(hosts)}: {reason}" for reason, hosts in groups.items()]
    return texts.some(reasons, _SHOWN, "more reasons")


def _refusal(where: str) -> UsageError:
    return UsageError(
        "not every worker can run the playbook on itself",
        where=where,
        fix="correct this, or leave out --on-workers: then the controller runs the playbook on these workers",
    )


def _on_workers(
    settings: Settings,
    project: Project,
    file: Path,
    hosts: Sequence[str],
    options: Sequence[str],
    *,
    told: Callable[[Step | Said], None],
    at: At,
) -> Outcome:
    """Have each worker run the playbook on itself; return the outcome of all together.

    Raises:
        Unsuitable: Not every worker can do this; nothing was changed.
    """
    found = values.compute(project, file, hosts=hosts, options=options)
    if found.cannot:
        raise Unsuitable({host: "; ".join(reasons) for host, reasons in found.cannot.items()})
    fleet = view.current(settings)
    if others := found.hosts.keys() - {worker.host for worker in fleet.workers}:
        raise Unsuitable(dict.fromkeys(sorted(others), "no worker of this fleet"))
    if found.said:
        told(Said(found.said))
    given = options_of_workers(options)
    orders = {
        host: Order(file.stem, given, [found.shared.inventory, own.inventory], [found.shared.extra, own.extra])
        for host, own in found.hosts.items()
    }
    return on_workers.run(fleet, orders, [archives.of_ansible(), archives.of_project(project)], told, at)


def options_of_workers(options: Sequence[str]) -> list[str]:
    """Return the options for workers: with TAG, and without extra variables (-e), which are among their values."""
    given = [option for option in options if option.startswith("--") and not option.startswith("--tags=")]
    tags = [option.removeprefix("--tags=") for option in options if option.startswith("--tags=")] or ["all"]
    return [*given, f"--tags={','.join([*tags, TAG])}"]
