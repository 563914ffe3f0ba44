"""The lines that facts.yml shows."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from playbooks.filter_plugins.workers import SHOWN, worker_lines

FACTS: dict[str, Any] = {
    "distribution": "Ubuntu",
    "distribution_version": "22.04",
    "architecture": "x86_64",
    "python": {"version_info": [3, 10, 12, "final", 0]},
    "worker": {
        "packages": {"tmux": "3.2", "zsh": "5.8"},
        "accounts": {
            "root": {"uid": 0},
            "ada": {"uid": 1001},
            "nobody": {"uid": 65534},
        },
        "groups": {"root": [], "ada": ["ada"], "research": ["ada"], "ssl-cert": ["nobody"]},
        "gids": {"root": 0, "ada": 1001, "research": 998, "ssl-cert": 110},
        "units": {},
        "hugepages": "always",
        "mounts": [
            {"target": "/", "fstype": "ext4"},
            {"target": "/boot/efi", "fstype": "vfat"},
            {"target": "/run/lock", "fstype": "tmpfs"},
            {"target": "/mnt/data", "fstype": "ext4"},
        ],
        "files": {
            "/usr/local/lib/tpu_ops/0123456789ab/tpu-host": {"state": "file"},
            "/opt/venvs/jax/lib/python3.12/site-packages/jax-0.10.2.dist-info/METADATA": {"state": "file"},
            "/opt/venvs/jax/lib/python3.12/site-packages/libtpu-0.0.42.dist-info/METADATA": {"state": "file"},
        },
    },
}
LINE = (
    "v4-16 us-central2-b READY, 4 chips, Ubuntu 22.04 x86_64, jax 0.10.2, launcher 0123456789ab, libtpu 0.0.42, "
    "Python 3.10.12, 2 packages, people ada, hugepages always, mounts /mnt/data, idle"
)


def fleet(count: int = 3) -> dict[str, dict[str, Any]]:
    return {
        f"pod-w{index}": {
            "tpu_node_label": "pod",
            "tpu_accelerator_type": "v4-16",
            "tpu_zone": "us-central2-b",
            "tpu_state": "READY",
            "tpu_chips_per_worker": 4,
            "ansible_facts": copy.deepcopy(FACTS),
        }
        for index in range(count)
    }


def test_each_worker_is_one_line():
    found = fleet(2)
    found["pod-w1"]["ansible_facts"]["worker"]["units"] = {"tpu-run.service": {"active": "active"}}
    assert worker_lines(found, found) == [
        f"pod-w0: {LINE}",
        f"pod-w1: {LINE.removesuffix('idle')}a run is active",
        "workers of a node do not differ",
    ]


def test_a_bare_worker_is_a_line_too():
    found = fleet(1)
    facts = found["pod-w0"]["ansible_facts"]["worker"]
    facts |= {"files": {}, "packages": {}, "accounts": {}, "mounts": [], "hugepages": ""}
    assert worker_lines(found, found)[0].endswith("Python 3.10.12, 0 packages, people none, idle")


def test_a_host_outside_of_nodes_has_a_line_and_is_not_compared():
    found = fleet(2)
    found["files"] = {"ansible_facts": copy.deepcopy(FACTS) | {"distribution_version": "24.04"}}
    lines = worker_lines(found, found)
    assert lines[2].startswith("files: not part of a node, Ubuntu 24.04 x86_64, ")
    assert lines[3:] == ["workers of a node do not differ"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda facts: facts["worker"]["packages"].update(tmux="3.4"), "package tmux: 3.4, others 3.2"),
        (lambda facts: facts["worker"]["packages"].pop("zsh"), "package zsh: none, others 5.8"),
        (lambda facts: facts["worker"]["packages"].update(mosh="1.4"), "package mosh: 1.4, others none"),
        (lambda facts: facts["worker"]["accounts"].pop("ada"), "person ada: none, others user id 1001"),
        (lambda facts: facts["worker"]["accounts"]["ada"].update(uid=1002), "person ada: user id 1002, others"),
        (
            lambda facts: facts["worker"]["gids"].update(research=997),
            "group research: group id 997, others",
        ),
        (lambda facts: facts["worker"]["mounts"].pop(), "mount /mnt/data: none, others ext4"),
        (lambda facts: facts.update(distribution_version="24.04"), "system: Ubuntu 24.04 x86_64, others Ubuntu 22.04"),
        (lambda facts: facts["worker"].update(files={}), "jax: none, others 0.10.2"),
        (lambda facts: facts["worker"].update(hugepages="madvise"), "hugepages: madvise, others always"),
    ],
)
def test_a_worker_that_differs_from_its_node_is_named_with_both_values(change, line):
    found = fleet()
    change(found["pod-w1"]["ansible_facts"])
    said = worker_lines(found, found)[3:]
    assert [text for text in said if text.startswith(f"pod-w1: {line}")]
    assert all(text.startswith("pod-w1: ") for text in said)


def test_nodes_are_compared_with_themselves_alone():
    found = fleet(2)
    found["solo-w0"] = copy.deepcopy(found["pod-w0"]) | {"tpu_node_label": "solo"}
    found["solo-w0"]["ansible_facts"]["worker"]["packages"] = {}
    assert worker_lines(found, found)[3:] == ["workers of a node do not differ"]


def test_many_differences_are_counted():
    found = fleet()
    found["pod-w2"]["ansible_facts"]["worker"]["packages"] = {f"package-{number}": "1" for number in range(SHOWN)}
    said = worker_lines(found, found)[3:]
    assert len(said) == SHOWN + 1
    assert said[-1] == "pod-w2: and 2 more"
