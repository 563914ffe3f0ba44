"""`tpu_ops configure`: run site.yml or another playbook on the workers of a target; list the failures at the end."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpu_ops import config, texts
from tpu_ops.ansible import convergence, drift, playbook, playing
from tpu_ops.ansible.failures import AGAIN, fix_of
from tpu_ops.ansible.playbook import Said, Step
from tpu_ops.cli import interrupts, options, output
from tpu_ops.cli.progress import Tasks, shown
from tpu_ops.cli.terminal import Meaning
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.errors import ExitCode, UnreachableError, UsageError
from tpu_ops.fleet import contact
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import preparations

#: Columns of the table of results, which has one row for each host.
COLUMNS = ("host", "ok", "changed", "failed", "unreachable", "skipped")
#: Tags with a special meaning in Ansible, so that they are valid for every playbook.
ANY_PLAYBOOK = frozenset({"all", "always", "never", "tagged", "untagged"})
#: Of a failure's message, at most this many characters per line and this many lines are printed. --json has all.
_LONGEST, _LINES = 600, 100

#: Of a step's changes, at most this many are named, each with at most this many characters. --diff shows all.
_NAMED, _NAME = 4, 80
#: apt's lines that are no lists of packages.
_APT_WORDS = re.compile(r"^The following .*:$|^\d+ upgraded, ")
#: Owner and mode after the path of a file.
_ATTRIBUTES = re.compile(r"( \d+:\d+ \d{4})+$")
_MEANINGS = {"ok": Meaning.OK, "changed": Meaning.CHANGED, "skipped": Meaning.NONE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops configure`."""
    parser.add_argument(
        "target", nargs="?", help="a node, a worker, a node set or a group (@node_pod); default: the whole fleet"
    )
    parser.add_argument("--check", action="store_true", help="change nothing; show what would change")
    parser.add_argument(
        "--diff", action="store_true", help="show the changed lines of files too; they may contain secrets"
    )
    parser.add_argument("--tags", metavar="TAG,...", help="run only these roles, as in --tags users,python")
    parser.add_argument("--skip-tags", metavar="TAG,...", help="run all roles but these")
    parser.add_argument("--playbook", default="site", metavar="NAME", help="a playbook in playbooks/ (default: site)")
    how = parser.add_argument_group("where and how it runs")
    how.add_argument(
        "--drifted", action="store_true", help="only the workers that differ from site.yml (see tpu_ops drift)"
    )
    how.add_argument("--limit", dest="limit", metavar="TARGET", help="the same as TARGET")
    add_on_workers(how)
    shows = parser.add_argument_group("output and fleet")
    shows.add_argument("--verbose", action="store_true", help="show the result of every task, not only changes")
    options.add_json(shows)
    options.add_fleet(shows)
    parser.epilog = (
        "Runs the same playbook as `ansible-playbook site.yml --limit ...`, which takes all of Ansible's options. "
        "After a failure, run the command again: finished steps stay as they are."
    )


