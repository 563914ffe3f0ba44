"""`tpu_ops sync`: copy a directory to all workers of a target, as `tpu_ops train --sync` does."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpu_ops import config, files, texts
from tpu_ops.cli import interrupts, options, output, progress
from tpu_ops.errors import ExitCode, OpsError, UnreachableError
from tpu_ops.fleet import contact
from tpu_ops.runs import preparations, sync, turns
from tpu_ops.ssh.fanout import Fanout

#: For each group of workers, at most this many copied or removed files are named.
_NAMED = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops sync`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("--dry-run", action="store_true", help="compare only; show what would be copied and removed")
    parser.add_argument("--force", action="store_true", help="replace files although a run uses the directory")
    parser.add_argument("target", help="a node, a worker, a node set or a group")
    parser.add_argument(
        "directory", metavar="DIR", help="copy this directory to ~/tpu_ops/<its name>, without files that git ignores"
    )
    parser.epilog = (
        "Files on the workers that no sync has copied are kept; if such a file blocks the path of a file of DIR, this "
        "is an error."
    )


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Copy the files that differ, and remove files that earlier syncs have copied and DIR no longer has."""
    fleet, workers = contact.find(config.load(args.fleet), args.target)
    fleet = contact.serving(fleet, workers)
    hosts = [worker.host for worker in workers]
    if away := contact.out_of_reach(fleet, hosts):
        reason = next(iter(away.values()))
        equal = [host for host, other in away.items() if other == reason]
        raise UnreachableError(reason, where=texts.folded(equal), fix=preparations.way_back(fleet, equal))
    tree = _read(args.directory)
    fanout, begun = contact.fanout(fleet), time.monotonic()
    if args.dry_run:
        seen = asyncio.run(sync.look(fanout, hosts, tree))
    else:
        seen = asyncio.run(_push(fanout, hosts, tree, force=args.force))
    if args.json:
        found = {host: {"copied": list(one.differs), "removed": list(one.stale)} for host, one in seen.items()}
        facts = {"source": str(tree.source), "path": f"~/{tree.cwd}", "files": len(tree.files)}
        output.as_json(facts | {"code_digest": tree.digest, "dry_run": args.dry_run, "workers": found})
    else:
        _show(seen, dry=args.dry_run)
        said(tree, hosts, time.monotonic() - begun, dry=args.dry_run)
    return ExitCode.OK


async def _push(fanout: Fanout, hosts: Sequence[str], tree: sync.Tree, *, force: bool) -> dict[str, sync.Seen]:
    async with turns.alone(fanout, hosts, tree.name, force=force) as turn:
        with progress.transfers("syncing") as moved:
            return await sync.push(fanout, hosts, tree, turn, moved)


def _read(directory: str) -> sync.Tree:
    """List the files of a directory with their digests.

    Raises:
        OpsError: The directory cannot be copied. The error names the argument DIR instead of the option --sync.
    """
    try:
        return sync.read(files.resolved(directory, "DIR"))
    except OpsError as failure:
        failure.where = re.sub(r"^--sync\b", "DIR", failure.where)
        raise


def warn_of_scripts(command: Sequence[str], user: str, tree: sync.Tree | None) -> None:
    """Warn if a command names a script that exists on this machine, but not in the directory where the command starts.

    Args:
        command: The words of the command.
        user: The user that runs the command on the workers; empty for the person who starts it.
        tree: The copied directory, in which the command starts; None if the command starts in the home directory.
    """
    for word in command:
        is_script = word.endswith((".py", ".sh")) or (word == command[0] and "/" in word)
        # `os.path.isfile` accepts words that are too long for a file name, such as a whole shell program.
        if not is_script or Path(word).is_absolute() or not os.path.isfile(word):  # noqa: PTH113
            continue
        if tree is None:
            home = f"the home of {user}" if user else "your home"
            fix = "" if user or ".." in Path(word).parts else "; `--sync .` copies this directory and starts there"
            start = f"without --sync or --git the command starts in {home} on the workers"
            output.warning(f"{word} is not copied: {start}{fix}")
        elif not (tree.source / word).exists():
            inside = Path(word).resolve()
            fix = f": name it {inside.relative_to(tree.source)}" if inside.is_relative_to(tree.source) else ""
            output.warning(f"{word} is not in {tree.source}, in whose copy the command starts{fix}")
        return


def said(tree: sync.Tree, hosts: Sequence[str], seconds: float, *, dry: bool = False) -> None:
    """Print which directory was copied to where."""
    what = f"{'would sync' if dry else 'synced'} {tree.source} to ~/{tree.cwd} on {texts.count(len(hosts), 'worker')}"
    output.info(f"{what}: {texts.count(len(tree.files), 'file')}, digest {tree.digest}, {seconds:.1f} s")


def _show(seen: Mapping[str, sync.Seen], *, dry: bool) -> None:
    groups: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for host, one in seen.items():
        groups.setdefault((one.differs, one.stale), []).append(host)
    for (differs, stale), hosts in groups.items():
        for verb, entries in (("to copy" if dry else "copied", differs), ("to remove" if dry else "removed", stale)):
            if entries:
                output.line(f"{texts.folded(hosts)}: {verb}: {texts.some(entries, _NAMED)}")
        if not differs and not stale:
            output.line(f"{texts.folded(hosts)}: nothing differs")
