"""Invites a person to the fleet: checks the person's entry in users_people, and writes the message to send."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_ops import texts
from tpu_ops.ansible import playbook
from tpu_ops.ansible.failures import fix_of
from tpu_ops.ansible.playbook import Said, Step
from tpu_ops.cloud.node import SERVING_STATES, Worker
from tpu_ops.errors import UsageError
from tpu_ops.fleet import selection
from tpu_ops.fleet.view import Fleet
from tpu_ops.ssh import host_keys, known_hosts
from tpu_ops.ssh.portable import Portable, portable

#: The playbook that reads a person's entry.
_PLAYBOOK = "invite"
#: Ansible's variable for directories of filter plugins. The playbook needs the filters of the role users.
_FILTERS = "ANSIBLE_FILTER_PLUGINS"
#: The names that the role users accepts.
_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
#: What a person may do, by the key `sudo` of the entry.
_RIGHTS = {
    "none": "You can log in.",
    "launcher": "You can log in, and start and stop training runs of your own.",
    "full": "You can log in, start training runs, and become root with sudo.",
}
#: Parts of the message.
_KEYS = """\
Your login works with the private half of {which} (`ssh-keygen -lf FILE` shows it):

{keys}"""
_CONFIG = """\
1. Put this at the very top of your file ~/.ssh/config. On Windows, this is C:\\Users\\YOU\\.ssh\\config, without an
   extension. Make the file if it does not exist. If your key has another name than id_ed25519, id_ecdsa or id_rsa, add
   a line `IdentityFile ~/.ssh/NAME` below each line `User`."""
_KNOWN_HOSTS = """\
2. Add these lines to the file known_hosts in the same directory. ssh then recognizes the machines."""
_COMMANDS = """\
3. First commands, in a terminal (on Windows: PowerShell):

    ssh {host}
    ssh {host} {python} --version
    scp train.py {host}:

