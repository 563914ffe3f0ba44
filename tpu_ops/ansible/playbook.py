"""Runs a playbook on hosts of the fleet through ansible-runner, and reports each step while it runs."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tpu_ops
from tpu_ops import texts
from tpu_ops.ansible import exported, scratch
from tpu_ops.ansible.changes import changes_of
from tpu_ops.errors import UsageError

#: Seconds between two checks for an interrupt.
_TICK = 0.2
#: Seconds that ansible-playbook has to end after SIGTERM, and then its remaining child processes; and seconds to wait
#: until SIGKILL has ended these.
_ENDING, _LEFT, _KILLED = 30.0, 5.0, 5.0

#: Event of ansible-runner -> outcome of a task on a host.
_OUTCOMES = {
    "runner_on_ok": "ok",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
    "runner_on_skipped": "skipped",
}

#: Line that Ansible prints, without colours, for a task that changed something on a host.
_CHANGED = re.compile(r"^changed: \[", re.MULTILINE)

#: Line of `ansible-playbook --list-tags` with the tags of a play or a task.
_TAGS = re.compile(r"TAGS: \[([^\]]*)\]")

#: Part of Ansible's message if no password was given for Ansible Vault, or only wrong passwords.
_LOCKED = "no vault secrets"

#: Beginning of the message of a failed apt task: the whole command, then apt's standard error.
_APT = re.compile(r"'[^\n]*apt-get .*?' failed: (?P<said>.*)", re.DOTALL)
#: Error lines in the output of apt and dpkg. Only the last lines are reported: how many.
_APT_SAYS = re.compile(r"^(?:E: .*|dpkg: error.*(?:\n .*)?)", re.MULTILINE)
_APT_LINES = 3
#: Text in an error of apt -> fix for the user.
_APT_WAYS = {
    "dpkg was interrupted": "run `sudo dpkg --configure -a` on the worker first",
    "lock": "another process is installing packages on the worker; try again later, or raise base_apt_lock_timeout",
}


#: Modules whose message is shown to the user, and the default message of `assert`, which is not.
_SHOWING, _HELD = ("debug", "assert"), "All assertions passed"


#: A function that is called when a host begins or ends a task: the host, the task's title, and whether it has ended.
At = Callable[[str, str, bool], None]

#: Beginning of files that `tpu_ops init` writes, and writes anew.
GENERATED = "# Written by tpu_ops init"


@dataclass(frozen=True)
class Project:
    """The directory of playbooks and roles.

    Attributes:
        root: Directory with ``site.yml`` and ``playbooks/``.
        config: The ansible.cfg in use.
        inventory: The fleet's inventory.
        of_fleet: Whether the playbooks are the fleet's own, not those of tpu_ops.
    """

    root: Path
    config: Path
    inventory: Path
    of_fleet: bool = False

    def playbook(self, name: str) -> Path:
        """Return the file of a playbook.

        Args:
            name: ``site``, or the name of a file in ``playbooks/`` without its extension.

        Raises:
            UsageError: The playbook does not exist; the error names the existing playbooks.
        """
        found = {file.stem: file for file in sorted((self.root / "playbooks").glob("*.yml"))}
        if (self.root / "site.yml").is_file():
            found["site"] = self.root / "site.yml"
        if name not in found:
            raise UsageError(
                "no such playbook", where=f"{name!r} in {self.root}", fix=f"name one of {', '.join(sorted(found))}"
            )
        return found[name]


def tool_root() -> Path:
    """Return the directory of tpu_ops's own site.yml, playbooks, roles and ansible.cfg."""
    here = Path(tpu_ops.__file__).resolve().parent
    # In a clone of the repository these files are beside the Python package; pip installs them inside the package.
    return here / "_ansible" if (here / "_ansible").is_dir() else here.parent


def is_generated(file: Path) -> bool:
    """Return whether `tpu_ops init` has written a file, which is only for plain Ansible."""
    with contextlib.suppress(OSError), file.open(encoding="utf-8", errors="replace") as opened:
        return opened.readline().startswith(GENERATED)
    return False


def project_of(fleet: Path, inventory: Path) -> Project:
    """Return the project of a fleet: the fleet directory if it has a site.yml, else tpu_ops's own playbooks.

    Files that `tpu_ops init` has written do not count: they only lead plain Ansible to tpu_ops's own.

    Args:
        fleet: The fleet directory.
        inventory: The fleet's file.
    """
    tool = tool_root()
    root, config = (
        fleet if (fleet / name).is_file() and not is_generated(fleet / name) else tool
        for name in ("site.yml", "ansible.cfg")
    )
    config /= "ansible.cfg"
    return Project(root, config, inventory, of_fleet=root != tool)


