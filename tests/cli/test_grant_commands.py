"""`tpu_ops grant`, and `tpu_ops create` within a grant, against a real API process."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest

from tests.support.commands import failed

OTHER = "europe-west4-b"
LINES = """
lines:
  - 16 on-demand Cloud TPU v4 chips in zone us-central2-b
  - 16 spot Cloud TPU v4 chips in zone us-central2-b
  - 8 spot Cloud TPU v5e chips in zone europe-west4-b
"""


def day(days: int) -> str:
    return (dt.datetime.now(dt.UTC).date() + dt.timedelta(days=days)).isoformat()


@pytest.fixture
def granted(fleet):
    """Writes the fleet's grant, which ends after some days."""

    def write(days=30, lines=LINES, ends=""):
        (fleet.path / "grant.yml").write_text(f"ends: {ends or day(days)}{lines}")
        return fleet

    yield write
    fleet.api.clear_faults()


def create(tpu_ops, *argv):
    return tpu_ops("create", *argv, "--dry-run", "--json")


def places(result):
    code, out, err = result
    assert code == 0, err
    found = json.loads(out)
    found = found if isinstance(found, list) else [found]
    return [
        (one["node_id"], one["parent"].rpartition("/")[2], bool(one["node"].get("scheduling_config"))) for one in found
    ]


@pytest.mark.parametrize(
    ("argv", "place"),
    [
        (["--type", "v4-8"], ("us-central2-b", False)),
        (["--type", "v4-8", "--spot"], ("us-central2-b", True)),
        (["--type", "v5litepod-8"], (OTHER, True)),
        (["--type", "v5litepod-8", "--zone", f"us-central1-a,{OTHER}"], (OTHER, True)),
    ],
)
def test_with_a_grant_neither_zone_nor_tier_is_needed(granted, tpu_ops, argv, place):
    granted()
    assert places(create(tpu_ops, "pod", *argv)) == [("pod", *place)]


def test_a_full_line_gives_way_to_the_next_one(granted, tpu_ops):
    fleet = granted()
    fleet.create("one", "v4-32")
    assert places(create(tpu_ops, "two", "--type", "v4-32")) == [("two", "us-central2-b", True)]
    assert places(create(tpu_ops, "one", "--type", "v4-32")) == [("one", "us-central2-b", False)]
    failed(create(tpu_ops, "two", "--type", "v4-64"), 2, "32 are needed", printed=True)


@pytest.mark.usefixtures("ssh")
def test_two_nodes_of_one_command_do_not_take_the_same_room(granted, tpu_ops):
    fleet = granted()
    code, out, err = tpu_ops("create", "a,b", "--type", "v4-32", "--json")
    assert code == 0, err
    assert [one["outcome"] for one in json.loads(out)["nodes"]] == ["created", "created"]
    tiers = {name: bool(fleet.api.node(name, fleet.location()).get("schedulingConfig")) for name in "ab"}
    assert sorted(tiers.values()) == [False, True]
    failed(tpu_ops("create", "c", "--type", "v4-8"), 2, "the grant has no room", "delete what is not needed (node ")
    code, _, err = tpu_ops("create", "c", "--type", "v4-8", "--zone", "us-central2-b", "--outside-grant")
    assert code == 0, err


def test_a_node_that_no_line_covers_is_refused_before_any_request(granted, tpu_ops):
    fleet = granted()
    fleet.api.forget_requests()
    result = tpu_ops("create", "pod", "--type", "v2-8", "--zone", "us-central1-b")
    failed(result, 2, "no line of the grant covers a v2-8 node in zone us-central1-b", "--outside-grant", "grant.yml")
    assert "CreateNode" not in fleet.api.requests(fleet.project)


def test_a_queued_resource_that_failed_still_uses_the_grant(granted, tpu_ops):
    fleet = granted()
    node = {"acceleratorType": "v4-32", "runtimeVersion": "tpu-ubuntu2204-base"}
    body = {"tpu": {"nodeSpec": [{"parent": fleet.location(), "nodeId": "q", "node": node}]}, "spot": {}}
    fleet.api.done("POST", f"v2/{fleet.location()}/queuedResources?queuedResourceId=q", body)
    assert places(create(tpu_ops, "pod", "--type", "v4-32")) == [("pod", "us-central2-b", False)]
    failed(
        create(tpu_ops, "pod", "--type", "v4-32", "--spot"), 2, "0 of 16 chips are free, 16 are needed", printed=True
    )


