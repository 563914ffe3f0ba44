"""An Ansible action for tests in which it does not matter what a task does, only that it changes something."""

from __future__ import annotations

from pathlib import Path

#: Writes a file on this machine, and starts no process; Ansible's copy takes a second of processor time for each host.
PUT = """\
from pathlib import Path

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        file, content = Path(self._task.args["path"]), self._task.args["content"]
        changed = not file.exists() or file.read_text() != content
        if changed and not self._task.check_mode:
            file.write_text(content)
        return {"changed": changed}
"""


def give_put(playbooks: Path) -> None:
    """Let the playbooks in a directory use the action `put`, with the arguments `path` and `content`."""
    folder = playbooks / "action_plugins"
    folder.mkdir()
    (folder / "put.py").write_text(PUT)
