"""lab env, status, maintenance and preempt, against a real API process without containers."""

from __future__ import annotations

import json
import shutil
import socket

import pytest

from tests.support.commands import failed
from tests.support.fleet import ROOT
from tests.support.lab_api import LabApi
from tpu_ops import files
from tpu_ops.cli.main import main
from tpu_ops.lab import environment, instance, process


@pytest.fixture(scope="module")
def one_api(tmp_path_factory):
    """One API process for all tests here."""
    api = LabApi(tmp_path_factory.mktemp("lab") / "state.json")
    api.start()
    yield api
    api.close()


@pytest.fixture
def lab_api(one_api):
    """An API without nodes; what a test creates is deleted."""
    yield one_api
    for project in one_api.projects.split(","):
        for node in one_api.call("GET", f"v2/projects/{project}/locations/-/nodes")[1].get("nodes", []):
            one_api.done("DELETE", f"v2/{node['name']}")


@pytest.fixture
def lab(lab_api):
    """The instance `default`, whose API is the one that the test talks to."""
    found = instance.instance()
    found.directory.mkdir(parents=True)
    pid = lab_api._process.pid
    process.Record(pid, process.start_time(pid), lab_api.grpc, lab_api.rest).write(found.process_file)
    return found


def addresses(tpu_ops) -> dict[int, str]:
    return {row["index"]: row["external_ip"] for row in json.loads(tpu_ops("lab", "status", "--json")[1])["workers"]}


def test_a_maintenance_event_ends_with_all_addresses_new(lab, lab_api, tpu_ops):
    lab_api.create("pod", "v4-16")
    before = addresses(tpu_ops)
    code, _, err = tpu_ops("lab", "maintenance", "pod")
    assert code == 0, err
    after = addresses(tpu_ops)
    assert before.keys() == after.keys() == {0, 1}
    assert not set(before.values()) & set(after.values())
    assert lab_api.node("pod")["state"] == "READY"


def test_a_preempted_node_is_preempted_and_cannot_be_maintained(lab, lab_api, tpu_ops):
    lab_api.create("pod", "v4-8")
    assert tpu_ops("lab", "preempt", "pod")[0] == 0
    assert lab_api.node("pod")["state"] == "PREEMPTED"
    code, out, err = tpu_ops("lab", "maintenance", "pod")
    assert (code, out) == (3, "")
    assert "PREEMPTED" in err


def test_an_unknown_node_is_a_usage_error(lab, tpu_ops):
    code, out, err = tpu_ops("lab", "preempt", "nobodys")
    assert (code, out) == (2, "")
    assert "nobodys" in err


def test_nodes_with_one_name_differ_by_zone(lab, lab_api, tpu_ops):
    lab_api.create("pod", "v4-8")
    lab_api.create("pod", "v2-8", "projects/lab/locations/us-central1-f")
    assert tpu_ops("lab", "preempt", "pod")[0] == 2
    assert tpu_ops("lab", "preempt", "pod", "--zone", "us-central1-f")[0] == 0
    assert lab_api.node("pod")["state"] == "READY"


def test_env_takes_the_fleet_around_the_working_directory(lab, tmp_path, monkeypatch, tpu_ops):
    file = tmp_path / "fleet" / "inventory" / "tpu_vm.yml"
    below = tmp_path / "fleet" / "code" / "deep"
    file.parent.mkdir(parents=True)
    below.mkdir(parents=True)
    file.write_text("plugin: tpu_vm\n")
    monkeypatch.chdir(below)
    found = json.loads(tpu_ops("lab", "env", "--json")[1])
    assert found["ANSIBLE_INVENTORY"].split(",")[0] == str(file.resolve())
    assert found["ANSIBLE_CONFIG"] == str(ROOT / "ansible.cfg")
    config = file.parents[1] / "ansible.cfg"
    config.touch()
    assert json.loads(tpu_ops("lab", "env", "--json")[1])["ANSIBLE_CONFIG"] == str(config.resolve())


