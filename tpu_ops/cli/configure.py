"""`tpu_ops configure`: run site.yml or another playbook on the workers of a target; list the failures at the end."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpu_ops import config, texts
from tpu_ops.ansible import exported, playbook
from tpu_ops.ansible.playbook import Outcome, Said, Step
from tpu_ops.cli import interrupts, options, output
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.cloud.remedies import until_ready
from tpu_ops.config import Settings
from tpu_ops.config.find import read_file
from tpu_ops.errors import ExitCode, HostError, RefusedError, UnreachableError, UsageError
from tpu_ops.fleet import contact, hostvars, view
from tpu_ops.fleet.view import Fleet
from tpu_ops.runs import projects
from tpu_ops.runs.projects import Project
from tpu_ops.ssh import openssh

#: Advice: what to do after correcting an error.
AGAIN = "run the same command again"
#: Columns of the table of results, which has one row for each host.
COLUMNS = ("host", "ok", "changed", "failed", "unreachable", "skipped")
#: Tags with a special meaning in Ansible, so that they are valid for every playbook.
ANY_PLAYBOOK = frozenset({"all", "always", "never", "tagged", "untagged"})
#: Advice for encrypted variables. Unlike ansible-playbook with --ask-vault-pass, this command asks for no password.
VAULT = (
    "export ANSIBLE_VAULT_PASSWORD_FILE=FILE, which holds Ansible Vault's password or is a program that prints it, and"
    " run the same command again"
)
#: Messages of Ansible and sudo for a user without full passwordless sudo, and the advice in this case.
_REFUSED_BY_SUDO = re.compile("Missing sudo password|sudo: a password is required")
FULL_SUDO = (
    "configuring workers needs full passwordless sudo on them: log in as the account that the node was made with,"
    " or have `sudo: full` set for you in users_people (`sudo: launcher` lets you train only)"
)
#: Advice for an option that ssh rejects. Ansible's connections do not read ssh's own configuration files.
_SSH_OPTIONS = "correct ANSIBLE_SSH_ARGS, ssh_args in ansible.cfg, or what the variables named ansible_ssh_*_args hold"
#: Of a failure's message, at most this many characters per line and this many lines are printed. --json has all.
_LONGEST, _LINES = 600, 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops configure`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("--playbook", default="site", metavar="NAME", help="a playbook in playbooks/ (default: site)")
    parser.add_argument("--tags", metavar="TAG,...", help="run only these roles, as in --tags users,python")
    parser.add_argument("--skip-tags", metavar="TAG,...", help="run all roles but these")
    parser.add_argument("--check", action="store_true", help="change nothing; show what would change")
    parser.add_argument("--verbose", action="store_true", help="show the result of every task, not only changes")
    parser.add_argument(
        "target", nargs="?", help="a node, a worker, a node set or a group (@node_pod); default: the whole fleet"
    )
    parser.add_argument("--limit", dest="limit", metavar="TARGET", help="the same as TARGET")
    parser.epilog = (
        "Runs the same playbook as `ansible-playbook site.yml --limit ...`, which takes all of Ansible's options. "
        "After a failure, run the command again: finished steps stay as they are."
    )


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Run the playbook and print the result of each host."""
    settings = config.load(args.fleet)
    if not args.fleet and config.nearest_file(config.here()) not in (None, settings.file):
        output.info(f"using fleet {config.folder_of(settings.file)} (TPU_OPS_FLEET), not the fleet of this directory")
    project = playbook.project_of(settings.path, settings.file)
    file = project.playbook(args.playbook)
    if args.target and args.limit:
        raise UsageError("the target is named twice", where=f"--limit {args.limit}", fix=f"leave out {args.target}")
    target = args.target or args.limit
    hosts: Sequence[str] = ()
    if target:
        fleet, workers = contact.find(settings, target)
        fleet = contact.serving(fleet, workers)
        _check_serve(fleet, workers)
        hosts = limit_of(settings, fleet, workers)
    chosen = {name: value for name, value in (("--tags", args.tags), ("--skip-tags", args.skip_tags)) if value}
    _check_tags(project, file, chosen)
    given = [f"{option}={value}" for option, value in chosen.items()]
    progress = Progress(verbose=args.verbose, check=args.check)
    outcome = playbook.run(
        project, file, hosts=hosts, options=given + (["--check"] if args.check else []), told=progress
    )
    progress.end()
    servers = [] if args.check else left_out(outcome)
    with output.read_or_not():
        if args.json:
            failures = [
                {"host": step.host, "role": step.role, "task": step.task, "message": step.message}
                for step in outcome.failures
            ]
            output.as_json({"code": outcome.code, "hosts": outcome.hosts, "failures": failures})
        elif outcome.hosts:
            output.table([{"host": host, **counts} for host, counts in outcome.hosts.items()], COLUMNS)
    show_failures(outcome.failures)
    if servers:
        # Mounts may have failed because the NFS servers do not know these workers yet.
        serves, was = ("serves", "was") if len(servers) == 1 else ("serve", "were")
        output.info(f"{texts.folded(servers)} {serves} NFS to these workers, but {was} not configured")
        output.info(f"  if the addresses of these workers are new: {letting_in(servers, settings, file)}")
    then = AGAIN if args.verbose else f"{AGAIN} (--verbose shows every task)"
    return exit_code(outcome, shown(file), target or "the fleet", settings, then)