def test_a_place_that_could_not_be_listed_ends_the_command(granted, tpu_ops):
    fleet = granted()
    fleet.api.fault(method="ListNodes", project=fleet.project, zone="us-central2-b", unreachable=True)
    failed(create(tpu_ops, "pod", "--type", "v4-8"), 2, "how much of the grant is used is unknown", printed=True)


@pytest.mark.parametrize(("days", "text"), [(30, ""), (5, "the grant ends in "), (-2, "the grant ended on ")])
def test_the_end_is_announced(granted, tpu_ops, days, text):
    granted(days)
    code, _, err = create(tpu_ops, "pod", "--type", "v4-8")
    assert (code, "warning: the grant end" in err) == (2 if days < 0 else 0, bool(text))
    assert text in err


def test_without_a_grant_one_line_says_so_once(fleet, tpu_ops):
    argv = ("create", "pod", "--type", "v4-8", "--zone", "us-central2-b", "--dry-run")
    said = [tpu_ops(*argv)[2].count("has no grant.yml") for _ in range(2)]
    assert said == [1, 0]
    failed(tpu_ops("grant"), 2, "this fleet has no grant", "tpu_ops grant import")


def test_grant_shows_what_is_used_and_what_would_exist_after_the_end(granted, tpu_ops):
    fleet = granted()
    fleet.create("one", "v4-16")
    fleet.create("paid", "v2-8", zone="us-central1-b")
    code, out, err = tpu_ops("grant")
    assert code == 0, err
    assert out.splitlines()[1].split() == ["16", "v4", "chips", "8", "8", "us-central2-b", "on-demand", "node", "one"]
    assert "days left" in out
    assert "2 nodes would still exist after the end, and be billed: node paid, node one" in out
    assert "warning: not covered, so billed: node paid (v2-8, on-demand, us-central1-b)" in err
    found = json.loads(tpu_ops("grant", "--json")[1])
    assert [(line["granted"], line["used"], line["free"]) for line in found["lines"]] == [
        (16, 8, 8),
        (16, 0, 16),
        (8, 0, 8),
    ]
    assert [one["name"].rpartition("/")[2] for one in found["outside"]] == ["paid"]


def test_after_the_end_what_the_grant_covered_is_deleted_and_what_is_paid_for_stays(granted, tpu_ops):
    fleet = granted(30)
    fleet.create("one", "v4-8")
    fleet.create("paid", "v2-8", zone="us-central1-b")
    code, out, err = tpu_ops("grant", "--delete-after-end", "--json")
    assert (code, json.loads(out)["deleted"], err) == (0, [], "")
    fleet.create("big", "v4-32")
    granted(ends=dt.datetime.now(dt.UTC).isoformat())
    fleet.create("late", "v4-8")
    code, out, err = tpu_ops("grant", "--delete-after-end", "--dry-run", "--json")
    assert (code, json.loads(out)["deleted"], len(json.loads(out)["left"])) == (0, [], 1), err
    assert fleet.api.node("one", fleet.location())
    fleet.api.fault(method="ListNodes", project=fleet.project, zone=OTHER, unreachable=True)
    fleet.api.fault(method="DeleteNode", project=fleet.project, code="PERMISSION_DENIED", times=1)
    code, out, err = tpu_ops("grant", "--delete-after-end", "--json")
    assert (code, json.loads(out)["deleted"], len(json.loads(out)["left"])) == (3, [], 1), err
    code, out, err = tpu_ops("grant", "--delete-after-end", "--json")
    assert (code, [name.rpartition("/")[2] for name in json.loads(out)["deleted"]]) == (3, ["one"]), err
    assert json.loads(out)["left"] == []
    assert "node paid stays: the grant had no room for it" in err
    assert "node big stays: the grant had no room for it" in err
    assert "node late stays: it was not created before the grant's end" in err
    fleet.api.clear_faults()
    code, out, err = tpu_ops("grant", "--delete-after-end", "--json")
    assert (code, json.loads(out)["deleted"], "node big stays" in err) == (0, [], True)
    assert fleet.api.call("GET", f"v2/{fleet.location()}/nodes/one")[0] == 404
    assert fleet.api.node("paid", fleet.location("us-central1-b"))
    assert all(fleet.api.node(name, fleet.location()) for name in ("big", "late"))


MAIL = "For the next 30 days:\n* 32 on-demand Cloud TPU v4 chips in zone us-central2-b\n"


