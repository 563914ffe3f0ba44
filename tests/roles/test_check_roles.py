from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.check_roles import (
    ROOT,
    apt_faults,
    check,
    check_apt,
    controller_faults,
    known,
    load,
    merged,
    order,
    overview,
    readme,
    role_faults,
    step_faults,
    with_value,
)

GOOD: dict[str, Any] = {
    "short_description": "Things",
    "description": ["Does O(things_list)."],
    "options": {
        "things_list": {
            "type": "list",
            "elements": "dict",
            "default": [],
            "description": "All | of them.",
            "options": {"name": {"type": "str", "required": True, "description": "Its name."}},
        },
        "things_on": {"type": "bool", "default": True, "description": "Whether."},
    },
}
DEFAULTS: dict[str, Any] = {"things_list": [], "things_on": True}


CHECK = {"name": "Check", "ansible.builtin.import_tasks": "validate.yml"}
INSTALL = {"name": "Install", "ansible.builtin.apt": {"name": "things", "lock_timeout": 5}}
APPLY = {"name": "Apply", "managed_files": {}}
REPORT = {"name": "Report", "ansible.builtin.debug": {}}
PROVE = {"name": "Prove", "ansible.builtin.fail": {}}


def changed(**options: Any) -> dict[str, Any]:
    return GOOD | {"options": GOOD["options"] | options}


@pytest.mark.parametrize(
    ("spec", "defaults", "fault"),
    [
        (GOOD, DEFAULTS, None),
        (GOOD, {"things_list": []}, "things_on is in argument_specs only"),
        (GOOD, DEFAULTS | {"things_zoo": 1}, "things_zoo is in defaults only"),
        (GOOD, DEFAULTS | {"things_on": 1}, "things_on defaults to 1"),
        (GOOD, {"things_on": True, "things_list": []}, "not sorted"),
        (changed(things_on={"type": "bool", "default": True}), DEFAULTS, "things_on has no description"),
        (changed(things_on={"type": "bool", "description": "x"}), DEFAULTS, "needs either a default or required"),
        (
            changed(things_z={"type": "list", "default": [], "description": "x"}),
            DEFAULTS | {"things_z": []},
            "without elements",
        ),
        (
            changed(z={"type": "str", "default": "", "description": "x"}),
            DEFAULTS | {"z": ""},
            "does not start with things_",
        ),
        (
            changed(things_z={"type": "dict", "default": {}, "description": "x", "options": {"a": {"type": "str"}}}),
            DEFAULTS | {"things_z": {}},
            "things_z.a has no description",
        ),
        (GOOD | {"short_description": ""}, DEFAULTS, "no short_description"),
        (
            changed(things_version={"type": "str", "default": "1.2", "description": "Version of things."}),
            DEFAULTS | {"things_version": "1.2"},
            "things_version: the description does not say where the default is from",
        ),
    ],
)
def test_disagreements_are_found(spec: dict[str, Any], defaults: dict[str, Any], fault: str | None) -> None:
    faults = role_faults("things", spec, defaults)
    assert faults == [] if fault is None else any(fault in found for found in faults)


def test_the_readme_lists_every_variable_and_option() -> None:
    text = readme("things", GOOD)
    assert text.startswith("# things\n\nThings.\n\nDoes `things_list`.\n")
    assert "| `things_list` | list of dict | `[]` | All \\| of them. |" in text
    assert "| `things_list[].name` | str | required | Its name. |" in text
    assert "| `things_on` | bool | `true` | Whether. |" in text


def test_a_readme_that_was_not_written_anew_is_found_and_mended(tmp_path: Path) -> None:
    role = tmp_path / "things"
    for folder in ("meta", "defaults", "tasks"):
        (role / folder).mkdir(parents=True)
    (role / "tasks" / "main.yml").write_text(yaml.safe_dump([CHECK, INSTALL, APPLY, PROVE]))
    (role / "meta" / "argument_specs.yml").write_text(yaml.safe_dump({"argument_specs": {"main": GOOD}}))
    (role / "defaults" / "main.yml").write_text(yaml.safe_dump(DEFAULTS))
    assert "does not depend on facts" in check(role, write=True)[0]
    (role / "meta" / "main.yml").write_text("dependencies: [facts]\n")
    assert "differs" in check(role, write=False)[0]
    assert check(role, write=True) == []
    assert check(role, write=False) == []
    (role / "README.md").write_text("by hand")
    assert "differs" in check(role, write=False)[0]