def _check_tags(project: playbook.Project, file: Path, chosen: Mapping[str, str]) -> None:
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
    known = playbook.tags_of(project, file) if chosen else set()
    for option, text in chosen.items():
        names = {name.strip() for name in text.split(",")} - {""}
        if known and (wrong := sorted(names - known - ANY_PLAYBOOK)):
            what = f"no task of {file.name} has the tag {', '.join(wrong)}"
            ways = ", ".join(sorted(known - ANY_PLAYBOOK))
            fix = f"use some of {ways}" if ways else f"leave out {option}: {file.name} has no tags"
            if not project.of_fleet:
                raise UsageError(what, where=f"{option} {text}", fix=fix)
            output.warning(f"{what}, unless the playbook includes tasks with this tag while it runs; {fix}")


def _check_serve(fleet: Fleet, workers: Sequence[Worker]) -> None:
    """Refuse workers whose nodes are not running: Ansible would report that no host matches, or wait for the workers.

    Raises:
        UnreachableError: The node of a worker is not running.
    """
    names = {worker.host for worker in workers}
    if away := [one for one in fleet.workers if one.host in names and one.node.state not in SERVING_STATES]:
        states = texts.some([f"{label} is {state}" for label, state in {w.label: w.node.state for w in away}.items()])
        fix = f"{until_ready(away[0].node)}; or name nodes that are READY"
        raise UnreachableError(states, where=texts.folded([worker.host for worker in away]), fix=fix)


def converge(
    settings: Settings,
    fleet: Fleet,
    workers: Sequence[Worker],
    name: str = "site",
    variables: Mapping[str, object] | None = None,
    *,
    check: bool = False,
    then: str = AGAIN,
) -> Outcome:
    """Run site.yml, or another playbook, on some workers; return the playbook's outcome.

    Args:
        settings: The settings of the fleet.
        fleet: The fleet.
        workers: The workers.
        name: The name of the playbook, as for `Project.playbook`.
        variables: Extra variables, which override all others.
        check: Whether to run Ansible in check mode, which changes nothing.
        then: Advice: what the user does after correcting an error.

    Raises:
        UnreachableError: Workers did not answer, or refused the login.
        HostError: The playbook failed on a worker.
        UsageError: Ansible did not run the playbook.
    """
    project = playbook.project_of(settings.path, settings.file)
    file = project.playbook(name)
    progress = Progress(check=check)
    given = (["-e", json.dumps(dict(variables))] if variables else []) + (["--check"] if check else [])
    outcome = playbook.run(project, file, hosts=limit_of(settings, fleet, workers), options=given, told=progress)
    progress.end()
    if (servers := left_out(outcome)) and not check:
        # Also after a failure of site.yml: the cause may be a refused mount, which the next try needs.
        _let_in(project, settings, file, servers)
    show_failures(outcome.failures)
    names = texts.folded([worker.host for worker in workers])
    if exit_code(outcome, shown(file), names, settings, then):
        raise HostError(f"{file.name} failed on these workers", where=names, fix=f"correct the error above and {then}")
    return outcome


