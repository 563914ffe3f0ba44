"""delete with several targets and queued resources, and node, against a real API process."""

from __future__ import annotations

import datetime as dt
import json
import os
import time

import pytest

from tests.support.commands import failed
from tests.support.lab_api import PATIENCE
from tpu_ops import config
from tpu_ops.cloud import deletion
from tpu_ops.cloud.client import Tpu
from tpu_ops.cloud.listing import list_queued
from tpu_ops.errors import CloudError
from tpu_ops.fleet import origin, view

pytestmark = pytest.mark.usefixtures("silent")
V4 = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}
WAITS = {"queueingPolicy": {"validAfterDuration": "3600s"}}
FAILS = {"queueingPolicy": {"validUntilDuration": "0s"}}


@pytest.fixture
def silent(ssh, monkeypatch):
    """Has every connection to a worker fail at once: the API's nodes have no workers here."""
    monkeypatch.setenv("SSH_SAYS", "No route to host")


def queue(fleet, name, state, nodes=("",), **policy):
    """Create a queued resource, and wait until it has the given state."""
    specs = [{"parent": fleet.location(), "nodeId": node or name, "node": V4} for node in nodes]
    place = f"v2/{fleet.location()}/queuedResources"
    fleet.api.done("POST", f"{place}?queuedResourceId={name}", {"tpu": {"nodeSpec": specs}, **policy})
    until(lambda: states(fleet).get(name) == state)


def until(is_so):
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def states(fleet):
    """Return the state of each queued resource of the fleet's project."""
    found = fleet.api.call("GET", f"v2/{fleet.location()}/queuedResources")[1].get("queuedResources", [])
    return {one["name"].rpartition("/")[2]: one["state"]["state"] for one in found}


def known(fleet):
    """Return the nodes of the fleet's snapshot."""
    found = view.last(fleet.settings())
    assert found
    return found.nodes


def left(fleet):
    """Return the names of the fleet's nodes and queued resources."""
    nodes = fleet.api.call("GET", f"v2/{fleet.location()}/nodes")[1].get("nodes", [])
    return sorted(one["name"].rpartition("/")[2] for one in nodes), sorted(states(fleet))


def test_several_targets_are_deleted_at_once_with_what_made_them(fleet, tpu_ops):
    for name in ("tpu-1", "tpu-2", "other", "kept"):
        fleet.create(name)
    queue(fleet, "spring", "ACTIVE", ("s-0", "s-1"))
    queue(fleet, "half", "ACTIVE", ("h-0", "h-1"))
    queue(fleet, "waits", "WAITING_FOR_RESOURCES", **WAITS)
    targets = ("tpu-[1-2]", "other,s-[0-1],h-0", "waits", "typo")

    code, out, err = tpu_ops("delete", *targets, "--dry-run", "--json")
    planned = json.loads(out)
    assert code == 0, err
    assert [(one["node"].rpartition("/")[2], one["queued_resource"], one["runs"]) for one in planned["nodes"]] == [
        *((name, None, []) for name in ("h-0", "other", "tpu-1", "tpu-2")),
        *((name, f"{fleet.location()}/queuedResources/spring", []) for name in ("s-0", "s-1")),
    ]
    assert [(one["queued_resource"].rpartition("/")[2], one["state"]) for one in planned["queued_resources"]] == [
        ("spring", "ACTIVE"),
        ("waits", "WAITING_FOR_RESOURCES"),
    ]
    assert "queued resource half, which created node h-0, stays and may use quota" in err
    assert "warning: no node is called 'typo': skipped\n" in err
    failed(tpu_ops("delete", *targets), 2, "--yes")
    assert len(left(fleet)[0]) == 8

    code, out, err = tpu_ops("delete", *targets, "--yes")
    assert (code, left(fleet)) == (0, (["h-1", "kept"], ["half"])), err
    assert "deleted queued resource spring, zone us-central2-b, project " in out
    assert ", with its nodes s-0, s-1\n" in out
    assert [node.name for node in known(fleet)] == ["h-1", "kept"]
    assert tpu_ops("delete", "half", "--yes")[0] == 0
    assert left(fleet) == (["kept"], [])


