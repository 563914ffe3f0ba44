"""The inventory plugin, through Ansible itself, against a real API process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.fleet import FleetDir
from tpu_ops.fleet import view
from tpu_ops.fleet.ssh_files import parse_known_hosts

HOSTILE = "{{ lookup('pipe','id') }}"


def inventory(fleet: FleetDir, *, cache: bool = True):
    """Return Ansible's inventory of the fleet; `cache=False` is what --flush-cache does."""
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader

    return InventoryManager(loader=DataLoader(), sources=[str(fleet.file)], cache=cache)


def hosts(found) -> list[str]:
    return sorted(found.hosts)


@pytest.fixture
def said(capsys):
    """Returns what Ansible said, without the line ends that it puts in."""
    return lambda: " ".join(capsys.readouterr().err.split())


@pytest.fixture
def mixed(fleet):
    """Two projects and two zones, a name used twice, a stopped node."""
    fleet.create("pod", "v4-32", labels={"team": "vision"})
    fleet.create("twin", "v4-8")
    fleet.create("twin", "v5litepod-4", zone="us-west4-a")
    fleet.create("off", "v4-8")
    fleet.act("stop", "off")
    fleet.create("theirs", "v4-8", project=fleet.second)
    fleet.write(projects=[fleet.project, fleet.second])
    return fleet


def test_list_and_graph_through_the_command(mixed):
    done = mixed.ansible("ansible-inventory", "--list")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    listing = json.loads(done.stdout)
    variables = listing["_meta"]["hostvars"]
    assert sorted(variables) == [
        *(f"pod-w{index}" for index in range(4)),
        "theirs-w0",
        "twin.us-central2-b-w0",
        "twin.us-west4-a-w0",
    ]
    groups = {name: sorted(group.get("hosts", [])) for name, group in listing.items() if name.startswith("node_")}
    assert groups == {
        "node_pod": [f"pod-w{index}" for index in range(4)],
        "node_theirs": ["theirs-w0"],
        "node_twin_us_central2_b": ["twin.us-central2-b-w0"],
        "node_twin_us_west4_a": ["twin.us-west4-a-w0"],
    }
    assert sorted(listing["type_v4_8"]["hosts"]) == ["theirs-w0", "twin.us-central2-b-w0"]
    assert listing["zone_us_west4_a"]["hosts"] == ["twin.us-west4-a-w0"]
    assert len(listing["state_ready"]["hosts"]) == 7
    first = variables["pod-w1"]
    node = mixed.api.node("pod", mixed.location())
    expected = {
        "ansible_host": node["networkEndpoints"][1]["accessConfig"]["externalIp"],
        "ansible_user": "ada",
        "ansible_ssh_private_key_file": str(mixed.private_key),
        "tpu_node": "pod",
        "tpu_node_label": "pod",
        "tpu_node_id": node["id"],
        "tpu_worker_index": 1,
        "tpu_worker_count": 4,
        "tpu_is_first_worker": False,
        "tpu_project": mixed.project,
        "tpu_zone": "us-central2-b",
        "tpu_region": "us-central2",
        "tpu_accelerator_type": "v4-32",
        "tpu_chips": 16,
        "tpu_chips_per_worker": 4,
        "tpu_topology": "2x2x4",
        "tpu_runtime_version": "tpu-ubuntu2204-base",
        "tpu_state": "READY",
        "tpu_labels": {"team": "vision"},
        "tpu_internal_ips": [endpoint["ipAddress"] for endpoint in node["networkEndpoints"]],
        "tpu_internal_ip": node["networkEndpoints"][1]["ipAddress"],
        "tpu_host_key_alias": f"tpu-{node['id']}-w1",
    }
    assert {name: first.get(name) for name in expected} == expected
    arguments = first["ansible_ssh_common_args"]
    assert f"HostKeyAlias=tpu-{node['id']}-w1" in arguments
    assert "StrictHostKeyChecking=yes" in arguments


def test_every_variable_is_documented(mixed):
    documented = (Path(__file__).parents[2] / "inventory_plugins" / "tpu_vm.py").read_text().split("EXAMPLES")[1]
    for name in inventory(mixed).get_host("pod-w0").get_vars():
        if name.startswith(("tpu_", "ansible_")):
            assert f"# {name}: " in documented, name


