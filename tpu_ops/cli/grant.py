"""`tpu_ops grant`: show how much of the grant is used, write grant.yml from an e-mail, delete nodes after the end."""

from __future__ import annotations

import argparse
import datetime as dt
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tpu_ops import config, files, texts
from tpu_ops.cli import options, output
from tpu_ops.cloud import deletion
from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.deletion import Deletion
from tpu_ops.cloud.node import tier
from tpu_ops.cloud.queued_resources import HUSK_STATES
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, ExitCode, UsageError
from tpu_ops.fleet import grant, grant_end, grant_mail, holdings, origin
from tpu_ops.fleet.grant import Grant, Use
from tpu_ops.fleet.holdings import Holdings

COLUMNS = ("granted", "used", "free", "zone", "tier", "by")
#: Seconds to wait for a deletion.
DELETION_LIMIT = 900.0
#: The largest e-mail in bytes.
_LARGEST = 1_000_000
#: Characters of a line of the e-mail that an error shows.
_SHOWN = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops grant`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument(
        "import_", nargs="?", choices=("import",), metavar="import", help="write grant.yml from an e-mail"
    )
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="with import: the e-mail's text (default: -, the input)"
    )
    parser.add_argument("--ends", metavar="DATE", help="with import: the grant's last day, as in 2027-01-31 (UTC)")
    parser.add_argument("--replace", action="store_true", help="with import: replace an existing grant.yml")
    parser.add_argument(
        "--delete-after-end",
        action="store_true",
        help="once the grant has ended, delete the nodes and queued resources that it covered; before, do nothing",
    )
    parser.add_argument("--dry-run", action="store_true", help="with import or --delete-after-end: change nothing")
    parser.epilog = "Without arguments, shows granted, used and free TPUs, and what would run after the grant's end."


def run(args: argparse.Namespace) -> int:
    """Show, import or clean up."""
    settings = config.load(args.fleet)
    _check(args)
    if args.import_:
        return _import(settings, args)
    now = dt.datetime.now(dt.UTC)
    found = grant.read(settings.path / grant.FILE)
    if found is None:
        raise UsageError(
            "this fleet has no grant",
            where=str(settings.path / grant.FILE),
            fix="`tpu_ops grant import` writes the file from Google's e-mail; docs/grant.md shows how to write it",
        )
    with origin.api(settings) as tpu:
        held = holdings.look(tpu, settings)
        for text in held.warnings:
            output.warning(text)
        if args.delete_after_end:
            return _clean_up(settings, tpu, found, held, args)
        for text in holdings.unknown_zones(tpu, settings, found, held):
            output.warning(f"{found.file}, {text}")
    return _show(found, held.uses, now, as_json=args.json)


def _check(args: argparse.Namespace) -> None:
    if not args.import_ and (given := [name for name in ("ends", "replace") if getattr(args, name)]):
        raise UsageError("this option belongs to `tpu_ops grant import`", where=f"--{given[0]}", fix="leave it out")
    if args.import_ and args.delete_after_end:
        raise UsageError("two commands in one", where="import and --delete-after-end", fix="leave out one of them")
    if not args.import_ and not args.delete_after_end and args.dry_run:
        raise UsageError("nothing would be changed", where="--dry-run", fix="leave it out")


def _show(found: Grant, uses: Sequence[Use], now: dt.datetime, *, as_json: bool) -> int:
    held, outside = grant.shares(found, uses)
    left = found.days_left(now)
    rows = [
        {
            "line": str(line),
            "unit": "chips" if line.counts_chips else "nodes",
            "granted": line.amount,
            "used": line.amount - grant.free(line, members),
            "free": max(0, grant.free(line, members)),
            "zone": line.zone,
            "tier": tier(spot=line.spot),
            "uses": [_use(use) for use in members],
        }
        for line, members in zip(found.lines, held, strict=True)
    ]
    if as_json:
        output.as_json(
            {
                "file": str(found.file),
                "ends": found.ends.isoformat(),
                "days_left": round(left, 2),
                "lines": rows,
                "outside": [_use(use) for use in outside],
            }
        )
        return ExitCode.OK
    table = [
        {**row, "granted": line.granted, "by": texts.some([str(use) for use in members], 4)}
        for line, row, members in zip(found.lines, rows, held, strict=True)
    ]
    output.table(table, COLUMNS)
    for text in _uncovered(outside):
        output.warning(text)
    if left > 0:
        output.line(f"ends {found.ends:%Y-%m-%d %H:%M} UTC: {found.time_left(now)} left")
    if uses:
        output.line(_after_end(uses, is_over=left <= 0))
        output.info("`tpu_ops grant --delete-after-end` deletes what the grant covered once it has ended (for cron)")
    if text := found.warning(now):
        output.warning(text)
    return ExitCode.OK


def _uncovered(outside: Sequence[Use]) -> list[str]:
    """Return warnings about nodes that are billed, and about queued resources whose nodes will be."""
    nodes = [f"{use} ({_kind(use)})" for use in outside if not use.node]
    waiting = [f"{use} ({_kind(use)})" for use in outside if use.node and use.state not in HUSK_STATES]
    return [
        *([f"not covered, so billed: {texts.some(nodes)}"] if nodes else []),
        *([f"not covered, so billed once ACTIVE: {texts.some(waiting)}"] if waiting else []),
    ]


def _after_end(uses: Sequence[Use], *, is_over: bool) -> str:
    """Return the sentence on what exists after the end of the grant."""
    count = texts.count(len(uses), "node")
    if any(use.node for use in uses):
        # A queued resource costs nothing before its nodes exist.
        count, billed = f"{count} or queued {'resource' if len(uses) == 1 else 'resources'}", "nodes are billed then"
    else:
        billed = "and is billed" if len(uses) == 1 else "and are billed"
        billed = billed if is_over else "and be billed"
    exist = ("exists" if len(uses) == 1 else "exist") if is_over else "would still exist"
    return f"{count} {exist} after the end, {billed}: {texts.some([str(use) for use in uses])}"


def _kind(use: Use) -> str:
    return f"{use.kind}, {tier(spot=use.spot)}, {use.zone}"


def _use(use: Use) -> dict[str, Any]:
    return {"name": use.name, "type": use.kind, "zone": use.zone, "spot": use.spot, "state": use.state}


def _clean_up(settings: Settings, tpu: Tpu, found: Grant, held: Holdings, args: argparse.Namespace) -> int:
    """Delete what the grant had room for, after its end. What was created outside the grant or after its end stays."""
    now = dt.datetime.now(dt.UTC)
    if now < found.ends:
        # cron sends what is printed by mail.
        if args.dry_run or options.can_ask():
            output.info(f"the grant ends on {found.ends:%Y-%m-%d %H:%M} UTC: nothing is deleted before")
        _show_left(args, _plan(held, grant_end.covered(found, held)))
        return ExitCode.OK
    outside = grant_end.outside(found, settings.state_dir)
    covered = grant_end.covered(found, held, outside)
    stay = frozenset(use.name for use in held.uses) - frozenset(covered)
    if not args.dry_run and not stay <= outside:
        grant_end.remember(found, outside | stay, settings.state_dir)
    for use in held.uses:
        if use.name in stay:
            why = "the grant had no room for it" if found.allowed(use) else "it was not created before the grant's end"
            output.warning(f"{use} stays: {why}, and it is billed")
    deletions = _plan(held, covered)
    deleted = _deleted(tpu, deletions, dry_run=args.dry_run)
    _show_left(args, deletions, deleted)
    if held.unlisted or (len(deleted) < len(deletions) and not args.dry_run):
        what = "nodes or queued resources that the grant covered might still exist"
        raise CloudError(what, where="the fleet", fix="see the warnings; then run the same command again")
    return ExitCode.OK


def _plan(held: Holdings, covered: Collection[str]) -> tuple[Deletion, ...]:
    """Return what is deleted: a queued resource is deleted with its last nodes."""
    return deletion.plan(
        [node for node in held.nodes if node.full_name in covered],
        [one for one in held.queued if one.full_name in covered],
        listed=held.nodes,
        queued=held.queued,
    ).deletions


def _deleted(tpu: Tpu, deletions: Sequence[Deletion], *, dry_run: bool) -> list[Deletion]:
    """Delete everything at once, and return what was deleted."""
    if dry_run:
        for one in deletions:
            output.info(f"would delete {one.whole}")
        return []
    progress = options.waiting_for([one.in_words for one in deletions])
    failures = deletion.delete_all(
        tpu, deletions, wait=True, timeout=DELETION_LIMIT, progress=lambda one: progress(one.in_words)
    )
    for one, failure in zip(deletions, failures, strict=True):
        if failure:
            output.warning(str(failure))
        else:
            output.info(f"deleted {one.whole}")
    return [one for one, failure in zip(deletions, failures, strict=True) if not failure]


def _show_left(args: argparse.Namespace, covered: Sequence[Deletion], deleted: Sequence[Deletion] = ()) -> None:
    if args.json:
        left = [one.name for one in covered if one not in deleted]
        output.as_json({"left": left, "deleted": [one.name for one in deleted], "dry_run": args.dry_run})


def _import(settings: Settings, args: argparse.Namespace) -> int:
    """Write grant.yml from the text of an e-mail."""
    file, source = settings.path / grant.FILE, args.file or "-"
    mail = grant_mail.read(_text(source))
    for line in mail.taken:
        output.info(f"took: {line}")
    if mail.unknown:
        one = len(mail.unknown) == 1
        raise UsageError(
            f"{texts.count(len(mail.unknown), 'line')} of the e-mail {'was' if one else 'were'} not understood, so "
            "nothing was written",
            where="standard input" if source == "-" else source,
            fix=f"correct {'this line' if one else 'these lines'} in a file, or delete what states no TPUs, and import "
            "that file",
            details=[f"'{text[:_SHOWN]}' ({why})" for text, why in mail.unknown],
        )
    if not mail.taken:
        raise UsageError(
            "no line of the e-mail states TPUs",
            where="standard input" if source == "-" else source,
            fix=f"paste the whole e-mail; its lines look like `{grant.EXAMPLE}`",
        )
    today = dt.datetime.now(dt.UTC).date()
    ends = _date(args.ends) if args.ends else mail.ends(today)
    if ends is None:
        what = "the e-mail does not say how long the grant lasts"
        raise UsageError(what, where="--ends", fix=f"add its last day: --ends {today + dt.timedelta(days=30)}")
    if grant.end_of(ends) <= dt.datetime.now(dt.UTC):
        output.warning(f"the grant ended already: its last day was {ends}, so nothing will be created")
    if not args.ends and mail.sent is None:
        output.info(f"the e-mail has no date: {mail.days} days are counted from today; --ends sets another last day")
    text = grant_mail.document(mail.taken, ends)
    if file.exists() and not args.replace and not args.dry_run:
        fix = f"--replace overwrites it; or edit it ({shlex.quote(str(file))})"
        raise UsageError("this fleet has a grant already, and it was not changed", where=str(file), fix=fix)
    if not args.dry_run:
        try:
            files.replace(file, text, 0o644)
        except OSError as exc:
            raise files.unwritable(file, exc) from exc
    if args.json:
        output.as_json(
            {
                "file": str(file),
                "written": not args.dry_run,
                "ends": ends.isoformat(),
                "lines": [str(line) for line in mail.taken],
            }
        )
    else:
        output.line(f"{'would write' if args.dry_run else 'wrote'} {file}: the last day is {ends} (UTC)")
    return ExitCode.OK


def _date(text: str) -> dt.date:
    try:
        return dt.date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a date", where="--ends", fix="write it as in 2027-01-31") from None


def _text(source: str) -> str:
    """Return the text of an e-mail, from standard input or a file.

    Raises:
        UsageError: The text cannot be read.
    """
    if source == "-":
        if options.can_ask():
            output.info("paste the whole e-mail, then press Ctrl-D in a line of its own")
        return sys.stdin.read() if sys.stdin else ""
    try:
        return files.read_regular(Path(source), _LARGEST).decode(errors="replace")
    except OSError as exc:
        fix = "name a text file, or - for standard input"
        raise UsageError(f"the e-mail cannot be read: {exc.strerror}", where=source, fix=fix) from exc
