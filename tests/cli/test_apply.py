"""`tpu_ops apply` against a real API process: what it plans, makes, changes and deletes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.commands import failed
from tests.support.fleet import FleetDir
from tpu_ops import config
from tpu_ops.cloud import remaking
from tpu_ops.fleet import unconfigured
from tpu_ops.runs import recovery, spec

Command = Callable[..., tuple[int, str, str]]
NOW = ("--yes", "--no-configure")
DEV = "{name: dev, type: v4-8, zones: [us-central2-b]}"


@pytest.fixture
def declare(fleet: FleetDir) -> Iterator[Callable[..., None]]:
    """Writes nodes.yml with these entries."""

    def write(*entries: str) -> None:
        (fleet.path / "nodes.yml").write_text("\n- ".join(["nodes:", *entries]) + "\n" if entries else "nodes: []\n")

    yield write
    fleet.api.clear_faults()


def plan(tpu_ops: Command, *argv: str) -> list[tuple[str, str, bool]]:
    """Return action and node of each step, and whether apply would do it."""
    code, out, err = tpu_ops("apply", "--dry-run", "--json", *argv)
    steps = [(step["action"], step["node"], step["does"]) for step in json.loads(out)["steps"]]
    assert code == any(does for _, _, does in steps), err
    return steps


def outcomes(result: tuple[int, str, str]) -> dict[str, str]:
    """Return the outcome of each node of an apply that succeeded."""
    assert result[0] == 0, result[2]
    return {step["node"]: step["outcome"] for step in json.loads(result[1])["steps"]}


def names(fleet: FleetDir, zone: str = "us-central2-b") -> dict[str, str]:
    """Return the state of each node in a zone."""
    found = fleet.api.call("GET", f"v2/{fleet.location(zone)}/nodes")[1].get("nodes", [])
    return {node["name"].rpartition("/")[2]: node["state"] for node in found}


@pytest.fixture
def silent(ssh: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every connection to a worker fail at once: the API's nodes have no workers here."""
    assert ssh
    monkeypatch.setenv("SSH_SAYS", "No route to host")


@pytest.mark.usefixtures("silent")
def test_the_life_of_declared_nodes(fleet: FleetDir, declare: Callable[..., None], tpu_ops: Command) -> None:
    failed(tpu_ops("apply"), 2, "declares no nodes", "docs/nodes.md")
    declare(DEV, "{name: 'sweep-[1-2]', type: v4-16, zones: [us-central2-b], spot: true, labels: {team: vision}}")
    code, out, _ = tpu_ops("apply", "--dry-run")
    assert (code, [line.split()[:2] for line in out.splitlines()[1:]]) == (
        1,
        [["create", "dev"], ["create", "sweep-1"], ["create", "sweep-2"]],
    )
    failed(tpu_ops("apply"), 2, "add --yes", printed=True)
    assert names(fleet) == {}

    assert set(outcomes(tpu_ops("apply", *NOW, "--json")).values()) == {"created"}
    assert names(fleet) == dict.fromkeys(("dev", "sweep-1", "sweep-2"), "READY")
    assert fleet.api.node("sweep-1", fleet.location())["schedulingConfig"] == {"spot": True}
    code, out, _ = tpu_ops("apply")
    assert (code, out) == (0, "nothing to do: 3 nodes as declared\n")

    fleet.api.call("POST", "lab/preempt", {"node": f"{fleet.location()}/nodes/sweep-2"})
    before = fleet.api.node("sweep-2", fleet.location())["id"]
    assert plan(tpu_ops) == [("make again", "sweep-2", True)]
    assert outcomes(tpu_ops("apply", *NOW, "--json")) == {"sweep-2": "created"}
    assert fleet.api.node("sweep-2", fleet.location())["id"] != before

    declare(DEV)
    assert plan(tpu_ops) == [("delete", "sweep-1", False), ("delete", "sweep-2", False)]
    assert tpu_ops("apply", *NOW)[0] == 0
    assert len(names(fleet)) == 3
    assert outcomes(tpu_ops("apply", *NOW, "--prune", "--json")) == {"sweep-1": "deleted", "sweep-2": "deleted"}
    assert names(fleet) == {"dev": "READY"}


