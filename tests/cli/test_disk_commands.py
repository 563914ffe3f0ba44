"""`tpu_ops disk` against a real API process."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.support.commands import failed
from tests.support.fleet import ZONE
from tests.support.lab_api import PATIENCE
from tpu_ops import config
from tpu_ops.cloud import client, listing
from tpu_ops.fleet import disks, origin

OTHER = "europe-west4-b"
READ_ONLY, READ_WRITE = "READ_ONLY", "READ_WRITE"


@pytest.fixture(autouse=True)
def _endpoints(fleet, ssh, monkeypatch):
    """Points Compute Engine's client to the API as well; no fault outlives its test."""
    monkeypatch.setenv("TPU_OPS_REST_ENDPOINT", fleet.api.rest)
    monkeypatch.setattr(client, "FIRST_DELAY", 0.02)
    yield
    fleet.api.clear_faults()


@pytest.fixture
def disk(fleet, tpu_ops):
    """Runs a subcommand of `tpu_ops disk` that succeeds, and returns its JSON."""

    def run(*argv):
        code, out, err = tpu_ops("disk", *argv, "--json")
        assert code == 0, err
        return json.loads(out)

    return run


def source(fleet, name, zone=ZONE):
    return f"projects/{fleet.project}/zones/{zone}/disks/{name}"


def attached(fleet, node):
    """Return the disks of a node as the API has them: (name, mode)."""
    return [
        (one["sourceDisk"].rpartition("/")[2], one["mode"])
        for one in fleet.api.node(node, fleet.location()).get("dataDisks", [])
    ]


def create(disk, *names, zone=ZONE):
    for name in names:
        disk("create", name, "--size", "10", "--zone", zone)


def test_the_life_of_a_disk(fleet, tpu_ops, disk):
    fleet.create("box")
    assert disk("create", "data", "--size", "20", "--type", "pd-ssd", "--zone", ZONE)["outcome"] == "created"
    assert disk("create", "data", "--size", "20", "--type", "pd-ssd", "--zone", ZONE)["outcome"] == "already there"
    failed(tpu_ops("disk", "create", "data", "--size", "30", "--zone", ZONE), 3, "with 20 GB and type pd-ssd, not 30")
    code, out, err = tpu_ops("disk", "list")
    assert code == 0
    assert out.splitlines()[1].split(maxsplit=5) == [
        *("data", ZONE, "pd-ssd", "20", "GB"),
        "nothing: costs money without a node",
    ]
    assert "1 disk without a node: data (20 GB, us-central2-b)" in err

    assert disk("attach", "data", "box")["outcome"] == "attached"
    assert attached(fleet, "box") == [("data", READ_WRITE)]
    assert disk("attach", "data", "box", "--mode", "rw")["outcome"] == "already there"
    (row,) = disk("list")
    assert row["nodes"] == [{"node": f"{fleet.location()}/nodes/box", "mode": "rw"}]
    assert (row["size_gb"], row["unused"]) == (20, False)
    failed(
        tpu_ops("disk", "delete", "data", "--yes"), 2, "attached to box (rw)", "`tpu_ops disk detach data box` first"
    )

    assert disk("detach", "data", "box")["outcome"] == "detached"
    assert disk("detach", "data", "box")["outcome"] == "not attached"
    failed(tpu_ops("disk", "delete", "data"), 2, "--yes")
    assert disk("delete", "data", "--yes")["outcome"] == "deleted"
    assert disk("list") == []
    failed(tpu_ops("disk", "delete", "data", "--yes"), 2, "no disk is called 'data'")


def test_a_dry_run_changes_nothing(fleet, disk):
    fleet.create("box")
    disk("create", "data", "--size", "10", "--zone", ZONE, "--dry-run")
    assert disk("list") == []
    create(disk, "data")
    disk("attach", "data", "box", "--dry-run")
    disk("delete", "data", "--dry-run")
    assert attached(fleet, "box") == []
    disk("attach", "data", "box")
    disk("detach", "data", "box", "--dry-run")
    assert attached(fleet, "box") == [("data", READ_WRITE)]


def test_attach_and_detach_keep_the_other_disks(fleet, disk):
    others = [{"sourceDisk": source(fleet, name), "mode": READ_ONLY} for name in ("first", "last")]
    fleet.create("pod", "v4-16", dataDisks=others)
    create(disk, "data")
    assert disk("attach", "data", "pod")["mode"] == "ro"
    assert attached(fleet, "pod") == [("first", READ_ONLY), ("last", READ_ONLY), ("data", READ_ONLY)]
    disk("detach", "first", "pod")
    assert attached(fleet, "pod") == [("last", READ_ONLY), ("data", READ_ONLY)]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("here", "pod", "--mode", "rw"), ("several workers cannot write to one disk", "--mode ro")),
        (("there", "box"), ("only have disks of its own zone", OTHER)),
        (("taken", "box"), ("node owner has the disk, read-write", "tpu_ops disk detach taken owner")),
        (("taken", "pod"), ("node owner has the disk, read-write",)),
        (("read", "box", "--mode", "rw"), ("node reader has the disk, read-only", "--mode ro")),
        (("taken", "owner", "--mode", "ro"), ("has the disk already, read-write", "tpu_ops disk detach taken owner")),
        (("nowhere", "box"), ("no disk is called 'nowhere'", "there", "here, read, taken")),
        (("here", "nobody"), ("no node is called 'nobody'",)),
    ],
)
def test_impossible_attachments_are_refused_before_the_change_is_requested(fleet, tpu_ops, disk, argv, words):
    create(disk, "here", "taken", "read")
    create(disk, "there", zone=OTHER)
    fleet.create("box")
    fleet.create("pod", "v4-16")
    fleet.create("owner", dataDisks=[{"sourceDisk": source(fleet, "taken"), "mode": READ_WRITE}])
    fleet.create("reader", dataDisks=[{"sourceDisk": source(fleet, "read"), "mode": READ_ONLY}])
    fleet.api.forget_requests()
    failed(tpu_ops("disk", "attach", *argv), 2, *words[:1], *words[-1:])
    assert "UpdateNode" not in fleet.api.requests(fleet.project)


