"""What inventory hosts may be called, and what is said of those that cannot be reached."""

from __future__ import annotations

import pytest

from tests.support.nodes import node
from tpu_ops.errors import UsageError
from tpu_ops.fleet import hostnames, reach
from tpu_ops.fleet.model import workers_of
from tpu_ops.fleet.reach import Way

NONE, OTHER = "has no external address", "publishes no instance name"


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
        ("all", "something else to Ansible"),
        ("localhost", "something else to Ansible"),
        ("::1", "something else to Ansible"),
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


WORKERS = workers_of([node("solo", count=1), node("pod", count=5), *(node(f"n{i:04}", count=16) for i in range(1000))])


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ({}, []),
        ({"solo-w0": NONE}, [f"worker solo-w0 cannot be reached: it {NONE}"]),
        (
            {"pod-w0": NONE, "pod-w1": NONE, "pod-w2": NONE, "pod-w4": NONE, "solo-w0": NONE},
            [f"5 workers cannot be reached, each {NONE}: pod-w[0-2,4], solo-w0"],
        ),
        (
            {"pod-w0": NONE, "pod-w3": OTHER},
            [
                f"worker pod-w0 cannot be reached: it {NONE}",
                f"worker pod-w3 cannot be reached: it {OTHER}",
            ],
        ),
        (
            {worker.host: NONE for worker in WORKERS},
            [
                f"16006 workers cannot be reached, each {NONE}: "
                + ", ".join(f"n{i:04}-w[0-15]" for i in range(8))
                + " and those of 994 more nodes"
            ],
        ),
    ],
    ids=["none", "one", "some", "two reasons", "sixteen thousand"],
)
def test_workers_that_cannot_be_reached_are_named_in_one_line_for_each_reason(lacking, said):
    ways = [(worker, Way("", problem=lacking.get(worker.host, ""))) for worker in WORKERS]
    assert reach.problems(ways) == said