def test_labels_metadata_and_disks_change_in_place_and_others_stay(
    fleet: FleetDir, declare: Callable[..., None], tpu_ops: Command
) -> None:
    disk = f"projects/{fleet.project}/zones/us-central2-b/disks"
    fleet.create(
        "dev",
        labels={"theirs": "x", "team": "audio"},
        metadata={"ssh-keys": "ada:k", "theirs": "x"},
        dataDisks=[
            {"sourceDisk": f"{disk}/old", "mode": "READ_WRITE"},
            {"sourceDisk": f"{disk}/data", "mode": "READ_WRITE"},
        ],
    )
    declare("{name: dev, type: v4-8, labels: {team: vision}, metadata: {a: b}, disks: [data:ro, more:rw]}")
    assert plan(tpu_ops) == [("change", "dev", True), ("leave", "dev", False)]
    code, out, _ = tpu_ops("apply", *NOW)
    assert (code, "label team=vision (now audio); metadata a is missing; disk data:ro" in out) == (0, True)
    node = fleet.api.node("dev", fleet.location())
    assert node["labels"] == {"theirs": "x", "team": "vision"}
    assert node["metadata"] == {"ssh-keys": "ada:k", "theirs": "x", "a": "b"}
    modes = {disk["sourceDisk"].rpartition("/")[2]: disk["mode"] for disk in node["dataDisks"]}
    assert modes == {"old": "READ_WRITE", "data": "READ_ONLY", "more": "READ_WRITE"}
    assert tpu_ops("apply", *NOW, "--prune")[0] == 0
    assert len(fleet.api.node("dev", fleet.location())["dataDisks"]) == 2
    assert plan(tpu_ops) == []


@pytest.mark.usefixtures("silent")
def test_a_node_whose_type_differs_is_recreated_only_on_demand(
    fleet: FleetDir, declare: Callable[..., None], tpu_ops: Command
) -> None:
    fleet.create("dev", "v4-16")
    declare(DEV)
    code, out, _ = tpu_ops("apply", *NOW)
    assert (code, "type is v4-16, not v4-8; everything on its boot disk is lost; only with --recreate" in out) == (
        0,
        True,
    )
    assert fleet.api.node("dev", fleet.location())["acceleratorType"] == "v4-16"
    assert outcomes(tpu_ops("apply", *NOW, "--recreate", "--json")) == {"dev": "created"}
    assert fleet.api.node("dev", fleet.location())["acceleratorType"] == "v4-8"


def test_a_zone_without_capacity_is_passed_over(
    fleet: FleetDir, declare: Callable[..., None], tpu_ops: Command
) -> None:
    declare("{name: dev, type: v5litepod-8, zones: [europe-west4-b, us-central1-a]}")
    stockout = {
        "code": "RESOURCE_EXHAUSTED",
        "message": "There is no more capacity in the zone",
        "project": fleet.project,
    }
    fleet.api.fault(method="CreateNode", zone="europe-west4-b", times=1, **stockout)
    assert outcomes(tpu_ops("apply", *NOW, "--json")) == {"dev": "created"}
    assert names(fleet, "us-central1-a") == {"dev": "READY"}
    assert tpu_ops("apply")[0] == 0


