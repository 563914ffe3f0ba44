"""How faults in variables are found, placed and listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader

from playbooks.action_plugins import check_variables
from playbooks.action_plugins.check_variables import (
    Fault,
    Places,
    overridden_faults,
    place,
    subjects,
    type_faults,
    unknown_faults,
    unread_faults,
    unused_warnings,
    variable_files,
)
from playbooks.filter_plugins.variables import faults_listed
from tests.support.nodes import node
from tpu_ops.cloud.node import workers_of
from tpu_ops.fleet import hostvars

PERSON = {
    "type": "dict",
    "options": {
        "name": {"type": "str", "required": True},
        "keys": {"type": "list", "elements": "str", "default": []},
        "sudo": {"type": "str", "choices": ["none", "full"], "default": "none"},
        "uid": {"type": "int"},
    },
}
PEOPLE = {"type": "list", "elements": "dict", "options": PERSON["options"]}


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ({"type": "bool"}, False, []),
        ({"type": "bool"}, "yes", ["x: is a string and must be true or false"]),
        ({"type": "bool"}, 1, ["x: is a number (1) and must be true or false"]),
        ({"type": "int"}, 5, []),
        ({"type": "int"}, "5", ["x: is a string and must be an integer"]),
        ({"type": "int"}, True, ["x: is a boolean (true) and must be an integer"]),
        ({"type": "str"}, "a", []),
        ({"type": "str"}, 5, ["x: is a number (5) and must be a string; put it in quotes"]),
        ({"type": "path"}, 5, ["x: is a number (5) and must be a string; put it in quotes"]),
        ({"type": "str"}, 3.1, ["x: is a decimal number (3.1) and must be a string; put it in quotes"]),
        ({"type": "str", "no_log": True}, 3.1, ["x: is a decimal number and must be a string; put it in quotes"]),
        ({"type": "str", "no_log": True}, True, ["x: is a boolean and must be a string; put it in quotes"]),
        ({"type": "str"}, False, ["x: is a boolean (false) and must be a string; put it in quotes"]),
        ({"type": "path"}, ["a"], ["x: is a list and must be a string"]),
        ({"type": "str"}, None, ["x: is empty; give it a value or leave it out"]),
        ({"type": "str", "choices": ["a", "b"]}, "c", ["x: 'c' is not one of a, b"]),
        ({"type": "dict"}, {"a": None}, []),
        ({"type": "dict"}, [], ["x: is a list and must be a mapping"]),
        ({"type": "list", "elements": "str"}, "ab", ["x: is a string and must be a list"]),
        ({"type": "list", "elements": "str"}, ["a", ["b"]], ["x[1]: is a list and must be a string"]),
        ({"type": "list", "elements": "str", "choices": ["a"]}, ["a", "b"], ["x[1]: 'b' is not one of a"]),
        (PEOPLE, [{"name": "ada", "keys": ["a"], "sudo": "full", "uid": 5}], []),
        (PEOPLE, ["ada"], ["x[0]: is a string and must be a mapping"]),
        (
            PEOPLE,
            [{"name": "ada", "keys": None}, {"key": "a", "sudo": "all"}, {"name": "bob", "zzz": 1}],
            [
                "x[0].keys: is empty; give it a value or leave it out",
                "x[1].key: unknown key; did you mean keys?",
                "x[1].sudo: 'all' is not one of none, full",
                "x[1]: name is missing; add it",
                "x[2].zzz: unknown key; the keys are name, keys, sudo, uid",
            ],
        ),
    ],
)
def test_values_are_held_against_their_types_with_the_key(option: dict[str, Any], value: Any, said: list[str]) -> None:
    assert [fault.text for fault in type_faults("x", option, value)] == said


def test_a_role_s_own_checks_wait_for_types_and_not_for_keys() -> None:
    assert type_faults("x", PEOPLE, [{"name": 1.5}])[0].blocks
    assert not any(fault.blocks for fault in type_faults("x", PEOPLE, [{"key": 1, "sudo": "all"}]))
    assert Fault("x: y") == ("x: y", False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("disks_mounts", None),
        ("python_uv", None),
        ("git_seed", None),
        ("disks_mount", "disks_mount: no role has this variable; did you mean disks_mounts?"),
        ("disk_mounts", "disk_mounts: no role has this variable; did you mean disks_mounts?"),
        ("user_people", "user_people: no role has this variable; did you mean users_people?"),
        ("git_token", "git_token: no role has this variable; if it is your own, list it in facts_own_variables"),
        ("people", None),
        ("disk", None),
        ("diskless", None),
        ("groups", None),
        ("__users_people", None),
        ("ansible_users_people", None),
        ("tpu_users", None),
    ],
)
def test_misspelt_variables_are_told_from_people_s_own(name: str, said: str | None) -> None:
    known = ["disks_mounts", "users_people", "git_people", "python_uv"]
    faults = unknown_faults([name], ["disks", "git", "python", "users"], known, ["git_seed"])
    assert len(faults) == bool(said)
    assert all(fault.startswith(said or "") for fault in faults)


FILE = """\
users_people:
  - name: ada
    keys:
      - a
      - b
  - { name: bob }