VS Code: install the extension Remote - SSH, choose `Remote-SSH: Connect to Host...`, then {host}.
There, `Python: Select Interpreter`: {python}."""
_POD = """\
On a node of several workers, JAX needs one process on each of them, started at the same moment."""
_RUNS = """\
Training runs on all workers of a node at once, from Linux and macOS:

    uv tool install tpu-ops
    tpu_ops init my-fleet --snapshot {source} --user {name} && cd my-fleet
    tpu_ops train {node} --sync my-code -- python train.py"""
_LATER = "Maintenance may change the addresses of the workers. Then you get a new text for step 1."


@dataclass(frozen=True)
class Invitation:
    """A person's place in the fleet.

    Attributes:
        name: The login name.
        person: The entry in `users_people`, with a value for every key.
        workers: The workers on which the entry gives the person an account, of running nodes.
        away: Nodes of the fleet that are not running -> their state. The inventory does not have them.
        venv: The Python environment with JAX on the workers.
        ssh: The person's ssh configuration for these workers.
    """

    name: str
    person: Mapping[str, Any]
    workers: Sequence[Worker]
    away: Mapping[str, str]
    venv: str
    ssh: Portable


def look(fleet: Fleet, name: str, told: Callable[[Step | Said], None]) -> Invitation:
    """Read the person's entry, and check that the person could log in with it.

    Args:
        fleet: The fleet.
        name: The login name.
        told: Shows the steps of the playbook that reads the inventory's variables.

    Raises:
        UsageError: The name is invalid; the entry is missing, faulty, without a key, or for no node; or Ansible cannot
            read the inventory.
    """
    if not _NAME.fullmatch(name):
        # Ansible would evaluate a template in the name.
        fix = "use a name in users_people: lowercase letters, digits, - and _"
        raise UsageError("the login name is invalid", where="NAME", fix=fix)
    settings = fleet.settings
    project = playbook.project_of(settings.path, settings.file)
    # Use the playbook of tpu_ops: a fleet with playbooks of its own may lack this one, which only reads.
    tool = playbook.tool_root()
    file = tool / "playbooks" / f"{_PLAYBOOK}.yml"
    filters = filter(None, (os.environ.get(_FILTERS), str(tool / "roles" / "users" / "filter_plugins")))
    environ = os.environ | {_FILTERS: os.pathsep.join(filters)}
    given = ["-e", json.dumps({"invite_name": name})]
    outcome = playbook.run(project, file, options=given, told=told, environ=environ)
    if fix := fix_of(outcome, file, "the fleet", settings):
        raise UsageError("the lists of people cannot be read; see above", where=str(settings.file.parent), fix=fix)
    answers: dict[str, dict[str, Any]] = outcome.data.get(_PLAYBOOK) or {}
    where = f"{name} in users_people ({settings.file.parent / 'group_vars'})"
    if faults := list(dict.fromkeys(fault for found in answers.values() for fault in found["faults"])):
        raise UsageError("the person's entry is faulty", where=where, fix="correct it", details=faults)
    listed = {found["worker"]: found for found in answers.values() if found["entries"]}
    here = _checked(name, where, listed, {other for found in answers.values() for other in found["names"]})
    workers = [worker for worker in fleet.workers if worker.host in here]
    away = {fleet.labels[node.full_name]: node.state for node in fleet.nodes if node.state not in SERVING_STATES}
    if not workers:
        what = "the entry applies only to hosts that are not workers of the fleet's nodes"
        raise UsageError(what, where=where, fix="`tpu_ops list` shows the fleet's nodes")
    found = here[workers[0].host]
    ways = selection.ways_of(settings, fleet.listed)
    keys = host_keys.keys_of(settings)
    if ways.jump and ways.jump not in here and any(ways.of(worker).proxy for worker in workers):
        what = f"workers are reached through {ways.jump} (proxy_jump), where the person has no account"
        raise UsageError(what, where=where, fix=f"add the node of {ways.jump} to nodes of the entry")
    ssh = portable(ways, settings, workers, user=name, keys=keys)
    if not ssh.known_hosts:
        host, why = next(iter(ssh.left_out.items()))
        raise UsageError(f"no worker can be reached: {host} {why}", where=where, fix="tpu_ops refresh")
    return Invitation(name, found["entries"][0], workers, away, found["venv"], ssh)


def _checked(
    name: str, where: str, listed: Mapping[str, Mapping[str, Any]], names: set[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the part of ``listed`` where the person has an account.

    Args:
        name: The login name.
        where: The place of the entry, for messages.
        listed: Worker -> what the playbook returned, for the workers whose users_people has the person.
        names: All login names in users_people of any worker.

    Raises:
        UsageError: The person is not listed for any worker, or has no key.
    """
    example = f"- {{name: {name}, keys: [ssh-ed25519 AAAA...], sudo: launcher}}"
    if not listed and name in names:
        raise UsageError(
            "the person's entry names only nodes that the fleet does not have, or that are not running",
            where=where,
            fix="correct nodes or groups_of_nodes in it; `tpu_ops list` shows the fleet's nodes",
        )
    if not listed:
        near = difflib.get_close_matches(name, sorted(names), 1)
        hint = f"; or did you mean {near[0]}?" if near else ""
        raise UsageError(
            "the person is not listed", where=where, fix=f"add an entry, with the person's public key: {example}{hint}"
        )
    here = {host: found for host, found in listed.items() if found["entries"][0]["state"] == "present"}
    if not here:
        raise UsageError("the entry says state: absent", where=where, fix="remove the line state: absent")
    if not all(found["entries"][0]["keys"] for found in here.values()):
        raise UsageError(
            "the entry has no key, so nobody could log in with it",
            where=where,
            fix="ask for the content of the person's ~/.ssh/id_ed25519.pub (`ssh-keygen -t ed25519` makes one), and "
            f"list it under keys: {example}",
        )
    return here


def message(invitation: Invitation, source: str = "") -> str:
    """Return the message to send to the person.

    Args:
        invitation: The person's place in the fleet.
        source: Where a snapshot of the fleet is published; empty if it is not.
    """
    name, person, workers = invitation.name, invitation.person, invitation.workers
    first = workers[0]
    host = first.label if first.node.worker_count == 1 else first.host
    python = f"{invitation.venv}/bin/python"
    nodes = {worker.label: worker.node for worker in workers}
    places = [
        f"    {label}: {node.accelerator_type} in {node.zone}, "
        f"{texts.folded([worker.host for worker in workers if worker.label == label])}"
        for label, node in nodes.items()
    ]
    fingerprints = [f"    {key.split()[0]} {known_hosts.fingerprint(key.split()[1])}" for key in person["keys"]]
    parts = [
        f"Hello {person['comment'] or name},",
        f"you have the account {name} on {texts.count(len(workers), 'TPU worker')}. {_RIGHTS[person['sudo']]}",
        "\n".join(places),
        _KEYS.format(keys="\n".join(fingerprints), which="this key" if len(fingerprints) == 1 else "one of these keys"),
        _CONFIG,
        invitation.ssh.config.strip(),
        _KNOWN_HOSTS,
        invitation.ssh.known_hosts.strip(),
        *filter(None, [invitation.ssh.needs]),
        _COMMANDS.format(host=host, python=python),
    ]
    if any(node.worker_count > 1 for node in nodes.values()):
        parts.append(_POD)
    if source and person["sudo"] != "none":
        parts.append(_RUNS.format(source=source, name=name, node=first.label))
    return "\n\n".join([*parts, _LATER]) + "\n"
