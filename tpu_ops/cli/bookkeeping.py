"""What is kept of a run that is recovered, and said of it: attempts, budgets, events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tpu_ops.cli import commands, output
from tpu_ops.config import Settings
from tpu_ops.errors import OpsError, UnreachableError
from tpu_ops.fleet.model import Worker
from tpu_ops.fleet.requests import Requests
from tpu_ops.recovery import decide
from tpu_ops.recovery.events import Action, Event, ForgetRequests, GiveUp, Say, Tell
from tpu_ops.runs import control, records, recovery, spec
from tpu_ops.runs.recovery import Recovery


class Bookkeeping:
    """The state of one run's recovery, which each event changes, and what is printed and kept of it.

    Args:
        settings: Of the fleet.
        kept: What is kept of the run.
        run: What its last attempt was started with.
        begun: Whether the run has been on before.
    """

    def __init__(self, settings: Settings, kept: Recovery, run: spec.RunSpec, *, begun: bool) -> None:
        self._settings, self._spec = settings, run
        self.state = decide.State(kept, begun=begun)
        #: What is on the disk; None where nothing was written here yet.
        self._written: Recovery | None = None
        self._events: list[dict[str, Any]] = []
        path = recovery.requests_file(settings.state_dir, kept.run_id)
        self._requests = Requests(path, lambda text: output.warning(self._on_fleet(text)))

    @property
    def kept(self) -> Recovery:
        """What is kept of the run."""
        return self.state.kept

    def _take(self, event: Event) -> Action | None:
        """Decide on an event, keep the new state, and print what there is to tell; return the action that is left.

        Raises:
            UnreachableError: A budget is used up.
            OpsError: The state cannot be written, and the run has not begun.
        """
        was_pending, left = self.kept.pending, None
        self.state, actions = decide.decide(self.state, event)
        if self.kept.pending and not was_pending:
            self.state = replace(self.state, kept=replace(self.kept, since=time.time()))
        if self.kept != self._written:
            with self._as_far_as_it_goes():
                recovery.write(self._settings.state_dir, self.kept)
                self._written = self.kept
        for action in actions:
            match action:
                case Tell(what, then):
                    self._tell(what, then)
                case Say(text):
                    output.info(self._on_fleet(text))
                case ForgetRequests():
                    self._requests.drop(*(request.name for request in self._requests.all))
                case GiveUp(what):
                    recovery.forget(self._settings.state_dir, self.kept.run_id)
                    raise UnreachableError(what, where=f"run {self.kept.run_id}", fix=decide.MORE)
                case _:
                    left = action
        return left

    @contextlib.contextmanager
    def _as_far_as_it_goes(self) -> Iterator[None]:
        """Let a run that has begun go on where this machine's disk is full: it is this command that knows of it, then.

        Raises:
            OpsError: The run has not begun.
        """
        try:
            yield
        except OpsError as exc:
            if not self.state.begun:
                raise
            output.warning(
                self._on_fleet(
                    f"{exc}; recovery continues, but `tpu_ops attach --recover` would resume from an older state"
                )
            )

    def _run_on(self, workers: Sequence[Worker]) -> control.RunRef:
        return control.RunRef(self.kept.run_id, tuple(worker.host for worker in workers))

    def _remember(self, workers: Sequence[Worker], attempt: int) -> None:
        """Keep on which workers an attempt is, by rank."""
        record = records.started_on(self.kept.run_id, workers, self._spec.argv, attempt)
        with self._as_far_as_it_goes():
            records.write(self._settings.state_dir, record)

    def _tell(self, what: str, then: str) -> None:
        what = self._on_fleet(what)
        self._events.append({"attempt": self.kept.attempt, "what": what, "then": then})
        attempt = f"attempt {self.kept.attempt}" if self.kept.attempt else "not begun"
        output.info(f"run {self.kept.run_id}, {attempt}: {what}; {then}")

    def _on_fleet(self, text: str) -> str:
        return commands.on_fleet(text, self._settings.command)

    def facts(self) -> dict[str, Any]:
        """Return what --json tells of a recovered run beside its ranks."""
        return {key: getattr(self.kept, key) for key in ("attempt", "preemptions", "failures")} | {
            "events": self._events
        }
