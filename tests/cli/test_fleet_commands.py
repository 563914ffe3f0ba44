"""list, refresh, create, delete and ssh, against a real API process."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import socket
import subprocess
import sys
import time

import pytest

from tests.support.commands import failed
from tests.support.lab_api import PATIENCE
from tpu_ops import config
from tpu_ops.cli.main import main
from tpu_ops.cloud import accelerators, lifecycle, nodes, operations, remaking
from tpu_ops.cloud.client import ApiError
from tpu_ops.fleet import contact, view
from tpu_ops.runs import records, recovery, spec
from tpu_ops.ssh import masters as remote_ssh

COLUMNS = ["HOST", "ZONE", "TYPE", "STATE", "HEALTH", "TIER", "AGE", "INTERNAL", "EXTERNAL"]
POD = ("pod", "--type", "v4-16", "--zone", "us-central2-b")


@pytest.fixture
def silent(ssh, monkeypatch):
    """Has every connection to a worker fail at once: the API's nodes have no workers here."""
    monkeypatch.setenv("SSH_SAYS", "No route to host")


@pytest.mark.usefixtures("silent")
def test_the_life_of_a_node(fleet, tpu_ops):
    code, out, err = tpu_ops("create", *POD, "--label", "team=vision", "--spot")
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()] == ["pod-w0", "pod-w1"]
    node = fleet.api.node("pod", fleet.location())
    public = fleet.private_key.with_suffix(".pub").read_text().split()
    assert node["metadata"]["ssh-keys"] == f"ada:{public[0]} {public[1]} ada"
    assert (node["labels"], node["schedulingConfig"]["spot"]) == ({"team": "vision"}, True)
    assert node["runtimeVersion"] == "tpu-ubuntu2204-base"

    code, out, _ = tpu_ops("list")
    assert out.splitlines()[0].split() == COLUMNS
    assert out.splitlines()[2].split()[:4] == ["pod-w1", "us-central2-b", "v4-16", "READY"]
    rows = json.loads(tpu_ops("list", "--json")[1])
    assert [row["host"] for row in rows] == ["pod-w0", "pod-w1"]
    assert rows[0]["external_ip"] == node["networkEndpoints"][0]["accessConfig"]["externalIp"]

    assert tpu_ops("delete", "pod", "--dry-run")[0] == 0
    failed(tpu_ops("delete", "pod"), 2, "--yes")
    assert fleet.api.node("pod", fleet.location())["state"] == "READY"
    code, out, _ = tpu_ops("delete", "pod", "--yes")
    assert (code, "deleted node pod" in out) == (0, True)
    assert tpu_ops("list")[1] == ""
    failed(tpu_ops("delete", "pod", "--yes"), 2, "'pod'")


@pytest.mark.usefixtures("silent")
def test_deleting_a_node_that_may_have_a_run_warns_with_its_name(fleet, tpu_ops):
    fleet.create("pod")
    state_dir, node_id = config.load().state_dir, fleet.api.node("pod", fleet.location())["id"]
    records.write(state_dir, records.new("exp", ("pod",), (node_id,), ("pod-w0",), ("true",)))
    told = "warning: run exp, which was started on this machine, may be running on the node: `tpu_ops status exp`"
    silent = "warning: pod-w0 cannot tell whether a run is active: No route to host"
    assert [word for word in (told, silent) if word not in tpu_ops("delete", "pod", "--dry-run")[2]] == []
    records.close(state_dir, "exp", "failed")
    assert "exp" not in tpu_ops("delete", "pod", "--dry-run")[2]


def test_a_node_that_somebody_has_made_anew_meanwhile_is_not_deleted(fleet, tpu_ops, monkeypatch):
    fleet.create("pod")
    look = view.look

    def slow(settings):
        found = look(settings)
        fleet.api.done("DELETE", f"v2/{fleet.location()}/nodes/pod")
        fleet.create("pod")
        return found

    monkeypatch.setattr(view, "look", slow)
    failed(
        tpu_ops("delete", "pod", "--yes"),
        3,
        "the node was recreated after this command had looked it up; nothing was deleted",
    )
    assert fleet.api.node("pod", fleet.location())["state"] == "READY"
    monkeypatch.undo()


def test_a_run_that_was_on_a_node_that_is_taken_away_is_not_on_it(fleet, tpu_ops):
    fleet.create("pod", schedulingConfig={"spot": True})
    state_dir, node_id = config.load().state_dir, fleet.api.node("pod", fleet.location())["id"]
    records.write(state_dir, records.new("exp", ("pod",), (node_id,), ("pod-w0",), ("true",)))
    preempt(fleet, "pod")
    assert tpu_ops("delete", "pod", "--dry-run")[2] == ""


def preempt(fleet, name):
    """Take a node away."""
    assert fleet.api.call("POST", "lab/preempt", {"node": f"{fleet.location()}/nodes/{name}"})[0] == 200