def test_a_disk_that_is_only_read_can_be_shared(fleet, disk):
    create(disk, "data")
    for name in ("one", "two"):
        fleet.create(name)
        disk("attach", "data", name, "--mode", "ro")
    (row,) = disk("list")
    assert [(use["node"].rpartition("/")[2], use["mode"]) for use in row["nodes"]] == [("one", "ro"), ("two", "ro")]


def test_a_change_that_another_machine_overwrites_is_made_again(fleet, disk):
    create(disk, "mine", "theirs")
    fleet.create("box")
    # While this command waits for its operation, another machine writes a list that it read before.
    fleet.api.fault(method="GetOperation", project=fleet.project, seconds=1, times=1)
    result = []
    command = threading.Thread(target=lambda: result.append(disk("attach", "mine", "box")))
    command.start()
    deadline = time.monotonic() + PATIENCE
    while ("mine", READ_WRITE) not in attached(fleet, "box"):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polls until the deadline
    theirs = [{"sourceDisk": source(fleet, "theirs"), "mode": READ_WRITE}]
    fleet.api.done("PATCH", f"v2/{fleet.location()}/nodes/box?updateMask=dataDisks", {"dataDisks": theirs})
    command.join(PATIENCE)
    assert result[0]["outcome"] == "attached"
    assert attached(fleet, "box") == [("theirs", READ_WRITE), ("mine", READ_WRITE)]


@pytest.mark.parametrize("method", ["compute.disks.insert", "compute.disks.delete", "UpdateNode"])
def test_a_lost_answer_does_not_end_a_command(fleet, disk, method):
    fleet.create("box")
    fleet.api.fault(method=method, project=fleet.project, code="UNAVAILABLE", times=1)
    create(disk, "data")
    disk("attach", "data", "box")
    disk("detach", "data", "box")
    disk("delete", "data", "--yes")
    assert disk("list") == []
    assert fleet.api.requests(fleet.project)[method] >= 2


def test_a_list_asks_once_for_the_disks_and_once_for_the_nodes_of_a_project(fleet, disk):
    create(disk, "data")
    fleet.api.forget_requests()
    disk("list")
    assert fleet.api.requests(fleet.project) == {"ListNodes": 1, "compute.disks.aggregatedList": 1}


def test_disks_without_a_node_are_found_in_all_zones(fleet, disk):
    create(disk, "idle", "used")
    create(disk, "away", zone=OTHER)
    fleet.create("box")
    disk("attach", "used", "box")
    settings = config.load()
    with origin.api(settings) as tpu:
        found = listing.list_nodes(tpu, settings.projects)
    assert [one.name for one in disks.unused(settings, found.nodes)] == ["away", "idle"]
    # The nodes of one zone are not known: whether its disks are used is not known either.
    assert [one.name for one in disks.unused(settings, [], [(fleet.project, ZONE)])] == ["away"]


def test_missing_rights_for_disks_are_explained(fleet, tpu_ops):
    fleet.api.fault(method="compute.disks.aggregatedList", project=fleet.project, code="PERMISSION_DENIED")
    failed(tpu_ops("disk", "list"), 3, "PERMISSION_DENIED", "Compute Viewer")


def test_disks_and_nodes_are_never_taken_from_different_services(fleet, tpu_ops, monkeypatch):
    monkeypatch.delenv("TPU_OPS_REST_ENDPOINT")
    failed(tpu_ops("disk", "list"), 2, "both endpoints", "TPU_OPS_REST_ENDPOINT")
    monkeypatch.setenv("TPU_OPS_REST_ENDPOINT", "http://compute.example:80")
    failed(tpu_ops("disk", "list"), 2, "TPU_OPS_REST_ENDPOINT", "loopback")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("create", "Data", "--size", "10", "--zone", ZONE), "cannot be a disk's name"),
        (("create", "data", "--size", "10", "--zone", ZONE, "--type", "ssd"), "not a type of disks"),
        (("create", "data", "--size", "10"), "no zone is given"),
    ],
)
def test_wrong_arguments_are_explained(tpu_ops, argv, words):
    failed(tpu_ops("disk", *argv), 2, words)