@dataclass(frozen=True)
class Step:
    """The end of one task on one host.

    Attributes:
        task: The task's name.
        role: The task's role, or the empty string.
        host: The host.
        outcome: ``ok``, ``changed``, ``failed``, ``unreachable`` or ``skipped``.
        message: Why the task failed; empty if it did not.
        warnings: The warnings of the task.
        report: Lines that the task shows to the user.
        changes: What the task changed, or would change in check mode: paths, packages or changed lines; with the option
            --diff also the changed lines of files. Empty if the task's module does not tell.
    """

    task: str
    role: str
    host: str
    outcome: str
    message: str = ""
    warnings: tuple[str, ...] = ()
    report: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The task's name with its role, as Ansible shows it."""
        return title_of(self.task, self.role)


def title_of(task: str, role: str) -> str:
    """Return a task's name with its role, as Ansible shows it."""
    return f"{role} : {task}" if role and not task.startswith(f"{role} : ") else task


@dataclass(frozen=True)
class Said:
    """A message of Ansible outside of a task: a warning, or an error that ends the playbook."""

    text: str


@dataclass
class Outcome:
    """The result of a playbook.

    Attributes:
        hosts: Host -> ``ok``, ``changed``, ``failed``, ``unreachable``, ``skipped``, ``rescued`` -> number of tasks.
        failures: The failed tasks that ended the play for a host; failures that a `rescue` handled are not included.
        code: Exit code of ansible-playbook; None if ansible-playbook was interrupted.
        data: The playbook's set_stats data.
        said: Texts of the warnings and errors that Ansible printed outside of tasks.
    """

    hosts: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: list[Step] = field(default_factory=list)
    code: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    @property
    def locked(self) -> bool:
        """Whether Ansible could not decrypt variables: the password of Ansible Vault was missing or wrong."""
        return any(_LOCKED in text for text in [*self.said, *(step.message for step in self.failures)])

    @property
    def unreachable(self) -> tuple[str, ...]:
        """The hosts that Ansible could not reach."""
        return tuple(host for host, counts in self.hosts.items() if counts["unreachable"])