@pytest.mark.usefixtures("silent")
def test_delete_names_a_recovery_that_needs_the_node_whatever_its_id(fleet, tpu_ops):
    fleet.create("pod")
    fleet.create("other")
    state_dir = config.load().state_dir
    run = spec.RunSpec("exp", ("true",))
    plan = remaking.Plan((remaking.Made(f"{fleet.location()}/nodes/pod", "1", {}),))
    kept = recovery.Recovery("exp", 1, plan, recovery.options_of(run, {}))
    needs = "recovery recreates this node unless `tpu_ops stop exp` ends the recovery\n"
    recovery.write(state_dir, kept)
    nobody = "warning: run exp: no process is recovering it; `tpu_ops attach exp --recover` resumes the recovery; "
    assert tpu_ops("delete", "pod", "--dry-run")[2].endswith(nobody + needs)
    assert "exp" not in tpu_ops("delete", "other", "--dry-run")[2]
    with recovery.lock(state_dir, "exp"):
        followed = "warning: run exp: a process on this machine recovers it; "
        assert tpu_ops("delete", "pod", "--dry-run")[2].endswith(followed + needs)
        recovery.write(state_dir, dataclasses.replace(kept, pending=True))
        assert "a process on this machine is preparing attempt 2; " in (said := tpu_ops("delete", "pod", "--yes")[2])
        assert said.endswith(needs)


@pytest.mark.parametrize(("name", "words"), [("loop", "leads back to itself"), ("~nobodyhere/x", "no home directory")])
def test_code_below_a_path_that_cannot_be_used_is_refused(fleet, tpu_ops, name, words):
    fleet.create("pod")
    (fleet.path / "loop").symlink_to("loop")
    failed(tpu_ops("train", "pod", "--sync", name, "--", "true"), 2, words, "at:  --sync")


@pytest.mark.parametrize(
    ("argv", "where", "words"),
    [
        (("--secret", "NOWHERE_SET"), "--secret NOWHERE_SET", "is not set here"),
        (("--secret", "A=absent", "--dry-run"), "--secret A", "cannot read the file"),
        (("--sync", ".", "--user", "ada"), "--sync and --user", "would start in another"),
    ],
)
def test_impossible_requests_are_refused_before_any_contact(fleet, tpu_ops, argv, where, words):
    fleet.create("pod")
    failed(tpu_ops("train", "pod", *argv, "--", "true"), 2, words, f"at:  {where}\n")


def test_creating_again_finds_the_node_there(fleet, tpu_ops):
    tpu_ops("create", *POD)
    before = fleet.api.node("pod", fleet.location())
    code, out, _ = tpu_ops("create", *POD, "--json")
    assert (code, json.loads(out)["outcome"]) == (0, "already there")
    assert fleet.api.node("pod", fleet.location()) == before


@pytest.mark.usefixtures("silent")
def test_creating_again_waits_for_the_node_that_an_interrupted_command_began(slow_fleet, tpu_ops):
    failed(tpu_ops("create", *POD, "--timeout", "0.3"), 3, "not done after", "same command")
    assert "CREATING" in tpu_ops("list")[1]
    code, out, _ = tpu_ops("create", *POD, "--json")
    assert (code, json.loads(out)["outcome"]) == (0, "resumed")
    assert len(json.loads(out)["workers"]) == 2
    code, out, _ = tpu_ops("delete", "pod", "--yes", "--no-wait")
    assert (code, "deleting node pod" in out) == (0, True)
    assert "DELETING" in tpu_ops("list")[1]
    assert tpu_ops("delete", "pod", "--yes")[0] == 0
    assert tpu_ops("list")[1] == ""


LOST = {"code": "INTERNAL", "message": "lost"}


@pytest.fixture
def faulty(fleet):
    """A fleet whose API answers wrongly when a test says so."""
    yield fleet
    fleet.api.clear_faults()


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("GetNode", ["lost (INTERNAL)", "nothing was created", "same command again"]),
        (
            "CreateNode",
            [
                "lost (INTERNAL)",
                "no node of this name, but the node may still appear",
                "`tpu_ops list`",
                "same command",
            ],
        ),
        ("GetOperation", ["the API is creating the node", "same command again to wait", "`tpu_ops delete pod"]),
        ("ListNodes", ["the node is READY", "same command again"]),
    ],
)
def test_create_resumes_after_the_api_was_lost_and_says_what_is_known(faulty, tpu_ops, method, words):
    faulty.api.fault(method=method, **LOST)
    failed(tpu_ops("create", *POD), 3, *words)
    faulty.api.clear_faults()
    assert tpu_ops("create", *POD)[0] == 0


@pytest.mark.parametrize(("found", "words"), [(True, []), (False, ["the node may exist", "same command again"])])
def test_a_creation_whose_answer_is_lost_is_looked_for(faulty, tpu_ops, monkeypatch, found, words):
    done = nodes.create_node

    def create_node(*args):
        done(*args)
        if not found:
            faulty.api.fault(method="GetNode", **LOST)
        raise ApiError("no answer within 20 s", status="DEADLINE_EXCEEDED")

    monkeypatch.setattr(nodes, "create_node", create_node)
    code, _, err = tpu_ops("create", *POD)
    assert (code, [word for word in words if word not in err]) == (0 if found else 3, []), err


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("DeleteNode", ["it is not known whether the API is deleting the node", "same command again"]),
        ("GetOperation", ["the API is deleting the node", "same command again to wait", "`tpu_ops list`"]),
        ("GetNode", ["nothing was deleted", "same command again"]),
    ],
)
def test_delete_resumes_after_the_api_was_lost_and_says_what_is_known(faulty, tpu_ops, method, words):
    faulty.create("pod", "v4-16")
    faulty.api.fault(method=method, **LOST)
    failed(tpu_ops("delete", "pod", "--yes"), 3, *words)
    faulty.api.clear_faults()
    # What is deleted meanwhile has no name any more.
    assert tpu_ops("delete", "pod", "--yes")[0] in (0, 2)
    assert json.loads(tpu_ops("list", "--json")[1]) == []