@pytest.fixture
def answers(monkeypatch):
    """Has a user at a terminal who gives one answer."""
    terminal, stdin = os.openpty()

    def answer(text):
        os.write(terminal, f"{text}\n".encode())

    with os.fdopen(stdin, closefd=False) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        yield answer
    os.close(terminal)
    os.close(stdin)


def test_it_is_asked_once_with_all_that_is_lost(fleet, tpu_ops, answers):
    fleet.create("tpu-1")
    queue(fleet, "spring", "ACTIVE", ("s-0",))
    queue(fleet, "waits", "WAITING_FOR_RESOURCES", **WAITS)
    answers("n")
    code, out, err = tpu_ops("delete", "tpu-1,s-0,waits")
    place = f"zone us-central2-b, project {fleet.project}"
    assert (code, out) == (1, "")
    assert err.endswith(
        f"  node tpu-1, {place} (v4-8, 1 worker)\n"
        f"  queued resource spring, {place}, with its node s-0 (ACTIVE; v4-8, 1 worker)\n"
        f"  queued resource waits, {place} (WAITING_FOR_RESOURCES; requests waits (v4-8))\n"
        "delete 1 node and 2 queued resources with the files on the workers' own disks and the place in the queue? "
        "[y/N]\nnothing was deleted\n"
    )
    answers("y")
    assert tpu_ops("delete", "tpu-1,s-0,waits")[0] == 0
    assert left(fleet) == ([], [])


def test_a_node_takes_its_queued_resource_with_it(fleet, tpu_ops):
    queue(fleet, "spring", "ACTIVE", ("pod",))
    found = json.loads(tpu_ops("delete", "pod", "--yes", "--json")[1])
    place = fleet.location()
    assert found == {
        "node": f"{place}/nodes/pod",
        "dry_run": False,
        "waited": True,
        "runs": [],
        "queued_resource": f"{place}/queuedResources/spring",
    }
    assert left(fleet) == ([], [])


def test_a_failure_stops_no_other_deletion_and_gives_the_exit_code(fleet, tpu_ops):
    for name in ("a", "b", "c"):
        fleet.create(name)
    fleet.api.fault(project=fleet.project, method="DeleteNode", code="PERMISSION_DENIED", message="not you", times=1)
    code, out, err = tpu_ops("delete", "a,b,c", "--yes", "--json")
    rows = json.loads(out)["nodes"]
    wrong = [row["node"].rpartition("/")[2] for row in rows if "error" in row]
    assert (code, len(wrong), err.count("error: not you")) == (3, 1, 1)
    assert left(fleet)[0] == wrong
    code, _, err = tpu_ops("delete", "a,b,c", "--yes")
    assert (code, left(fleet)[0], err.count("skipped")) == (0, [], 2)


@pytest.mark.parametrize(
    ("method", "status", "expected"),
    [
        ("DeleteQueuedResource", "INTERNAL", (3, ["pod"], ["spring"])),
        ("GetQueuedResource", "INTERNAL", (3, ["pod"], ["spring"])),
        ("ListQueuedResources", "INTERNAL", (3, ["pod"], ["spring"])),
        # A user with the right to delete nodes only can still delete them.
        ("ListQueuedResources", "PERMISSION_DENIED", (0, [], ["spring"])),
    ],
)
def test_nodes_are_not_deleted_without_their_queued_resource_if_the_api_fails(fleet, tpu_ops, method, status, expected):
    queue(fleet, "spring", "ACTIVE", ("pod",))
    fleet.api.fault(project=fleet.project, message="lost", method=method, code=status)
    try:
        code = tpu_ops("delete", "pod", "--yes")[0]
    finally:
        fleet.api.clear_faults()
    assert (code, *left(fleet)) == expected
    assert tpu_ops("delete", "pod,spring", "--yes")[0] == 0
    assert left(fleet) == ([], [])