def test_lab_env_replaces_zones_and_snapshot_of_the_fleet(lab, lab_api, tmp_path, monkeypatch, tpu_ops):
    lab_api.create("pod", "v4-8")
    file = tmp_path / "fleet" / "inventory" / "tpu_vm.yml"
    file.parent.mkdir(parents=True)
    file.write_text("plugin: tpu_vm\nzones: [europe-west4-b]\nsnapshot: gs://fleet/snapshot.json\n")
    instance.ensure_key(lab)
    monkeypatch.chdir(file.parent)
    for name, value in json.loads(tpu_ops("lab", "env", "--json")[1]).items():
        monkeypatch.setenv(name, value)
    code, out, err = tpu_ops("list", "--json")
    assert [row["host"] for row in json.loads(out)] == ["pod-w0"], (code, err)
    file.write_text("plugin: tpu_vm\n")
    assert not {"TPU_OPS_ZONES", "TPU_OPS_SNAPSHOT"} & json.loads(tpu_ops("lab", "env", "--json")[1]).keys()


def fleet_at(folder):
    (folder / "inventory").mkdir(parents=True)
    (folder / "inventory" / "tpu_vm.yml").write_text("plugin: tpu_vm\n")
    return folder


def test_lab_env_names_the_fleet_and_defaults_to_the_last_one_used(lab, tmp_path, monkeypatch, tpu_ops):
    instance.ensure_key(lab)
    environment.write_inventory(lab)
    one, other, nowhere = fleet_at(tmp_path / "one"), fleet_at(tmp_path / "other"), tmp_path / "nowhere"
    nowhere.mkdir()
    this, warned = "this shell's fleet, in every directory: ", "the lab's own fleet"
    for folder, named, selected, said, silent in (
        (nowhere, None, lab.directory, [warned, "without your people"], [this]),
        # What an earlier `lab env` has set is no choice of the person's.
        (one, lab.directory, one, [f"{this}{one}\n"], [warned, "before"]),
        (nowhere, None, one, [f"{this}{one}, the fleet that was last used with this lab"], [warned, "before"]),
        (other, one, one, [f"{this}{one} (TPU_OPS_FLEET)", f"this directory, {other}: `unset"], ["before"]),
        (other, None, other, [f"{this}{other}\n", f"used with {one} before"], ["last used"]),
        (nowhere, None, other, [f"{this}{other}, the fleet that was last used with this lab"], ["before"]),
    ):
        monkeypatch.chdir(folder)
        if named:
            monkeypatch.setenv("TPU_OPS_FLEET", str(named))
        else:
            monkeypatch.delenv("TPU_OPS_FLEET", raising=False)
        code, out, err = tpu_ops("lab", "env", "--json")
        assert (code, json.loads(out)["TPU_OPS_FLEET"]) == (0, str(selected)), err
        assert [text for text in said if text not in err] == [], err
        assert [text for text in silent if text in err] == [], err
    shutil.rmtree(other)
    assert json.loads(tpu_ops("lab", "env", "--json")[1])["TPU_OPS_FLEET"] == str(lab.directory)


def test_env_refuses_a_fleet_that_is_not_there_as_every_command_does(lab, tmp_path, monkeypatch, tpu_ops):
    monkeypatch.setenv("TPU_OPS_FLEET", str(tmp_path))
    code, out, err = tpu_ops("lab", "env")
    assert (code, out) == (2, "")
    assert "TPU_OPS_FLEET" in err


def test_env_of_a_lab_that_is_down_exports_nothing(tpu_ops):
    assert tpu_ops("lab", "env")[:2] == (3, "")


