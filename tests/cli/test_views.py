"""list with its filters, inventory, snapshot, and all that a member without credentials can and cannot do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import failed
from tests.support.fleet import ROOT, ZONE, answering, answering_as_known
from tests.support.nodes import key, node
from tests.support.published import POD, Member, text
from tpu_ops.fleet import contact, view
from tpu_ops.fleet.publishing import documents
from tpu_ops.ssh import known_hosts

BIN = Path(sys.executable).parent


@pytest.fixture
def mixed(fleet):
    """Nodes of several names, types, zones, projects, labels and states."""
    fleet.write(projects=[fleet.project, fleet.second])
    fleet.create("pod", "v4-16", labels={"team": "vision", "tier": "gold"})
    fleet.create("pod-b", "v4-8", labels={"team": "speech"})
    fleet.create("lite", "v5litepod-4", zone="us-west4-a", project=fleet.second, labels={"spare": ""})
    fleet.create("off", "v4-8")
    fleet.act("stop", "off")
    return fleet


@pytest.mark.parametrize(
    ("argv", "nodes"),
    [
        ([], ["lite", "off", "pod", "pod-b"]),
        (["--name", "pod*"], ["pod", "pod-b"]),
        (["--name", "lite", "--name", "off"], ["lite", "off"]),
        (["--type", "v4-*"], ["off", "pod", "pod-b"]),
        (["--type", "v4-8", "--state", "ready"], ["pod-b"]),
        (["--zone", "us-west4-a"], ["lite"]),
        (["--zone", "us-c*"], ["off", "pod", "pod-b"]),
        (["--label", "team"], ["pod", "pod-b"]),
        (["--label", "team=vision"], ["pod"]),
        (["--label", "team=vision", "--label", "team=speech"], ["pod", "pod-b"]),
        (["--label", "team=vision", "--label", "team"], ["pod", "pod-b"]),
        (["--label", "team", "--label", "tier=gold"], ["pod"]),
        (["--label", "spare="], ["lite"]),
    ],
)
def test_list_shows_what_passes_all_filters(mixed, tpu_ops, argv, nodes):
    code, out, err = tpu_ops("list", "--json", *argv)
    assert (code, err) == (0, "")
    assert list(dict.fromkeys(row["node"] for row in json.loads(out))) == nodes
    table = tpu_ops("list", *argv)[1].splitlines()[1:]
    assert list(dict.fromkeys(line.split("-w")[0] for line in table)) == nodes


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--name", "nobody"], "no node has the name 'nobody'; there are: lite, off, pod, pod-b"),
        (["--type", "v6e-*"], "no node has the accelerator type 'v6e-*'; there are: v4-16, v4-8, v5litepod-4"),
        (["--zone", "mars-1"], "no node has the zone 'mars-1'; there are: us-central2-b, us-west4-a"),
        (["--project", "nobodys"], "no node has the project 'nobodys'; there are: lab"),
        (["--label", "team=art"], "no node has the label 'team=art'; there are: spare, team=speech, team=vision, tier"),
        (["--state", "PREEMPTED"], "no node has the state 'PREEMPTED'; there are: READY, STOPPED"),
        (["--name", "pod", "--zone", "us-west4-a"], "no node matches all of these options"),
    ],
)
def test_a_filter_that_nothing_passes_says_what_there_is(mixed, tpu_ops, argv, words):
    code, out, err = tpu_ops("list", *argv)
    assert (code, out) == (0, "")
    assert words in err
    assert json.loads(tpu_ops("list", "--json", *argv)[1]) == []


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"names": ["poood"]}, "names: poood"),
        ({"names": ["["], "accelerator_types": ["v4-*"]}, "names: [; accelerator_types: v4-*"),
        ({"labels": {"team": ["art", "music"], "tier": None}}, "labels: team=art|music, tier"),
    ],
)
def test_filters_of_the_fleet_that_nothing_passes_are_named(fleet, tpu_ops, filters, words):
    fleet.create("pod", "v4-16")
    fleet.create("pod-b")
    fleet.write(**filters)
    warning = f"the filters match none of 2 nodes ({words}), see "
    for argv in (["list"], ["refresh"], ["list", "--cached"], ["inventory"], ["refresh", "--dry-run"]):
        err = tpu_ops(*argv)[2]
        assert err.count(warning) == 1, (argv, err)
        assert "tpu_ops create" not in err
    failed(tpu_ops("delete", "pod", "--yes"), 2, "no node is called 'pod'", "the fleet's filters exclude it")
    made = tpu_ops("create", "new", "--type", "v4-8", "--zone", "us-central2-b")[2]
    assert "the new node is not part of this fleet" in made
    assert "has filters that exclude the node" in made
    fleet.write()
    assert "filters" not in tpu_ops("list")[2]


def test_a_fleet_of_which_not_all_was_listed_is_not_said_to_be_empty(fleet, tpu_ops):
    fleet.api.fault(method="ListNodes", zone="us-west4-a", unreachable=True)
    try:
        code, out, err = tpu_ops("list")
    finally:
        fleet.api.clear_faults()
    assert (code, out, "no node is known, but some nodes could not be listed" in err) == (0, "", True)
    assert "tpu_ops create" not in err
    assert "no node exists" in tpu_ops("list")[2]


def test_a_node_that_has_no_worker_yet_is_a_row_as_well(fleet, tpu_ops, tmp_path):
    symptom = {"worker_id": "", "type": "LOW_MEMORY", "details": "", "create_time": ""}
    new = node("new", node_id="9", count=0, state="CREATING", symptoms=(symptom,))
    (tmp_path / "fleet.json").write_text(text(nodes=(POD, new)))
    fleet.write(projects=["lab"], snapshot=str(tmp_path / "fleet.json"))
    rows = json.loads(tpu_ops("list", "--json")[1])
    assert [(row["host"], row["node_label"], row["worker_index"]) for row in rows] == [
        (None, "new", None),
        ("pod-w0", "pod", 0),
        ("pod-w1", "pod", 1),
    ]
    assert (rows[0].keys(), rows[0]["state"], rows[0]["symptoms"]) == (rows[1].keys(), "CREATING", [symptom])
    assert len(tpu_ops("list")[1].splitlines()) == 1 + len(rows)
    assert json.loads(tpu_ops("list", "--json", "--state", "CREATING")[1]) == rows[:1]


def test_ready_nodes_without_endpoints_are_named(fleet, tpu_ops, tmp_path):
    bare = [node(name, node_id=number, count=0) for name, number in (("bare", "8"), ("empty", "9"))]
    (tmp_path / "fleet.json").write_text(text(nodes=(POD, *bare)))
    fleet.write(projects=["lab"], snapshot=str(tmp_path / "fleet.json"))
    warning = "warning: READY, but without workers, since the API lists no network endpoints: bare, empty; `tpu_ops"
    for command in ("list", "refresh"):
        assert warning in tpu_ops(command)[2]


def test_a_new_node_without_endpoints_is_not_said_to_be_filtered_out(fleet, tpu_ops, monkeypatch):
    refresh = view.refresh

    def without_endpoints(settings, **options):
        found, changes = refresh(settings, **options)
        bare = tuple(each._replace(internal_ips=(), external_ips=()) for each in found.nodes)
        return found._replace(nodes=bare, workers=()), changes

    monkeypatch.setattr(view, "refresh", without_endpoints)
    said = tpu_ops("create", "bare", "--type", "v4-8", "--zone", ZONE)[2]
    assert "the new node is READY, but the API lists no network endpoints for it: `tpu_ops refresh`" in said
    assert "filters" not in said


def test_list_with_a_project_shows_only_its_nodes(mixed, tpu_ops):
    rows = json.loads(tpu_ops("list", "--json", "--project", mixed.second)[1])
    assert {row["node"] for row in rows} == {"lite"}


def test_list_takes_no_target_and_says_what_it_takes(fleet, tpu_ops):
    failed(tpu_ops("list", "pod x"), 2, "list does not take a target", "tpu_ops list --name 'pod x'")


def test_an_empty_label_is_an_error(fleet, tpu_ops):
    failed(tpu_ops("list", "--label", "=x"), 2, "--label", "KEY=VALUE")


def test_inventory_of_the_workers_that_serve(mixed, tpu_ops):
    assert tpu_ops("inventory")[:2] == (0, "lite-w0,pod-w[0-1],pod-b-w0\n")
    assert tpu_ops("inventory", "pod,lite", "--format", "nodeset")[1] == "lite-w0,pod-w[0-1]\n"
    assert tpu_ops("inventory", "pod", "--format", "list")[1] == "pod-w0\npod-w1\n"
    assert tpu_ops("inventory", "@type_v4_8,lite")[1] == "lite-w0,pod-b-w0\n"
    failed(tpu_ops("inventory", "type_v4_8"), 2, "this is the name of a group: write @type_v4_8")
    groups = json.loads(tpu_ops("inventory", "--json")[1])
    assert groups["all"] == ["lite-w0", "pod-w0", "pod-w1", "pod-b-w0"]
    assert groups["type_v4_16"] == groups["node_pod"] == ["pod-w0", "pod-w1"]
    assert "node_off" not in groups
    graph = json.loads(mixed.ansible("ansible-inventory", "--list").stdout)
    built = ("all", "node_", "zone_", "type_", "state_")
    assert {name: sorted(hosts) for name, hosts in groups.items() if name != "all"} == {
        name: sorted(group["hosts"]) for name, group in graph.items() if name.startswith(built) and "hosts" in group
    }
    failed(tpu_ops("inventory", "off"), 2, "no worker of the target is in state READY, only in STOPPED")
    failed(tpu_ops("inventory", "nobody"), 2, "nobody")
    mixed.write(projects=[mixed.project], states=["READY", "STOPPED"])
    assert tpu_ops("inventory", "off")[1] == "off-w0\n"


def test_an_empty_fleet_has_no_nodeset(fleet, tpu_ops):
    failed(tpu_ops("inventory"), 2, "no worker is in state READY")


def test_clustershell_reads_the_groups(mixed, tpu_ops, tmp_path):
    (tmp_path / "groups.d").mkdir()
    (tmp_path / "groups.conf").write_text(f"[Main]\ndefault: tpu\nautodir: {tmp_path}/groups.d\n")
    (tmp_path / "groups.d" / "fleet.yaml").write_text(tpu_ops("inventory", "--format", "groups")[1])

    def nodeset(*argv):
        environ = os.environ | {"CLUSTERSHELL_CFGDIR": str(tmp_path)}
        command = [str(BIN / "nodeset"), *argv]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.strip()

    assert nodeset("-f", "@node_pod") == "pod-w[0-1]"
    assert nodeset("-e", "@tpu:type_v4_16") == "pod-w0 pod-w1"
    assert nodeset("-c", "@all") == "4"
    assert "@zone_us_west4_a" in nodeset("-l").split()
    assert nodeset("-f", tpu_ops("inventory")[1].strip()) == nodeset("-f", "@all")


def test_names_with_numbers_are_folded_as_pdsh_takes_them(fleet, tpu_ops):
    for name in ("pod-1", "pod-2"):
        fleet.create(name, "v4-16")
    assert tpu_ops("inventory")[1] == "pod-1-w[0-1],pod-2-w[0-1]\n"


def test_snapshot_says_where_the_view_is_from(fleet, tpu_ops):
    failed(tpu_ops("snapshot"), 2, "nothing is known", "tpu_ops refresh")
    fleet.create("pod", "v4-16")
    tpu_ops("refresh")
    code, out, _ = tpu_ops("snapshot")
    assert code == 0
    assert re.search(r"^1 node, 2 workers, read from the API \d+ s ago", out, re.MULTILINE), out
    told = json.loads(tpu_ops("snapshot", "--json")[1])
    assert (told["source"], told["nodes"], told["workers"]) == ("api", 1, 2)
    failed(tpu_ops("snapshot", "--cached"), 2, "--publish")


def test_publishing_asks_the_api_first_unless_it_is_told_not_to(fleet, tpu_ops, tmp_path):
    path = tmp_path / "fleet.json"
    failed(tpu_ops("snapshot", "--publish", str(path), "--cached"), 2, "nothing is known")
    fleet.create("pod", "v4-16", metadata={"startup-script": "export TOKEN=secret"})
    code, out, _ = tpu_ops("snapshot", "--publish", str(path), "--dry-run")
    assert (code, out.startswith("would publish 1 node, 2 workers, host keys of 2 workers")) == (0, True)
    assert not path.exists()
    told = json.loads(tpu_ops("snapshot", "--publish", str(path), "--json")[1])
    assert (told["destination"], told["nodes"], told["host_keys"]) == (str(path), 1, 2)
    assert told["bytes"] == path.stat().st_size
    assert "secret" not in path.read_text()
    fleet.create("solo")
    printed = tpu_ops("snapshot", "--publish", "-", "--cached")[1]
    assert printed == path.read_text()
    fleet.api.forget_requests()
    assert tpu_ops("snapshot", "--publish", str(path))[0] == 0
    assert [node["name"] for node in json.loads(path.read_text())["nodes"]] == ["pod", "solo"]
    assert fleet.api.requests(fleet.project)["ListNodes"] == 1
    fleet.api.fault(project=fleet.second, code="PERMISSION_DENIED", message="denied")
    fleet.write(projects=[fleet.project, fleet.second])
    tpu_ops("refresh")
    for argv in (["--publish", "-", "--cached"], []):
        assert tpu_ops("snapshot", *argv)[2].count(f"project {fleet.second}: not listed: ") == 1
    failed(tpu_ops("snapshot", "--publish", "https://example.com/x"), 2, "--publish", "gs://BUCKET/OBJECT")
    failed(tpu_ops("snapshot", "--publish", str(tmp_path / "missing" / "x")), 1, str(tmp_path / "missing" / "x"))


def test_unlisted_zones_are_published_as_last_known_and_named(fleet, tpu_ops, tmp_path):
    path = tmp_path / "published.json"
    fleet.create("pod", "v4-16")
    fleet.create("west", "v5litepod-4", zone="us-west4-a")
    tpu_ops("refresh")
    fleet.api.fault(method="ListNodes", zone="us-west4-a", unreachable=True)
    try:
        for more in ([], ["--cached"]):
            assert tpu_ops("snapshot", "--publish", str(path), *more)[0] == 0
            found = documents.parse(path.read_bytes(), "", time.time())
            assert [node.name for node in found.nodes] == ["pod", "west"]
            assert found.unlisted == ((fleet.project, "us-west4-a"),)
    finally:
        fleet.api.clear_faults()


@pytest.fixture
def member(fleet, tpu_ops, tmp_path, monkeypatch):
    """A member of a fleet that was published as a file; this process has the member's environment from here on."""
    fleet.create("pod", "v4-16")
    fleet.create("off", "v4-8")
    fleet.act("stop", "off")
    assert tpu_ops("snapshot", "--publish", str(tmp_path / "published.json"))[0] == 0
    made = Member(tmp_path / "member", projects=[fleet.project])
    for name, value in made.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TPU_OPS_ENDPOINT", raising=False)
    made.published = tmp_path / "published.json"
    return made


