"""`tpu_ops init` and `tpu_ops doctor --self`: from an empty directory to a fleet that Ansible and tpu_ops read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import failed
from tests.support.fleet import ROOT, ZONE, FleetDir
from tpu_ops.ansible import playbook

BIN = Path(sys.executable).parent


def ansible(folder: Path, *argv: str) -> str:
    """Run a plain command of Ansible in a directory; return what it printed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    done = subprocess.run(
        [BIN / argv[0], *argv[1:]], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def made(fleet: FleetDir, tpu_ops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fleet directory that `tpu_ops init` has written, in which the shell is; its project has a pod."""
    monkeypatch.setenv("TPU_OPS_ENDPOINT", fleet.api.grpc)
    monkeypatch.setenv("TPU_OPS_REST_ENDPOINT", fleet.api.rest)
    fleet.create("pod", "v4-16")
    folder = tmp_path / "my fleet"
    argv = (
        "--project",
        fleet.project,
        "--zone",
        f"{ZONE},us-west4-a",
        "--packages",
        "flax,optax==0.2.5",
        "--user",
        "yes",
    )
    code, out, err = tpu_ops("init", str(folder), *argv)
    assert code == 0, err
    assert out.count("wrote ") == 4
    assert "tpu_ops doctor --self" in err
    monkeypatch.chdir(folder)
    return folder


def test_ansible_and_tpu_ops_read_the_same_fleet_from_its_directory(made: Path, tpu_ops: Any) -> None:
    assert [row["host"] for row in json.loads(tpu_ops("list", "--json")[1])] == ["pod-w0", "pod-w1"]
    assert "pod-w1" in ansible(made, "ansible-inventory", "--graph")
    host = json.loads(ansible(made, "ansible-inventory", "--host", "pod-w0"))
    assert (host["ansible_user"], host["jax_packages"]) == ("yes", ["flax", "optax==0.2.5"])
    assert "jax : " in ansible(made, "ansible-playbook", "site.yml", "--list-tasks")
    project = playbook.project_of(made, made / "inventory/tpu_vm.yml")
    assert (project.root, project.config, project.of_fleet) == (ROOT, ROOT / "ansible.cfg", False)
    words = [line for path in ("tpu_vm.yml", "group_vars/all/main.yml") for line in (made / "inventory" / path).open()]
    assert sum(bool(line.strip()) and not line.startswith("#") for line in words) < 20


def test_init_again_writes_only_what_leads_ansible_to_this_installation(made: Path, tpu_ops: Any) -> None:
    fleet_file = made / "inventory" / "tpu_vm.yml"
    fleet_file.write_text(fleet_file.read_text() + "states: [READY]\n")
    before = fleet_file.read_text()
    (made / "site.yml").write_text("# mine\n")
    (made / "ansible.cfg").write_text(f"{playbook.GENERATED}\n[defaults]\nroles_path = /gone\n")
    assert tpu_ops("init")[1] == "wrote ansible.cfg\n"
    assert f"roles_path = {ROOT}/roles\n" in (made / "ansible.cfg").read_text()
    assert ((made / "site.yml").read_text(), fleet_file.read_text()) == ("# mine\n", before)
    failed(tpu_ops("init", "--zone", ZONE), 2, "this is a fleet already", "leave out --zone")


def test_files_of_the_user_stay_and_an_interrupted_init_begins_again(tpu_ops: Any, tmp_path: Path) -> None:
    own = tmp_path / "inventory" / "group_vars" / "all" / "main.yml"
    own.parent.mkdir(parents=True)
    own.write_text("jax_packages: [mine]\n")
    (tmp_path / "ansible.cfg").mkdir()  # in the way
    argv = ("init", str(tmp_path), "--project", "my-project")
    assert "ansible.cfg is your own and stays" in tpu_ops(*argv)[2]
    assert own.read_text() == "jax_packages: [mine]\n"
    fleet_file = tmp_path / "inventory" / "tpu_vm.yml"
    fleet_file.unlink()
    (tmp_path / "site.yml").unlink()
    assert tpu_ops(*argv)[1].count("wrote ") == 2
    assert "my-project" in fleet_file.read_text()


def test_without_a_terminal_the_project_has_to_be_given(
    tpu_ops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TPU_OPS_PROJECT", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    failed(tpu_ops("init", str(tmp_path / "new")), 2, "which project", "--project my-project")
    failed(tpu_ops("init", str(tmp_path / "new"), "--project", "No Project"), 2, "--project")
    assert not (tmp_path / "new").exists()


def test_a_member_begins_with_a_published_snapshot_and_without_a_project(
    made: Path, fleet: FleetDir, tpu_ops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tpu_ops("snapshot", "--publish", str(tmp_path / "fleet.json"))[0] == 0
    for name in ("TPU_OPS_ENDPOINT", "TPU_OPS_REST_ENDPOINT"):
        monkeypatch.delenv(name)
    code, _, err = tpu_ops("init", str(tmp_path / "member"), "--snapshot", str(tmp_path / "fleet.json"))
    assert code == 0, err
    monkeypatch.chdir(tmp_path / "member")
    assert [row["host"] for row in json.loads(tpu_ops("list", "--json")[1])] == ["pod-w0", "pod-w1"]
    failed(
        tpu_ops("init", "new", "--snapshot", "fleet.json", "--project", fleet.project), 2, "names its projects itself"
    )


def test_on_a_terminal_it_asks_for_what_is_not_given(
    tpu_ops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TPU_OPS_PROJECT", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")  # without gcloud
    answers = io.StringIO("my-project\nus-central2-b, europe-west4-b\n\nflax\n")
    monkeypatch.setattr(answers, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", answers)
    code, _, err = tpu_ops("init", str(tmp_path / "new"), "--user", "ada")
    assert code == 0, err
    written = yaml.safe_load((tmp_path / "new/inventory/tpu_vm.yml").read_text())
    assert written == {
        "plugin": "tpu_vm",
        "projects": ["my-project"],
        "zones": ["us-central2-b", "europe-west4-b"],
        "user": "ada",
        "private_key": "~/.ssh/id_ed25519",
    }
    assert "ssh-keygen -t ed25519" in err
    assert yaml.safe_load((tmp_path / "new/inventory/group_vars/all/main.yml").read_text())["jax_packages"] == ["flax"]


def test_doctor_says_what_is_not_ready_on_this_machine(made: Path, fleet: FleetDir, tpu_ops: Any) -> None:
    found = {row["name"]: row for row in json.loads(tpu_ops("doctor", "--self", "--json")[1])}
    assert {name: row["passed"] for name, row in found.items()} == dict.fromkeys(
        ("python", "ssh", "rsync", "fleet", "key", "api", "clock"), True
    ) | {"quota": None}
    assert found["api"]["said"] == f"the Cloud TPU API answers for project {fleet.project}: 1 node"
    fleet.api.fault(project=fleet.project, code="PERMISSION_DENIED", message="denied")
    fleet.private_key.chmod(0o644)
    code, out, _ = tpu_ops("doctor", "--self")
    assert code == 1
    assert "FAIL  key: other users can read" in out
    assert "FAIL  api: " in out
    assert "denied" in out
    fleet.private_key.unlink()
    code, out, _ = tpu_ops("doctor", "--self")
    assert (code, "FAIL  fleet: the private key" in out, "ssh-keygen -t ed25519" in out) == (1, True, True)
    failed(tpu_ops("doctor", "pod", "--self"), 2, "this option checks no worker")


def test_without_a_command_five_lines_say_how_to_start(tpu_ops: Any) -> None:
    code, out, _ = tpu_ops()
    assert (code, out.count("\n")) == (2, 5)
    assert "tpu_ops init" in out
