"""What `tpu_ops train` and `attach` do after the end of a run: copy its files, and send notices."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from tpu_ops import files
from tpu_ops.cli import options, output, progress, runs_output
from tpu_ops.errors import ExitCode, OpsError, UsageError
from tpu_ops.fleet import contact, view
from tpu_ops.runs import known_failures, notices, results
from tpu_ops.runs.control import RunRef
from tpu_ops.runs.notices import Notice
from tpu_ops.runs.outcomes import Outcome, first_failure
from tpu_ops.ssh.fanout import Fanout

#: The state in which a run ended, and the outcomes of its ranks as far as they are known; None while it is active.
End = tuple[str, Sequence[Outcome]] | None


def add_arguments(parser: options.Options) -> None:
    """Declare --fetch, --fetch-to and --notify."""
    parser.add_argument(
        "--fetch",
        action="append",
        default=[],
        metavar="PATH",
        help="copy this file or directory of rank 0 here, whether or not the run succeeded; relative to the run's "
        "directory (repeatable)",
    )
    parser.add_argument(
        "--fetch-to", default="", metavar="DIR", help="where --fetch copies to (default: a directory with the run's id)"
    )
    parser.add_argument(
        "--notify",
        action="append",
        default=[],
        metavar="COMMAND|URL",
        help="run a shell command here, with the run's end in its environment and as JSON on its input, or send the "
        "JSON to a webhook (repeatable)",
    )


def check(args: argparse.Namespace, *, detached: bool = False) -> None:
    """Check the options.

    Args:
        args: The options of `add_arguments`.
        detached: Whether the command returns while the run is active.

    Raises:
        UsageError: A value is invalid, or options cannot be combined.
    """
    if "" in args.fetch:
        raise UsageError("the path is empty", where="--fetch", fix="name a file or directory, as in checkpoints")
    if args.fetch_to and not args.fetch:
        raise UsageError("this option needs --fetch", where="--fetch-to", fix="add --fetch PATH")
    for to in args.notify:
        notices.check(to)
    if detached and (args.fetch or args.notify):
        given = "--fetch" if args.fetch else "--notify"
        what = "the command has to follow the run to its end for this"
        fix = f"leave out --detach, or give {given} to `tpu_ops attach` later"
        raise UsageError(what, where=f"{given} and --detach", fix=fix)


class RunEnd:
    """Copies files of a run and sends notices at its end.

    Args:
        args: The options of `add_arguments`.
        fleet: Returns the fleet as it is known at the end.
        connect: Returns what reaches the workers of a fleet.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        fleet: Callable[[], view.Fleet],
        connect: Callable[[view.Fleet], Fanout] = contact.fanout,
    ) -> None:
        self._args, self._fleet, self._connect = args, fleet, connect

    def after(self, work: Callable[[], int], run: Callable[[], RunRef | None], end: Callable[[], End]) -> int:
        """Follow a run with a function, then copy files and send notices if the run has ended.

        Args:
            work: Follows the run; returns the exit code.
            run: Returns the run; None as long as it has not begun.
            end: Returns how the run ended.

        Returns:
            The exit code of ``work``; if this is 0 and files could not be copied, that of this failure.
        """
        try:
            code = work()
        except OpsError as exc:
            # No process follows the run any more, so this is the last notice.
            if begun := run():
                state, outcomes = end() or ("unknown", ())
                self._notify(begun, state, outcomes, exc.exit_code, str(exc))
            raise
        if not (begun := run()):
            return code
        if not (ended := end()):
            self._say_not_done(begun.run_id)
            return code
        fetched = self._fetch(begun)
        # A failure of the run matters more than one of the copy.
        code = code or fetched
        self._notify(begun, *ended, code)
        return code

    def _say_not_done(self, run_id: str) -> None:
        """Print the command that copies files and sends notices later, since the run is still active."""
        given = [
            *(f"--fetch {shlex.quote(path)}" for path in self._args.fetch),
            *(["--fetch-to DIR"] if self._args.fetch_to else []),
            *(["--notify ..."] if self._args.notify else []),
        ]
        if given:
            output.info(f"  not done, since the run goes on: `tpu_ops attach {run_id} {' '.join(given)}` does it")

    def _fetch(self, run: RunRef) -> int:
        """Copy the files; return the exit code of the first failure."""
        code = int(ExitCode.OK)
        for path in self._args.fetch:
            again = f"tpu_ops fetch {run.run_id} {shlex.quote(path)} {shlex.quote(self._args.fetch_to or run.run_id)}"
            try:
                into = files.resolved(self._args.fetch_to, "--fetch-to") if self._args.fetch_to else Path(run.run_id)
                fleet = self._fleet()
                fanout, login = self._connect(fleet), fleet.settings.user
                with progress.transfers("fetching") as moved:
                    copying = results.of_run(fanout, run, path, [0], into.absolute(), login=login, moved=moved)
                    (found,) = asyncio.run(copying)
                if found.problem:
                    raise found.error(path)
                output.info(found.words(path))
            except OpsError as exc:
                exc.fix = f"`{again}` tries again"
                output.info(f"the run is over, but {path} was not copied:")
                output.error(exc)
                code = code or exc.exit_code
            except KeyboardInterrupt:
                output.info(f"\ninterrupted while {path} was copied: `{again}` continues")
                code = code or ExitCode.INTERRUPTED
        return code

    def _notify(self, run: RunRef, state: str, outcomes: Sequence[Outcome], code: int, reason: str = "") -> None:
        """Send the notices; without a reason, the first failure of the run is the reason."""
        if not self._args.notify:
            return
        found = runs_output.summary(run.run_id, outcomes)
        first, known = first_failure(outcomes), known_failures.of_run(outcomes)
        why = first.text if first else ""
        labels = {worker.host: worker.label for worker in self._fleet().workers}
        since, until = found["since"], found["ended"]
        notice = Notice(
            run.run_id,
            state,
            int(code),
            list(dict.fromkeys(labels.get(host, host) for host in run.hosts)),
            max(0.0, until - since) if since and until else None,
            reason or (f"{why}; {known.what()}" if known else why),
        )
        receivers = list(dict.fromkeys(self._args.notify))
        for to, problem in zip(receivers, notices.send(notice, receivers), strict=True):
            if problem:
                output.warning(f"--notify: {notices.named(to)} was not told of the end of run {run.run_id}: {problem}")
