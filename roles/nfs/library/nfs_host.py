#!/usr/bin/python
"""Module that has a worker export directories and mount those of others; runs on Python 3.8."""

from __future__ import annotations

import glob
import grp
import os
import platform
import pwd
import socket
import stat
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.mount_points import UNITS, Mounted, Refusal, read, unit_name
from ansible.module_utils.nfs_state import (
    LOG,
    PORT,
    SERVER_FILES,
    SERVICES,
    Entry,
    check_point,
    number,
    ours,
    parse_exportfs,
    parse_ganesha,
    parse_log,
    read_only,
    same,
)
from ansible.module_utils.nfs_worker import Worker

DOCUMENTATION = r"""
module: nfs_host
short_description: Export directories by NFS, and mount those of other hosts with systemd units
description:
  - Looks at everything first. If something cannot be done, nothing is changed, and every reason is named.
  - Files, services, units and mounts that differ from what is asked are put right; what this role left and is not asked
    for any more is stopped and removed.
options:
  kind: {description: Which server exports., type: str, choices: [kernel, ganesha], default: kernel}
  directories:
    description: What is exported; made where it is missing, and given owner, group and mode.
    type: list
    elements: dict
    default: []
    suboptions:
      path: {description: The directory., type: path, required: true}
      owner: {description: Name or number., type: str, required: true}
      group: {description: Name or number., type: str, required: true}
      mode: {description: Octal digits., type: str, required: true}
  files:
    description: The server's files; none means that this host serves nothing.
    type: list
    elements: dict
    default: []
    suboptions:
      path: {description: Where it is., type: path, required: true}
      content: {description: Its text., type: str, required: true}
      takes: {description: What takes it up., type: str, choices: [reload, restart, units], required: true}
  mounts:
    description: What is mounted.
    type: list
    elements: dict
    default: []
    suboptions:
      path: {description: Mount point., type: path, required: true}
      what: {description: What is mounted there., type: str, default: ""}
      server: {description: Address of its server; empty on the server itself., type: str, default: ""}
      server_name: {description: Inventory name of its server., type: str, default: ""}
      mount: {description: Text of the mount unit., type: str, default: ""}
      automount: {description: Text of the automount unit., type: str, default: ""}
      state: {description: Mounted or absent., type: str, choices: [mounted, absent], default: mounted}
  units_only: {description: Whether units of NFS mounts are written and not started., type: bool, default: false}
  wait: {description: How long servers may take to answer after a change in seconds., type: int, default: 30}
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Serve nothing and mount nothing any more
  nfs_host: {}
"""

RETURN = r"""
actions:
  description: What was or would be done, in order.
  type: list
  returned: always
changed_paths:
  description: Files that were or would be written or removed, sorted.
  type: list
  returned: always
"""


