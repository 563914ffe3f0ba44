"""Which host keys are asked for, learnt, kept and refused."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from google.cloud import tpu_v2

from tests.support.nodes import key, node
from tpu_ops.cloud import client
from tpu_ops.cloud.node import workers_of
from tpu_ops.cloud.pages import PATIENCE
from tpu_ops.ssh import guest_attributes, host_keys, known_hosts


@pytest.mark.parametrize(
    ("kind", "blob"),
    [
        ("ssh-ed25519", "not base64"),
        ("ssh-ed25519", ""),
        ("ssh-rsa", key("a")),
        ("ssh-ed25519", key("a") + "\nevil ssh-rsa AAAA"),
        ("ssh-ed25519\n", key("a")),
        ("ssh ed25519", key("a", "ssh ed25519")),
        ("ssh-ed25519", key("a")[:40]),
        ("ssh-ed25519", key("a")[:20]),
        ("ssh-ed25519", key("a") + "AAAA"),
    ],
)
def test_a_published_key_of_another_form_is_no_key(kind, blob):
    assert not known_hosts.valid_key(kind, blob)
    assert known_hosts.valid_key("ssh-ed25519", key("a"))


def test_keys_of_replaced_nodes_are_dropped_and_of_hidden_nodes_kept():
    now = workers_of([node(node_id="2", state="STOPPED"), node("other", node_id="3")])
    known = {f"tpu-{alias}": {"ssh-ed25519": key(alias)} for alias in ("1-w0", "2-w0", "2-w7", "3-w0", "11-w0")}
    learned = {"tpu-3-w1": {"ssh-ed25519": key("x")}, "tpu-4-w0": {"ssh-ed25519": key("nobody's")}}
    merged = host_keys.merge(known, learned, now, Path("known_hosts"), replaced={"1"})
    assert sorted(merged) == ["tpu-11-w0", "tpu-2-w0", "tpu-2-w7", "tpu-3-w0", "tpu-3-w1"]


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
        with pytest.raises(host_keys.HostKeyAlarm, match="pod-w0"):
            host_keys.merge({"tpu-1-w0": old}, {"tpu-1-w0": new}, workers, Path("known_hosts"))
    else:
        assert host_keys.merge({"tpu-1-w0": old}, {"tpu-1-w0": new}, workers, Path("kh"))["tpu-1-w0"] == old | new


def test_only_nodes_with_an_unknown_worker_are_asked_for_keys():
    workers = workers_of([node(), node("half", node_id="2"), node("off", node_id="3", state="STOPPED")])
    known: dict[str, known_hosts.Keys] = {"tpu-1-w0": {}, "tpu-1-w1": {}, "tpu-2-w0": {}}
    assert [found.name for found in guest_attributes.wanted(workers, known, verify=False)] == ["half"]
    assert [found.name for found in guest_attributes.wanted(workers, known, verify=True)] == ["half", "pod"]


def test_a_serving_node_without_keys_is_named():
    workers = workers_of([node(), node("off", node_id="3", state="STOPPED")])
    warnings = host_keys.missing(
        workers, {"tpu-1-w0": {}}, {"projects/lab/locations/us-central2-b/nodes/pod": "denied"}
    )
    assert len(warnings) == 1
    assert all(word in warnings[0] for word in ("node pod", "pod-w1", "denied", "`tpu_ops refresh --trust-first pod`"))
    assert "pod-w0" not in warnings[0]


def test_nodes_that_cannot_be_asked_in_time_have_that_as_their_reason(monkeypatch):
    """Each answers only just within its own time."""
    clock = itertools.count(0, 50)
    answer = tpu_v2.GetGuestAttributesResponse(guest_attributes=[{}, {}])
    tpu = client.Tpu(SimpleNamespace(get_guest_attributes=lambda **call: answer), "", 60, threading.Event())
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    nodes = [node(f"n{number}", node_id=str(number)) for number in range(9)]
    reasons = guest_attributes.fetch(tpu, nodes).reasons
    # Threads ask the nodes, in an order that differs from run to run.
    assert len(reasons) == len(nodes) - PATIENCE * 60 // 50
    assert {reason.partition(":")[0] for reason in reasons.values()} == {"the API was not asked"}


def test_a_key_that_differs_from_first_contact_is_an_alarm():
    workers, known = workers_of([node()]), {"tpu-1-w0": {"ssh-ed25519": key("a")}}
    with pytest.raises(host_keys.HostKeyAlarm, match="trusted on first contact") as caught:
        host_keys.merge(known, {"tpu-1-w0": {"ssh-ed25519": key("b")}}, workers, Path("/a b/kh"), {"tpu-1-w0"})
    assert "ssh-keygen -R tpu-1-w0 -f '/a b/kh'" in caught.value.fix
    assert caught.value.exit_code != 0