def tags_of(project: Project, playbook: Path, environ: Mapping[str, str] = os.environ) -> set[str]:
    """Return the tags of a playbook's tasks, as Ansible lists them; empty if Ansible cannot read the playbook.

    Tags of dynamically included tasks are missing.

    Args:
        project: The directory of playbooks and roles.
        playbook: The playbook's file.
        environ: Basis of Ansible's environment.
    """
    # Tags do not depend on hosts, so the fleet's inventory is not read.
    no_fleet = {"ANSIBLE_INVENTORY_ENABLED": "host_list", "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "False"}
    command = ["ansible-playbook", str(playbook), "--inventory", "localhost,", "--list-tags"]
    env = {**ansible_environment(project, environ), **no_fleet}
    done = subprocess.run(command, cwd=project.root, env=env, capture_output=True, text=True, check=False)
    listed = _TAGS.findall(done.stdout) if done.returncode == 0 else []
    return {tag.strip() for tags in listed for tag in tags.split(",")} - {""}


def ansible_environment(project: Project, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Ansible."""
    return {
        **exported.with_utf8(environ),
        # Ansible is installed beside this Python, whether or not the virtual environment is active.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}",
        "ANSIBLE_CONFIG": environ.get("ANSIBLE_CONFIG") or str(project.config),
        # Without this variable, results do not say what tasks changed.
        "ANSIBLE_DIFF_ALWAYS": "True",
        # ansible-runner turns on colours, whose escape sequences would appear in messages.
        "ANSIBLE_FORCE_COLOR": "0",
        "ANSIBLE_NOCOLOR": "1",
    }


def run(
    project: Project,
    playbook: Path,
    *,
    hosts: Sequence[str] = (),
    options: Sequence[str] = (),
    told: Callable[[Step | Said], None] = lambda _: None,
    at: At = lambda *_: None,
    environ: Mapping[str, str] = os.environ,
) -> Outcome:
    """Run a playbook and return its outcome. An interrupt (KeyboardInterrupt) ends Ansible first.

    Args:
        project: The directory of playbooks and roles.
        playbook: The playbook's file.
        hosts: Names or groups of the inventory; empty means all hosts.
        options: Further options of ansible-playbook, such as ``--check``.
        told: Called in the calling thread with each step when it ends, and with each message outside of tasks.
        at: Called in the calling thread when a host begins or ends a task.
        environ: Basis of Ansible's environment.

    Raises:
        UsageError: ANSIBLE_INVENTORY does not include the fleet's file.
    """
    inventories = exported.inventories(project.inventory, environ)
    from ansible_runner.interface import run_async

    events: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
    stop = threading.Event()

    def take(event: Mapping[str, Any]) -> bool:
        # Only put the event into a queue: a slow callback would delay Ansible. False keeps the event out of files.
        events.put(event)
        return False

    outcome = Outcome()
    # A private directory, since ansible-runner writes Ansible's environment and results there.
    with scratch.directory(environ) as private:
        (private / "limit").write_text("".join(f"{host}\n" for host in hosts))
        thread, runner = run_async(
            private_data_dir=str(private),
            project_dir=str(project.root),
            playbook=str(playbook),
            limit=f"@{private / 'limit'}" if hosts else None,
            inventory=None if inventories else str(project.inventory),
            # Absolute paths: Ansible starts in the directory of the playbooks.
            envvars=ansible_environment(project, environ)
            | ({exported.VARIABLE: ",".join(inventories)} if inventories else {}),
            cmdline=shlex.join(options) or None,
            quiet=True,
            suppress_env_files=True,
            event_handler=take,
            status_handler=lambda status, runner_config: _forget(status, runner_config.artifact_dir),
            # Without a callback, ansible-runner would replace the signal handlers of this process.
            cancel_callback=stop.is_set,
        )
        ansible = 0
        try:
            while thread.is_alive() or not events.empty():
                with contextlib.suppress(queue.Empty):
                    event = events.get(timeout=_TICK)
                    ansible = event.get("pid") or ansible
                    _tell_place(event, at)
                    _note(event, outcome, told, whole="--diff" in options)
            outcome.code = int(runner.rc)
        except BaseException:
            # ansible-runner would kill the ansible-playbook process only.
            if ansible:
                _end(ansible, lambda: thread.join(_ENDING))
            stop.set()
            thread.join(_ENDING)
            raise
    dead = {host for host, counts in outcome.hosts.items() if counts["failed"] or counts["unreachable"]}
    # A `rescue` can fail with the same message as its `block`: report this failure once.
    last = {(step.host, step.outcome, step.message): step for step in outcome.failures if step.host in dead}
    outcome.failures = [step for step in outcome.failures if step in last.values()]
    return outcome


def _end(ansible: int, wait: Callable[[], object]) -> None:
    """End ansible-playbook and all of its child processes.

    After SIGTERM, Ansible ends its worker processes, except one that it is just starting. This process would go on with
    its task, and create the directory of this run again. A worker process that writes to Ansible while Ansible is
    ending would wait forever.

    Args:
        ansible: The number of the ansible-playbook process.
        wait: Waits until ansible-playbook has ended, but not forever.
    """
    with contextlib.suppress(ProcessLookupError):
        try:
            # A stopped process starts no others, so the list is complete.
            os.kill(ansible, signal.SIGSTOP)
            started = _below(ansible)
        finally:
            os.kill(ansible, signal.SIGTERM)
            os.kill(ansible, signal.SIGCONT)
        try:
            wait()
        finally:
            _kill(started)


def _kill(started: set[_Process]) -> None:
    """End processes with SIGTERM, and those that are left after a pause with SIGKILL; wait until they have ended."""
    for number, patience in ((signal.SIGTERM, _LEFT), (signal.SIGKILL, _KILLED)):
        left = _living(started)
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.number, number)
        until = time.monotonic() + patience
        while left and time.monotonic() < until:
            # These are not child processes of this process, so no event tells that they have ended: poll.
            time.sleep(_TICK)
            left = _living(started)


def _living(processes: set[_Process]) -> set[_Process]:
    """Return the processes that still run, with their present groups.

    A worker process of Ansible leaves Ansible's group soon after its start, and leads a group of its own.
    """
    groups = {process.number: process.group for process in processes}
    return {now for now in _processes() if now.number in groups and now.group in (groups[now.number], now.number)}


def _below(parent: int) -> set[_Process]:
    """Return all descendants of a process: its child processes, their child processes, and so on."""
    known = _processes()
    found, parents = set[_Process](), {parent}
    while parents:
        below = {process for process, above in known.items() if above in parents} - found
        found |= below
        parents = {process.number for process in below}
    return found


class _Process(NamedTuple):
    """A process. A later process can have the same number, but hardly in the same process group."""

    number: int
    group: int


def _processes() -> dict[_Process, int]:
    """Return all processes of this machine, each with its parent's number; empty if `ps` is not installed."""
    command = ["ps", "-axo", "pid=,pgid=,ppid=,stat="]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return {}
    rows = [line.split() for line in done.stdout.splitlines()]
    return {_Process(int(row[0]), int(row[1])): int(row[2]) for row in rows if not row[3].startswith("Z")}


def _forget(status: Mapping[str, Any], artifacts: str) -> None:
    """Once Ansible runs, remove the file in which ansible-runner stored the environment, which contains secrets."""
    if status["status"] == "running":
        (Path(artifacts) / "command").unlink(missing_ok=True)


def _tell_place(event: Mapping[str, Any], at: At) -> None:
    """Report that a host begins or ends a task, if an event of ansible-runner says so."""
    if event["event"] == "runner_on_start" or event["event"] in _OUTCOMES:
        task, role, host = _place(event.get("event_data") or {})
        at(host, title_of(task, role), event["event"] in _OUTCOMES)


def _place(data: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return task, role and host of an event's data."""
    task, role, host = (str(data.get(key) or "") for key in ("task", "role", "host"))
    return task, role, host


def _note(event: Mapping[str, Any], outcome: Outcome, told: Callable[[Step | Said], None], *, whole: bool) -> None:
    """Add an event of ansible-runner to the outcome, and report the step or message in it."""
    note = note_of(event, whole=whole)
    if isinstance(note, Step):
        told(note)
        if note.outcome in ("failed", "unreachable"):
            outcome.failures.append(note)
    elif isinstance(note, Said):
        told(note)
        outcome.said.append(note.text)
    elif event["event"] == "playbook_on_stats":
        outcome.hosts = hosts_of(event["event_data"])
        outcome.data = dict(event["event_data"].get("artifact_data") or {})


def note_of(event: Mapping[str, Any], *, whole: bool = False) -> Step | Said | None:
    """Return the step or message in an event of ansible-runner; None if the event has neither.

    Args:
        event: The event.
        whole: Whether the changes contain the changed lines of files.
    """
    data = event.get("event_data") or {}
    outcome = _OUTCOMES.get(event["event"])
    if outcome is None:
        text = str(event.get("stdout") or "").strip()
        return Said(text) if event["event"] in ("verbose", "warning", "deprecated", "error") and text else None
    result = data.get("res") or {}
    if outcome == "failed" and data.get("ignore_errors"):
        outcome = "ok"
    # `no_log` hides the task's result. Only Ansible's output then tells whether the task changed something.
    changed = result.get("changed") or ("censored" in result and _CHANGED.search(str(event.get("stdout"))))
    if outcome == "ok" and changed:
        outcome = "changed"
    message = message_of(result) if outcome in ("failed", "unreachable") else ""
    task, role, host = _place(data)
    warnings = tuple(map(str, result.get("warnings") or ()))
    report = report_of(data, result) if outcome in ("ok", "changed") else ()
    changes = tuple(changes_of(result, whole=whole)) if outcome == "changed" else ()
    return Step(task, role, host, outcome, message, warnings, report, changes)


def report_of(data: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the lines that a successful task shows to the user, given its result."""
    said = result.get("msg")
    if str(data.get("task_action", "")).rpartition(".")[2] not in _SHOWING or not said or said == _HELD:
        return ()
    entries = said if isinstance(said, list) else [said]
    return tuple(line for entry in entries for line in str(entry).splitlines())


def message_of(result: Mapping[str, Any]) -> str:
    """Return the message of a failed task, given the task's result."""
    entries = [entry for entry in result.get("results") or () if isinstance(entry, dict) and entry.get("failed")]
    if entries:
        return "; ".join(dict.fromkeys(message_of(entry) for entry in entries))
    keys = ("msg", "stderr", "module_stderr", "module_stdout", "stdout", "censored")
    said = [str(result.get(key) or "").strip() for key in keys]
    generic = ("non-zero return code", "MODULE FAILURE")
    telling = [text for text in said if text and not text.startswith(generic)]
    return _apt_message((telling or [text for text in said if text] or ["no reason was given"])[0], result)


def _apt_message(message: str, result: Mapping[str, Any]) -> str:
    """Return apt's own error and the fix for the message of a failed apt task; return other messages unchanged."""
    match = _APT.match(message)
    if match is None and not message.startswith("Failed to lock apt"):
        return message
    if match is not None:
        found = _APT_SAYS.findall(f"{result.get('stdout') or ''}\n{match['said']}")
        lines = dict.fromkeys(" ".join(text.split()) for text in found)
        message = "apt-get: " + ("; ".join(list(lines)[-_APT_LINES:]) or match["said"].strip() or message)
    ways = [way for words, way in _APT_WAYS.items() if words in message]
    return f"{message} ({ways[0]})" if ways else message


def hosts_of(stats: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return host -> outcome -> number of tasks with that outcome, given Ansible's recap.

    A task that changed something also counts as `ok`, as in Ansible's own recap.
    """
    kinds = {
        "ok": "ok",
        "changed": "changed",
        "failed": "failures",
        "unreachable": "dark",
        "skipped": "skipped",
        "rescued": "rescued",
    }
    found = {host for kind in kinds.values() for host in stats.get(kind) or {}}
    return {
        host: {name: int((stats.get(kind) or {}).get(host, 0)) for name, kind in kinds.items()}
        for host in sorted(found, key=texts.natural)
    }