def test_a_failure_of_one_node_does_not_end_the_others_and_the_next_apply_recovers(
    fleet: FleetDir, declare: Callable[..., None], tpu_ops: Command
) -> None:
    declare("{name: 'dev-[1-3]', type: v4-8, zones: [us-central2-b]}")
    fleet.api.fault(
        method="CreateNode", code="RESOURCE_EXHAUSTED", message="no capacity", times=1, project=fleet.project
    )
    code, out, err = tpu_ops("apply", *NOW, "--json")
    steps = json.loads(out)["steps"]
    assert (code, sorted(step["outcome"] for step in steps)) == (3, ["created", "created", "failed"])
    assert "no capacity" in next(step["error"]["problem"] for step in steps if "error" in step)
    assert err.count("error: ") == 1
    assert list(outcomes(tpu_ops("apply", *NOW, "--json")).values()) == ["created"]
    assert len(names(fleet)) == 3


GRANT = "ends: 2099-01-31\nlines:\n- 8 on-demand Cloud TPU v4 chips in zone us-central2-b\n"


def test_nothing_is_changed_if_the_grant_has_no_room_for_all(
    fleet: FleetDir, declare: Callable[..., None], tpu_ops: Command
) -> None:
    (fleet.path / "grant.yml").write_text(GRANT)
    declare("{name: 'dev-[1-3]', type: v4-8}")
    failed(
        tpu_ops("apply", *NOW), 2, "node dev-3: the grant has no room for a v4-8 node", "--outside-grant", printed=True
    )
    assert names(fleet) == {}
    declare("{name: 'dev-[1-2]', type: v4-8}")
    assert len(outcomes(tpu_ops("apply", *NOW, "--json"))) == 2
    # A node that is made again does not count twice.
    fleet.act("delete", "dev-1")
    fleet.create("dev-1", schedulingConfig={"spot": True})
    fleet.api.call("POST", "lab/preempt", {"node": f"{fleet.location()}/nodes/dev-1"})
    assert outcomes(tpu_ops("apply", *NOW, "--json")) == {"dev-1": "created"}
    declare("{name: 'dev-[1-2]', type: v4-8}", "{name: out, type: v4-8, zones: [us-central2-b]}")
    assert outcomes(tpu_ops("apply", *NOW, "--outside-grant", "--json")) == {"out": "created"}


def test_a_queued_node_is_requested_once_and_its_failed_request_made_again(
    fleet: FleetDir, declare: Callable[..., None], tpu_ops: Command
) -> None:
    declare("{name: dev, type: v4-8, zones: [us-central2-b], queued: true}")
    assert outcomes(tpu_ops("apply", *NOW, "--json")) == {"dev": "begun"}
    until = time.monotonic() + 10
    while names(fleet).get("dev") != "READY":
        assert time.monotonic() < until
        time.sleep(0.05)  # polls the API until the queued resource has its node
    assert tpu_ops("apply")[0] == 0
    fleet.act("delete", "dev")
    assert plan(tpu_ops) == [("make again", "dev", True)]
    assert outcomes(tpu_ops("apply", *NOW, "--json")) == {"dev": "begun"}


def test_a_node_of_a_kept_recovery_is_left_to_it(
    fleet: FleetDir, declare: Callable[..., None], tpu_ops: Command
) -> None:
    fleet.create("dev", schedulingConfig={"spot": True})
    fleet.api.call("POST", "lab/preempt", {"node": f"{fleet.location()}/nodes/dev"})
    made = remaking.Made(f"{fleet.location()}/nodes/dev", "1", {})
    run = recovery.Recovery("exp", 1, remaking.Plan((made,)), recovery.options_of(spec.RunSpec("exp", ("true",)), {}))
    recovery.write(config.load().state_dir, run)
    declare("{name: dev, type: v4-8}")
    code, out, _ = tpu_ops("apply", *NOW)
    assert (code, "left to the recovery of run exp" in out) == (0, True)
    assert names(fleet) == {"dev": "PREEMPTED"}


