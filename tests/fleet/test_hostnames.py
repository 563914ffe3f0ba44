"""The names of inventory hosts."""

from __future__ import annotations

import pytest

from tests.support.nodes import node
from tpu_ops.cloud.node import workers_of
from tpu_ops.errors import UsageError
from tpu_ops.fleet import hostnames


@pytest.mark.parametrize("name", ["pod-w0", "pod_1.example.org", "7", 7, "34.0.1.2", "2001:db8::1", "_x", "a" * 63])
def test_names_and_addresses_may_name_a_host(name):
    assert hostnames.problem(name, {"node_pod"}) == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "not valid"),
        (" pod", "not valid"),
        ("pod\n", "not valid"),
        ("pod w0", "not valid"),
        ("pod:22", "not valid"),
        ("pod,x", "not valid"),
        ("!pod", "not valid"),
        ("~pod.*", "not valid"),
        ("pod[0]", "not valid"),
        ("-pod", "not valid"),
        ("../pod", "not valid"),
        ("größe", "not valid"),
        ("fe80::1%eth0", "not valid"),
        ("fe80::1%{{ x }}\n\x1b[31mX,all", "not valid"),
        ("{{ x }}", "not valid"),
        ("x" * 300 + "!", "..."),
        ("all", "a special meaning for Ansible"),
        ("localhost", "a special meaning for Ansible"),
        ("::1", "a special meaning for Ansible"),
        ("node_pod", "is a group"),
        (None, "type NoneType"),
        (True, "type bool"),
        (1.5, "type float"),
        (["pod"], "type list"),
        ({"pod": 1}, "type dict"),
    ],
)
def test_anything_else_may_not(name, reason):
    found = hostnames.problem(name, {"node_pod"})
    assert reason in found
    assert len(found) < 160


def test_a_name_is_given_away_once():
    taken = hostnames.Taken("tpu_vm.yml, key 'hostnames'")
    taken.add("pod", "pod-w0")
    taken.add("pod", "pod-w0")
    with pytest.raises(UsageError, match=r"workers pod-w0 and pod-w1 would both be called 'pod'"):
        taken.add("pod", "pod-w1")


def test_a_duplicate_host_is_refused_whatever_the_hostvars_prefix():
    worker, other = workers_of([node(node_id="1", count=1), node("other", node_id="2", count=1)])[::-1]
    for there in ({}, {"ansible_ssh_common_args": "-o HostKeyAlias=mine"}, {"tpu_node_id": "2"}):
        hostnames.refuse_another("pod-w0", worker, there, "tpu_vm.yml")
    shown = {"ansible_ssh_common_args": f"-o HostKeyAlias={other.host_key_alias} -v"}
    with pytest.raises(UsageError, match=r"tpu_vm.yml: worker 0 of projects/.*/pod and tpu-2-w0, of another.*'pod-w0'"):
        hostnames.refuse_another("pod-w0", worker, shown, "tpu_vm.yml")
