"""`tpu_ops apply`: make the nodes of the fleet what nodes.yml declares."""

from __future__ import annotations

import argparse
import datetime as dt
import math
from collections.abc import Callable, Sequence
from typing import Any

from tpu_ops import config, texts
from tpu_ops.cli import configure, interrupts, keeping, options, output
from tpu_ops.cloud.node import tier
from tpu_ops.cloud.operations import Progress
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import applying, declared, grant, holdings, origin, view
from tpu_ops.fleet.applying import Result, Work
from tpu_ops.fleet.plan import Action, Step
from tpu_ops.runs import declared_nodes, holders
from tpu_ops.runs.declared_nodes import Choices, Pass

COLUMNS = ("action", "node", "where", "why")
#: Default seconds between two rounds of --watch, and of a wait for one node.
EVERY, LIMIT = 60, 1800


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops apply`."""
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument(
        "--dry-run", action="store_true", help="show the plan, change nothing, and end with 1 if there is work to do"
    )
    may = parser.add_argument_group("what else it may do, or leaves out")
    may.add_argument(
        "--prune", action="store_true", help="also delete nodes and queued resources, and detach disks, not declared"
    )
    may.add_argument(
        "--recreate", action="store_true", help="also delete and create nodes whose differences cannot be changed"
    )
    may.add_argument("--no-configure", action="store_true", help="do not run site.yml on new workers")
    may.add_argument(
        "--until-capacity",
        type=options.duration,
        nargs="?",
        const=math.inf,
        metavar="DURATION",
        help="if no zone has capacity, keep trying for so long, as in 90m or 12h (default: until Ctrl-C)",
    )
    may.add_argument(
        "--outside-grant", action="store_true", help="create nodes also if grant.yml does not cover them: billed"
    )
    waits = parser.add_argument_group("waiting, output and fleet")
    waits.add_argument(
        "--timeout",
        type=options.seconds,
        default=LIMIT,
        metavar="SECONDS",
        help=f"wait at most this long for each node (default: {LIMIT})",
    )
    waits.add_argument(
        "--watch",
        type=options.seconds,
        nargs="?",
        const=EVERY,
        metavar="SECONDS",
        help=f"keep the nodes with `keep: true` without questions; look every so often (default: {EVERY})",
    )
    options.add_json(waits)
    options.add_fleet(waits)
    parser.epilog = (
        "nodes.yml is beside the fleet's site.yml; docs/nodes.md describes it. Only --prune and --recreate delete "
        "nodes that exist; what is left of a preempted node is deleted before the node is made again."
    )


def run(args: argparse.Namespace) -> int:
    """Show the plan, ask, and carry it out."""
    settings = config.load(args.fleet)
    if args.watch is not None:
        return _watch(settings, args)
    with interrupts.ended_by_signals():
        return _once(settings, args)


class _Screen:
    """Shows what one pass of apply does."""

    display = configure.Progress

    def say(self, text: str) -> None:
        """Print a message."""
        output.info(text)

    def done(self, result: Result) -> None:
        """Print the result of a step."""
        what = result.outcome
        if result.wish and what == "begun":
            what = f"requested by a queued resource in {result.wish.zone}"
        output.info(f"node {result.step.name}: {what}, {result.seconds:.0f} s")

    def warn(self, text: str) -> None:
        """Print a warning."""
        output.warning(text)

    def progress(self, names: Sequence[str]) -> Callable[[str], Progress]:
        """Return what prints the progress of nodes."""
        return options.waiting_for(names)

    def waiting(self, what: str) -> Progress:
        """Return what prints the progress of a wait."""
        return options.Waiting(what)


class _QuietScreen(_Screen):
    """Shows what the rounds of --watch do: each message once, and no progress."""

    def __init__(self, told: keeping.Told) -> None:
        self._told = told

    def say(self, text: str) -> None:
        """Print a message once."""
        self._told(text)

    def warn(self, text: str) -> None:
        """Print a warning once."""
        self._told.warning(text)

    def progress(self, names: Sequence[str]) -> Callable[[str], Progress]:
        """Return what prints nothing."""
        return lambda _: lambda *_: None


def _choices(args: argparse.Namespace, *, keep: bool = False) -> Choices:
    return Choices(args.recreate, args.prune, not args.no_configure, args.timeout, args.until_capacity, keep)


def _once(settings: Settings, args: argparse.Namespace) -> int:
    nodes, now = declared_nodes.read(settings), dt.datetime.now(dt.UTC)
    granted = None if args.outside_grant else holdings.read(settings, now)
    work = Pass(settings, _choices(args), _Screen())
    with origin.api(settings) as tpu:
        planned = work.plan(tpu, nodes, granted, now)
        todo = [one.step for one in planned.works if one.step.does]
        asks = bool(todo) and not args.yes and not args.dry_run
        runs = _runs(settings, todo, warn=not asks)
        _show(args, planned.works, asks=asks)
        if refused := applying.refusals(planned.works):
            raise refused
        if args.dry_run or not todo:
            if args.json:
                _as_json(args, planned.works, [])
            elif not todo:
                as_declared = "" if planned.works else f": {texts.count(len(nodes), 'node')} as declared"
                output.line(f"nothing to do{as_declared}")
            return ExitCode.FAILED if args.dry_run and todo else ExitCode.OK
        terms = work.terms(todo)
        if asks and not options.confirmed(f"{runs}; " * bool(runs) + f"{_in_words(todo)}?", "changing nodes"):
            output.info("nothing was changed")
            return ExitCode.FAILED
        results = work.carry_out(tpu, planned, terms)
    configured, failures = work.finish(planned, results)
    if args.json:
        _as_json(args, planned.works, results, configured)
    for error in failures[1:]:
        output.warning(str(error))
    if failures:
        raise failures[0]
    return ExitCode.OK


def _runs(settings: Settings, todo: Sequence[Step], *, warn: bool) -> str:
    """Return the active runs on nodes that would be deleted, in words; with ``warn``, print them as a warning, too."""
    names = [name for step in todo if step.destroys for name in step.deleted_nodes]
    if not names:
        return ""
    fleet, _ = view.look(settings)
    runs, silent = holders.active(fleet, names)
    if silent:
        hosts = texts.folded(list(silent))
        output.warning(f"{hosts} cannot tell whether a run is active: {next(iter(silent.values()))}")
    active = holders.named(runs)
    if active and warn:
        output.warning(f"{active} on nodes that are not to stay")
    return active


def _watch(settings: Settings, args: argparse.Namespace) -> int:
    """Keep the nodes with ``keep: true`` until a signal ends the command."""
    if given := [name for name in ("dry_run", "prune", "recreate", "json", "until_capacity") if getattr(args, name)]:
        option = f"--{given[0].replace('_', '-')}"
        raise UsageError("--watch only makes nodes again, and retries by itself", where=option, fix="leave it out")
    kept = [one for one in declared_nodes.read(settings) if one.keep]
    if not kept:
        where = str(settings.path / declared.FILE)
        raise UsageError("no node has `keep: true`", where=where, fix="add it to the nodes that are to come back")
    output.info(f"keeping {texts.count(len(kept), 'node')}; looking every {args.watch:g} s; Ctrl-C ends this")
    return keeping.watch(lambda told: _round(settings, args, told), args.watch)


def _round(settings: Settings, args: argparse.Namespace, told: keeping.Told) -> bool:
    """Make the kept nodes again once; return whether nothing failed."""
    nodes, now = declared_nodes.read(settings), dt.datetime.now(dt.UTC)
    granted = None if args.outside_grant else grant.read(settings.path / grant.FILE)
    if granted and (text := granted.warning(now)):
        told.warning(text)
    work = Pass(settings, _choices(args, keep=True), _QuietScreen(told))
    with origin.api(settings) as tpu:
        planned = work.plan(tpu, nodes, granted, now)
        steps = [one.step for one in planned.works]
        for step in steps:
            told(_sentence(step))
        todo = [step for step in steps if step.does]
        if not todo:
            return True
        results = work.carry_out(tpu, planned, work.terms(todo))
    _, failures = work.finish(planned, results)
    for error in failures:
        told.warning(str(error))
    return not failures


def _show(args: argparse.Namespace, works: Sequence[Work], *, asks: bool) -> None:
    """Print the plan as a table; with --json, as messages if the user is asked."""
    if args.json:
        for work in works if asks else ():
            output.info(_sentence(work.step))
        return
    rows = []
    for work in works:
        action = work.step.action
        is_done = work.step.does or action is Action.LEAVE
        why = output.on_fleet("; ".join(work.step.why))
        where = _where(work)
        rows.append(
            {"action": action if is_done else f"({action})", "node": work.step.name, "where": where, "why": why}
        )
    if rows:
        output.table(rows, COLUMNS)


def _sentence(step: Step) -> str:
    return ": ".join(filter(None, [f"node {step.name}", step.action, "; ".join(step.why)]))


def _where(work: Work) -> str:
    """Return the zone of an existing node, or type and places of a new one, in words."""
    if work.step.zone and not work.step.creates:
        return work.step.zone
    places = [f"{wish.zone} {tier(spot=wish.spot)}" for wish in (work.order.wishes if work.order else ())]
    kind = work.step.declared.wish.accelerator_type if work.step.declared else ""
    return f"{kind} {' or '.join(places)}".strip()


def _in_words(todo: Sequence[Step]) -> str:
    """Return the work as a question without its question mark, such as ``create dev; delete a, b``."""
    groups: dict[str, list[str]] = {}
    for step in todo:
        groups.setdefault(step.action, []).append(step.name)
    return "; ".join(f"{action} {texts.some(names)}" for action, names in groups.items())


def _as_json(
    args: argparse.Namespace, works: Sequence[Work], results: Sequence[Result], configured: Sequence[str] = ()
) -> None:
    done = {id(one.step): one for one in results}
    output.as_json(
        {
            "dry_run": args.dry_run,
            "configured": list(configured),
            "steps": [_row(work, done.get(id(work.step))) for work in works],
        }
    )


def _row(work: Work, result: Result | None) -> dict[str, Any]:
    step = work.step
    row: dict[str, Any] = {
        "node": step.name,
        "project": step.project,
        "zone": (result.wish.zone if result and result.wish else "") or step.zone,
        "action": str(step.action),
        "why": list(step.why),
        "does": step.does,
        "outcome": result.outcome if result else "",
    }
    error = result.error if result and result.error else work.refusal
    return row | ({"error": error.to_json()["error"]} if error else {})
