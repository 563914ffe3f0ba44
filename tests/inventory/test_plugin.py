"""The inventory plugin, through Ansible itself, against a real API process."""

from __future__ import annotations

import json
import logging
import os
import re

import pytest

from tests.support.fleet import ROOT
from tests.support.inventory import hosts, inventory, variables
from tests.support.nodes import node
from tests.support.published import POD, text
from tpu_ops.cli.main import main
from tpu_ops.fleet import view
from tpu_ops.ssh.known_hosts import parse as parse_known_hosts


def test_list_and_graph_through_the_command(mixed):
    done = mixed.ansible("ansible-inventory", "--list")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    listing = json.loads(done.stdout)
    found = listing["_meta"]["hostvars"]
    assert sorted(found) == [
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
    first = found["pod-w1"]
    node = mixed.api.node("pod", mixed.location())
    expected = {
        "ansible_host": node["networkEndpoints"][1]["accessConfig"]["externalIp"],
        "ansible_user": "ada",
        "ansible_python_interpreter": "/usr/bin/python3",
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


def test_the_plugin_learns_host_keys_and_writes_what_the_commands_read(mixed):
    inventory(mixed)
    settings = mixed.settings()
    known = parse_known_hosts((settings.state_dir / "known_hosts").read_text())
    workers = view.current(settings).workers
    assert {worker.host_key_alias for worker in workers if worker.node.state == "READY"} == set(known)


def test_states_names_of_variables_addresses_and_python_are_options(mixed):
    mixed.write(
        states=["STOPPED"],
        hostvars_prefix="cloud_",
        hostvars_suffix="_now",
        connect_with=["internal"],
        python_interpreter="/opt/python",
    )
    found = inventory(mixed)
    assert hosts(found) == ["off-w0"]
    off = variables(found, "off-w0")
    assert (off["cloud_state_now"], off["cloud_region_now"]) == ("STOPPED", "us-central2")
    assert (off["tpu_state"], "tpu_region" in off) == ("STOPPED", False)
    assert off["ansible_host"] == off["cloud_internal_ip_now"]
    assert off["ansible_python_interpreter"] == "/opt/python"


def test_roles_and_playbooks_find_what_they_read_whatever_the_prefix(fleet):
    fleet.create("pod", "v4-8")
    usual = {name: value for name, value in variables(inventory(fleet), "pod-w0").items() if name.startswith("tpu_")}
    fleet.write(hostvars_prefix="cloud_")
    pod = variables(inventory(fleet), "pod-w0")
    assert {name: pod[name.replace("tpu_", "cloud_")] for name in usual} == usual
    files = [path for folder in ("roles", "playbooks") for path in (ROOT / folder).rglob("*") if path.is_file()]
    code = "".join(path.read_text() for path in files if path.suffix in {".yml", ".j2", ".py"})
    read = set(re.findall(r"\btpu_\w+", code)) & usual.keys()
    assert {name for name in pod if name.startswith("tpu_")} == read
    assert {name: pod[name] for name in read} == {name: usual[name] for name in read}


def test_an_empty_interpreter_is_left_to_others(fleet):
    fleet.create("pod", "v4-8")
    fleet.write(python_interpreter="")
    assert "ansible_python_interpreter" not in variables(inventory(fleet), "pod-w0")


def test_filters_of_the_fleet_are_those_of_the_inventory(mixed):
    mixed.write(projects=[mixed.project, mixed.second], names=["pod", "twin*"], labels={"team": None})
    assert hosts(inventory(mixed)) == [f"pod-w{index}" for index in range(4)]
    mixed.write(projects=[mixed.project, mixed.second], names=["twin"], accelerator_types=["v5litepod-*"])
    # Its name is the same as without filters.
    assert hosts(inventory(mixed)) == ["twin.us-west4-a-w0"]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"names": ["["], "accelerator_types": ["v4-*"]}, "names: [; accelerator_types: v4-*"),
        ({"labels": {"team": ["art", "music"], "tier": None}}, "labels: team=art|music, tier"),
    ],
)
def test_filters_of_the_fleet_that_nothing_passes_are_named(mixed, said, filters, words, cache):
    mixed.write(**filters)
    assert hosts(inventory(mixed, cache=cache)) == []
    assert said().count(f"({words})") == 1
    mixed.write()
    assert (hosts(inventory(mixed)) != [], said()) == (True, "")