def test_a_zone_that_is_not_listed_gets_no_second_node(
    fleet: FleetDir, declare: Callable[..., None], tpu_ops: Command
) -> None:
    fleet.create("dev")
    declare("{name: dev, type: v4-8, zones: [us-central2-b, us-central1-a]}")
    fleet.api.fault(unreachable=True, zone="us-central2-b", project=fleet.project)
    code, out, err = tpu_ops("apply", *NOW)
    assert (code, "could not be listed, so the node may exist" in out, "us-central2-b" in err) == (0, True, True)


def test_a_plan_with_nothing_to_do_takes_two_requests(
    fleet: FleetDir, declare: Callable[..., None], tpu_ops: Command
) -> None:
    declare("{name: 'dev-[1-50]', type: v4-8, zones: [us-central2-b], keep: true}")
    assert len(outcomes(tpu_ops("apply", *NOW, "--json"))) == 50
    fleet.api.forget_requests()
    assert tpu_ops("apply")[1] == "nothing to do: 50 nodes as declared\n"
    assert fleet.api.requests(fleet.project) == {"ListNodes": 1, "ListQueuedResources": 1}


def test_a_node_whose_configuration_was_not_finished_is_configured_by_the_next_apply(
    fleet: FleetDir, declare: Callable[..., None], tpu_ops: Command
) -> None:
    fleet.create("dev")
    declare(DEV)
    key = (fleet.project, "dev")
    unconfigured.add(config.load().state_dir, [key])
    assert plan(tpu_ops) == [("configure", "dev", True)]
    assert plan(tpu_ops, "--no-configure") == []
    (fleet.path / "site.yml").write_text(
        "- {hosts: all, gather_facts: false, tasks: [{ansible.builtin.debug: {msg: hi}}]}\n"
    )
    code, out, err = tpu_ops("apply", "--yes", "--json")
    assert (code, json.loads(out)["configured"]) == (0, ["dev-w0"]), err
    assert plan(tpu_ops) == []


def test_a_new_node_that_the_filters_exclude_is_not_configured(
    fleet: FleetDir, declare: Callable[..., None], tpu_ops: Command
) -> None:
    fleet.write(names=["others"])
    declare(DEV)
    code, out, err = tpu_ops("apply", "--yes", "--json")
    assert (code, json.loads(out)["configured"], "dev: not configured, since the fleet does not list" in err) == (
        0,
        [],
        True,
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--watch", "--prune"), ["--prune", "only makes nodes again"]),
        (("--watch", "--json"), ["--json", "only makes nodes again"]),
        (("--watch",), ["no node has `keep: true`"]),
    ],
)
def test_what_watch_refuses(
    declare: Callable[..., None], tpu_ops: Command, argv: tuple[str, ...], words: list[str]
) -> None:
    declare(DEV)
    code, _, err = tpu_ops("apply", *argv)
    assert (code, [word for word in words if word not in err]) == (2, [])


def test_watch_makes_kept_nodes_again_and_survives_api_errors(fleet: FleetDir, declare: Callable[..., None]) -> None:
    fleet.create("dev", schedulingConfig={"spot": True})
    fleet.api.call("POST", "lab/preempt", {"node": f"{fleet.location()}/nodes/dev"})
    declare("{name: dev, type: v4-8, spot: true, zones: [us-central2-b], keep: true}", "{name: other, type: v4-8}")
    fleet.api.fault(method="ListNodes", code="PERMISSION_DENIED", message="lost", times=1, project=fleet.project)
    argv = [sys.executable, "-m", "tpu_ops.cli.main", "apply", "--watch", "0.1", "--no-configure"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            said: list[str] = []
            for line in process.stderr:
                said.append(line)
                if line.startswith("the last round succeeded again"):
                    break
            assert names(fleet) == {"dev": "READY"}
            process.send_signal(signal.SIGTERM)
            said += process.communicate(timeout=30)[1].splitlines(keepends=True)
        finally:
            process.kill()
    text = "".join(said)
    assert process.returncode == 0, text
    assert [text.count(word) for word in ("lost", "the last round succeeded again", "node dev: make again")] == [
        1,
        1,
        1,
    ]
