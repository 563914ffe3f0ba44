"""`tpu_ops who`: show which person, run and process hold which chips, and since when; also processes without a run."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from tpu_ops import config, texts
from tpu_ops.cli import faults, options, output
from tpu_ops.cloud.node import label_of
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import contact
from tpu_ops.runs import holders, outcomes, preparations, usage, usage_lines
from tpu_ops.runs.holders import Holder
from tpu_ops.runs.usage import Row
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.replies import Reply

COLUMNS = ("worker", "person", "run", "since", "pid", "command")
#: The same, with what the chips do.
WITH_USE = (*COLUMNS[:-1], "use", "command")
_LONGEST_COMMAND = 60
#: For --watch: default seconds between two refreshes, and seconds to wait for the workers' answers.
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
    parser.add_argument("target", nargs="?", help="a node, a worker, a node set or a group (default: all READY nodes)")


def run(args: argparse.Namespace) -> int:
    """Ask the workers who holds their chips, and print the answers."""
    if args.watch and args.json:
        raise UsageError(
            "--watch cannot print JSON", where="--watch and --json", fix="leave out one of the two options"
        )
    settings = config.load(args.fleet)
    fleet, workers = contact.chosen(settings, args.target)
    hosts = [worker.host for worker in workers]
    if args.watch:
        try:
            asyncio.run(_watch(contact.fanout(fleet), hosts, args.watch))
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
    replies = usage.of_fleet(fleet, hosts)
    seen, chips = holders.seen_in(replies), _chips(replies)
    problem = preparations.problem_of(seen.silent, settings.state_dir)
    if args.json and (seen.chips or not problem):
        found = {"holders": [asdict(holder) for holder in seen.holders], "chips": dict(seen.chips)}
        found["use"] = [asdict(row) for row in chips]
        output.as_json(found | {"faults": faults.of_silent(seen.silent)})
    elif seen.holders and not args.json:
        output.table(rows(seen.holders, chips), WITH_USE)
    if not args.json and (free := _free(seen)):
        output.info(f"free: {texts.folded(free)}")
    if not hosts and not args.json:
        output.info("no worker is READY: `tpu_ops list` shows the nodes")
    if problem:
        raise problem
    return ExitCode.OK


def _chips(replies: Mapping[str, Reply]) -> list[Row]:
    """Return what the chips do, given the workers' replies."""
    now = time.time()
    uses = [usage.of_reply(label_of(host), reply, now) for host, reply in replies.items() if reply.ok]
    return [row for use in uses for row in use.rows]


def _free(seen: holders.Seen) -> list[str]:
    held = {holder.host for holder in seen.holders}
    return [host for host in seen.chips if host not in held]


async def _watch(fanout: Fanout, hosts: Sequence[str], every: float) -> None:
    """Show who holds which chips, and replace the table every few seconds until this task is cancelled."""
    while True:
        replies = await usage.ask(fanout, hosts, limit=PATIENCE)
        seen = holders.seen_in(replies)
        output.clear()
        output.line(f"{output.at(time.time())}, every {every:g} s; Ctrl-C quits")
        if seen.holders:
            output.table(rows(seen.holders, _chips(replies)), WITH_USE)
        if free := _free(seen):
            output.line(f"free: {texts.folded(free)}")
        for reply in seen.silent:
            output.line(f"silent: {reply.host}: {output.on_fleet(reply.problem)}")
        await asyncio.sleep(every)


def rows(found: Iterable[Holder], chips: Iterable[Row] = ()) -> list[dict[str, object]]:
    """Return holders as rows of a table: one row for each run, and one for each process without a run.

    Args:
        found: The holders.
        chips: What the chips do, by the workers' answers.
    """
    of_run: dict[tuple[str, str], list[Row]] = {}
    of_process: dict[tuple[str, int], list[Row]] = {}
    for row in chips:
        of_run.setdefault((row.run, row.worker), []).append(row)
        of_process.setdefault((row.worker, row.pid), []).append(row)
    # Runs of two people may have the same id, on different nodes.
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
                "person": outcomes.person(user, asker),
                "run": run_id,
                "since": output.at(min(holder.since for holder in members)),
                "pid": _pids([holder.pid for holder in members if holder.pid]),
                "use": usage_lines.use_words([row for host in hosts for row in of_run.get((run_id, host), ())]),
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
            "use": usage_lines.use_words(of_process.get((holder.host, holder.pid), ())),
            "command": holder.command[:_LONGEST_COMMAND],
        }
        for holder in strays
    ]
    return table


def _pids(pids: Sequence[int]) -> str:
    """Return the first process id, and the number of further ones, such as "4711 +3"; empty if there is none."""
    return f"{pids[0]} +{len(pids) - 1}" if len(pids) > 1 else "".join(map(str, pids))
