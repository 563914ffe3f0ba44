"""An Ansible callback that writes the results of every task to a file, for programs that count tasks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: tasks_file
type: aggregate
short_description: Write what every task of a playbook run did to a file
description:
  - Writes one JSON list to the file that the environment variable TASKS_FILE names, with C(task), C(action), C(ran),
    C(changed), C(skipped), numbers of hosts, for every task that some host came to, in their order.
requirements:
  - TASKS_FILE is set
"""


class CallbackModule(CallbackBase):  # type: ignore[misc] # Ansible ships no types
    """Count hosts by task and write the numbers at the end of the playbook."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "tasks_file"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.tasks: dict[str, dict[str, Any]] = {}

    def _count(self, result: Any, key: str) -> None:
        task = result.task
        row = {"task": task.get_name(), "action": task.resolved_action or task.action}
        self.tasks.setdefault(task._uuid, row | {"ran": 0, "changed": 0, "skipped": 0})[key] += 1

    def v2_runner_on_ok(self, result: Any) -> None:
        """Count a host on which a task ran."""
        self._count(result, "ran")
        if result.result.get("changed"):
            self._count(result, "changed")

    def v2_runner_on_skipped(self, result: Any) -> None:
        """Count a host on which a task was skipped."""
        self._count(result, "skipped")

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Write the numbers."""
        del stats
        Path(os.environ["TASKS_FILE"]).write_text(json.dumps(list(self.tasks.values())))