count: 5
"""


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("users_people: is wrong", 2),
        ("users_people[0]: ada: is wrong", 2),
        ("users_people[0]: ada: keys[1] is wrong", 5),
        ("users_people[0].keys[1]: is wrong", 5),
        ("users_people[0].keys: is wrong", 3),
        ("users_people[1]: bob: keys[0] is wrong", 6),
        ("users_people[9]: is wrong", 2),
        ("count: is wrong", 7),
        ("count[0].x: is wrong", 7),
        ("other: is wrong", None),
        ("is wrong", None),
    ],
)
def test_a_fault_is_placed_at_the_line_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, line: int | None
) -> None:
    (tmp_path / "all.yml").write_text(FILE)
    values = DataLoader().load_from_file(str(tmp_path / "all.yml"))
    places = Places(values, [tmp_path / "all.yml"], DataLoader())
    assert place(fault, places) == (f"{tmp_path}/all.yml:{line}" if line else "")
    monkeypatch.chdir(tmp_path)
    assert place(fault, places) == (f"all.yml:{line}" if line else "")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"host_vars/w0.yml": "count: 4", "group_vars/all.yml": "\ncount: 5"}, "group_vars/all.yml:2"),
        ({"host_vars/w0.yml": "count: 5", "group_vars/all.yml": "count: 5"}, "host_vars/w0.yml:1"),
        ({"group_vars/all.yml": "other: {count: 5}"}, ""),
        ({"hosts.yml": "all:\n  hosts:\n    w0: {count: 4}\n    w1:\n      count: 5"}, "hosts.yml:5"),
        ({"group_vars/all.yml": "count: !vault x"}, "group_vars/all.yml:1"),
        ({"group_vars/all.yml": "count: ["}, ""),
    ],
)
def test_a_variable_is_placed_where_it_has_its_value(tmp_path: Path, files: dict[str, str], found: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    places = Places({"count": 5}, [tmp_path / name for name in files], DataLoader())
    assert place("count: is wrong", places) == (f"{tmp_path}/{found}" if found else "")


def test_files_that_may_hold_a_host_s_variables_are_found_nearest_first(tmp_path: Path) -> None:
    names = ["group_vars/all/a.yml", "group_vars/pod.yaml", "group_vars/other.yml", "host_vars/pod-w0.yml"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    variables = {"inventory_hostname": "pod-w0", "group_names": ["pod"], "inventory_dir": str(tmp_path)}
    assert [str(path.relative_to(tmp_path)) for path in variable_files(variables)] == [names[3], names[1], names[0]]


def test_values_that_another_value_overrides_are_held_against_their_types(tmp_path: Path) -> None:
    files = {
        "host_vars/w0.yml": "a: '3'\n",
        "group_vars/pod.yml": "a: 3.12\nb: {x: 1}\nc: '{{ 3 }}'\nd: !vault x\ne: 5\n",
        "group_vars/all.yml": "a: right\nb: right\nother: 3\n",
        "hosts.yml": "all: {hosts: {w0: {a: 3}}}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    strings = {name: {"type": "str"} for name in "abcde"}
    # e is not overridden: its fault is found among those of the values that count.
    values = {"a": "3", "b": "z", "c": "z", "d": "z", "e": 5, "other": 3}
    assert overridden_faults(values, [tmp_path / name for name in files], strings, DataLoader()) == [
        (f"{tmp_path}/group_vars/pod.yml:1", "a: is a decimal number (3.12) and must be a string; put it in quotes"),
        (f"{tmp_path}/group_vars/pod.yml:2", "b: is a mapping and must be a string"),
    ]


def test_variables_files_that_ansible_ignores_are_faults(tmp_path: Path) -> None:
    for name in ("group_vars/all/main.yml", "group_vars/all.yml", "group_vars/pod.yml", "group_vars/pod.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    variables = {"inventory_hostname": "pod-w0", "group_names": ["pod"], "inventory_dir": str(tmp_path)}
    assert unread_faults(variables) == [
        (
            tmp_path / "group_vars/pod.yaml",
            "this file is not read, since Ansible reads only pod.yml in the same directory; merge them into one file",
        ),
        (
            tmp_path / "group_vars/all.yml",
            "this file is not read, since Ansible reads only all/ in the same directory; move it into that directory",
        ),
    ]
    ansible = DataLoader().find_vars_files(str(tmp_path / "group_vars"), "all")
    assert ansible == [str(tmp_path / "group_vars/all/main.yml")]


@pytest.mark.parametrize(
    ("file", "meant"),
    [
        ("group_vars/all.yml", None),
        ("group_vars/all/main.yml", None),
        ("group_vars/team.json", None),
        ("group_vars/team.yml/main.yml", None),
        ("group_vars/node_away.yml", None),
        ("group_vars/team_audio.yml", None),
        ("group_vars/n2.yml", None),
        ("group_vars/README.md", None),
        ("group_vars/README", None),
        ("group_vars/.pod.yml", None),
        ("host_vars/pod-w0.yml", None),
        ("host_vars/pod-w12/main.yml", None),
        ("host_vars/host-13.yml", None),
        ("host_vars/localhost.yml", None),
        ("group_vars/pod.yml", "group pod; did you mean group_vars/node_pod?"),
        ("group_vars/node-pod.yml", "group node-pod; did you mean group_vars/node_pod?"),
        ("group_vars/node_my-pod.yml", "group node_my-pod; did you mean group_vars/node_my_pod?"),
        ("group_vars/type_v4-16.yml", "group type_v4-16; did you mean group_vars/type_v4_16?"),
        ("group_vars/node_pdo.yml", "group node_pdo; did you mean group_vars/node_pod?"),
        ("group_vars/node_pox.yml", "group node_pox; did you mean group_vars/node_pod?"),
        ("group_vars/node_dop.yml", None),
        ("group_vars/node_pood/main.yml", "group node_pood; did you mean group_vars/node_pod?"),
        ("group_vars/node_pod_b.yml", None),
        ("group_vars/node_box_b.yml", None),
        ("group_vars/type_v4_32.yml", None),
        ("group_vars/type_v5_16.yml", None),
        ("host_vars/pdo-w0.yml", "host pdo-w0; did you mean host_vars/pod-w0?"),
        ("host_vars/pod-w1.yml", None),
        ("group_vars/All.yaml", "group All; did you mean group_vars/all?"),
        ("group_vars/teams/main.yml", "group teams; did you mean group_vars/team?"),
        ("host_vars/pod.yml", "host pod; did you mean group_vars/node_pod?"),
        ("host_vars/pod_w0.yaml", "host pod_w0; did you mean host_vars/pod-w0?"),
    ],
)
def test_files_of_groups_and_hosts_that_are_almost_there_are_warned_of(
    file: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).parent.mkdir(parents=True)
    Path(file).touch()
    names = ("node_pod", "node_my_pod", "node_box_a", "type_v4_16", "team", "team_vision", "n1")
    groups = {name: ["pod-w0"] for name in names}
    shown = file.removesuffix("/main.yml")
    assert unused_warnings({"groups": groups | {"all": ["pod-w0", "host-12"]}, "inventory_dir": str(tmp_path)}) == (
        [f"{shown}: this file is not read, since the inventory has no {meant}"] if meant else []
    )


def test_transient_groups_and_workers_are_those_of_the_inventory_plugin() -> None:
    queued = node(queued_resource="big")
    (made,) = hostvars.groups([queued]).values()
    assert [name for name in made if not check_variables.OF_NODES.fullmatch(name)] == []
    assert {name.partition("_")[0] for name in made} == {"node", "zone", "type", "state", "queued"}
    assert all(check_variables.WORKER.fullmatch(worker.host) for worker in workers_of([queued]))


def check(*faults: tuple[str, str], waiting: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"faults": [{"place": place, "text": text} for place, text in faults], "waiting": list(waiting)}


@pytest.mark.parametrize(
    ("checks", "lines"),
    [
        ({"a-w0": check()}, []),
        ({"a-w0": check(("f:1", "x"))}, ["f:1: x (a-w0)"]),
        ({f"a-w{index}": check(("", "x")) for index in range(16)}, ["x (all 16 workers)"]),
        (
            {f"a-w{index}": check(("", "x")) for index in range(8)} | {"b-w0": check(("", "y"))},
            ["x (a-w[0-7])", "y (b-w0)"],
        ),
        (
            {"a-w0": check(("", "d"), ("f:10", "a"), ("f:9", "c[10]"), ("f:9", "c[9]"), ("e", "b"))},
            ["e: b (a-w0)", "f:9: c[9] (a-w0)", "f:9: c[10] (a-w0)", "f:10: a (a-w0)", "d (a-w0)"],
        ),
        (
            {"a-w0": check(("", "x"), waiting=("users",)), "a-w1": check(("", "x"), waiting=("git", "users"))},
            ["x (all 2 workers)", "git, users: more of these roles' checks run once the faults above are corrected"],
        ),
    ],
)
def test_faults_of_many_hosts_are_folded_and_ordered_by_file_and_line(checks: dict[str, Any], lines: list[str]) -> None:
    assert faults_listed(checks) == lines


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("count: a, b: is wrong", ["count: a, b: is wrong"]),
        ("count, other: 1, 2: is wrong", ["count: 1, 2: is wrong", "other: 1, 2: is wrong"]),
        ("a text, and more: is wrong", ["a text, and more: is wrong"]),
    ],
)
def test_a_fault_about_several_variables_is_looked_for_at_each(fault: str, said: list[str]) -> None:
    assert subjects(fault) == said
