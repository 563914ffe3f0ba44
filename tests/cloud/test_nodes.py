"""Nodes listed, made and waited for through a real API process."""

from __future__ import annotations

import time

import pytest

from tpu_ops.cloud import nodes, operations, zones
from tpu_ops.cloud.client import ApiError, connect
from tpu_ops.cloud.listing import list_nodes
from tpu_ops.errors import CloudError


@pytest.fixture
def tpu(fleet_api):
    with connect(fleet_api.grpc, timeout=10) as client:
        yield client


def quiet(elapsed, state):
    """Nobody is told."""


def names(listing):
    return sorted(node.full_name.split("/", 1)[1] for node in listing.nodes)


def test_all_zones_of_several_projects_page_by_page(tpu, fleet, monkeypatch):
    monkeypatch.setattr(zones, "PAGE_SIZE", 2)
    for index in range(5):
        fleet.create(f"n{index}")
    fleet.create("other", "v5litepod-4", zone="us-west4-a")
    fleet.create("theirs", project=fleet.second)
    listing = list_nodes(tpu, [fleet.project, fleet.second])
    assert len(listing.nodes) == 7
    assert listing.warnings == ()
    assert f"{fleet.second}/locations/us-central2-b/nodes/theirs" in names(listing)


def test_only_the_named_zones(tpu, fleet):
    fleet.create("here")
    fleet.create("there", "v5litepod-4", zone="us-west4-a")
    assert names(list_nodes(tpu, [fleet.project], ["us-west4-a"])) == [
        f"{fleet.project}/locations/us-west4-a/nodes/there"
    ]
    assert len(list_nodes(tpu, [fleet.project], ["us-west4-a", "us-central2-b"]).nodes) == 2


def test_a_wrong_project_is_an_error_and_beside_a_right_one_a_warning(tpu, fleet):
    fleet.create("here")
    with pytest.raises(ApiError) as caught:
        list_nodes(tpu, ["nobodys"])
    assert (caught.value.exit_code, "nobodys" in str(caught.value)) == (3, True)
    listing = list_nodes(tpu, [fleet.project, "nobodys"])
    assert len(listing.nodes) == 1
    assert listing.unanswered == (("nobodys", "-"),)
    assert "nobodys" in listing.warnings[0]


def test_a_node_is_made_and_removed(tpu, fleet):
    body = {"accelerator_type": "v4-32", "runtime_version": "tpu-ubuntu2204-base", "labels": {"team": "vision"}}
    operation = nodes.create_node(tpu, fleet.location(), "pod", body)
    operations.wait(tpu, operation, what="pod", timeout=10, progress=quiet)
    node = nodes.get_node(tpu, f"{fleet.location()}/nodes/pod")
    assert (node.state, len(node.internal_ips), node.labels) == ("READY", 4, {"team": "vision"})
    keys = [worker.host_keys for worker in nodes.guest_attributes(tpu, node.full_name, 4)]
    assert [list(worker) for worker in keys] == [["ssh-ed25519"]] * 4
    assert len({worker["ssh-ed25519"] for worker in keys}) == 4
    operations.wait(tpu, nodes.stop_node(tpu, node.full_name), what="pod", timeout=10, progress=quiet)
    assert nodes.get_node(tpu, node.full_name).state == "STOPPED"
    operations.wait(tpu, nodes.start_node(tpu, node.full_name), what="pod", timeout=10, progress=quiet)
    operations.wait(tpu, nodes.delete_node(tpu, node.full_name), what="pod", timeout=10, progress=quiet)
    gone = operations.wait_for_state(tpu, node.full_name, through=("DELETING",), what="pod", timeout=10, progress=quiet)
    assert gone is None


def test_a_wait_ends_and_says_what_it_waited_for(tpu, fleet):
    fleet.create("pod")
    nodes.get_node(tpu, f"{fleet.location()}/nodes/pod")  # the connection is there
    told = []
    with pytest.raises(CloudError, match=r"node pod.*not done after 1 s"):
        operations.wait_for_state(
            tpu,
            f"{fleet.location()}/nodes/pod",
            through=("READY",),
            what="node pod",
            timeout=1.0,
            progress=lambda elapsed, state: told.append(state),
        )
    assert set(told) == {"READY"}


def test_a_second_wait_gets_what_the_first_has_left(tpu, fleet):
    fleet.create("pod")
    began = time.monotonic() - 60
    with pytest.raises(CloudError, match="not done after 60 s"):
        operations.wait_for_state(
            tpu,
            f"{fleet.location()}/nodes/pod",
            through=("READY",),
            what="node pod",
            timeout=60,
            progress=lambda *_: pytest.fail("it waits"),
            began=began,
        )


def test_a_zone_lists_its_accelerator_types_and_runtime_versions(tpu, fleet):
    assert "us-central2-b" in zones.locations(tpu, fleet.project)
    assert "v4-32" in zones.accelerator_types(tpu, fleet.project, "us-central2-b")
    assert "tpu-ubuntu2204-base" in zones.runtime_versions(tpu, fleet.project, "us-central2-b")


def test_an_api_that_went_away_is_named(lab_api):
    endpoint = lab_api.grpc
    lab_api.stop()
    with connect(endpoint, timeout=1) as client, pytest.raises(ApiError) as caught:
        list_nodes(client, ["lab"])
    assert endpoint in str(caught.value)
    assert caught.value.fix
