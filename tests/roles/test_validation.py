"""What the playbooks say about faulty variables before they change anything: run here on this machine, check only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import yaml

from tests.support.vault import PASSWORD, vaulted

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = {
    "ansible_connection": "local",
    "ansible_become": False,
    "ansible_python_interpreter": sys.executable,
    "tpu_internal_ip": "10.0.0.2",
}
#: The lines count: faults name them.
FILES = {
    "group_vars/all.yml": """\
user_people: []
disks_mount: []
facts_own_variables: [git_seed]
git_seed: 1
python_source: uv
python_version: "3.12"
tcmalloc_for_runs: "yes"
users_people:
  - name: ada
    keys: [x]
  - { name: ada, key: y }
  - { name: bea, groups_of_nodes: [podd] }
disks_mounts:
  - { label: a, path: /mnt/a }
  - { label: b, path: /mnt/a }
nfs_exports:
  - { path: /srv/share, server: pod-w0 }
  - { path: /srv/share, server: pod-w1 }
git_people: [{ person: eve }]
workspace_timeout: 0
base_log_max: lots
base_timezone: Mars/Olympus
base_packages: [curl, bad name!]
launcher_ports: [9000, 8000]
users_patience: -1
base_apt_cache_valid_time: -1
base_apt_lock_timeout: -1
nfs_grace_seconds: 181
nfs_idle_timeout: -1
nfs_mount_timeout: 0
nfs_wait: 0
base_ca_certificates: [none-such.pem]
users_keys_directory: keys
python_environments: [{ name: tools, owner: eve }]
python_uv: /usr/local/bin/uv
""",
    "group_vars/pod.yml": """\
python_version: "3.10"
shell_oh_my_zsh_url: https://example.org/zsh
shell_oh_my_zsh_commit: main
shell_packages: [Bad Pkg]
shell_scrollback: 0
shell_history_size: 0
workspace_projects: "{{ nowhere + [] }}"
jax_version: 0.10.2
""",
    # The encrypted value is judged as it is once decrypted, and not shown. The last value overrides one of a wrong
    # type, which stays a fault.
    "host_vars/solo-w0.yml": """\
shell_history_size:
base_hugepages: sometimes
facts_groups: []
git_deploy_keys:
  - host: github.com
    key: !vault |
