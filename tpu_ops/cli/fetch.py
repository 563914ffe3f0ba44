"""`tpu_ops fetch`: copy files of a run, or of workers, to this machine."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

from tpu_ops import config, files
from tpu_ops.cli import interrupts, options, output, progress
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import contact, view
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import attempts, control, ranks, results, rsync
from tpu_ops.runs.results import Source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops fetch`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument(
        "--rank",
        default="0",
        metavar="all|LIST",
        help="from these ranks, or workers of TARGET (default: 0); of several, each has a directory of its own in DIR",
    )
    parser.add_argument("source", metavar="RUN|TARGET", help="a run, or a node or worker")
    parser.add_argument("path", metavar="PATH", help="a file or directory there")
    parser.add_argument("directory", metavar="DIR", help="where it goes; created if it does not exist")
    parser.epilog = (
        "PATH starts in the directory of the run, as its user; on a TARGET, in your home. What has been copied before "
        "and did not change is not copied again, and an interrupted copy is continued."
    )


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Copy the path from the ranks."""
    if not args.path:
        raise UsageError("the path is empty", where="PATH", fix="name a file or directory, as in checkpoints")
    fleet = view.current(config.load(args.fleet))
    into = files.resolved(args.directory, "DIR")
    with progress.transfers("fetching") as moved:
        found = asyncio.run(_fetch(fleet, args, into, moved))
    failed = [one for one in found if one.problem]
    with output.read_or_not():
        if args.json:
            output.as_json(
                [
                    {
                        "worker": one.source.host,
                        "directory": str(one.source.into),
                        "copied": one.count,
                        "bytes": one.size,
                        "problem": one.problem,
                    }
                    for one in found
                ]
            )
        else:
            for one in found:
                if not one.problem:
                    output.line(one.words(args.path))
    for one in failed[1:]:
        output.warning(f"{one.source.host}: {one.problem}")
    if failed:
        # A worker that was not reached decides the exit code and the advice.
        worst = next((one for one in failed if not one.reached), failed[0])
        raise replace(failed[0], reached=worst.reached).error(args.path)
    return ExitCode.OK


async def _fetch(
    fleet: Fleet, args: argparse.Namespace, into: Path, moved: rsync.Moved | None
) -> list[results.Fetched]:
    fanout = contact.fanout(fleet)
    if control.is_target(fleet, args.source):
        fleet, workers = contact.find(fleet.settings, args.source)
        hosts = [worker.host for worker in workers]
        chosen = ranks.parse(args.rank, len(hosts))
        sources = [Source(hosts[index], into / hosts[index] if len(chosen) > 1 else into) for index in chosen]
        return await results.fetch(fanout, sources, args.path, moved)
    run_ = await attempts.the_run(fleet, fanout, args.source, output.info, live=False)
    chosen = ranks.parse(args.rank, len(run_.hosts))
    return await results.of_run(fanout, run_, args.path, chosen, into, login=fleet.settings.user, moved=moved)
