"""Workers that run a playbook on themselves have the variables that they have in a play of the controller."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.fleet import ROOT
from tests.support.vault import PASSWORD, vaulted
from tools import check_roles
from tpu_ops.ansible import playbook, values
from tpu_ops.errors import UsageError

ROLES = [path.parent.parent for path in sorted((ROOT / "roles").glob("*/tasks/main.yml"))]

#: Writes the values of all variables, or the class of the error, to a file for each host.
SHOW = """
import json, pathlib
from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        found = {}
        for name in [*task_vars, "group_names"]:
            if name in self._task.args["without"] or name.startswith("ansible_"):
                continue
            try:
                found[name] = self._templar.template(task_vars[name])
            except Exception as exc:
                found[name] = f"error: {type(exc).__name__}"
        file = pathlib.Path(self._task.args["into"], task_vars["inventory_hostname"])
        file.write_text(json.dumps(found, default=str))
        return super().run(tmp, task_vars) | {"changed": False}
"""
#: Variables that differ: about the way to a host, about the run, and about places of the controller.
WITHOUT = ["hostvars", "vars", "groups", "play_hosts", "playbook_dir", "environment", "inventory_dir", "inventory_file"]

FACTS = {
    "distribution": "Ubuntu",
    "distribution_version": "24.04",
    "distribution_release": "noble",
    "python": {"executable": "/usr/bin/python3", "version": {"major": 3, "minor": 12}},
    "worker": {"packages": {}, "files": {}, "units": {}, "groups": {}, "accounts": {}, "programs": {}, "paths": {}},
}
PLAY = [
    {
        "hosts": "all",
        "gather_facts": False,
        "tasks": [
            {"ansible.builtin.set_fact": {**FACTS, "cacheable": True}},
            *({"ansible.builtin.import_role": {"name": role.name}, "tags": ["never"]} for role in ROLES),
            {"show": {"into": "{{ into }}", "without": WITHOUT}},
        ],
    }
]
HOSTS: dict[str, Any] = {
    "all": {
        "children": {
            "tpu": {"children": {"node_pod": {}}},
            "node_pod": {
                "hosts": {
                    "pod-w0": {"tpu_internal_ip": "10.0.0.1"},
                    "pod-w1": {"tpu_internal_ip": "10.0.0.2", "own": "w1 {{ own_part }}"},
                }
            },
            "node_store": {"hosts": {"store-w0": {"nfs_address": "10.0.0.9"}}},
            "others": {
                "hosts": {
                    "keys-w0": {"nfs_address": "10.0.0.3", "users_remove_metadata_keys": ["emmy"]},
                    "facts-w0": {
                        "nfs_address": "10.0.0.4",
                        "own_part": "{{ lookup('env', 'HOME') ~ ansible_facts['distribution'] }}",
                    },
                    "file-w0": {"nfs_address": "10.0.0.5", "own_part": "{{ lookup('file', 'missing.txt') }}"},
                }
            },
        },
        "vars": {
            "ansible_connection": "local",
            "ansible_user": "emmy",
            "ansible_host": "{{ inventory_hostname }}.test",
            "ansible_ssh_private_key_file": "{{ inventory_dir }}/key",
        },
    }
}
VAULT = {
    **{f"vault_{name}": f"s3cret-{name}" for name in ("deploy_key", "git_emmy", "aws_id_lise", "aws_key_lise")},
    "vault_huggingface_lise": "{{ own_part }}",
    "vault_tracker_lise": ["s3cret-1", {"two": "{{ lookup('env', 'OWN_BRACES') }}"}],
}
OWN = {
    "own": "all",
    "own_part": "part of {{ inventory_hostname }}",
    "own_numbers": {1: "one", 2.5: True, "3": None},
    "own_environment": "{{ lookup('env', 'OWN_WORD') }}",
    "own_braces": "{{ lookup('env', 'OWN_BRACES') }}",
    "own_list": [
        "{{ lookup('file', inventory_dir ~ '/own.txt') }}",
        "{{ ansible_facts['distribution'] | default('none') }}",
    ],
    "own_way": "{{ ansible_user }} at {{ ansible_host }}",
    "own_others": "{{ groups['tpu'] | length }} {{ hostvars['store-w0']['own_part'] }}",
    "own_date": datetime.date(2026, 1, 2),
    "own_lines": "one\n  two: #3\n\u00e9\t\n",
    "base_ca_certificates": ["ca.pem"],
    "jax_lock": "locks/tools.txt",
    "users_more_people": [{"name": "ada", "nodes": ["gone"]}],
}


RAW = "own_unsafe: !unsafe '{{ own }}'\nown_set: !!set {a}\nown_vaulted: !vault |\n" + textwrap.indent(
    vaulted("{{ own_part }}, locked"), "  "
)
EXTRA = {"own_extra": "{{ lookup('env', 'OWN_WORD') }} {{ own }}"}


class Fleet:
    """A fleet of five hosts, and a playbook that has the variables of all roles."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.inventory, self.project = folder, folder / "fleet" / "hosts.yml", folder / "project"
        files = {
            "fleet/hosts.yml": HOSTS,
            "fleet/group_vars/all/own.yml": OWN,
            "fleet/group_vars/all/vault.yml": vaulted(yaml.safe_dump(VAULT)),
            "fleet/group_vars/all/raw.yml": RAW,
            "fleet/group_vars/tpu.yml": {"own": "tpu", "own_beside": "the inventory"},
            "fleet/group_vars/node_pod.yml": {"own": "node_pod"},
            "fleet/own.txt": "text of {{ nobody }}",
            "fleet/ca.pem": vaulted("a certificate"),
            "fleet/key": "a key",
            "fleet/key.pub": "ssh-ed25519 AAAA emmy",
            "project/play.yml": PLAY,
            "project/action_plugins/show.py": SHOW,
            "project/group_vars/tpu.yml": {"own_beside": "the playbook {{ inventory_hostname }}"},
            "project/host_vars/pod-w1.yml": {"own_last": "{{ own_beside }}"},
            "password": PASSWORD,
        }
        for name, content in files.items():
            write(folder / name, content)
        shutil.copytree(
            ROOT / "examples/fleet/inventory/group_vars/all", folder / "fleet/group_vars/all", dirs_exist_ok=True
        )
        shutil.copytree(ROOT / "examples/fleet/inventory/locks", folder / "fleet/locks")
        write(folder / "fleet/locks/jax-3.12-x86_64.txt", "# Lock of jax\njax==1 {{ nobody }}\n")
        self.environ = {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "PYTHONHASHSEED": "0",  # Ansible's filter `difference` has no order of its own.
        }
        self.secrets = {
            "ANSIBLE_VAULT_PASSWORD_FILE": str(folder / "password"),
            "WANDB_API_KEY": "s3cret {% raw %}",
            "OWN_WORD": "word",
            "OWN_BRACES": "{{ 7 * 6 }}",
        }

    def compute(self, *hosts: str, secrets: bool = True, **changes: str) -> values.Values:
        """Return what hosts need to run the playbook on themselves."""
        project = playbook.Project(self.project, ROOT / "ansible.cfg", self.inventory)
        options = ["-e", json.dumps(EXTRA)]
        environ = {**self.environ, **self.secrets, **changes}
        file = project.root / "play.yml"
        return values.compute(project, file, hosts=hosts, options=options, environ=environ, secrets=secrets)

    def play(self, folder: Path, *options: str, **secrets: str) -> dict[str, dict[str, Any]]:
        """Run the playbook; return host -> its variables."""
        into = self.folder / f"{folder.name}-shown"
        into.mkdir()
        done = subprocess.run(
            [Path(sys.executable).parent / "ansible-playbook", *options, "-e", f"into={into}", "play.yml"],
            cwd=folder,
            env={**self.environ, **secrets},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return {file.name: json.loads(file.read_text()) for file in into.iterdir()}


def write(path: Path, content: Any) -> None:
    """Write a text, or a value as YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, allow_unicode=True))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """The fleet, whose files no test changes."""
    return Fleet(tmp_path_factory.mktemp("values"))


@pytest.fixture(scope="module")
def found(fleet: Fleet) -> values.Values:
    """What all hosts of the fleet need."""
    return fleet.compute()


def test_a_host_alone_has_the_variables_that_a_play_of_the_controller_gives_it(
    fleet: Fleet, found: values.Values, tmp_path: Path
) -> None:
    """Without the fleet's files, the vault's password and the controller's environment."""
    options = ["-i", str(fleet.inventory), "--limit", "pod-w1,store-w0", "-e", json.dumps(EXTRA)]
    pushed = fleet.play(fleet.project, *options, **fleet.secrets)
    roles, used = check_roles.variables_and_uses(ROLES)
    given = {name for role in roles.values() for name in role["about"].get("controller", {}).get("values", [])}
    every = {name for role in roles.values() for name in role["variables"]}
    # Variables that only variables of the controller read; and those with values that the workers exchange.
    exchanged = {"__workspace_answers", "__workspace_questions", "facts_fleet", "facts_fleet_hosts"}
    inner = every - given - check_roles.read_on_workers(roles, used).keys() | exchanged
    moved = fleet.inventory.parent.rename(fleet.folder / "moved")
    try:
        for host in pushed:
            there = tmp_path / host
            for name in ("play.yml", "action_plugins/show.py"):
                write(there / name, (fleet.project / name).read_text())
            for name, files in (("shared", found.shared), ("own", found.hosts[host])):
                write(there / "inventory" / f"{name}.yml", files.inventory)
                write(there / f"{name}.yml", files.extra)
            (alone,) = fleet.play(there, "-i", "inventory", "-e", "@shared.yml", "-e", "@own.yml").values()
            assert alone.keys() == pushed[host].keys() >= every
            different = {name: (alone[name], pushed[host][name]) for name in alone if alone[name] != pushed[host][name]}
            assert different.keys() <= inner | {"into"}
    finally:
        moved.rename(fleet.inventory.parent)
    # What tasks register, and files of roles, which only their tasks find: nothing else is left out of the comparison.
    failed = [name for name, value in pushed["pod-w1"].items() if str(value).startswith("error: ")]
    of_tasks = (
        *("__launcher_", "__python_slice_", "__python_login_files", "__python_command_files", "__shell_"),
        *("__users_reload", "__workspace_answers", "facts_fleet"),
    )
    # Ansible's own variable for the running task is no value.
    assert [name for name in failed if not name.startswith(of_tasks) and name != "_task"] == []
    pod, store = pushed["pod-w1"], pushed["store-w0"]
    assert (pod["own_beside"], pod["group_names"]) == ("the playbook pod-w1", ["node_pod", "tpu"])
    assert (pod["own_unsafe"], pod["own_vaulted"]) == ("{{ own }}", "{{ own_part }}, locked")
    assert (pod["own_extra"], store["own_braces"]) == ("word w1 part of pod-w1", "{{ 7 * 6 }}")
    assert pod["__nfs_fleet"]["here"]["mounts"][0]["server"] == "10.0.0.9"
    assert store["__credentials_environment"] == {"WANDB_API_KEY": "s3cret {% raw %}"}
    assert store["__users_own_keys"] == ["ssh-ed25519 AAAA emmy"]


def test_values_are_final_and_those_of_all_hosts_are_stated_once(found: values.Values) -> None:
    shared, own = found.shared.inventory.replace("'", ""), found.hosts["pod-w0"].inventory
    for line in (
        "own_braces: !unsafe {{ 7 * 6 }}",
        "own_environment: word",
        "own_list:\n    - !unsafe text of {{ nobody }}\n    - {{ ansible_facts[distribution]",
        "own_part: part of {{ inventory_hostname }}",
        "vault_git_emmy: s3cret-git_emmy",
    ):
        assert line in shared, line
    assert "own_way: emmy at pod-w0.test" in own
    assert len(own) < 500
    assert [name for name in ("ansible_user:", "ansible_host:", "ansible_ssh") if name in shared + own] == []


def test_hosts_that_need_the_controller_during_the_play_are_named_with_the_reason(found: values.Values) -> None:
    reasons = {
        "keys-w0": "users_remove_metadata_keys: keys are removed from metadata with the controller's credentials",
        "facts-w0": "own_part: it needs both the controller and facts of the host",
        "file-w0": "own_part: the controller cannot compute it:",
    }
    assert found.cannot.keys() == reasons.keys()
    assert [host for host, (reason,) in found.cannot.items() if not reason.startswith(reasons[host])] == []
    assert list(found.hosts) == ["pod-w0", "pod-w1", "store-w0"]


def test_without_secrets_no_value_comes_from_a_vault_a_lookup_of_the_user_or_a_secret_variable_of_a_role(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path)
    check = "action_plugins/check_variables.py"
    write(fleet.project / check, (ROOT / "playbooks" / check).read_text())
    (tmp_path / "roles").symlink_to(ROOT / "roles")
    needs = {"base_pip_index_url": "https://me:{{ vault_git_emmy }}@index.test/simple"}
    write(tmp_path / "fleet/group_vars/node_store.yml", needs)
    write(tmp_path / "fleet/host_vars/pod-w1.yml", "base_timezone: !vault |\n" + textwrap.indent(vaulted("UTC"), "  "))
    found = fleet.compute("pod-w0", "pod-w1", "store-w0", secrets=False)
    assert found.cannot.keys() == {"pod-w1", "store-w0"}
    assert found.cannot["store-w0"][0].startswith("base_pip_index_url: vault_git_emmy, which it needs, may be secret")
    assert found.cannot["pod-w1"][0].startswith("base_timezone: it may be secret")
    inventory = yaml.safe_load(found.shared.inventory.replace("!unsafe", ""))["all"]["vars"]
    extra = yaml.safe_load(found.shared.extra.replace("!unsafe", ""))
    text = str([found.shared, found.hosts["pod-w0"]])
    assert "s3cret" not in text
    assert "locked" not in text
    assert [name for name in inventory if name.startswith("vault_")] == []
    assert not inventory.keys() & {"own_vaulted", "own_environment", "own_braces", "own_list"}
    assert extra["credentials_entries"] == extra["git_deploy_keys"] == []
    assert extra["__credentials_environment"] == {}
    assert extra["__users_own_keys"] == ["ssh-ed25519 AAAA emmy"]
    assert inventory["own_part"] == OWN["own_part"]


def test_without_secrets_no_other_host_and_no_derived_variable_reveals_one(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    check = "action_plugins/check_variables.py"
    write(fleet.project / check, (ROOT / "playbooks" / check).read_text())
    (tmp_path / "roles").symlink_to(ROOT / "roles")
    own = {
        "own_copy": "{{ hostvars[inventory_hostname].vault_git_emmy }}",
        "own_derived": "{{ vault_git_emmy }} {{ inventory_dir }}",
        "own_plain": "plain",
    }
    write(tmp_path / "fleet/group_vars/all/copies.yml", own)
    write(tmp_path / "fleet/host_vars/pod-w1.yml", {"base_timezone": "{{ own_copy }}"})
    write(tmp_path / "fleet/host_vars/store-w0.yml", {"base_timezone": "{{ lookup('env', 'OWN_WORD') }}"})
    found = fleet.compute("pod-w0", "pod-w1", "store-w0", secrets=False)
    assert found.cannot.keys() == {"pod-w1", "store-w0"}
    assert found.cannot["pod-w1"][0].startswith(
        "base_timezone: own_copy, vault_git_emmy, which it needs, may be secret"
    )
    assert found.cannot["store-w0"][0].startswith("base_timezone: it may be secret")
    text = str([found.shared, found.hosts["pod-w0"]])
    assert "own_plain" in text
    assert [name for name in ("s3cret", "own_copy", "own_derived") if name in text] == []


def test_a_fault_of_variables_files_which_workers_do_not_have_is_named_with_its_place(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    check = "action_plugins/check_variables.py"
    write(fleet.project / check, (ROOT / "playbooks" / check).read_text())
    (tmp_path / "roles").symlink_to(ROOT / "roles")
    for name in ("a", "b"):
        write(tmp_path / f"fleet/group_vars/node_store/{name}.yml", {"base_timezone": name})
    found = fleet.compute("pod-w0", "store-w0")
    assert list(found.hosts) == ["pod-w0"]
    (reason,) = found.cannot["store-w0"]
    assert "node_store/a.yml:1" in reason
    assert "base_timezone" in reason


def test_hosts_whose_plays_differ_or_that_have_none_need_the_controller(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    write(tmp_path / "fleet/group_vars/all/two.yml", {"own_two": "{{ lookup('env', 'OWN_WORD') }} {{ two }}"})
    plays = [{"hosts": "node_pod", "vars": {"two": 1}}, {"hosts": "pod-w0", "vars": {"two": 2}}]
    write(tmp_path / "project/play.yml", plays)
    found = fleet.compute("node_pod", "store-w0")
    assert found.cannot == {
        "pod-w0": ["two plays give different values to own_two"],
        "store-w0": ["no play of play.yml is for this host"],
    }
    assert "own_two: word 1" in found.shared.inventory + found.hosts["pod-w1"].inventory


@pytest.mark.parametrize(
    ("name", "content", "said", "fix"),
    [
        ("password", "wrong", "no vault secrets", "ANSIBLE_VAULT_PASSWORD_FILE"),
        ("fleet/group_vars/all/own.yml", "own: [", "YAML", "own.yml:"),
        ("fleet/hosts.yml", "all:\n  hosts: 7\n", "with 'plain_yaml' plugin: Invalid", "correct the error"),
        (
            "project/play.yml",
            "- hosts: all\n  rolls: []\n",
            "'rolls' is not a valid attribute for a Play",
            "correct the",
        ),
    ],
)
def test_an_error_of_ansible_is_one_message(tmp_path: Path, name: str, content: str, said: str, fix: str) -> None:
    fleet = Fleet(tmp_path)
    write(tmp_path / name, content)
    with pytest.raises(UsageError) as error:
        fleet.compute("pod-w0")
    assert said in str(error.value)
    assert fix in str(error.value.fix)
