"""Keys are removed from nodes' metadata through a real API process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roles.users.library import node_metadata_keys
from tests.roles.conftest import Run
from tests.support.fleet import ROOT, FleetDir

MINE, HERS, STRANGERS = (f"ssh-ed25519 {letter * 8}" for letter in "ABC")


def keys(fleet: FleetDir, name: str) -> Any:
    """Return the metadata of a node."""
    return fleet.api.node(name, fleet.location())["metadata"]


def test_exactly_the_lines_of_people_asked_for_go(run: Run, fleet: FleetDir) -> None:
    stays = [f"tpu:{MINE} tpu", f"ada:{HERS} at home", "", "adam:ssh-rsa x", "no key"]
    goes = [f"ada:{STRANGERS} x", f" ada:ssh-rsa {STRANGERS}", "bob:ssh-rsa y"]
    lines = [stays[0], goes[0], *stays[1:4], goes[1], goes[2], stays[4]]
    fleet.create("pod", metadata={"ssh-keys": "\n".join(lines), "secret": "s3cret"})
    node = f"{fleet.location()}/nodes/pod"
    asked = {"fleet_file": str(fleet.file), "node": node, "people": {"ada": [HERS], "bob": [], "eve": []}}
    checked = run(node_metadata_keys, asked, check=True)
    assert (checked["changed"], checked["removed"]) == (True, goes)
    assert keys(fleet, "pod")["ssh-keys"].splitlines() == lines
    done = run(node_metadata_keys, asked)
    assert (done["changed"], done["removed"]) == (True, goes)
    assert "s3cret" not in str(done)
    assert keys(fleet, "pod") == {"ssh-keys": "\n".join(stays), "secret": "s3cret"}
    assert run(node_metadata_keys, asked)["changed"] is False


@pytest.mark.parametrize(
    ("file", "fault"), [("", "nodes/gone"), ("missing/tpu_vm.yml", "cannot read the fleet's file")]
)
def test_a_missing_node_or_fleet_file_is_an_error_with_the_variable(
    run: Run, fleet: FleetDir, file: str, fault: str
) -> None:
    node = f"{fleet.location()}/nodes/gone"
    asked = {"fleet_file": str(fleet.path / file if file else fleet.file), "node": node, "people": {"ada": []}}
    done = run(node_metadata_keys, asked)
    assert done["failed"]
    assert done["msg"].startswith("users_remove_metadata_keys: ")
    assert fault in done["msg"]


def test_a_play_asks_once_for_each_node_and_needs_no_worker_for_it(fleet: FleetDir, tmp_path: Path) -> None:
    for name, kind in (("pod", "v4-16"), ("solo", "v4-8")):
        fleet.create(name, kind, metadata={"ssh-keys": f"tpu:{MINE}\nada:{HERS}\nada:{STRANGERS}"})
    role = ROOT / "roles" / "users"
    play = {
        "hosts": "all",
        "gather_facts": False,
        "vars_files": [f"{ROOT}/roles/facts/vars/main.yml", f"{role}/defaults/main.yml", f"{role}/vars/main.yml"],
        "tasks": [{"ansible.builtin.import_tasks": f"{role}/tasks/metadata_keys.yml"}],
    }
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    asked = {"users_people": [{"name": "ada", "keys": [HERS]}], "users_remove_metadata_keys": ["ada"]}
    environ = {"ANSIBLE_LIBRARY": f"{role}/library", "ANSIBLE_FILTER_PLUGINS": f"{role}/filter_plugins"}
    command = ("ansible-playbook", str(tmp_path / "play.yml"), "--extra-vars", json.dumps(asked))
    done = fleet.ansible(*command, **environ)
    assert (done.returncode, done.stdout.count("changed=1")) == (0, 2), done.stdout + done.stderr
    assert fleet.api.requests(fleet.project)["UpdateNode"] == 2
    for name in ("pod", "solo"):
        assert keys(fleet, name)["ssh-keys"] == f"tpu:{MINE}\nada:{HERS}"
    again = fleet.ansible(*command, **environ)
    assert (again.returncode, "changed=1" in again.stdout) == (0, False), again.stdout
    assert fleet.api.requests(fleet.project)["UpdateNode"] == 2
