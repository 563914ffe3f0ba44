"""Texts, comparisons and selections of a fleet, without any API."""

from __future__ import annotations

import base64
import dataclasses
import json
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_ops.errors import OpsError, UsageError
from tpu_ops.fleet import hostkeys, hostvars, lifecycle, reach, ssh_files, targets
from tpu_ops.fleet.diff import AddressChange, StateChange, diff
from tpu_ops.fleet.model import Node, node_labels, workers_of
from tpu_ops.fleet.reach import Way
from tpu_ops.fleet.state import Files, Scope, Snapshot, replace


def node(name="pod", zone="us-central2-b", node_id="1", count=2, **fields):
    fields = {
        "project": "lab",
        "accelerator_type": "v4-16",
        "state": "READY",
        "internal_ips": tuple(f"10.0.{node_id}.{index}" for index in range(count)),
        "external_ips": tuple(f"34.0.{node_id}.{index}" for index in range(count)),
    } | fields
    return Node(name=name, zone=zone, node_id=node_id, **fields)


def key(seed: str, kind: str = "ssh-ed25519") -> str:
    name = kind.encode()
    return base64.b64encode(len(name).to_bytes(4, "big") + name + b"\0\0\0\x20" + seed.encode().ljust(32)).decode()


MUX = Path("/run/user/7/tpu_ops/mux")
OPTIONS = ssh_files.common_options(Path("/state dir/known_hosts"))


def labelled(nodes):
    return nodes, node_labels(nodes)


def config_of(workers, private_key=Path("/home/ada/.ssh/id")):
    ways = [
        (worker, Way(reach.address(worker, ("external", "internal")), control=reach.control_path(MUX, worker)))
        for worker in workers
    ]
    return ssh_files.ssh_config(ways, user="ada", private_key=private_key, options=OPTIONS)


def test_ssh_config_text():
    workers = workers_of([node(), node("solo", node_id="2", count=1, external_ips=("",), internal_ips=("",))])
    assert config_of(workers) == (Path(__file__).parent / "ssh_config.golden").read_text()


def test_ssh_understands_the_config(tmp_path):
    path = tmp_path / "ssh_config"
    path.write_text(config_of(workers_of([node()])))
    seen = subprocess.run(["ssh", "-F", path, "-G", "pod-w1"], capture_output=True, text=True, check=True).stdout
    for line in (
        "hostname 34.0.1.1",
        "user ada",
        "hostkeyalias tpu-1-w1",
        'userknownhostsfile "/state dir/known_hosts"',
        "stricthostkeychecking true",
        "identityfile /home/ada/.ssh/id",
    ):
        assert line in seen.splitlines() or line.replace('"', "") in seen.splitlines(), line


def test_ansible_gets_the_same_options_as_ssh(tmp_path):
    """What `ssh -G` makes of the config and of the arguments for Ansible is the same."""
    worker = workers_of([node()])[1]
    path, private_key = tmp_path / "ssh_config", tmp_path / "id"
    private_key.touch()
    path.write_text(config_of([worker], private_key))

    def effective(arguments: str) -> set[str]:
        argv = ["sh", "-c", f"ssh {arguments}"]
        lines = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines())
        return {line for line in lines if not line.startswith("host ")}

    by_config = effective(f"-F {path} -G pod-w1")
    way = Way("", control=reach.control_path(MUX, worker))
    options = ssh_files.arguments([*ssh_files.own_options(worker, way), *OPTIONS])
    by_args = effective(f"-F none {options} -i {private_key} -o User=ada -G 34.0.1.1")
    assert by_config == by_args


@pytest.mark.parametrize(
    ("connect_with", "address"),
    [(("external",), "34.0.1.0"), (("internal", "external"), "10.0.1.0"), (("external", "internal"), "34.0.1.0")],
)
def test_the_preferred_address_is_taken(connect_with, address):
    assert reach.address(workers_of([node()])[0], connect_with) == address


def test_the_other_address_is_taken_where_the_preferred_is_missing():
    worker = workers_of([node(external_ips=("", ""))])[0]
    assert reach.address(worker, ("external", "internal")) == "10.0.1.0"
    assert reach.address(worker, ("external",)) == ""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_RUNTIME_DIR": "/run/user/7", "HOME": "/h"}, "/run/user/7/tpu_ops/mux"),
        ({"HOME": "/home/ada"}, "/home/ada/.cache/tpu_ops/mux"),
        ({"HOME": "/home/" + "a" * 60}, "/tmp/tpu_ops-7"),
    ],
)
def test_the_directory_of_control_sockets_is_short_enough(environ, expected):
    path = ssh_files.mux_dir(environ, 7)
    assert str(path) == expected
    # The longest name of a socket that ssh makes there, with the final NUL.
    assert len(f"{path}/{'c' * 40}.{'r' * 16}") + 1 <= 108