class NfsHost(Worker):  # type: ignore[misc] # Ansible alone knows module_utils
    """The module at work on one worker."""

    # Looking

    def check(self) -> list[str]:
        """Return why things cannot be done as asked."""
        parameters, refusals = self.module.params, []
        coming = [mount for mount in parameters["mounts"] if mount["state"] == "mounted"]
        if (
            not parameters["units_only"]
            and any(mount["server"] for mount in coming)
            and not self.kernel_has("nfs", "nfsv4")
        ):
            refusals.append(
                "nfs_mounts: the kernel %s has no NFS client, its module is nfsv4; boot a kernel that has it, or set"
                " nfs_client_units_only to have units written and not started" % platform.release()
            )
        if parameters["kind"] == "kernel" and parameters["files"] and not self.kernel_has("nfsd", "nfsd"):
            refusals.append(
                "nfs_exports: the kernel %s has no NFS server, its module is nfsd; boot a kernel that has it, or set"
                " nfs_server_kind: ganesha" % platform.release()
            )
        for export in parameters["directories"]:
            path = export["path"]
            if os.path.realpath(path) != path or (os.path.lexists(path) and not os.path.isdir(path)):
                refusals.append("nfs_exports: %s is not a directory, or behind a symbolic link" % path)
            for key, find in (("owner", pwd.getpwnam), ("group", grp.getgrnam)):
                # Check mode makes no accounts, so they may come yet.
                if number(export[key], find) < 0 and not self.module.check_mode:
                    refusals.append("nfs_exports: %s: there is no %s %s on this worker" % (path, key, export[key]))
        mounts = self.mounts()
        for mount in coming:
            try:
                check_point(mount["path"], mounts, mount["what"])
            except Refusal as exc:
                refusals.append("nfs_mounts: %s: %s" % (mount["path"], exc))
        return refusals

    def kernel_has(self, filesystem: str, name: str) -> bool:
        """Return whether the kernel knows a file system, or can load the module that brings it."""
        if any(line.split()[-1] == filesystem for line in read("/proc/filesystems").splitlines() if line.strip()):
            return True
        modprobe = self.module.get_bin_path("modprobe", opt_dirs=["/sbin", "/usr/sbin"])
        return bool(modprobe) and self.run(modprobe, "--dry-run", "--quiet", name, check=False)[0] == 0

    # The server

    def directory(self, export: Entry) -> None:
        """Have a directory with owner, group and mode."""
        path, mode = export["path"], int(export["mode"], 8)
        if not os.path.isdir(path) and self.act("make %s" % path):
            os.makedirs(path, mode=0o755)
        if not os.path.isdir(path):
            return
        found = os.stat(path)
        ids = (number(export["owner"], pwd.getpwnam), number(export["group"], grp.getgrnam))
        text = "give %s to %s:%s" % (path, export["owner"], export["group"])
        if ids != (found.st_uid, found.st_gid) and self.act(text):
            os.chown(path, *ids)
        # A change of owner may have cleared bits of the mode.
        if mode != stat.S_IMODE(os.stat(path).st_mode) and self.act("set the mode of %s to %04o" % (path, mode)):
            os.chmod(path, mode)

    def serve(self) -> None:
        """Have this host export what it is asked to, by the kind of server that is asked for."""
        kind, files = self.module.params["kind"], self.module.params["files"]
        for other in SERVICES:
            if other != kind or not files:
                self.withdraw(other)
        if not files:
            return
        for export in self.module.params["directories"]:
            self.directory(export)
        written = {entry["takes"] for entry in files if self.write(entry["path"], entry["content"])}
        name, log = SERVICES[kind], os.path.getsize(LOG) if os.path.exists(LOG) else 0
        state = self.unit(name)
        if ("units" in written or state["NeedDaemonReload"] == "yes") and not self.module.check_mode:
            self.run("systemctl", "daemon-reload")
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
        """Return whether a file was written after the service last took it up: a run may have died in between."""
        offset = time.time() - time.monotonic()
        times = [
            os.stat(each["path"]).st_mtime for each in files if each["takes"] == takes and os.path.exists(each["path"])
        ]
        return any(moment - offset > int(since or 0) / 1e6 for moment in times)

    def served(self, kind: str) -> list[str]:
        """Return the paths that the server says it exports."""
        if kind == "kernel":
            paths: list[str] = parse_exportfs(self.run("exportfs", "-s", check=False)[1])
            return paths
        call = ["call", "org.ganesha.nfsd", "/org/ganesha/nfsd/ExportMgr", "org.ganesha.nfsd.exportmgr", "ShowExports"]
        answer: list[str] = parse_ganesha(self.run("busctl", "--json=short", *call, check=False)[1])
        return answer

    def check_served(self, kind: str, log: int) -> None:
        """Wait until the server exports what it should; fail with what its log says past a number of bytes."""
        wanted = {export["path"] for export in self.module.params["directories"]}
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
        """Have what this role made for one kind of server stopped and removed."""
        paths = [*SERVER_FILES[kind], "%s/%s.d/tpu_ops.conf" % (UNITS, SERVICES[kind])]
        if not any(ours(path) for path in paths):
            return
        # Stopped before the files go: a run that dies in between does it again.
        name, others = SERVICES[kind], ""
        if kind == "kernel":
            tables = ["/etc/exports", *glob.glob("/etc/exports.d/*.exports")]
            rows = [line for path in tables if path not in paths for line in read(path).splitlines()]
            others = "".join(row for row in rows if row.strip() and not row.startswith("#"))
        state = self.unit(name)
        # A kernel's server that exports somebody else's directories goes on.
        if not others and state["ActiveState"] not in ("inactive", "failed") and self.act("stop %s" % name):
            self.systemctl("stop", name)
        if not others and state["UnitFileState"] == "enabled" and self.act("disable %s" % name):
            self.run("systemctl", "disable", "--quiet", name)
        if not others and not self.module.params["files"]:
            self.withdraw_helpers()
        removed = [path for path in paths if self.remove(path)]
        if removed and not self.module.check_mode:
            self.run("systemctl", "daemon-reload")
            if others:
                self.systemctl("reload", name)

    # The clients

    def mounted(self, mount: Entry) -> None:
        """Have an entry's units written, loaded and started."""
        remote, path = bool(mount["server"]), mount["path"]
        name, automount = unit_name(path, "mount"), unit_name(path, "automount")
        start = name if not remote else automount
        rewritten = self.write(os.path.join(UNITS, name), mount["mount"])
        if remote:
            armed = self.write(os.path.join(UNITS, automount), mount["automount"])
        else:
            armed = False
            # This host was a client until it became the server.
            self.leave(path, automount)
        if not self.module.check_mode:
            # Nothing to report where a run that died in between had written them.
            stale = any(self.unit(each)["NeedDaemonReload"] == "yes" for each in {name, start})
            if rewritten or armed or stale:
                self.run("systemctl", "daemon-reload")
        if remote and self.module.params["units_only"]:
            return
        target, other = ("remote-fs.target", "local-fs.target")[:: 1 if remote else -1]
        # This host was the server until it became a client: the mount itself was started at boot.
        if os.path.lexists("%s/%s.wants/%s" % (UNITS, other, name)) and self.act("disable %s" % name):
            self.run("systemctl", "disable", "--quiet", name)
        if not os.path.lexists("%s/%s.wants/%s" % (UNITS, target, start)) and self.act("enable %s" % start):
            self.run("systemctl", "enable", "--quiet", start)
        here = [each for each in self.mounts() if each.target == path and each.fstype != "autofs"]
        if not remote:
            self.change_local(mount, here)
            return
        self.change_remote(mount, here, rewritten=rewritten)
        if self.unit(automount)["ActiveState"] != "active":
            if self.act("start %s" % automount):
                self.systemctl("start", automount)
        elif armed and self.act("restart %s" % automount):
            self.systemctl("restart", automount)

    def change_local(self, mount: Entry, here: list[Mounted]) -> None:
        """Have a directory of this host at an entry's path, which is local: looking at it waits for nobody."""
        path, what = mount["path"], mount["what"]
        if here and not same(path, what) and self.act("unmount %s" % path):
            self.unmount(path, lazy=here[-1].fstype.startswith("nfs"))
            here = []
        if here and same(path, what):
            access = "ro" if read_only(what) or "Options=bind,ro\n" in mount["mount"] else "rw"
            if access != ("ro" if read_only(path) else "rw") and self.act("remount %s (%s)" % (path, access)):
                self.run("mount", "-o", "remount,bind," + access, path)
        elif not here and self.act("mount %s" % path):
            os.makedirs(path, mode=0o755, exist_ok=True)
            self.systemctl("start", unit_name(path, "mount"))

    def change_remote(self, mount: Entry, here: list[Mounted], *, rewritten: bool) -> None:
        """Have what is mounted at an entry's path end where it is not what the entry says; its next use mounts anew."""
        path = mount["path"]
        if here and here[-1].source != mount["what"]:
            # Its server does not answer there any more: an orderly unmount would wait for it.
            if self.act("unmount %s, which is from %s" % (path, here[-1].source)):
                self.unmount(path, lazy=True)
        elif (
            here
            and rewritten
            and self.act("unmount %s" % path)
            and (self.silent(mount["server"]) or self.run("umount", path, check=False)[0])
        ):
            self.module.warn("%s is in use, or its server silent; its new options hold from its next mount" % path)

    def unmount(self, path: str, *, lazy: bool) -> None:
        """Unmount what is at a path; where that is `lazy`, processes that have it open keep what is left of it."""
        if lazy:
            # Forced, so that waiting requests fail; without looking at the path, which could wait as well.
            self.run("umount", "--force", "--lazy", "--no-canonicalize", path, check=False)
            return
        code, out = self.run("umount", path, check=False)
        if code and any(each.target == path for each in self.mounts()):
            self.fail(
                "%s cannot be unmounted: %s"
                % (path, out.strip() or "it is in use; `fuser -vm %s` shows by whom" % path)
            )

    def leave(self, path: str, name: str) -> None:
        """Have a unit stopped, disabled and removed."""
        if not ours(os.path.join(UNITS, name)):
            return
        if self.unit(name)["ActiveState"] == "active" and self.act("stop %s" % name):
            self.systemctl("stop", name)
        if not self.module.check_mode:
            self.run("systemctl", "disable", "--quiet", name, check=False)
        self.remove(os.path.join(UNITS, name))

    def absent(self, path: str) -> None:
        """Have an entry unmounted, without its units and its mount point."""
        units = [unit_name(path, suffix) for suffix in ("automount", "mount")]
        if not any(ours(os.path.join(UNITS, name)) for name in units):
            return
        here = [each for each in self.mounts() if each.target == path and each.fstype != "autofs"]
        if here and self.act("unmount %s" % path):
            server = here[-1].source.rpartition(":/")[0].strip("[]") if here[-1].fstype.startswith("nfs") else ""
            self.unmount(path, lazy=bool(server) and self.silent(server) is not None)
        for name in units:
            self.leave(path, name)
        if not self.module.check_mode:
            self.run("systemctl", "daemon-reload")
        mounted = any(each.target == path for each in self.mounts())
        if not mounted and os.path.isdir(path) and not os.listdir(path) and self.act("remove %s" % path):
            os.rmdir(path)

    def silent(self, server: str) -> OSError | None:
        """Return why a server does not answer; None where it does.

        An orderly unmount of what is from a silent one may wait for ever.
        """
        try:
            socket.create_connection((server, PORT), timeout=5).close()
        except OSError as exc:
            return exc
        return None

    def check_servers(self, mounts: list[Entry]) -> None:
        """Wait until the servers of mounts answer; fail with all that do not."""
        deadline = time.monotonic() + self.module.params["wait"]
        names = {mount["server"]: mount["server_name"] for mount in mounts if mount["server"]}
        faults = []
        for server in sorted(names):
            exc = self.silent(server)
            while exc and time.monotonic() < deadline:
                time.sleep(0.5)  # polls the server until the deadline
                exc = self.silent(server)
            if exc:
                paths = ", ".join(mount["path"] for mount in mounts if mount["server"] == server)
                faults.append(
                    "%s: the server %s does not answer at %s:%d: %s" % (paths, names[server], server, PORT, exc)
                )
        if faults:
            self.fail(
                "nfs_mounts: %s. The units are in place, and a mount works once its server does. Is its node up?"
                " `systemctl status nfs-server nfs-ganesha` there says why, or a firewall is between them. If it is"
                " gone for good, list its mounts with state absent; --skip-tags nfs does the rest without it"
                % "; ".join(faults)
            )


