"""Tasks of a role, run here on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROLES = Path(__file__).resolve().parents[2] / "roles"
#: What the role facts has for all others.
SHARED = {
    "ANSIBLE_LIBRARY": "facts/library",
    "ANSIBLE_MODULE_UTILS": "facts/module_utils",
    "ANSIBLE_ACTION_PLUGINS": "facts/action_plugins",
}


def run_tasks(
    folder: Path, role: str, names: list[str], variables: dict[str, Any], *argv: str
) -> subprocess.CompletedProcess[str]:
    """Run tasks of a role by their names, on a host pod-w0 that is this machine, and return what was printed.

    Args:
        folder: An empty directory.
        role: Whose tasks and filters.
        names: Of the tasks in its main.yml.
        variables: All that the tasks need. The role's own are not read: they name places of this machine.
        argv: More of the command line.
    """
    tasks = [task for task in yaml.safe_load((ROLES / role / "tasks/main.yml").read_text()) if task["name"] in names]
    assert len(tasks) == len(names)
    own = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    play = {"hosts": "all", "gather_facts": False, "vars": variables, "tasks": tasks}
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"pod-w0": own}}}))
    places = SHARED | {"ANSIBLE_FILTER_PLUGINS": f"{role}/filter_plugins"}
    return subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", "hosts.yml", *argv, "play.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {name: str(ROLES / place) for name, place in places.items()},
    )