def test_a_jump_is_in_the_arguments_of_those_that_need_it(fleet):
    fleet.create("pod", "v4-8", networkConfig={"enableExternalIps": False})
    fleet.create("door", "v4-8")
    fleet.write(proxy_jump="door-w0")
    found = inventory(fleet)
    config = fleet.settings().state_dir / "ssh_config"
    assert f"-o 'ProxyCommand=ssh -F {config}" in variables(found, "pod-w0")["ansible_ssh_common_args"]
    assert "ProxyCommand" not in variables(found, "door-w0")["ansible_ssh_common_args"]


def test_iap_is_in_the_arguments_and_the_instance_among_the_variables(fleet):
    fleet.create("pod", "v4-8", networkConfig={"enableExternalIps": False})
    fleet.write(iap=True)
    pod = variables(inventory(fleet), "pod-w0")
    assert pod["tpu_instance_name"]
    assert f"ProxyCommand=gcloud compute start-iap-tunnel {pod['tpu_instance_name']} " in pod["ansible_ssh_common_args"]


def test_workers_without_an_address_are_listed_and_named_in_one_line(fleet, said):
    fleet.create("pod", "v4-32", networkConfig={"enableExternalIps": False})
    fleet.create("solo", "v4-8", networkConfig={"enableExternalIps": False})
    fleet.write(connect_with=["external"])
    found = inventory(fleet)
    assert variables(found, "solo-w0")["ansible_host"] == "solo-w0.has-no-address.invalid"
    text = said()
    assert "5 workers cannot be reached, each has no external address: pod-w[0-3], solo-w0" in text
    assert text.count("WARNING") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zone": "us-central2-b"}, ["tpu_vm.yml", "'zone'", "did you mean 'zones'"]),
        ({"projects": []}, ["'projects'", "TPU_OPS_PROJECT"]),
        ({"projects": ["nobodys"]}, ["nobodys", "PERMISSION_DENIED"]),
        ({"endpoint": "127.0.0.1:1", "request_timeout": 5}, ["127.0.0.1:1", "Connection refused"]),
        ({"endpoint": ""}, ["no credentials", "gcloud auth application-default login"]),
        ({"hostvars_prefix": "ansible_"}, ["tpu_vm.yml", "'hostvars_prefix'", "'ansible_host'"]),
        ({"hostvars_prefix": "1-"}, ["tpu_vm.yml", "hostvars_prefix", "not valid as the name of a variable"]),
        ({"include": {"x": 1}}, ["tpu_vm.yml", "'include'", "a list of strings"]),
        ({"endpoint": "", "auth_kind": "serviceaccount"}, ["auth_kind is serviceaccount", "service_account_file"]),
        ({"projects": ["{{ nothing }}"]}, ["'projects'", "'nothing' is undefined"]),
    ],
)
def test_every_failure_is_an_error_of_ansible(fleet, said, monkeypatch, options, words):
    from ansible.errors import AnsibleError

    monkeypatch.setattr("tpu_ops.cloud.client.REFUSED_PATIENCE", 0.1)
    fleet.write(**options)
    with pytest.raises(AnsibleError, match="Completely failed"):
        inventory(fleet)
    text = said()
    assert [word for word in words if word not in text] == []