def check_out(settings: Settings, fleet: Fleet, workers: Sequence[Worker], word: str, *, dry: bool = False) -> Project:
    """Check out a project of the fleet on all workers.

    Args:
        settings: The settings of the fleet.
        fleet: The fleet.
        workers: The workers.
        word: PROJECT@REF, or only REF.
        dry: Whether to run Ansible in check mode, which changes nothing.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: The checkout failed on a worker, for example because its clone has local changes.
        UsageError: The project does not exist, or is not the same one on all workers.
    """
    outcome = converge(settings, fleet, workers, projects.PLAYBOOK, projects.variables(word), check=dry)
    return projects.same(outcome.data.get("workspace") or {}, len(workers))


def left_out(outcome: Outcome) -> list[str]:
    """Return the NFS servers that the hosts of a playbook mount from, and that the playbook did not run on."""
    return sorted(set(outcome.data.get("nfs_left_out") or ()))


def letting_in(servers: Sequence[str], settings: Settings, file: Path) -> str:
    """Return the command that makes NFS servers accept mounts from the fleet's present addresses."""
    names = shlex.quote(",".join(servers))
    fleet = view.known(settings)
    if fleet and {*servers} <= {worker.host for worker in fleet.workers}:
        which = "" if file.name == "site.yml" else f" --playbook {shlex.quote(file.stem)}"
        return f"`tpu_ops configure {names}{which} --tags nfs`"
    # A server in another inventory cannot be the target of `tpu_ops configure`.
    inventory = "" if os.environ.get(exported.VARIABLE) else f"-i {shlex.quote(str(settings.file))} "
    return f"`ansible-playbook {inventory}{shlex.quote(shown(file))} --tags nfs --limit {names}`"


def _let_in(project: playbook.Project, settings: Settings, file: Path, servers: Sequence[str]) -> None:
    """Make NFS servers accept mounts from new workers. A failure is only a warning: most tasks need no mount."""
    output.info(f"letting new workers mount NFS from {texts.folded(servers)}")
    progress = Progress()
    outcome = playbook.run(project, file, hosts=servers, options=["--tags", "nfs"], told=progress)
    progress.end()
    if outcome.code:
        show_failures(outcome.failures)
        output.warning(
            f"{texts.folded(servers)} may refuse mounts to new workers; correct the error above and run "
            f"{letting_in(servers, settings, file)}"
        )


def rehearse(settings: Settings, fleet: Fleet, workers: Sequence[Worker]) -> None:
    """Run only the initial checks of site.yml, on one worker of each node; this changes nothing.

    The checks fail if Ansible lacks what the inventory's files need, such as vault passwords or exported variables.

    Raises:
        UnreachableError: Workers did not answer, or refused the login.
        HostError: A variable has an invalid value.
        UsageError: Ansible did not start.
    """
    project = playbook.project_of(settings.path, settings.file)
    file = project.playbook("site")
    nodes = dict.fromkeys(worker.node.full_name for worker in workers)
    groups = hostvars.groups(fleet.listed)
    hosts = [next(f"{group}[0]" for group in groups[name] if group.startswith("node_")) for name in nodes]
    outcome = playbook.run(
        project, file, hosts=hosts, options=["--tags", "always", "--check"], told=Progress(check=True)
    )
    show_failures(outcome.failures)
    # A site.yml in the fleet's directory may have no checks. Ansible's exit code is then 0, which is no error here.
    if outcome.code and exit_code(outcome, shown(file), ", ".join(hosts), settings):
        what = "site.yml would fail on these workers, and recovery runs site.yml on each recreated node"
        fix = "correct the errors above first, or start anyway with --force"
        raise HostError(what, where=texts.folded([step.host for step in outcome.failures]), fix=fix)


