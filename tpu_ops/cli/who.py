"""`tpu_ops who`: who holds which TPU: person, run, process, since when; also processes that no run owns."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from tpu_ops import config, texts
from tpu_ops.cli import faults, options, output, runs_output
from tpu_ops.cloud.node import SERVING_STATES
from tpu_ops.errors import ExitCode, OpsError, UsageError
from tpu_ops.fleet import contact, view
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import control, holders, preparations
from tpu_ops.runs.holders import Holder
from tpu_ops.ssh.fanout import Fanout

COLUMNS = ("worker", "person", "run", "since", "pid", "command")
_LONGEST_COMMAND = 60
#: Seconds between two looks with --watch, and for a worker to answer one.
EVERY, PATIENCE = 2.0, 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops who`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument(
        "--watch",
        type=options.seconds,
        nargs="?",
        const=EVERY,
        metavar="SECONDS",
        help=f"refresh every SECONDS until Ctrl-C ({EVERY:g} if left out)",
    )
    parser.add_argument("target", nargs="?", help="a node, a worker, a node set or a group (default: all READY ones)")


def run(args: argparse.Namespace) -> int:
    """Ask the workers and show what they say."""
    if args.watch and args.json:
        raise UsageError("--watch cannot print JSON", where="--watch and --json", fix="leave out one of the two")
    settings = config.load(args.fleet)
    if args.target:
        fleet, workers = contact.find(settings, args.target)
        fleet = contact.serving(fleet, workers)
    else:
        fleet = view.current(settings)
        workers = [worker for worker in fleet.workers if worker.node.state in SERVING_STATES]
    hosts = [worker.host for worker in workers]
    if args.watch:
        try:
            asyncio.run(_watch(contact.fanout(fleet), hosts, args.watch))
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
    seen = look(fleet, hosts)
    problem = preparations.problem_of(seen.silent, settings.state_dir)
    if args.json and (seen.chips or not problem):
        found = {"holders": [asdict(holder) for holder in seen.holders], "chips": dict(seen.chips)}
        output.as_json(found | {"faults": faults.of_silent(seen.silent)})
    elif seen.holders and not args.json:
        output.table(rows(seen.holders), COLUMNS)
    if not args.json and (free := _free(seen)):
        output.info(f"free: {texts.folded(free)}")
    if not hosts and not args.json:
        output.info("no worker is READY: `tpu_ops list` shows the nodes")
    if problem:
        raise problem
    return ExitCode.OK


def look(fleet: Fleet, hosts: Sequence[str], *, limit: float = control.LIMIT) -> holders.Seen:
    """Ask workers who holds their chips; of those that are known to be out of reach none is tried: they are silent."""
    away, fanout = contact.away(fleet, hosts), contact.fanout(fleet)
    seen = asyncio.run(holders.look(fanout, [host for host in hosts if host not in away], limit=limit))
    return replace(seen, silent=(*away.values(), *contact.with_hint(fleet.settings, seen.silent)))


def active(fleet: Fleet, names: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Ask the workers of some nodes for the runs that they are held by; each has a short time to answer.

    Args:
        fleet: The fleet.
        names: Resource names of the nodes.

    Returns:
        The person of each run, by its id, and why a worker cannot tell, by worker.
    """
    hosts = [worker.host for worker in fleet.workers if worker.node.full_name in names]
    try:
        seen = look(fleet, hosts, limit=control.SHORT_LIMIT)
    except OpsError as exc:
        return {}, dict.fromkeys(hosts, str(exc))
    runs = {holder.run: runs_output.person(holder.user, holder.asker) for holder in seen.holders if holder.run}
    # Where there is no launcher there is no run.
    return runs, {reply.host: reply.problem for reply in seen.silent if reply.kind != "no-launcher"}


def named(runs: Mapping[str, str]) -> str:
    """Return runs, given with their people, as the subject and verb of a sentence; empty where there are none."""
    subject = " and ".join(f"run {run_id} of {person}" for run_id, person in runs.items())
    return f"{subject} {'is' if len(runs) == 1 else 'are'} active" if runs else ""


def _free(seen: holders.Seen) -> list[str]:
    held = {holder.host for holder in seen.holders}
    return [host for host in seen.chips if host not in held]


async def _watch(fanout: Fanout, hosts: Sequence[str], every: float) -> None:
    """Show who holds what, in the place of what was shown before, until it is cancelled."""
    while True:
        seen = await holders.look(fanout, hosts, limit=PATIENCE)
        output.clear()
        output.line(f"{output.at(time.time())}, every {every:g} s; Ctrl-C quits")
        if seen.holders:
            output.table(rows(seen.holders), COLUMNS)
        if free := _free(seen):
            output.line(f"free: {texts.folded(free)}")
        for reply in seen.silent:
            output.line(f"silent: {reply.host}: {output.on_fleet(reply.problem)}")
        await asyncio.sleep(every)


def rows(found: Iterable[Holder]) -> list[dict[str, object]]:
    """Return holders as rows of a table; a run stands once for all its workers, any other process by itself."""
    # Two people may have a run of one name, each on nodes of their own.
    runs: dict[tuple[str, str, str], list[Holder]] = {}
    strays = []
    for holder in found:
        if holder.run:
            runs.setdefault((holder.run, holder.user, holder.asker), []).append(holder)
        else:
            strays.append(holder)
    table: list[dict[str, object]] = []
    for (run_id, user, asker), members in runs.items():
        hosts = list(dict.fromkeys(holder.host for holder in members))
        table.append(
            {
                "worker": texts.folded(hosts),
                "person": runs_output.person(user, asker),
                "run": run_id,
                "since": output.at(min(holder.since for holder in members)),
                "pid": _pids([holder.pid for holder in members if holder.pid]),
                "command": next((holder.command for holder in members if holder.command), "")[:_LONGEST_COMMAND],
            }
        )
    table += [
        {
            "worker": holder.host,
            "person": holder.user,
            "run": "none",
            "since": output.at(holder.since),
            "pid": holder.pid,
            "command": holder.command[:_LONGEST_COMMAND],
        }
        for holder in strays
    ]
    return table


def _pids(pids: Sequence[int]) -> str:
    """Return the first of some processes, on the first worker, and how many more there are."""
    return f"{pids[0]} +{len(pids) - 1}" if len(pids) > 1 else "".join(map(str, pids))