"""
    + indent(vaulted("s3cret"), " " * 6)
    + "tcmalloc_for_runs: false\n",
    # Ansible reads the file above alone.
    "host_vars/solo-w0.yaml": "base_log_max: 1G\n",
}
EXTRA = {"credentials_entries": [{"person": "ada", "kind": "wandb"}], "python_interpreter": "/usr/bin/python3"}
ALL = "all 4 workers"
OWN = "If it is your own, list it in facts_own_variables"
ZSH = (
    "shell_oh_my_zsh_commit: 'main' is not a commit of 40 hexadecimal digits, although shell_oh_my_zsh_url is set;"
    " a branch or a tag could move"
)
JAX = (
    "jax_version, python_version: JAX 0.10.2 needs Python 3.11 or later, and this worker's is 3.10; set python_source"
    " to deadsnakes or uv with python_version 3.11 or later, or jax_version to 0.6.2 or older"
)
FIRST = "first as users_people[0] (group_vars/all.yml:9); remove one of them, or give each its own nodes"
SIZE = "is not a size; give a whole number above 0, optionally with one of k, M, G, as in 500M"
PACKAGE = "is not a package name; use lowercase letters, digits, +, - and ., optionally with :ARCHITECTURE or =VERSION"
PEM = "none-such.pem on this machine: No such file or directory; name a PEM file"
PATH = "start it with /, without spaces or .."
IN_ENV = "name an environment variable in from_env"
UNREAD = "this file is not read, since Ansible reads only solo-w0.yml in the same directory"
ZONES = "`timedatectl list-timezones` lists them"
ITSELF = "the role %s sets this variable for other roles; remove your value"
EVE = "eve has no account and is not in users_people for this node; set %s, or list eve for this node"
ANOTHER = "remove one of them, or give it another path"
ROUND = "swap them"
WHOLE = "is not a private key from -----BEGIN to -----END; give the whole content of its file"
SAID = f"""\
group_vars/all.yml:1: user_people: no role has this variable; did you mean users_people? {OWN} ({ALL})
group_vars/all.yml:2: disks_mount: no role has this variable; did you mean disks_mounts? {OWN} ({ALL})
group_vars/all.yml:7: tcmalloc_for_runs: is a string and must be true or false ({ALL})
group_vars/all.yml:10: users_people[0]: ada: keys[0] starts with 'x', not with a key type such as ssh-ed25519 ({ALL})
group_vars/all.yml:11: users_people[1].key: unknown key; did you mean keys? ({ALL})
group_vars/all.yml:11: users_people[1]: ada: listed twice, {FIRST} ({ALL})
group_vars/all.yml:14: disks_mounts: /mnt/a is listed twice; remove one of them ({ALL})
group_vars/all.yml:17: nfs_exports: /srv/share has two servers, pod-w0 and pod-w1; {ANOTHER} ({ALL})
group_vars/all.yml:19: git_people[0]: {EVE % "person"} ({ALL})
group_vars/all.yml:20: workspace_timeout: 0 is too small; give 1 or more (solo-w0)
group_vars/all.yml:21: base_log_max: 'lots' {SIZE} ({ALL})
group_vars/all.yml:22: base_timezone: there is no time zone 'Mars/Olympus'; {ZONES} ({ALL})
group_vars/all.yml:23: base_packages[1]: 'bad name!' {PACKAGE} ({ALL})
group_vars/all.yml:24: launcher_ports: the first port, 9000, is above the last, 8000; {ROUND} ({ALL})
group_vars/all.yml:25: users_patience: -1 is too small; give 0 or more ({ALL})
group_vars/all.yml:26: base_apt_cache_valid_time: -1 is too small; give 0 or more ({ALL})
group_vars/all.yml:27: base_apt_lock_timeout: -1 is too small; give 0 or more ({ALL})
group_vars/all.yml:28: nfs_grace_seconds: 181 is too large; give 180 or less ({ALL})
group_vars/all.yml:29: nfs_idle_timeout: -1 is too small; give 0 or more ({ALL})
group_vars/all.yml:30: nfs_mount_timeout: 0 is too small; give 1 or more ({ALL})
group_vars/all.yml:31: nfs_wait: 0 is too small; give 1 or more ({ALL})
group_vars/all.yml:32: base_ca_certificates[0]: {PEM} ({ALL})
group_vars/all.yml:33: users_keys_directory: 'keys' is not an absolute path; {PATH} ({ALL})
group_vars/all.yml:34: python_environments[0].owner: tools: {EVE % "owner"} ({ALL})
group_vars/all.yml:35: python_uv: {ITSELF % "python"} ({ALL})
group_vars/pod.yml:3: {ZSH} (pod-w[0-2])
group_vars/pod.yml:4: shell_packages[0]: 'Bad Pkg' {PACKAGE} (pod-w[0-2])
group_vars/pod.yml:5: shell_scrollback: 0 is too small; give 1 or more (pod-w[0-2])
group_vars/pod.yml:6: shell_history_size: 0 is too small; give 1 or more (pod-w[0-2])
group_vars/pod.yml:7: workspace_projects: 'nowhere' is undefined (pod-w[0-2])
group_vars/pod.yml:8: {JAX} (pod-w[0-2])
host_vars/solo-w0.yaml: {UNREAD}; merge them into one file (solo-w0)
host_vars/solo-w0.yml:1: shell_history_size: is empty; give it a value or leave it out (solo-w0)
host_vars/solo-w0.yml:2: base_hugepages: 'sometimes' is not one of auto, always, madvise, never, keep (solo-w0)
host_vars/solo-w0.yml:3: facts_groups: {ITSELF % "facts"} (solo-w0)
host_vars/solo-w0.yml:6: git_deploy_keys[0]: github.com: key {WHOLE} (solo-w0)
CLI option '-e': credentials_entries[0]: wandb of ada: secret is missing; add it, or {IN_ENV} ({ALL})
CLI option '-e': python_interpreter: {ITSELF % "python"} ({ALL})
shell, tcmalloc, workspace: more of these roles' checks run once the faults above are corrected
"""


NOWHERE = "group_vars/all.yml:12: users_people[2]: bea: groups_of_nodes: the inventory has no podd (did you mean pod?)"

UNUSED = (
    "group_vars/pods.yml: this file is not read, since the inventory has no group pods; did you mean group_vars/pod?"
)


def playbook(folder: Path, name: str | Path, *argv: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a playbook on four hosts that are this machine; return its exit code and the tasks of the first play."""
    inventory = folder / "hosts.yml"
    (folder / "password").write_text(PASSWORD)
    pod: dict[str, Any] = {"hosts": {f"pod-w{index}": {} for index in range(3)}}
    inventory.write_text(json.dumps({"all": {"vars": SYSTEM, "children": {"pod": pod}, "hosts": {"solo-w0": {}}}}))
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", inventory, "--check", *argv, name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ
        | {"ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json", "ANSIBLE_VAULT_PASSWORD_FILE": str(folder / "password")},
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    assert "s3cret" not in done.stdout + done.stderr
    tasks: list[dict[str, Any]] = json.loads(done.stdout)["plays"][0]["tasks"]
    return done.returncode, tasks


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_faults_of_all_roles_and_hosts_are_one_list_before_anything_changes(tmp_path: Path) -> None:
    write(tmp_path, FILES | {"group_vars/pods.yml": "users_patience: 5\n"})
    code, tasks = playbook(tmp_path, "site.yml", "--tags", "launcher", "--extra-vars", json.dumps(EXTRA))
    assert code != 0
    warned = {text.replace(f"{tmp_path}/", "") for result in tasks[-2]["hosts"].values() for text in result["warnings"]}
    assert warned == {NOWHERE, UNUSED}
    # The next task would be the first change.
    assert tasks[-1]["task"]["name"] == "Refuse faulty variables"
    (said,) = {result["msg"] for result in tasks[-1]["hosts"].values() if result.get("failed")}
    lines = said.replace(f"{tmp_path}/", "").splitlines()
    assert lines == ["faulty variables, nothing was changed:", *SAID.splitlines()]


