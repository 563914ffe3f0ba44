"""Find workers that differ from what site.yml would make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tpu_ops import texts
from tpu_ops.ansible import playbook, playing
from tpu_ops.ansible.failures import fix_of
from tpu_ops.ansible.playbook import At, Outcome, Said, Step
from tpu_ops.config import Settings


@dataclass(frozen=True)
class Drift:
    """What site.yml would change on workers.

    Attributes:
        differences: Worker -> the tasks that would change something. Workers without differences are missing.
        outcome: The outcome of site.yml in check mode.
    """

    differences: Mapping[str, Sequence[Step]]
    outcome: Outcome

    @property
    def unknown(self) -> list[str]:
        """The workers that could not be compared wholly: site.yml failed on them, or they did not answer."""
        counts = self.outcome.hosts
        return [host for host in counts if counts[host]["failed"] or counts[host]["unreachable"]]

    @property
    def clean(self) -> list[str]:
        """The workers on which site.yml would change nothing."""
        return [host for host in self.outcome.hosts if host not in {*self.differences, *self.unknown}]


def look(
    settings: Settings,
    hosts: Sequence[str] = (),
    options: Sequence[str] = (),
    *,
    said: Callable[[Said], None],
    at: At = lambda *_: None,
    on_themselves: bool | None = None,
) -> Drift:
    """Compare workers with what site.yml would make of them; this changes nothing.

    It is site.yml in check mode, so that the roles alone decide what differs.

    Args:
        settings: The fleet's settings.
        hosts: Names or groups of the inventory; empty means all hosts.
        options: Further options of ansible-playbook, such as ``--tags=users``.
        said: Called with the messages of Ansible outside of tasks.
        at: Called when a host begins or ends a task.
        on_themselves: Whether the workers run site.yml on themselves; as for `playing.play`.

    Raises:
        UsageError: Ansible did not run the playbook, or no worker matches.
    """
    project = playbook.project_of(settings.path, settings.file)
    file = project.playbook("site")
    found: dict[str, list[Step]] = {}

    def told(note: Step | Said) -> None:
        if isinstance(note, Said):
            said(note)
        elif note.outcome == "changed":
            found.setdefault(note.host, []).append(note)

    given = ["--check", *options]
    outcome = playing.play(
        settings, project, file, hosts=hosts, options=given, told=told, at=at, on_themselves=on_themselves
    )
    if not outcome.hosts:
        # No worker was compared: raise the error that says why.
        fix_of(outcome, file, texts.folded(hosts) or "the fleet", settings)
    return Drift({host: found[host] for host in sorted(found, key=texts.natural)}, outcome)
