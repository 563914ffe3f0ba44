"""The demo runs on its own fleet, whatever the settings of the user's fleet."""

from __future__ import annotations

import yaml

from tests.support.fleet import ROOT
from tools import demo
from tpu_ops import config


def test_the_demo_takes_its_own_plain_fleet_in_whatever_shell_it_is_started():
    shell = {"PATH": "/bin", "TPU_OPS_FLEET": "/mine", "TPU_OPS_ZONES": "europe-west4-b", "TPU_OPS_LAB": "x"}
    found = demo.environment(shell | {"ANSIBLE_INVENTORY": "/mine/inventory/tpu_vm.yml"})
    own = {name: value for name, value in found.items() if name.startswith(("TPU_OPS_", "ANSIBLE_"))}
    assert own == {
        "TPU_OPS_LAB": "x",
        "TPU_OPS_FLEET": "tools/demo_fleet",
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_FORCE_COLOR": "false",
    }
    assert config.read_file(config.find_file(None, found, ROOT)) == {"plugin": "tpu_vm"}


def test_the_demo_s_fleet_has_what_its_training_imports():
    (file,) = (ROOT / demo.FLEET).rglob("group_vars/*")
    needed = (ROOT / "examples" / "digits" / "requirements.txt").read_text().splitlines()
    assert yaml.safe_load(file.read_text())["jax_packages"] == [line for line in needed if not line.startswith("#")]
