"""Base class for modules that change a worker's files and systemd units; supports Python 3.8."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.mount_points import Mounted, parse_mounts, read
from ansible.module_utils.text_files import put
from ansible.module_utils.unit_settings import blocks

#: The properties of a unit that `Worker.unit` returns.
PROPERTIES = "ActiveState,UnitFileState,NeedDaemonReload,ActiveEnterTimestampMonotonic,StateChangeTimestampMonotonic"


def output(*command: str) -> str:
    """Return the output of a command; empty if the command is missing or fails."""
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
            errors="replace",
            timeout=60,
            env=dict(os.environ, LC_ALL="C", SYSTEMD_COLORS="0"),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def number(name: str, find: Callable[[str], Any]) -> int:
    """Return the uid or gid for a name or a number; -1 if there is no such account or group.

    Args:
        name: The name or number.
        find: `getpwnam` or `getgrnam`.
    """
    try:
        return int(name) if name.isdigit() else int(find(name)[2])
    except KeyError:
        return -1


class Worker:
    """A worker and the changes that a module makes to it; check mode only lists the changes."""

    #: The beginning of the module's error messages.
    about = ""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.actions: list[str] = []
        self.paths: set[str] = set()

    def run(self, *command: str, check: bool = True) -> tuple[int, str]:
        """Run a command and return its exit code and output; with `check`, end the module if the command fails."""
        code, out, err = self.module.run_command(list(command), environ_update={"LC_ALL": "C"})
        if code and check:
            self.fail("%s failed: %s" % (" ".join(command), (err or out).strip()))
        return code, out

    def fail(self, text: str) -> None:
        """End the module with an error."""
        self.module.fail_json(msg=self.about + text, actions=self.actions, changed=bool(self.actions))

    def act(self, text: str) -> bool:
        """Add a change to the module's results, and return whether to make it: check mode makes none."""
        self.actions.append(text)
        return not self.module.check_mode

    def end(self, **more: Any) -> None:
        """End the module successfully, with the list of changes as result and diff."""
        lines = "".join(line + "\n" for line in self.actions)
        diff = {"before": "", "after": lines}
        self.module.exit_json(changed=bool(self.actions), actions=self.actions, diff=diff, **more)

    def mounts(self) -> list[Mounted]:
        """Return the present mounts."""
        found: list[Mounted] = parse_mounts(read("/proc/self/mountinfo"))
        return found

    def unit(self, name: str) -> dict[str, str]:
        """Return systemd's properties of a unit."""
        found: dict[str, str] = blocks(self.run("systemctl", "show", "--property", PROPERTIES, name)[1])[0]
        return found

    def systemctl(self, action: str, name: str) -> None:
        """Start, stop, restart or reload a unit; on failure, end the module with the end of the unit's journal."""
        code, _ = self.run("systemctl", action, name, check=False)
        if code:
            journal = self.run("journalctl", "-u", name, "-n", "4", "-o", "cat", "--no-pager", check=False)[1]
            self.fail("systemctl %s %s failed: %s" % (action, name, " / ".join(journal.split("\n")).strip(" /")))

    def load(self, *names: str, written: bool) -> None:
        """Make systemd reload its units if this run, or an earlier interrupted run, has written any of these units."""
        if self.module.check_mode:
            return
        if written or any(self.unit(name)["NeedDaemonReload"] == "yes" for name in names):
            self.run("systemctl", "daemon-reload")

    def write(self, path: str, text: str, name: str = "") -> bool:
        """Write a text to a file of root that everybody can read; return whether the text changed.

        Args:
            path: The file.
            text: The text.
            name: The file's name in the list of changes; empty for the path.
        """
        found = os.stat(path, follow_symlinks=False) if os.path.lexists(path) else None
        attributes = found and (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode), stat.S_ISREG(found.st_mode))
        if read(path) == text and attributes == (0, 0, 0o644, True):
            return False
        self.paths.add(path)
        if self.act("write %s" % (name or path)):
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            put(path, text, 0o644, (0, 0))
        return True

    def remove(self, path: str, name: str = "") -> bool:
        """Remove a file and return whether it existed. The argument `name` is as in `write`."""
        if not os.path.lexists(path):
            return False
        self.paths.add(path)
        if self.act("remove %s" % (name or path)):
            os.unlink(path)
        return True
