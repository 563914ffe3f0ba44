"""What a run wrote that was killed before it restarted the service: the next run has no changed file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

ROLES = Path(__file__).parents[2] / "roles"


def holds(task: dict[str, Any], variables: dict[str, Any]) -> bool:
    """Return whether all conditions of a task hold."""
    conditions = task.get("when", [])
    conditions = conditions if isinstance(conditions, list) else [conditions]
    templar = Templar(DataLoader(), variables)
    return all(templar.evaluate_conditional(condition) for condition in conditions)


@pytest.mark.parametrize(
    ("role", "unit", "handlers"),
    [
        ("base", "", []),
        ("base", "systemd-logind.service", []),
        ("base", "systemd-journald.service", ["Restart systemd-journald"]),
        ("base", "systemd-timesyncd.service", ["Restart systemd-timesyncd"]),
        ("base", "apt-daily.service", ["Read the units again"]),
        ("launcher", "", []),
        ("launcher", "systemd-journald.service", []),
        ("launcher", "systemd-logind.service", ["Restart systemd-logind"]),
    ],
)
def test_a_restart_that_a_killed_run_owed_is_made(role: str, unit: str, handlers: list[str]) -> None:
    def load(name: str) -> Any:
        return DataLoader().load_from_file(str(ROLES / role / name), trusted_as_template=True)

    variables: dict[str, Any] = load("vars/main.yml") | {
        "ansible_facts": {"worker": {"behind": [unit] if unit else []}},
        "ansible_check_mode": False,
        "base_time_sync": True,
        "__base_clock": {"package": "systemd-timesyncd", "unit": "systemd-timesyncd.service"},
        "__base_clock_unit": {"enabled": "enabled", "active": "active"},
        "__base_written": {"changed_paths": []},
        "__launcher_managed": {"changed_paths": []},
    }
    (notifying,) = (task for task in load("tasks/main.yml") if "notify" in task and task.get("changed_when"))
    assert holds(notifying, variables) is bool(handlers)
    found = [task for task in load("handlers/main.yml") if holds(task, variables)]
    assert [task["name"] for task in found] == handlers
    assert {task.get("listen", task["name"]) for task in found} <= {notifying["notify"]}