def test_an_e_mail_becomes_the_grants_file(fleet, tpu_ops, tmp_path):
    (tmp_path / "mail").write_text(MAIL)
    code, out, err = tpu_ops("grant", "import", str(tmp_path / "mail"))
    assert (code, f"the last day is {day(30)}" in out) == (0, True), err
    assert "took: 32 on-demand Cloud TPU v4 chips in zone us-central2-b" in err
    assert places(create(tpu_ops, "pod", "--type", "v4-64")) == [("pod", "us-central2-b", False)]
    failed(tpu_ops("grant", "import", str(tmp_path / "mail")), 2, "has a grant already", "--replace")
    code, out, err = tpu_ops("grant", "import", str(tmp_path / "mail"), "--replace", "--ends", "2031-01-31", "--json")
    assert (code, json.loads(out)["ends"]) == (0, "2031-01-31"), err
    code, _, err = tpu_ops("grant", "import", str(tmp_path / "mail"), "--ends", "2020-01-31", "--dry-run")
    assert (code, "warning: the grant ended already" in err) == (0, True), err
    assert "ends: 2031-01-31" in (fleet.path / "grant.yml").read_text()


@pytest.mark.parametrize("more", [[], ["--replace"], ["--dry-run"], ["--json"]])
def test_an_e_mail_that_is_understood_only_in_part_is_refused_with_its_lines(fleet, tpu_ops, tmp_path, more):
    (tmp_path / "mail").write_text(f"{MAIL}* 9 TPUs v5 chips in zone x\n* 64 spot Cloud TPU v4\n")
    lines = (
        "2 lines of the e-mail",
        "'* 9 TPUs v5 chips in zone x' (",
        "'* 64 spot Cloud TPU v4' (",
        "nothing was written",
    )
    failed(tpu_ops("grant", "import", str(tmp_path / "mail"), *more), 2, *lines, printed="--json" in more)
    assert not (fleet.path / "grant.yml").exists()


@pytest.mark.usefixtures("fleet")
def test_an_e_mail_without_lines_or_without_an_end_is_refused(tpu_ops, tmp_path):
    (tmp_path / "mail").write_text("Hello, thank you for your interest.\n")
    failed(tpu_ops("grant", "import", str(tmp_path / "mail")), 2, "no line of the e-mail states TPUs")
    (tmp_path / "mail").write_text("32 on-demand Cloud TPU v4 chips in zone us-central2-b\n")
    failed(tpu_ops("grant", "import", str(tmp_path / "mail")), 2, "does not say how long", "--ends 20")
    failed(tpu_ops("grant", "import", str(tmp_path / "none")), 2, "the e-mail cannot be read")


def test_a_set_that_does_not_fit_is_refused_before_any_node_is_created(granted, tpu_ops):
    fleet = granted()
    fleet.api.forget_requests()
    for more in ([], ["--dry-run"]):
        failed(tpu_ops("create", "s-[1-5]", "--type", "v4-16", *more), 2, "the grant has no room", printed=False)
    assert "CreateNode" not in fleet.api.requests(fleet.project)


def test_nodes_in_another_project_count(granted, tpu_ops):
    fleet = granted()
    fleet.create("one", "v4-32", project=fleet.second)
    found = create(tpu_ops, "two", "--type", "v4-32", "--project", fleet.second)
    assert places(found) == [("two", "us-central2-b", True)]


def test_a_queued_resource_excuses_no_other_node_of_its_name(granted, tpu_ops):
    fleet = granted()
    node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}
    body: dict[str, Any] = {"tpu": {"nodeSpec": [{"parent": fleet.location(), "nodeId": "pod", "node": node}]}}
    body = {**body, "queueingPolicy": {"validAfterDuration": "3600s"}}
    fleet.api.call("POST", f"v2/{fleet.location()}/queuedResources?queuedResourceId=pod", body)
    failed(tpu_ops("create", "pod", "--type", "v4-64"), 2, "the grant has no room for a v4-64 node")


def test_a_user_who_may_not_list_queued_resources_sees_the_nodes(granted, tpu_ops):
    fleet = granted()
    fleet.create("one", "v4-16")
    fleet.api.fault(method="ListQueuedResources", project=fleet.project, code="PERMISSION_DENIED", message="not you")
    code, out, err = tpu_ops("grant")
    assert (code, "node one" in out, "queued resources cannot be listed" in err) == (0, True, True)
    failed(create(tpu_ops, "pod", "--type", "v4-8"), 2, "is unknown", "--outside-grant does not ask", printed=True)