def test_a_node_is_deleted_though_its_fleet_cannot_be_listed_then(faulty, tpu_ops, monkeypatch):
    faulty.create("pod", "v4-16")
    done = lifecycle.delete

    def delete(*args, **options):
        done(*args, **options)
        faulty.api.fault(method="ListNodes", **LOST)

    monkeypatch.setattr(lifecycle, "delete", delete)
    code, out, err = tpu_ops("delete", "pod", "--yes")
    assert (code, "deleted node pod" in out, "the node was deleted, but the snapshot still lists it" in err) == (
        0,
        True,
        True,
    )


def test_a_creation_need_not_be_waited_for(fleet, tpu_ops):
    code, out, _ = tpu_ops("create", *POD, "--no-wait", "--json")
    assert (code, json.loads(out)["outcome"]) == (0, "begun")


def test_a_node_of_that_name_but_another_form_is_an_error(fleet, tpu_ops):
    fleet.create("pod", "v4-8")
    failed(tpu_ops("create", *POD), 3, "v4-8, not v4-16", "tpu_ops delete pod")
    failed(tpu_ops("create", *POD, "--dry-run"), 3, "v4-8, not v4-16")


@pytest.mark.parametrize(
    ("there", "asked", "words"),
    [
        ({}, ["--spot"], "exists on demand, not as a spot node"),
        ({"schedulingConfig": {"spot": True}}, [], "exists as a spot node, not on demand"),
        ({"schedulingConfig": {"preemptible": True}}, [], "exists as a spot node, not on demand"),
    ],
)
def test_a_node_that_may_be_preempted_is_none_that_may_not(fleet, tpu_ops, there, asked, words):
    fleet.create("pod", "v4-16", **there)
    failed(tpu_ops("create", *POD, *asked), 3, words, "tpu_ops delete pod")
    failed(tpu_ops("create", *POD, *asked, "--dry-run"), 3, words)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_requested_labels_missing_on_an_existing_node_are_named(fleet, tpu_ops, more):
    fleet.create("pod", "v4-16", labels={"team": "audio", "other": "x", "same": "s"})
    code, _, err = tpu_ops("create", *POD, "--label", "team=vision", "--label", "same=s", "--label", "new=n", *more)
    lacking = "team=vision (it has team=audio), new=n"
    assert (code, err.count(f"warning: the node existed before, without {lacking}, and is not changed\n")) == (0, 1)
    assert "warning" not in tpu_ops("create", *POD, "--label", "same=s", *more)[2]


def test_a_stopped_node_is_an_error_that_says_what_to_do(fleet, tpu_ops):
    fleet.create("pod", "v4-16")
    fleet.act("stop", "pod")
    start = "start the node (`tpu_ops node start pod --zone us-central2-b --project"
    failed(tpu_ops("create", *POD), 3, "STOPPED", start, "tpu_ops delete pod")


@pytest.mark.parametrize("state", ["17", "HIDDEN", "UNKNOWN", "STATE_UNSPECIFIED"])
def test_for_a_node_in_an_unknown_state_deletion_is_not_the_only_advice(fleet, tpu_ops, monkeypatch, state):
    fleet.create("pod", "v4-16")
    look = nodes.get_node
    monkeypatch.setattr(nodes, "get_node", lambda *args: look(*args)._replace(state=state))
    see = "see why (`tpu_ops node describe pod --zone us-central2-b --project"
    failed(tpu_ops("create", *POD), 3, f"in state {state}", see, "tpu_ops delete pod")


def test_a_node_that_is_on_its_way_again_once_it_is_made_is_waited_for(fleet, tpu_ops, monkeypatch):
    look, left = nodes.get_node, ["REPAIRING"]

    def get_node(*args):
        found = look(*args)
        return found._replace(state=left.pop()) if left else found

    monkeypatch.setattr(nodes, "get_node", get_node)
    monkeypatch.setattr(operations, "get_node", get_node)
    code, out, err = tpu_ops("create", *POD, "--json")
    assert (code, json.loads(out)["outcome"], left) == (0, "created", []), err


PREEMPTED = "Cloud TPU received a bad request. update is not supported while in state PREEMPTED [EID: 0x73]"
NO_CAPACITY = 'There is no more capacity in the zone "us-central2-b"'
NO_SUCH_TYPE = "CloudTpu received an invalid AcceleratorType"


@pytest.mark.parametrize(
    ("message", "status", "words"),
    [
        (
            PREEMPTED,
            "INVALID_ARGUMENT",
            ["the node was preempted while it was being created", "tpu_ops delete pod", "same command again"],
        ),
        (NO_CAPACITY, "RESOURCE_EXHAUSTED", ["another zone", "queued resource"]),
        (NO_SUCH_TYPE, "INVALID_ARGUMENT", ["has no accelerator type 'v3-16'"]),
    ],
)
@pytest.mark.usefixtures("fleet")
def test_a_creation_that_was_begun_and_has_failed_says_what_to_do(tpu_ops, monkeypatch, message, status, words):
    def fails(*_, what, **__):
        raise operations.Failed(message, status=status, where=what)

    monkeypatch.setattr(operations, "is_done", fails)
    # The lab refuses at once what the service may refuse later.
    monkeypatch.setattr(nodes, "create_node", lambda *_: "operation")
    argv = ["v3-16" if message == NO_SUCH_TYPE and word == "v4-16" else word for word in POD]
    failed(tpu_ops("create", *argv), 3, message, *words)


