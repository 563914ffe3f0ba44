"""`tpu_ops logs`: the lines of a run's ranks, those there are or all that come; or the whole logs as files."""

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
from tpu_ops.runs.outcomes import Outcome

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


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Show the lines, or fetch the logs."""
    fleet = view.current(config.load(args.fleet))
    directory = files.expanded(args.fetch, "--fetch") if args.fetch else Path()
    heard: set[int] = set()
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
            (run_, outcomes, shown), parts = asyncio.run(_shown(fleet, args, heard)), {}
    except KeyboardInterrupt:
        output.info("")
        output.info("no longer following; the run continues")
        return ExitCode.INTERRUPTED
    # Of one that was never started there is no log.
    unread = [one for one in outcomes if one.cut or not (one.record or one.state == "refused")]
    lost = [outcome for outcome in unread if args.follow or outcome.rank in shown]
    for outcome in outcomes:
        if outcome.rank in shown and outcome.state == "refused":
            output.warning(f"rank {outcome.rank} ({outcome.host}) was never started: {outcome.reason}")
    _say_why(lost, parts)
    # Of one that fell silent on the way the beginning was printed or written already.
    nothing = {one.rank for one in lost if _is_mute(one)} - heard - parts.keys()
    if nothing and (args.fetch or not args.follow) and (copied := _copied(fleet, run_, outcomes, nothing)):
        _give(run_, copied, args.since, directory / run_.run_id if args.fetch else None)
    if lost:
        _say_of_copies(fleet, run_.run_id)
    if not args.follow:
        return ExitCode.UNREACHABLE if lost else ExitCode.OK
    if runs_output.run_state(outcomes) != "succeeded":
        runs_output.failure(outcomes, shown)
        kept = recovery.is_kept(fleet.settings.state_dir, run_.run_id)
        runs_output.say_state(run_.run_id, outcomes, kept=kept, states=lambda: nodes.states(fleet))
    # What was to be copied is not there, however the run is known to have ended.
    return runs_output.exit_code_at_end(outcomes) or (ExitCode.UNREACHABLE if args.fetch and lost else ExitCode.OK)


def _say_why(lost: Sequence[Outcome], parts: Mapping[int, Path]) -> None:
    """Say of ranks why their logs are not there, or not whole; ``parts`` is as of `fetch.Copied`."""
    for outcome in lost:
        part = f"; {parts[outcome.rank]} has its earlier output" if outcome.rank in parts else ""
        # Of a log that was cut whoever follows has said so already.
        if part or not outcome.cut:
            why = "its log is incomplete" if outcome.cut else outcome.reason
            output.warning(f"rank {outcome.rank} ({outcome.host}): {why}{part}")


def _is_mute(outcome: Outcome) -> bool:
    """Return whether nobody tells of a rank any more: its node is gone, or does not answer."""
    return not outcome.record and outcome.state != "unknown"


def _copied(
    fleet: view.Fleet, run_: control.RunRef, outcomes: Sequence[Outcome], ranks: Collection[int]
) -> copies.Kept | None:
    """Return this machine's copies of the logs of some ranks of a run, in the newest attempt that is known."""
    state_dir = fleet.settings.state_dir
    place = recovery.folder(state_dir, run_.run_id)
    # There may be copies of another run of that name.
    if not records.is_of(state_dir, run_.run_id, run_.hosts, fleet.workers):
        return None
    attempt = max((int(outcome.record["attempt"]) for outcome in outcomes if outcome.record), default=0)
    return copies.kept(place, ranks, attempt)


def _give(run_: control.RunRef, copied: copies.Kept, since: float | None, folder: Path | None) -> None:
    """Print the lines of copies, or copy them to a folder if there is one; say before that they are copies."""
    if folder:
        fetch.copies(copied.paths, folder)
        _say_whose(run_, copied, f"it is now in {folder}, as rank-N.log.part")
    elif since and since > copied.written_at:
        _say_whose(run_, copied, "none of it was written since then")
    else:
        _say_whose(run_, copied, "it follows from its beginning, as copies have no times" if since else "it follows")
        for rank, count in copies.show(copied.paths, runs_output.line).items():
            output.info(f"rank {rank}: {texts.count(count, 'byte')} of its log are missing in the copy")


def _say_whose(run_: control.RunRef, copied: copies.Kept, what: str) -> None:
    """Say of which ranks and which attempt copies are that take the place of logs, and when they were made."""
    workers = texts.folded([run_.hosts[rank] for rank in copied.paths])
    whose = f"rank{'s' * (len(copied.paths) > 1)} {ranks.folded([*copied.paths])} ({workers}), attempt {copied.attempt}"
    made = f"this machine's copy of the log, last written {output.at(copied.written_at)}"
    output.info(f"{whose}: {made}; {what}")


def _say_of_copies(fleet: view.Fleet, run_id: str) -> None:
    """Say where copies of a run's logs are on this machine, and who recovers it."""
    state_dir = fleet.settings.state_dir
    place = recovery.folder(state_dir, run_id)
    if any(place.glob("attempt-*")):
        output.info(f"copies of its logs, attempt by attempt: {place}")
    if note := recovery.note_of(state_dir, run_id):
        output.info(note)


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


async def _shown(
    fleet: view.Fleet, args: argparse.Namespace, heard: set[int]
) -> tuple[control.RunRef, list[Outcome], list[int]]:
    """Show the lines that are asked for; add the ranks that have said some to those that were heard."""
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