def limit_of(settings: Settings, fleet: Fleet, workers: Sequence[Worker]) -> list[str]:
    """Return the host patterns that select these workers in Ansible.

    Raises:
        UsageError: The inventory sets `hostnames`, so only whole nodes can be selected, but the workers are not.
    """
    if not read_file(settings.file).get("hostnames"):
        return [worker.host for worker in workers]
    groups = hostvars.groups(fleet.listed)
    whole = {worker.node.full_name: worker.node.worker_count for worker in workers}
    for name, count in whole.items():
        if sum(worker.node.full_name == name for worker in workers) != count:
            raise UsageError(
                "`hostnames` gives the workers other names in the inventory, and the target is not a whole node",
                where=str(settings.file),
                fix="name whole nodes, or use ansible-playbook --limit with the inventory's names",
            )
    return [next(group for group in groups[name] if group.startswith("node_")) for name in whole]


class Progress:
    """Prints changes, failures and reports while a playbook runs; equal steps of several hosts are one line.

    Args:
        verbose: Whether to print also the steps that change nothing.
        check: Whether the playbook runs in check mode, which changes nothing.
    """

    def __init__(self, *, verbose: bool = False, check: bool = False) -> None:
        self._verbose, self._changed = verbose, "would change" if check else "changed"
        self._task = ""
        self._hosts: dict[str, list[str]] = {}
        self._reported: dict[str, None] = {}
        self._warned: set[str] = set()

    def __call__(self, note: Step | Said) -> None:
        """Print a failed step or a text of Ansible at once; collect any other step until its task ends."""
        if isinstance(note, Said):
            for text in note.text.splitlines():
                output.info(text)
            return
        if note.title != self._task:
            self.end()
            self._task = note.title
        self._hosts.setdefault(note.outcome, []).append(note.host)
        self._reported.update(dict.fromkeys(note.report))
        for text in note.warnings:
            # Equal warnings of several hosts are printed once.
            if text not in self._warned:
                self._warned.add(text)
                output.warning(text)
        if note.outcome in ("failed", "unreachable"):
            output.info(f"{note.host}: {note.outcome}: {note.title}")

    def end(self) -> None:
        """Print the collected steps of the task that has ended."""
        hosts, self._hosts = self._hosts, {}
        shown = ("ok", "changed", "skipped") if self._verbose else ("changed",)
        for outcome in shown:
            if names := hosts.get(outcome):
                how = self._changed if outcome == "changed" else outcome
                output.info(f"{texts.folded(sorted(names))}: {how}: {self._task}")
        reported, self._reported = self._reported, {}
        if reported:
            output.info(f"{self._task}:")
        for line in reported:
            output.info(f"  {line}")


