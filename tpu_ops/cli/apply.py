"""`tpu_ops apply`: make the nodes of the fleet what nodes.yml declares."""

from __future__ import annotations

import argparse
import datetime as dt
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_ops import config, files, texts
from tpu_ops.ansible import convergence
from tpu_ops.cli import configure, interrupts, keeping, options, output
from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.creation import Terms
from tpu_ops.cloud.names import short_name
from tpu_ops.cloud.operations import Progress
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode, OpsError, UsageError
from tpu_ops.fleet import applying, declared, grant, holdings, origin, plan, targets, unconfigured, view
from tpu_ops.fleet.applying import Planned, Result, Work
from tpu_ops.fleet.declared import Declared
from tpu_ops.fleet.grant import Grant
from tpu_ops.fleet.plan import Action, Step
from tpu_ops.runs import holders, recovery
from tpu_ops.ssh import identities

COLUMNS = ("action", "node", "where", "why")
#: Default seconds between two rounds of --watch, and of a wait for one node.
EVERY, LIMIT = 60, 1800
#: The largest startup script: the API's limit of an entry of the metadata, in bytes.
_LARGEST = 256 * 1024
#: Actions of --watch.
_KEEPING = (Action.CREATE, Action.AGAIN, Action.WAIT, Action.CONFIGURE, Action.LEAVE)
#: What the user does after correcting an error.
_AGAIN = "run `tpu_ops apply` again: it continues from the current state"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops apply`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument(
        "--dry-run", action="store_true", help="show the plan, change nothing, and end with 1 if there is work to do"
    )
    parser.add_argument(
        "--prune", action="store_true", help="also delete nodes and queued resources, and detach disks, not declared"
    )
    parser.add_argument(
        "--recreate", action="store_true", help="also delete and create nodes whose differences cannot be changed"
    )
    parser.add_argument("--no-configure", action="store_true", help="do not run site.yml on new workers")
    parser.add_argument(
        "--until-capacity",
        type=options.duration,
        nargs="?",
        const=math.inf,
        metavar="DURATION",
        help="if no zone has capacity, keep trying for so long, as in 90m or 12h (default: until Ctrl-C)",
    )
    parser.add_argument(
        "--outside-grant", action="store_true", help="create nodes also if grant.yml does not cover them: billed"
    )
    parser.add_argument(
        "--timeout",
        type=options.seconds,
        default=LIMIT,
        metavar="SECONDS",
        help=f"wait at most this long for each node (default: {LIMIT})",
    )
    parser.add_argument(
        "--watch",
        type=options.seconds,
        nargs="?",
        const=EVERY,
        metavar="SECONDS",
        help=f"keep the nodes with `keep: true` without questions; look every so often (default: {EVERY})",
    )
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


def _once(settings: Settings, args: argparse.Namespace) -> int:
    work = _Pass(settings, args, say=output.info, warn=output.warning)
    granted = None if args.outside_grant else holdings.read(settings, work.now)
    with origin.api(settings) as tpu:
        planned = work.plan(tpu, granted)
        todo = [one.step for one in planned.works if one.step.does]
        runs = _runs(settings, todo)
        asks = bool(todo) and not args.yes and not args.dry_run
        if not args.json:
            _show(planned.works)
        elif asks:
            for one in planned.works:
                output.info(_sentence(one.step))
        if refused := applying.refusals(planned.works):
            raise refused
        if args.dry_run or not todo:
            if args.json:
                _as_json(args, planned.works, [])
            elif not planned.works:
                output.line(f"nothing to do: {texts.count(len(work.nodes), 'node')} as declared")
            return ExitCode.FAILED if args.dry_run and todo else ExitCode.OK
        terms = work.terms(todo)
        question = f"{runs}; " * bool(runs) + f"{_in_words(todo)}?"
        if asks and not options.confirmed(question, "changing nodes"):
            output.info("nothing was changed")
            return ExitCode.FAILED
        results = work.carry_out(tpu, planned, terms, options.waiting_for([step.name for step in todo]))
    configured, failures = work.finish(planned, results)
    if args.json:
        _as_json(args, planned.works, results, configured)
    for error in failures[1:]:
        output.warning(str(error))
    if failures:
        raise failures[0]
    return ExitCode.OK


def _declared(settings: Settings) -> tuple[Declared, ...]:
    def content(path: Path) -> str:
        return files.read_regular(path, _LARGEST).decode()

    return declared.read(settings.path / declared.FILE, settings.projects, content)


class _Pass:
    """One pass of the command: reads nodes.yml, plans and carries the plan out.

    Args:
        settings: The settings of the fleet.
        args: The arguments of the command.
        say: Prints a message.
        warn: Prints a warning.
        keep: Whether only nodes with ``keep: true`` are made again.

    Raises:
        UsageError: nodes.yml is missing or has faults.
    """

    def __init__(
        self,
        settings: Settings,
        args: argparse.Namespace,
        *,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        keep: bool = False,
    ) -> None:
        self._settings, self._args, self._say, self._warn, self._keep = settings, args, say, warn, keep
        self.nodes, self.now = _declared(settings), dt.datetime.now(dt.UTC)

    def plan(self, tpu: Tpu, granted: Grant | None) -> Planned:
        """Ask the API once, and return the plan."""
        settings, args = self._settings, self._args
        held = holdings.look(tpu, settings)
        for text in held.warnings:
            self._warn(text)
        terms = plan.Terms(
            args.recreate,
            args.prune,
            recovery.kept_nodes(settings.state_dir),
            () if args.no_configure else unconfigured.read(settings.state_dir),
            settings.zones,
            settings.filters,
        )
        steps = plan.steps(self.nodes, held, terms)
        if self._keep:
            steps = tuple(one for one in steps if one.declared and one.declared.keep and one.action in _KEEPING)
        return applying.planned(tpu, settings, granted, held, steps, now=self.now)

    def terms(self, todo: Sequence[Step]) -> Terms:
        """Return how the nodes of a plan are created."""
        creates = any(step.creates or step.action is Action.WAIT for step in todo)
        keys = identities.ssh_keys(self._settings) if creates else ""
        return Terms(keys, wait=True, timeout=self._args.timeout, patience=self._args.until_capacity)

    def carry_out(self, tpu: Tpu, planned: Planned, terms: Terms, progress: Callable[[str], Progress]) -> list[Result]:
        """Do the steps of a plan, and print the result of each."""
        if not self._args.no_configure:
            new = [work.step.declared.key for work in planned.works if work.step.creates and work.step.declared]
            unconfigured.add(self._settings.state_dir, new)
        results = applying.apply(tpu, planned.works, terms, claims=planned.claims, say=self._say, progress=progress)
        for one in results:
            if not one.error:
                output.info(_done(one))
        return results

    def finish(self, planned: Planned, results: Sequence[Result]) -> tuple[list[str], list[OpsError]]:
        """Learn the host keys of the new nodes, and run site.yml on them.

        Returns:
            The configured workers, and all errors of the pass.
        """
        failures = [work.refusal for work in planned.works if work.refusal]
        failures += [one.error for one in results if one.error]
        names = {one.wish.full_name: one.step for one in results if one.wish and one.outcome not in ("begun", "failed")}
        late = [work.step for work in planned.works if work.step.action is Action.CONFIGURE]
        names |= {step.node.full_name: step for step in late if step.node}
        if not names and not results:
            return [], failures
        try:
            return self._configured(
                {name: step.declared.key for name, step in names.items() if step.declared}
            ), failures
        except OpsError as exc:
            return [], [*failures, exc]

    def _configured(self, keys: Mapping[str, unconfigured.Key]) -> list[str]:
        """Learn the host keys of nodes, and run site.yml on the new ones; return their workers.

        Args:
            keys: Resource name of each node -> its project and name.
        """
        settings = self._settings
        fleet, workers = view.with_host_keys(settings, keys, options.Waiting("new nodes"))
        for text in fleet.warnings:
            self._warn(text)
        listed = {worker.node.full_name for worker in workers}
        if lost := sorted(short_name(name) for name in keys if name not in listed):
            self._warn(f"{texts.some(lost)}: no part of this fleet, so not configured: {targets.FILTERS}, and `zones`")
        pending = unconfigured.read(settings.state_dir)
        new = [worker for worker in workers if keys[worker.node.full_name] in pending]
        if self._args.no_configure or not new:
            return []
        convergence.converge(fleet, new, configure.Progress, then=_AGAIN)
        unconfigured.remove(settings.state_dir, {keys[worker.node.full_name] for worker in new})
        return [worker.host for worker in new]


def _runs(settings: Settings, todo: Sequence[Step]) -> str:
    """Return the active runs on nodes that would be deleted, in words."""
    names = [step.node.full_name for step in todo if step.destroys and step.node]
    if not names:
        return ""
    fleet, _ = view.look(settings)
    runs, silent = holders.active(fleet, names)
    if silent:
        hosts = texts.folded(list(silent))
        output.warning(f"{hosts} cannot tell whether a run is active: {next(iter(silent.values()))}")
    if active := holders.named(runs):
        output.warning(f"{active} on nodes that would be deleted")
    return holders.named(runs)


def _watch(settings: Settings, args: argparse.Namespace) -> int:
    """Keep the nodes with ``keep: true`` until a signal ends the command."""
    if given := [name for name in ("dry_run", "prune", "recreate", "json", "until_capacity") if getattr(args, name)]:
        option = f"--{given[0].replace('_', '-')}"
        raise UsageError("--watch only makes nodes again, and retries by itself", where=option, fix="leave it out")
    kept = [one for one in _declared(settings) if one.keep]
    if not kept:
        where = str(settings.path / declared.FILE)
        raise UsageError("no node has `keep: true`", where=where, fix="add it to the nodes that are to come back")
    output.info(f"keeping {texts.count(len(kept), 'node')}; looking every {args.watch:g} s; Ctrl-C ends this")
    return keeping.watch(lambda told: _round(settings, args, told), args.watch)


def _round(settings: Settings, args: argparse.Namespace, told: keeping.Told) -> bool:
    """Make the kept nodes again once; return whether nothing failed."""
    work = _Pass(settings, args, say=told, warn=told.warning, keep=True)
    granted = None if args.outside_grant else grant.read(settings.path / grant.FILE)
    if granted and (text := granted.warning(work.now)):
        told.warning(text)
    with origin.api(settings) as tpu:
        planned = work.plan(tpu, granted)
        steps = [one.step for one in planned.works]
        for step in steps:
            told(_sentence(step))
        todo = [step for step in steps if step.does]
        if not todo:
            return True
        results = work.carry_out(tpu, planned, work.terms(todo), lambda _: lambda *_: None)
    _, failures = work.finish(planned, results)
    for error in failures:
        told.warning(str(error))
    return not failures


def _show(works: Sequence[Work]) -> None:
    rows = [
        {
            "action": work.step.action
            if work.step.does or work.step.action is Action.LEAVE
            else f"({work.step.action})",
            "node": work.step.name,
            "where": _where(work),
            "why": output.on_fleet("; ".join(work.step.why)),
        }
        for work in works
    ]
    if rows:
        output.table(rows, COLUMNS)


def _sentence(step: Step) -> str:
    return ": ".join(filter(None, [f"node {step.name}", step.action, "; ".join(step.why)]))


def _where(work: Work) -> str:
    """Return the zone of an existing node, or the places of a new one, in words."""
    if work.step.zone and not work.step.creates:
        return work.step.zone
    wishes = work.order.wishes if work.order else ()
    tiers = {wish.spot for wish in wishes}
    places = [wish.zone if len(tiers) == 1 else f"{wish.zone} {grant.tier(spot=wish.spot)}" for wish in wishes]
    kind = f"{wishes[0].accelerator_type} " if wishes else ""
    return (
        f"{kind}{grant.tier(spot=wishes[0].spot) + ' ' if len(tiers) == 1 else ''}{' or '.join(dict.fromkeys(places))}"
    )


def _in_words(todo: Sequence[Step]) -> str:
    """Return the work as a question without its question mark, such as ``create dev; delete a, b``."""
    groups: dict[str, list[str]] = {}
    for step in todo:
        groups.setdefault(step.action, []).append(step.name)
    return "; ".join(f"{action} {texts.some(names)}" for action, names in groups.items())


def _done(one: Result) -> str:
    what = f"requested by a queued resource in {one.wish.zone}" if one.wish and one.outcome == "begun" else one.outcome
    return f"node {one.step.name}: {what}, {one.seconds:.0f} s"


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