def test_a_directory_of_control_sockets_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OpsError, match="not this user's own"):
        ssh_files.make_mux_dir(tmp_path / "link")
    ssh_files.make_mux_dir(tmp_path / "a" / "mux")
    assert (tmp_path / "a" / "mux").stat().st_mode & 0o777 == 0o700


def test_a_directory_of_control_sockets_that_cannot_be_made_is_an_error_in_words(tmp_path):
    (tmp_path / "runtime").write_text("")
    with pytest.raises(OpsError) as caught:
        ssh_files.make_mux_dir(tmp_path / "runtime" / "mux")
    assert caught.value.where == str(tmp_path / "runtime" / "mux")


def test_known_hosts_is_read_as_it_is_written():
    keys = {
        "tpu-1-w0": {"ssh-ed25519": key("a"), "ssh-rsa": key("b", "ssh-rsa")},
        "tpu-1-w1": {"ssh-rsa": key("c", "ssh-rsa")},
    }
    text = ssh_files.known_hosts(keys)
    assert text.splitlines()[0] == f"tpu-1-w0 ssh-ed25519 {key('a')}"
    assert ssh_files.parse_known_hosts("# a comment\n\nbroken line here and more\n" + text) == keys


@pytest.mark.parametrize(
    ("kind", "blob"),
    [
        ("ssh-ed25519", "not base64"),
        ("ssh-ed25519", ""),
        ("ssh-rsa", key("a")),
        ("ssh-ed25519", key("a") + "\nevil ssh-rsa AAAA"),
        ("ssh-ed25519\n", key("a")),
        ("ssh ed25519", key("a", "ssh ed25519")),
    ],
)
def test_a_published_key_of_another_form_is_no_key(kind, blob):
    assert not ssh_files.valid_key(kind, blob)
    assert ssh_files.valid_key("ssh-ed25519", key("a"))


def test_keys_of_gone_and_recreated_nodes_are_dropped_and_those_of_stopped_ones_kept():
    now = workers_of([node(node_id="2", state="STOPPED"), node("other", node_id="3")])
    known = {alias: {"ssh-ed25519": key(alias)} for alias in ("tpu-1-w0", "tpu-2-w0", "tpu-2-w7", "tpu-3-w0")}
    merged = hostkeys.merge(known, {"tpu-3-w1": {"ssh-ed25519": key("x")}}, now, Path("known_hosts"))
    assert sorted(merged) == ["tpu-2-w0", "tpu-2-w7", "tpu-3-w0", "tpu-3-w1"]


@pytest.mark.parametrize(
    ("old", "new", "alarm"),
    [
        ({"ssh-ed25519": key("a")}, {"ssh-ed25519": key("a")}, False),
        ({"ssh-ed25519": key("a")}, {"ssh-ed25519": key("a"), "ssh-rsa": key("r", "ssh-rsa")}, False),
        ({"ssh-ed25519": key("a"), "ssh-rsa": key("r", "ssh-rsa")}, {"ssh-ed25519": key("a")}, False),
        ({"ssh-ed25519": key("a")}, {"ssh-ed25519": key("b")}, True),
        ({"ssh-ed25519": key("a")}, {"ssh-rsa": key("r", "ssh-rsa")}, True),
        (
            {"ssh-ed25519": key("a"), "ssh-rsa": key("r", "ssh-rsa")},
            {"ssh-ed25519": key("a"), "ssh-rsa": key("s", "ssh-rsa")},
            True,
        ),
    ],
)
def test_a_key_on_the_same_node_may_not_change(old, new, alarm):
    workers = workers_of([node()])
    if alarm:
        with pytest.raises(hostkeys.HostKeyAlarm, match="pod-w0"):
            hostkeys.merge({"tpu-1-w0": old}, {"tpu-1-w0": new}, workers, Path("known_hosts"))
    else:
        assert hostkeys.merge({"tpu-1-w0": old}, {"tpu-1-w0": new}, workers, Path("kh"))["tpu-1-w0"] == old | new


def test_only_nodes_with_an_unknown_worker_are_asked_for_keys():
    workers = workers_of([node(), node("half", node_id="2"), node("off", node_id="3", state="STOPPED")])
    known: dict[str, ssh_files.Keys] = {"tpu-1-w0": {}, "tpu-1-w1": {}, "tpu-2-w0": {}}
    assert [found.name for found in hostkeys.wanted(workers, known, verify=False)] == ["half"]
    assert [found.name for found in hostkeys.wanted(workers, known, verify=True)] == ["half", "pod"]


