"""`--recover` of `tpu_ops train` and `attach`: follow a run, and start the run again when its nodes are taken away."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from tpu_ops.cli import faults, foreground, options, output, runs_output
from tpu_ops.cli.configure import Progress
from tpu_ops.cli.interrupts import Asked, ended_by
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode, OpsError
from tpu_ops.recovery import open_requests, services
from tpu_ops.recovery.decide import over_budget
from tpu_ops.recovery.driver import Driver
from tpu_ops.recovery.events import Finish, Stop, StopWanted
from tpu_ops.recovery.fleet_services import FleetServices
from tpu_ops.runs import advice, control, copies, ranks, records, recovery, spec
from tpu_ops.runs.endings import STOPPED
from tpu_ops.runs.follow import Follower
from tpu_ops.runs.outcomes import Outcome, run_state
from tpu_ops.runs.preflight import Fault
from tpu_ops.runs.recovery import Recovery
from tpu_ops.ssh.fanout import Fanout


class Printer:
    """The terminal of a command that recovers a run.

    Args:
        args: ``rank`` and ``json`` of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def info(self, text: str) -> None:
        """Print a message."""
        output.info(text)

    def warning(self, text: str) -> None:
        """Print a warning."""
        output.warning(text)

    def overriding(self) -> Callable[[Fault], None]:
        """Return a function that warns of a fault that --force overrides."""
        return faults.overriding()

    def ranks(self, count: int) -> list[int]:
        """Return the ranks whose output is printed."""
        return ranks.parse(self._args.rank, count)

    def follower(self, fanout: Fanout, run: control.RunRef, logs: copies.Logs) -> Follower:
        """Return the follower of an attempt, which prints the output and writes copies of the logs."""
        return Follower(
            fanout,
            run.run_id,
            run.hosts,
            shown=self.ranks(len(run.hosts)),
            line=runs_output.line_aside if self._args.json else runs_output.line,
            part=runs_output.part_aside if self._args.json else runs_output.part,
            say=output.info,
            data=logs.write,
            offsets=logs.offsets,
        )


