"""What a module does to a worker's files and units, one change at a time; runs on Python 3.8."""

from __future__ import annotations

import os
import stat
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.mount_points import Mounted, parse_mounts, read
from ansible.module_utils.nfs_state import ours, parse_show


class Worker:
    """A worker that a module changes, or in check mode only looks at."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.actions: list[str] = []
        self.paths: set[str] = set()

    def run(self, *command: str, check: bool = True) -> tuple[int, str]:
        """Run a command and return its exit code and what it printed; fail with what it said."""
        code, out, err = self.module.run_command(list(command), environ_update={"LC_ALL": "C"})
        if code and check:
            self.fail("%s failed: %s" % (" ".join(command), (err or out).strip()))
        return code, out

    def fail(self, text: str) -> None:
        """End the module with an error."""
        self.module.fail_json(msg=text, actions=self.actions, changed=bool(self.actions))

    def act(self, text: str) -> bool:
        """Write down a change and return whether it is to be made."""
        self.actions.append(text)
        return not self.module.check_mode

    def mounts(self) -> list[Mounted]:
        """Return what is mounted now."""
        found: list[Mounted] = parse_mounts(read("/proc/self/mountinfo"))
        return found

    def unit(self, name: str) -> dict[str, str]:
        """Return what systemd knows of a unit."""
        names = "ActiveState,UnitFileState,NeedDaemonReload,ActiveEnterTimestampMonotonic,StateChangeTimestampMonotonic"
        found: dict[str, str] = parse_show(self.run("systemctl", "show", "--property", names, name)[1])
        return found

    def systemctl(self, action: str, name: str) -> None:
        """Start, stop, restart or reload a unit; fail with the end of its journal."""
        code, _ = self.run("systemctl", action, name, check=False)
        if code:
            journal = self.run("journalctl", "-u", name, "-n", "4", "-o", "cat", "--no-pager", check=False)[1]
            self.fail("systemctl %s %s failed: %s" % (action, name, " / ".join(journal.split("\n")).strip(" /")))

    def write(self, path: str, text: str) -> bool:
        """Have a file hold a text; return whether it was another one."""
        found = os.stat(path, follow_symlinks=False) if os.path.lexists(path) else None
        attributes = found and (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode), stat.S_ISREG(found.st_mode))
        if read(path) == text and attributes == (0, 0, 0o644, True):
            return False
        self.paths.add(path)
        if self.act("write %s" % path):
            directory = os.path.dirname(path)
            os.makedirs(directory, mode=0o755, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=directory, prefix=".tpu_ops.")
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.chmod(temporary, 0o644)
            os.chown(temporary, 0, 0)
            os.replace(temporary, path)
        return True

    def remove(self, path: str) -> bool:
        """Have a file gone that this role wrote; return whether it was there."""
        if not ours(path):
            return False
        self.paths.add(path)
        if self.act("remove %s" % path):
            os.unlink(path)
        return True
