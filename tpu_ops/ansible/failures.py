"""The reason why a playbook failed on workers of the fleet, and what the user has to do."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tpu_ops import texts
from tpu_ops.ansible.playbook import Outcome
from tpu_ops.config import Settings
from tpu_ops.errors import RefusedError, UnreachableError, UsageError
from tpu_ops.fleet import contact, view
from tpu_ops.ssh import openssh

#: Advice: what to do after correcting an error.
AGAIN = "run the same command again"
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


def fix_of(outcome: Outcome, file: Path, target: str, settings: Settings, then: str = AGAIN) -> str:
    """Return what the user has to do after a failure of tasks; empty if no task failed.

    Args:
        outcome: The outcome of the playbook.
        file: The playbook.
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
        return again
    if outcome.code:
        raise UsageError(
            "Ansible did not run the playbook; see its output above", where=f"{shown(file)}, {target}", fix=again
        )
    if not outcome.hosts:
        fleet = view.known(settings)
        if fleet and not fleet.workers:
            fix = "`tpu_ops create` creates a node, `tpu_ops list` shows the fleet"
            raise UsageError("no task ran: the fleet has no workers", where=str(settings.file), fix=fix)
        fix = "see --tags and --skip-tags, and `tpu_ops list` for the fleet"
        raise UsageError("no task ran: no tag or no host matches", where=f"{shown(file)}, {target}", fix=fix)
    return ""


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


def shown(file: Path) -> str:
    """Return the path of a playbook as a user types it in the current directory."""
    return os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)