def test_a_failure_is_not_said_again_with_each_of_its_causes(fleet, said, monkeypatch):
    """Ansible prints the failure twice: as a warning and as its cause."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere")
    fleet.write(endpoint="")
    with pytest.raises(Exception, match="Completely failed"):
        inventory(fleet)
    assert said().count("no credentials for Google Cloud") in (1, 2)


def test_a_failure_ends_the_command_and_is_all_that_is_said(fleet):
    done = fleet.ansible("ansible-inventory", "--graph", TPU_OPS_PROJECT="nobodys")
    assert done.returncode != 0
    assert "nobodys" in done.stderr
    assert "Traceback" not in done.stderr
    assert "yaml' plugin" not in done.stderr
    assert (done.stderr.count("[WARNING]"), done.stderr.count("[ERROR]")) == (1, 1)


def test_inventories_written_by_hand_are_read_beside_it(fleet):
    path = fleet.path / "inventory" / "others.yml"
    path.write_text("desk: {hosts: {mine: {colour: red}}}\n")
    found = inventory(fleet, source=str(path))
    assert (hosts(found), variables(found, "mine")["colour"]) == (["mine"], "red")


def test_values_may_be_templates(fleet, monkeypatch):
    fleet.create("pod", "v4-8")
    monkeypatch.setenv("TEAM_PROJECT", fleet.project)
    (fleet.path / "name").write_text("grace\n")
    fleet.write(
        projects=["{{ lookup('env', 'TEAM_PROJECT') }}"],
        user=f"{{{{ lookup('file', '{fleet.path}/name') }}}}",
        learn_host_keys="{{ 1 == 1 }}",
    )
    assert variables(inventory(fleet), "pod-w0")["ansible_user"] == "grace"


def test_a_published_snapshot_takes_the_place_of_the_api(fleet, tmp_path, said):
    fleet.create("pod", "v4-8")
    file = tmp_path / "fleet.json"
    assert main(["snapshot", "--publish", str(file)]) == 0
    fleet.api.forget_requests()
    fleet.write(snapshot=str(file))
    assert hosts(inventory(fleet)) == ["pod-w0"]
    assert fleet.api.requests(fleet.project) == {}
    # What the API said later is newer.
    fleet.create("new", "v4-8")
    fleet.write()
    assert main(["refresh", "--from", "api"]) == 0
    fleet.write(snapshot=str(file))
    assert hosts(inventory(fleet)) == ["new-w0", "pod-w0"]
    assert "older than the local one" in said()


def test_ready_nodes_without_endpoints_are_named(fleet, said, tmp_path):
    file = tmp_path / "fleet.json"
    file.write_text(text(nodes=(POD, node("bare", node_id="9", count=0))))
    fleet.write(projects=["lab"], snapshot=str(file))
    assert hosts(inventory(fleet)) == ["pod-w0", "pod-w1"]
    assert "READY, but without workers, since the API lists no network endpoints: bare; `tpu_ops refresh`" in said()
    fleet.write(projects=["lab"], snapshot=str(file), states=["STOPPED"])
    inventory(fleet)
    assert "endpoints" not in said()


def test_a_forbidden_project_is_a_warning_and_the_others_are_listed(fleet, said):
    from ansible.errors import AnsibleError

    fleet.create("pod", "v4-8")
    fleet.write(projects=[fleet.project, "nobodys"])
    assert hosts(inventory(fleet)) == ["pod-w0"]
    assert "project nobodys" in said()
    fleet.write(projects=[fleet.project, "nobodys"], strict_permissions=True)
    with pytest.raises(AnsibleError, match="Completely failed"):
        inventory(fleet)
    assert "project nobodys" in said()


@pytest.mark.parametrize("learn", [True, False])
def test_host_keys_are_asked_for_where_the_option_says_so(fleet, said, learn):
    fleet.create("pod", "v4-8")
    fleet.write(learn_host_keys=learn)
    fleet.api.forget_requests()
    assert hosts(inventory(fleet)) == ["pod-w0"]
    assert fleet.api.requests(fleet.project) == {"ListNodes": 1} | ({"GetGuestAttributes": 1} if learn else {})
    assert ("`tpu_ops refresh --trust-first pod`" in said()) != learn


def test_the_fix_for_a_fleet_file_of_another_name_works_as_printed(fleet, said, capsys):
    fleet.create("pod", "v4-8")
    file = fleet.path / "our.tpu_vm.yml"
    fleet.file.rename(file)
    fleet.api.fault(project=fleet.project, method="GetGuestAttributes", code="NOT_FOUND", message="disabled")
    assert hosts(inventory(fleet, source=str(file))) == ["pod-w0"]
    fleet.api.clear_faults()
    assert f"`tpu_ops refresh --fleet {file} --trust-first pod`" in said()
    # The same state as Ansible's: nothing has changed since it looked.
    assert main(["refresh", "--fleet", str(file)]) == 0
    assert "1 worker, no change" in capsys.readouterr().out
    assert main(["refresh"]) == 2
    assert f"name the file with --fleet or TPU_OPS_FLEET: {file}" in capsys.readouterr().err


def test_an_answer_that_takes_long_is_spoken_of_while_it_is_waited_for(fleet, said, monkeypatch):
    monkeypatch.setattr("tpu_ops.cloud.client.TELL_AFTER", 0.05)
    before = list(logging.getLogger("tpu_ops").handlers)
    fleet.create("pod", "v4-8")
    fleet.api.fault(project=fleet.project, method="ListNodes", seconds=0.4, times=1)
    assert hosts(inventory(fleet)) == ["pod-w0"]
    assert f"tpu_vm: waiting for an answer from {fleet.api.grpc} (project {fleet.project}), at most 20 s" in said()
    assert logging.getLogger("tpu_ops").handlers == before


def test_a_worker_does_not_hide_one_of_the_same_name_in_another_fleets_file(fleet, said):
    from ansible.errors import AnsibleError

    fleet.create("pod", "v4-8")
    fleet.create("pod", "v4-8", project=fleet.second)
    first, second, own = (fleet.file.with_name(f"{name}.tpu_vm.yml") for name in ("first", "second", "own"))
    for path, options in (
        (first, {}),
        (second, {"projects": [fleet.second]}),
        (own, {"projects": [fleet.second], "hostnames": ["tpu_project"]}),
    ):
        fleet.write(**options)
        fleet.file.rename(path)
    with pytest.raises(AnsibleError, match="Completely failed"):
        inventory(fleet, source=[str(first), str(second)])
    pods = [f"worker 0 of {fleet.location(project=project)}/nodes/pod" for project in (fleet.second, fleet.project)]
    text = said()
    assert f"second.tpu_vm.yml: {pods[0]} and {pods[1]}, of another fleet's file, would both be called 'pod-w0'" in text
    # The same worker is in one inventory twice, another name keeps two apart, and others may say more of a worker.
    more = fleet.file.with_name("more.yml")
    more.write_text("all: {hosts: {pod-w0: {ansible_ssh_common_args: -v, colour: red}}}\n")
    found = inventory(fleet, source=[str(more), str(first), str(first), str(own)])
    assert hosts(found) == [fleet.second, "pod-w0"]
    assert variables(found, "pod-w0")["colour"] == "red"


@pytest.mark.parametrize("name", ["tpu_vm.yml", "our.tpu_vm.yaml"])
def test_files_of_its_name_are_the_plugins(fleet, name):
    fleet.create("pod", "v4-8")
    text = fleet.file.read_text()
    path = fleet.path / "inventory" / name
    path.write_text(text)
    assert hosts(inventory(fleet, source=str(path))) == ["pod-w0"]


def test_a_pipe_in_the_place_of_the_fleets_file_is_not_waited_for(fleet, said):
    from ansible.errors import AnsibleError

    fleet.file.unlink()
    os.mkfifo(fleet.file)
    with pytest.raises(AnsibleError, match="Completely failed"):
        inventory(fleet)
    assert "tpu_vm.yml: cannot read the fleet's file: this is not a regular file" in said()
