"""The fleet that users copy: every role has something to do, and the lab changes nothing that it does not have."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.support.fleet import ROOT
from tools import example
from tpu_ops.config import load_file

GROUP_VARS = example.FLEET.parent / "group_vars"
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())
#: What each role wants the example to set.
SET = sorted(
    name
    for path in (ROOT / "roles").glob("*/meta/tpu_ops.yml")
    for name in yaml.safe_load(path.read_text()).get("example", [])
)


def variables(folder):
    return {
        name: value
        for path in sorted(folder.rglob("*.yml"))
        for name, value in yaml.safe_load(path.read_text()).items()
    }


@pytest.mark.parametrize("name", SET)
def test_the_example_sets_what_each_role_wants(name):
    assert variables(GROUP_VARS)[name] not in ([], {}, "", False)


def test_the_login_account_of_the_example_has_no_uid():
    (own,) = [row for row in variables(GROUP_VARS)["users_people"] if row["name"] == load_file(example.FLEET).user]
    assert "uid" not in own


def test_the_lab_defines_all_vault_variables_of_the_example():
    text = "".join(path.read_text() for path in GROUP_VARS.rglob("*.yml"))
    ours = variables(example.LAB.parent / "group_vars")
    assert set(re.findall(r"{{ (vault_\w+) }}", text)) == {name for name in ours if name.startswith("vault_")}


def test_the_lab_changes_only_what_the_example_or_a_role_names():
    defaults = {name for role in ROLES for name in variables(ROOT / "roles" / role / "defaults")}
    own = {"archive", "archive_version", "forge_files", "forge_host_key", "forge_other_key"}
    ours = {name for name in variables(example.LAB.parent / "group_vars") if not name.startswith("vault_")}
    assert ours - own <= defaults | set(variables(GROUP_VARS))


def test_in_the_labs_shell_its_inventory_is_between_example_and_overlay(tmp_path):
    found = example.environment({"ANSIBLE_INVENTORY": "/clone/inventory/tpu_vm.yml,/state/lab.yml"}, tmp_path)
    assert found["ANSIBLE_INVENTORY"].split(",") == [str(example.FLEET), "/state/lab.yml", str(example.LAB)]