def test_a_role_without_specification_is_found(tmp_path: Path) -> None:
    assert "no entry point main" in check(tmp_path, write=True)[0]


def test_the_overview_lists_roles_in_the_order_in_which_they_run() -> None:
    plays = [
        {
            "roles": ["facts"],
            "tasks": [
                {"block": [{"ansible.builtin.import_role": {"name": "things", "tasks_from": "validate"}}]},
                {"ansible.builtin.import_role": {"name": "things", "tasks_from": "validate"}},
                {"ansible.builtin.import_role": {"name": "things"}},
                {"ansible.builtin.import_role": {"name": "base"}},
            ],
        }
    ]
    names = order(plays)
    assert names == ["facts", "things", "base"]
    roles = {name: {"short_description": f"About {name}"} for name in (*names, "alone")}
    rows = [line for line in overview(roles, names, {"base", "site"}).splitlines() if line.startswith("| [")]
    assert [row.split("]")[0] for row in rows] == ["| [facts", "| [things", "| [base", "| [alone"]
    assert rows[2] == "| [base](../roles/base/README.md) | About base | [base](../molecule/base/) |"
    assert rows[1].endswith("| [site](../molecule/site/) |")


def test_disks_and_exports_are_mounted_before_anything_is_placed_on_them() -> None:
    """A directory that is not empty is no mount point: an environment below one would keep its disk out for good."""
    names = order(load(ROOT / "playbooks" / "site.yml"))
    placed = [names.index(name) for name in ("python", "jax", "workspace")]
    assert names.index("users") < names.index("disks") < names.index("nfs") < min(placed)


@pytest.mark.parametrize(
    ("about", "tasks", "fault"),
    [
        ({}, [CHECK, INSTALL, REPORT, APPLY, APPLY, PROVE, REPORT], None),
        ({}, [CHECK, {"name": "Both", "block": [INSTALL, APPLY]}, PROVE], None),
        ({}, [INSTALL, CHECK, APPLY, PROVE], "'Check' belongs to the step check, but comes after a task of install"),
        ({}, [CHECK, {"block": [APPLY, INSTALL]}, PROVE], "'Install' belongs to the step install, but comes after"),
        ({}, [CHECK, INSTALL, PROVE, APPLY], "'Apply' belongs to the step apply, but comes after a task of prove"),
        ({}, [CHECK, INSTALL, APPLY], "no task of the step prove, and meta/tpu_ops.yml gives no reason"),
        ({"omitted": {"install": "files only"}}, [CHECK, APPLY, PROVE], None),
        ({"omitted": {"install": "files only"}}, [CHECK, INSTALL, APPLY, PROVE], "no step install, but there is one"),
        ({"steps": {"Apply": "prove"}, "omitted": {"apply": "none"}}, [CHECK, INSTALL, APPLY], None),
        ({"steps": {"Fill": "prove"}}, [CHECK], "meta/tpu_ops.yml names the task 'Fill', which does not exist"),
    ],
)
def test_every_role_goes_in_the_same_steps(
    about: dict[str, Any], tasks: list[dict[str, Any]], fault: str | None
) -> None:
    faults = step_faults(about, tasks)
    assert faults == [] if fault is None else any(fault in found for found in faults)


def test_facts_reads_what_all_roles_name() -> None:
    found = merged([{"files": ["/b", "/a"], "settings": {"b": "/b"}}, {}, {"files": ["/a"], "settings": {"a": "/a"}}])
    assert found["facts_files"] == ["/a", "/b"]
    assert found["facts_settings"] == {"a": "/a", "b": "/b"}