class Recovering:
    """A command that recovers one run: its signals, and what it prints at the end.

    Args:
        settings: The settings of the fleet.
        kept: The recovery state of the run.
        run: The specification of the run.
        args: ``rank``, ``json`` and ``exit_code`` of the command line.
        begun: Whether an attempt of the run was started before.
        said: Warnings about the fleet that this command has printed already.
        uses: The API, the workers and the clock; by default those of the fleet.

    Attributes:
        driver: Recovers the run.
        ended: The state in which the run ended for good, and the outcomes of its ranks as far as they are known; None
            before that.
    """

    def __init__(
        self,
        settings: Settings,
        kept: Recovery,
        run: spec.RunSpec,
        args: argparse.Namespace,
        *,
        begun: bool,
        said: Iterable[str] = (),
        uses: services.Services | None = None,
    ) -> None:
        self._settings, self._args = settings, args
        self.ended: tuple[str, Sequence[Outcome]] | None = None
        self.driver = Driver(
            settings.state_dir,
            kept,
            run,
            uses
            or FleetServices(
                settings,
                kept.run_id,
                said,
                outside_grant=kept.outside_grant,
                waiting=options.Waiting,
                display=Progress,
            ),
            Printer(args),
            follow=self._follow,
            begun=begun,
        )

    @property
    def kept(self) -> Recovery:
        """The recovery state of the run."""
        return self.driver.kept

    def facts(self) -> dict[str, Any]:
        """Return the facts of the recovery for --json, besides the ranks of the run."""
        found = self.driver.facts()
        return found | {"events": [event | {"what": output.on_fleet(event["what"])} for event in found["events"]]}

    def begun_run(self) -> control.RunRef | None:
        """Return the run on the workers of its last attempt; None if it has not begun."""
        known = records.read(self._settings.state_dir, self.kept.run_id) if self.driver.state.begun else None
        return control.RunRef(known.run_id, known.hosts) if known else None

    def tell_requested(self) -> None:
        """Print the nodes that were requested and that no attempt uses: they are billed after this command's end."""
        open_requests.tell(self.kept.run_id, self.driver.requests.all)

    def to_the_end(self, work: Coroutine[Any, Any, int] | None) -> int:
        """Follow and recover the run until it ends for good or the user detaches; return the exit code.

        Args:
            work: Starts or attaches to the first attempt; None if the run's nodes have to be brought back first.
        """
        try:
            return self._followed_to_the_end(work)
        finally:
            self.tell_requested()

    def _followed_to_the_end(self, work: Coroutine[Any, Any, int] | None) -> int:
        driver = self.driver
        try:
            with ended_by(lambda: not driver.on and driver.is_kept and driver.stop_wanted()):
                code, step = driver.run(work)
        except Asked:
            code, step = ExitCode.OK, driver.take(StopWanted(driver.outcomes or (), driver.lost))
        except BrokenPipeError:
            # The reader of the output has ended, as `head` does.
            if not self.driver.state.begun:
                raise
            output.give_up()
            self.left()
            return ExitCode.INTERRUPTED
        except KeyboardInterrupt:
            output.info("")
            self.left()
            raise
        except (OpsError, OSError):
            if self.driver.state.begun and not over_budget(self.kept):
                self._hint()
            raise
        if isinstance(step, Stop):
            return self._stopped(forget=step.forget)
        return self._finish(self.driver.outcomes or ()) if isinstance(step, Finish) else code

    def _follow(self, work: Coroutine[Any, Any, int]) -> int:
        followed = foreground.followed(
            work, lambda: self.driver.on, self.left, self._never_again, as_json=self._args.json
        )
        return asyncio.run(followed)

    def _never_again(self, outcomes: Sequence[Outcome] = ()) -> None:
        state = run_state(outcomes) if outcomes else STOPPED
        self.ended = (state, outcomes)
        recovery.forget(self._settings.state_dir, self.kept.run_id)
        records.close(self._settings.state_dir, self.kept.run_id, state, STOPPED, outcomes)
        output.info(f"run {self.kept.run_id}: stopped; it will not be started again")

    def _stopped(self, *, forget: bool) -> int:
        """Print that the run is not started again. The process that asked for the stop ends an active attempt."""
        if forget:
            self._never_again()
        else:
            self.ended = (STOPPED, ())
            output.info(f"run {self.kept.run_id}: not started again; attempt {self.kept.attempt} may be running")
        if self._args.json:
            output.as_json({"run_id": self.kept.run_id, "state": STOPPED, "ranks": [], **self.facts()})
        return ExitCode.FAILED

    def left(self) -> None:
        """Print after Ctrl-C whether the run continues, and how to reach the run."""
        if not self.driver.state.begun:
            output.info("interrupted before the run was started")
            return
        if self.driver.on:
            how = f"detached: run {self.kept.run_id} continues"
        else:
            # The attempt's start was interrupted (it may be running), or no attempt was started yet (`pending`).
            how = f"run {self.kept.run_id} {'is not' if self.kept.pending else 'may be'} running"
        output.info(f"{how}; nothing will {'restart' if self.kept.attempt else 'start'} it")
        _, stop = advice.reaching(self.kept.run_id)
        runs_output.steps([stop, advice.resuming(self.kept.run_id)])

    def _hint(self) -> None:
        runs_output.steps([advice.resuming(self.kept.run_id)])

    def _finish(self, outcomes: Sequence[Outcome]) -> int:
        recovery.forget(self._settings.state_dir, self.kept.run_id)
        state = run_state(outcomes)
        self.ended = (state, outcomes)
        records.close(self._settings.state_dir, self.kept.run_id, state, outcomes=outcomes)
        return runs_output.finish(
            self.kept.run_id,
            outcomes,
            ranks.parse(self._args.rank, len(outcomes)),
            as_json=self._args.json,
            of_rank=self._args.exit_code == "rank",
            more=self.facts(),
        )
