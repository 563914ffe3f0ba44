"""The plugin's documentation and the page list the same options and variables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.fleet import ROOT
from tests.support.inventory import inventory, variables
from tpu_ops import config
from tpu_ops.fleet import hostvars

PAGE = (ROOT / "docs" / "inventory.md").read_text()
CONFIG = "".join(path.read_text() for path in (ROOT / "tpu_ops" / "config").glob("*.py"))


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """What ansible-doc knows of the plugin."""
    command = [str(Path(sys.executable).parent / "ansible-doc"), "-t", "inventory", "-j", "tpu_vm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)["tpu_vm"]
    return found


def test_every_key_of_the_file_is_an_option_and_the_reverse(described):
    assert sorted(described["doc"]["options"]) == sorted(config.OWN_KEYS + config.PLUGIN_KEYS)


def test_options_that_a_variable_sets_name_it_and_it_wins(described):
    of_plugin = {name: described["doc"]["options"][name] for name in config.OWN_KEYS}
    named = {entry["name"] for option in of_plugin.values() for entry in option.get("env", [])}
    # The plugin reads neither of these two: the first finds its file, the second is for disks and firewall rules.
    of_commands = {"TPU_OPS_FLEET", "TPU_OPS_REST_ENDPOINT"}
    assert named == set(re.findall(r'"((?:TPU_OPS|GCP)_[A-Z_]+)"', CONFIG)) - of_commands
    for name, option in of_plugin.items():
        for entry in option.get("env", []):
            assert f"E({entry['name']})" in " ".join(option["description"]), name


def test_defaults_are_those_of_the_settings(described, fleet):
    settings = config.from_data({"plugin": "tpu_vm", "projects": ["p"]}, fleet.file, {})
    options = described["doc"]["options"]
    for name in ("zones", "states", "connect_with", "iap", "forward_agent", "learn_host_keys", "strict_permissions"):
        value = getattr(settings, name)
        assert options[name]["default"] == (list(value) if isinstance(value, tuple) else value), name
    assert options["states"]["choices"] == list(config.STATES)
    assert options["auth_kind"]["default"] == settings.auth.kind
    assert f"The default is {config.REQUEST_TIMEOUT:g}, or {config.LOCAL_TIMEOUT:g} with" in (
        " ".join(options["request_timeout"]["description"])
    )


def test_every_option_is_on_the_page_with_its_variable(described):
    rows = dict(re.findall(r"^\| `(\w+)` (\|.*)$", PAGE, re.MULTILINE))
    options = described["doc"]["options"]
    assert [name for name in options if name not in rows] == []
    for name in config.OWN_KEYS:
        assert all(f"`{entry['name']}`" in rows[name] for entry in options[name].get("env", [])), name


def test_the_page_and_the_examples_list_exactly_the_host_variables(described, fleet):
    fleet.create("pod", "v4-8")
    present = {name for name in variables(inventory(fleet), "pod-w0") if name.startswith(("tpu_", "ansible_"))}
    assert present == set(re.findall(r"^# ((?:tpu|ansible)_\w+): ", described["examples"], re.MULTILINE))
    assert present == set(re.findall(r"^\| `((?:tpu|ansible)_\w+)` \|", PAGE, re.MULTILINE))


def test_variables_that_keep_their_usual_names_are_on_the_page():
    named = re.search(r"`tpu_`\s+with\s+(.*?)\.\n", PAGE, re.DOTALL)
    assert named is not None
    assert set(re.findall(r"`(\w+)`", named[1])) == hostvars.READ_BY_ROLES


def test_every_example_is_a_file_that_is_accepted(described, fleet, monkeypatch):
    (fleet.path / "key").write_text("")
    monkeypatch.setenv("TEAM_PROJECT", "our-grant")
    home = Path.home()
    (home / "keys").mkdir()
    (home / "keys" / "lister.json").write_text("{}")
    documents = described["examples"].split("\n---\n")
    assert len(documents) == 6
    for text in documents:
        found = config.from_data(yaml.safe_load(text), fleet.file, {"HOME": str(home)})
        assert found.projects


def test_group_names_on_the_page_are_those_of_the_plugin(mixed):
    found = inventory(mixed)
    for name in ("node_pod", "node_twin_us_west4_a", "zone_us_central2_b", "type_v4_32", "state_ready"):
        assert f"`{name}`" in PAGE
        assert name in found.groups
