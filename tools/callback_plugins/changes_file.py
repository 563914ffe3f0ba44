"""An Ansible callback that appends the changes of a playbook run to a file, for programs that compare runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: changes_file
type: aggregate
short_description: Add what a playbook run changed to a file
description:
  - Adds one line of JSON per run to the file that the environment variable CHANGES_FILE names, with C(scenario),
    C(playbook), C(check), C(failed), C(changed), a list of [task, host, paths, details], C(ran), [task, host] of all
    that was not skipped, and C(handlers). Paths are what the task returned as C(changed_paths), details what else it
    names of what it changed, and which items of a loop it changed.
requirements:
  - CHANGES_FILE is set
"""

#: Keys under which modules list what they change, in check mode as well.
LISTS = ("actions", "added", "files", "removed")


def details(values: dict[str, Any]) -> list[str]:
    """Return the changes that a task's result or a loop's item names, except paths."""
    found = [str(entry) for key in LISTS if isinstance(values.get(key), list) for entry in values[key]]
    environments = values.get("environments")
    if environments == {}:  # only Pythons were installed: the result names them
        found += values.get("missing_pythons", [])
    for name, state in environments.items() if isinstance(environments, dict) else ():
        found += [f"{name}: {line}" for line in state["plan"]]
    return found


class CallbackModule(CallbackBase):  # type: ignore[misc] # Ansible ships no types
    """Collect changed tasks and write them at the end of the playbook."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "changes_file"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.playbook = ""
        self.changed: list[tuple[str, str, list[str], list[str]]] = []
        self.items: dict[tuple[str, str], list[str]] = {}
        self.ran: set[tuple[str, str]] = set()
        self.handlers: set[str] = set()

    def v2_playbook_on_start(self, playbook: Any) -> None:
        """Keep the playbook's name."""
        self.playbook = Path(playbook._file_name).name

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        """Keep a handler's name."""
        self.handlers.add(task.get_name())

    def v2_runner_item_on_ok(self, result: Any) -> None:
        """Keep the changes of a loop's item until its task ends."""
        values = result.result
        if values.get("changed"):
            label = str(self._get_item_label(values))
            named = [f"{label}: {detail}" for detail in details(values)]
            self.items.setdefault((result.task._uuid, result.host.get_name()), []).extend(named or [label])

    def v2_runner_on_ok(self, result: Any) -> None:
        """Keep a task that ran, and its changes."""
        values, task, host = result.result, result.task.get_name(), result.host.get_name()
        self.ran.add((task, host))
        items = self.items.pop((result.task._uuid, host), [])
        if values.get("changed"):
            paths = [str(path) for path in values.get("changed_paths", [])]
            self.changed.append((task, host, paths, sorted([*details(values), *items])))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Append the run to the file."""
        record = {
            "scenario": os.environ.get("MOLECULE_SCENARIO_NAME", ""),
            "playbook": self.playbook,
            "check": bool(context.CLIARGS.get("check")),
            "failed": sorted({*stats.failures, *stats.dark}),
            "changed": sorted(self.changed),
            "ran": sorted(self.ran),
            "handlers": sorted(self.handlers),
        }
        with Path(os.environ["CHANGES_FILE"]).open("a") as stream:
            stream.write(json.dumps(record) + "\n")