def test_delete_names_the_queued_resource_left_behind_and_its_deletion(fleet, tpu_ops):
    node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}
    specs = [{"parent": fleet.location(), "nodeId": name, "node": node} for name in ("pod", "other")]
    body = {"tpu": {"nodeSpec": specs}}
    fleet.api.done("POST", f"v2/{fleet.location()}/queuedResources?queuedResourceId=spring", body)
    deadline = time.monotonic() + PATIENCE
    while not (rows := json.loads(tpu_ops("list", "--json")[1])):
        assert time.monotonic() < deadline
    deletes = f"tpu_ops delete spring --zone {rows[0]['zone']} --project {fleet.project}"
    err = tpu_ops("delete", "pod", "--dry-run")[2]
    assert "queued resource spring, which created the node, stays and may use quota" in err
    assert f"`{deletes}`" in err


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["x", "--type", "v4-12", "--zone", "us-central2-b"], 3, ["v4-12", "v4-16"]),
        (["x", "--type", "v9-8", "--zone", "us-central2-b"], 3, ["v9-8", "it has v4-8"]),
        (["x", "--type", "v3-8", "--zone", "us-central2-b"], 3, ["v3-8", "us-central2-b", "v4-8"]),
        (["x", "--type", "v4-8", "--zone", "mars-north1-a"], 3, ["mars-north1-a", "us-central2-b"]),
        (["x", "--type", "v4-8", "--zone", "us-central2-b", "--runtime", "tpu-ubuntu"], 3, ["tpu-ubuntu2204-base"]),
        (["x", "--type", "v4-8", "--zone", "us-central2-b", "--project", "nobodys"], 3, ["nobodys"]),
        (["x", "--type", "tpu7x-8", "--zone", "us-central2-b"], 2, ["--type", "Google Kubernetes Engine"]),
        (["x", "--type", "v4-8"], 2, ["--zone"]),
        (["x", "--type", "v4-8", "--zone", "../x"], 2, ["--zone", "'../x' is not a zone"]),
        (["x", "--type", "v4-8", "--zone", "us-central2-b", "--project", "x/y"], 2, ["--project", "'x/y'"]),
        (["x", "--type", "\udcff", "--zone", "us-central2-b"], 2, ["--type", "cannot be printed"]),
        (["X_x", "--type", "v4-8", "--zone", "us-central2-b"], 2, ["X_x", "lower-case"]),
        (["x", "--type", "v4-8", "--zone", "us-central2-b", "--label", "novalue"], 2, ["--label", "KEY=VALUE"]),
    ],
)
def test_a_dry_run_explains_why_a_node_cannot_be_created(fleet, tpu_ops, argv, code, words):
    failed(tpu_ops("create", *argv), code, *words)
    failed(tpu_ops("create", *argv, "--dry-run"), code, *words)
    assert tpu_ops("list")[1] == ""