@pytest.mark.usefixtures("fleet")
def test_values_of_the_metadata_are_not_printed(tpu_ops):
    argv = ("create", "pod", "--type", "v4-8", "--zone", "us-central2-b", "--dry-run")
    for more in (["--json"], []):
        code, out, err = tpu_ops(*argv, "--metadata", "token=SECRET", *more)
        assert (code, "SECRET" in out + err, "(6 bytes)" in out) == (0, False, True)
    code, _, err = tpu_ops(*argv, "--metadata", "=SECRET")
    assert (code, "SECRET" in err) == (2, False)


@pytest.mark.parametrize(
    ("kind", "meant"), [("v5e-16", "v5litepod-16"), ("V4-16", "v4-16"), ("v4 32", "v4-32"), ("v6e", "v6e-8")]
)
@pytest.mark.usefixtures("fleet")
def test_a_type_in_another_spelling_is_named_as_the_api_spells_it(tpu_ops, kind, meant):
    failed(tpu_ops("create", "pod", "--type", kind, "--zone", "us-central2-b"), 2, f"did you mean {meant}?")


TYPO = """
lines:
  - 16 on-demand Cloud TPU v4 chips in zone us-central2-b
  - 16 spot Cloud TPU v4 chips in zone us-cental2-b
"""


def test_a_zone_that_does_not_exist_is_a_fault_with_its_line(granted, tpu_ops):
    fleet = granted(lines=TYPO)
    words = (str(fleet.path / "grant.yml"), "line 4: no zone is called 'us-cental2-b'", "did you mean 'us-central2-b'")
    failed(tpu_ops("create", "pod", "--type", "v4-8", "--dry-run"), 2, *words)
    code, out, err = tpu_ops("grant")
    assert (code, "us-cental2-b" in out, err.count("line 4: no zone is called")) == (0, True, 1)


def test_the_zones_of_the_grant_are_asked_for_once_and_only_if_nothing_is_there(granted, tpu_ops):
    fleet = granted(lines="\nlines:\n  - 16 on-demand Cloud TPU v4 chips in zone us-central2-b\n")

    def asked():
        fleet.api.forget_requests()
        assert tpu_ops("grant")[0] == 0
        return fleet.api.requests(fleet.project).get("ListLocations", 0)

    assert asked() == 1
    fleet.create("pod")
    assert asked() == 0


def test_zones_are_not_refused_if_the_api_does_not_list_zones(granted, tpu_ops):
    fleet = granted(lines=TYPO)
    fleet.api.fault(method="ListLocations", project=fleet.project, code="PERMISSION_DENIED")
    code, _, err = tpu_ops("create", "pod", "--type", "v4-8", "--on-demand", "--no-wait")
    assert (code, "us-cental2-b" in err) == (0, False), err


@pytest.mark.parametrize("more", [[], ["--queued"]])
def test_waiting_for_capacity_without_waiting_is_refused(granted, tpu_ops, more):
    fleet = granted()
    fleet.api.forget_requests()
    words = ("--until-capacity and --no-wait", "leave out one of them")
    failed(tpu_ops("create", "pod", "--type", "v4-8", "--until-capacity", "1h", "--no-wait", *more), 2, *words)
    assert fleet.api.requests(fleet.project) == {}


def test_queued_resources_are_not_called_billed_before_they_are_active(granted, tpu_ops):
    fleet = granted(lines="\nlines:\n  - 1 on-demand Cloud TPU v2-8 device(s) in zone us-central1-b\n")
    node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}
    specs = [{"parent": fleet.location(), "nodeId": "a", "node": node}]
    for name, policy in (("later", {"validAfterDuration": "600s"}), ("lost", {"validUntilDuration": "0.001s"})):
        body = {"tpu": {"nodeSpec": specs}, "queueingPolicy": policy}
        path = f"v2/{fleet.location()}/queuedResources"
        assert fleet.api.call("POST", f"{path}?queuedResourceId={name}", body)[0] == 200
    code, out, err = tpu_ops("grant")
    assert (code, "not covered, so billed: " in err) == (0, False)
    assert "not covered, so billed once ACTIVE: queued resource later" in err
    assert "2 nodes or queued resources would still exist after the end, nodes are billed then: queued resource" in out