def test_each_number_of_a_role_has_a_least() -> None:
    roles = (ROOT / "roles").glob("*/meta/argument_specs.yml")
    options = [yaml.safe_load(path.read_text())["argument_specs"]["main"]["options"] for path in roles]
    numbers = {name for found in options for name, option in found.items() if option["type"] == "int"}
    refused = re.findall(r"^[^ ]+:\d+: (\w+): -?\d+ is too (?:small|large); ", SAID, re.MULTILINE)
    assert numbers == set(refused)


def test_valid_variables_pass_and_are_not_checked_again(tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=30)
    secrets = {
        "credentials_entries": [{"person": "ada", "kind": "huggingface", "secret": "s3cret"}],
        "git_deploy_keys": [{"host": "github.com", "key": key.read_text()}],
        "users_people": [{"name": "ada", "keys": [key.with_suffix(".pub").read_text().strip()]}],
    }
    write(
        tmp_path,
        {
            "group_vars/all.yml": 'python_source: uv\npython_version: "3.12"\nworkspace_environment: ""\n'
            "base_pip_index_url: /srv/simple\n",
            "group_vars/pod.yml": vaulted(json.dumps(secrets)),
            "host_vars/solo-w0.yml": "git_deploy_keys:\n  - host: github.com\n    key: !vault |\n"
            + indent(vaulted(key.read_text()), " " * 6),
        },
    )
    code, tasks = playbook(tmp_path, "site.yml", "--tags", "none-such")
    assert (code, [task["task"]["name"] for task in tasks][-2:]) == (
        0,
        ["Check the variables of every worker", "Refuse faulty variables"],
    )


def test_a_variable_that_two_files_of_a_directory_set_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"group_vars/pod.yml": "users_patience: 5\n"})
    (tmp_path / "group_vars" / "all").mkdir()
    people = [{"name": "ada", "keys": []}]
    write(
        tmp_path,
        {
            "group_vars/all/access.yml": f"own: 1\npython_source: uv\nusers_people: {json.dumps(people)}\n",
            "group_vars/all/main.yml": vaulted("users_people: []\nown: 2\nusers_patience: 9\n"),
        },
    )
    code, tasks = playbook(tmp_path, "playbooks/users.yml")
    assert code != 0
    (said,) = {result["msg"] for result in tasks[-1]["hosts"].values() if result.get("failed")}
    (line,) = said.replace(f"{tmp_path}/", "").splitlines()[1:]
    counts = "this value has no effect, since group_vars/all/main.yml:1 is read later and wins; remove one of them"
    assert line == f"group_vars/all/access.yml:3: users_people: {counts} (all 4 workers)"


