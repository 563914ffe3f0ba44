"""`tpu_ops drift`: say which workers differ from what site.yml would make of them, and in what."""

from __future__ import annotations

import argparse

from tpu_ops import config, texts
from tpu_ops.ansible import drift, playbook
from tpu_ops.ansible.drift import Drift
from tpu_ops.ansible.failures import fix_of
from tpu_ops.ansible.playbook import Step
from tpu_ops.cli import interrupts, options, output
from tpu_ops.cli.configure import Progress, add_on_workers, check_tags, hosts_of, shortened
from tpu_ops.cli.progress import Tasks, shown
from tpu_ops.cli.terminal import Meaning
from tpu_ops.errors import ExitCode

#: At most this many lines of one task are printed, each of at most this many characters. --json has all.
_LINES, _LONGEST = 10, 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops drift`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument(
        "--tags", default="", metavar="TAG,...", help="compare only with these roles, as in --tags users,python"
    )
    add_on_workers(parser)
    parser.add_argument("target", nargs="?", help="a node, a worker, a node set or a group (default: the whole fleet)")
    parser.epilog = (
        "Changes nothing: it runs site.yml in check mode. Exits with 1 if a worker differs, with 4 if one does "
        "not answer. `tpu_ops configure --drifted` configures the workers that differ."
    )


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Compare the workers and print the differences."""
    settings = config.load(args.fleet)
    project = playbook.project_of(settings.path, settings.file)
    file = project.playbook("site")
    hosts = hosts_of(settings, args.target)
    check_tags(project, file, {"--tags": args.tags} if args.tags else {})
    progress, given = Progress(), [f"--tags={args.tags}"] if args.tags else []
    tasks = Tasks("comparing")
    with shown(tasks.text, told=True):
        found = drift.look(settings, hosts, given, said=progress, at=tasks.at, on_themselves=args.on_workers)
    with output.read_or_not():
        if args.json:
            output.as_json(as_data(found))
        else:
            show(found)
    progress.failures(found.outcome.failures)
    if fix := fix_of(found.outcome, file, args.target or "the fleet", settings):
        output.info(f"  fix: {fix}")
        return ExitCode.FAILED
    return ExitCode.FAILED if found.differences else ExitCode.OK


def as_data(found: Drift) -> dict[str, object]:
    """Return the differences for --json."""
    return {
        "clean": found.clean,
        "unknown": found.unknown,
        "differences": [
            {"host": host, "role": step.role, "task": step.task, "changes": list(step.changes)}
            for host, steps in found.differences.items()
            for step in steps
        ],
    }


def show(found: Drift) -> None:
    """Print each task that would change something, with the workers on which it would change the same."""
    groups: dict[Step, list[str]] = {}
    for host, steps in found.differences.items():
        for step in steps:
            same = Step(step.task, step.role, "", step.outcome, changes=step.changes)
            groups.setdefault(same, []).append(host)
    for step, hosts in groups.items():
        output.line(f"{texts.folded(hosts)}: {step.title}", Meaning.CHANGED)
        for text in shortened(step.changes, _LINES, _LONGEST):
            output.line(f"  {text}")
    if found.clean:
        them = "it" if len(found.clean) == 1 else "them"
        output.line(f"{texts.folded(found.clean)}: as site.yml would make {them}", Meaning.OK)
