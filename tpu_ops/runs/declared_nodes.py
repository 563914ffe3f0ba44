"""One pass of `tpu_ops apply`: plan what nodes.yml declares, carry the plan out, and configure the new nodes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tpu_ops import texts
from tpu_ops.ansible import boot_bundles, convergence
from tpu_ops.ansible.convergence import NewDisplay
from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.creation import CreationTerms
from tpu_ops.cloud.names import short_name
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.wish import entry_of
from tpu_ops.config import Settings
from tpu_ops.errors import OpsError
from tpu_ops.fleet import applying, declared, holdings, plan, targets, unconfigured, view
from tpu_ops.fleet.applying import Planned, Result
from tpu_ops.fleet.declared import Declared
from tpu_ops.fleet.grant import Grant
from tpu_ops.fleet.plan import Action, Step
from tpu_ops.runs import recovery
from tpu_ops.ssh import identities

#: What the user does after correcting an error.
_AGAIN = "run `tpu_ops apply` again: it continues from the current state"
#: Actions on nodes that are kept: these change no node that exists.
_KEEPING = (Action.CREATE, Action.AGAIN, Action.WAIT, Action.CONFIGURE, Action.LEAVE)


class Choices(NamedTuple):
    """What the user allows.

    Attributes:
        recreate: Whether nodes are recreated whose differences cannot be changed.
        prune: Whether nodes and disks are deleted and detached that are not declared.
        configure: Whether site.yml runs on new workers.
        timeout: Seconds to wait for each node.
        patience: Seconds to retry if no place has capacity; None does not retry.
        keep: Whether only nodes with ``keep: true`` are created, and no existing node is changed.
    """

    recreate: bool
    prune: bool
    configure: bool
    timeout: float
    patience: float | None
    keep: bool = False


class Screen(Protocol):
    """Shows what a pass does."""

    def say(self, text: str) -> None:
        """Show a message of a step that goes on, from several threads."""

    def done(self, result: Result) -> None:
        """Show the result of a step that succeeded."""

    def warn(self, text: str) -> None:
        """Show a warning."""

    def progress(self, names: Sequence[str]) -> Callable[[str], Progress]:
        """Return a function that returns, for one of several nodes, the function that shows the progress of a wait."""

    def waiting(self, what: str) -> Progress:
        """Return the function that shows the progress of another wait."""

    @property
    def display(self) -> NewDisplay:
        """Returns the display of a playbook."""


def read(settings: Settings) -> tuple[Declared, ...]:
    """Return the declared nodes of a fleet.

    Raises:
        UsageError: nodes.yml is missing or has faults.
    """
    return declared.read(settings.path / declared.FILE, settings.projects, entry_of)


class Pass:
    """One pass.

    Args:
        settings: The settings of the fleet.
        choices: What the user allows.
        screen: Shows what the pass does.
    """

    def __init__(self, settings: Settings, choices: Choices, screen: Screen) -> None:
        self._settings, self._choices, self._screen = settings, choices, screen

    def plan(self, tpu: Tpu, nodes: Sequence[Declared], granted: Grant | None, now: dt.datetime) -> Planned:
        """Ask the API once, and return the plan.

        Raises:
            ApiError: The API refused or did not answer.
            UsageError: A part of the fleet could not be listed, so the rest of the grant is unknown.
        """
        settings, choices = self._settings, self._choices
        held = holdings.look(tpu, settings)
        for text in held.warnings:
            self._screen.warn(text)
        known = plan.Terms(
            choices.recreate,
            choices.prune,
            recovery.kept_nodes(settings.state_dir),
            unconfigured.read(settings.state_dir) if choices.configure else (),
            settings.zones,
            settings.filters,
        )
        steps = plan.steps(nodes, held, known)
        if choices.keep:
            steps = tuple(one for one in steps if one.declared and one.declared.keep and one.action in _KEEPING)
        return applying.planned(tpu, settings, granted, held, steps, now=now)

    def terms(self, todo: Sequence[Step]) -> CreationTerms:
        """Return how the nodes of a plan are created.

        Raises:
            UsageError: There is no ssh key for the new nodes.
        """
        creates = any(step.creates or step.action is Action.WAIT for step in todo)
        keys = identities.ssh_keys(self._settings) if creates else ""
        return CreationTerms(keys, wait=True, timeout=self._choices.timeout, patience=self._choices.patience)

    def carry_out(self, tpu: Tpu, planned: Planned, terms: CreationTerms) -> list[Result]:
        """Do the steps of a plan, and show the results of those that succeed.

        Raises:
            OpsError: The fleet's state cannot be written; nothing was done.
        """
        works = [work for work in planned.works if work.step.does]
        if self._choices.configure:
            new = [work.step.declared.key for work in works if work.order and work.step.creates and work.step.declared]
            unconfigured.add(self._settings.state_dir, new)
        orders = iter(boot_bundles.ordered(self._settings, [work.order for work in works if work.order]))
        works = [work._replace(order=next(orders)) if work.order else work for work in works]
        progress = self._screen.progress([work.step.name for work in works])
        results = applying.apply(
            tpu,
            self._settings,
            works,
            terms,
            claims=planned.claims,
            say=self._screen.say,
            progress=progress,
        )
        for one in results:
            if not one.error:
                self._screen.done(one)
        return results

    def finish(self, planned: Planned, results: Sequence[Result]) -> tuple[list[str], list[OpsError]]:
        """Learn the host keys of the new nodes, and run site.yml on them.

        Returns:
            The configured workers, and all errors of the pass.
        """
        failures = [work.refusal for work in planned.works if work.refusal]
        failures += [one.error for one in results if one.error]
        steps = {one.wish.full_name: one.step for one in results if one.wish and one.outcome not in ("begun", "failed")}
        late = [work.step for work in planned.works if work.step.action is Action.CONFIGURE]
        steps |= {step.node.full_name: step for step in late if step.node}
        keys = {name: step.declared.key for name, step in steps.items() if step.declared}
        if not keys and all(one.error for one in results):
            return [], failures
        try:
            return self._configure(keys), failures
        except OpsError as exc:
            if keys:
                return [], [*failures, exc]
            self._screen.warn(f"the nodes were changed, but the refresh of the snapshot failed: {exc}")
            return [], failures

    def _configure(self, keys: Mapping[str, unconfigured.Key]) -> list[str]:
        """Learn the host keys of nodes, and run site.yml on the new ones; return their workers.

        Args:
            keys: Resource name of each node -> its project and name.
        """
        state_dir = self._settings.state_dir
        fleet, workers = view.with_host_keys(self._settings, keys, self._screen.waiting("new nodes"))
        for text in fleet.warnings:
            self._screen.warn(text)
        listed = {worker.node.full_name for worker in workers}
        if lost := sorted(short_name(name) for name in keys if name not in listed):
            why = f"not configured, since the fleet does not list them: {targets.FILTERS}, and `zones`"
            self._screen.warn(f"{texts.some(lost)}: {why}")
        pending = unconfigured.read(state_dir)
        new = [worker for worker in workers if keys[worker.node.full_name] in pending]
        if not self._choices.configure or not new:
            return []
        convergence.converge(fleet, new, self._screen.display, then=_AGAIN)
        unconfigured.remove(state_dir, {keys[worker.node.full_name] for worker in new})
        return [worker.host for worker in new]
