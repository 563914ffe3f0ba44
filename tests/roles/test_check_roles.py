from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.check_roles import check, order, overview, readme, role_faults

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
    for folder in ("meta", "defaults"):
        (role / folder).mkdir(parents=True)
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
