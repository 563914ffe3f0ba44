"""The Ansible collection: built, installed without a network, and used from a project that is not a clone."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fleet import ROOT
from tests.support.nodes import node
from tests.support.published import Member, document
from tools import collection
from tpu_ops import config

PROGRAMS = Path(sys.executable).parent
CONFIG = """\
[defaults]
inventory = inventory/tpu_vm.yml
collections_path = {collections}
stdout_callback = ansible.posix.json
[inventory]
enable_plugins = tpu_ops.fleet.tpu_vm
any_unparsed_is_failed = true
"""
#: The hosts are this machine, and check mode changes nothing: ssh is tested elsewhere.
LOCAL = {
    "ansible_connection": "local",
    "ansible_become": False,
    "ansible_python_interpreter": sys.executable,
}
PLAY = """\
- hosts: node_solo
  gather_facts: false
  roles: [tpu_ops.fleet.tcmalloc, tpu_ops.fleet.credentials]
"""


@pytest.fixture(scope="module")
def collections(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory into which the built collection was installed without a network."""
    built, installed = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("installed")
    assert collection.main(["--output", str(built)]) == 0
    (archive,) = built.glob("*.tar.gz")
    program = str(PROGRAMS / "ansible-galaxy")
    command = [program, "collection", "install", "--offline", "-p", str(installed), str(archive)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return installed


@pytest.fixture
def project(tmp_path: Path, collections: Path) -> Member:
    """Return a foreign project that uses the collection, with a published fleet of two nodes."""
    member = Member(tmp_path, plugin="tpu_ops.fleet.tpu_vm", snapshot=str(tmp_path / "published.json"))
    (tmp_path / "published.json").write_text(document([node(), node("solo", node_id="2", count=1)]).text())
    (member.path / "ansible.cfg").write_text(CONFIG.format(collections=collections))
    (member.path / "play.yml").write_text(PLAY)
    return member


def ansible(project: Member, program: str, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Ansible in the project."""
    environ = {name: value for name, value in project.environ().items() if not name.startswith("ANSIBLE_")} | variables
    command = [str(PROGRAMS / program), *argv]
    return subprocess.run(
        command, cwd=project.path, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_inventory_plugin_lists_the_fleet_by_its_full_name(project: Member) -> None:
    done = ansible(project, "ansible-inventory", "--list")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["node_pod"]["hosts"] == ["pod-w0", "pod-w1"]
    assert found["_meta"]["hostvars"]["solo-w0"]["tpu_worker_count"] == 1
    # The commands of tpu_ops, and its own Ansible, read the same file.
    assert config.load_file(project.file).file == project.file
    own = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    done = ansible(project, "ansible-inventory", "-i", str(project.file), "--list", **own)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["node_pod"]["hosts"] == ["pod-w0", "pod-w1"]


def test_without_the_python_package_the_error_says_how_to_install_it(project: Member, tmp_path: Path) -> None:
    (tmp_path / "without" / "tpu_ops").mkdir(parents=True)
    (tmp_path / "without" / "tpu_ops" / "__init__.py").write_text("raise ImportError('there is none')\n")
    done = ansible(project, "ansible-inventory", "--graph", PYTHONPATH=str(tmp_path / "without"))
    assert done.returncode != 0
    assert "the Python package tpu-ops cannot be imported (there is none)" in done.stderr
    assert "`pip install tpu-ops`" in done.stderr


def test_roles_run_by_their_full_names(project: Member) -> None:
    entries = [{"person": getpass.getuser(), "kind": "wandb", "secret": "s3cret"}]
    extra = json.dumps(LOCAL | {"tcmalloc_for_runs": False, "credentials_entries": entries})
    done = ansible(project, "ansible-playbook", "--check", "--extra-vars", extra, "play.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "s3cret" not in done.stdout
    result = json.loads(done.stdout)
    tasks = {task["task"]["name"]: task["hosts"]["solo-w0"] for task in result["plays"][0]["tasks"]}
    # An action with a module of the same name, and a module with several module_utils.
    managed = tasks["tpu_ops.fleet.tcmalloc : Give TCMalloc to training runs only"]
    assert managed["action"] == "tpu_ops.fleet.managed_files"
    assert "skipped" not in tasks["tpu_ops.fleet.credentials : Write people's credentials"]


def test_the_playbook_of_all_roles_checks_the_variables_of_the_project(project: Member) -> None:
    (project.path / "inventory" / "group_vars").mkdir()
    (project.path / "inventory" / "group_vars" / "all.yml").write_text("user_people: []\ntcmalloc_for_runs: 'yes'\n")
    done = ansible(project, "ansible-playbook", "--check", "--extra-vars", json.dumps(LOCAL), "tpu_ops.fleet.site")
    assert done.returncode != 0
    task = json.loads(done.stdout)["plays"][0]["tasks"][-1]
    (said,) = {result["msg"] for result in task["hosts"].values() if result.get("failed")}
    assert said.startswith("faulty variables, nothing was changed:\n")
    assert "inventory/group_vars/all.yml:1: user_people: no role has this variable; did you mean users_people?" in said
    assert "inventory/group_vars/all.yml:2: tcmalloc_for_runs: is a string and must be true or false" in said


def test_all_playbooks_can_be_named(project: Member, collections: Path) -> None:
    playbooks = (collections / "ansible_collections" / "tpu_ops" / "fleet" / "playbooks").glob("*.yml")
    names = [f"tpu_ops.fleet.{path.stem}" for path in playbooks]
    assert "tpu_ops.fleet.users" in names
    done = ansible(project, "ansible-playbook", "--syntax-check", *names, ANSIBLE_STDOUT_CALLBACK="default")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("{{ a | f }}", "{{ a | tpu_ops.fleet.f }}"),
        ("{{ a\n   |f(1) | default(2) }}", "{{ a\n   |tpu_ops.fleet.f(1) | default(2) }}"),
        ("{{ a | map('f', 1) }}", "{{ a | map('tpu_ops.fleet.f', 1) }}"),
        ("{{ f | ff | select('f') }}", "{{ f | ff | select('f') }}"),
    ],
)
def test_filters_get_their_full_names(text: str, full: str) -> None:
    assert collection.with_full_filters(text, ["f"]) == full


def test_modules_get_their_full_names_as_keys_of_tasks() -> None:
    text = "- m: {a: 1}\n- block:\n    - name: m\n      m: &a\n        mm: 1\n  module_defaults:\n    m:\n"
    assert collection.with_full_modules(text, {"m"}).count("tpu_ops.fleet.m:") == 3


def test_only_own_module_utils_are_imported_from_the_collection() -> None:
    code = "from ansible.module_utils.basic import A\nfrom ansible.module_utils.turns import B\n"
    assert collection.with_full_imports(code, ["turns"]).splitlines() == [
        "from ansible.module_utils.basic import A",
        "from ansible_collections.tpu_ops.fleet.plugins.module_utils.turns import B",
    ]