def test_a_variable_that_a_role_sets_is_allowed_without_this_role(tmp_path: Path) -> None:
    write(tmp_path, {"group_vars/all.yml": "python_uv: /usr/local/bin/uv\n"})
    for name, part in (("workspace.yml", False), ("python.yml", True)):
        _, tasks = playbook(tmp_path, f"playbooks/{name}", "--tags", "none-such")
        said = [result.get("msg", "") for result in tasks[-1]["hosts"].values()]
        assert any("python_uv: the role python sets this variable" in text for text in said) == part, name


def test_a_role_that_is_used_alone_checks_its_variables_first(tmp_path: Path) -> None:
    play = tmp_path / "play.yml"
    play.write_text("- { hosts: solo-w0, gather_facts: false, roles: [users] }\n")
    write(tmp_path, {"group_vars/all.yml": "users_people: [{ name: Ada }]\n"})
    code, tasks = playbook(tmp_path, play)
    assert code != 0
    assert "users_people[0]: Ada: name must be" in tasks[-1]["hosts"]["solo-w0"]["msg"]
    assert tasks[-1]["task"]["name"] == "users : Check the people"


UNKNOWN = """\
base_packages: []
shell_packages: []
shell_oh_my_zsh_url: ohmyzsh/ohmyzsh
shell_oh_my_zsh_commit: 0123456789abcdef0123456789abcdef01234567
tcmalloc_for_runs: true
tcmalloc_library: /usr/lib/none/libtcmalloc.so.4
users_people:
  - name: ada
    shell: /usr/bin/none-such
users_remove_metadata_keys: [ada]
tpu_node: pod
python_source: uv
"""


@pytest.mark.parametrize(("name", "asked"), [("site.yml", {3, 6, 9, 10}), ("playbooks/users.yml", {9, 10})])
def test_faults_of_workers_and_of_variables_are_reported_together(tmp_path: Path, name: str, asked: set[int]) -> None:
    """No package of this run provides the shell."""
    write(tmp_path, {"group_vars/all.yml": UNKNOWN})
    code, tasks = playbook(tmp_path, name)
    assert code != 0
    assert tasks[-1]["task"]["name"] == "Refuse faulty variables"
    (said,) = {result["msg"] for result in tasks[-1]["hosts"].values() if result.get("failed")}
    brings = "does not exist, and no package that this playbook installs brings it;"
    words = {
        3: "shell_oh_my_zsh_url: is not of the form https://host/path,",
        6: f"tcmalloc_library: /usr/lib/none/libtcmalloc.so.4 {brings}",
        9: f"users_people[0]: ada: shell /usr/bin/none-such {brings}",
        10: "users_remove_metadata_keys: the API needs the settings of the fleet's tpu_vm.yml, but",
    }
    found = {int(line.split(":")[1]): line for line in said.replace(f"{tmp_path}/", "").splitlines()[1:]}
    assert found.keys() == asked
    assert [
        line for line, text in found.items() if not text.startswith(f"group_vars/all.yml:{line}: {words[line]}")
    ] == []


def test_check_mode_names_a_login_shell_that_no_role_would_install(tmp_path: Path) -> None:
    play = tmp_path / "play.yml"
    plays = {"hosts": "solo-w0", "gather_facts": False, "roles": [{"role": "shell", "when": False}, "users"]}
    play.write_text(json.dumps([plays]))
    people = [{"name": "bea", "shell": "/bin/none-such"}, {"name": "cid", "shell": "/usr/bin/on-the-way"}]
    write(tmp_path, {"group_vars/all.yml": json.dumps({"users_people": people, "shell_packages": ["on-the-way"]})})
    code, tasks = playbook(tmp_path, play)
    assert code != 0
    assert "login shell /bin/none-such is not installed" in tasks[-1]["hosts"]["solo-w0"]["msg"]


@pytest.mark.parametrize(
    "validate", sorted((ROOT / "roles").glob("*/tasks/validate.yml")), ids=lambda path: path.parts[-3]
)
def test_each_role_checks_first_unless_the_fleet_was_checked(validate: Path) -> None:
    first = yaml.safe_load((validate.parent / "main.yml").read_text())[0]
    assert first["ansible.builtin.import_tasks"] == "validate.yml"
    assert first["when"] == "__fleet_check is not defined"