def test_facts_knows_what_roles_bring_and_where_they_look() -> None:
    about: dict[str, dict[str, Any]] = {
        "one": {"reads": {"mentions": {"word": ["/a"]}, "paths": ["/p"]}, "brings": {"packages": "{{ one_packages }}"}},
        "two": {"reads": {"files": ["/b"]}, "brings": {"groups": ["team"]}},
        "three": {},
    }
    assert known(about) == {
        "__facts_brought_groups": ["team"],
        "__facts_mentions": {"word": ["/a"]},
        "__facts_packages": {"one": "{{ one_packages }}"},
        "__facts_paths": ["/p"],
    }


@pytest.mark.parametrize(
    ("before", "key", "indent", "after"),
    [
        ("a: 1\nb: [x]\nc: 2\n", "b", 0, "a: 1\nb:\n  - y\n  - z\nc: 2\n"),
        ("b:\n  - x\n  - w\n", "b", 0, "b:\n  - y\n  - z\n"),
        (
            "  b:\n    type: list\n    default: [x]\n",
            " {2}b:\n(?: {4}.*\n)*? {4}default",
            4,
            "  b:\n    type: list\n    default:\n      - y\n      - z\n",
        ),
    ],
)
def test_a_value_is_replaced_in_the_text_of_a_file(before: str, key: str, indent: int, after: str) -> None:
    assert with_value(before, key, indent, ["y", "z"]) == after


def test_a_task_that_would_not_wait_for_apt_is_found_wherever_it_stands(tmp_path: Path) -> None:
    hasty = {"name": "Hurry", "ansible.builtin.apt": {"name": "things"}}
    assert apt_faults([INSTALL, APPLY]) == []
    assert apt_faults([{"name": "Any", "ansible.builtin.package": {}}]) != []
    block = {"block": [INSTALL], "rescue": [hasty]}
    for name, content in {
        "roles/a/tasks/main.yml": [hasty],
        "roles/a/handlers/main.yml": [block],
        "playbooks/a.yml": [{"hosts": "all", "tasks": [block]}, {"hosts": "all", "roles": ["a"]}],
        "playbooks/tasks/a.yml": [INSTALL, hasty],
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content))
        assert check_apt(tmp_path) == [f"{name}: 'Hurry': apt without lock_timeout"]
        path.unlink()


ABOUT_THINGS = {"controller": {"values": ["__things_text"], "tasks": {"things_on": "why"}, "anywhere": {}}}
THINGS = {
    "things_on": True,
    "__things_path": "{{ inventory_dir }}/things",
    "__things_text": "{{ lookup('ansible.builtin.file', __things_path) }}",
    "__things_file": {"content": "{{ __things_text }}", "state": "file", "groups": "{{ x.groups }}"},
}


@pytest.mark.parametrize(
    ("about", "variables", "fault"),
    [
        ({}, {}, None),
        # The path is read by a variable that the controller computes, and by nothing else.
        ({}, {"__things_faults": "{{ __things_path }}"}, "__things_path: only the controller can compute it"),
        ({"values": []}, {}, "__things_text: only the controller can compute it; list it in meta/tpu_ops.yml"),
        ({"values": [], "anywhere": {"__things_text": "why", "__things_path": "why"}}, {}, None),
        ({}, {"__things_file": "{{ __things_text ~ groups['all'] }}"}, "__things_file: only the controller"),
        ({}, {"__things_file": "{{ query('ansible.builtin.env', 'X') }}"}, "__things_file: only the controller"),
        ({}, {"__things_file": "{{ lookup('ansible.builtin.template', 'x.j2') }}"}, None),
        ({"tasks": {"things_off": "why"}}, {}, "controller: the role has no variable things_off"),
    ],
)
def test_what_only_the_controller_can_compute_is_listed(
    about: dict[str, Any], variables: dict[str, Any], fault: str | None
) -> None:
    roles = {"things": {"variables": THINGS | variables, "about": {"controller": ABOUT_THINGS["controller"] | about}}}
    faults = controller_faults(roles, "- name: Write\n  managed_files: '{{ __things_file }}'\n")
    assert faults == [] if fault is None else any(fault in found for found in faults)