def test_the_plugin_learns_host_keys_and_writes_what_the_commands_read(mixed):
    inventory(mixed)
    settings = mixed.settings()
    known = parse_known_hosts((settings.state_dir / "known_hosts").read_text())
    workers = view.current(settings).workers
    assert {worker.host_key_alias for worker in workers if worker.node.state == "READY"} == set(known)


def test_text_of_the_api_is_never_evaluated(fleet):
    fleet.create("pod", "v4-8", labels={"evil": HOSTILE, "team": HOSTILE})
    fleet.write(
        keyed_groups=[{"key": "tpu_labels.team", "prefix": "team"}],
        compose={"owner": "tpu_labels.evil"},
        groups={"odd": "tpu_labels.evil is match('uid')"},
        strict=True,
    )
    done = fleet.ansible(
        "ansible",
        "pod-w0",
        "-m",
        "ansible.builtin.debug",
        "-a",
        "msg={{ tpu_labels.evil ~ '|' ~ owner }}",
        ANSIBLE_CALLBACK_RESULT_FORMAT="json",
    )
    assert done.returncode == 0, done.stderr
    assert f"{HOSTILE}|{HOSTILE}" in done.stdout
    assert "uid=" not in done.stdout
    found = inventory(fleet)
    assert found.get_host("pod-w0").get_vars()["tpu_labels"] == {"evil": HOSTILE, "team": HOSTILE}
    assert not any("uid" in name for name in found.groups)
    assert "odd" not in found.groups
    listing = json.loads(fleet.ansible("ansible-inventory", "--list").stdout)
    assert listing["_meta"]["hostvars"]["pod-w0"]["tpu_labels"]["evil"] == {"__ansible_unsafe": HOSTILE}


def test_options_of_constructed(mixed):
    mixed.write(
        projects=[mixed.project, mixed.second],
        keyed_groups=[{"key": "tpu_labels.team | default('none')", "prefix": "team"}],
        groups={"first_workers": "tpu_is_first_worker"},
        compose={"rank": "tpu_worker_index + 100"},
        strict=True,
    )
    found = inventory(mixed)
    assert len(found.groups["team_vision"].get_hosts()) == 4
    assert len(found.groups["team_none"].get_hosts()) == 3
    assert len(found.groups["first_workers"].get_hosts()) == 4
    assert found.get_host("pod-w3").get_vars()["rank"] == 103


@pytest.mark.parametrize("strict", [True, False])
def test_strict_decides_about_wrong_expressions(fleet, strict, said):
    from ansible.errors import AnsibleError

    fleet.create("pod", "v4-8")
    fleet.write(compose={"x": "tpu_nothing.of_this"}, strict=strict)
    if strict:
        with pytest.raises(AnsibleError, match="Completely failed"):
            inventory(fleet)
        assert "Could not set x for host pod-w0" in said()
    else:
        assert hosts(inventory(fleet)) == ["pod-w0"]


def test_states_prefix_and_addresses_are_options(mixed):
    mixed.write(states=["STOPPED"], hostvars_prefix="cloud_", connect_with=["internal"])
    found = inventory(mixed)
    assert hosts(found) == ["off-w0"]
    variables = found.get_host("off-w0").get_vars()
    assert (variables["cloud_state"], "tpu_state" in variables) == ("STOPPED", False)
    assert variables["ansible_host"] == variables["cloud_internal_ip"]


def test_a_worker_without_an_address_is_listed_and_named(fleet, said):
    fleet.create("pod", "v4-8", networkConfig={"enableExternalIps": False})
    fleet.write(connect_with=["external"])
    assert "ansible_host" not in inventory(fleet).get_host("pod-w0").get_vars()
    assert "pod-w0 has no external address" in said()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zone": "us-central2-b"}, ["tpu_vm.yml", "'zone'", "did you mean 'zones'"]),
        ({"projects": []}, ["'projects'", "TPU_OPS_PROJECT"]),
        ({"projects": ["nobodys"]}, ["nobodys", "PERMISSION_DENIED"]),
        ({"endpoint": "127.0.0.1:1", "request_timeout": 0.5}, ["127.0.0.1:1", "Connection refused"]),
        ({"endpoint": ""}, ["no credentials", "gcloud auth application-default login"]),
    ],
)
def test_every_failure_is_an_error_of_ansible(fleet, said, options, words):
    from ansible.errors import AnsibleError

    fleet.write(**options)
    with pytest.raises(AnsibleError, match="Completely failed"):
        inventory(fleet)
    text = said()
    assert [word for word in words if word not in text] == []


