"""The verdict on a slice, given the reports of its workers."""

from __future__ import annotations

from typing import Any

import pytest

from playbooks.filter_plugins.slices import line, nodes_say, runs_on, unfit_slices, verified

POD = [f"pod-w{index}" for index in range(4)]


def host(node: str, index: int, count: int, *, run: str = "") -> dict[str, Any]:
    units = {"tpu-run.service": {"active": run, "enabled": "transient"}} if run else {}
    return {
        "tpu_node_label": node,
        "tpu_worker_index": index,
        "tpu_worker_count": count,
        "tpu_chips": 4 * count,
        "ansible_facts": {"worker": {"units": units}},
    }


def fleet(**busy: str) -> dict[str, dict[str, Any]]:
    found = {name: host("pod", index, 4) for index, name in enumerate(POD)} | {"solo-w0": host("solo", 0, 1)}
    for name, state in busy.items():
        found[name.replace("_", "-")]["ansible_facts"]["worker"]["units"] = {"tpu-run.service": {"active": state}}
    return found


@pytest.mark.parametrize(
    ("busy", "asked", "silent", "words"),
    [
        ({}, [*POD, "solo-w0"], [], {}),
        ({}, ["solo-w0"], [], {}),
        (
            {},
            ["pod-w0", "pod-w2", "solo-w0"],
            [],
            {"pod": ["--limit leaves out pod-w1, pod-w3", "whole slices", "; include the whole node in --limit"]},
        ),
        (
            {},
            [*POD, "solo-w0"],
            ["pod-w2"],
            {"pod": ["pod-w2 does not answer; repair the connection, or leave out the node with --limit"]},
        ),
        ({"pod_w3": "active"}, [*POD, "solo-w0"], [], {"pod": ["a run is active on pod-w3", "tpu_ops stop"]}),
        ({"pod_w3": "deactivating"}, POD, ["pod-w1"], {"pod": ["a run is active on pod-w3"]}),
        ({"pod_w3": "failed"}, POD, [], {}),
        ({"solo_w0": "activating"}, [*POD, "solo-w0"], [], {"solo": ["a run is active on solo-w0"]}),
    ],
)
def test_slices_in_use_or_not_whole_are_named_with_the_workers_that_are_why(busy, asked, silent, words):
    alive = [name for name in asked if name not in silent]
    found = unfit_slices(asked, fleet(**busy), alive)
    assert sorted(found) == sorted(words)
    assert [(node, part) for node, parts in words.items() for part in parts if part not in found[node]] == []


def test_a_host_outside_of_nodes_belongs_to_no_slice():
    found = fleet() | {"files": {"ansible_facts": {"worker": {"units": {}}}}}
    assert unfit_slices([*POD, "files"], found, [*POD, "files"]) == {}
    assert verified(["files"], found, {}, "answer") == {}


def test_runs_are_found_where_they_are():
    assert runs_on([*POD, "solo-w0"], fleet(pod_w1="active", pod_w2="inactive")) == ["pod-w1"]


def report(**other: Any) -> dict[str, Any]:
    usual = {
        "rank": 0,
        "workers": 4,
        "platform": "tpu",
        "kind": "TPU v4",
        "chips": 16,
        "devices": 16,
        "right": True,
        "bytes": 64 * 2**20,
        "seconds": [0.002, 0.001, 0.003],
        "jax": "0.10.2",
    }
    return usual | other


def answered(**other: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = fleet()
    for name in POD:
        found[name]["answer"] = {"report": report(), "fault": ""}
    for name, answer in other.items():
        found[name.replace("_", "-")]["answer"] = answer
    return found


def test_a_slice_that_is_well_is_one_line_with_its_bandwidth():
    found = verified([*POD, "solo-w0"], answered(), {"solo": "not verified"}, "answer")
    assert list(found) == ["pod"]
    assert nodes_say(found, "faults") == []
    # 2 * 15 / 16 of 64 MiB in the 2 ms that are the median.
    expected = (
        "pod: 16 chips (TPU v4), 16 devices on 4 workers, JAX 0.10.2: all-reduce of 64 MiB right, 2 ms, "
        "bus bandwidth 62.9 GB/s"
    )
    assert nodes_say(found, "lines") == [expected]


def test_a_slice_of_several_is_said_to_be_verified_alone():
    found = answered()
    for name in POD:
        found[name] |= {"tpu_slice_index": 0, "tpu_queued_resource": "big"}
    lines = nodes_say(verified(POD, found, {}, "answer"), "lines")
    assert len(lines) == 2
    assert lines[1].startswith(
        "pod: the slice is one of several of big, verified alone: the network between them is not tested"
    )


def test_the_slowest_worker_counts():
    assert "4 ms" in line([report(), report(seconds=[0.004])])


def test_a_single_device_has_a_bus_bandwidth_of_0():
    assert line([report(devices=1, chips=1)]).endswith("bus bandwidth 0 GB/s")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({}, ["pod-w2: did not answer"]),
        ({"report": {}, "fault": "the script did not end within 180 s"}, ["pod-w2: the script did not end"]),
        ({"report": report(chips=15), "fault": ""}, ["pod-w2: chips 15, expected 16"]),
        ({"report": report(workers=8, chips=32), "fault": ""}, ["workers 8, expected 4", "chips 32, expected 16"]),
        ({"report": report(platform="cpu"), "fault": ""}, ["platform cpu, expected tpu"]),
        ({"report": report(right=False), "fault": ""}, ["pod-w2: the all-reduce over 16 devices returned a wrong sum"]),
    ],
)
def test_every_fault_names_its_worker_and_leaves_no_line_of_success(answer, words):
    found = verified(POD, answered(pod_w2=answer), {}, "answer")
    said = nodes_say(found, "faults")
    assert len(said) == len(words)
    assert [word for word in words if word not in " ".join(said)] == []
    assert nodes_say(found, "lines") == []


def test_chips_of_a_type_that_is_not_known_are_not_compared():
    found = answered()
    for name in POD:
        found[name]["tpu_chips"] = 0
    assert nodes_say(verified(POD, found, {}, "answer"), "faults") == []


def test_the_fleet_may_run_jax_on_cpu():
    found = answered(**{name.replace("-", "_"): {"report": report(platform="cpu"), "fault": ""} for name in POD})
    for name in POD:
        found[name]["jax_platform"] = "cpu"
    assert nodes_say(verified(POD, found, {}, "answer"), "faults") == []