def add_on_workers(parser: options.Options) -> None:
    """Declare --on-workers and --no-on-workers."""
    parser.add_argument(
        "--on-workers",
        action=argparse.BooleanOptionalAction,
        help=f"have each worker run the playbook on itself (default: where possible, from {playing.MANY} workers on)",
    )


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Run the playbook and print the result of each host."""
    settings = config.load(args.fleet)
    if not args.fleet and _is_fleet_here(settings):
        output.info(f"using fleet {config.folder_of(settings.file)} (TPU_OPS_FLEET), not the fleet of this directory")
    project = playbook.project_of(settings.path, settings.file)
    file = project.playbook(args.playbook)
    if args.target and args.limit:
        raise UsageError("the target is named twice", where=f"--limit {args.limit}", fix=f"leave out {args.target}")
    target = args.target or args.limit
    hosts = hosts_of(settings, target)
    chosen = {name: value for name, value in (("--tags", args.tags), ("--skip-tags", args.skip_tags)) if value}
    check_tags(project, file, chosen)
    given = [f"{option}={value}" for option, value in chosen.items()]
    progress, tasks = Progress(args.check, verbose=args.verbose, diff=args.diff), Tasks("configuring")
    if args.drifted:
        if file.stem != "site":
            raise UsageError(
                "only site.yml is compared", where="--drifted", fix=f"leave out --playbook {args.playbook}"
            )
        compared = Tasks("comparing")
        with shown(compared.text, told=True):
            found = drift.look(settings, hosts, given, said=progress, at=compared.at, on_themselves=args.on_workers)
        # A worker that could not be compared is configured too.
        hosts = [host for host in found.outcome.hosts if host not in found.clean]
        if not hosts:
            output.info(f"no worker differs: {texts.folded(found.clean)}")
            if args.json:
                output.as_json({"code": 0, "hosts": {}, "failures": []})
            return ExitCode.OK
        output.info(
            f"{texts.folded(hosts)}: to be configured; no difference on {texts.count(len(found.clean), 'worker')}"
        )
    with shown(tasks.text, told=True):
        outcome = playing.play(
            settings,
            project,
            file,
            hosts=hosts,
            options=given + ["--check"] * args.check + ["--diff"] * args.diff,
            told=progress,
            at=tasks.at,
            on_themselves=args.on_workers,
        )
    progress.end()
    servers = [] if args.check else convergence.left_out(outcome)
    with output.read_or_not():
        if args.json:
            failures = [
                {"host": step.host, "role": step.role, "task": step.task, "message": step.message}
                for step in outcome.failures
            ]
            output.as_json({"code": outcome.code, "hosts": outcome.hosts, "failures": failures})
        elif outcome.hosts:
            output.table([{"host": host, **counts} for host, counts in outcome.hosts.items()], COLUMNS)
    progress.failures(outcome.failures)
    if servers:
        # Mounts may have failed because the NFS servers do not know these workers yet.
        serves, was = ("serves", "was") if len(servers) == 1 else ("serve", "were")
        output.info(f"{texts.folded(servers)} {serves} NFS to these workers, but {was} not configured")
        output.info(f"  if the addresses of these workers are new: {convergence.letting_in(servers, settings, file)}")
    then = AGAIN if args.verbose else f"{AGAIN} (--verbose shows every task)"
    if fix := fix_of(outcome, file, target or "the fleet", settings, then):
        output.info(f"  fix: {fix}")
        return ExitCode.FAILED
    return ExitCode.OK


def hosts_of(settings: config.Settings, target: str | None) -> list[str]:
    """Return the host patterns that select a target's workers in Ansible; none for the whole fleet.

    Raises:
        UnreachableError: The node of a worker is not running.
    """
    if not target:
        return []
    fleet, workers = contact.find(settings, target)
    fleet = contact.serving(fleet, workers)
    _check_serve(fleet, workers)
    return convergence.limit_of(fleet, workers)


def check_tags(project: playbook.Project, file: Path, chosen: Mapping[str, str]) -> None:
    """Refuse tags that no task has: Ansible would run too few tasks (--tags) or too many (--skip-tags), unnoticed.

    For a playbook in the fleet's directory, an unknown tag is only a warning: the playbook may include tasks with the
    tag while it runs.

    Args:
        project: The Ansible project that has the playbook.
        file: The playbook.
        chosen: Option (--tags or --skip-tags) -> its value, a comma-separated list.

    Raises:
        UsageError: No task has one of the tags.
    """
    known = playbook.tags_of(project, file) - {playing.TAG} if chosen else set()
    for option, text in chosen.items():
        names = {name.strip() for name in text.split(",")} - {""}
        if known and (wrong := sorted(names - known - ANY_PLAYBOOK)):
            what = f"no task of {file.name} has the tag {', '.join(wrong)}"
            ways = ", ".join(sorted(known - ANY_PLAYBOOK))
            fix = f"use some of {ways}" if ways else f"leave out {option}: {file.name} has no tags"
            if not project.of_fleet:
                raise UsageError(what, where=f"{option} {text}", fix=fix)
            output.warning(f"{what}, unless the playbook includes tasks with this tag while it runs; {fix}")


def _is_fleet_here(settings: config.Settings) -> bool:
    """Return whether the working directory has a fleet of its own, other than the one of these settings.

    A fleet's file without projects and snapshot, such as the one of a clone of tpu_ops, is not in use.
    """
    file = config.nearest_file(config.here())
    if file is None or file == settings.file:
        return False
    try:
        found = config.read_file(file)
    except UsageError:
        return True
    return bool(found.get("projects") or found.get("snapshot"))


def _check_serve(fleet: Fleet, workers: Sequence[Worker]) -> None:
    """Refuse workers whose nodes are not running: Ansible would report that no host matches, or wait for the workers.

    Raises:
        UnreachableError: The node of a worker is not running.
    """
    names = {worker.host for worker in workers}
    if away := [one for one in fleet.workers if one.host in names and one.node.state not in SERVING_STATES]:
        states = texts.some([f"{label} is {state}" for label, state in {w.label: w.node.state for w in away}.items()])
        fix = f"{preparations.way_back(fleet, [worker.host for worker in away])}; or name nodes that are READY"
        raise UnreachableError(states, where=texts.folded([worker.host for worker in away]), fix=fix)


class Progress:
    """Prints changes and reports while a playbook runs; equal steps of several hosts are one line.

    Args:
        check: Whether the playbook runs in check mode, which changes nothing.
        verbose: Whether to print also the steps that change nothing.
        diff: Whether to print all changes of a step below it, and not only what they are about.
    """

    def __init__(self, check: bool = False, *, verbose: bool = False, diff: bool = False) -> None:
        self._verbose, self._changed, self._diff = verbose, "would change" if check else "changed", diff
        self._task = ""
        #: Outcome and changes -> hosts.
        self._hosts: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        self._reported: dict[str, None] = {}
        self._warned: set[str] = set()

    def __call__(self, note: Step | Said) -> None:
        """Print a text of Ansible at once; collect a step until its task ends."""
        if isinstance(note, Said):
            for text in note.text.splitlines():
                output.info(text)
            return
        if note.title != self._task:
            self.end()
            self._task = note.title
        changes = note.changes if self._diff else tuple(subjects(note.changes))
        self._hosts.setdefault((note.outcome, changes), []).append(note.host)
        self._reported.update(dict.fromkeys(note.report))
        for text in note.warnings:
            # Equal warnings of several hosts are printed once.
            if text not in self._warned:
                self._warned.add(text)
                output.warning(text)

    def end(self) -> None:
        """Print the collected steps of the task that has ended."""
        found, self._hosts = self._hosts, {}
        shown_ = ("ok", "changed", "skipped") if self._verbose else ("changed",)
        for (outcome, changes), hosts in sorted(found.items(), key=lambda item: item[0][0]):
            if outcome in shown_:
                how = self._changed if outcome == "changed" else outcome
                named = f": {texts.some(changes, _NAMED)}" if changes and not self._diff else ""
                output.info(f"{texts.folded(sorted(hosts))}: {how}: {self._task}{named}", _MEANINGS[outcome])
                for line in changes if self._diff else ():
                    output.info(f"  {line}")
        reported, self._reported = self._reported, {}
        if reported:
            output.info(f"{self._task}:")
        for line in reported:
            output.info(f"  {line}")

    def failures(self, failures: Sequence[Step]) -> None:
        """Print the failed steps; equal failures of several hosts are printed once."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for step in failures:
            # Messages that differ only in the host's name are equal.
            key = (step.outcome, step.title, step.message.replace(step.host, "HOST"))
            groups.setdefault(key, []).append(step.host)
        for (outcome, title, message), hosts in groups.items():
            text = message.replace("HOST", hosts[0]) if len(hosts) == 1 else message
            output.info(f"{texts.folded(hosts)}: {outcome}: {title}", Meaning.FAILED)
            for line in shortened(text.splitlines(), _LINES, _LONGEST):
                output.info(f"  {line}")


def subjects(changes: Sequence[str]) -> list[str]:
    """Return what the changes of a step concern: people, packages, paths without owner and mode, or changed lines."""
    names, heading = dict[str, None](), ""
    for line in changes:
        if _APT_WORDS.search(line):
            heading = line
        elif heading and line.startswith(" "):
            # apt lists its additional packages again among all that it installs.
            names |= dict.fromkeys(() if "additional packages" in heading else line.split())
        else:
            names[_ATTRIBUTES.sub("", line.strip())] = None
    return [f"{name[:_NAME]}{' ...' if len(name) > _NAME else ''}" for name in names]


def shortened(lines: Sequence[str], most: int, longest: int) -> list[str]:
    """Return the first lines, each up to a number of characters, and a line about the rest if there is more."""
    found = [f"{line[:longest]}{' ...' if len(line) > longest else ''}" for line in lines[:most]]
    more = len(lines) - most
    return [*found, f"... {texts.count(more, 'more line')}: --json has all"] if more > 0 else found