def test_a_failure_ends_the_command_without_a_traceback(fleet):
    done = fleet.ansible("ansible-inventory", "--graph", TPU_OPS_PROJECT="nobodys")
    assert done.returncode != 0
    assert "nobodys" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_forbidden_project_is_a_warning_and_the_rest_is_listed(fleet, said):
    fleet.create("pod", "v4-8")
    fleet.write(projects=[fleet.project, "nobodys"])
    assert hosts(inventory(fleet)) == ["pod-w0"]
    assert "project nobodys" in said()


@pytest.mark.parametrize("name", ["tpu_vm.yml", "our.tpu_vm.yaml"])
def test_files_of_its_name_are_the_plugins(fleet, name):
    fleet.create("pod", "v4-8")
    text = fleet.file.read_text()
    path = fleet.path / "inventory" / name
    path.write_text(text)
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader

    assert hosts(InventoryManager(loader=DataLoader(), sources=[str(path)])) == ["pod-w0"]


class Cached:
    """A fleet whose inventory is cached in files."""

    def __init__(self, fleet: FleetDir) -> None:
        self.fleet = fleet
        self.directory = fleet.path / "cache"
        self.options = {
            "cache": True,
            "cache_plugin": "jsonfile",
            "cache_connection": str(self.directory),
            "cache_timeout": 600,
        }
        fleet.create("pod", "v4-8")
        fleet.write(**self.options)
        assert hosts(inventory(fleet)) == ["pod-w0"]

    @property
    def file(self) -> Path:
        (found,) = self.directory.iterdir()
        return found


@pytest.fixture
def cached(fleet):
    return Cached(fleet)


def test_the_cache_answers_and_does_not_renew_itself(cached):
    os.utime(cached.file, (cached.file.stat().st_mtime - 100,) * 2)
    age = cached.file.stat().st_mtime
    cached.fleet.create("new", "v4-8")
    assert hosts(inventory(cached.fleet)) == ["pod-w0"]
    assert cached.file.stat().st_mtime == age


def test_refresh_and_flush_ask_the_api_and_rewrite_the_cache(cached):
    cached.fleet.create("new", "v4-8")
    found = inventory(cached.fleet)
    assert hosts(found) == ["pod-w0"]
    found.refresh_inventory()
    assert hosts(found) == ["new-w0", "pod-w0"]
    assert hosts(inventory(cached.fleet)) == ["new-w0", "pod-w0"]
    cached.fleet.act("delete", "new")
    assert hosts(inventory(cached.fleet, cache=False)) == ["pod-w0"]
    assert hosts(inventory(cached.fleet)) == ["pod-w0"]


def test_an_old_cache_is_not_used(cached):
    os.utime(cached.file, (1, 1))
    cached.fleet.create("new", "v4-8")
    assert hosts(inventory(cached.fleet)) == ["new-w0", "pod-w0"]


def test_an_answer_to_another_question_is_not_used(cached):
    cached.fleet.create("there", "v5litepod-4", zone="us-west4-a")
    cached.fleet.write(zones=["us-west4-a"], **cached.options)
    assert hosts(inventory(cached.fleet)) == ["there-w0"]


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[1, 2]", '{"version": 1}', '{"version": 1, "nodes": [{"evil": 1}]}']
)
def test_a_damaged_cache_is_survived(cached, text):
    cached.file.write_text(text)
    cached.fleet.create("new", "v4-8")
    assert hosts(inventory(cached.fleet)) == ["new-w0", "pod-w0"]
    assert hosts(inventory(cached.fleet)) == ["new-w0", "pod-w0"]


def test_a_cached_node_whose_host_keys_were_lost_is_asked_for_again(cached):
    known_hosts = cached.fleet.settings().state_dir / "known_hosts"
    known_hosts.write_text("")
    inventory(cached.fleet)
    assert known_hosts.read_text() != ""
