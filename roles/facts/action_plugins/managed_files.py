"""Action that executes the module managed_files only if the worker's state differs from the entries.

It is an action and not a condition of each task, so that entries are compared in one place. The role facts has read the
state; for a path that it did not or could not read, the module is executed.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from ansible.plugins.action import ActionBase


def digest(text: str) -> str:
    """Return the SHA-256 of a text as a file holds it."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def done(entry: Mapping[str, Any], files: Mapping[str, Mapping[str, str]]) -> bool:
    """Given an entry of managed_files and `worker.files` of worker_facts, return whether it shows nothing to change."""
    found = files.get(entry["path"])
    state, content = entry.get("state", "file"), entry.get("content")
    if found is None:
        return False
    if state == "absent":
        return not found
    if state == "block" and not content:
        return not found or found.get("block") == ""
    if state == "link":
        return found == {"state": "link", "target": entry["target"]}
    # A block leaves a file's owner and mode as they are.
    mode = "0755" if state == "directory" else "0644"
    kept = {} if state == "block" else {"owner": "root", "group": "root", "mode": mode}
    wanted = kept | {key: str(entry[key]) for key in ("owner", "group", "mode") if entry.get(key)}
    wanted |= {"state": "file" if state == "block" else state}
    if "mode" in wanted:
        wanted["mode"] = wanted["mode"].zfill(4)
    if state == "block":
        wanted["block"] = digest(str(content).rstrip("\n"))
    elif entry.get("base64") is not None:
        wanted["digest"] = hashlib.sha256(base64.b64decode(entry["base64"])).hexdigest()
    elif state == "file" and content is not None and not entry.get("once"):
        wanted["digest"] = digest(content)
    return wanted.items() <= found.items()


class ActionModule(ActionBase):  # type: ignore[misc] # Ansible ships no types
    """Skips the module where nothing would change, and executes it otherwise."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Compare the entries with the worker's state; Ansible calls it."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        try:
            files = variables["ansible_facts"]["worker"]["files"]
            skipped = all(done(entry, files) for entry in self._task.args["files"])
        except (AttributeError, KeyError, TypeError, ValueError):
            skipped = False  # Nothing was read, or an entry is invalid; the module reports the fault.
        if skipped:
            return result | {"changed": False, "changed_paths": [], "skipped": True, "skip_reason": "as listed already"}
        return result | dict(self._execute_module(task_vars=task_vars))
