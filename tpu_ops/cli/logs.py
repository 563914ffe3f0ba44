"""`tpu_ops logs`: the lines of a run's ranks, those there are or all that come; or the whole logs as files."""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from tpu_ops import config, files, texts
from tpu_ops.cli import asked, commands, following, options, output, runs_output
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import contact, view
from tpu_ops.runs import control, fetch, nodes, recovery
from tpu_ops.runs.outcomes import Outcome
from tpu_ops.runs.remembered import remembered

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
        help="show output since then: 90s, 10m, 2h or 1d ago, 2026-01-31T12:00 (local time), or "
        "'2026-01-31 12:00:00 UTC', as tables print it",
    )
    parser.add_argument("--fetch", metavar="DIR", help="copy the logs of all ranks, unchanged, to DIR/RUN/rank-N.log")
    parser.add_argument("run", help=f"{runs_output.RUN}; without --follow, if none is active, for the last one there")


@asked.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Show the lines, or fetch the logs."""
    fleet = view.current(config.load(args.fleet))
    directory = files.expanded(args.fetch, "--fetch") if args.fetch else Path()
    if args.fetch and (args.since or args.rank):
        what = "--fetch copies whole logs" if args.since else "--fetch copies the logs of all ranks"
        raise UsageError(what, where="--since" if args.since else "--rank", fix="leave out one of the two")
    try:
        if args.fetch:
            run_, (outcomes, parts) = asyncio.run(_fetch(fleet, args.run, directory, live=args.follow))
            shown: Sequence[int] = range(len(outcomes))
            if whole := [outcome for outcome in outcomes if outcome.record and not outcome.cut]:
                output.info(f"logs of {texts.count(len(whole), 'rank')} are in {directory / run_.run_id}")
        else:
            (run_, outcomes, shown), parts = asyncio.run(_shown(fleet, args)), {}
    except KeyboardInterrupt:
        output.info("")
        output.info("no longer following; the run continues")
        return ExitCode.INTERRUPTED
    unread = [outcome for outcome in outcomes if outcome.cut or not outcome.record]
    lost = [outcome for outcome in unread if args.follow or outcome.rank in shown]
    for outcome in outcomes:
        if outcome.rank in shown and outcome.state == "refused":
            output.warning(f"rank {outcome.rank} ({outcome.host}) was never started: {outcome.reason}")
    for outcome in lost:
        part = f"; {parts[outcome.rank]} has its earlier output" if outcome.rank in parts else ""
        # Of a log that was cut whoever follows has said so already.
        if part or not outcome.cut:
            why = "its log is incomplete" if outcome.cut else outcome.reason
            output.warning(f"rank {outcome.rank} ({outcome.host}): {why}{part}")
    if lost:
        _say_of_copies(fleet, run_.run_id)
    if not args.follow:
        return ExitCode.UNREACHABLE if lost else ExitCode.OK
    if runs_output.run_state(outcomes) != "succeeded":
        runs_output.failure(outcomes, shown, fleet.settings.command)
        kept = recovery.is_kept(fleet.settings.state_dir, run_.run_id)
        runs_output.say_state(run_.run_id, outcomes, fleet.settings.command, kept=kept)
    # What was to be copied is not there, however the run is known to have ended.
    return runs_output.exit_code_at_end(outcomes) or (ExitCode.UNREACHABLE if args.fetch and lost else ExitCode.OK)


def _say_of_copies(fleet: view.Fleet, run_id: str) -> None:
    """Say where copies of a run's logs are on this machine, and who recovers it."""
    state_dir, command = fleet.settings.state_dir, fleet.settings.command
    if copies := sorted(recovery.folder(state_dir, run_id).glob("attempt-*")):
        output.info(f"copies of its logs, attempt by attempt: {copies[0].parent}")
    if note := recovery.note_of(state_dir, run_id):
        output.info(commands.on_fleet(note, command))


def moment(text: str) -> float:
    """Return the time (seconds since 1970) that a person means, for argparse."""
    if found := _AGO.fullmatch(text):
        return time.time() - float(found[1]) * _UNITS[found[2]]
    try:
        # As tables have it.
        found_at = datetime.fromisoformat(text.replace(" UTC", "Z")).timestamp()
    except ValueError:
        what = f"{text!r} is not a time: write 10m for ten minutes ago (s, m, h, d), or 2026-01-31T12:00"
        raise argparse.ArgumentTypeError(what) from None
    if found_at > time.time():
        what = f"{text!r} is in the future; times are local unless followed by UTC"
        raise argparse.ArgumentTypeError(what)
    return found_at


async def _shown(fleet: view.Fleet, args: argparse.Namespace) -> tuple[control.RunRef, list[Outcome], list[int]]:
    """Show the lines that are asked for."""
    since = args.since or 0.0
    if args.follow:
        return await following.to_the_last(fleet, args.run, args.rank, since=since)
    return await following.followed(fleet, args.run, args.rank, live=False, since=since)


async def _fetch(fleet: view.Fleet, word: str, directory: Path, *, live: bool) -> tuple[control.RunRef, fetch.Copied]:
    fanout = contact.fanout(fleet)
    run_ = await following.the_run(fleet, fanout, word, live=live)
    copied = await fetch.logs(fanout, run_, directory, live=live, taken=nodes.taken(fleet, run_.run_id))
    return run_, copied._replace(outcomes=[*remembered(fleet, run_.run_id, run_.hosts, copied.outcomes)])