def test_a_dry_run_creates_nothing_and_shows_the_request(fleet, tpu_ops):
    code, out, _ = tpu_ops("create", *POD, "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["node"]["accelerator_type"] == "v4-16"
    assert tpu_ops("list")[1] == ""


def test_a_missing_or_doubtful_public_key_is_named(fleet, tpu_ops):
    public = fleet.private_key.with_suffix(".pub")
    key = public.read_text().strip()
    for second in ("\n", ",", " "):
        public.write_text(f"{key}{second}{key}\n")
        failed(tpu_ops("create", *POD), 2, str(public), "this file holds 2 keys")
    public.unlink()
    failed(tpu_ops("create", *POD), 2, str(public), "ssh-keygen -y")
    public.write_text("this is not a key")
    failed(tpu_ops("create", *POD), 2, "not an ssh public key")
    fleet.private_key.unlink()
    failed(tpu_ops("create", *POD), 2, "no ssh key", "ssh-keygen -t ed25519")


def test_host_keys_that_come_late_are_waited_for(fleet, tpu_ops, monkeypatch):
    from tpu_ops.ssh import guest_attributes

    monkeypatch.setattr("tpu_ops.fleet.view.KEYS_DELAY", 0.01)
    fetch, calls = guest_attributes.fetch, []

    def late(tpu, nodes, **options):
        calls.append(len(nodes))
        return fetch(tpu, nodes if len(calls) > 2 else [], **options)

    monkeypatch.setattr(guest_attributes, "fetch", late)
    code, _, err = tpu_ops("create", *POD)
    assert (code, len(calls)) == (0, 3)
    assert "host keys" in err
    assert "warning" not in err


def test_every_generation_has_a_default_runtime():
    from tpu_ops.cloud.accelerators import catalogue

    assert all(accelerators.default_runtime(kind.name) for kind in catalogue())


def test_refresh_shows_old_and_new_addresses_once(fleet, tpu_ops):
    tpu_ops("create", *POD)
    before = [row["external_ip"] for row in json.loads(tpu_ops("list", "--json")[1])]
    fleet.act("stop", "pod")
    fleet.act("start", "pod")
    out = tpu_ops("refresh", "--dry-run")[1]
    shown = tpu_ops("refresh")[1]
    after = [row["external_ip"] for row in json.loads(tpu_ops("list", "--json")[1])]
    assert set(before).isdisjoint(after)
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        for text in (out, shown):
            assert f"pod-w{index} external: {old} -> {new}" in text
    assert "no change" in tpu_ops("refresh")[1]


@pytest.mark.parametrize("argv", [["refresh"], ["refresh", "--dry-run"], ["list"], ["list", "--cached", "--json"]])
def test_workers_that_serve_and_have_no_way_are_named(fleet, tpu_ops, argv):
    fleet.create("pod", "v4-16", networkConfig={"enableExternalIps": False})
    fleet.create("off", "v4-8")
    fleet.act("stop", "off")
    fleet.write(connect_with=["external"])
    _, _, said = tpu_ops(*argv)
    assert said.count("2 workers cannot be reached, each has no external address: pod-w[0-1]") == 1
    assert "off-w0" not in said


def test_unrequested_instance_names_do_not_count_as_missing(fleet, tpu_ops):
    fleet.create("pod", "v4-16", networkConfig={"enableExternalIps": False})
    fleet.write(iap=True)
    fleet.api.fault(project=fleet.project, method="GetGuestAttributes", code="NOT_FOUND", message="disabled")
    for argv in (["list"], ["refresh", "--dry-run"]):
        assert "cannot be reached" not in tpu_ops(*argv)[2]
    assert "2 workers cannot be reached, each publishes no instance name" in tpu_ops("refresh")[2]
    fleet.api.clear_faults()


def test_the_line_that_refresh_prints_for_ssh_is_one_for_a_shell(fleet, tpu_ops, tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_OPS_STATE", str(tmp_path / "it's mine; $x"))
    line = tpu_ops("refresh")[1].splitlines()[-1]
    assert shlex.split(line) == ["ssh", "-F", str(fleet.settings().state_dir / "ssh_config"), "HOST"]


def test_refresh_as_json(fleet, tpu_ops):
    assert json.loads(tpu_ops("refresh", "--json")[1])["first"] is True
    fleet.create("pod", "v4-16")
    told = json.loads(tpu_ops("refresh", "--json")[1])
    assert (told["new"], told["workers"], told["warnings"]) == (["pod"], 2, [])
    fleet.act("stop", "pod")
    told = json.loads(tpu_ops("refresh", "--json")[1])
    assert told["states"] == [{"node": "pod", "old": "READY", "new": "STOPPED"}]
    fleet.act("delete", "pod")
    assert json.loads(tpu_ops("refresh", "--json")[1])["gone"] == ["pod"]


def test_list_filters_by_state_and_says_when_it_is_old(fleet, tpu_ops):
    fleet.create("pod", "v4-16")
    fleet.create("off", "v4-8")
    assert tpu_ops("refresh")[0] == 0
    fleet.act("stop", "off")
    _, out, err = tpu_ops("list", "--state", "stopped")
    assert [line.split()[0] for line in out.splitlines()] == ["HOST", "off-w0"]
    assert err == "the fleet has changed since the last refresh: `tpu_ops refresh` shows the changes\n", (
        "ssh_config is rewritten by any command"
    )
    assert "STOPPED" not in tpu_ops("list", "--cached")[1]
    assert [row["host"] for row in json.loads(tpu_ops("list", "--json", "--state", "READY")[1])] == ["pod-w0", "pod-w1"]


@pytest.mark.usefixtures("silent")
def test_two_nodes_of_one_name(fleet, tpu_ops):
    fleet.create("twin", "v4-8")
    fleet.create("twin", "v5litepod-4", zone="us-west4-a")
    failed(tpu_ops("delete", "twin", "--yes"), 2, "twin.us-central2-b or twin.us-west4-a")
    failed(tpu_ops("ssh", "twin"), 2, "twin.us-central2-b or twin.us-west4-a")
    assert tpu_ops("delete", "twin", "--zone", "us-west4-a", "--yes")[0] == 0
    assert [row["host"] for row in json.loads(tpu_ops("list", "--json")[1])] == ["twin-w0"]


def test_a_wrong_project_is_an_error_and_no_empty_fleet(fleet, tpu_ops, monkeypatch):
    monkeypatch.setenv("TPU_OPS_PROJECT", "nobodys")
    failed(tpu_ops("list"), 3, "nobodys")
    failed(tpu_ops("refresh"), 3, "nobodys")


def test_an_endpoint_where_nothing_listens_is_named(fleet, tpu_ops, monkeypatch):
    monkeypatch.setenv("TPU_OPS_ENDPOINT", "127.0.0.1:1")
    monkeypatch.setattr("tpu_ops.cloud.client.REFUSED_PATIENCE", 0.1)
    failed(tpu_ops("list"), 3, "127.0.0.1:1", "Connection refused")


def test_an_endpoint_that_hangs_is_named_while_it_is_waited_for_and_given_up(fleet, tpu_ops, monkeypatch):
    monkeypatch.setattr("tpu_ops.config.read.LOCAL_TIMEOUT", 1.0)
    monkeypatch.setattr("tpu_ops.cloud.client.TELL_AFTER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("TPU_OPS_ENDPOINT", address)
        result = tpu_ops("list")
    failed(result, 3, f"waiting for an answer from {address}", "TPU_OPS_ENDPOINT")


class Executed(Exception):
    """Stands for the process that took this one's place."""


@pytest.fixture
def executed(monkeypatch):
    """Returns the command line that this process would have become."""

    def execvp(file, argv):
        raise Executed(file, argv)

    monkeypatch.setattr(os, "execvp", execvp)

    def run(*argv: str) -> list[str]:
        with pytest.raises(Executed) as caught:
            main(argv)
        return list(caught.value.args[1])

    return run


def test_ssh_becomes_ssh_with_the_fleets_config(fleet, executed, ssh):
    fleet.create("pod", "v4-16")
    config = str(fleet.settings().state_dir / "ssh_config")
    assert executed("ssh", "pod-w1") == ["ssh", "-F", config, "pod-w1"]
    assert executed("ssh", "pod") == ["ssh", "-F", config, "pod-w0"]
    assert executed("ssh", "pod-w1", "--", "cd /tmp && ls") == ["ssh", "-F", config, "pod-w1", "--", "cd /tmp && ls"]
    assert executed("ssh", "pod-w1", "--", "echo", "a b", "$HOME")[-2:] == ["--", "echo 'a b' '$HOME'"]
    assert all(call.startswith(f"-F {config} ") for call in ssh())


def test_ssh_asks_for_what_a_master_may_not(fleet, executed, ssh, monkeypatch):
    """A key with a passphrase and no agent: only ssh in the terminal can ask for the passphrase."""
    fleet.create("pod", "v4-16")
    fleet.api.forget_requests()
    monkeypatch.setenv("SSH_SAYS", "ada@100.64.0.1: Permission denied (publickey).")
    assert executed("ssh", "pod-w1")[-1] == "pod-w1"
    assert fleet.api.requests(fleet.project)["ListNodes"] == 1


@pytest.mark.usefixtures("ssh")
def test_ssh_shows_what_a_key_waits_for(fleet, executed, tpu_ops, monkeypatch, capfd):
    """A FIDO key has to be touched: a master cannot ask for this, and opens no connection in time."""
    fleet.create("pod", "v4-16")
    monkeypatch.setenv("SSH_WAITS", "1")
    monkeypatch.setattr(remote_ssh, "OPEN_LIMIT", 0.3)
    assert executed("ssh", "pod-w1")[-1] == "pod-w1"
    err = capfd.readouterr().err
    waits = "(a key may be waiting for a touch or a passphrase)"
    assert f"pod-w1: no ssh connection within 0 s {waits}: ssh continues" in err
    assert "port 22" not in err
    assert f"{waits}\n" in tpu_ops("run", "pod-w1", "--", "true")[1]


def test_a_worker_that_does_not_answer_is_asked_for_before_ssh_starts(fleet, tpu_ops, ssh, monkeypatch):
    fleet.create("pod", "v4-16")
    tpu_ops("refresh")
    monkeypatch.setenv("SSH_SAYS", "ssh: connect to host 100.64.0.1 port 22: Connection refused")
    failed(tpu_ops("ssh", "pod"), 4, "pod-w0 does not answer: asking the API for its address", "Connection refused")
    fleet.act("stop", "pod")
    failed(tpu_ops("ssh", "pod"), 4, "state      pod: READY -> STOPPED", "its node is STOPPED now", "pod-w0")
    failed(tpu_ops("ssh", "pod"), 4, "pod was STOPPED when last seen: asking the API", "its node is STOPPED")
    fleet.act("delete", "pod")
    failed(tpu_ops("ssh", "pod-w1"), 2, "gone       pod", "no node or worker is called 'pod-w1'")


@pytest.mark.parametrize(
    "argv",
    [("ssh", "pod"), ("run", "pod", "--", "true"), ("doctor", "pod"), ("who", "pod"), ("train", "pod", "--", "true")],
)
def test_a_node_without_published_host_keys_is_refused_with_the_fix(fleet, tpu_ops, ssh, monkeypatch, argv):
    pod = fleet.create("pod", "v4-16")
    fleet.api.fault(project=fleet.project, method="GetGuestAttributes", code="NOT_FOUND", message="disabled")
    try:
        tpu_ops("refresh")
        unknown = f"No ED25519 host key is known for tpu-{pod['id']}-w0 and you have requested strict checking."
        monkeypatch.setenv("SSH_SAYS", f"{unknown}\nHost key verification failed.")
        code, out, err = tpu_ops(*argv)
    finally:
        fleet.api.clear_faults()
    told = "\n".join([out, *(line for line in err.splitlines() if not line.startswith("warning: "))])
    assert code == 4, err
    assert "no host key is known" in told
    assert "node pod publishes no host key: `tpu_ops refresh --trust-first pod`" in told
    assert "port 22" not in told
    assert "address or state of its node" not in told


def test_a_refused_login_names_the_settings_that_decide_it(fleet, tpu_ops, ssh, monkeypatch):
    fleet.create("pod", "v4-16")
    monkeypatch.setenv("SSH_SAYS", "ada@100.64.0.1: Permission denied (publickey).")
    code, out, err = tpu_ops("run", "pod", "--", "true")
    assert (code, out) == (4, "--- pod-w[0-1] (2 workers): ada@100.64.0.1: Permission denied (publickey).\n")
    fix = f"  fix: you logged in as ada with {fleet.private_key}. "
    fix += f"If that is wrong, set `user` and `private_key` in {fleet.file}"
    assert err.count(fix) == 1
    assert "`users_people`" in err
    assert (
        "With OS Login: `gcloud compute os-login ssh-keys add --key-file KEY.pub` and the login name of your OS "
        "Login profile as `user`" in err
    )
    monkeypatch.setenv("SSH_SAYS", "ssh: connect to host 100.64.0.1 port 22: Connection refused")
    assert "fix:" not in tpu_ops("run", "pod", "--", "true")[2]


def test_a_refusal_by_the_users_own_jump_is_named_as_such(fleet, tpu_ops, ssh, monkeypatch):
    fleet.create("pod", "v4-16")
    monkeypatch.setenv("TPU_OPS_PROXY_JUMP", "eve@bastion")
    closed = "kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535"
    monkeypatch.setenv("SSH_SAYS", f"eve@bastion: Permission denied (publickey).\n{closed}")
    _, out, err = tpu_ops("run", "pod", "--", "true")
    assert "eve@bastion: Permission denied (publickey). (said by the jump, not by the worker)\n" in out
    assert (
        "  fix: bastion (proxy_jump), through which the workers are reached, refuses you: your own ssh config sets"
        in err
    )
    assert "you logged in as" not in err
    # A jump that is a worker knows the same accounts and keys as the others.
    monkeypatch.setenv("TPU_OPS_PROXY_JUMP", "pod-w0")
    assert "  fix: you logged in as ada" in tpu_ops("run", "pod", "--", "true")[2]


def test_a_key_that_ssh_ignores_is_reported_first(fleet, tpu_ops, ssh, monkeypatch):
    fleet.create("pod", "v4-16")
    monkeypatch.setenv("SSH_SAYS", "ada@100.64.0.1: Permission denied (publickey).")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/ssh-gone/agent")
    assert "fix: no ssh agent answers at /tmp/ssh-gone/agent (" in tpu_ops("run", "pod", "--", "true")[2]
    monkeypatch.setenv("SSH_AUTH_SOCK", "")
    fleet.private_key.chmod(0o644)
    key = fleet.private_key
    fix = (
        f"  fix: other users can read {key}, so ssh does not use the key: `chmod 600 {key}`. Otherwise: you logged "
        "in as ada"
    )
    assert tpu_ops("run", "pod", "--", "true")[2].count(fix) == 1


def test_too_many_keys_in_the_agent_advise_to_name_one(fleet, tpu_ops, ssh, monkeypatch):
    fleet.create("pod", "v4-16")
    many = "Received disconnect from 100.64.0.1 port 22:2: Too many authentication failures"
    monkeypatch.setenv("SSH_SAYS", f"{many}\nDisconnected from 100.64.0.1 port 22")
    code, out, err = tpu_ops("run", "pod", "--", "true")
    told = "Too many authentication failures: more keys were offered than the worker's sshd accepts"
    assert (code, out) == (4, f"--- pod-w[0-1] (2 workers): {told}\n")
    fix = f"fix: set `private_key` in {fleet.file} (or TPU_OPS_PRIVATE_KEY) to the key that the workers know"
    assert err.count(fix) == 1
    # It is, so that the agent is one to a jump of theirs.
    fleet.write(private_key=str(fleet.private_key))
    assert "set `user` and `private_key`" in tpu_ops("run", "pod", "--", "true")[2]


def test_a_node_that_is_known_as_stopped_is_asked_for_before_it_is_refused(fleet, executed, ssh, capfd):
    fleet.create("pod", "v4-16")
    fleet.act("stop", "pod")
    assert main(["refresh"]) == 0
    fleet.act("start", "pod")
    assert executed("ssh", "pod")[-1] == "pod-w0"
    assert "state      pod: STOPPED -> READY" in capfd.readouterr().err


def test_run_connects_to_no_worker_of_a_node_that_does_not_serve(fleet, tpu_ops, ssh):
    fleet.create("pod", "v4-16")
    fleet.create("off", "v4-8")
    fleet.act("stop", "off")
    tpu_ops("refresh")
    code, out, err = tpu_ops("run", "pod,off", "--", "true")
    assert code == 1, "ssh of these tests runs no command: it has failed on pod"
    assert tpu_ops("run", "off", "--", "true")[0] == 4
    assert "--- off-w0: its node is STOPPED now\n" in out
    assert "off was STOPPED when last seen: asking the API" in err
    start = f"tpu_ops node start off --zone us-central2-b --project {fleet.project}"
    assert err.endswith(f"  fix: start the node: `{start}`\n")
    assert any("pod-w1" in call for call in ssh())
    assert not any("off-w0" in call for call in ssh())
    fleet.act("start", "off")
    assert "STOPPED now" not in tpu_ops("run", "off", "--", "true")[1]


@pytest.mark.parametrize("argv", [("who", "off"), ("unlock", "off", "--yes"), ("sync", "off", ".")])
def test_a_node_that_is_not_serving_is_reported_and_not_contacted(fleet, tpu_ops, ssh, argv):
    fleet.create("off", "v4-16", schedulingConfig={"spot": True})
    preempt(fleet, "off")
    tpu_ops("refresh")
    fleet.api.forget_requests()
    create = f"`tpu_ops create off --type v4-16 --zone us-central2-b --project {fleet.project} --spot`"
    asking = "off was PREEMPTED when last seen: asking the API for its address\n"
    result = tpu_ops(*argv)
    failed(result, 4, asking, "its node is PREEMPTED now", "at:  off-w[0-1]\n", create)
    assert (fleet.api.requests(fleet.project)["ListNodes"], ssh()) == (1, [])
    assert "once the workers answer" not in result[2]


@pytest.mark.parametrize("pending", [True, False], ids=["preparing an attempt", "not yet noticed"])
def test_no_command_advises_to_recreate_a_node_that_a_recovery_brings_back(fleet, tpu_ops, ssh, pending):
    fleet.create("off", "v4-8", schedulingConfig={"spot": True})
    preempt(fleet, "off")
    tpu_ops("refresh")
    state_dir = config.load().state_dir
    records.write(state_dir, records.new("r1", ("off",), ("1",), ("off-w0",), ("true",)))
    options = recovery.options_of(spec.RunSpec("r1", ("true",)), {})
    recovery.write(state_dir, recovery.Recovery("r1", 1, remaking.Plan(()), options, pending=pending))
    commands = [
        [*words, "off", *more]
        for words, more in (
            (["who"], []),
            (["unlock", "--yes"], []),
            (["sync"], ["."]),
            (["ssh"], []),
            (["run"], ["--", "true"]),
            (["status"], []),
            (["logs"], []),
            (["configure"], []),
            (["doctor"], []),
            (["train"], ["--", "true"]),
        )
    ]

    def that_advise(text: str) -> list[str]:
        return [words[0] for words in commands if text in "".join(map(str, tpu_ops(*words)))]

    with recovery.alone(state_dir, "r1"):
        assert that_advise("`tpu_ops create off") == []
        assert that_advise("wait until run r1 has started again, or end it: `tpu_ops stop r1`") == [
            one[0] for one in commands
        ]
    assert that_advise("`tpu_ops create off") == [words[0] for words in commands]


def test_sync_blocked_by_several_nodes_names_the_workers_of_each_fix(fleet, tpu_ops):
    fleet.create("gone", "v4-8", schedulingConfig={"spot": True})
    fleet.create("off", "v4-8")
    preempt(fleet, "gone")
    fleet.act("stop", "off")
    tpu_ops("refresh")
    create = f"`tpu_ops create gone --type v4-8 --zone us-central2-b --project {fleet.project} --spot`"
    failed(tpu_ops("sync", "off,gone", "."), 4, "its node is PREEMPTED now", "at:  gone-w0\n", create)


def test_the_who_command_skips_a_stopped_node_and_asks_the_others(fleet, tpu_ops, ssh):
    fleet.create("pod", "v4-8")
    fleet.create("off", "v4-8")
    fleet.act("stop", "off")
    tpu_ops("refresh")
    start = "start the node: `tpu_ops node start off "
    unsaid = "could not tell whether a run is active there"
    failed(tpu_ops("who", "pod,off"), 4, unsaid, "its node is STOPPED now", start)
    assert [call for call in ssh() if "pod-w0" in call]
    assert not [call for call in ssh() if "off-w0" in call]


@pytest.mark.parametrize(
    ("name", "where"), [("nosuch", "DIR {}/nosuch"), ("file", "DIR {}/file"), ("empty", "DIR {}/empty")]
)
def test_a_path_that_cannot_be_synced_is_named_as_given(fleet, tpu_ops, name, where):
    fleet.create("pod")
    (fleet.path / "file").touch()
    (fleet.path / "empty").mkdir()
    failed(tpu_ops("sync", "pod", name), 2, f"at:  {where.format(fleet.path)}\n")
    assert "--sync" in tpu_ops("train", "pod", "--sync", name, "--", "true")[2]


def test_a_command_that_no_worker_would_take_is_refused(fleet, tpu_ops, ssh):
    fleet.create("pod")
    failed(tpu_ops("run", "pod", "--", "echo", "x" * 131_072), 2, "bytes longer than a worker accepts", "tpu_ops sync")
    assert ssh() == []
    tpu_ops("run", "pod", "--", "echo", "x" * 130_000)
    assert ssh(), "it is asked"


def test_an_interrupted_command_names_what_continues(fleet, tpu_ops, monkeypatch):
    def pressed(*_):
        raise KeyboardInterrupt

    fleet.create("pod")
    monkeypatch.setattr(contact, "run", pressed)
    code, _, err = tpu_ops("run", "pod", "--timeout", "60", "--", "true")
    assert (code, "continues for 60 s at most" in err) == (130, True)


def test_a_run_cannot_have_the_name_of_a_node_or_worker(fleet, tpu_ops, ssh):
    fleet.create("pod")
    for name in ("pod", "pod-w0"):
        result = tpu_ops("train", "pod", "--name", name, "--", "true")
        failed(result, 2, "--name", "so it cannot be the id of a run")


def test_ssh_to_what_cannot_be_reached_is_refused_before_it_starts(fleet, tpu_ops):
    fleet.create("pod", "v4-16")
    fleet.create("off", "v4-8")
    fleet.act("stop", "off")
    failed(tpu_ops("ssh", "nowhere"), 2, "nowhere", "pod")
    failed(tpu_ops("ssh", "pod-w[0-1],off"), 2, "several")
    failed(tpu_ops("ssh", "off"), 4, "STOPPED", "off-w0")


LOADED = """
import sys
from tpu_ops.cli.main import main
try:
    main([*sys.argv[1:], "--help"])
except SystemExit:
    pass
heavy = {"google", "grpc", "ansible", "yaml"}
print(sorted(heavy & {name.split(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("command", [[], ["list"], ["refresh"], ["create"], ["delete"], ["ssh"]])
def test_help_is_fast_because_nothing_heavy_is_imported(command):
    done = subprocess.run([sys.executable, "-c", LOADED, *command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].startswith("usage: tpu_ops")
    assert done.stdout.splitlines()[-1] == "[]"
