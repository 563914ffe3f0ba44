"""NFS exports of a worker: changes of directories, configuration files and services; supports Python 3.8."""

from __future__ import annotations

import glob
import grp
import os
import pwd
import time

from ansible.module_utils.guarded_paths import Refused, give, make_parents, open_directory
from ansible.module_utils.mount_points import UNITS, read
from ansible.module_utils.nfs_state import (
    LOG,
    SERVER_FILES,
    SERVICES,
    Entry,
    ours,
    parse_exportfs,
    parse_ganesha,
    parse_log,
)
from ansible.module_utils.worker import Worker, number


class Server(Worker):  # type: ignore[misc] # Ansible alone knows module_utils
    """A worker that exports the listed directories, and ends the exports that this role made earlier."""

    def directory(self, export: Entry) -> None:
        """Make or correct the directory of an export; if this fails, end the module with the reason."""
        try:
            self.change_directory(export)
        except Refused as exc:
            self.fail("nfs_exports: %s: %s" % (export["path"], exc))
        except OSError as exc:
            self.fail(
                "nfs_exports: %s: %s; if the directory is on a read-only file system, name an existing directory, with"
                " the owner, group"
                " and mode that it has now (`stat %s`)" % (export["path"], exc.strerror, export["path"])
            )

    def change_directory(self, export: Entry) -> None:
        """Make the directory of an export if it is missing, and set its owner, group and mode.

        Raises:
            Refused: A parent directory is a symbolic link that others than root could have created since the check.
            OSError: The directory cannot be made or changed.
        """
        path, mode = export["path"], int(export["mode"], 8)
        directory, missing = open_directory(path)
        try:
            if missing and not self.act("make %s" % path):
                return
            directory = make_parents(directory, missing)
            ids = (number(export["owner"], pwd.getpwnam), number(export["group"], grp.getgrnam))
            give(directory, path, who=(export["owner"], export["group"]), ids=ids, mode=mode, act=self.act)
        finally:
            os.close(directory)

    def serve(self) -> None:
        """Export the listed directories with the requested kind of server, and withdraw the other kind."""
        kind, files = self.module.params["kind"], self.module.params["files"]
        for other in SERVICES:
            if other != kind or not files:
                self.withdraw(other)
        for export in self.module.params["directories"]:
            self.directory(export)
        if not files:
            return
        written = {entry["takes"] for entry in files if self.write(entry["path"], entry["content"])}
        name, log = SERVICES[kind], os.path.getsize(LOG) if os.path.exists(LOG) else 0
        state = self.unit(name)
        self.load(written="units" in written or state["NeedDaemonReload"] == "yes")
        if state["UnitFileState"] != "enabled" and self.act("enable %s" % name):
            self.run("systemctl", "enable", "--quiet", name)
        changed = True
        if state["ActiveState"] != "active":
            action = "start"
        elif "restart" in written or self.newer(files, "restart", state["ActiveEnterTimestampMonotonic"]):
            action = "restart"
        elif "reload" in written or self.newer(files, "reload", state["StateChangeTimestampMonotonic"]):
            action = "reload"
        else:
            changed = False
        if changed and self.act("%s %s" % (action, name)):
            self.systemctl(action, name)
        if not self.module.check_mode:
            self.check_served(kind, log)

    def newer(self, files: list[Entry], takes: str, since: str) -> bool:
        """Return whether a file was written after the service last read it, because an earlier run was interrupted."""
        offset = time.time() - time.monotonic()
        times = [
            os.stat(each["path"]).st_mtime for each in files if each["takes"] == takes and os.path.exists(each["path"])
        ]
        return any(moment - offset > int(since or 0) / 1e6 for moment in times)

    def served(self, kind: str) -> list[str]:
        """Return the paths that the running NFS server exports."""
        if kind == "kernel":
            paths: list[str] = parse_exportfs(self.run("exportfs", "-s", check=False)[1])
            return paths
        call = ["call", "org.ganesha.nfsd", "/org/ganesha/nfsd/ExportMgr", "org.ganesha.nfsd.exportmgr", "ShowExports"]
        answer: list[str] = parse_ganesha(self.run("busctl", "--json=short", *call, check=False)[1])
        return answer

    def check_served(self, kind: str, log: int) -> None:
        """Wait until the server exports all directories; after the time limit, end the module with the server's errors.

        Args:
            kind: The kind of server.
            log: The size of nfs-ganesha's log before the change; only later errors are reported.
        """
        wanted = {export["path"] for export in self.module.params["directories"] if export["served"]}
        deadline = time.monotonic() + self.module.params["wait"]
        missing = wanted - set(self.served(kind))
        while missing and time.monotonic() < deadline:
            time.sleep(0.2)  # polls the server until the deadline
            missing = wanted - set(self.served(kind))
        if missing:
            said = read(LOG, log) if kind == "ganesha" else ""
            self.fail(
                "%s does not export %s: %s"
                % (
                    SERVICES[kind],
                    ", ".join(sorted(missing)),
                    " / ".join(parse_log(said)) or "see journalctl -u " + SERVICES[kind],
                )
            )

    def withdraw(self, kind: str) -> None:
        """End one kind of server's exports: stop and disable its service, and remove the files that this role wrote."""
        paths = [*SERVER_FILES[kind], "%s/%s.d/tpu_ops.conf" % (UNITS, SERVICES[kind])]
        if not any(ours(path) for path in paths):
            return
        name, others = SERVICES[kind], ""
        if kind == "kernel":
            tables = ["/etc/exports", *glob.glob("/etc/exports.d/*.exports")]
            rows = [line for path in tables if path not in paths for line in read(path).splitlines()]
            others = "".join(row for row in rows if row.strip() and not row.startswith("#"))
        state = self.unit(name)
        # The kernel's server keeps running if it also exports directories that this role does not manage.
        if not others and state["ActiveState"] not in ("inactive", "failed") and self.act("stop %s" % name):
            self.systemctl("stop", name)
        if not others and state["UnitFileState"] == "enabled" and self.act("disable %s" % name):
            self.run("systemctl", "disable", "--quiet", name)
        removed = [path for path in paths if ours(path) and self.remove(path)]
        if removed and not self.module.check_mode:
            self.run("systemctl", "daemon-reload")
            if others:
                self.systemctl("reload", name)