@pytest.mark.parametrize(
    ("status", "more", "expected"),
    [
        ("INTERNAL", ["--yes"], (3, ["pod"], ["spring"])),
        ("INTERNAL", ["--dry-run"], (0, ["pod"], ["spring"])),
        ("PERMISSION_DENIED", ["--yes"], (0, [], ["spring"])),
    ],
)
def test_a_node_stays_if_queued_resources_are_listed_only_elsewhere(fleet, tpu_ops, status, more, expected):
    queue(fleet, "spring", "ACTIVE", ("pod",))
    fleet.write(zones=["us-central2-b", "us-west4-a"])
    fault = {"method": "ListQueuedResources", "zone": "us-central2-b", "code": status}
    fleet.api.fault(project=fleet.project, message="lost", **fault)
    try:
        code, _, err = tpu_ops("delete", "pod", *more)
    finally:
        fleet.api.clear_faults()
    assert (code, *left(fleet)) == expected, err


def test_a_queued_resource_that_was_requested_again_meanwhile_is_not_deleted(fleet):
    queue(fleet, "again", "FAILED", **FAILS)
    with origin.api(fleet.settings()) as tpu:
        (old,) = list_queued(tpu, [fleet.project]).queued
        fleet.api.done("DELETE", f"v2/{old.full_name}?force=true")
        queue(fleet, "again", "WAITING_FOR_RESOURCES", **WAITS)
        at = (old.full_name, old.created)
        with pytest.raises(CloudError, match="the queued resource was recreated"):
            deletion.delete_queued(tpu, *at, wait=True, timeout=PATIENCE, progress=lambda *_: None)
    assert states(fleet) == {"again": "WAITING_FOR_RESOURCES"}


@pytest.mark.parametrize("method", ["StopNode", "StartNode"])
def test_the_same_command_finishes_a_restart_that_the_api_failed(fleet, tpu_ops, method):
    fleet.create("pod")
    fleet.api.fault(project=fleet.project, method=method, code="INTERNAL", message="lost", times=1)
    failed(tpu_ops("node", "restart", "pod", "--yes"), 3, "lost")
    assert json.loads(tpu_ops("node", "restart", "pod", "--yes", "--json")[1])["outcome"] == "restarted"


class Killed(BaseException):
    """Stands for SIGKILL: no code of the command handles it."""


@pytest.fixture
def killed(monkeypatch):
    """Kills a command before or after the n-th change that it requests from the API."""
    call, done = Tpu.call, list[str]()

    def at(number, *, sent):
        done.clear()

        def changing(self, method, request, where, **options):
            if not method.startswith(("delete_", "stop_", "start_")):
                return call(self, method, request, where, **options)
            done.append(method)
            if len(done) != number:
                return call(self, method, request, where, **options)
            if sent:
                call(self, method, request, where, **options)
            raise Killed

        monkeypatch.setattr(Tpu, "call", changing)

    yield at
    monkeypatch.setattr(Tpu, "call", call)


@pytest.mark.parametrize("sent", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_same_command_finishes_a_deletion_that_was_killed(fleet, tpu_ops, killed, number, sent):
    fleet.create("a")
    queue(fleet, "spring", "ACTIVE", ("s-0", "s-1"))
    queue(fleet, "waits", "WAITING_FOR_RESOURCES", **WAITS)
    view.refresh(fleet.settings())
    killed(number, sent=sent)
    with pytest.raises(Killed):
        tpu_ops("delete", "a", "s-[0-1]", "waits", "--yes")
    killed(0, sent=False)
    code, _, err = tpu_ops("delete", "a", "s-[0-1]", "waits", "--yes")
    assert (code, left(fleet)) == (0, ([], [])), err
    assert known(fleet) == ()


def test_a_node_that_is_gone_already_is_no_error_and_is_forgotten(fleet, tpu_ops):
    fleet.create("pod")
    view.refresh(fleet.settings())
    fleet.act("delete", "pod")
    code, out, err = tpu_ops("delete", "pod", "--yes", "--json")
    assert (code, json.loads(out)["node"]) == (0, f"{fleet.location()}/nodes/pod")
    assert "it is gone already" in err
    failed(tpu_ops("delete", "pod", "--yes"), 2, "no node is called 'pod'")


@pytest.mark.parametrize("sent", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2])
def test_the_same_command_finishes_a_restart_that_was_killed(fleet, tpu_ops, killed, number, sent):
    fleet.create("pod")
    killed(number, sent=sent)
    with pytest.raises(Killed):
        tpu_ops("node", "restart", "pod", "--yes")
    killed(0, sent=False)
    code, _, err = tpu_ops("node", "restart", "pod", "--yes")
    assert (code, fleet.api.node("pod", fleet.location())["state"]) == (0, "READY"), err


