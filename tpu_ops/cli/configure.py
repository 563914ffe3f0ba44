"""`tpu_ops configure`: site.yml, or another playbook, on the workers of a target; failures gathered at the end."""

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

#: What to do once what is wrong is mended.
AGAIN = "run the same command again"
#: Columns of the table of hosts.
COLUMNS = ("host", "ok", "changed", "failed", "unreachable", "skipped")
#: Tags that Ansible itself knows.
ANY_PLAYBOOK = frozenset({"all", "always", "never", "tagged", "untagged"})
#: The way out where variables are encrypted; nobody can be asked here, as --ask-vault-pass of ansible-playbook does.
VAULT = (
    "export ANSIBLE_VAULT_PASSWORD_FILE=FILE, which holds Ansible Vault's password or is a program that prints it, and"
    " run the same command again"
)
#: What Ansible and sudo say to who may not do everything there without a password, and the way out.
_REFUSED_BY_SUDO = re.compile("Missing sudo password|sudo: a password is required")
FULL_SUDO = (
    "whoever configures workers needs full passwordless sudo there: log in as the account that the node was made with,"
    " or have `sudo: full` set for you in users_people (`sudo: launcher` lets you train only)"
)
#: The way out where ssh refuses an option. Nothing of ssh's own configuration files reaches Ansible.
_SSH_OPTIONS = "correct ANSIBLE_SSH_ARGS, ssh_args in ansible.cfg, or what the variables named ansible_ssh_*_args hold"
#: Letters of a line and lines of one failure's message that are printed; all of it stands in --json.
_LONGEST, _LINES = 600, 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops configure`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("--playbook", default="site", metavar="NAME", help="one of playbooks/ (default: site)")
    parser.add_argument("--tags", metavar="TAG,...", help="only these roles, as in --tags users,python")
    parser.add_argument("--skip-tags", metavar="TAG,...", help="all but these roles")
    parser.add_argument("--check", action="store_true", help="change nothing; show what would change")
    parser.add_argument("--verbose", action="store_true", help="show the result of every task, not only changes")
    parser.add_argument(
        "target", nargs="?", help="a node, a worker, a node set or a group (@node_pod); default: the whole fleet"
    )
    parser.add_argument("--limit", dest="limit", metavar="TARGET", help="the same as TARGET")
    parser.epilog = (
        "Runs the same playbook as `ansible-playbook site.yml --limit ...`, which takes all of Ansible's options. "
        "After a failure, run it again: what is done already stays as it is."
    )


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Run the playbook and show how every host came out of it."""
    settings = config.load(args.fleet)
    if not args.fleet and config.nearest_file(config.here()) not in (None, settings.file):
        output.info(f"fleet {config.folder_of(settings.file)} (TPU_OPS_FLEET), not that of this directory")
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
        # Where mounts have failed this is why, perhaps.
        serves, was = ("serves", "was") if len(servers) == 1 else ("serve", "were")
        output.info(f"{texts.folded(servers)} {serves} NFS to these workers, but {was} not configured")
        output.info(f"  if their addresses are new: {letting_in(servers, settings, file)}")
    then = AGAIN if args.verbose else f"{AGAIN} (--verbose shows every task)"
    return exit_code(outcome, shown(file), target or "the fleet", settings, then)


def _check_tags(project: playbook.Project, file: Path, chosen: Mapping[str, str]) -> None:
    """Refuse tags that no task has: Ansible would do nothing, or what was to be left out, and call that well.

    Playbooks of the fleet's own may include tasks that have them while they run: of these it is a warning.

    Args:
        project: Where the playbook is.
        file: The playbook.
        chosen: Option -> the tags that it names, as Ansible takes them.

    Raises:
        UsageError: There are some.
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
            output.warning(f"{what}, unless it includes such tasks while it runs; {fix}")


def _check_serve(fleet: Fleet, workers: Sequence[Worker]) -> None:
    """Refuse workers whose nodes do not serve: Ansible would say that no host matches, or wait for them.

    Raises:
        UnreachableError: There are some.
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
    """Run site.yml, or another playbook, on some workers; return how it ended.

    Args:
        settings: Of the fleet.
        fleet: The fleet.
        workers: The workers.
        name: As of `Project.playbook`.
        variables: Win over all others.
        check: Whether nothing is changed.
        then: As of `exit_code`.

    Raises:
        UnreachableError: Some did not answer, or refused the person.
        HostError: It failed on some.
        UsageError: Ansible did not run it.
    """
    project = playbook.project_of(settings.path, settings.file)
    file = project.playbook(name)
    progress = Progress(check=check)
    given = (["-e", json.dumps(dict(variables))] if variables else []) + (["--check"] if check else [])
    outcome = playbook.run(project, file, hosts=limit_of(settings, fleet, workers), options=given, told=progress)
    progress.end()
    if (servers := left_out(outcome)) and not check:
        # Also where site.yml has failed: a mount that was refused is why, perhaps, and the next try is to go further.
        _let_in(project, settings, file, servers)
    show_failures(outcome.failures)
    names = texts.folded([worker.host for worker in workers])
    if exit_code(outcome, shown(file), names, settings, then):
        raise HostError(f"{file.name} failed there", where=names, fix=f"see above; correct it and {then}")
    return outcome


def check_out(settings: Settings, fleet: Fleet, workers: Sequence[Worker], word: str, *, dry: bool = False) -> Project:
    """Check out a project of the fleet on all workers.

    Args:
        settings: Of the fleet.
        fleet: The fleet.
        workers: The workers.
        word: PROJECT@REF, or REF.
        dry: Whether nothing is changed.

    Raises:
        UnreachableError: A worker did not answer.
        HostError: It failed on some, for example because a clone has local changes.
        UsageError: There is no such project, or not the same one everywhere.
    """
    outcome = converge(settings, fleet, workers, projects.PLAYBOOK, projects.variables(word), check=dry)
    return projects.same(outcome.data.get("workspace") or {}, len(workers))


def left_out(outcome: Outcome) -> list[str]:
    """Return the servers of NFS that a playbook's hosts mount from, and that were none of its hosts themselves."""
    return sorted(set(outcome.data.get("nfs_left_out") or ()))


def letting_in(servers: Sequence[str], settings: Settings, file: Path) -> str:
    """Return the command that has servers of NFS let in the addresses that the fleet has now."""
    names = shlex.quote(",".join(servers))
    fleet = view.known(settings)
    if fleet and {*servers} <= {worker.host for worker in fleet.workers}:
        which = "" if file.name == "site.yml" else f" --playbook {shlex.quote(file.stem)}"
        return f"`tpu_ops configure {names}{which} --tags nfs`"
    # Hosts of other inventories are no target of a command here.
    inventory = "" if os.environ.get(exported.VARIABLE) else f"-i {shlex.quote(str(settings.file))} "
    return f"`ansible-playbook {inventory}{shlex.quote(shown(file))} --tags nfs --limit {names}`"


def _let_in(project: playbook.Project, settings: Settings, file: Path, servers: Sequence[str]) -> None:
    """Have servers of NFS let in workers that are new; where that fails, whatever needs no such mount goes on."""
    output.info(f"letting new workers mount NFS from {texts.folded(servers)}")
    progress = Progress()
    outcome = playbook.run(project, file, hosts=servers, options=["--tags", "nfs"], told=progress)
    progress.end()
    if outcome.code:
        show_failures(outcome.failures)
        output.warning(
            f"{texts.folded(servers)} may refuse mounts to new workers; correct it and run "
            f"{letting_in(servers, settings, file)}"
        )


def rehearse(settings: Settings, fleet: Fleet, workers: Sequence[Worker]) -> None:
    """Have Ansible do what site.yml does before its first change, on one worker of each node; changes nothing.

    That tells whether it has all that the inventory's files ask for: passwords of vaults, exported variables.

    Raises:
        UnreachableError: Some did not answer, or refused the person.
        HostError: A variable is not as it has to be.
        UsageError: Ansible did not begin.
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
    # A site.yml of the fleet's own may have no task of this kind.
    if outcome.code and exit_code(outcome, shown(file), ", ".join(hosts), settings):
        what = "site.yml would fail there, and recovery runs it on each recreated node"
        fix = "see above; correct it first, or start anyway with --force"
        raise HostError(what, where=texts.folded([step.host for step in outcome.failures]), fix=fix)


def limit_of(settings: Settings, fleet: Fleet, workers: Sequence[Worker]) -> list[str]:
    """Return what means these workers to Ansible.

    Raises:
        UsageError: They have names of the person's own in the inventory, and are no whole nodes.
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
    """Says what changes, fails and is reported while the playbook runs; equal steps of several hosts in one line.

    Args:
        verbose: Whether steps that change nothing are said as well.
        check: Whether nothing is changed in truth.
    """

    def __init__(self, *, verbose: bool = False, check: bool = False) -> None:
        self._verbose, self._changed = verbose, "would change" if check else "changed"
        self._task = ""
        self._hosts: dict[str, list[str]] = {}
        self._reported: dict[str, None] = {}
        self._warned: set[str] = set()

    def __call__(self, note: Step | Said) -> None:
        """Be told of a step."""
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
            # Hosts that warn of the same do so once.
            if text not in self._warned:
                self._warned.add(text)
                output.warning(text)
        if note.outcome in ("failed", "unreachable"):
            output.info(f"{note.host}: {note.outcome}: {note.title}")

    def end(self) -> None:
        """Say how the last task went."""
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
    """Say what failed, equal failures of several hosts once."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for step in failures:
        # Messages that differ in the host's own name alone are equal.
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
    """Return a playbook's file as ansible-playbook takes it here."""
    return os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)


def no_yaml(inventory: Path) -> str:
    """Return where the first of the inventory's files that is no YAML goes wrong, and why; empty where all are.

    Ansible names no file where it is one of variables.
    """
    import yaml

    # Nothing else below it is read: it may be anybody's home.
    folders = [inventory.parent / name for name in ("group_vars", "host_vars")]
    found = [*inventory.parent.glob("*.y*ml"), *(path for folder in folders for path in folder.rglob("*.y*ml"))]
    for file in sorted(path for path in found if path.is_file()):
        try:
            list(yaml.parse(file.read_text(encoding="utf-8")))
        except OSError:
            continue  # Ansible has named it
        except (yaml.YAMLError, UnicodeDecodeError) as exc:
            mark = getattr(exc, "problem_mark", None)
            place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
            return f"{shown(file)}{place}: {getattr(exc, 'problem', '') or exc}"
    return ""


def exit_code(outcome: Outcome, name: str, target: str, settings: Settings, then: str = AGAIN) -> int:
    """Return the command's exit code, and say what to do where it is not 0.

    Args:
        outcome: Of the playbook.
        name: The playbook's file.
        target: Which workers were meant.
        settings: Of the fleet.
        then: What to do once what is wrong is mended.

    Raises:
        UnreachableError: Hosts did not answer, or refused the person.
        UsageError: The playbook did not begin, or met no host.
    """
    again = f"correct it and {then}"
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
        fix = "; ".join(keys) or f"`tpu_ops list` shows which nodes are READY; {then} once they answer"
        others = [message for host, message in said.items() if host not in refused]
        reasons = [openssh.reason(message.rpartition("via ssh: ")[2], None) for message in others]
        if causes := dict.fromkeys(reason for reason in reasons if not keys and not openssh.silent(reason)):
            what = f"Ansible did not reach {who}: {'; '.join(causes)}"
            fix = f"{_SSH_OPTIONS if any(map(openssh.of_options, causes)) else 'mend that'}; then {then}"
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
