"""NFS mounts of a worker: changes of units and mounts, and checks of servers; supports Python 3.8."""

from __future__ import annotations

import os
import socket
import time

from ansible.module_utils.mount_points import UNITS, Mounted, unit_name
from ansible.module_utils.nfs_state import PORT, Entry, ours, read_only, same
from ansible.module_utils.worker import Worker


class Client(Worker):  # type: ignore[misc] # Ansible alone knows module_utils
    """A worker that mounts the exports of other hosts, and its own exports at the same paths as other hosts."""

    def mounted(self, mount: Entry) -> None:
        """Write, enable and start the units of an entry with state mounted, and correct what is mounted at its path."""
        remote, path = bool(mount["server"]), mount["path"]
        name, automount = unit_name(path, "mount"), unit_name(path, "automount")
        start = name if not remote else automount
        rewritten = self.write(os.path.join(UNITS, name), mount["mount"])
        if remote:
            armed = self.write(os.path.join(UNITS, automount), mount["automount"])
        else:
            armed = False
            # An automount unit exists if this host was a client before it became the server.
            self.leave(path, automount)
        self.load(*{name, start}, written=rewritten or armed)
        if remote and self.module.params["units_only"]:
            return
        target, other = ("remote-fs.target", "local-fs.target")[:: 1 if remote else -1]
        # The mount unit is enabled if this host was the server before it became a client.
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
        """Bind-mount a directory of this host at an entry's path. Accesses to this mount do not block."""
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
        """Unmount what is mounted at an entry's path if it differs from the entry; the next access mounts it again."""
        path = mount["path"]
        if here and here[-1].source != mount["what"]:
            # The unmount is lazy: the old server may not answer any more, and an orderly unmount would wait for it.
            if self.act("unmount %s, which is from %s" % (path, here[-1].source)):
                self.unmount(path, lazy=True)
        elif (
            here
            and rewritten
            and self.act("unmount %s" % path)
            and (self.silent(mount["server"]) or self.run("umount", path, check=False)[0])
        ):
            self.module.warn(
                "%s is in use, or its server does not answer; the new mount options take effect when the path is"
                " mounted again" % path
            )

    def unmount(self, path: str, *, lazy: bool) -> None:
        """Unmount what is mounted at a path. With `lazy`, this succeeds at once even if processes use the mount."""
        if lazy:
            # --force makes waiting requests fail; --no-canonicalize avoids access to the path, which could block as
            # well.
            self.run("umount", "--force", "--lazy", "--no-canonicalize", path, check=False)
            return
        code, out = self.run("umount", path, check=False)
        if code and any(each.target == path for each in self.mounts()):
            self.fail(
                "%s cannot be unmounted: %s"
                % (path, out.strip() or "the mount is in use; `fuser -vm %s` shows the processes that use it" % path)
            )

    def leave(self, path: str, name: str) -> None:
        """Stop, disable and remove one of this role's units."""
        if not ours(os.path.join(UNITS, name)):
            return
        if self.unit(name)["ActiveState"] == "active" and self.act("stop %s" % name):
            self.systemctl("stop", name)
        if not self.module.check_mode:
            self.run("systemctl", "disable", "--quiet", name, check=False)
        self.remove(os.path.join(UNITS, name))

    def absent(self, path: str) -> None:
        """Unmount an entry with state absent, and remove its units and its mount point."""
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
        """Try to connect to an NFS server; return the error, or None if the server answers.

        An orderly unmount from a server that does not answer may wait forever.
        """
        try:
            socket.create_connection((server, PORT), timeout=5).close()
        except OSError as exc:
            return exc
        return None

    def check_servers(self, mounts: list[Entry]) -> None:
        """Wait until the servers of all mounts answer; after the time limit, end the module with an error."""
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
                "nfs_mounts: %s. The units are in place, and a mount will work once its server answers. Check the"
                " server's node, the service on it (`systemctl status nfs-server nfs-ganesha`) and the firewall between"
                " the hosts. If the server is deleted for good, list its mounts with state absent; --skip-tags nfs runs"
                " the other roles without NFS" % "; ".join(faults)
            )