@pytest.mark.parametrize("port", ["0", "65535", "70000", "x", "-1"])
def test_a_port_that_cannot_be_is_refused_before_anything_happens(port, tpu_ops):
    failed(tpu_ops("lab", "up", f"--port={port}"), 2, "--port")
    assert not instance.instance().directory.exists()


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon", "", "86401"])
@pytest.mark.parametrize("command", [("up",), ("api", "--state", "none.json")], ids=["up", "api"])
def test_a_duration_that_cannot_be_is_refused_in_words(command, seconds, tpu_ops):
    code, out, err = tpu_ops("lab", *command, f"--seconds={seconds}")
    assert (code, out) == (2, "")
    assert f"{seconds!r} is not a valid duration" in err
    assert "--seconds" in err
    assert not instance.instance().directory.exists()


#: In place of the container engine: the lab `elsewhere` has two containers, one of another is going away right now.
ENGINE = """#!/bin/sh
case "$*" in
  info*) echo 1 ;;
  "ps -a -q --filter label=tpu-ops.lab") printf '%s\\n' a1 a2 a3 ;;
  *inspect*a2) echo "no such container" >&2; exit 1 ;;
  *inspect*) echo elsewhere ;;
esac
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    program = tmp_path / "engine"
    program.write_text(ENGINE)
    program.chmod(0o755)
    monkeypatch.setenv("TPU_OPS_ENGINE", str(program))


@pytest.mark.usefixtures("engine")
def test_down_all_names_the_labs_that_it_does_not_know_and_leaves_them(tpu_ops):
    code, out, err = tpu_ops("lab", "down", "--all")
    assert (code, out) == (0, f"no lab has files below {files.state_root()}\n")
    assert err.count("TPU_OPS_LAB=elsewhere tpu_ops lab down") == 1
    assert json.loads(tpu_ops("lab", "down", "--all", "--json")[1])["others"] == ["elsewhere"]


@pytest.mark.usefixtures("engine")
def test_down_of_one_lab_says_nothing_of_others(tpu_ops):
    assert tpu_ops("lab", "down") == (0, "lab default was not up\n", "")


@pytest.mark.usefixtures("engine")
def test_down_says_of_a_shell_that_talks_to_the_lab_that_it_still_does(monkeypatch, tpu_ops):
    monkeypatch.setenv("TPU_OPS_PRIVATE_KEY", str(instance.instance().private_key))
    assert "this shell still points to the lab: open a new one" in tpu_ops("lab", "down")[1]


@pytest.mark.parametrize("command", ["up", "down", "env", "status", "maintenance", "preempt", "capacity", "api"])
def test_every_subcommand_describes_itself_and_its_options(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["lab", command, "--help"])
    assert caught.value.code == 0
    _, description, *rest = capsys.readouterr().out.split("\n\n")
    assert description.endswith(".")
    assert all(line.split()[1:] for line in "\n".join(rest).splitlines() if line.strip().startswith("--json"))


@pytest.mark.usefixtures("engine")
def test_a_port_of_the_default_lab_that_is_taken_is_an_error_in_words(monkeypatch, tpu_ops):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(instance, "DEFAULT_PORTS", (port, port + 1))
        code, out, err = tpu_ops("lab", "up")
    assert (code, out) == (2, "")
    assert f"port {port} is in use" in err
    assert "--port" in err


def test_chips_are_set_on_workers_that_the_lab_runs(lab, lab_api, tpu_ops):
    lab_api.create("pod", "v4-8")
    for target, said in (
        ("nobodys", "no node and no worker of the lab is named 'nobodys'"),
        ("pod-w1", "no node and no worker of the lab is named 'pod-w1'"),
        ("pod", "this lab has no containers, so its workers have no chips"),
        ("pod-w0", "this lab has no containers, so its workers have no chips"),
    ):
        code, out, err = tpu_ops("lab", "chips", target, "idle")
        assert (code, out) == (2, ""), err
        assert said in err
    assert "invalid choice: 'lazy'" in tpu_ops("lab", "chips", "pod", "lazy")[2]