def test_failed_ones_are_deleted_and_those_with_a_node_are_left(fleet, tpu_ops):
    queue(fleet, "fails", "FAILED", **FAILS)
    queue(fleet, "waits", "WAITING_FOR_RESOURCES", **WAITS)
    queue(fleet, "works", "ACTIVE", ("w-0",))
    queue(fleet, "taken", "ACTIVE", ("t-0",), spot={})
    assert fleet.api.call("POST", "lab/preempt", {"node": f"{fleet.location()}/nodes/t-0"})[0] == 200
    queue(fleet, "empty", "ACTIVE", ("e-0",))
    fleet.act("delete", "e-0")
    until(lambda: (states(fleet)["taken"], states(fleet)["empty"]) == ("SUSPENDED", "SUSPENDED"))

    failed(tpu_ops("delete", "--failed"), 2, "--yes")
    code, out, _ = tpu_ops("delete", "--failed", "--dry-run")
    assert (code, len(out.splitlines()), len(states(fleet))) == (0, 2, 5)
    code, out, err = tpu_ops("delete", "--failed", "--yes", "--json")
    found = json.loads(out)
    assert (code, sorted(states(fleet))) == (0, ["taken", "waits", "works"]), err
    assert [one["queued_resource"].rpartition("/")[2] for one in found["queued_resources"]] == ["empty", "fails"]
    assert [name.rpartition("/")[2] for name in found["left"]] == ["taken"]
    assert "queued resource taken, zone us-central2-b" in err
    assert "(SUSPENDED) stays: it still has node t-0 (PREEMPTED)" in err
    code, out, err = tpu_ops("delete", "--failed", "--yes", "--zone", "us-central2-b")
    assert (code, out) == (0, "")
    assert "this fleet, zone us-central2-b: no queued resource without nodes is FAILED or SUSPENDED" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["no target is given", "--failed"]),
        (["pod", "--failed"], ["--failed takes no targets"]),
        (["--failed", "--project", "nobodys"], ["the fleet has no project 'nobodys'"]),
    ],
)
@pytest.mark.usefixtures("fleet")
def test_impossible_deletions_are_refused(tpu_ops, argv, words):
    failed(tpu_ops("delete", *argv), 2, *words)


def test_a_node_is_stopped_and_started_with_its_new_address(fleet, tpu_ops):
    fleet.create("pod")
    first = fleet.api.node("pod", fleet.location())["networkEndpoints"][0]["accessConfig"]["externalIp"]
    failed(tpu_ops("node", "stop", "pod"), 2, "stopping needs confirmation", "--yes")
    assert tpu_ops("node", "stop", "pod", "--dry-run")[1].startswith("would stop: node pod")
    assert json.loads(tpu_ops("node", "stop", "pod", "--yes", "--json")[1])["outcome"] == "stopped"
    assert known(fleet)[0].state == "STOPPED"
    assert json.loads(tpu_ops("node", "stop", "pod", "--yes", "--json")[1])["outcome"] == "already stopped"

    code, out, _ = tpu_ops("node", "start", "pod")
    second = fleet.api.node("pod", fleet.location())["networkEndpoints"][0]["accessConfig"]["externalIp"]
    assert (code, first != second, out.splitlines()[1].split()[::2]) == (0, True, ["pod-w0", second])
    assert known(fleet)[0].external_ips == (second,)
    assert tpu_ops("node", "start", "pod")[1].startswith("already started: node pod")
    found = json.loads(tpu_ops("node", "restart", "pod", "--yes", "--json")[1])
    assert (found["outcome"], found["workers"][0]["external_ip"] not in (first, second)) == ("restarted", True)


