"""`tpu_ops list`: age, tier, queued resources and cost, against a real API process."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from tests.support.commands import failed
from tests.support.lab_api import PATIENCE
from tests.support.published import POD, text
from tpu_ops.cli import list_use
from tpu_ops.runs.usage import FREE, NONE, OK, Row

NODE = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}
#: The policy that leads a queued resource to each state.
POLICY = {
    "ACTIVE": {},
    "FAILED": {"validUntilDuration": "0.001s"},
    "WAITING_FOR_RESOURCES": {"validAfterDuration": "600s"},
}
EXPIRED = "the valid interval of the queued resource ended"


@pytest.fixture
def faulty(fleet):
    """A fleet whose API answers wrongly if a test says so."""
    yield fleet
    fleet.api.clear_faults()


@pytest.fixture
def queue(faulty):
    """Creates a queued resource and waits for a state of it."""

    def create(name, *nodes, state, spot=True, kind="v4-8"):
        specs = [
            {"parent": faulty.location(), "nodeId": node, "node": {**NODE, "acceleratorType": kind}} for node in nodes
        ]
        body = {"tpu": {"nodeSpec": specs}, "queueingPolicy": POLICY[state], **({"spot": {}} if spot else {})}
        path = f"v2/{faulty.location()}/queuedResources"
        assert faulty.api.call("POST", f"{path}?queuedResourceId={name}", body)[0] == 200
        deadline = time.monotonic() + PATIENCE
        while (found := faulty.api.call("GET", f"{path}/{name}")[1])["state"]["state"] != state:
            assert time.monotonic() < deadline, found
        return found

    return create


def table(out):
    """Return the second table of the output, below the table of workers, as words of its lines."""
    return [line.split() for line in out.rpartition("\n\n")[2].splitlines()]


def queued(tpu_ops, *argv):
    code, out, err = tpu_ops("list", "--queued", "--json", *argv)
    assert code == 0, err
    return {one["name"]: one for one in json.loads(out)}


def test_a_worker_has_a_tier_and_an_age(fleet, tpu_ops):
    fleet.create("pod", schedulingConfig={"spot": True})
    fleet.create("kept", schedulingConfig={"reserved": True})
    fleet.create("own")
    rows = [line.split() for line in tpu_ops("list")[1].splitlines()]
    place = rows[0].index("TIER")
    assert {row[0]: row[place] for row in rows[1:]} == {"pod-w0": "spot", "kept-w0": "reserved", "own-w0": "on-demand"}
    assert {row[place + 2] for row in rows[1:]} == {"s"}, "all were created seconds ago"


def test_a_failed_queued_resource_is_in_a_second_table_with_its_error(queue, faulty, tpu_ops):
    faulty.create("pod")
    queue("big", "a", "b", state="FAILED")
    code, out, err = tpu_ops("list")
    head, row = table(out)
    assert (code, head[:3], row[:6]) == (
        0,
        ["QUEUED", "RESOURCE", "ZONE"],
        ["big", "us-central2-b", "2", "x", "v4-8", "FAILED"],
    )
    assert EXPIRED in " ".join(row)
    assert "1 queued resource in state FAILED or SUSPENDED still uses quota: `tpu_ops delete --failed`" in err
    workers = json.loads(tpu_ops("list", "--json")[1])
    assert [row["host"] for row in workers] == ["pod-w0"]
    found = queued(tpu_ops)["big"]
    assert (found["state"], found["tier"], found["zone"]) == ("FAILED", "spot", "us-central2-b")
    assert [(one["name"], one["exists"]) for one in found["nodes"]] == [("a", False), ("b", False)]


def test_a_waiting_queued_resource_is_listed_without_advice_to_delete_it(queue, tpu_ops):
    queue("later", "pod", state="WAITING_FOR_RESOURCES")
    code, out, err = tpu_ops("list")
    assert (code, table(out)[1][5], "delete" in err) == (0, "WAITING_FOR_RESOURCES", False)
    assert "no node exists" not in err


def test_a_queued_resource_whose_nodes_exist_is_not_listed_until_one_is_gone(queue, faulty, tpu_ops):
    queue("two", "a", "b", state="ACTIVE", spot=False)
    assert queued(tpu_ops) == {}
    assert "QUEUED RESOURCE" not in tpu_ops("list")[1]
    faulty.act("delete", "b")
    found = queued(tpu_ops)["two"]
    assert [(one["name"], one["exists"]) for one in found["nodes"]] == [("a", True), ("b", False)]
    assert found["tier"] == "on-demand"


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], {"big", "lite"}),
        (["--name", "b*"], {"big"}),
        (["--name", "node-of-lite"], {"lite"}),
        (["--type", "v4-16"], {"lite"}),
        (["--zone", "us-west4-a"], set()),
        (["--state", "failed"], {"big", "lite"}),
        (["--state", "READY"], set()),
        (["--label", "team"], set()),
    ],
)
def test_the_filters_apply_to_queued_resources(queue, tpu_ops, argv, names):
    queue("big", "node-of-big", state="FAILED")
    queue("lite", "node-of-lite", state="FAILED", kind="v4-16")
    assert queued(tpu_ops, *argv).keys() == names


def test_a_state_that_only_queued_resources_have_is_no_unknown_state(queue, faulty, tpu_ops):
    faulty.create("pod")
    queue("big", "a", state="FAILED")
    _, out, err = tpu_ops("list", "--state", "FAILED")
    assert ("no node has" in err, "pod" in out, "big" in out) == (False, False, True)
    assert "there are: FAILED, READY" in tpu_ops("list", "--state", "SUSPENDED")[2]


def test_the_filters_of_the_fleet_apply_to_queued_resources(queue, faulty, tpu_ops):
    queue("big", "mine-1", state="FAILED")
    queue("other", "theirs-1", state="FAILED")
    faulty.write(names=["mine-*"], labels={"team": "vision"})
    assert queued(tpu_ops).keys() == {"big"}


@pytest.mark.parametrize("status", ["PERMISSION_DENIED", "UNIMPLEMENTED"])
def test_a_refusal_to_list_queued_resources_is_a_warning(faulty, tpu_ops, status):
    faulty.create("pod")
    faulty.api.fault(method="ListQueuedResources", project=faulty.project, code=status, message="not for you")
    code, out, err = tpu_ops("list")
    assert (code, out.count("pod-w0"), err.count("warning: queued resources: ")) == (0, 1, 1)
    assert "not for you" in err
    failed(tpu_ops("list", "--queued"), 3, "not for you")


def test_a_project_without_an_answer_is_not_taken_for_one_without_queued_resources(faulty, tpu_ops):
    assert tpu_ops("list", "--queued")[2] == "no queued resource without nodes\n"
    faulty.write(projects=[faulty.project, faulty.second])
    faulty.api.fault(method="ListQueuedResources", project=faulty.second, code="INTERNAL", message="lost")
    assert "no queued resource without nodes is known, but some places" in tpu_ops("list", "--queued")[2]
    assert "no known queued resource without nodes is FAILED" in tpu_ops("delete", "--failed", "--yes")[2]


def test_each_project_is_asked_once_and_only_if_queued_resources_are_shown(fleet, tpu_ops):
    fleet.create("pod")
    fleet.api.forget_requests()
    tpu_ops("list")
    assert fleet.api.requests(fleet.project) == {"ListNodes": 1, "ListQueuedResources": 1}
    tpu_ops("refresh")
    fleet.api.forget_requests()
    tpu_ops("list", "--json")
    assert fleet.api.requests(fleet.project) == {"ListNodes": 1}
    fleet.api.forget_requests()
    assert "pod-w0" in tpu_ops("list", "--cached")[1]
    failed(tpu_ops("list", "--cached", "--queued"), 2, "only known to the API")
    assert fleet.api.requests(fleet.project) == {}


def test_a_published_snapshot_has_no_queued_resources(fleet, tpu_ops, tmp_path):
    (tmp_path / "fleet.json").write_text(text(nodes=(POD,)))
    fleet.write(projects=["lab"], snapshot=str(tmp_path / "fleet.json"))
    assert tpu_ops("list")[0] == 0
    failed(tpu_ops("list", "--queued"), 2, "a published snapshot")


def test_cost_shows_each_node_and_the_sum_and_what_the_grant_covers(fleet, tpu_ops):
    fleet.create("a")
    fleet.create("b")
    fleet.create("lite", "v5litepod-4", zone="us-west4-a")
    fleet.create("odd", "v5litepod-4", zone="us-west4-a", schedulingConfig={"reserved": True})
    fleet.act("stop", "b")
    found = json.loads(tpu_ops("list", "--cost", "--json")[1])
    assert {one["node"]: one["per_hour"] for one in found["nodes"]} == {"a": 12.88, "b": 0.0, "lite": 4.8, "odd": None}
    assert (found["per_hour"], found["per_day"], found["unknown"]) == (17.68, 424.32, 1)
    code, out, _ = tpu_ops("list", "--cost", "--name", "[al]*")
    assert (code, "together $17.68 per hour, $424.32 per day\n" in out) == (0, True)
    assert "estimate by list prices of July 2026, without discounts; a grant's TPUs cost nothing" in out
    lines = "ends: 2099-01-01\nlines:\n  - 8 on-demand Cloud TPU v4 chips in zone us-central2-b\n"
    (fleet.path / "grant.yml").write_text(lines)
    out = tpu_ops("list", "--cost")[1]
    assert "together $4.80 per hour, $115.20 per day, and 1 node of unknown price\n" in out
    assert [line.split()[-1] for line in out.splitlines()[1:5]] == ["covered", "covered", "-", "-"]
    tpu_ops("refresh")
    fleet.api.forget_requests()
    assert json.loads(tpu_ops("list", "--cost", "--json", "--cached")[1])["per_hour"] == 4.8
    assert fleet.api.requests(fleet.project) == {}


def test_cost_shows_what_queued_resources_will_cost(queue, faulty, tpu_ops):
    faulty.create("pod")
    queue("later", "a", "b", state="WAITING_FOR_RESOURCES", spot=False)
    queue("lost", "c", state="FAILED")
    code, out, _ = tpu_ops("list", "--cost")
    assert (code, "together $12.88 per hour, $309.12 per day\n" in out) == (0, True), "only nodes are billed yet"
    assert "queued resources cost nothing yet; once ACTIVE, together $25.76 per hour\n" in out
    found = json.loads(tpu_ops("list", "--cost", "--json")[1])
    hourly = {one["name"]: one["per_hour_once_active"] for one in found["queued_resources"]}
    assert (found["per_hour"], hourly) == (12.88, {"later": 25.76, "lost": 0.0})
    lines = "ends: 2099-01-01\nlines:\n  - 12 on-demand Cloud TPU v4 chips in zone us-central2-b\n"
    (faulty.path / "grant.yml").write_text(lines)
    found = json.loads(tpu_ops("list", "--cost", "--json", "--name", "later")[1])
    assert [one["covered_by_grant"] for one in found["queued_resources"]] == [True]
    # Queued resources that the API refuses to list are null, not an empty list.
    faulty.api.fault(method="ListQueuedResources", project=faulty.project, code="PERMISSION_DENIED")
    code, out, err = tpu_ops("list", "--cost", "--json")
    assert (code, json.loads(out)["queued_resources"], "warning: queued resources: " in err) == (0, None, True)


def test_cost_without_nodes_says_so(fleet, tpu_ops):
    assert "no node exists" in tpu_ops("list", "--cost")[2]
    assert json.loads(tpu_ops("list", "--cost", "--json")[1])["nodes"] == []


@pytest.fixture
def silent(ssh, monkeypatch):
    """Has every connection to a worker fail at once."""
    monkeypatch.setenv("SSH_SAYS", "No route to host")
    return ssh


def test_a_young_node_is_used_and_its_workers_are_not_asked(silent, fleet, tpu_ops):
    fleet.create("pod")
    code, out, err = tpu_ops("list", "--idle", "12h")
    assert (code, out, silent()) == (0, "", [])
    assert err == "no node is known to have been idle for 12 h\n"
    (found,) = json.loads(tpu_ops("list", "--idle", "12h", "--json")[1])
    assert (found["node"], found["use"], found["sign"], found["reason"]) == ("pod", "used", "created", "")


def test_a_node_whose_worker_does_not_answer_is_unknown_and_never_idle(silent, fleet, tpu_ops):
    fleet.create("pod", "v4-16")
    fleet.create("off")
    fleet.act("stop", "off")
    code, out, err = tpu_ops("list", "--idle", "0.001s", "--json")
    found = {one["node"]: one for one in json.loads(out)}
    assert (code, {name: one["use"] for name, one in found.items()}) == (0, {"pod": "unknown", "off": "unknown"})
    assert "pod-w[0-1]: No route to host" in found["pod"]["reason"]
    assert "STOPPED" in found["off"]["reason"]
    assert "warning: whether node pod is idle is unknown: pod-w[0-1]: No route to host" in err
    assert tpu_ops("list", "--idle", "0.001s")[1] == ""


def test_a_worker_that_does_not_answer_has_no_use_and_is_named(silent, fleet, tpu_ops):
    fleet.create("pod", "v4-16")
    fleet.create("off")
    fleet.act("stop", "off")
    code, out, err = tpu_ops("list", "--use")
    uses = {line.split()[0]: line.endswith("no answer") for line in out.splitlines()}
    assert (code, uses) == (0, {"HOST": False, "off-w0": False, "pod-w0": True, "pod-w1": True})
    assert "warning: pod-w[0-1]: 2 workers could not tell" in err
    assert "No route to host (run the same command again" in err
    found = json.loads(tpu_ops("list", "--use", "--json")[1])
    assert {row["host"]: row["use"] for row in found} == {"off-w0": None, "pod-w0": "no answer", "pod-w1": "no answer"}


def test_the_use_of_a_worker_names_the_run_the_person_and_what_the_chips_do():
    row = Row("pod", "pod-w0", OK, run="exp-7", person="ada", duty=96.0, hbm_used=12 * 2**30, hbm_total=32 * 2**30)
    assert list_use.words([row, replace(row, core=1)]) == "exp-7 of ada: HBM 12/32 GiB, duty 96 %"
    assert list_use.words([Row("pod", "pod-w0", NONE, pid=7, person="bob")]) == "no run of bob: no metrics"
    assert list_use.words([Row("pod", "pod-w0", FREE)]) == "free"


@pytest.mark.parametrize("argv", [("--idle", "12h", "--cost"), ("--idle", "soon"), ("--cost", "--queued")])
def test_impossible_options_are_refused(tpu_ops, argv):
    failed(tpu_ops("list", *argv), 2, argv[-1])
