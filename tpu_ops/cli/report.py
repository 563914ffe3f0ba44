"""`tpu_ops report`: show what happened in a run, or how the fleet was used, as text or as a page to send to others."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from collections.abc import Sequence

from tpu_ops import config, texts
from tpu_ops.cli import options, output, report_fleet, runs_output
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import contact, view
from tpu_ops.runs import attempts, outcomes, ranks, report, report_data, report_page
from tpu_ops.runs.report_data import Folded, Report

COLUMNS = ("rank", "worker", "state", "end", "use", "most_hbm", "last_output")
#: Number of last lines of each rank in a report in text.
LINES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops report`."""
    parser.add_argument(
        "--html", metavar="FILE", help="write one page with pictures, which needs no other file and no network"
    )
    parser.add_argument(
        "--days",
        type=_days,
        default=report_fleet.DAYS,
        metavar="N",
        help=f"without RUN: the use of the last N days (default: {report_fleet.DAYS})",
    )
    parser.add_argument(
        "--cached", action="store_true", help="without RUN: do not ask the API for the nodes; use the last known view"
    )
    options.add_json(parser)
    parser.add_argument(
        "--fleet",
        nargs="?",
        metavar="PATH",
        help="the fleet directory, or a file ending in tpu_vm.yml, as of all commands; without PATH: no RUN is meant",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=f"{runs_output.RUN} (default: the fleet)")
    parser.epilog = (
        "The report of a run has its command line and the last lines of its output: read it before you send it. "
        "The exit code is 0 whether or not the run failed."
    )


def run(args: argparse.Namespace) -> int:
    """Ask the workers, and print or write the report."""
    if args.json and args.html:
        raise UsageError("a report is printed as JSON or written as a page", where="--json and --html", fix="use one")
    settings = config.load(args.fleet)
    if not args.run:
        return report_fleet.run(settings, args.days, cached=args.cached, html=args.html, as_json=args.json)
    fleet = view.current(settings)

    async def made() -> Report:
        fanout = contact.fanout(fleet)
        run_ = await attempts.the_run(fleet, fanout, args.run, output.info, live=False)
        return report_data.compute(await report.gather(fleet, fanout, run_))

    found = asyncio.run(made())
    for one in found.silent:
        output.warning(f"{ranks.titled(one.ranks)}: {one.text}")
    if args.html:
        report_fleet.write(args.html, report_page.of_run(found))
    elif args.json:
        output.as_json(found.to_json())
    else:
        with output.read_or_not():
            show(found)
    return ExitCode.OK


def _days(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= report_fleet.MOST_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days from 1 to {report_fleet.MOST_DAYS}")
    return int(text)


def show(found: Report) -> None:
    """Print the report of a run as text."""
    until = texts.at(found.ended) if found.ended else "now"
    lasted = ""
    if found.since is not None:
        lasted = f", {texts.at(found.since)} to {until}"
        lasted += f" ({texts.lasting((found.ended or found.made) - found.since)})"
    output.line(f"run {found.run_id}: {found.state}{lasted}")
    nodes = "; ".join(f"{one.node} {one.kind} {one.zone}".strip() for one in found.places)
    environments = "; ".join(one.text for one in found.environments)
    for label, text in (
        ("failed first", found.first),
        ("because", found.known),
        ("recovery", output.on_fleet(found.recovery)),
        ("command", shlex.join(found.argv)),
        ("in", found.directory),
        ("code", found.code),
        ("environment", f"{environments} (as it is now)" if environments else ""),
        ("person", found.person),
        ("started from", found.started_from),
        ("on", nodes),
    ):
        if text:
            output.line(f"  {label + ':':<13} {text}")
    if len(found.attempts) > 1:
        output.line()
        output.table([_attempt(one) for one in found.attempts], ("attempt", "state", "from", "to", "why_it_ended"))
    output.line()
    output.table([_rank(one) for one in found.ranks], COLUMNS)
    for event in found.events:
        output.line(f"{event.kind} of {ranks.titled(event.ranks)} at {texts.at(event.at)}: {event.text}")
    for text in found.notes:
        output.line(f"noted: {text}")
    _lines("before the first failure", [Folded("", found.raised)] if found.raised else [], None)
    _lines("last lines", found.tails, LINES)
    if found.hangs:
        output.line()
        output.line("where the processes were (with --html: all stacks):")
        for text in found.hangs:
            output.line(f"  {text}")


def _attempt(one: report_data.Attempt) -> dict[str, object]:
    times = ("" if moment is None else output.at(moment) for moment in (one.since, one.ended))
    return {"attempt": one.number, "state": one.state, **dict(zip(("from", "to"), times, strict=True))} | {
        "why_it_ended": one.why
    }


def _rank(one: report_data.Rank) -> dict[str, object]:
    return {
        "rank": one.rank,
        "worker": one.host,
        "state": one.state,
        "end": outcomes.ending(one.ending),
        "use": "" if one.use is None else f"{one.use:.0f} %",
        "most_hbm": "" if one.hbm is None else f"{one.hbm:.0f} %",
        "last_output": "" if one.last_output is None else output.at(one.last_output),
    }


def _lines(title: str, found: Sequence[Folded], most: int | None) -> None:
    """Print texts of ranks, of each only the last lines."""
    for one in found:
        output.line()
        output.line(f"{title}, {ranks.titled(one.ranks)}:" if one.ranks else f"{title}:")
        for text in report_page.shown(one.text).split("\n")[-most if most else 0 :]:
            output.line(f"  {text}")
