"""An instance of the lab: its name, its ports, its process, and what a shell is told of it."""

import json
import shutil
import socket
from pathlib import Path

import pytest

from tpu_ops.errors import CloudError, OpsError, UsageError
from tpu_ops.lab import environment, instance
from tpu_ops.lab.instance import Endpoints, Instance

ENDPOINTS = Endpoints("127.0.0.1:1", "http://127.0.0.1:2")
TOOL = Path("/opt/tool/ansible.cfg")


@pytest.fixture
def lab(tmp_path):
    folder = tmp_path / "lab"
    folder.mkdir()
    return Instance("test", folder)


@pytest.mark.parametrize("name", ["", "default", "a", "a2345678901234ab"])
def test_a_name_that_can_be_part_of_container_names_is_taken(name, tmp_path):
    found = instance.instance({"TPU_OPS_LAB": name, "TPU_OPS_STATE": str(tmp_path)})
    assert found.directory == tmp_path / "lab" / (name or "default")


@pytest.mark.parametrize("name", ["A", "1a", "a-b", "a/../b", "a" * 17, "a\n", "ä"])
def test_another_name_is_refused(name):
    with pytest.raises(UsageError) as caught:
        instance.instance({"TPU_OPS_LAB": name})
    assert caught.value.where == "TPU_OPS_LAB"


def test_a_port_in_use_is_named_with_the_way_out(lab):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            instance.ports_of(lab, port)
    assert str(port) in caught.value.what
    assert "--port" in caught.value.fix


def test_an_instance_keeps_the_ports_it_had(lab):
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = (one.getsockname()[1], two.getsockname()[1])
    record = {"pid": 2, "started": "0", "grpc": f"127.0.0.1:{ports[0]}", "rest": f"http://127.0.0.1:{ports[1]}"}
    lab.process_file.write_text(json.dumps(record))
    assert instance.ports_of(lab, None) == ports


def test_a_request_to_a_lab_that_is_down_says_how_to_start_it(lab):
    with pytest.raises(CloudError) as caught:
        instance.call(lab, "GET", "/lab/info")
    assert "tpu_ops lab up" in caught.value.fix


def test_an_api_that_cannot_start_is_reported_with_its_own_words(lab):
    lab.state_file.write_text("not json")
    with pytest.raises(OpsError) as caught:
        instance.start_api(lab, (0, 0), seconds=0, timeout=30)
    assert str(lab.log_file) in caught.value.where
    assert "api.json" in caught.value.what


def test_the_shell_is_pointed_to_the_lab_and_away_from_any_credentials(lab, tmp_path):
    fleet = tmp_path / "fleet" / "inventory" / "tpu_vm.yml"
    found = environment.variables(lab, ENDPOINTS, fleet, TOOL)
    assert found["TPU_OPS_ENDPOINT"] == "127.0.0.1:1"
    assert found["ANSIBLE_INVENTORY"] == f"{fleet},{lab.inventory_file}"
    assert found["CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"] == "http://127.0.0.1:2/"
    assert found["CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE"] == "http://127.0.0.1:2/storage/v1/"
    assert found["STORAGE_EMULATOR_HOST"] == "http://127.0.0.1:2"
    assert found["CLOUDSDK_AUTH_DISABLE_CREDENTIALS"] == "1"
    assert not Path(found["GOOGLE_APPLICATION_CREDENTIALS"]).exists()
    assert found["TPU_OPS_FLEET"] == str(tmp_path / "fleet")
    assert found["ANSIBLE_CONFIG"] == str(TOOL)


@pytest.mark.parametrize("place", ["our.tpu_vm.yml", "inventory/tpu_vm.yaml"])
def test_the_shell_keeps_a_fleets_file_of_another_name(lab, tmp_path, place):
    file = tmp_path / "fleet" / place
    file.parent.mkdir(parents=True)
    (tmp_path / "fleet" / "ansible.cfg").touch()
    found = environment.variables(lab, ENDPOINTS, file, TOOL)
    assert found["TPU_OPS_FLEET"] == str(file)
    assert found["ANSIBLE_INVENTORY"] == f"{file},{lab.inventory_file}"
    assert found["ANSIBLE_CONFIG"] == str(tmp_path / "fleet" / "ansible.cfg")


def test_without_a_fleet_around_the_lab_brings_its_own(lab):
    instance.ensure_key(lab)
    environment.write_inventory(lab, {})
    found = environment.variables(lab, ENDPOINTS, None, TOOL)
    own = lab.directory / "inventory" / "tpu_vm.yml"
    assert found["TPU_OPS_FLEET"] == str(lab.directory)
    assert json.loads(own.read_text()) == {"plugin": "tpu_vm"}


def test_a_certificate_bundle_of_the_controller_goes_to_the_workers(lab, tmp_path):
    instance.ensure_key(lab)
    bundle = tmp_path / "proxy.pem"
    bundle.write_text("")
    environment.write_inventory(lab, {"SSL_CERT_FILE": str(bundle)})
    written = json.loads((lab.inventory_file.parent / "group_vars" / "all.yml").read_text())
    assert written["base_ca_certificates"] == [str(bundle)]
    assert written["users_more_people"][0]["keys"] == [lab.private_key.with_suffix(".pub").read_text().strip()]


def test_a_relative_state_directory_means_the_same_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = instance.instance({"TPU_OPS_STATE": "state"})
    assert found.directory == tmp_path / "state" / "lab" / "default"


def test_a_lock_that_went_with_its_lab_locks_nobody_out_and_nobody_in(lab):
    with instance.locked(lab):
        shutil.rmtree(lab.directory)
        with instance.locked(lab):
            assert (lab.directory / "lock").exists()


def test_a_lab_that_another_command_works_on_is_named(lab, monkeypatch):
    monkeypatch.setattr(instance, "LOCK_TIMEOUT", 0.2)
    with instance.locked(lab), pytest.raises(OpsError) as caught, instance.locked(lab):
        pass
    assert caught.value.where == str(lab.directory / "lock")


def test_a_state_directory_that_cannot_be_made_is_named_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    lab = Instance("test", tmp_path / "file" / "lab")
    with pytest.raises(OpsError) as caught, instance.locked(lab):
        pass
    assert (caught.value.where, "TPU_OPS_STATE" in caught.value.fix) == (str(lab.directory), True)
