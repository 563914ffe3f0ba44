"""The differences between two views of a fleet."""

from __future__ import annotations

from tests.support.nodes import node
from tpu_ops.cloud.node import node_labels
from tpu_ops.fleet.diff import AddressChange, NameChange, StateChange, diff


def labelled(nodes):
    return nodes, node_labels(nodes)


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


def test_names_that_change_because_another_node_has_the_same_are_told():
    twin = node(zone="us-east1-d", node_id="2")
    changes = diff(labelled([node()]), labelled([node(), twin]))
    assert changes.new == ("pod.us-east1-d",)
    assert changes.news()[1:] == ["renamed    pod -> pod.us-central2-b"]
    assert diff(labelled([node(), twin]), labelled([node()])).renamed == (NameChange("pod.us-central2-b", "pod"),)
    # Also where the filters hide the other one.
    hidden = diff(labelled([node()]), ([node()], node_labels([node(), twin])))
    assert hidden
    for host in ("pod-w0", "pod.us-central2-b-w1"):
        assert hidden.about([host]) == hidden
    assert not hidden.about(["other-w0"])


def test_no_change_is_no_news_and_the_first_look_neither():
    assert not diff(labelled([node()]), labelled([node()]))
    first = diff(None, labelled([node()]))
    assert (first.first, first.new, first.news()) == (True, ("pod",), [])
