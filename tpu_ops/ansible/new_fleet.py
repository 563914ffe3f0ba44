"""The files of a new fleet directory."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from tpu_ops.ansible.playbook import GENERATED, tool_root
from tpu_ops.config import FLEET_FILE

#: File with the variables of all workers.
VARIABLES = Path("inventory/group_vars/all/main.yml")
#: The files that lead plain Ansible to the playbooks, roles and the inventory plugin of tpu_ops.
FOR_ANSIBLE = (Path("ansible.cfg"), Path("site.yml"))

_FLEET = """\
# Which nodes are in this fleet, and how their workers are reached. docs/inventory.md describes all keys.
plugin: tpu_vm
{nodes}
# Your account on the workers, and your ssh key, whose public half `tpu_ops create` puts on new nodes.
user: {user}
private_key: {key}
"""
_VARIABLES = """\
# What every worker gets. `tpu_ops configure` makes it so: run it again after each change. docs/roles.md lists the roles
# with their variables; group_vars/node_NAME.yml beside the directory all/ is for the workers of one node.

# deadsnakes brings Python for Ubuntu; uv brings it for any distribution.
python_source: {source}
python_version: "{python}"
# JAX with libtpu, and further packages beside it, as in [flax, optax==0.2.5].
jax_platform: tpu
jax_packages: {packages}
shell_packages: [mosh, tmux, zsh]
# More people than you, with their keys:
# users_people:
#   - {{name: grace, keys: ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI... grace"], sudo: launcher}}
users_people: []
"""
_SITE = """\
{mark}, for plain `ansible-playbook site.yml`.
# After a move or an update of tpu_ops, run `tpu_ops init` here again.
- name: Configure the fleet
  ansible.builtin.import_playbook: {playbook}
"""


@dataclass(frozen=True)
class Choices:
    """What a user chooses for a new fleet.

    Attributes:
        snapshot: Source of a published snapshot, which has the nodes; empty means the API.
        project: Project id; empty with a snapshot.
        zones: The zones; empty means all.
        user: Account on the workers.
        key: Private key.
        python: Version of Python, as in 3.12.
        source: Source of Python, ``deadsnakes`` or ``uv``.
        packages: Packages beside JAX.
    """

    snapshot: str
    project: str
    zones: tuple[str, ...]
    user: str
    key: str
    python: str
    source: str
    packages: tuple[str, ...]


def files_of(choices: Choices) -> dict[Path, str]:
    """Return the files that the user edits: path in the fleet directory -> text.

    The fleet's file is the last one: while it is missing, the directory is no fleet, and `init` begins again.
    """
    nodes = [f"snapshot: {_scalar(choices.snapshot)}" if choices.snapshot else f"projects: {_flow([choices.project])}"]
    nodes.append(f"zones: {_flow(choices.zones)}" if choices.zones else "# zones: [us-central2-b]    # default: all")
    named = {"user": _scalar(choices.user), "key": _scalar(choices.key)}
    return {
        VARIABLES: _VARIABLES.format(
            source=choices.source,
            python=choices.python,
            packages=_flow(choices.packages),
        ),
        FLEET_FILE: _FLEET.format(nodes="\n".join(nodes), **named),
    }


def for_ansible() -> dict[Path, str]:
    """Return the files that are the same for all fleets of this installation: path in the fleet directory -> text."""
    tool = tool_root()
    config = (tool / "ansible.cfg").read_text(encoding="utf-8")
    for key, place in (("inventory_plugins", tool / "inventory_plugins"), ("roles_path", tool / "roles")):
        config = re.sub(rf"(?m)^{key} = .*$", functools.partial(_line, f"{key} = {place}"), config)
    lead = f"{GENERATED}, for plain Ansible. After a move or an update of tpu_ops, run `tpu_ops init` here again.\n"
    site = _SITE.format(mark=GENERATED, playbook=_scalar(str(tool / "playbooks" / "site.yml")))
    return dict(zip(FOR_ANSIBLE, (lead + config, site), strict=True))


def _scalar(text: str) -> str:
    return _flow([text])[1:-1]


def _line(text: str, _: re.Match[str]) -> str:
    return text


def _flow(words: tuple[str, ...] | list[str]) -> str:
    return yaml.safe_dump(list(words), default_flow_style=True, width=2**20).strip()
