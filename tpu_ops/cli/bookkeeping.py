"""What is kept of a run that is recovered, and said of it: attempts, budgets, events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpu_ops.cli import commands, output
from tpu_ops.cli.attempt import lost_of
from tpu_ops.config import Settings
from tpu_ops.errors import OpsError, UnreachableError
from tpu_ops.fleet import remaking
from tpu_ops.fleet.model import Worker
from tpu_ops.runs import control, records, recovery, spec
from tpu_ops.runs.endings import FAILED, TAKEN
from tpu_ops.runs.recovery import Recovery

#: What to do where a budget is used up.
MORE = "`tpu_ops train` with a higher limit and another --name continues from the last checkpoint"


class Bookkeeping:
    """The books of one run.

    Args:
        settings: Of the fleet.
        kept: What is kept of the run.
        run: What its last attempt was started with.
        begun: Whether the run has been on before.
    """

    def __init__(self, settings: Settings, kept: Recovery, run: spec.RunSpec, *, begun: bool) -> None:
        self._settings, self.kept, self._spec, self._begun = settings, kept, run, begun
        self._events: list[dict[str, Any]] = []

    def _keep(self, **changes: Any) -> None:
        if changes.get("pending") and not self.kept.pending:
            changes["since"] = time.time()
        self.kept = replace(self.kept, **changes)
        with self._as_far_as_it_goes():
            recovery.write(self._settings.state_dir, self.kept)

    @contextlib.contextmanager
    def _as_far_as_it_goes(self) -> Iterator[None]:
        """Let a run that has begun go on where this machine's disk is full: it is this command that knows of it, then.

        Raises:
            OpsError: The run has not begun.
        """
        try:
            yield
        except OpsError as exc:
            if not self._begun:
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

    def _count_one(self, kind: str, *, anew: bool = False, early: bool = False) -> str:
        """Count an end of an attempt, a loss of its nodes once; return which budget is used up, if any.

        Args:
            kind: As of `endings.ending`.
            anew: Whether nodes are lost that took the place of others, whose loss is counted.
            early: Whether no node is known to be lost yet: the next one that is was counted by this.
        """
        anew = anew and not self.kept.early
        if kind == FAILED:
            self._keep(failures=self.kept.failures + 1, pending=True, early=early)
        elif anew or not self.kept.counted:
            self._keep(preemptions=self.kept.preemptions + 1, pending=True, counted=True, early=early)
        else:
            self._keep(pending=True, early=early)
        return self.kept.over_budget()

    def _count_lost(self, plan: remaking.Plan, exc: OpsError | None = None, *, anew: bool = False) -> bool:
        """Count nodes that are not as a plan has them; return whether there are any.

        Args:
            plan: The nodes.
            exc: What went wrong because of that, if anything.
            anew: As of `_count_one`.

        Raises:
            UnreachableError: There are, and the budget is used up.
        """
        lost: Mapping[str, str] = {}
        with contextlib.suppress(OpsError):
            lost = lost_of(self._settings, plan)
        return self._count_these(lost, exc, anew=anew)

    def _count_these(self, lost: Mapping[str, str], exc: OpsError | None = None, *, anew: bool = False) -> bool:
        """Do as `_count_lost`, for nodes of which is known what became of them (`remaking.lost`)."""
        if not lost:
            return False
        why, over = "; ".join(lost.values()), self._count_one(TAKEN, anew=anew)
        if over:
            recovery.forget(self._settings.state_dir, self.kept.run_id)
            what = f"not started again: {why}, and {over} is used up"
            raise UnreachableError(what, where=f"run {self.kept.run_id}", fix=MORE) from exc
        self._tell(why, "bringing its nodes back")
        return True

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