def main() -> None:
    """Run the module."""
    text: dict[str, Any] = {"type": "str", "required": True}
    path: dict[str, Any] = {"type": "path", "required": True}
    optional: dict[str, Any] = {"type": "str", "default": ""}

    def entries(options: dict[str, Any]) -> dict[str, Any]:
        return {"type": "list", "elements": "dict", "default": [], "options": options}

    module = AnsibleModule(
        argument_spec={
            "kind": {"type": "str", "choices": sorted(SERVICES), "default": "kernel"},
            "directories": entries({"path": path, "owner": text, "group": text, "mode": text}),
            "files": entries(
                {"path": path, "content": text, "takes": {**text, "choices": ["reload", "restart", "units"]}}
            ),
            "mounts": entries(
                {
                    "path": path,
                    **dict.fromkeys(("what", "server", "server_name", "mount", "automount"), optional),
                    "state": {"type": "str", "choices": ["mounted", "absent"], "default": "mounted"},
                }
            ),
            "units_only": {"type": "bool", "default": False},
            "wait": {"type": "int", "default": 30},
        },
        supports_check_mode=True,
    )
    work, mounts = NfsHost(module), module.params["mounts"]
    refusals = work.check()
    if refusals:
        module.fail_json(msg="nothing was changed here; " + "; ".join(refusals), actions=[])
    work.serve()
    coming = [mount for mount in mounts if mount["state"] == "mounted"]
    for mount in mounts:
        if mount["state"] == "absent":
            work.absent(mount["path"])
    for mount in coming:
        work.mounted(mount)
    if not module.check_mode:
        work.check_servers(coming)
    listed = {unit_name(mount["path"], "mount") for mount in mounts}
    for unit in sorted(glob.glob(UNITS + "/*.mount")):
        if os.path.basename(unit) not in listed and ours(unit):
            module.warn("%s is not in nfs_mounts any more and stays; list it with state absent to unmount it" % unit)
    lines = "".join(line + "\n" for line in work.actions)
    module.exit_json(
        changed=bool(work.actions),
        actions=work.actions,
        changed_paths=sorted(work.paths),
        diff={"before": "", "after": lines},
    )


if __name__ == "__main__":
    main()