def test_a_serving_node_without_keys_is_named():
    workers = workers_of([node(), node("off", node_id="3", state="STOPPED")])
    warnings = hostkeys.missing(workers, {"tpu-1-w0": {}}, {"projects/lab/locations/us-central2-b/nodes/pod": "denied"})
    assert len(warnings) == 1
    assert all(word in warnings[0] for word in ("node pod", "pod-w1", "denied"))
    assert "pod-w0" not in warnings[0]


def test_diff_tells_everything_that_changed():
    old = [node(), node("gone", node_id="2"), node("anew", node_id="3"), node("state", node_id="4", state="CREATING")]
    new = [
        node(external_ips=("34.9.9.9", "34.0.1.1"), internal_ips=("10.0.1.0", "10.0.1.1")),
        node("anew", node_id="5"),
        node("fresh", node_id="6"),
        node("state", node_id="4", external_ips=("34.0.4.0", "")),
    ]
    changes = diff(labelled(old), labelled(new))
    assert (changes.first, changes.new, changes.gone, changes.recreated) == (False, ("fresh",), ("gone",), ("anew",))
    assert changes.states == (StateChange("state", "CREATING", "READY"),)
    assert changes.addresses == (
        AddressChange("pod-w0", "external", "34.0.1.0", "34.9.9.9"),
        AddressChange("state-w1", "external", "34.0.4.1", ""),
    )
    assert len(changes.news()) == 6
    assert "address    pod-w0 external: 34.0.1.0 -> 34.9.9.9" in changes.news()


def test_no_change_is_no_news_and_the_first_look_neither():
    assert not diff(labelled([node()]), labelled([node()]))
    first = diff(None, labelled([node()]))
    assert (first.first, first.new, first.news()) == (True, ("pod",), [])


FLEET = workers_of(
    [
        node(count=4),
        node("solo", node_id="2", count=1),
        node("twin", zone="us-central2-b", node_id="3", count=1),
        node("twin", zone="us-west4-a", node_id="4", count=1),
        node("pod-w9", node_id="5", count=1),
    ]
)


@pytest.mark.parametrize(
    ("target", "hosts"),
    [
        ("pod", ["pod-w0", "pod-w1", "pod-w2", "pod-w3"]),
        ("pod-w2", ["pod-w2"]),
        ("pod-w[0-1,3]", ["pod-w0", "pod-w1", "pod-w3"]),
        ("solo,pod-w3", ["pod-w3", "solo-w0"]),
        ("pod!pod-w[1-3]", ["pod-w0"]),
        ("pod & pod-w[2-3]", ["pod-w2", "pod-w3"]),
        ("pod-w[0-1]^pod-w[1-2]", ["pod-w0", "pod-w2"]),
        ("twin.us-west4-a", ["twin.us-west4-a-w0"]),
        ("pod-w9", ["pod-w9-w0"]),
    ],
)
def test_targets(target, hosts):
    assert [worker.host for worker in targets.select(FLEET, target)] == hosts


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("po", ["'po'", "did you mean pod"]),
        ("twin", ["several nodes", "twin.us-central2-b or twin.us-west4-a"]),
        ("pod-w[0-7]", ["pod-w4"]),
        ("pod-w[", ["node set"]),
        ("", ["missing"]),
        ("pod,", ["missing"]),
        ("pod!pod", ["no worker"]),
        ("@all", ["'@all'"]),
        ("*", ["'*'", "known nodes"]),
    ],
)
def test_a_wrong_target_is_explained(target, words):
    with pytest.raises(UsageError) as caught:
        targets.select(FLEET, target)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_node_set_of_too_many_names_is_refused_before_it_is_made():
    workers = workers_of([node(count=2)])
    for target in ("pod-w[0-99999999]", "pod-w[0-9999]x[0-9999]", "pod-w[1" + "0" * 50 + "]", "pod-w[0-99999999"):
        begun = time.monotonic()
        with pytest.raises(UsageError, match="more than 100000 names"):
            targets.select(workers, target)
        assert time.monotonic() - begun < 1
    with pytest.raises(UsageError, match="pod has workers 0 to 1"):
        targets.select(workers, "pod-w[0-9]")
    with pytest.raises(UsageError) as caught:
        targets.select(workers, "x" * 100_000)
    assert len(str(caught.value)) < 500


def test_names_with_numbers_stand_in_their_natural_order():
    assert lifecycle.nearest("v4-12", ["v4-128", "v4-16", "v4-8", "v2-8"]) == "v2-8, v4-8, v4-16, v4-128"


