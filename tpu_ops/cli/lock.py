"""`tpu_ops lock`: resolve the packages that the workers' environments list, once for the whole fleet."""

from __future__ import annotations

import argparse

from tpu_ops import config, texts
from tpu_ops.ansible import locks
from tpu_ops.ansible.failures import fix_of
from tpu_ops.ansible.locks import Lock
from tpu_ops.cli import interrupts, options, output
from tpu_ops.cli.configure import Progress
from tpu_ops.errors import ExitCode, UnreachableError
from tpu_ops.fleet import view
from tpu_ops.runs import preparations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops lock`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("--upgrade", action="store_true", help="use the newest versions that the lists allow")
    parser.epilog = (
        "Writes inventory/locks/ENVIRONMENT-PYTHON-MACHINE.txt, for each list, Python and processor architecture that "
        "the workers have. `tpu_ops configure` then installs exactly these packages (docs/environments.md). Without "
        "--upgrade, versions in these files stay where the lists allow them."
    )


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Resolve the lists, write the locks, and print what changed."""
    settings = config.load(args.fleet)
    uv, progress = locks.find_uv(), Progress()
    fleet, _ = view.newest(settings)
    away = locks.away(fleet)
    states = texts.some([f"{label} is {state}" for label, state in {one.label: one.node.state for one in away}.items()])
    if away and len(away) == len(fleet.workers):
        fix = preparations.way_back(fleet, [worker.host for worker in away])
        what = f"no worker can be asked for its lists, and all locks stay: {states}"
        raise UnreachableError(what, where=texts.folded([worker.host for worker in away]), fix=fix)
    if away:
        output.warning(f"{states}: the lists there were not read, and their locks stay")
    outcome = locks.listed(settings, progress, away)
    progress.failures(outcome.failures)
    if fix := fix_of(outcome, settings.file, "the fleet", settings):
        output.info(f"  fix: {fix}")
        return ExitCode.FAILED
    lists = locks.lists_of(outcome)
    directory = settings.file.parent / locks.DIRECTORY
    planned = locks.planned(directory, lists, whole=not away)
    for path in locks.others(directory, planned) if away else ():
        output.info(f"{path} stays")
    done = [locks.resolved(lock, uv, upgrade=args.upgrade) for lock in planned]
    locks.write(done)
    with output.read_or_not():
        if args.json:
            output.as_json([row(lock) for lock in done])
        else:
            for lock in done:
                show(lock)
    if not done:
        own = "a lock file of its own (jax_lock, or `lock` in python_environments)"
        output.info(f"no lock was written: each environment has {own}, or lists nothing")
    elif any(lock.changes for lock in done):
        output.info("`tpu_ops configure` installs this; keep the files with the fleet's other files, as in git")
    return ExitCode.OK


def row(lock: Lock) -> dict[str, object]:
    """Return a lock for --json."""
    return {
        "file": str(lock.path),
        "environment": lock.wanted.name,
        "python": lock.wanted.python_version,
        "machine": lock.wanted.machine,
        "workers": list(lock.workers),
        "packages": lock.packages,
        "changes": lock.changes,
    }


def show(lock: Lock) -> None:
    """Print a lock and its changes."""
    what = f"{texts.count(len(lock.packages), 'package')} for {texts.folded(lock.workers)}"
    output.line(f"{lock.path}: {what}{'' if lock.changes else ', no change'}")
    for line in lock.changes:
        output.line(f"  {line}")