def test_a_member_lists_logs_in_and_selects_without_credentials(member, tpu_ops, fleet):
    failed(tpu_ops("list"), 3, "no credentials", "tpu_ops refresh --from")
    code, out, _ = tpu_ops("refresh", "--from", str(member.published))
    assert (code, f"at {member.published}" in out) == (0, True)
    code, out, err = tpu_ops("list")
    assert [line.split()[0] for line in out.splitlines()] == ["HOST", "off-w0", "pod-w0", "pod-w1"]
    assert re.search(rf"^as published \d+ s ago at {member.published}$", err, re.M)
    assert json.loads(tpu_ops("list", "--json", "--state", "STOPPED")[1])[0]["host"] == "off-w0"
    assert tpu_ops("inventory")[1] == "pod-w[0-1]\n"
    assert json.loads(tpu_ops("snapshot", "--json")[1])["source"] == str(member.published)
    assert "no change" in tpu_ops("refresh")[1]
    done = subprocess.run(
        [BIN / "ansible-inventory", "-i", member.file, "--list"],
        env=os.environ | {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=True,
    )
    variables = json.loads(done.stdout)["_meta"]["hostvars"]
    assert sorted(variables) == ["pod-w0", "pod-w1"]
    assert variables["pod-w0"]["ansible_host"] == json.loads(tpu_ops("list", "--json")[1])[1]["external_ip"]


def test_commands_that_need_the_api_give_members_the_fix(member, tpu_ops):
    # The public half of a key, which create needs, is not what is missing first.
    member.key.with_suffix(".pub").unlink()
    tpu_ops("refresh", "--from", str(member.published))
    for argv in (
        ("create", "x", "--type", "v4-8", "--zone", "us-central2-b"),
        ("delete", "pod", "--yes"),
        ("refresh", "--from", "api"),
    ):
        failed(tpu_ops(*argv), 3, "no credentials", "ask a colleague with credentials", str(member.published))
    failed(tpu_ops("snapshot", "--publish", "-"), 2, "--cached", "--from api")
    assert tpu_ops("snapshot", "--publish", "-", "--cached")[1] == member.published.read_text()


def test_names_are_the_same_for_admin_and_member_whatever_the_filters(fleet, tpu_ops, tmp_path, monkeypatch):
    fleet.create("twin", labels={"team": "vision"})
    fleet.create("twin", "v5litepod-4", zone="us-west4-a")
    fleet.write(labels={"team": "vision"})
    path = tmp_path / "fleet.json"
    assert tpu_ops("snapshot", "--publish", str(path))[0] == 0
    monkeypatch.setenv("TPU_OPS_STATE", str(tmp_path / "member"))
    assert tpu_ops("refresh", "--from", str(path))[0] == 0
    assert [row["host"] for row in json.loads(tpu_ops("list", "--json")[1])] == ["twin.us-central2-b-w0"]


def test_groups_of_the_inventory_are_targets_whatever_the_filters(fleet, tpu_ops):
    """The label of one node equals the name of the other except for a dot, which groups cannot have."""
    fleet.create("twin")
    fleet.create("twin", "v5litepod-4", zone="us-west4-a")
    fleet.create("twin-us-west4-a", "v4-16", labels={"team": "vision"})
    fleet.write(labels={"team": "vision"})
    groups = json.loads(tpu_ops("inventory", "--format", "json")[1])
    assert re.fullmatch(r"node_twin_us_west4_a_\w{6}", next(name for name in groups if name.startswith("node_")))
    for name, hosts in groups.items():
        assert tpu_ops("inventory", f"@{name}", "--format", "list")[1].split() == hosts
        assert [worker.host for worker in contact.find(fleet.settings(), f"@{name}")[1]] == hosts


def test_a_snapshot_republished_by_a_member_without_projects_is_readable(fleet, tpu_ops, tmp_path):
    fleet.create("pod", "v4-16")
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    tpu_ops("snapshot", "--publish", str(first))
    fleet.write(projects=[], snapshot=str(first))
    assert tpu_ops("refresh")[0] == 0
    assert tpu_ops("snapshot", "--publish", str(second), "--cached")[0] == 0
    assert json.loads(second.read_text())["scope"]["projects"] == [fleet.project]
    fleet.write(snapshot=str(second))
    assert len(json.loads(tpu_ops("list", "--json")[1])) == 2


def test_keys_that_are_known_already_are_compared_where_that_is_asked_for(fleet, tpu_ops):
    fleet.create("pod", "v4-16")
    known = Path(json.loads(tpu_ops("refresh", "--json")[1])["known_hosts"])
    one, two = sorted(set(re.findall(r"tpu-\S+-w\d", known.read_text())))
    known.write_text(known.read_text().replace(one, "other").replace(two, one).replace("other", two))
    assert tpu_ops("refresh")[0] == 0
    failed(tpu_ops("refresh", "--verify-keys"), 1, "pod-w0", "CHANGED", f"ssh-keygen -R {one}")


def test_verify_keys_counts_the_compared_keys_and_names_the_others(fleet, tpu_ops, play):
    fleet.write(projects=[fleet.project, fleet.second])
    fleet.create("pod", "v4-16")
    fleet.create("theirs", project=fleet.second)
    tpu_ops("refresh")
    answering_as_known(play, fleet.settings().state_dir / "known_hosts")
    fleet.create("new")
    code, out, err = tpu_ops("refresh", "--verify-keys")
    assert (code, err) == (0, "")
    # None was known of the new one.
    assert "host keys of 3 workers compared\n3 of 3 workers answered with a known host key\n" in out
    fleet.api.fault(project=fleet.project, method="GetGuestAttributes", code="PERMISSION_DENIED", message="denied")
    fleet.api.fault(project=fleet.second, method="ListNodes", code="PERMISSION_DENIED", message="denied")
    result, told = tpu_ops("refresh", "--verify-keys"), tpu_ops("refresh", "--verify-keys", "--json")
    plain = tpu_ops("refresh")
    fleet.api.clear_faults()
    failed(result, 3, "the host keys of 4 of 4 workers could not be compared", printed=True)
    assert "the host keys of new-w0, pod-w0, pod-w1 could not be compared: denied (PERMISSION_DENIED)" in result[2]
    assert "the host keys of theirs-w0 could not be compared: the API did not list it this time" in result[2]
    assert "no change\nhost keys of 0 workers compared\n3 of 4 workers answered with a known host key\n" in result[1]
    data = json.loads(told[1])
    assert (told[0], data["compared"], sorted(data["not_compared"])) == (
        3,
        [],
        ["new-w0", "pod-w0", "pod-w1", "theirs-w0"],
    )
    assert plain[0] == 0
    assert "compared" not in plain[1] + plain[2]


def test_verify_keys_reports_another_machine_at_a_workers_address(fleet, tpu_ops, play):
    fleet.create("pod", "v4-16")
    tpu_ops("refresh")
    file = fleet.settings().state_dir / "known_hosts"
    answering_as_known(play, file)
    worker = contact.find(fleet.settings(), "pod")[1][1]
    answering(play, worker, key("somebody else"))
    before = file.read_text()
    result, told = tpu_ops("refresh", "--verify-keys"), tpu_ops("refresh", "--verify-keys", "--json")
    failed(
        result,
        1,
        f"pod-w1 ({worker.external_ip})",
        "the machine that answers at this address does",
        printed=True,
    )
    stranger = known_hosts.fingerprint(key("somebody else"))
    assert f"pod-w1: the machine at {worker.external_ip} answers with ssh-ed25519 {stranger}; the known" in result[2]
    assert "do not log in there" in result[2]
    assert "1 of 2 workers answered with a known host key" in result[1]
    data = json.loads(told[1])
    row = {"worker": "pod-w1", "type": "ssh-ed25519", "fingerprint": stranger}
    assert (told[0], data["same_machine"], data["another_machine"], data["no_answer"]) == (1, ["pod-w0"], [row], {})
    assert file.read_text() == before


def test_verify_keys_names_workers_that_do_not_answer(fleet, tpu_ops, play):
    fleet.create("pod", "v4-16")
    tpu_ops("refresh")
    answering_as_known(play, fleet.settings().state_dir / "known_hosts")
    (play / contact.find(fleet.settings(), "pod")[1][0].host_key_alias).unlink()
    result = tpu_ops("refresh", "--verify-keys")
    failed(result, 4, "1 of 2 workers did not answer with a host key", "pod-w0", printed=True)
    assert "pod-w0 did not answer with a host key: ssh: connect to host" in result[2]


def test_a_dry_run_does_not_pretend_to_verify_keys(fleet, tpu_ops):
    failed(tpu_ops("refresh", "--dry-run", "--verify-keys"), 2, "--verify-keys", "leave --dry-run out")


def test_an_invalid_snapshot_is_reported_to_members(member, tpu_ops):
    tpu_ops("refresh", "--from", str(member.published))
    member.published.write_text("{}")
    failed(tpu_ops("list"), 3, "not a snapshot of a fleet", str(member.published))
    assert tpu_ops("list", "--cached")[0] == 0
    failed(tpu_ops("refresh", "--from", "ftp://x"), 2, "--from", "https://")
    member.published.unlink()
    failed(tpu_ops("refresh"), 3, str(member.published), "No such file")
    assert tpu_ops("inventory")[0] == 0


def test_a_fleet_file_that_names_only_the_snapshot_is_enough(member, tpu_ops):
    member.write(snapshot=str(member.published))
    assert tpu_ops("inventory")[:2] == (0, "pod-w[0-1]\n")
    assert "as published" in tpu_ops("list")[2]


def test_refresh_from_another_snapshot_does_not_change_the_setting(member, tpu_ops, tmp_path):
    other = tmp_path / "other.json"
    other.write_bytes(member.published.read_bytes())
    member.write(snapshot=str(member.published))
    assert tpu_ops("refresh")[2] == ""
    assert f"`snapshot` is set ({member.published})" in tpu_ops("refresh", "--from", str(other))[2]
    assert str(member.published) in tpu_ops("list")[2]


def test_create_warns_that_the_node_is_not_published_yet(fleet, tpu_ops, tmp_path):
    path = tmp_path / "published.json"
    fleet.create("pod", "v4-8")
    tpu_ops("snapshot", "--publish", str(path))
    tpu_ops("refresh", "--from", str(path))
    code, out, err = tpu_ops("create", "more", "--type", "v4-8", "--zone", "us-central2-b")
    assert (code, out) == (0, "")
    assert "without the new node: `tpu_ops refresh --from api`" in err
    assert "new        more" in tpu_ops("refresh", "--from", "api")[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "the file is damaged"), ('{"version": 99}', "the file has version 99, this program reads 1")],
)
def test_a_snapshot_that_cannot_be_read_is_said_and_not_asked_for_unasked(member, tpu_ops, content, words):
    tpu_ops("refresh", "--from", str(member.published))
    member.write(snapshot=str(member.published))
    kept = member.settings().state_dir / "snapshot.json"
    kept.write_text(content)
    failed(tpu_ops("list", "--cached"), 1, words, str(kept), "tpu_ops refresh")
    assert kept.read_text() == content
    code, out, err = tpu_ops("inventory")
    assert (code, out) == (0, "pod-w[0-1]\n")
    assert f"{kept}: {words}" in err
    assert tpu_ops("list", "--cached")[0] == 0