def test_a_name_of_both_a_node_and_a_worker_is_ambiguous():
    workers = workers_of([node(count=2), node("pod-w0", node_id="2", count=1)])
    with pytest.raises(UsageError, match="pod-w0"):
        targets.select(workers, "pod-w0")


def test_an_empty_fleet_says_how_to_get_a_node():
    with pytest.raises(UsageError, match="tpu_ops create"):
        targets.select([], "pod")


def test_groups_are_valid_and_never_a_hosts_name():
    nodes = [node(), node("twin", node_id="3"), node("twin", zone="us-west4-a", node_id="4"), node("a-b", node_id="5")]
    groups = hostvars.groups(nodes)
    assert groups[nodes[0].full_name] == ("node_pod", "zone_us_central2_b", "type_v4_16", "state_ready")
    assert groups[nodes[2].full_name][0] == "node_twin_us_west4_a"
    names = {name for found in groups.values() for name in found}
    assert all(name.isidentifier() for name in names)
    assert not names & {worker.host for worker in workers_of(nodes)}


def test_nodes_whose_names_fall_together_have_groups_of_their_own():
    nodes = [node("a-b", node_id="1"), node("a_b", node_id="2")]
    first, second = (hostvars.groups(nodes)[entry.full_name][0] for entry in nodes)
    assert first != second
    assert first.startswith("node_a_b_")


def test_symptoms_are_told_to_the_worker_that_has_them():
    symptoms = ({"worker_id": "1", "type": "A"}, {"worker_id": "", "type": "B"})
    first, second = (hostvars.facts(worker)["symptoms"] for worker in workers_of([node(symptoms=symptoms)]))
    assert [entry["type"] for entry in first] == ["B"]
    assert [entry["type"] for entry in second] == ["A", "B"]


SCOPE = Scope(("lab",), (), "127.0.0.1:1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 1}',
        '{"version": 99, "scope": {}, "nodes": []}',
        '{"version": 1, "nodes": 7}',
    ],
)
def test_a_damaged_snapshot_is_no_snapshot(tmp_path, text):
    files = Files(tmp_path)
    files.snapshot.write_text(text)
    assert files.read_snapshot(SCOPE) is None


def test_a_snapshot_answers_only_its_own_question(tmp_path):
    files = Files(tmp_path)
    files.write_snapshot(SCOPE, Snapshot(1.0, (node(),)))
    assert files.read_snapshot(SCOPE) == Snapshot(1.0, (node(),))
    assert files.read_snapshot(dataclasses.replace(SCOPE, projects=("other",))) is None
    assert files.read_snapshot(dataclasses.replace(SCOPE, zones=("us-west4-a",))) is None
    assert files.snapshot.stat().st_mode & 0o777 == 0o600


def test_a_reader_never_sees_half_a_file(tmp_path):
    path, texts = tmp_path / "file", ["a" * 100_000, "b" * 100_000]
    replace(path, texts[0], 0o600)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                replace(path, text, 0o600)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        assert {path.read_text() in texts for _ in range(200)} == {True}
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_held_lock_is_waited_for_and_then_named(tmp_path):
    files = Files(tmp_path / "new")
    with files.lock(), pytest.raises(OpsError, match="another process"), files.lock(timeout=0.1):
        pass
    with files.lock(timeout=0.1):
        assert files.directory.stat().st_mode & 0o777 == 0o700


NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
NODES = st.lists(
    st.builds(
        node,
        name=NAMES,
        zone=st.sampled_from(["us-central2-b", "us-west4-a"]),
        project=st.sampled_from(["lab", "other"]),
        node_id=st.integers(1, 255).map(str),
        count=st.integers(0, 3),
        labels=st.dictionaries(st.text(), st.text(), max_size=3),
        state=st.sampled_from(["READY", "STOPPED", "77"]),
    ),
    max_size=8,
    unique_by=lambda entry: entry.full_name,
)


@given(NODES)
def test_any_fleet_survives_json(nodes):
    assert [Node.from_json(json.loads(json.dumps(entry.to_json()))) for entry in nodes] == nodes


@given(NODES)
def test_names_of_any_fleet_are_unique_and_without_order(nodes):
    labels = node_labels(nodes)
    assert labels == node_labels(reversed(nodes))
    assert len(set(labels.values())) == len(nodes)
    workers = workers_of(nodes)
    assert len({worker.host for worker in workers}) == len(workers)
    groups = hostvars.groups(nodes)
    assert len({found[0] for found in groups.values()}) == len(nodes)
    for worker in workers:
        if worker.label not in {other.host for other in workers}:
            assert worker in targets.select(workers, worker.label)
