"""`tpu_ops sync`: the same directory on all workers of a target, as `train --sync` brings it."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpu_ops import config, files, texts
from tpu_ops.cli import interrupts, options, output
from tpu_ops.errors import ExitCode, OpsError, UnreachableError
from tpu_ops.fleet import contact
from tpu_ops.runs import sync, turns
from tpu_ops.ssh.fanout import Fanout

#: Entries that are named of each group of workers.
_NAMED = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops sync`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("--dry-run", action="store_true", help="compare only; show what would be copied and removed")
    parser.add_argument("--force", action="store_true", help="replace files although a run uses the directory")
    parser.add_argument("target", help="a node, a worker, a node set or a group")
    parser.add_argument("directory", metavar="DIR", help="copied to ~/tpu_ops/<its name>, without what git ignores")
    parser.epilog = (
        "Files on the workers that no sync has put there are left alone; one in the way of a file of DIR is an error."
    )


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Compare, bring what differs, remove what earlier syncs have brought and DIR no longer has."""
    fleet, workers = contact.find(config.load(args.fleet), args.target)
    fleet = contact.serving(fleet, workers)
    hosts = [worker.host for worker in workers]
    if away := contact.out_of_reach(fleet, hosts):
        reason = next(iter(away.values()))
        equal = [host for host, other in away.items() if other == reason]
        raise UnreachableError(reason, where=texts.folded(equal), fix=contact.way_back(fleet, equal))
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
        return await sync.push(fanout, hosts, tree, turn)


def _read(directory: str) -> sync.Tree:
    """List and digest a directory.

    Raises:
        OpsError: It cannot be brought; where it says so, the directory is named as this command has it.
    """
    try:
        return sync.read(files.resolved(directory, "DIR"))
    except OpsError as failure:
        failure.where = re.sub(r"^--sync\b", "DIR", failure.where)
        raise


def warn_of_scripts(command: Sequence[str], user: str, tree: sync.Tree | None) -> None:
    """Warn of a script that is here, which a command may have meant, and is not where the command starts.

    Args:
        command: The words.
        user: Who is to run it, empty for the person.
        tree: What is copied and where the command starts, None where that is the home.
    """
    for word in command:
        is_script = word.endswith((".py", ".sh")) or (word == command[0] and "/" in word)
        # A word may be a whole program of a shell, too long for the name of a file.
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
    """Say what was brought where."""
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
