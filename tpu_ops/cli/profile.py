"""`tpu_ops profile`: record profiles of all ranks of a run at the same time."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict
from pathlib import Path

from tpu_ops import config, files, texts
from tpu_ops.cli import interrupts, options, output, progress, runs_output
from tpu_ops.errors import ExitCode
from tpu_ops.fleet import contact, view
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import attempts, profiles, ranks, rsync
from tpu_ops.runs.profiles import Profile

#: Default and maximum length of a profile in seconds. A profile of a minute has some gigabytes.
SECONDS, MOST = 5.0, 60.0
COLUMNS = ("rank", "worker", "size", "file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops profile`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=SECONDS,
        metavar="N",
        help=f"how long (default: {SECONDS:g}; at most {MOST:g})",
    )
    parser.add_argument("--rank", default="all", metavar="all|LIST", help="these ranks (default: all)")
    parser.add_argument(
        "--port", type=_port, metavar="N", help="port of jax.profiler.start_server (default: the ports are tried)"
    )
    parser.add_argument("run", metavar="RUN", help=runs_output.RUN)
    parser.add_argument("directory", nargs="?", metavar="DIR", help="where the files go (default: profiles/RUN)")
    parser.epilog = (
        f"The program has to contain the line {profiles.LINE}, and its environment the package xprof (jax[xprof]). "
        "`tensorboard --logdir DIR` shows the profiles, where xprof is installed."
    )


def _seconds(text: str) -> float:
    value = options.seconds(text)
    if not 0.1 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and {MOST:g} seconds")
    return value


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:9]) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 1 to 65535")
    return int(text)


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Record the profiles, fetch them, and print where they are."""
    ranks.spans(args.rank)
    into = files.resolved(args.directory, "DIR") if args.directory else None
    fleet = view.current(config.load(args.fleet))
    with progress.transfers("fetching") as moved:
        run_id, place, found = asyncio.run(_collect(fleet, args, into, moved))
    with output.read_or_not():
        if args.json:
            output.as_json({"run_id": run_id, "directory": str(place), "profiles": [asdict(one) for one in found]})
        elif any(one.files for one in found):
            output.table([_row(one, place) for one in found if one.files], COLUMNS)
    if any(one.files for one in found):
        output.info(f"to see them: tensorboard --logdir {place}, where the package xprof is installed")
    if failure := profiles.error(run_id, found):
        raise failure
    return ExitCode.OK


async def _collect(
    fleet: Fleet, args: argparse.Namespace, into: Path | None, moved: rsync.Moved | None
) -> tuple[str, Path, list[Profile]]:
    fanout = contact.fanout(fleet)
    run_ = await attempts.the_run(fleet, fanout, args.run, output.info, live=True)
    place = into or files.resolved(f"profiles/{run_.run_id}", "DIR")
    chosen = ranks.parse(args.rank, len(run_.hosts))
    login = fleet.settings.user
    found = await profiles.collect(
        fanout, run_, chosen, place, seconds=args.seconds, port=args.port, login=login, moved=moved
    )
    return run_.run_id, place, found


def _row(one: Profile, place: Path) -> dict[str, object]:
    names = ", ".join(str(Path(name).relative_to(place)) for name in one.files)
    return {"rank": one.rank, "worker": one.host, "size": texts.size(one.size), "file": names}