def test_several_nodes_are_stopped_at_once_and_nothing_if_one_cannot_be(fleet, tpu_ops):
    fleet.create("tpu-1")
    fleet.create("tpu-2")
    fleet.create("pod", "v4-16")
    fleet.create("spot", schedulingConfig={"spot": True})
    result = tpu_ops("node", "stop", "tpu-[1-2],pod,spot", "--yes")
    failed(result, 3, "2 nodes cannot be stopped, and nothing was changed", "several workers", "a spot node cannot")
    assert {node.state for node in view.look(fleet.settings())[0].nodes} == {"READY"}
    code, out, _ = tpu_ops("node", "stop", "tpu-[1-2]", "--yes", "--json")
    assert (code, [row["outcome"] for row in json.loads(out)["nodes"]]) == (0, ["stopped", "stopped"])
    failed(tpu_ops("node", "stop", "pod", "--yes"), 3, "several workers", "delete the node to end its cost")
    failed(tpu_ops("node", "stop", "nowhere", "--yes"), 2, "no node is called 'nowhere'")


def test_a_start_need_not_be_waited_for_and_is_continued(slow_fleet, tpu_ops):
    slow_fleet.create("pod")
    failed(tpu_ops("node", "stop", "pod", "--yes", "--timeout", "0.3"), 3, "not done after", "same command")
    assert json.loads(tpu_ops("node", "start", "pod", "--no-wait", "--json")[1])["outcome"] == "begun"
    assert known(slow_fleet)[0].state == "STARTING"
    code, out, _ = tpu_ops("node", "start", "pod", "--json")
    assert (code, json.loads(out)["outcome"]) == (0, "started")


def test_all_facts_of_a_node_are_described_without_secrets(fleet, tpu_ops):
    fleet.create("pod", "v4-16", labels={"team": "vision"}, metadata={"token": "SECRET"})
    queue(fleet, "spring", "ACTIVE", ("s-0",))
    code, out, _ = tpu_ops("node", "describe", "pod", "s-0")
    assert (code, "SECRET" in out) == (0, False)
    facts = [line.split(maxsplit=1) for line in out.splitlines() if line]
    assert [
        line for line in (["name", "pod"], ["state", "READY"], ["labels", "team=vision"]) if line not in facts
    ] == []
    assert "metadata keys" in out
    assert f"{'queued resource'.ljust(18)}  spring (ACTIVE, for s-0)" in out
    assert [line.split()[2] for line in out.splitlines() if line.startswith("worker ")][1:3] == ["pod-w0", "pod-w1"]
    found = json.loads(tpu_ops("node", "describe", "pod", "--json")[1])
    assert (found["metadata_keys"], found["queued"], len(found["workers"])) == (["token"], None, 2)
    both = json.loads(tpu_ops("node", "describe", "pod,s-0", "--json")[1])["nodes"]
    assert [node["queued"] and node["queued"]["state"] for node in both] == [None, "ACTIVE"]


@pytest.mark.parametrize("argv", [("delete", "pod", "--yes"), ("node", "stop", "pod", "--yes"), ("delete", "--failed")])
def test_the_end_of_the_grant_is_announced_and_a_faulty_file_stops_nothing(fleet, tpu_ops, argv):
    fleet.create("pod")
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(days=2, hours=1)
    line = "32 on-demand Cloud TPU v4 chips in zone us-central2-b"
    (fleet.path / "grant.yml").write_text(f"ends: {soon.isoformat()}\nlines: [{line}]\n")
    code, _, err = tpu_ops(*argv)
    assert (code, err.count("warning: the grant ends in 2 days")) == (0, 1)
    (fleet.path / "grant.yml").write_text("ends: never\n")
    assert "grant.yml" in tpu_ops("delete", "--failed")[2]
    assert not list(config.load().state_dir.glob("no-grant"))
