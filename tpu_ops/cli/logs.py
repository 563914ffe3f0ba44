"""`tpu_ops logs`: show the output of a run's ranks so far, follow the output, or copy whole logs to files."""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from tpu_ops import config, files, texts
from tpu_ops.cli import interrupts, options, output, runs_output
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import contact, view
from tpu_ops.runs import attempts, control, copies, fetch, nodes, ranks, records, recovery
from tpu_ops.runs.known_ends import remembered
from tpu_ops.runs.outcomes import Outcome, run_state

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops logs`."""
    options.add_fleet(parser)
    parser.add_argument("--rank", metavar="all|LIST", help=runs_output.RANKS_OR_OWN)
    parser.add_argument(
        "--follow",
        action="store_true",
        help="follow the run until it ends, then exit as `attach` would; also works with --fetch",
    )
    parser.add_argument(
        "--since",
        type=moment,
        metavar="TIME",
        help="show output since this time: 90s, 10m, 2h or 1d ago, 2026-01-31T12:00 (local time), or "
        "'2026-01-31 12:00:00 UTC', as tables print it",
    )
    parser.add_argument("--fetch", metavar="DIR", help="copy the logs of all ranks, unchanged, to DIR/RUN/rank-N.log")
    parser.add_argument("run", help=f"{runs_output.RUN}; without --follow, if no run is active on it, its last run")


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Show the output of a run, or copy its logs to files."""
    fleet = view.current(config.load(args.fleet))
    directory = files.expanded(args.fetch, "--fetch") if args.fetch else Path()
    heard: set[int] = set()
    if args.fetch and (args.since or args.rank):
        what = "--fetch copies whole logs" if args.since else "--fetch copies the logs of all ranks"
        raise UsageError(what, where="--since" if args.since else "--rank", fix="leave out one of the two options")
    try:
        if args.fetch:
            run_, (outcomes, parts) = asyncio.run(_fetch(fleet, args.run, directory, live=args.follow))
            shown: Sequence[int] = range(len(outcomes))
            if whole := [outcome for outcome in outcomes if outcome.record and not outcome.cut]:
                output.info(f"logs of {texts.count(len(whole), 'rank')} are in {directory / run_.run_id}")
        else:
            (run_, outcomes, shown), parts = asyncio.run(_shown(fleet, args, heard)), {}
    except KeyboardInterrupt:
        output.info("")
        output.info("no longer following; the run continues")
        return ExitCode.INTERRUPTED
    # A rank that was never started has no log.
    unread = [one for one in outcomes if one.cut or not (one.record or one.state == "refused")]
    lost = [outcome for outcome in unread if args.follow or outcome.rank in shown]
    for outcome in outcomes:
        if outcome.rank in shown and outcome.state == "refused":
            output.warning(f"rank {outcome.rank} ({outcome.host}) was never started: {outcome.reason}")
    _say_why(lost, parts)
    # If a rank fell silent while its log was read, the beginning of the log is printed or written already.
    nothing = {one.rank for one in lost if _is_mute(one)} - heard - parts.keys()
    if nothing and (args.fetch or not args.follow) and (copied := _copied(fleet, run_, outcomes, nothing)):
        _give(run_, copied, args.since, directory / run_.run_id if args.fetch else None)
    if lost:
        _say_of_copies(fleet, run_.run_id)
    if not args.follow:
        return ExitCode.UNREACHABLE if lost else ExitCode.OK
    if run_state(outcomes) != "succeeded":
        runs_output.failure(outcomes, shown)
        kept = recovery.is_kept(fleet.settings.state_dir, run_.run_id)
        runs_output.say_state(run_.run_id, outcomes, kept=kept, states=lambda: nodes.states(fleet))
    # With --fetch, a missing log is an error even if the run is known to have succeeded.
    return runs_output.exit_code_at_end(outcomes) or (ExitCode.UNREACHABLE if args.fetch and lost else ExitCode.OK)


def _say_why(lost: Sequence[Outcome], parts: Mapping[int, Path]) -> None:
    """Warn of ranks whose logs are missing or incomplete, and print the reasons.

    Args:
        lost: The outcomes of these ranks.
        parts: Rank -> the file with the beginning of a log that could not be read to its end.
    """
    for outcome in lost:
        part = f"; {parts[outcome.rank]} has its earlier output" if outcome.rank in parts else ""
        # The code that followed the log has already warned that the log was cut.
        if part or not outcome.cut:
            why = "its log is incomplete" if outcome.cut else outcome.reason
            output.warning(f"rank {outcome.rank} ({outcome.host}): {why}{part}")


def _is_mute(outcome: Outcome) -> bool:
    """Return whether the state of a rank cannot be read any more: its node is gone, or its worker does not answer."""
    return not outcome.record and outcome.state != "unknown"


def _copied(
    fleet: view.Fleet, run_: control.RunRef, outcomes: Sequence[Outcome], ranks: Collection[int]
) -> copies.Kept | None:
    """Return this machine's copies of some ranks' logs, of the newest known attempt of a run."""
    state_dir = fleet.settings.state_dir
    place = recovery.folder(state_dir, run_.run_id)
    # The copies on this machine may be of another run with the same id.
    if not records.is_of(state_dir, run_.run_id, run_.hosts, fleet.workers):
        return None
    attempt = max((int(outcome.record["attempt"]) for outcome in outcomes if outcome.record), default=0)
    return copies.kept(place, ranks, attempt)


def _give(run_: control.RunRef, copied: copies.Kept, since: float | None, folder: Path | None) -> None:
    """Announce copies of logs, and print their lines; if a folder is given, put the copies there instead."""
    if folder:
        fetch.copies(copied.paths, folder)
        _say_whose(run_, copied, f"the copy is now in {folder}, as rank-N.log.part")
    elif since and since > copied.written_at:
        _say_whose(run_, copied, "nothing was written to the copy since --since")
    else:
        _say_whose(run_, copied, "the whole copy follows: copies have no times" if since else "the copy follows")
        for rank, count in copies.show(copied.paths, runs_output.line).items():
            output.info(f"rank {rank}: {texts.count(count, 'byte')} of its log are missing in the copy")


def _say_whose(run_: control.RunRef, copied: copies.Kept, what: str) -> None:
    """Print the ranks, attempt and time of copies that are used instead of the logs on the workers."""
    workers = texts.folded([run_.hosts[rank] for rank in copied.paths])
    whose = f"{ranks.named([*copied.paths])} ({workers}), attempt {copied.attempt}"
    made = f"this machine's copy of the log, last written {output.at(copied.written_at)}"
    output.info(f"{whose}: {made}; {what}")


def _say_of_copies(fleet: view.Fleet, run_id: str) -> None:
    """Print where this machine has copies of a run's logs, and the state of the run's recovery."""
    state_dir = fleet.settings.state_dir
    place = recovery.folder(state_dir, run_id)
    if any(place.glob("attempt-*")):
        output.info(f"copies of the run's logs, attempt by attempt: {place}")
    if note := recovery.note_of(state_dir, run_id):
        output.info(note)


def moment(text: str) -> float:
    """Return the time (seconds since 1970) that a text such as 10m or 2026-01-31T12:00 stands for, for argparse."""
    if found := _AGO.fullmatch(text):
        return time.time() - float(found[1]) * _UNITS[found[2]]
    try:
        # Tables print times with " UTC" at the end.
        found_at = datetime.fromisoformat(text.replace(" UTC", "Z")).timestamp()
    except ValueError:
        what = f"{text!r} is not a time: write 10m for ten minutes ago (s, m, h, d), or 2026-01-31T12:00"
        raise argparse.ArgumentTypeError(what) from None
    if found_at > time.time():
        what = f"{text!r} is in the future; times are local unless followed by UTC"
        raise argparse.ArgumentTypeError(what)
    return found_at


async def _shown(
    fleet: view.Fleet, args: argparse.Namespace, heard: set[int]
) -> tuple[control.RunRef, list[Outcome], list[int]]:
    """Print the requested lines; without --follow, add the ranks that have printed any to ``heard``."""
    since = args.since or 0.0
    if args.follow:
        return await attempts.to_the_last(fleet, args.run, args.rank, runs_output.terminal(), since=since)
    return await attempts.followed(
        fleet, args.run, args.rank, runs_output.terminal(), live=False, since=since, heard=heard.update
    )


async def _fetch(fleet: view.Fleet, word: str, directory: Path, *, live: bool) -> tuple[control.RunRef, fetch.Copied]:
    fanout = contact.fanout(fleet)
    run_ = await attempts.the_run(fleet, fanout, word, output.info, live=live)
    copied = await fetch.logs(fanout, run_, directory, live=live, taken=nodes.taken(fleet, run_.run_id))
    return run_, copied._replace(outcomes=[*remembered(fleet, run_.run_id, run_.hosts, copied.outcomes)])
