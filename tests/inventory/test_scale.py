"""Ten thousand workers, served by `tpu_ops lab api --state FILE`: all are there, and asking costs pages, not nodes."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.fleet import FleetDir
from tests.support.inventory import hosts, inventory
from tests.support.lab_api import LabApi
from tpu_ops.cli.main import main
from tpu_ops.lab.api.fleet_file import write_fleet

PODS, WORKERS = 625, 16


class CommandApi(LabApi):
    """The API as its command serves it; its one project is the command's default."""

    def command(self):
        return [sys.executable, "-m", "tpu_ops.cli.main", "lab", "api", "--state", str(self.state)]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """An API that serves 625 pods of 16 workers; none has been asked for its host keys."""
    api = CommandApi(tmp_path_factory.mktemp("large") / "state.json")
    pods = {f"projects/lab/locations/us-central2-b/nodes/pod{number}": number for number in range(PODS)}
    write_fleet(api.state, {name: {"acceleratorType": "v4-128"} for name in pods})
    api.start()
    yield api
    api.close()


@pytest.fixture
def fleet(large, tmp_path):
    directory = FleetDir(large, tmp_path)
    directory.project = "lab"
    directory.write()
    large.forget_requests()
    return directory


def test_list_shows_ten_thousand_workers_for_the_requests_of_its_pages(fleet, capsys):
    assert main(["list", "--fleet", str(fleet.path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len({row["host"] for row in rows}) == PODS * WORKERS == 10_000
    asked = fleet.api.requests()
    assert set(asked) == {"ListNodes"}
    assert asked["ListNodes"] <= 3


def test_the_inventory_requests_host_keys_of_its_nodes_only_once(fleet):
    """Only a tenth of the workers, since Ansible itself needs a millisecond for each host."""
    fleet.write(names=["pod1[0-9]", "pod2??"])
    assert len(hosts(inventory(fleet))) == 110 * WORKERS
    first = fleet.api.requests()
    assert first["GetGuestAttributes"] == 110
    fleet.api.forget_requests()
    assert len(hosts(inventory(fleet))) == 110 * WORKERS
    assert set(fleet.api.requests()) == {"ListNodes"}