def test_a_file_in_place_of_the_state_directory_has_to_be_moved(member, tpu_ops):
    member.write(snapshot=str(member.published))
    state = member.settings().state_dir
    (state / "lock").mkdir(parents=True)
    failed(tpu_ops("refresh"), 1, str(state / "lock"), "Is a directory", "move away what is in this place")
    (state / "lock").rmdir()
    (state / "shown.json").mkdir()
    failed(tpu_ops("refresh"), 1, str(state / "shown.json"), "Is a directory", "move away what is in this place")


def test_a_snapshot_that_the_file_names_is_replaced_there(member, tpu_ops):
    member.write(snapshot="/nowhere.json")
    code, _, err = tpu_ops("refresh")
    assert code == 3
    assert f"set another snapshot with key 'snapshot' in {member.file} or TPU_OPS_SNAPSHOT" in err


def test_a_member_of_an_empty_fleet_is_not_told_to_create_a_node(member, tpu_ops):
    member.published.write_text(text(nodes=()))
    member.write(snapshot=str(member.published))
    assert "the published snapshot has no nodes; ask the snapshot's publisher" in tpu_ops("list")[2]


def test_a_missing_project_has_a_project_as_its_example(member, tpu_ops):
    member.write(zones=["us-central2-b"])
    failed(tpu_ops("create", "pod", "--type", "v4-8"), 2, "--project", "for example my-project")
