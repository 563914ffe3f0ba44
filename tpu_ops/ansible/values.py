"""What hosts need to run a playbook on themselves: inventories, and variables that only the controller can compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tpu_ops.ansible import exported, playbook
from tpu_ops.ansible.failures import AGAIN, VAULT, no_yaml, shown
from tpu_ops.ansible.playbook import Outcome, Project
from tpu_ops.errors import UsageError


class Files(NamedTuple):
    """The texts of two YAML files.

    Attributes:
        inventory: An inventory.
        extra: Extra variables, for `-e @FILE`.
    """

    inventory: str
    extra: str


@dataclass(frozen=True)
class Values:
    """What hosts need to run a playbook on themselves.

    A host needs the files of `shared` and its own, in one inventory directory and as two options `-e`. Together they
    give it its groups, and the values that all variables have in a play of the controller. They may contain secrets.

    Attributes:
        shared: What all these hosts have in common: variables of the group `all`, and extra variables.
        hosts: Host -> an inventory of this host only, with a local connection, and its extra variables.
        cannot: Host -> the reasons why only the controller can run the playbook on this host.
        said: What Ansible printed, such as warnings of the inventory.
    """

    shared: Files
    hosts: dict[str, Files]
    cannot: dict[str, list[str]]
    said: str


def compute(
    project: Project,
    file: Path,
    *,
    hosts: Sequence[str] = (),
    options: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    secrets: bool = True,
) -> Values:
    """Compute what hosts need to run a playbook on themselves. Arguments are those of `playbook.run`.

    Args:
        project: As for `playbook.run`; also the others.
        file: The playbook.
        hosts: Names or groups of the inventory; empty means all hosts.
        options: Further options of ansible-playbook.
        environ: The environment.
        secrets: Whether the values may contain secrets. Without them, roles do what they do without their secret
            variables, and hosts whose roles need another secret are among `cannot`.

    Raises:
        UsageError: Ansible could not read the playbook, the inventory or variables, or ANSIBLE_INVENTORY does not
            include the fleet's file.
    """
    inventories = exported.inventories(project.inventory, environ)
    command = [sys.executable, "-P", "-m", "tpu_ops.ansible.worker_values", str(file), *options]
    command += [] if inventories else ["--inventory", str(project.inventory)]
    env = playbook.ansible_environment(project, environ)
    env |= {exported.VARIABLE: ",".join(inventories)} if inventories else {}
    done = subprocess.run(
        command,
        input=json.dumps({"hosts": list(hosts), "secrets": secrets}),
        cwd=project.root,
        env=env,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    answer: dict[str, Any] = json.loads(done.stdout or "{}")
    said = done.stderr.strip()
    if done.returncode:
        # The cause of an unreadable inventory is in what Ansible has printed before.
        error = "; ".join(text for text in (answer.get("error"), said) if text)
        raise UsageError(error, where=f"{shown(file)}, {project.inventory}", fix=_fix(project, error))
    own = {host: Files(*texts) for host, texts in answer["hosts"].items()}
    return Values(Files(*answer["shared"]), own, answer["cannot"], said)


def _fix(project: Project, error: str) -> str:
    """Return what the user does after an error of Ansible."""
    if Outcome(said=[error]).locked:
        return VAULT
    fault = no_yaml(project.inventory) if "YAML" in error else ""
    return f"correct {fault}" if fault else f"correct the error and {AGAIN}"