def show_failures(failures: Sequence[Step]) -> None:
    """Print the failed steps; equal failures of several hosts are printed once."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for step in failures:
        # Messages that differ only in the host's name are equal.
        key = (step.outcome, step.title, step.message.replace(step.host, "HOST"))
        groups.setdefault(key, []).append(step.host)
    for (outcome, title, message), hosts in groups.items():
        text = message.replace("HOST", hosts[0]) if len(hosts) == 1 else message
        output.info(f"{texts.folded(hosts)}: {outcome}: {title}")
        for line in text.splitlines()[:_LINES]:
            output.info(f"  {line[:_LONGEST]}{' ...' if len(line) > _LONGEST else ''}")
        if more := text.splitlines()[_LINES:]:
            output.info(f"  ... {texts.count(len(more), 'more line')}: --json has all")


def shown(file: Path) -> str:
    """Return the path of a playbook as a user types it in the current directory."""
    return os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)


def no_yaml(inventory: Path) -> str:
    """Return file, position and cause of the first YAML error in the inventory's files; empty if there is none.

    For an error in group_vars or host_vars, the message of Ansible does not name the file.
    """
    import yaml

    # Search no other directories: the inventory's directory may be a home directory.
    folders = [inventory.parent / name for name in ("group_vars", "host_vars")]
    found = [*inventory.parent.glob("*.y*ml"), *(path for folder in folders for path in folder.rglob("*.y*ml"))]
    for file in sorted(path for path in found if path.is_file()):
        try:
            list(yaml.parse(file.read_text(encoding="utf-8")))
        except OSError:
            continue  # the message of Ansible names an unreadable file
        except (yaml.YAMLError, UnicodeDecodeError) as exc:
            mark = getattr(exc, "problem_mark", None)
            place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
            return f"{shown(file)}{place}: {getattr(exc, 'problem', '') or exc}"
    return ""


def exit_code(outcome: Outcome, name: str, target: str, settings: Settings, then: str = AGAIN) -> int:
    """Return the command's exit code; after a failure, print what to do.

    Args:
        outcome: The outcome of the playbook.
        name: The path of the playbook.
        target: The target of the command, for messages.
        settings: The settings of the fleet.
        then: Advice: what the user does after correcting an error.

    Raises:
        UnreachableError: Hosts did not answer, or refused the login.
        UsageError: The playbook did not start, or no task or host matched.
    """
    again = f"correct the error and {then}"
    if outcome.locked:
        again = VAULT
    elif any("YAML" in text for text in outcome.said) and (fault := no_yaml(settings.file)):
        again = f"correct {fault}"
    elif outcome.failures and all(_REFUSED_BY_SUDO.search(step.message) for step in outcome.failures):
        again = FULL_SUDO
    if outcome.unreachable:
        who = texts.count(len(outcome.unreachable), "host")
        what = f"{who} did not answer" + (", others failed" if len(outcome.failures) > len(outcome.unreachable) else "")
        fleet = view.known(settings)
        keyless = contact.without_host_keys(fleet) if fleet else {}
        keys = dict.fromkeys(keyless[host] for host in outcome.unreachable if host in keyless)
        said = {step.host: step.message for step in outcome.failures if step.outcome == "unreachable"}
        refused = [host for host, message in said.items() if openssh.refused(message)]
        if not keys and len(refused) == len(outcome.unreachable):
            what = f"login was refused on {texts.count(len(refused), 'host')}"
            fix = contact.login_hint(settings, " ".join(said[host] for host in refused))
            raise RefusedError(what, where=texts.folded(refused), fix=fix)
        fix = "; ".join(keys) or f"`tpu_ops list` shows which nodes are READY; {then} once these hosts answer"
        others = [message for host, message in said.items() if host not in refused]
        reasons = [openssh.reason(message.rpartition("via ssh: ")[2], None) for message in others]
        if causes := dict.fromkeys(reason for reason in reasons if not keys and not openssh.silent(reason)):
            what = f"Ansible did not reach {who}: {'; '.join(causes)}"
            fix = f"{_SSH_OPTIONS if any(map(openssh.of_options, causes)) else 'correct the cause'}; then {then}"
        raise UnreachableError(what, where=texts.folded(outcome.unreachable), fix=fix)
    if outcome.failures:
        output.info(f"  fix: {again}")
        return ExitCode.FAILED
    if outcome.code:
        raise UsageError("Ansible did not run the playbook; see its output above", where=f"{name}, {target}", fix=again)
    if not outcome.hosts:
        fix = "see --tags and --skip-tags, and `tpu_ops list` for the fleet"
        raise UsageError("no task ran: no tag or no host matches", where=f"{name}, {target}", fix=fix)
    return ExitCode.OK
