"""Action that executes the module managed_files only if the worker's files may differ from the listed entries.

The comparison is in this action and not in a condition of each task, so that it exists once. It uses the state that the
role facts has read; if that state lacks a listed path, the module is executed.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from ansible.plugins.action import ActionBase


def digest(text: str) -> str:
    """Return the SHA-256 of the bytes of a file with this text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def done(entry: Mapping[str, Any], files: Mapping[str, Mapping[str, str]]) -> bool:
    """Given an entry of managed_files and the fact `worker.files`, return whether nothing is to change."""
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
    # A block is part of a file of another owner, whose owner and mode stay as they are.
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
    """Executes the module managed_files on the worker, or skips it if the facts show that nothing is to change."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Compare the entries with the worker's facts; Ansible calls this method."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        try:
            files = variables["ansible_facts"]["worker"]["files"]
            skipped = all(done(entry, files) for entry in self._task.args["files"])
        except (AttributeError, KeyError, TypeError, ValueError):
            skipped = False  # The state was not read, or an entry is invalid, which the module then reports.
        if skipped:
            return result | {"changed": False, "changed_paths": [], "skipped": True, "skip_reason": "as listed already"}
        return result | dict(self._execute_module(task_vars=task_vars))
